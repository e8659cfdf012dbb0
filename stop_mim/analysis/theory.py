"""The paper's two propositions, by simulation: noisy positions make predictions smooth, and tying A keeps it from zero.

Proposition 1 as written holds for positions of a flat prior alone: in general the smoothed values are weighted by where
positions lie. Tied, the gradient at A = 0 is exactly that of the model without noise; untied it is zero whatever the data.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from stop_mim.seeds import derive_seed, seeded_generator

Clean = Callable[[Tensor], Tensor]
Tying = Literal["tied", "untied", "deterministic"]

# So far from its middle, in standard deviations, a Gaussian is nothing in double precision.
REACH = 8.0


def square_wave(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """A wave of period 2π with steep flanks: what E[Y | X = x] is in the simulation, and what smoothing changes most."""
    return torch.tanh(6 * torch.sin(x))


@dataclass(frozen=True)
class Prior:
    """Where positions lie: points and the chance of each, as patches have it."""

    points: Float[Tensor, " n"]
    weights: Float[Tensor, " n"]

    def sample(self, count: int, generator: torch.Generator) -> Float[Tensor, " count"]:
        """Positions drawn from it."""
        chances = torch.rand(count, generator=generator, dtype=torch.float64) * self.weights.sum()
        return self.points[torch.searchsorted(self.weights.cumsum(0), chances).clamp(max=len(self.points) - 1)]


def uniform_prior(half_width: float, n_points: int = 1201) -> Prior:
    """Every place from -half_width to half_width alike."""
    points = torch.linspace(-half_width, half_width, n_points, dtype=torch.float64)
    return Prior(points, torch.full_like(points, 1 / n_points))


def normal_prior(std: float, n_points: int = 1201) -> Prior:
    """Places near zero more often than others."""
    points = torch.linspace(-REACH * std, REACH * std, n_points, dtype=torch.float64)
    return Prior(points, torch.softmax(-0.5 * (points / std).square(), 0))


def convolution(clean: Clean, noisy: Float[Tensor, " n"], noise_std: float = 1.0) -> Float[Tensor, " n"]:
    """Proposition 1 as the paper writes it: the clean values, convolved with the density of the noise."""
    z = torch.linspace(-REACH, REACH, 1001, dtype=torch.float64)
    weights = torch.softmax(-0.5 * z.square(), 0)
    return clean(noisy.double()[:, None] + noise_std * z) @ weights


def optimal_predictor(
    clean: Clean, prior: Prior, noisy: Float[Tensor, " n"], noise_std: float = 1.0
) -> Float[Tensor, " n"]:
    """E[Y | R = r] for R = X + Z: the clean values, weighted by the density of the noise and by the prior of X.

    It has the least squared error of all predictors. With a flat prior, away from its borders, it is the convolution.
    """
    distances = (noisy.double()[:, None] - prior.points) / noise_std
    posterior = torch.softmax(prior.weights.log() - 0.5 * distances.square(), dim=1)
    return posterior @ clean(prior.points)


@dataclass(frozen=True)
class TrainedPredictor:
    """A small network that was shown noisy positions and answers, and nothing of the theory."""

    network: nn.Module

    @torch.no_grad()
    def __call__(self, noisy: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """What it predicts at these noisy positions."""
        return self.network(noisy.float()[:, None])[:, 0].double()


def train_predictor(
    clean: Clean,
    prior: Prior,
    noise_std: float = 1.0,
    answer_std: float = 0.2,
    steps: int = 1000,
    batch_size: int = 512,
    seed: int = 0,
) -> TrainedPredictor:
    """Learn Y from R = X + Z under squared error, with answers Y that have noise of their own; seconds on one core."""
    generator = seeded_generator("cpu", seed, "smoothing")
    with _seeded_weights(seed):
        network = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimiser = torch.optim.Adam(network.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        x = prior.sample(batch_size, generator)
        noisy = x + noise_std * torch.randn(batch_size, generator=generator, dtype=torch.float64)
        answers = clean(x) + answer_std * torch.randn(batch_size, generator=generator, dtype=torch.float64)
        loss = (network(noisy.float()[:, None])[:, 0] - answers.float()).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return TrainedPredictor(network)


@dataclass(frozen=True)
class ToyBatch:
    """Context features s of some patches, the place of one masked patch, the answer there, and noise n for its position."""

    context: Float[Tensor, "batch n_context encoder_dim"]
    context_positions: Float[Tensor, "batch n_context dim"]
    masked_position: Float[Tensor, "batch dim"]
    answer: Float[Tensor, "batch encoder_dim"]
    noise: Float[Tensor, "batch encoder_dim"]


@dataclass(frozen=True)
class ToyTask:
    """Positions are points of a ring; the answer is the place's own part and, if informative, what the context says.

    - `informative`: whether the answer depends on the context. Where it does not, neither model gains from B.
    - `sigma`: the variance of n.
    """

    informative: bool = True
    sigma: float = 0.25
    encoder_dim: int = 6
    dim: int = 8
    n_context: int = 4
    answer_std: float = 0.1

    def sample(self, count: int, generator: torch.Generator) -> ToyBatch:
        """Fresh examples."""

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        angles = 2 * math.pi * torch.rand(count, self.n_context + 1, generator=generator, dtype=torch.float64)
        positions = self._embed(angles)
        context = normal(count, self.n_context, self.encoder_dim)
        place = positions[:, -1, : self.encoder_dim]
        said = context.mean(1) if self.informative else torch.zeros_like(place)
        answer = place + said + self.answer_std * normal(count, self.encoder_dim)
        noise = math.sqrt(self.sigma) * normal(count, self.encoder_dim)
        return ToyBatch(context, positions[:, :-1], positions[:, -1], answer, noise)

    def _embed(self, angles: Float[Tensor, "batch n"]) -> Float[Tensor, "batch n dim"]:
        turns = angles[..., None] * torch.arange(1, self.dim // 2 + 1, dtype=torch.float64)
        return torch.cat([turns.sin(), turns.cos()], dim=-1)


class ToyPredictor(nn.Module):
    """Context tokens c = B s + b + ψ and a masked token m = A n + ψ + m̃ go through the same layer, as in a transformer."""

    def __init__(self, task: ToyTask, hidden: int = 32, seed: int = 0) -> None:
        super().__init__()
        with _seeded_weights(seed):
            self.layer = nn.Linear(task.dim, hidden, dtype=torch.float64)
            self.head = nn.Linear(2 * hidden, task.encoder_dim, dtype=torch.float64)
            self.bias = nn.Parameter(0.1 * torch.randn(task.dim, dtype=torch.float64))
            self.mask_token = nn.Parameter(0.1 * torch.randn(task.dim, dtype=torch.float64))

    def forward(
        self,
        batch: ToyBatch,
        context_projection: Float[Tensor, "dim encoder_dim"],
        noise_factor: Float[Tensor, "dim encoder_dim"] | None,
    ) -> Float[Tensor, ""]:
        """The squared error; without a noise factor the positions are fixed."""
        context = batch.context @ context_projection.T + self.bias + batch.context_positions
        masked = batch.masked_position + self.mask_token
        if noise_factor is not None:
            masked = masked + batch.noise @ noise_factor.T
        seen, asked = torch.tanh(self.layer(context)).mean(1), torch.tanh(self.layer(masked))
        predicted = self.head(torch.cat([seen, asked], dim=1))
        return (predicted - batch.answer).square().sum(1).mean()


@dataclass(frozen=True)
class ZeroGradients:
    """Gradients of the expected loss at A = 0, estimated from samples, (dim, encoder_dim) each."""

    tied: Float[Tensor, "dim encoder_dim"]
    """d/dA where A projects context and noise."""
    untied: Float[Tensor, "dim encoder_dim"]
    """d/dA where A projects the noise alone, and another matrix, not zero, the context."""
    deterministic: Float[Tensor, "dim encoder_dim"]
    """d/dB at B = 0 of the model without noise."""


def gradients_at_zero(
    task: ToyTask, n_samples: int, seed: int = 0, antithetic: bool = False, predictor: ToyPredictor | None = None
) -> ZeroGradients:
    """Monte Carlo gradients at A = 0, of one predictor on the same examples.

    `antithetic` takes every noise n together with -n. At A = 0 that is the exact mean over the noise, because nothing there
    depends on n but the factor n itself: what is left of the difference is rounding.
    """
    predictor = predictor or ToyPredictor(task, seed=seed)
    batch = task.sample(n_samples, seeded_generator("cpu", seed, "gradients"))
    other = seeded_generator("cpu", seed, "context projection")
    projection = torch.randn(task.dim, task.encoder_dim, generator=other, dtype=torch.float64)
    zero = torch.zeros(task.dim, task.encoder_dim, dtype=torch.float64, requires_grad=True)
    signs = (1.0, -1.0) if antithetic else (1.0,)
    batches = [
        ToyBatch(batch.context, batch.context_positions, batch.masked_position, batch.answer, sign * batch.noise)
        for sign in signs
    ]

    def gradient(loss: Callable[[ToyBatch], Tensor]) -> Tensor:
        return torch.stack([torch.autograd.grad(loss(one), zero)[0] for one in batches]).mean(0)

    return ZeroGradients(
        tied=gradient(lambda one: predictor(one, zero, zero)),
        untied=gradient(lambda one: predictor(one, projection, zero)),
        deterministic=gradient(lambda one: predictor(one, zero, None)),
    )


@dataclass(frozen=True)
class ToyHistory:
    """Norms while a toy model learns; the noise factor of a model without noise is zero throughout."""

    steps: list[int]
    noise_norm: list[float]
    """Frobenius norm of the matrix that the noise goes through."""
    context_norm: list[float]
    """Frobenius norm of the matrix that the context goes through."""
    loss: list[float]


def train_toy(
    task: ToyTask, tying: Tying, steps: int = 600, batch_size: int = 64, lr: float = 0.02, seed: int = 0
) -> ToyHistory:
    """Learn a toy model, its matrices included, from the same start whatever is tied."""
    predictor = ToyPredictor(task, seed=seed)
    start = seeded_generator("cpu", seed, "start")
    B, own = (
        nn.Parameter(0.3 * torch.randn(task.dim, task.encoder_dim, generator=start, dtype=torch.float64))
        for _ in range(2)
    )
    A = {"tied": B, "untied": own, "deterministic": None}[tying]
    learned = [*predictor.parameters(), B, *([own] if tying == "untied" else [])]
    optimiser = torch.optim.Adam(learned, lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    generator = seeded_generator("cpu", seed, "examples")
    history = ToyHistory([], [], [], [])
    for step in range(steps + 1):
        loss = predictor(task.sample(batch_size, generator), B, A)
        if step % max(1, steps // 60) == 0 or step == steps:
            history.steps.append(step)
            history.noise_norm.append(0.0 if A is None else A.norm().item())
            history.context_norm.append(B.norm().item())
            history.loss.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return history


@contextmanager
def _seeded_weights(seed: int) -> Iterator[None]:
    """New layers draw from torch's global stream, which is put back where it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "weights"))
        yield
