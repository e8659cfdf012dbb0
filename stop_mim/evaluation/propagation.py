"""Label propagation in videos with frozen features: labels of the first frame go from patch to similar patch.

Nothing is trained: each patch takes the labels of its nearest patches in the first frame and in the frames just before.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from stop_mim.constraints import ABOVE_ZERO, AT_LEAST_ZERO, Checked
from stop_mim.data.augment import normalise, resize_batch
from stop_mim.data.stored import Progress
from stop_mim.data.videos import Video, write_mask
from stop_mim.errors import InputError
from stop_mim.evaluation.overlays import write_overlays
from stop_mim.evaluation.segmentation import Mask, VideoScores, score_videos
from stop_mim.models.encoder import FrozenEncoder
from stop_mim.positions import Grid

# Bounds memory; changes no result.
COSINES_AT_A_TIME = 2**25

# Features and soft labels of the patches of one frame.
LabelledFrame = tuple[Float[Tensor, "patches dim"], Float[Tensor, "patches classes"]]


@dataclass(frozen=True)
class PropagationConfig(Checked, group="video.propagation"):
    """How labels go from frame to frame; the defaults are those of the paper."""

    short_side: Annotated[int, ABOVE_ZERO] = 480
    """Frames are resized to this shorter side in pixels, as nearly as whole patches allow."""
    context_frames: Annotated[int, AT_LEAST_ZERO] = 7
    """How many of the frames just before give labels, besides the first."""
    temperature: Annotated[float, ABOVE_ZERO] = 0.1
    """A patch has the weight exp(cosine / temperature)."""
    window: Annotated[int, AT_LEAST_ZERO] = 12
    """A patch looks at patches up to this many rows and columns away."""
    neighbours: Annotated[int, ABOVE_ZERO] = 5
    """How many patches, of all in the window in all context frames, give their labels."""


def feature_size(frame: tuple[int, int], patch: tuple[int, int], short_side: int) -> tuple[int, int]:
    """Return height and width of a frame for the encoder: its aspect ratio as nearly as whole patches allow."""
    scale = short_side / min(frame)
    height, width = (max(1, round(side * scale / length)) * length for side, length in zip(frame, patch, strict=True))
    return height, width


@torch.inference_mode()
def patch_features(
    encoder: FrozenEncoder, frame: UInt8[Tensor, "3 height width"], size: tuple[int, int], device: torch.device
) -> Float[Tensor, "patches dim"]:
    """Return the patch tokens, normalised to length one."""
    images = normalise(resize_batch(frame[None].to(device), size), encoder.mean, encoder.std)
    tokens = encoder(images)[0]
    patches = math.prod(side // length for side, length in zip(size, encoder.patch_size, strict=True))
    if len(tokens) != patches:
        raise InputError(
            f"The encoder gives {len(tokens)} tokens for {patches} patches: use one that gives one token per patch."
        )
    if not torch.isfinite(tokens).all():
        raise InputError(
            "The encoder gives features that are not finite: check its weights, or the run's log for warnings."
        )
    return F.normalize(tokens.float(), dim=1)


@torch.inference_mode()
def patch_labels(mask: UInt8[Tensor, "height width"], classes: int, grid: Grid) -> Float[Tensor, "patches classes"]:
    """Return, for each patch, the fraction of its area that each object covers.

    Fractions rather than the object in the middle: an object thinner than a patch would otherwise have no patch at all.
    """
    one_hot = F.one_hot(mask.long(), classes).permute(2, 0, 1)[None].float()
    return F.interpolate(one_hot, grid, mode="area")[0].flatten(1).T.contiguous()


@torch.inference_mode()
def propagate_labels(
    features: Float[Tensor, "patches dim"],
    context: Sequence[LabelledFrame],
    grid: Grid,
    config: PropagationConfig,
) -> Float[Tensor, "patches classes"]:
    """Return the labels of a frame: means of the labels of each patch's neighbours, weighted by their affinity."""
    rows, columns = grid
    keys = torch.stack([frame for frame, _ in context]).unflatten(1, grid)  # (frames, rows, columns, D)
    values = torch.stack([labels for _, labels in context]).unflatten(1, grid)
    queries = features.unflatten(0, grid)
    rows_at_a_time = max(1, COSINES_AT_A_TIME // (len(context) * rows * columns**2))
    parts = []
    for top in range(0, rows, rows_at_a_time):
        bottom = min(top + rows_at_a_time, rows)
        # Rows outside of every query's window are left out; the others are masked.
        reach = slice(max(0, top - config.window), bottom + config.window)
        near = _window(range(top, bottom), range(*reach.indices(rows)), columns, config.window, features.device)
        cosines = queries[top:bottom].flatten(0, 1) @ keys[:, reach].flatten(0, 2).T
        cosines = cosines.view(len(near), len(context), -1).masked_fill_(~near[:, None], -math.inf).flatten(1)
        best, nearest = cosines.topk(min(config.neighbours, cosines.shape[1]), dim=1)
        weights = (best / config.temperature).softmax(1)
        parts.append(torch.einsum("qn,qnc->qc", weights, values[:, reach].flatten(0, 2)[nearest]))
    return torch.cat(parts)


def _window(query_rows: range, key_rows: range, columns: int, window: int, device: torch.device) -> Tensor:
    """Return which patches of some rows have which patches of others in their window."""
    row = torch.arange(query_rows.start, query_rows.stop, device=device)
    other = torch.arange(key_rows.start, key_rows.stop, device=device)
    column = torch.arange(columns, device=device)
    near_rows = (row[:, None] - other).abs() <= window
    near_columns = (column[:, None] - column).abs() <= window
    near = near_rows[:, None, :, None] & near_columns[None, :, None, :]  # (rows, columns, other rows, columns)
    return near.flatten(2).flatten(0, 1)


@torch.inference_mode()
def labels_to_mask(
    labels: Float[Tensor, "patches classes"], grid: Grid, size: tuple[int, int]
) -> UInt8[Tensor, "height width"]:
    """Return the object with the highest label at each pixel; labels are interpolated bilinearly between patches."""
    maps = labels.T.unflatten(1, grid)[None]
    return F.interpolate(maps, size, mode="bilinear")[0].argmax(0).to(torch.uint8).cpu()


def propagate(
    encoder: FrozenEncoder, video: Video, config: PropagationConfig, device: torch.device
) -> Iterator[UInt8[Tensor, "height width"]]:
    """Yield a mask for every frame, the given one first; the encoder is on the device, in evaluation mode."""
    mask = video.first_mask()
    frame_size = (mask.shape[0], mask.shape[1])
    size = feature_size(frame_size, encoder.patch_size, config.short_side)
    grid = (size[0] // encoder.patch_size[0], size[1] // encoder.patch_size[1])
    before: deque[LabelledFrame] = deque(maxlen=config.context_frames)
    features = patch_features(encoder, video.frame(0), size, device)
    first = (features, patch_labels(mask.to(device), len(video.objects) + 1, grid))
    yield mask
    for index in range(1, len(video)):
        features = patch_features(encoder, video.frame(index), size, device)
        labels = propagate_labels(features, [first, *before], grid, config)
        before.append((features, labels))
        yield labels_to_mask(labels, grid, frame_size)


def segment_videos(
    encoder: FrozenEncoder,
    videos: Sequence[Video],
    config: PropagationConfig,
    device: torch.device,
    out: Path | None = None,
    overlays: bool = False,
    foreground: bool = False,
    progress: Progress | None = None,
) -> VideoScores:
    """Propagate and score every video.

    Args:
        out: folder for the masks, out/SEQUENCE/00000.png …
        overlays: draw them over the frames too, in out/overlays/SEQUENCE.
        foreground: score all objects as one; they are propagated one by one, so that saved masks score the same.
    """

    def predict(video: Video) -> Iterator[Mask]:
        masks = []
        for index, mask in enumerate(propagate(encoder, video, config, device)):
            if out is not None:
                write_mask(out / video.name / f"{video.frame_name(index)}.png", mask)
            if overlays:
                masks.append(mask)
            yield mask
        if overlays and out is not None:
            write_overlays(video, masks, out / "overlays" / video.name)

    return score_videos(videos, predict, foreground, progress)
