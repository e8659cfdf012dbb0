"""Health of a run: a few numbers that show collapse and divergence early, and warnings with a remedy."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from stop_mim.models.encoder import evaluation_mode
from stop_mim.models.objective import Objective
from stop_mim.training.distributed import gathered, is_sharded
from stop_mim.training.step import StepOutcome
from stop_mim.training.trainer import Callback, Trainer

MAX_IMAGES, MAX_TOKENS = 128, 2048
VANISHED_A = 0.1
EXPLODED_MASK_TOKEN = 5.0
COLLAPSED_STD = 0.05
COLLAPSED_RANK = 0.02
OVERWHELMING_NOISE = 3.0


def _sign(label: str, meaning: str = "") -> Any:
    return field(metadata={"label": label, "meaning": meaning})


@dataclass(frozen=True)
class HealthSigns:
    """Numbers that the health of a run is judged by, each with its label and a short explanation for tables and charts."""

    A_norm: float = _sign("|A|", "Frobenius norm of the projection from encoder to predictor")
    mask_token_norm: float = _sign("|m̃|", "norm of the mask token")
    position_norm: float = _sign("|ψ|", "root mean square norm of the positions")
    noise_to_signal: float = _sign("Noise to signal", "‖A n‖ over ‖ψ‖")
    """Both norms are root mean squares."""
    feature_std: float = _sign("Spread of the features", "standard deviation; 0 means collapse")
    """Over tokens, of the layer-normed features of the saved encoder, averaged over features."""
    rankme: float = _sign("RankMe", "effective rank of the features; low means collapse")
    """The exponential of the entropy of the singular values of these features."""
    rank_limit: int = _sign("RankMe, upper limit")
    ema_distance: float = _sign("Distance to the target encoder", "relative to the encoder's weights")
    """‖encoder - target‖ over ‖encoder‖; zero without a target encoder."""


@dataclass(frozen=True)
class Sign:
    """One of the health signs: its key in metrics.jsonl, and its texts for tables and charts."""

    key: str
    label: str
    meaning: str


SIGNS = {one.name: Sign(f"health/{one.name}", **one.metadata) for one in fields(HealthSigns)}
"""By field of HealthSigns."""


def signs_in(measurements: Mapping[str, float]) -> dict[str, float]:
    """Return the health signs among measurements, such as a line of metrics.jsonl, by field of HealthSigns."""
    return {name: measurements[sign.key] for name, sign in SIGNS.items() if sign.key in measurements}


@torch.no_grad()
def measure_health(objective: Objective, images: Float[Tensor, "batch 3 height width"]) -> HealthSigns:
    """Measure the health signs on (a part of) a batch of images."""
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
    """Return RankMe, exp of the entropy of the normalised singular values; nan if a feature is not finite."""
    if not torch.isfinite(features).all():
        return math.nan
    features = features.double()
    # From the smaller Gram matrix, which is many times faster than a singular value decomposition.
    gram = features.mT @ features if features.shape[0] > features.shape[1] else features @ features.mT
    singular = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    parts = singular / singular.sum().clamp(min=1e-12) + 1e-7
    return math.exp(-(parts * parts.log()).sum().item())


@torch.no_grad()
def ema_distance(objective: Objective) -> float:
    """Return the distance from encoder to target encoder, relative to the norm of the encoder's weights."""
    pairs = list(zip(objective.encoder.parameters(), objective.frozen.parameters(), strict=True))
    moving = [(ours, theirs) for ours, theirs in pairs if ours.requires_grad]
    apart = sum((ours - theirs).float().square().sum() for ours, theirs in moving)
    size = sum(ours.float().square().sum() for ours, _ in moving)
    return math.sqrt(float(apart) / max(float(size), 1e-12))


def find_symptoms(signs: HealthSigns, first: HealthSigns) -> dict[str, str]:
    """Return a warning for each symptom; `first` are the signs after the first step of the run."""
    symptoms = {}
    if signs.A_norm < VANISHED_A * first.A_norm:
        symptoms["A"] = (
            f"A is vanishing: its norm is {signs.A_norm:.3g} and was {first.A_norm:.3g} at the start, so the predictor sees "
            "neither noise nor context. Lower positions.sigma or optim.weight_decay."
        )
    if signs.mask_token_norm > EXPLODED_MASK_TOKEN * signs.position_norm:
        symptoms["mask_token"] = (
            f"The mask token is exploding: its norm is {signs.mask_token_norm:.3g}, that of the positions is "
            f"{signs.position_norm:.3g}. Lower positions.sigma or optim.lr."
        )
    if signs.noise_to_signal > OVERWHELMING_NOISE:
        symptoms["noise"] = (
            f"The noise is {signs.noise_to_signal:.3g} times as large as the positions, which it hides from masked "
            "tokens. Lower positions.sigma."
        )
    if signs.feature_std < COLLAPSED_STD or signs.rankme < COLLAPSED_RANK * signs.rank_limit:
        symptoms["features"] = (
            f"Features are collapsing: RankMe is {signs.rankme:.1f} of {signs.rank_limit}, their standard deviation "
            f"{signs.feature_std:.3g}. Lower optim.lr, raise optim.ema_start, or lower positions.sigma."
        )
    return symptoms


class Symptoms:
    """The symptoms of a run: a warning is given once, and again if the symptom comes back."""

    def __init__(self) -> None:
        self.first: HealthSigns | None = None
        self._known: set[str] = set()

    def new_in(self, signs: HealthSigns) -> list[str]:
        """Return the warnings of symptoms that the previous signs did not have."""
        self.first = self.first or signs
        found = find_symptoms(signs, self.first)
        new = [text for name, text in found.items() if name not in self._known]
        self._known = set(found)
        return new


class WatchHealth(Callback):
    """Measures the health signs every `every_steps` steps, and warns of new symptoms."""

    name = "health"

    def __init__(self, objective: Objective, every_steps: int, warn: Callable[[str], None]) -> None:
        self.objective, self.every_steps, self.warn = objective, every_steps, warn
        # All processes gather the weights of a sharded model; the main one measures.
        self.on_every_rank = is_sharded(objective)
        self.symptoms = Symptoms()

    def needs_outcomes(self, step: int) -> bool:
        return step == 1 or step % self.every_steps == 0

    def after_step(self, trainer: Trainer, batch: Any, outcomes: Sequence[StepOutcome]) -> None:
        if not (self.needs_outcomes(trainer.done) or trainer.done == trainer.last_step):
            return
        with gathered(self.objective):
            signs = measure_health(self.objective, batch[0][0]) if trainer.ranks.is_main else None
        if signs is not None:
            trainer.measurements |= {SIGNS[name].key: value for name, value in asdict(signs).items()}
            self.judge(signs)

    def judge(self, signs: HealthSigns) -> None:
        """Warn of new symptoms."""
        for text in self.symptoms.new_in(signs):
            self.warn(text)

    def state(self) -> dict[str, Any]:
        first = self.symptoms.first
        return {"first": None if first is None else asdict(first)}

    def restore(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.symptoms.first = None if state["first"] is None else HealthSigns(**state["first"])
