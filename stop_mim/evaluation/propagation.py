"""Label propagation in videos with frozen features: each patch takes the labels of similar patches.

Nothing is trained: labels come from the nearest patches in the first frame and in the previous frames.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import PIL.Image
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image
from torchvision.utils import draw_segmentation_masks, make_grid

from stop_mim.data.augment import normalise, resize_batch
from stop_mim.data.videos import Video, davis_palette
from stop_mim.errors import InputError
from stop_mim.evaluation.features import require_finite
from stop_mim.evaluation.tasks.video import PropagationConfig
from stop_mim.files import write_atomically
from stop_mim.models.encoder import FrozenEncoder
from stop_mim.positions import Grid

# Bounds memory; changes no result.
COSINES_AT_A_TIME = 2**25
LONG_SIDE_STEP = 64
# A contact sheet: its number of frames, its columns, their width and the gap between them in pixels, the masks' opacity.
SHEET_FRAMES, COLUMNS, WIDTH, GAP, OPACITY = 12, 4, 320, 4, 0.6

# Features and soft labels of the patches of one frame.
LabelledFrame = tuple[Float[Tensor, "patches dim"], Float[Tensor, "patches classes"]]
# Height and width.
Size = tuple[int, int]


def image_size(frame: Size, patch: Size, short_side: int) -> Size:
    """Return the size that frames are resized to: the long side is a multiple of 64, and both are whole patches."""
    long = 0 if frame[0] > frame[1] else 1
    sides = [short_side, short_side]
    sides[long] = short_side * max(frame) // min(frame)
    if sides[long] >= LONG_SIDE_STEP:
        sides[long] -= sides[long] % LONG_SIDE_STEP
    height, width = (max(1, side // one) * one for side, one in zip(sides, patch, strict=True))
    return height, width


def seeds(mask: UInt8[Tensor, "h w"], classes: int, grid: Grid) -> Float[Tensor, "patches classes"]:
    """Return the labels of the patches of the first mask: the object at the centre of each patch.

    An object thinner than a patch may have no patch at all.
    """
    return F.one_hot(_nearest(mask, grid).long().flatten(), classes).float()


def mask_of(maps: Float[Tensor, "classes rows columns"], patch: Size, size: Size) -> UInt8[Tensor, "height width"]:
    """Return the mask of propagated labels at the size of the frame.

    Each object's map is interpolated and scaled to 0..1 over the frame; a pixel belongs to the object with the highest map.
    """
    wide = F.interpolate(maps[None], scale_factor=patch, mode="bilinear")[0]
    low, high = wide.amin((1, 2), keepdim=True), wide.amax((1, 2), keepdim=True)
    stretched = (wide - low) / torch.where(high > low, high - low, 1.0)
    return _nearest(stretched.argmax(0).to(torch.uint8), size)


def _nearest(mask: UInt8[Tensor, "h w"], size: Size) -> UInt8[Tensor, "h2 w2"]:
    """Resize a mask by nearest neighbour, on the CPU."""
    # Pillow's choice where two are equally near, as in DINO.
    resized = PIL.Image.fromarray(mask.cpu().numpy()).resize(size[::-1], PIL.Image.Resampling.NEAREST)
    return torch.from_numpy(np.array(resized))


@torch.inference_mode()
def patch_features(encoder: FrozenEncoder, image: UInt8[Tensor, "1 3 height width"]) -> Float[Tensor, "patches dim"]:
    """Return the patch tokens, normalised to length one."""
    tokens = encoder(normalise(image, encoder.mean, encoder.std))[0]
    patches = math.prod(side // length for side, length in zip(image.shape[2:], encoder.patch_size, strict=True))
    if len(tokens) != patches:
        raise InputError(
            f"The encoder gives {len(tokens)} tokens for {patches} patches: use one that gives one token per patch."
        )
    require_finite(tokens)
    return F.normalize(tokens.float(), dim=1)


@torch.inference_mode()
def propagate_labels(
    features: Float[Tensor, "patches dim"], context: Sequence[LabelledFrame], grid: Grid, config: PropagationConfig
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
        best, places = cosines.topk(min(config.neighbours, cosines.shape[1]), dim=1)
        weights = (best / config.temperature).softmax(1)
        parts.append(torch.einsum("qn,qnc->qc", weights, values[:, reach].flatten(0, 2)[places]))
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
def propagate(
    encoder: FrozenEncoder, video: Video, config: PropagationConfig, device: torch.device
) -> Iterator[UInt8[Tensor, "height width"]]:
    """Yield a mask for every frame, the given one first; the encoder is on the device, in evaluation mode."""
    patch, mask = encoder.patch_size, video.first_mask()
    frame_size = (mask.shape[0], mask.shape[1])
    size = image_size(frame_size, patch, config.short_side)
    grid = (size[0] // patch[0], size[1] // patch[1])

    def features_of(index: int) -> Float[Tensor, "patches dim"]:
        frame = video.frame(index)[None].to(device)
        # Without antialiasing, as in DINO.
        return patch_features(encoder, F.interpolate(frame.float(), size, mode="bilinear").round_().to(torch.uint8))

    before: deque[LabelledFrame] = deque(maxlen=config.context_frames)
    first = (features_of(0), seeds(mask, len(video.objects) + 1, grid).to(device))
    yield mask
    for index in range(1, len(video)):
        features = features_of(index)
        labels = propagate_labels(features, [first, *before], grid, config)
        before.append((features, labels))
        yield mask_of(labels.T.unflatten(1, grid), patch, frame_size).cpu()


def write_contact_sheet(video: Video, masks: Sequence[UInt8[Tensor, "height width"]], path: Path) -> None:
    """Write a grid of evenly spaced frames, each with its objects tinted in DAVIS's colours, as PNG."""
    chosen = np.unique(np.linspace(0, len(masks) - 1, SHEET_FRAMES).round().astype(int)).tolist()
    colours = [tuple(colour) for colour in davis_palette()[list(video.objects)].tolist()]
    objects = torch.tensor(video.objects)[:, None, None]
    size = round(masks[0].shape[0] * WIDTH / masks[0].shape[1]), WIDTH
    tiles = [draw_segmentation_masks(video.frame(index), masks[index] == objects, OPACITY, colours) for index in chosen]
    sheet = to_pil_image(make_grid(resize_batch(torch.stack(tiles), size), COLUMNS, GAP, pad_value=255))
    write_atomically(path, lambda file: sheet.save(file, format="PNG"))
