"""What a model predicts of masked patches, and what its features know: heat maps, principal components, neighbours."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from sklearn.decomposition import PCA
from torch import Tensor
from torchvision.transforms.v2.functional import center_crop, resize

from stop_mim.analysis.runs import RunRecords
from stop_mim.data.augment import normalise
from stop_mim.data.image_source import read_or_next
from stop_mim.data.sources import open_source
from stop_mim.errors import InputError
from stop_mim.masking import Masks
from stop_mim.models.encoder import Encoder
from stop_mim.models.neighbours import nearest
from stop_mim.models.objective import TargetObjective
from stop_mim.positions import Grid
from stop_mim.seeds import seeded_generator
from stop_mim.training.build import build_masks

PCA_COMPONENTS = 3
# Of the values of a component, this part at each end is cut off, so that a few odd patches do not take all the contrast.
PCA_OUTLIERS = 0.01


def feature_objective(objective: object) -> TargetObjective:
    """The objective as one that predicts features, as I-JEPA and data2vec do, and MAE, which predicts pixels, does not."""
    if not isinstance(objective, TargetObjective):
        raise InputError(
            f"The objective is {type(objective).__name__}, which predicts no features: name a run of ijepa or data2vec."
        )
    return objective


def sample_images(run: RunRecords, count: int) -> UInt8[Tensor, "n 3 height width"]:
    """Images of the run's own data, evenly spread over them, cut to the size that its encoder sees."""
    source = open_source(run.config.data)
    chosen = [number * len(source) // count for number in range(min(count, len(source)))]
    return torch.stack([fitted(read_or_next(source, index)[0], run.config.encoder.image_size) for index in chosen])


def fitted(image: UInt8[Tensor, "3 height width"], size: tuple[int, int]) -> UInt8[Tensor, "3 height2 width2"]:
    """The centre of an image at this size: no smaller than it must be, and not squeezed."""
    height, width = image.shape[1:]
    zoom = max(size[0] / height, size[1] / width)
    larger = [max(size[0], round(height * zoom)), max(size[1], round(width * zoom))]
    return center_crop(resize(image, larger, antialias=True), list(size))


def sample_masks(run: RunRecords, count: int, seed: int = 0) -> Masks:
    """Masks as the run was trained with, the same for the same seed."""
    return build_masks(run.config.masks, run.grid).sample(count, generator=seeded_generator("cpu", seed, "masks"))


def central_target(masks: Masks, grid: Grid, image: int = 0, block: int = 0) -> int:
    """The patch of a target block that is nearest to the block's centre."""
    targets = masks.targets[image, block]
    places = torch.stack([targets // grid[1], targets % grid[1]], dim=1).float()
    return int(targets[(places - places.mean(0)).square().sum(1).argmin()])


@torch.no_grad()
def all_features(
    objective: TargetObjective, images: UInt8[Tensor, "batch 3 height width"]
) -> Float[Tensor, "batch n_patches dim"]:
    """Features of every patch as the target encoder gives them, in the space in which predictions are made."""
    normalised = _normalised(objective, images)
    rows, columns = objective.encoder.grid
    everywhere = torch.arange(rows * columns).expand(len(images), 1, -1)
    features = objective.target_features(normalised, Masks(everywhere[:, 0], everywhere))
    return features.reshape(len(images), rows * columns, -1)


@torch.no_grad()
def prediction_maps(
    objective: TargetObjective, images: UInt8[Tensor, "batch 3 height width"], masks: Masks, temperature: float = 1.0
) -> Float[Tensor, "batch n_masked n_patches"]:
    """For every masked patch, the softmax of the cosines of its predicted features to the features of all patches.

    The masked patches come in the order of `masks.targets.flatten(1)`. There is no noise: the objective is in evaluation mode.
    """
    predicted = objective.predict(_normalised(objective, images), masks)
    predicted = F.normalize(predicted.reshape(len(images), -1, predicted.shape[-1]), dim=-1)
    cosines = predicted @ F.normalize(all_features(objective, images), dim=-1).mT
    return (cosines / temperature).softmax(-1)


def prediction_map(
    objective: TargetObjective,
    image: UInt8[Tensor, "3 height width"],
    masks: Masks,
    patch: int,
    temperature: float = 1.0,
) -> Float[Tensor, "rows columns"]:
    """The map of one masked patch of one image, whose masks are the only ones."""
    masked = masks.targets.flatten(1)[0].tolist()
    if patch not in masked:
        raise InputError(
            f"The patch is {patch}, which is not masked: choose one of {', '.join(map(str, masked[:5]))} …."
        )
    maps = prediction_maps(objective, image[None], masks, temperature)
    return maps[0, masked.index(patch)].unflatten(0, objective.encoder.grid)


def _normalised(
    objective: TargetObjective, images: UInt8[Tensor, "batch 3 height width"]
) -> Float[Tensor, "batch 3 height width"]:
    encoder = objective.encoder
    if tuple(images.shape[2:]) != encoder.image_size:
        (height, width), (wanted_height, wanted_width) = images.shape[2:], encoder.image_size
        raise InputError(
            f"An image has {height}x{width} pixels and the run's have {wanted_height}x{wanted_width}: cut it to that size."
        )
    return normalise(images, encoder.mean, encoder.std)


@torch.no_grad()
def patch_features(
    encoder: Encoder, images: UInt8[Tensor, "batch 3 height width"]
) -> Float[Tensor, "batch n_patches dim"]:
    """Normed patch tokens of a frozen encoder in evaluation mode."""
    return encoder(normalise(images, encoder.mean, encoder.std))


def pca_maps(features: Float[Tensor, "batch n_patches dim"], grid: Grid) -> Float[Tensor, "batch rows columns 3"]:
    """The first three principal components of the features of all patches together, as red, green and blue in 0..1.

    The largest loading of a component is positive, so that the same features have the same colours.
    """
    patches = features.flatten(0, 1).double()
    if min(patches.shape) < PCA_COMPONENTS:
        raise InputError(
            f"There are {len(patches)} patches of {patches.shape[1]} features: principal components need three of each."
        )
    components = torch.from_numpy(PCA(PCA_COMPONENTS, svd_solver="full").fit_transform(patches.numpy()))
    ends = torch.tensor([PCA_OUTLIERS, 1 - PCA_OUTLIERS], dtype=torch.float64)
    low, high = components.quantile(ends, dim=0)
    colours = ((components - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    return colours.float().unflatten(0, (len(features), *grid))


def nearest_images(features: Float[Tensor, "n dim"], k: int) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """Cosines and numbers of the k images most like each one, itself left out, by pooled features without their mean."""
    if not 1 <= k < len(features):
        raise InputError(f"k is {k}: among {len(features)} images there are 1 to {len(features) - 1} neighbours.")
    cosines, numbers = nearest([features], features, k + 1, centre=features.mean(0))
    itself = numbers == torch.arange(len(features))[:, None]
    # Of images that are all the same, the image itself may not be among the nearest: then the last is one too many.
    itself[:, -1] |= ~itself.any(1)
    return cosines[~itself].unflatten(0, (-1, k)), numbers[~itself].unflatten(0, (-1, k))
