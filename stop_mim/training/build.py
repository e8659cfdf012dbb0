"""Names that moved to `stop_mim.models` and `stop_mim.masking`, until all imports have followed."""

from stop_mim.data.augment import Augment
from stop_mim.masking import build_masks
from stop_mim.models.build import build_encoder, build_objective, build_positions
from stop_mim.models.encoder import Encoder
from stop_mim.models.ijepa import build_ijepa
from stop_mim.training.config import TrainConfig

__all__ = ["build_augment", "build_encoder", "build_ijepa", "build_masks", "build_objective", "build_positions"]


def build_augment(config: TrainConfig, encoder: Encoder) -> Augment:
    """The augmentation to the encoder's image size and normalisation."""
    return Augment(config.augment, config.encoder.image_size, encoder.mean, encoder.std)
