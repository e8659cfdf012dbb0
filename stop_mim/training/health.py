"""Collapse and divergence, seen while it trains: a few numbers, and warnings with a remedy."""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from stop_mim.models.objective import Objective
from stop_mim.training.online_probe import evaluation_mode

MAX_IMAGES, MAX_TOKENS = 128, 2048
VANISHED_A = 0.1
EXPLODED_MASK_TOKEN = 5.0
COLLAPSED_STD = 0.05
COLLAPSED_RANK = 0.02
OVERWHELMING_NOISE = 3.0


@dataclass(frozen=True)
class HealthSigns:
    """What the health of a run is judged by."""

    A_norm: float
    """Frobenius norm of the projection's weight."""
    mask_token_norm: float
    """Norm of the learned vector m̃."""
    position_norm: float
    """Root mean square norm of the positions ψ."""
    noise_to_signal: float
    """‖A n‖ over ‖ψ‖, both as root mean squares."""
    feature_std: float
    """Standard deviation of the layer-normed features of the encoder that is kept, over tokens of a batch, averaged."""
    rankme: float
    """Effective rank of these features (RankMe): the exponential of the entropy of their singular values."""
    rank_limit: int
    """The largest value that RankMe could have."""
    ema_distance: float
    """‖encoder - target‖ over ‖encoder‖; zero where there is no target encoder."""


@torch.no_grad()
def measure_health(objective: Objective, images: Float[Tensor, "batch 3 height width"]) -> HealthSigns:
    """The signs on (a part of) a batch of images."""
    masked = objective.masked_tokens
    position_norm = masked.positions.table().float().square().sum(-1).mean().sqrt()
    noise = masked.positions.noise_power().float().sqrt()
    with evaluation_mode(objective.frozen):
        tokens = objective.frozen(images[:MAX_IMAGES]).float().flatten(0, 1)
    features = F.layer_norm(tokens, tokens.shape[-1:])[:: max(1, len(tokens) // MAX_TOKENS)][:MAX_TOKENS]
    return HealthSigns(
        A_norm=masked.projection.weight.float().norm().item(),
        mask_token_norm=masked.mask_token.float().norm().item(),
        position_norm=position_norm.item(),
        noise_to_signal=(noise.to(position_norm) / position_norm.clamp(min=1e-12)).item(),
        feature_std=features.std(0).mean().item(),
        rankme=effective_rank(features),
        rank_limit=min(features.shape),
        ema_distance=ema_distance(objective),
    )


def effective_rank(features: Float[Tensor, "n dim"]) -> float:
    """RankMe: exp of the entropy of the singular values, normed to sum 1; nan of features that are not finite."""
    if not torch.isfinite(features).all():
        return math.nan
    features = features.double()
    # By way of the smaller Gram matrix, many times faster than the singular values themselves.
    gram = features.mT @ features if features.shape[0] > features.shape[1] else features @ features.mT
    singular = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    parts = singular / singular.sum().clamp(min=1e-12) + 1e-7
    return math.exp(-(parts * parts.log()).sum().item())


@torch.no_grad()
def ema_distance(objective: Objective) -> float:
    """How far the target encoder is behind, relative to the encoder's weights."""
    pairs = list(zip(objective.encoder.parameters(), objective.frozen.parameters(), strict=True))
    moving = [(ours, theirs) for ours, theirs in pairs if ours.requires_grad]
    apart = sum((ours - theirs).float().square().sum() for ours, theirs in moving)
    size = sum(ours.float().square().sum() for ours, _ in moving)
    return math.sqrt(float(apart) / max(float(size), 1e-12))


@dataclass
class HealthMonitor:
    """Turns signs into warnings, each once until it has gone away."""

    first: HealthSigns | None = None
    active: set[str] = field(default_factory=set)

    def warnings(self, signs: HealthSigns) -> list[str]:
        """New warnings, each with a remedy."""
        if self.first is None:
            self.first = signs
        found = {name: text for name, holds, text in self._judge(signs, self.first) if holds}
        new = [text for name, text in found.items() if name not in self.active]
        self.active = set(found)
        return new

    def _judge(self, signs: HealthSigns, first: HealthSigns) -> list[tuple[str, bool, str]]:
        return [
            (
                "A",
                signs.A_norm < VANISHED_A * first.A_norm,
                f"A is vanishing: its norm is {signs.A_norm:.3g}, it began at {first.A_norm:.3g}; the model turns the noise, "
                "and the context, off. Lower positions.sigma or optim.weight_decay.",
            ),
            (
                "mask_token",
                signs.mask_token_norm > EXPLODED_MASK_TOKEN * signs.position_norm,
                f"The mask token is exploding: its norm is {signs.mask_token_norm:.3g}, the positions' is "
                f"{signs.position_norm:.3g}; the noise drowns it. Lower positions.sigma or optim.lr.",
            ),
            (
                "noise",
                signs.noise_to_signal > OVERWHELMING_NOISE,
                f"The noise is {signs.noise_to_signal:.3g} times the positions: masked tokens no longer know where they are. "
                "Lower positions.sigma.",
            ),
            (
                "features",
                signs.feature_std < COLLAPSED_STD or signs.rankme < COLLAPSED_RANK * signs.rank_limit,
                f"Features are collapsing: RankMe is {signs.rankme:.1f} of {signs.rank_limit}, their standard deviation "
                f"{signs.feature_std:.3g}. Lower optim.lr, raise optim.ema_start, or lower positions.sigma.",
            ),
        ]
