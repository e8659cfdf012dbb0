"""The paper's two propositions by simulation: noisy positions smooth predictions, and tying A keeps it from vanishing.

Proposition 1 as written holds only for a flat prior of positions: in general the smoothed values are weighted by the
prior. Tied, the gradient at A = 0 is exactly that of the model without noise; untied it is zero for any data.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from stop_mim.seeds import derive_seed, seeded_generator, seeded_weights

Clean = Callable[[Tensor], Tensor]
Tying = Literal["tied", "untied"]

# Number of standard deviations beyond which a Gaussian is negligible in double precision.
REACH = 8.0


def square_wave(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return a smoothed square wave of period 2π: E[Y | X = x] in the simulation."""
    return torch.tanh(6 * torch.sin(x))


@dataclass(frozen=True)
class Prior:
    """The distribution of positions: points and their probabilities."""

    points: Float[Tensor, " n"]
    weights: Float[Tensor, " n"]

    def sample(self, count: int, generator: torch.Generator) -> Float[Tensor, " count"]:
        chances = torch.rand(count, generator=generator, dtype=torch.float64) * self.weights.sum()
        return self.points[torch.searchsorted(self.weights.cumsum(0), chances).clamp(max=len(self.points) - 1)]


def uniform_prior(half_width: float, n_points: int = 1201) -> Prior:
    """Return the uniform distribution on [-half_width, half_width]."""
    points = torch.linspace(-half_width, half_width, n_points, dtype=torch.float64)
    return Prior(points, torch.full_like(points, 1 / n_points))


def normal_prior(std: float, n_points: int = 1201) -> Prior:
    """Return the normal distribution with mean zero."""
    points = torch.linspace(-REACH * std, REACH * std, n_points, dtype=torch.float64)
    return Prior(points, torch.softmax(-0.5 * (points / std).square(), 0))


def convolution(clean: Clean, noisy: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return the clean values convolved with the density of the noise, N(0, 1): proposition 1 as the paper writes it."""
    z = torch.linspace(-REACH, REACH, 1001, dtype=torch.float64)
    weights = torch.softmax(-0.5 * z.square(), 0)
    return clean(noisy.double()[:, None] + z) @ weights


def optimal_predictor(clean: Clean, prior: Prior, noisy: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return E[Y | R = r] for R = X + Z, Z ~ N(0, 1): the clean values weighted by the noise's density and the prior.

    No predictor has a lower squared error. With a flat prior, away from its borders, it is the convolution.
    """
    distances = noisy.double()[:, None] - prior.points
    posterior = torch.softmax(prior.weights.log() - 0.5 * distances.square(), dim=1)
    return posterior @ clean(prior.points)


def train_predictor(clean: Clean, prior: Prior, steps: int) -> Clean:
    """Train a small network to predict noisy answers Y from R = X + Z under squared error; takes seconds on one core."""
    generator, batch_size, answer_std = seeded_generator("cpu", 0, "smoothing"), 512, 0.2
    with seeded_weights(derive_seed(0, "weights")):
        network = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss_of(step: int) -> Tensor:
        x = prior.sample(batch_size, generator)
        noisy = x + torch.randn(batch_size, generator=generator, dtype=torch.float64)
        answers = clean(x) + answer_std * torch.randn(batch_size, generator=generator, dtype=torch.float64)
        return (network(noisy.float()[:, None])[:, 0] - answers.float()).square().mean()

    _minimise(loss_of, network.parameters(), 0.01, steps)
    return lambda noisy: network(noisy.float()[:, None])[:, 0].detach().double()


@dataclass(frozen=True)
class ToyBatch:
    """Context features s and positions, the position of one masked patch, its answer, and the noise n of its position."""

    context: Float[Tensor, "batch n_context encoder_dim"]
    context_positions: Float[Tensor, "batch n_context dim"]
    masked_position: Float[Tensor, "batch dim"]
    answer: Float[Tensor, "batch encoder_dim"]
    noise: Float[Tensor, "batch encoder_dim"]


@dataclass(frozen=True)
class ToyTask:
    """Positions are points on a ring; the answer is a function of the position plus, if informative, the mean context.

    - `informative`: whether the answer depends on the context. If not, no model gains from projecting it.
    - `sigma`: the variance of n.
    """

    informative: bool = True
    sigma: float = 0.25
    encoder_dim: int = 6
    dim: int = 8
    n_context: int = 4
    answer_std: float = 0.1

    def sample(self, count: int, generator: torch.Generator) -> ToyBatch:
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

    def __init__(self, task: ToyTask, seed: int = 0) -> None:
        super().__init__()
        hidden = 32
        with seeded_weights(derive_seed(seed, "weights")):
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
        """Return the squared error; without a noise factor the positions are fixed."""
        context = batch.context @ context_projection.T + self.bias + batch.context_positions
        masked = batch.masked_position + self.mask_token
        if noise_factor is not None:
            masked = masked + batch.noise @ noise_factor.T
        seen, asked = torch.tanh(self.layer(context)).mean(1), torch.tanh(self.layer(masked))
        predicted = self.head(torch.cat([seen, asked], dim=1))
        return (predicted - batch.answer).square().sum(1).mean()


def gradients_at_zero(task: ToyTask, n_samples: int) -> dict[str, Tensor]:
    """Estimate the gradients of the expected loss at A = 0, of one predictor on the same examples.

    - tied: d/dA where A projects the context and the noise.
    - untied: d/dA where A projects the noise, and another, non-zero matrix the context.
    - deterministic: d/dB at B = 0 of the model without noise.
    """
    predictor = ToyPredictor(task)
    batch = task.sample(n_samples, seeded_generator("cpu", 0, "gradients"))
    other = seeded_generator("cpu", 0, "context projection")
    projection = torch.randn(task.dim, task.encoder_dim, generator=other, dtype=torch.float64)
    zero = torch.zeros(task.dim, task.encoder_dim, dtype=torch.float64, requires_grad=True)
    losses = {
        "tied": predictor(batch, zero, zero),
        "untied": predictor(batch, projection, zero),
        "deterministic": predictor(batch, zero, None),
    }
    return {name: torch.autograd.grad(loss, zero)[0] for name, loss in losses.items()}


def train_toy(task: ToyTask, tying: Tying, steps: int, seed: int = 0) -> dict[int, float]:
    """Train a toy model with its matrices, from the same start for every `tying`; return ‖A‖ of the noise by step."""
    predictor = ToyPredictor(task, seed)
    start = seeded_generator("cpu", seed, "start")
    B, own = (
        nn.Parameter(0.3 * torch.randn(task.dim, task.encoder_dim, generator=start, dtype=torch.float64))
        for _ in range(2)
    )
    A = B if tying == "tied" else own
    generator = seeded_generator("cpu", seed, "examples")
    norms: dict[int, float] = {}

    def loss_of(step: int) -> Tensor:
        if step % max(1, steps // 60) == 0:
            norms[step] = A.norm().item()
        return predictor(task.sample(64, generator), B, A)

    _minimise(loss_of, dict.fromkeys([*predictor.parameters(), B, A]), 0.02, steps)
    return norms | {steps: A.norm().item()}


def _minimise(loss_of: Callable[[int], Tensor], parameters: Iterable[nn.Parameter], lr: float, steps: int) -> None:
    """Train with Adam; the learning rate falls to zero along a cosine."""
    optimiser = torch.optim.Adam(parameters, lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for step in range(steps):
        optimiser.zero_grad()
        loss_of(step).backward()
        optimiser.step()
        schedule.step()
