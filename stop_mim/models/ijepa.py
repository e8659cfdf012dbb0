"""I-JEPA: predict the features that a slowly moving copy of the encoder gives to the target blocks."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from stop_mim.errors import InputError
from stop_mim.masking import Masks
from stop_mim.models.encoder import Encoder, gather_patches
from stop_mim.models.frozen_forward import FrozenPrecision, frozen_tokens
from stop_mim.models.objective import TargetObjective, check_target_layers, top_layers_mean
from stop_mim.models.predictor import Predictor
from stop_mim.positions import Grid

TargetResolution = Literal["full", "bilinear", "max"]
Features = Float[Tensor, "batch n_blocks n_target dim"]


def prediction_loss(predicted: Features, target: Features, beta: float = 1.0) -> Float[Tensor, ""]:
    """Smooth-L1 between predicted and target features, averaged over all of them."""
    return F.smooth_l1_loss(predicted.float(), target.float(), beta=beta)


def lower_resolution(
    tokens: Float[Tensor, "batch n_patches dim"], grid: Grid, resolution: TargetResolution
) -> Float[Tensor, "batch n_patches dim"]:
    """Features at half the resolution, by bilinear resizing or max pooling, each given to all patches that it stands for."""
    if resolution == "full":
        return tokens
    maps, half = tokens.mT.unflatten(2, grid), (-(-grid[0] // 2), -(-grid[1] // 2))
    smaller = F.adaptive_max_pool2d(maps, half) if resolution == "max" else F.interpolate(maps, half, mode="bilinear")
    return F.interpolate(smaller, grid).flatten(2).mT


class IJEPA(TargetObjective):
    """The objective: (images, masks) to a loss. It owns the target encoder, an average of the encoder over time.

    - `target_layers`: of how many last layers of the target encoder the layer-normed features are averaged; I-JEPA's is 1.
    - `beta`: the error from which smooth-L1 is linear.
    - `target_resolution`: whether the targets are features at half the resolution, and how those are made.
    - `l1_strength`: how much the sum of the absolute values of A adds to the loss.

    `frozen_precision`, if it is set, lets the target encoder compute full-resolution targets of its last layer in bf16 or
    fp8, faster than autocast would.
    """

    def __init__(
        self,
        encoder: Encoder,
        predictor: Predictor,
        target_layers: int = 1,
        beta: float = 1.0,
        target_resolution: TargetResolution = "full",
        l1_strength: float = 0.0,
    ) -> None:
        super().__init__(encoder)
        check_target_layers(encoder, target_layers)
        if l1_strength < 0:
            raise InputError(f"objective.l1_strength is {l1_strength}: give zero or a positive number.")
        self.predictor, self.target_layers, self.beta = predictor, target_layers, beta
        self.target_resolution, self.l1_strength = target_resolution, l1_strength
        self.frozen_precision: FrozenPrecision | None = None
        self.train()

    @property
    def has_plain_targets(self) -> bool:
        """Whether targets are those of the last layer, at full resolution."""
        return self.target_layers == 1 and self.target_resolution == "full"

    @property
    def masked_tokens(self) -> Predictor:
        """The predictor."""
        return self.predictor

    def forward(
        self, images: Float[Tensor, "batch 3 height width"], masks: Masks, generator: torch.Generator | None = None
    ) -> Float[Tensor, ""]:
        """The loss of a batch; the generator draws the noise of stochastic positions."""
        loss = prediction_loss(self.predict(images, masks, generator), self.target_features(images, masks), self.beta)
        return loss + self.l1_strength * self.predictor.projection.weight.abs().sum() if self.l1_strength else loss

    def predict(
        self, images: Float[Tensor, "batch 3 height width"], masks: Masks, generator: torch.Generator | None = None
    ) -> Features:
        """Features of the target blocks as predicted from the context."""
        context = self.encoder(images, masks.context)
        return self.predictor(context, masks.context, masks.targets, generator)

    @torch.no_grad()
    def target_features(self, images: Float[Tensor, "batch 3 height width"], masks: Masks) -> Features:
        """Features of the target blocks as the target encoder sees them in the whole image, layer-normed."""
        wanted = masks.targets.flatten(1)
        if self.frozen_precision is not None and self.has_plain_targets:
            tokens = frozen_tokens(self.target, images, wanted, self.frozen_precision).float()
            return F.layer_norm(tokens, tokens.shape[-1:]).unflatten(1, masks.targets.shape[1:])
        if self.target_layers > 1:
            tokens = top_layers_mean(self.target, images, self.target_layers, final_norm=True)
        else:
            tokens = self.target(images)
        grid = (images.shape[2] // self.target.patch_size[0], images.shape[3] // self.target.patch_size[1])
        tokens = gather_patches(lower_resolution(tokens, grid, self.target_resolution), wanted)
        if self.target_layers == 1 or self.target_resolution != "full":
            tokens = F.layer_norm(tokens, tokens.shape[-1:])
        return tokens.unflatten(1, masks.targets.shape[1:])

    def layers(self) -> list[nn.Module]:
        """Those of encoder, target encoder and predictor."""
        return [*self.encoder.vit.blocks, *self.target.vit.blocks, *self.predictor.blocks]
