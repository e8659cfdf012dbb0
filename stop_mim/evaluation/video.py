"""Video object segmentation with frozen features: labels of the first frame go from patch to similar patch.

Nothing is trained: each patch takes the labels of its nearest patches in the first frame and in the frames just before.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from stop_mim.data.augment import ChannelValues, normalise, resize_batch
from stop_mim.data.loader import Progress
from stop_mim.data.videos import Video, write_mask
from stop_mim.errors import InputError
from stop_mim.evaluation.overlays import write_overlays
from stop_mim.evaluation.segmentation import Mask, VideoScores, score_videos
from stop_mim.positions import Grid

# Cosines held at a time: it bounds memory and changes no result.
COSINES_AT_A_TIME = 2**25

# Features and soft labels of one frame's patches.
LabelledFrame = tuple[Float[Tensor, "patches dim"], Float[Tensor, "patches classes"]]


@runtime_checkable
class PatchEncoder(Protocol):
    """What is asked of an encoder: normed tokens (B, N, D) of the patches of normalised images (B, 3, H, W)."""

    patch_size: tuple[int, int]
    mean: ChannelValues
    std: ChannelValues

    def __call__(self, images: Tensor, /) -> Tensor:
        """One token for each patch, row by row."""


@dataclass(frozen=True)
class PropagationConfig:
    """How labels go from frame to frame; the defaults are the protocol's."""

    short_side: int = 480
    """Frames are resized so that their shorter side has so many pixels, or as near as whole patches come."""
    context_frames: int = 7
    """How many of the frames just before give labels, besides the first."""
    temperature: float = 0.1
    """A patch weighs exp(cosine / temperature)."""
    window: int = 12
    """A patch looks so many patches up, down, left and right of its own place."""
    neighbours: int = 5
    """How many patches, of all in the window in all context frames, give their labels."""
    bfloat16: bool = False
    """Encode in bfloat16 where the encoder is on a GPU: faster, with features rounded to eight bits."""

    def __post_init__(self) -> None:
        for name, least in (("short_side", 1), ("context_frames", 0), ("window", 0), ("neighbours", 1)):
            if getattr(self, name) < least:
                raise InputError(f"video.{name} is {getattr(self, name)}: give a whole number of at least {least}.")
        if not 0 < self.temperature < math.inf:
            raise InputError(f"video.temperature is {self.temperature}: give a number above 0.")


def feature_size(frame: tuple[int, int], patch: tuple[int, int], short_side: int) -> tuple[int, int]:
    """Height and width of a frame for the encoder: its proportions as nearly as whole patches allow."""
    scale = short_side / min(frame)
    height, width = (max(1, round(side * scale / length)) * length for side, length in zip(frame, patch, strict=True))
    return height, width


@torch.inference_mode()
def patch_features(
    encoder: PatchEncoder,
    frame: UInt8[Tensor, "3 height width"],
    size: tuple[int, int],
    device: torch.device,
    bfloat16: bool = False,
) -> Float[Tensor, "patches dim"]:
    """Tokens of length one."""
    images = normalise(resize_batch(frame[None].to(device), size), encoder.mean, encoder.std)
    with torch.autocast("cuda", torch.bfloat16, enabled=bfloat16 and device.type == "cuda"):
        tokens = encoder(images)[0]
    patches = math.prod(side // length for side, length in zip(size, encoder.patch_size, strict=True))
    if len(tokens) != patches:
        raise InputError(
            f"The encoder gives {len(tokens)} tokens for {patches} patches: use one that gives a token for each patch and "
            "no other."
        )
    if not torch.isfinite(tokens).all():
        raise InputError(
            "The encoder gives features that are not finite: check its weights, or the run's log for warnings."
        )
    return F.normalize(tokens.float(), dim=1)


@torch.inference_mode()
def patch_labels(mask: UInt8[Tensor, "height width"], classes: int, grid: Grid) -> Float[Tensor, "patches classes"]:
    """For each patch, which part of its area has which number.

    Parts rather than the number in the middle: an object that is thinner than a patch, or lies across its corners, would
    otherwise have no patch to start from; and where the border goes through a patch is kept.
    """
    one_hot = F.one_hot(mask.long(), classes).permute(2, 0, 1)[None].float()
    return F.interpolate(one_hot, grid, mode="area")[0].flatten(1).T.contiguous()


@torch.inference_mode()
def propagate_labels(
    features: Float[Tensor, "patches dim"],
    context: Sequence[LabelledFrame],
    grid: Grid,
    config: PropagationConfig,
    cosines_at_a_time: int = COSINES_AT_A_TIME,
) -> Float[Tensor, "patches classes"]:
    """Labels for a frame: the means of its patches' neighbours' labels, weighted by their affinity."""
    rows, columns = grid
    keys = torch.stack([frame for frame, _ in context]).unflatten(1, grid)  # (frames, rows, columns, D)
    values = torch.stack([labels for _, labels in context]).unflatten(1, grid)
    queries = features.unflatten(0, grid)
    rows_at_a_time = max(1, cosines_at_a_time // (len(context) * rows * columns**2))
    parts = []
    for top in range(0, rows, rows_at_a_time):
        bottom = min(top + rows_at_a_time, rows)
        # Rows that are out of every query's reach are left out; what remains is masked.
        reach = slice(max(0, top - config.window), bottom + config.window)
        near = _window(range(top, bottom), range(*reach.indices(rows)), columns, config.window, features.device)
        cosines = queries[top:bottom].flatten(0, 1) @ keys[:, reach].flatten(0, 2).T
        cosines = cosines.view(len(near), len(context), -1).masked_fill_(~near[:, None], -math.inf).flatten(1)
        best, nearest = cosines.topk(min(config.neighbours, cosines.shape[1]), dim=1)
        weights = (best / config.temperature).softmax(1)
        parts.append(torch.einsum("qn,qnc->qc", weights, values[:, reach].flatten(0, 2)[nearest]))
    return torch.cat(parts)


def _window(query_rows: range, key_rows: range, columns: int, window: int, device: torch.device) -> Tensor:
    """Which patches of some rows are near enough to which patches of others."""
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
    """The number with the highest label at each pixel, between the patches' centres by bilinear interpolation."""
    maps = labels.T.unflatten(1, grid)[None]
    return F.interpolate(maps, size, mode="bilinear")[0].argmax(0).to(torch.uint8).cpu()


def propagate(
    encoder: PatchEncoder,
    video: Video,
    config: PropagationConfig | None = None,
    device: torch.device | None = None,
) -> Iterator[UInt8[Tensor, "height width"]]:
    """Yields a mask for every frame, the given one first; works where the encoder is, or on the device that is named."""
    config = config or PropagationConfig()
    device = device or _device_of(encoder)
    mask = video.first_mask()
    frame_size = (mask.shape[0], mask.shape[1])
    size = feature_size(frame_size, encoder.patch_size, config.short_side)
    grid = (size[0] // encoder.patch_size[0], size[1] // encoder.patch_size[1])
    before: deque[LabelledFrame] = deque(maxlen=config.context_frames)
    with _evaluating(encoder):
        features = patch_features(encoder, video.frame(0), size, device, config.bfloat16)
        first = (features, patch_labels(mask.to(device), len(video.objects) + 1, grid))
        yield mask
        for index in range(1, len(video)):
            features = patch_features(encoder, video.frame(index), size, device, config.bfloat16)
            labels = propagate_labels(features, [first, *before], grid, config)
            before.append((features, labels))
            yield labels_to_mask(labels, grid, frame_size)


def copy_first_mask(video: Video) -> Iterator[UInt8[Tensor, "height width"]]:
    """Yields the first mask for every frame: what any method has to beat."""
    yield from repeat(video.first_mask(), len(video))


def segment_videos(
    encoder: PatchEncoder,
    videos: Sequence[Video],
    out: Path | None = None,
    config: PropagationConfig | None = None,
    foreground: bool = False,
    overlays: bool = False,
    progress: Progress | None = None,
    device: torch.device | None = None,
) -> VideoScores:
    """Propagate and score every video; masks go to out/SEQUENCE/00000.png …, drawings to out/overlays/SEQUENCE.

    With `foreground` the objects are followed one by one and scored as one, so that the saved masks score the same.
    """
    if overlays and out is None:
        raise InputError("Overlays need a folder: name one for the masks, and the overlays go there too.")

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


@contextmanager
def _evaluating(encoder: PatchEncoder) -> Iterator[None]:
    module = encoder if isinstance(encoder, nn.Module) and encoder.training else None
    try:
        if module is not None:
            module.eval()
        yield
    finally:
        if module is not None:
            module.train()


def _device_of(encoder: PatchEncoder) -> torch.device:
    parameters = encoder.parameters() if isinstance(encoder, nn.Module) else iter(())
    return next((parameter.device for parameter in parameters), torch.device("cpu"))
