"""Masks drawn over their frames: a contact sheet, and the whole video as an animation."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import PIL.Image
from jaxtyping import UInt8
from PIL import ImageDraw
from torch import Tensor

from stop_mim.data.augment import resize_batch
from stop_mim.data.videos import Video, davis_palette
from stop_mim.evaluation.segmentation import boundary_map
from stop_mim.files import write_atomically

SHEET_FRAMES, SHEET_COLUMNS = 12, 4
SHEET_WIDTH, ANIMATION_WIDTH = 320, 480
GAP = 4
MILLISECONDS_A_FRAME = 80
MASK_OPACITY = 0.45


def overlay(
    frame: UInt8[Tensor, "3 height width"], mask: UInt8[Tensor, "height width"], width: int
) -> UInt8[np.ndarray, "out_height out_width 3"]:
    """Return the frame at this width, with every object tinted and outlined in its colour."""
    height = max(2, round(frame.shape[1] * width / frame.shape[2]))
    pixels = resize_batch(frame[None], (height, width))[0].permute(1, 2, 0).numpy().copy()
    rows, columns = (np.arange(new) * old // new for new, old in zip((height, width), mask.shape, strict=True))
    numbers = mask.numpy()[np.ix_(rows, columns)]
    for number in np.unique(numbers[numbers > 0]):
        tint, inside = _bright(davis_palette()[number]), numbers == number
        pixels[inside] = (1 - MASK_OPACITY) * pixels[inside] + MASK_OPACITY * tint
        # The outline is white in the middle, so that it is visible on an object of its own colour.
        pixels[_thickened(boundary_map(inside))] = tint
        pixels[boundary_map(inside)] = 255
    return pixels


def _bright(colour: np.ndarray) -> np.ndarray:
    """Return a colour of the dark palette as bright as possible."""
    return colour.astype(np.float64) * 255 / colour.max()


def _thickened(boundary: np.ndarray) -> np.ndarray:
    padded = np.pad(boundary, 1)
    return padded[:-2, 1:-1] | padded[2:, 1:-1] | padded[1:-1, :-2] | padded[1:-1, 2:] | boundary


def contact_sheet(video: Video, masks: Sequence[UInt8[Tensor, "height width"]]) -> PIL.Image.Image:
    """Return a grid of evenly spaced frames, each with its name."""
    chosen = np.unique(np.linspace(0, len(masks) - 1, SHEET_FRAMES).round().astype(int)).tolist()
    tiles = [
        _named(overlay(video.frame(index), masks[index], SHEET_WIDTH), video.frame_name(index)) for index in chosen
    ]
    columns = min(SHEET_COLUMNS, len(tiles))
    width, height = tiles[0].width + GAP, tiles[0].height + GAP
    sheet = PIL.Image.new("RGB", (columns * width - GAP, -(-len(tiles) // columns) * height - GAP), "white")
    for place, tile in enumerate(tiles):
        sheet.paste(tile, (place % columns * width, place // columns * height))
    return sheet


def _named(pixels: np.ndarray, name: str) -> PIL.Image.Image:
    image = PIL.Image.fromarray(pixels)
    ImageDraw.Draw(image).text((6, 4), name, fill="white", stroke_width=2, stroke_fill="black")
    return image


def write_overlays(video: Video, masks: Sequence[UInt8[Tensor, "height width"]], folder: Path) -> None:
    """Write contact_sheet.png and animation.webp."""
    sheet = contact_sheet(video, masks)
    write_atomically(folder / "contact_sheet.png", lambda path: sheet.save(path, format="PNG"))
    frames = _animation_frames(video, masks)
    first = next(frames)
    write_atomically(
        folder / "animation.webp",
        lambda path: first.save(
            path, format="WEBP", save_all=True, append_images=frames, duration=MILLISECONDS_A_FRAME, loop=0, quality=75
        ),
    )


def _animation_frames(video: Video, masks: Sequence[Tensor]) -> Iterator[PIL.Image.Image]:
    for index, mask in enumerate(masks):
        yield PIL.Image.fromarray(overlay(video.frame(index), mask, ANIMATION_WIDTH))
