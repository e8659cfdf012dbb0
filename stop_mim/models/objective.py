"""What an objective is: trainer, probe and health signs know of I-JEPA, MAE and data2vec no more than this."""

import copy
from abc import ABC, abstractmethod
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from stop_mim.errors import InputError
from stop_mim.masking import Masks
from stop_mim.models.encoder import Encoder
from stop_mim.positions import Positions


@runtime_checkable
class MaskedTokens(Protocol):
    """The part of an objective that makes masked tokens m = ψ̂ + m̃ beside context tokens c = A s + b + ψ."""

    projection: nn.Linear
    """The layer whose weight is A."""
    positions: Positions
    """What ψ̂ is."""
    mask_token: nn.Parameter
    """The learned vector m̃."""


class Objective(nn.Module, ABC):
    """(images, masks) to a loss; the generator draws the noise of stochastic positions."""

    encoder: Encoder
    """What is trained."""

    @abstractmethod
    def forward(
        self, images: Float[Tensor, "batch 3 height width"], masks: Masks, generator: torch.Generator | None = None
    ) -> Float[Tensor, ""]:
        """The loss of a batch."""

    @property
    @abstractmethod
    def frozen(self) -> Encoder:
        """The encoder whose frozen features are wanted: it is saved, probed and looked at."""

    @property
    @abstractmethod
    def masked_tokens(self) -> MaskedTokens:
        """The part that makes masked tokens."""

    @property
    def positions(self) -> Positions:
        """The positions of masked tokens, which may follow a schedule."""
        return self.masked_tokens.positions

    def update_target(self, momentum: float) -> None:
        """Move the target, if there is one, after a step: it keeps the part `momentum` of itself."""
        self.move_target(1 - momentum)

    def move_target(self, weight: float | Float[Tensor, ""]) -> None:
        """Move the target, if there is one, by this part of the way; a number on its device is not waited for."""

    @abstractmethod
    def layers(self) -> list[nn.Module]:
        """The transformer layers of all parts."""


class TargetObjective(Objective):
    """An objective that owns a target encoder: an average of the encoder over time, which no gradient reaches."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.target = copy.deepcopy(encoder).requires_grad_(False)
        self.train()

    def train(self, mode: bool = True) -> "TargetObjective":
        """Training mode for all but the target encoder."""
        super().train(mode)
        self.target.eval()
        return self

    @property
    def frozen(self) -> Encoder:
        """The target encoder."""
        return self.target

    @abstractmethod
    def predict(
        self, images: Float[Tensor, "batch 3 height width"], masks: Masks, generator: torch.Generator | None = None
    ) -> Tensor:
        """Features of the target patches as predicted from the context."""

    @abstractmethod
    def target_features(self, images: Float[Tensor, "batch 3 height width"], masks: Masks) -> Tensor:
        """Features of the target patches as the target encoder sees them in the whole image."""

    @torch.no_grad()
    def move_target(self, weight: float | Float[Tensor, ""]) -> None:
        """Move the target encoder towards the encoder by this part of the way."""
        pairs = zip(self.target.parameters(), self.encoder.parameters(), strict=True)
        moving: list[tuple[Tensor, Tensor]] = [(theirs, ours) for theirs, ours in pairs if ours.requires_grad]
        if isinstance(weight, Tensor) and weight.is_cuda:
            for theirs, ours in moving:
                theirs.lerp_(ours, weight)
        else:
            torch._foreach_lerp_([theirs for theirs, _ in moving], [ours for _, ours in moving], float(weight))


def top_layers_mean(
    encoder: Encoder, images: Float[Tensor, "batch 3 height width"], layers: int, final_norm: bool
) -> Float[Tensor, "batch n_patches dim"]:
    """Mean over the encoder's last layers of their layer-normed patch tokens; its own last norm may come before."""
    outputs = encoder.vit.forward_intermediates(
        images, indices=layers, norm=final_norm, output_fmt="NLC", intermediates_only=True
    )
    return torch.stack([F.layer_norm(tokens, tokens.shape[-1:]) for tokens in outputs]).mean(0)


def check_target_layers(encoder: Encoder, layers: int) -> None:
    """Refuse targets from more layers than there are."""
    if not 1 <= layers <= encoder.depth:
        raise InputError(
            f"objective.target_layers is {layers}: the encoder has {encoder.depth} layers, choose at most those."
        )
