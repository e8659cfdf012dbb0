"""I-JEPA: predict the features of target blocks that the target encoder computes, a moving average of the encoder.

With stochastic positions in the predictor (`positions/stochastic.py`) it is StoP.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from stop_mim.errors import InputError
from stop_mim.masking import Masks
from stop_mim.models.build import build_encoder, build_predictor
from stop_mim.models.config import ModelConfig, TargetResolution
from stop_mim.models.encoder import Encoder, Images, gather_patches
from stop_mim.models.objective import OBJECTIVES, TargetObjective, layer_normed
from stop_mim.models.predictor import Noise, Predictor
from stop_mim.positions import Grid

Features = Float[Tensor, "batch n_blocks n_target dim"]


class IJEPA(TargetObjective):
    """The objective of I-JEPA and StoP.

    1. The encoder sees the context patches and computes their features s.
    2. The predictor gets context tokens A s + b + ψ and, for each target block, masked tokens ψ̂ + m̃. It predicts the
       features of the block. Fixed positions, ψ̂ = ψ, are I-JEPA; noisy ones, ψ̂ = A n + ψ, are StoP.
    3. The target encoder, a moving average of the encoder, sees the whole image. Its layer-normed features of the target
       blocks are the targets.
    4. The loss is smooth-L1. Gradients reach encoder and predictor, not the target encoder.

    Args:
        encoder: the encoder that is trained; the target encoder starts as a copy.
        predictor: predicts the features of the target blocks.
        beta: error above which smooth-L1 is linear.
        target_resolution: "full", or also targets at half the resolution, by "bilinear" resizing or "max" pooling. The
            predictor then has twice as many outputs, and both resolutions the same weight in the loss.
        l1_strength: weight of the mean absolute entry of A in the loss.
    """

    def __init__(
        self,
        encoder: Encoder,
        predictor: Predictor,
        beta: float = 1.0,
        target_resolution: TargetResolution = "full",
        l1_strength: float = 0.0,
    ) -> None:
        super().__init__(encoder, beta)
        if predictor.projection.in_features != encoder.dim:
            raise InputError(
                f"The predictor's projection takes {predictor.projection.in_features} features and the encoder has "
                f"{encoder.dim}: make it with context_projection(encoder.dim, width)."
            )
        outputs = encoder.dim if target_resolution == "full" else 2 * encoder.dim
        if predictor.head.out_features != outputs:
            raise InputError(
                f"The predictor has {predictor.head.out_features} outputs and its targets {outputs} features: create it with "
                f"outputs={outputs}."
            )
        self.predictor, self.target_resolution, self.l1_strength = predictor, target_resolution, l1_strength
        # Computes the target encoder's tokens of some patches; `use_fast_kernels` sets a faster function.
        self.tokens_at: Callable[[Encoder, Images, Int[Tensor, "batch n"]], Float[Tensor, "batch n dim"]] = tokens_at
        self.train()

    @property
    def masked_tokens(self) -> Predictor:
        return self.predictor

    def forward(self, images: Images, masks: Masks, noise: Noise | None = None) -> Float[Tensor, ""]:
        """Return the loss of a batch: smooth-L1 between predicted and target features."""
        self.require_fit(images, masks)
        predicted, target = self.predict(images, masks, noise), self.target_features(images, masks)
        loss = F.smooth_l1_loss(predicted.float(), target.float(), beta=self.beta)
        if self.l1_strength:
            loss = loss + self.l1_strength * self.predictor.projection.weight.abs().mean()
        return loss

    def predict(self, images: Images, masks: Masks, noise: Noise | None = None) -> Features:
        """Return the features of the target blocks as predicted from the context."""
        context = self.encoder(images, masks.context)
        return self.predictor(context, masks.context, masks.targets, noise)

    @torch.no_grad()
    def target_features(self, images: Images, masks: Masks) -> Features:
        """Return the layer-normed features of the target blocks; the target encoder sees the whole image."""
        wanted, block_shape = masks.targets.flatten(1), masks.targets.shape[1:]
        if self.target_resolution == "full":
            features = layer_normed(self.tokens_at(self.target, images, wanted).float())
        else:
            features = gather_patches(self._two_resolutions(images), wanted)
        return features.unflatten(1, block_shape)

    def _two_resolutions(self, images: Images) -> Float[Tensor, "batch n_patches two_dims"]:
        """Return the features of all patches, followed by those at half the resolution."""
        tokens = self.target(images)
        lower = lower_resolution(tokens, self.target.grid_of(images), self.target_resolution)
        return torch.cat([layer_normed(tokens), layer_normed(lower)], dim=-1)


def tokens_at(encoder: Encoder, images: Images, indices: Int[Tensor, "batch n"]) -> Float[Tensor, "batch n dim"]:
    """Return the encoder's tokens of the patches with these indices; it sees the whole image."""
    return gather_patches(encoder(images), indices)


def lower_resolution(
    tokens: Float[Tensor, "batch n_patches dim"], grid: Grid, resolution: TargetResolution
) -> Float[Tensor, "batch n_patches dim"]:
    """Halve the resolution of features by bilinear resizing or max pooling, then repeat them on the original grid."""
    maps, half = tokens.mT.unflatten(2, grid), (-(-grid[0] // 2), -(-grid[1] // 2))
    smaller = F.adaptive_max_pool2d(maps, half) if resolution == "max" else F.interpolate(maps, half, mode="bilinear")
    return F.interpolate(smaller, grid).flatten(2).mT


@OBJECTIVES.register("ijepa")
def build_ijepa(config: ModelConfig) -> IJEPA:
    """Build I-JEPA, or StoP, with new weights."""
    encoder, chosen = build_encoder(config.encoder), config.objective
    predictor = build_predictor(
        config, encoder, outputs=None if chosen.target_resolution == "full" else 2 * encoder.dim
    )
    return IJEPA(encoder, predictor, chosen.beta, chosen.target_resolution, chosen.l1_strength)
