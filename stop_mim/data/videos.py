"""Videos with numbered objects: a folder in the layout of DAVIS, or rendered clips.

A mask contains object numbers; 0 is the background. As in DAVIS's own evaluation, the objects of a video are 1 to the highest
number in its first mask, and void pixels (255) are background. Where the first mask is black and white, white is object 1.
"""

import io
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from jaxtyping import UInt8
from torch import Tensor

from stop_mim.data.decode import IMAGE_EXTENSIONS, BadImage, check_pixels, decode_image, image_size, quieten_pillow
from stop_mim.data.image_source import digest
from stop_mim.data.scenes import RENDERER_VERSION, render_video
from stop_mim.data.sources.folder import sub_folders
from stop_mim.data.sources.scenes import parse_options
from stop_mim.errors import InputError, first_line
from stop_mim.files import require_regular, user_path, write_atomically

VOID = 255
LAYOUT = "JPEGImages/480p/SEQUENCE/00000.jpg and Annotations/480p/SEQUENCE/00000.png"

# The yearly lists first, the newer before the older; the first release had a list for each resolution.
_LIST_FOLDERS = ("2017", "2016", "480p", "1080p", ".")
_RESOLUTIONS = ("480p", "Full-Resolution", "1080p")
_SCENE_OPTIONS = {"count": 10, "size": 128, "frames": 24, "seed": 0}


class Video(ABC):
    """Frames of one size, in order, and their masks; later masks may be missing."""

    name: str

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def frame(self, index: int) -> UInt8[Tensor, "3 height width"]:
        """The frame as RGB."""

    @abstractmethod
    def mask(self, index: int) -> UInt8[Tensor, "height width"] | None:
        """The objects' numbers; None if the ground truth has no mask of this frame."""

    def has_mask(self, index: int) -> bool:
        """Whether the ground truth has a mask of this frame."""
        return self.mask(index) is not None

    @abstractmethod
    def fingerprint(self) -> str:
        """A short hexadecimal name of the contents: it changes when they change."""

    def frame_name(self, index: int) -> str:
        """The name of the frame's files, without their ending."""
        return f"{index:05d}"

    @cached_property
    def objects(self) -> tuple[int, ...]:
        """The numbers of the objects."""
        return tuple(range(1, int(self.first_mask().max()) + 1))

    def first_mask(self) -> UInt8[Tensor, "height width"]:
        """The mask of the first frame, which a method is given."""
        mask = self.mask(0)
        if mask is None or not mask.any():
            raise InputError(
                f"The first mask of the video '{self.name}' shows no object: number every object to track."
            )
        return mask


class FolderVideo(Video):
    """A folder of frames and a folder of masks with the same names."""

    def __init__(self, name: str, frame_folder: Path, mask_folder: Path) -> None:
        self.name = name
        self.mask_folder = mask_folder
        self.frame_paths = _frame_paths(frame_folder)
        if not self.frame_paths:
            raise InputError(
                f"The sequence '{name}' has no frames in {frame_folder}: put them there as 00000.jpg and so on."
            )
        if not self.has_mask(0):
            raise InputError(f"The sequence '{name}' has no first mask: save it as {self.mask_path(0)}.")
        frames = {path.stem for path in self.frame_paths}
        masks = sorted(path for path in mask_folder.glob("*.png") if not path.name.startswith("."))
        if alone := [path for path in masks if path.stem not in frames]:
            raise InputError(
                f"The mask {alone[0]} has no frame in {frame_folder}: add the frame {alone[0].stem}.jpg, or remove the mask."
            )

    def __len__(self) -> int:
        return len(self.frame_paths)

    def frame_name(self, index: int) -> str:
        return self.frame_paths[index].stem

    def mask_path(self, index: int) -> Path:
        """Where the mask of a frame is expected."""
        return self.mask_folder / f"{self.frame_name(index)}.png"

    def has_mask(self, index: int) -> bool:
        return self.mask_path(index).is_file()

    def frame(self, index: int) -> UInt8[Tensor, "3 height width"]:
        path = self.frame_paths[index]
        with _readable(path):
            return decode_image(path.read_bytes(), str(path))

    def mask(self, index: int) -> UInt8[Tensor, "height width"] | None:
        if not self.has_mask(index):
            return None
        path = self.mask_path(index)
        mask = read_mask(path, white=VOID if self._is_numbered else 1)
        frame_path = self.frame_paths[index]
        with _readable(frame_path):
            size = image_size(frame_path.read_bytes(), str(frame_path))
        if tuple(mask.shape) != size:
            raise InputError(
                f"{path} has {mask.shape[1]}x{mask.shape[0]} pixels and its frame has {size[1]}x{size[0]}: give masks of "
                "the size of the frames."
            )
        return mask.masked_fill_(mask == VOID, 0)

    def fingerprint(self) -> str:
        masks = [self.mask_path(index) for index in range(len(self)) if self.has_mask(index)]
        states = [(path.name, path.stat()) for path in (*self.frame_paths, *masks)]
        return digest([self.name, *((name, state.st_size, state.st_mtime_ns) for name, state in states)])

    @cached_property
    def _is_numbered(self) -> bool:
        """Whether the first mask has numbers; white in later masks is then void, not an object."""
        first = read_mask(self.mask_path(0), white=VOID)
        return bool(((first != 0) & (first != VOID)).any())


class SceneClip(Video):
    """One rendered clip; it is rendered at its first use."""

    def __init__(self, index: int, frames: int, size: int, seed: int) -> None:
        self.name = f"scene-{index:03d}"
        self._arguments = (index, frames, size, seed)

    def __len__(self) -> int:
        return self._arguments[1]

    def frame(self, index: int) -> UInt8[Tensor, "3 height width"]:
        return self._clip[0][index]

    def mask(self, index: int) -> UInt8[Tensor, "height width"]:
        return self._clip[1][index]

    def fingerprint(self) -> str:
        return digest([RENDERER_VERSION, *self._arguments])

    @cached_property
    def _clip(self) -> tuple[Tensor, Tensor]:
        return render_video(*self._arguments)


def open_videos(name: str, split: str = "val", needs_frames: bool = True) -> list[Video]:
    """The videos of a folder in DAVIS's layout, or scenes[:count=…,size=…,frames=…,seed=…].

    A folder's ImageSets list the sequences of the split, with the list of 2017 before that of 2016 (split="2016/val" selects
    one); without lists all sequences are used. Clips of scenes are the same for each split: nothing is trained on them. If
    frames are neither needed nor there, the masks are used as frames.
    """
    kind, _, options = name.partition(":")
    if kind == "scenes":
        chosen = parse_options(options, _SCENE_OPTIONS)
        count = chosen.pop("count")
        return [SceneClip(index, **chosen) for index in range(count)]
    folder = user_path(name)
    # The empty name would be the current folder.
    if not name or not folder.is_dir():
        raise InputError(f"There are no videos '{name}': give a folder with {LAYOUT}, or scenes.")
    all_frames, all_masks = folder / "JPEGImages", folder / "Annotations"
    if not needs_frames and not all_frames.is_dir():
        all_frames = all_masks
    resolution = _resolution(folder, all_frames, all_masks)
    frames, masks = all_frames / resolution, all_masks / resolution
    sequences = _listed_sequences(folder, split) or sub_folders(frames)
    videos: list[Video] = [FolderVideo(sequence, frames / sequence, masks / sequence) for sequence in sequences]
    for video in videos:
        # Checked now, so that a video without objects does not fail an evaluation halfway.
        video.first_mask()
    return videos


def _resolution(folder: Path, frames: Path, masks: Path) -> str:
    """The sub-folder of the frames that holds the sequences: itself ("."), 480p if it exists, or another."""
    names = [name for name in sub_folders(frames) if (masks / name).is_dir()] if frames.is_dir() else []
    if not names:
        raise InputError(f"The folder {folder} is not in DAVIS's layout: it must contain {LAYOUT}.")
    if any(_frame_paths(frames / name) for name in names):
        return "."
    return next((name for name in _RESOLUTIONS if name in names), names[0])


def _frame_paths(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    files = (path for path in folder.iterdir() if not path.name.startswith("."))
    return sorted(path for path in files if path.suffix[1:].lower() in IMAGE_EXTENSIONS)


def _listed_sequences(folder: Path, split: str) -> tuple[str, ...]:
    """The sequences of the split, in the list's order; none where the folder has no lists."""
    lists = folder / "ImageSets"
    found = sorted(path.relative_to(lists).with_suffix("").as_posix() for path in lists.rglob("*.txt"))
    if not found:
        return ()
    candidates = [split] if "/" in split else [(Path(part) / split).as_posix() for part in _LIST_FOLDERS]
    chosen = next((name for name in candidates if name in found), None)
    if chosen is None:
        raise InputError(f"{lists} has no list of the split '{split}': choose among {', '.join(found)}.")
    path = lists / f"{chosen}.txt"
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} cannot be read as text ({error}): copy it again from the dataset.") from error
    # Older lists have a line for each frame; a dictionary removes duplicates and keeps the order.
    sequences = tuple(dict.fromkeys(_sequence_of(line, path) for line in lines if line.strip()))
    if not sequences:
        raise InputError(f"{path} lists no sequences: write the name of one in each line, or remove the file.")
    return sequences


def _sequence_of(line: str, path: Path) -> str:
    """A line is a sequence's name, or its frame and mask as /JPEGImages/480p/NAME/00000.jpg /Annotations/…"""
    first = line.split()[0]
    name = Path(first).parent.name if "/" in first else first
    # Masks are written to folders of these names, which must not be other paths.
    if name in ("", ".", "..") or "\\" in name:
        raise InputError(
            f"{path} has the line '{line.strip()}', which is not the name of a sequence: write one name per line."
        )
    return name


def read_mask(path: Path, white: int = 1) -> UInt8[Tensor, "height width"]:
    """The numbers in a mask file: the indices of a palette image or grey values; black and white is one object, 1.

    Void pixels keep their number, 255; `white` is what they are in black and white.
    """
    with _readable(path):
        encoded = path.read_bytes()
        check_pixels(*image_size(encoded, str(path)))
        quieten_pillow()
        image = PIL.Image.open(io.BytesIO(encoded), formats=("PNG",))
        # DAVIS 2016 has a mask with an alpha channel, which is ignored.
        pixels = np.array(image if image.mode == "P" else image.convert("RGB"))
    if image.mode == "P":
        return torch.from_numpy(pixels)
    if image.mode not in ("1", "L", "LA", "RGB", "RGBA") or (pixels != pixels[..., :1]).any():
        raise InputError(
            f"{path} has colours, or pixels of another mode than 8-bit grey ({image.mode}): save masks as palette images "
            "whose indices are the objects' numbers."
        )
    grey = pixels[..., 0].copy()
    return torch.from_numpy(grey // VOID * np.uint8(white) if np.isin(grey, (0, VOID)).all() else grey)


def davis_palette() -> UInt8[np.ndarray, "256 3"]:
    """The colours of object numbers: their bits, three at a time, become the highest bits of red, green and blue."""
    numbers, palette = np.arange(256), np.zeros((256, 3), dtype=np.uint8)
    for bit in range(8):
        palette[:, bit % 3] |= (((numbers >> bit) & 1) << (7 - bit // 3)).astype(np.uint8)
    return palette


def write_mask(path: Path, mask: UInt8[Tensor, "height width"]) -> None:
    """Write object numbers as DAVIS does, as the indices of a palette image."""
    image = PIL.Image.fromarray(mask.cpu().numpy())
    image.putpalette(davis_palette().tobytes())
    write_atomically(path, lambda temporary: image.save(temporary, format="PNG"))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    require_regular(path)
    try:
        yield
    # Pillow raises a dozen kinds of exceptions for corrupt files.
    except Exception as error:
        reason = error.reason if isinstance(error, BadImage) else first_line(error)
        raise InputError(f"{path} cannot be read as an image ({reason}): copy it again from the dataset.") from error
