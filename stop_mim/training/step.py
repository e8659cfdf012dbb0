"""One optimisation step: accumulate gradients, then update weights and target encoder if loss and gradients are finite.

Nothing here waits for the device: the outcome of a step is a tensor there, read when its values are needed.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stop_mim.masking import Masks
from stop_mim.models.objective import Objective, local_part
from stop_mim.models.predictor import Noise
from stop_mim.seeds import derive_seed
from stop_mim.training.config import OptimConfig
from stop_mim.training.distributed import Ranks, reduce_mean, whole_tensor
from stop_mim.training.schedules import ScheduledValues

MaskedBatches = Sequence[tuple[Float[Tensor, "batch 3 height width"], Masks]]
Outcome = Float[Tensor, "3"]
"""Loss, gradient norm, and whether the weights were updated, on the device."""

SHARD_IMAGES = 64
"""Images of a virtual shard: the noise of a step is drawn shard by shard, each from its own seed."""


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of a step; a step with a loss or gradient that is not finite does not update the weights."""

    loss: float
    gradient_norm: float
    updated: bool


def read_outcomes(outcomes: Sequence[Outcome]) -> list[StepOutcome]:
    """Wait for the steps of these outcomes and return their values."""
    if not outcomes:
        return []
    return [StepOutcome(loss, norm, bool(updated)) for loss, norm, updated in torch.stack(list(outcomes)).tolist()]


def make_optimiser(objective: Objective, optim: OptimConfig, device: torch.device) -> torch.optim.AdamW:
    """Return AdamW over all trained parameters; the step applies weight decay itself, so that it can follow a schedule."""
    learned = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    on_gpu = device.type == "cuda"
    # As a tensor, the learning rate of a captured CUDA graph can change.
    lr = torch.tensor(optim.lr, device=device) if on_gpu else optim.lr
    return torch.optim.AdamW(learned, lr=lr, betas=optim.betas, weight_decay=0.0, fused=True, capturable=on_gpu)


class TrainingStep:
    """Trains on batches, with scheduled values and a seed for the noise; returns an `Outcome`.

    Gradients of the batches are accumulated. Weight decay applies to matrices, not to biases, norms and other vectors.
    All state that changes from step to step is in tensors and in `generators`, so that `run` can be captured as a CUDA
    graph.

    The noise of an image depends on its place in the batch of all processes, not on how many processes or accumulated batches
    share it: it is drawn for virtual shards of `SHARD_IMAGES` images.

    Args:
        model: the objective, or the objective wrapped for several processes.
        objective: the objective itself.
        optimiser: from `make_optimiser`.
        ranks: this process among all.
        autocast: context of the forward pass.
        clip_gradient_norm: the largest norm of all gradients together; None: any.
        decay_mask_token: whether weight decay applies to the mask token m̃ too.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        optimiser: torch.optim.AdamW,
        ranks: Ranks,
        autocast: AbstractContextManager[Any],
        clip_gradient_norm: float | None = None,
        decay_mask_token: bool = False,
    ) -> None:
        self.model, self.objective, self.optimiser = model, objective, optimiser
        self.ranks, self.autocast = ranks, autocast
        self.clip_gradient_norm = clip_gradient_norm
        self.generators: dict[tuple[int, int], torch.Generator] = {}
        """The generators of the positional noise, by accumulated batch and virtual shard."""
        self._seed = 0
        self._learned: list[Tensor] = [p for group in optimiser.param_groups for p in group["params"]]
        decaying_vector = objective.masked_tokens.mask_token if decay_mask_token else None
        self._decaying = [tensor for tensor in self._learned if tensor.ndim > 1 or tensor is decaying_vector]
        self._decay_factor = torch.ones((), device=ranks.device)
        self._ema_weight = torch.zeros((), device=ranks.device)

    def __call__(self, batches: MaskedBatches, values: ScheduledValues, seed: int) -> Outcome:
        self.schedule(values, seed)
        return self.run(batches)

    def schedule(self, values: ScheduledValues, seed: int) -> None:
        """Set the scheduled values and the seed of the next step."""
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(values.lr)
            else:
                group["lr"] = values.lr
        self._decay_factor.fill_(1 - values.lr * values.weight_decay)
        self._ema_weight.fill_(1 - values.ema_momentum)
        self._seed = seed
        for (_, shard), generator in self.generators.items():
            generator.manual_seed(self._seed_of(shard))

    def run(self, batches: MaskedBatches) -> Outcome:
        """Take the step that was scheduled."""
        self.optimiser.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.ranks.device)
        for number, (images, masks) in enumerate(batches):
            noise = self._draw_noise(masks, number, len(batches))
            with synchronised(self.model, is_last=number == len(batches) - 1):
                with self.autocast:
                    part = self.model(images, masks, noise) / len(batches)
                part.backward()
            total += part.detach()
        loss, norm = reduce_mean(total, self.ranks), gradient_norm(self.objective)
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        self._update(norm, finite)
        return torch.stack([loss, norm.to(loss), finite.to(loss)])

    def _draw_noise(self, masks: Masks, number: int, n_batches: int) -> Noise:
        """Return the noise of one accumulated batch: its part of every virtual shard that it overlaps with."""
        size, n_images = len(masks), len(masks) * n_batches * self.ranks.world_size
        # The images of this batch, counted over the accumulated batches of all processes.
        first = (number * self.ranks.world_size + self.ranks.rank) * size
        end = first + size
        parts = []
        for shard in range(first // SHARD_IMAGES, math.ceil(end / SHARD_IMAGES)):
            shard_first = shard * SHARD_IMAGES
            shard_size = min(SHARD_IMAGES, n_images - shard_first)
            # The noise of the whole shard is drawn, so that an image's noise does not depend on how images are split.
            like = Masks(masks.context[:1].expand(shard_size, -1), masks.targets[:1].expand(shard_size, -1, -1))
            noise = self.objective.draw_noise(like, self._generator(number, shard))
            ours = slice(max(first - shard_first, 0), min(end - shard_first, shard_size))
            parts.append([None if one is None else one.unflatten(0, (shard_size, -1))[ours] for one in noise])
        context, masked = (
            None if kind[0] is None else torch.cat(kind).flatten(0, 1) for kind in zip(*parts, strict=True)
        )
        return Noise(context, masked)

    def _generator(self, number: int, shard: int) -> torch.Generator:
        if (number, shard) not in self.generators:
            generator = torch.Generator(self.ranks.device).manual_seed(self._seed_of(shard))
            self.generators[number, shard] = generator
        return self.generators[number, shard]

    def _seed_of(self, shard: int) -> int:
        return derive_seed(self._seed, "shard", shard) if shard else self._seed

    @torch.no_grad()
    def _update(self, norm: Float[Tensor, ""], finite: Bool[Tensor, ""]) -> None:
        if self.clip_gradient_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._learned, self.clip_gradient_norm, norm)
        torch._foreach_mul_([local_part(one) for one in self._decaying], torch.where(finite, self._decay_factor, 1.0))
        step_if_finite(self.optimiser, finite)
        self.objective.move_target(torch.where(finite, self._ema_weight, 0.0))


def synchronised(model: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
    """Return the context of a backward pass; DDP averages gradients only in the last one of a step."""
    if isinstance(model, DistributedDataParallel) and not is_last:
        return model.no_sync()
    return nullcontext()


def step_if_finite(optimiser: torch.optim.Optimizer, finite: Bool[Tensor, ""]) -> None:
    """Take a step of a fused optimiser if `finite` is true, without waiting for the device."""
    # As a gradient scaler does: with found_inf set, the optimiser's kernel changes nothing.
    optimiser.found_inf = (~finite).float()  # type: ignore[attr-defined]
    optimiser.step()


def gradient_norm(model: nn.Module) -> Float[Tensor, ""]:
    """Return the norm of all gradients together."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return whole_tensor(torch.nn.utils.get_total_norm(gradients))
