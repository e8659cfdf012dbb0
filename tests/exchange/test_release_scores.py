"""A checkpoint of the release's layout is scored as by reference computations in plain numpy, torch and scikit-learn."""

import io
from dataclasses import replace

import numpy as np
import PIL.Image
import pytest
import torch
import torch.nn.functional as F
from release_files import HEADS, release, tokens_by_definition, without_prefix
from rich.console import Console

from stop_mim.data.augment import IMAGENET_MEAN, IMAGENET_STD
from stop_mim.evaluation.config import evaluate_config
from stop_mim.evaluation.evaluate import evaluate
from stop_mim.evaluation.propagation import PropagationConfig
from stop_mim.evaluation.tasks.video import VideoOptions
from stop_mim.training.config import SpeedConfig

PATCH, GRID = 16, 4


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """The path of a checkpoint, and a function that gives the tokens of its target encoder by definition."""
    monkeypatch.setenv("STOP_MIM_CACHE", str(tmp_path / "cache"))
    contents = release(patch=PATCH, grid=GRID)
    torch.save(contents, tmp_path / "vit-b16.pth.tar")
    return tmp_path / "vit-b16.pth.tar", without_prefix(contents["target_encoder"])


def tokens(state, image):
    """Normed patch tokens of an image of bytes, (height, width, 3); positions are interpolated bicubically."""
    normalised = (image / 255 - IMAGENET_MEAN) / IMAGENET_STD
    batch = torch.from_numpy(normalised).float().permute(2, 0, 1)[None]
    table = state["pos_embed"].view(1, GRID, GRID, -1).permute(0, 3, 1, 2)
    size = (image.shape[0] // PATCH, image.shape[1] // PATCH)
    resized = F.interpolate(table, size, mode="bicubic", antialias=True).flatten(2).transpose(1, 2)
    return tokens_by_definition({**state, "pos_embed": resized}, batch, HEADS[192])[0]


def scores(path, **options):
    config = evaluate_config()(speed=SpeedConfig(device="cpu", workers=0), **options)
    (found,) = evaluate([str(path)], config, Console(file=io.StringIO()))
    return found


# Video object segmentation, as DINO's evaluation does it

FRAME, SHORT_SIDE, SIZE, WINDOW, CONTEXT = (40, 110), 64, (64, 128), 2, 3


@pytest.fixture
def video():
    """Seven frames that drift, and the first mask: two objects and background."""
    random = np.random.default_rng(0)
    wide = random.integers(0, 256, (6, 20, 3)).astype(np.uint8)
    still = np.asarray(PIL.Image.fromarray(wide).resize((160, 40), PIL.Image.Resampling.BICUBIC))
    frames = [still[:, 6 * index : 6 * index + FRAME[1]] for index in range(7)]
    mask = np.zeros(FRAME, dtype=np.uint8)
    mask[4:30, 10:50], mask[12:40, 60:100] = 1, 2
    return frames, mask


def write_video(folder, frames, mask):
    (folder / "JPEGImages/480p/bear").mkdir(parents=True)
    (folder / "Annotations/480p/bear").mkdir(parents=True)
    for index, frame in enumerate(frames):
        PIL.Image.fromarray(frame).save(folder / f"JPEGImages/480p/bear/{index:05d}.png")
        # The true masks do not matter: only the first is seen.
        PIL.Image.fromarray(mask).save(folder / f"Annotations/480p/bear/{index:05d}.png")


def lines_between(old, new):
    """A matrix that interpolates linearly between the centres of pixels."""
    places = ((np.arange(new) + 0.5) * old / new - 0.5).clip(0, old - 1)
    return np.clip(1 - np.abs(places[:, None] - np.arange(old)), 0, None)


def interpolated(image, size):
    rows, columns = (lines_between(old, new) for old, new in zip(image.shape[:2], size, strict=True))
    return np.einsum("yh,hwc,xw->yxc", rows, image, columns)


def nearest(mask, size):
    return np.asarray(PIL.Image.fromarray(mask).resize(size[::-1], PIL.Image.Resampling.NEAREST))


def next_labels(features, context, grid):
    """Labels of a frame: of each patch's five nearest among the frames of the context, exp(cosine / 0.1) their weight."""
    rows, columns = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    near = np.maximum(abs(rows[:, None] - rows), abs(columns[:, None] - columns)) <= WINDOW
    affinity = np.concatenate([np.exp(features @ other.T / 0.1) * near for other, _ in context], axis=1)
    affinity[affinity < np.sort(affinity, axis=1)[:, -5:-4]] = 0
    return affinity / affinity.sum(1, keepdims=True) @ np.concatenate([labels for _, labels in context])


def masks_by_definition(state, frames, mask):
    grid = (SIZE[0] // PATCH, SIZE[1] // PATCH)
    before, found = [], []
    for frame in frames:
        features = tokens(state, np.rint(interpolated(frame, SIZE))).double().numpy()
        features /= np.linalg.norm(features, axis=1, keepdims=True)
        if not before:
            before.append((features, np.eye(3)[nearest(mask, grid).ravel()]))
            continue
        before.append((features, next_labels(features, [before[0], *before[1:][-CONTEXT:]], grid)))
        maps = interpolated(before[-1][1].reshape(*grid, 3), SIZE)
        low, high = maps.min((0, 1)), maps.max((0, 1))
        found.append(nearest(((maps - low) / (high - low)).argmax(2).astype(np.uint8), FRAME))
    return np.stack(found)


def test_masks_are_those_of_the_definition(checkpoint, video, tmp_path):
    path, state = checkpoint
    write_video(tmp_path / "davis", *video)
    propagation = PropagationConfig(short_side=SHORT_SIDE, window=WINDOW, context_frames=CONTEXT)
    options = VideoOptions(masks=tmp_path / "masks", propagation=propagation)
    scores(path, task=("video",), data=str(tmp_path / "davis"), video=options)
    ours = np.stack([np.asarray(PIL.Image.open(file)) for file in sorted((tmp_path / "masks/bear").iterdir())])
    expected = masks_by_definition(state, *video)
    assert np.unique(expected).tolist() == [0, 1, 2]
    # Rounding may move single pixels of an edge.
    assert (ours[1:] != expected).mean() < 2e-3
    options = replace(options, masks=tmp_path / "soft", propagation=replace(propagation, variant="soft"))
    scores(path, task=("video",), data=str(tmp_path / "davis"), video=options)
    soft = np.stack([np.asarray(PIL.Image.open(file)) for file in sorted((tmp_path / "soft/bear").iterdir())])
    assert (soft[1:] != expected).mean() > 0.02, "the other variant is another method"
