"""One optimisation step: gradients of some batches, then weights and target, unless something is not finite."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stop_mim.masking import Masks
from stop_mim.models.objective import Objective
from stop_mim.training.config import OptimConfig
from stop_mim.training.distributed import Ranks, reduce_mean
from stop_mim.training.schedules import ScheduledValues


@dataclass(frozen=True)
class StepOutcome:
    """What came of a step; an update that was not finite was not made."""

    loss: float
    gradient_norm: float
    updated: bool


def make_optimiser(objective: Objective, optim: OptimConfig, device: torch.device) -> torch.optim.AdamW:
    """AdamW over everything that learns, without weight decay for biases, norms and other vectors."""
    learned = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in learned if parameter.ndim > 1], "decays": True},
        {"params": [parameter for parameter in learned if parameter.ndim <= 1], "decays": False},
    ]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, fused=device.type == "cuda")


def training_step(
    model: nn.Module,
    objective: Objective,
    optimiser: torch.optim.Optimizer,
    batches: Iterable[tuple[Float[Tensor, "batch 3 height width"], Masks]],
    n_batches: int,
    values: ScheduledValues,
    ranks: Ranks,
    autocast: AbstractContextManager[Any],
    generator: torch.Generator | None = None,
    clip_gradient_norm: float | None = None,
) -> StepOutcome:
    """Accumulate the gradients of `n_batches` batches, update the weights, move the target; `model` may share `objective`."""
    for group in optimiser.param_groups:
        group["lr"], group["weight_decay"] = values.lr, values.weight_decay if group["decays"] else 0.0
    optimiser.zero_grad(set_to_none=True)
    total = torch.zeros((), device=ranks.device)
    for number, (images, masks) in enumerate(batches, start=1):
        # Gradients are averaged over the processes once, with the last batch.
        waits = isinstance(model, DistributedDataParallel) and number < n_batches
        with model.no_sync() if waits else nullcontext():  # type: ignore[operator]
            with autocast:
                loss = model(images, masks, generator) / n_batches
            loss.backward()
        total += loss.detach()
    loss, norm = reduce_mean(total, ranks), gradient_norm(objective)
    outcome = StepOutcome(loss.item(), norm.item(), bool(torch.isfinite(loss) & torch.isfinite(norm)))
    if outcome.updated:
        if clip_gradient_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(objective.parameters(), clip_gradient_norm, norm)
        optimiser.step()
        objective.update_target(values.ema_momentum)
    return outcome


def gradient_norm(objective: Objective) -> Float[Tensor, ""]:
    """The norm of all gradients together."""
    gradients = [parameter.grad for parameter in objective.parameters() if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)
