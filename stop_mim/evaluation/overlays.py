"""Masks drawn over some frames of a video, side by side."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image
from torchvision.utils import draw_segmentation_masks, make_grid

from stop_mim.data.augment import resize_batch
from stop_mim.data.videos import Video, davis_palette
from stop_mim.files import write_atomically

FRAMES, COLUMNS, WIDTH, GAP = 12, 4, 320, 4
OPACITY = 0.6


def write_contact_sheet(video: Video, masks: Sequence[UInt8[Tensor, "height width"]], path: Path) -> None:
    """Write a grid of evenly spaced frames, each with its objects tinted in DAVIS's colours, as PNG."""
    chosen = np.unique(np.linspace(0, len(masks) - 1, FRAMES).round().astype(int)).tolist()
    colours = [tuple(colour) for colour in davis_palette()[list(video.objects)].tolist()]
    objects = torch.tensor(video.objects)[:, None, None]
    size = round(masks[0].shape[0] * WIDTH / masks[0].shape[1]), WIDTH
    tiles = [draw_segmentation_masks(video.frame(index), masks[index] == objects, OPACITY, colours) for index in chosen]
    sheet = to_pil_image(make_grid(resize_batch(torch.stack(tiles), size), COLUMNS, GAP, pad_value=255))
    write_atomically(path, lambda file: sheet.save(file, format="PNG"))
