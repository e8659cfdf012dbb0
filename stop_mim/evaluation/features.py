"""Frozen features: average-pooled tokens of an encoder's last layers, or the pixels themselves, for all images."""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from stop_mim.data.augment import normalise, resize_batch
from stop_mim.data.loader import Progress
from stop_mim.models.encoder import Encoder


@torch.inference_mode()
def pooled_features(
    encoder: Encoder,
    pixels: UInt8[Tensor, "n 3 height width"],
    layers: int = 1,
    batch_size: int = 256,
    progress: Progress | None = None,
) -> Float[Tensor, "n dim"]:
    """Features of images, resized to the encoder's size, on the device where the encoder is."""
    device = next(encoder.parameters()).device
    was_training = encoder.training
    encoder.eval()
    parts = []
    for batch in pixels.split(batch_size):
        images = normalise(resize_batch(batch.to(device), encoder.image_size), encoder.mean, encoder.std)
        parts.append(encoder.embed(images, layers).float())
        if progress is not None:
            progress(sum(map(len, parts)), len(pixels))
    encoder.train(was_training)
    return torch.cat(parts)


def pixel_features(pixels: UInt8[Tensor, "n 3 height width"]) -> Float[Tensor, "n dim"]:
    """The pixels as they are: what a representation has to beat."""
    return pixels.flatten(1).float() / 255
