"""What a model predicts of masked patches, and its features: heat maps and principal components."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from sklearn.decomposition import PCA
from torch import Tensor
from torchvision.transforms.v2.functional import center_crop, resize

from stop_mim.analysis.runs import RunRecords
from stop_mim.data.augment import normalise
from stop_mim.data.image_source import read_or_next
from stop_mim.data.sources import open_source
from stop_mim.errors import InputError
from stop_mim.masking import Masks, build_masks
from stop_mim.models.encoder import Encoder
from stop_mim.models.objective import Objective, TargetObjective
from stop_mim.positions import Grid
from stop_mim.seeds import seeded_generator

# Side in pixels of images in figures.
PICTURE_SIDE = 448
# Fraction of a component's values that is cut off at each end, so that outliers do not take all the contrast.
PCA_OUTLIERS = 0.01


def feature_objective(objective: Objective) -> TargetObjective:
    """Return an objective that predicts features, as I-JEPA and data2vec do; others are an InputError."""
    if not isinstance(objective, TargetObjective):
        raise InputError("This objective predicts pixels, not features: give a run of ijepa or data2vec.")
    return objective


def sample_images(run: RunRecords, count: int) -> UInt8[Tensor, "n 3 height width"]:
    """Return images of the run's data, evenly spread over it, at the size of its encoder."""
    source = open_source(run.config.data)
    size = run.config.encoder.image_size
    return torch.stack([fitted(read_or_next(source, index), size) for index in _chosen(len(source), count)])


def sample_pictures(run: RunRecords, count: int) -> UInt8[Tensor, "n 3 height width"]:
    """Return the images of `sample_images` enlarged for figures, by a whole factor."""
    source, size = open_source(run.config.data), run.config.encoder.image_size
    zoom = max(1, PICTURE_SIDE // max(size))
    larger = (zoom * size[0], zoom * size[1])
    chosen = _chosen(len(source), count)
    return torch.stack([fitted(source.enlarged(index, max(larger)), larger) for index in chosen])


def _chosen(images: int, count: int) -> list[int]:
    return [number * images // count for number in range(min(count, images))]


def fitted(image: UInt8[Tensor, "3 height width"], size: tuple[int, int]) -> UInt8[Tensor, "3 height2 width2"]:
    """Resize an image to cover `size`, keeping its aspect ratio, and crop its centre."""
    height, width = image.shape[1:]
    zoom = max(size[0] / height, size[1] / width)
    larger = [max(size[0], round(height * zoom)), max(size[1], round(width * zoom))]
    return center_crop(resize(image, larger, antialias=True), list(size))


def sample_masks(run: RunRecords, count: int) -> Masks:
    """Return masks of the kind that the run is trained with, the same every time."""
    return build_masks(run.config.masks, run.grid).sample(count, generator=seeded_generator("cpu", 0, "masks"))


def central_target(masks: Masks, grid: Grid) -> int:
    """Return the patch nearest to the centre of the first image's first target block."""
    targets = masks.targets[0, 0]
    places = torch.stack([targets // grid[1], targets % grid[1]], dim=1).float()
    return int(targets[(places - places.mean(0)).square().sum(1).argmin()])


@torch.no_grad()
def all_features(
    objective: TargetObjective, images: UInt8[Tensor, "batch 3 height width"]
) -> Float[Tensor, "batch n_patches dim"]:
    """Return the target encoder's features of every patch, in the space in which predictions are made."""
    rows, columns = objective.encoder.grid
    everywhere = torch.arange(rows * columns).expand(len(images), 1, -1)
    features = objective.target_features(_normalised(objective.encoder, images), Masks(everywhere[:, 0], everywhere))
    return features.reshape(len(images), rows * columns, -1)


@torch.no_grad()
def prediction_maps(
    objective: TargetObjective, images: UInt8[Tensor, "batch 3 height width"], masks: Masks
) -> Float[Tensor, "batch n_masked n_patches"]:
    """Return, for every masked patch, the softmax of the cosines of its predicted features to the features of all patches.

    Masked patches are in the order of `masks.targets.flatten(1)`. An objective in evaluation mode adds no noise.
    """
    predicted = objective.predict(_normalised(objective.encoder, images), masks)
    predicted = F.normalize(predicted.reshape(len(images), -1, predicted.shape[-1]), dim=-1)
    return (predicted @ F.normalize(all_features(objective, images), dim=-1).mT).softmax(-1)


def prediction_map(
    objective: TargetObjective, image: UInt8[Tensor, "3 height width"], masks: Masks, patch: int
) -> Float[Tensor, "rows columns"]:
    """Return the map of one masked patch of one image."""
    masked = masks.targets.flatten(1)[0].tolist()
    maps = prediction_maps(objective, image[None], masks)
    return maps[0, masked.index(patch)].unflatten(0, objective.encoder.grid)


@torch.no_grad()
def patch_features(
    encoder: Encoder, images: UInt8[Tensor, "batch 3 height width"]
) -> Float[Tensor, "batch n_patches dim"]:
    """Return the normed patch tokens of an encoder."""
    return encoder(_normalised(encoder, images))


def _normalised(
    encoder: Encoder, images: UInt8[Tensor, "batch 3 height width"]
) -> Float[Tensor, "batch 3 height width"]:
    return normalise(images, encoder.mean, encoder.std)


def pca_maps(features: Float[Tensor, "batch n_patches dim"], grid: Grid) -> Float[Tensor, "batch rows columns 3"]:
    """Return the first three principal components of all patches' features as red, green and blue in 0..1."""
    patches = features.flatten(0, 1).double()
    # The largest loading of a component is positive, so that the same features have the same colours.
    components = torch.from_numpy(PCA(3, svd_solver="full").fit_transform(patches.numpy()))
    ends = torch.tensor([PCA_OUTLIERS, 1 - PCA_OUTLIERS], dtype=torch.float64)
    low, high = components.quantile(ends, dim=0)
    colours = ((components - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    return colours.float().unflatten(0, (len(features), *grid))
