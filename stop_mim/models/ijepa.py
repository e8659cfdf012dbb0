"""I-JEPA: predict the features that a slowly moving copy of the encoder gives to the target blocks."""

import copy

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from stop_mim.masking import Masks
from stop_mim.models.encoder import Encoder, gather_patches
from stop_mim.models.predictor import Predictor

Features = Float[Tensor, "batch n_blocks n_target dim"]


def prediction_loss(predicted: Features, target: Features) -> Float[Tensor, ""]:
    """Smooth-L1 between predicted and target features, averaged over all of them."""
    return F.smooth_l1_loss(predicted.float(), target.float())


class IJEPA(nn.Module):
    """The objective: (images, masks) to a loss. It owns the target encoder, an average of the encoder over time."""

    def __init__(self, encoder: Encoder, predictor: Predictor) -> None:
        super().__init__()
        self.encoder, self.predictor = encoder, predictor
        self.target = copy.deepcopy(encoder).requires_grad_(False)
        self.train()

    def train(self, mode: bool = True) -> "IJEPA":
        """Training mode for all but the target encoder."""
        super().train(mode)
        self.target.eval()
        return self

    def forward(
        self, images: Float[Tensor, "batch 3 height width"], masks: Masks, generator: torch.Generator | None = None
    ) -> Float[Tensor, ""]:
        """The loss of a batch; the generator draws the noise of stochastic positions."""
        return prediction_loss(self.predict(images, masks, generator), self.target_features(images, masks))

    def predict(
        self, images: Float[Tensor, "batch 3 height width"], masks: Masks, generator: torch.Generator | None = None
    ) -> Features:
        """Features of the target blocks as predicted from the context."""
        context = self.encoder(images, masks.context)
        return self.predictor(context, masks.context, masks.targets, generator)

    @torch.no_grad()
    def target_features(self, images: Float[Tensor, "batch 3 height width"], masks: Masks) -> Features:
        """Features of the target blocks as the target encoder sees them in the whole image, layer-normed."""
        tokens = gather_patches(self.target(images), masks.targets.flatten(1))
        return F.layer_norm(tokens, tokens.shape[-1:]).unflatten(1, masks.targets.shape[1:])

    @torch.no_grad()
    def update_target(self, momentum: float) -> None:
        """Move the target encoder towards the encoder by the part 1 - momentum."""
        pairs = zip(self.target.parameters(), self.encoder.parameters(), strict=True)
        moving: list[tuple[Tensor, Tensor]] = [(theirs, ours) for theirs, ours in pairs if ours.requires_grad]
        torch._foreach_lerp_([theirs for theirs, _ in moving], [ours for _, ours in moving], 1 - momentum)
