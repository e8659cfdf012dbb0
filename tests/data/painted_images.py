"""Images that tell which they are."""

import numpy as np
import PIL.Image
import torch

from stop_mim.data.augment import IMAGENET_MEAN, IMAGENET_STD
from stop_mim.data.decode import BadImage
from stop_mim.data.image_source import ImageSource

COUNT = 60
MEAN, STD = (torch.tensor(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))


class Painted(ImageSource):
    """Red is the index of the image, green its label (unrelated to the index), blue grows from the first pixel to the last."""

    def __init__(self, count=COUNT, bad=(), sizes=((10, 12),), in_memory=False, seed=1):
        self.classes = np.random.default_rng(seed).integers(0, 7, count)
        super().__init__("painted", {"class": self.classes})
        self.count, self.bad, self.sizes, self.in_memory, self.seed = count, set(bad), sizes, in_memory, seed
        self.reads = []

    def __len__(self):
        return self.count

    def read(self, index):
        self.reads.append(index)
        if index in self.bad:
            raise BadImage(self.describe(index), "torn")
        height, width = self.size(index)
        pixels = torch.empty(3, height, width, dtype=torch.uint8)
        pixels[0], pixels[1] = index, int(self.classes[index]) * 30
        pixels[2] = torch.linspace(0, 255, height * width).to(torch.uint8).reshape(height, width)
        return pixels

    def size(self, index):
        return self.sizes[index % len(self.sizes)]

    def describe(self, index):
        return f"image {index}"

    def fingerprint(self, times=True):
        return f"painted {self.seed}"

    def stacked(self):
        return torch.stack([self.read(index) for index in range(self.count)]) if self.in_memory else None


def bytes_of(images):
    """Undo the normalisation."""
    return (images.cpu() * STD + MEAN) * 255


def read_colours(images):
    """Index and label, as the pixels tell them."""
    colours = bytes_of(images).mean(dim=(2, 3)).round()
    return colours[:, 0].int().tolist(), (colours[:, 1] / 30).round().int().tolist()


def picture(number, height, width):
    """A smooth image, for which resizing and decoding differ little."""
    coarse = np.random.default_rng(number).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return PIL.Image.fromarray(coarse).resize((width, height), PIL.Image.BICUBIC)


def write_pictures(folder, count=40, sizes=((24, 24),), kinds=("png",), bad=()):
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        path = folder / f"{number:04d}.{kinds[number % len(kinds)]}"
        picture(number, *sizes[number % len(sizes)]).save(path, quality=95)
        if number in bad:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return folder
