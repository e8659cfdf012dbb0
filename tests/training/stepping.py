"""Steps of a tiny model, for tests of what makes steps faster."""

from contextlib import nullcontext

import torch
from tiny_run import CPU, tiny_config, tiny_objective

from stop_mim.masking import MultiBlockMasks
from stop_mim.training.checkpoint import collect_tensors
from stop_mim.training.config import EncoderConfig, PositionsConfig
from stop_mim.training.distributed import Ranks
from stop_mim.training.schedules import ScheduledValues
from stop_mim.training.step import TrainingStep, make_optimiser, read_outcomes

PLAIN_ENCODER = EncoderConfig("tiny", image_size=(32, 32), patch_size=8, width=32, depth=2, heads=2)
NOISY = PositionsConfig(sigma=1.0)


def make_step(device=CPU, autocast=None, clip=None, decay_mask_token=False, **groups):
    """A step of a model whose layers do something: at their initial size they would hardly change a loss."""
    objective = tiny_objective(**{"encoder": PLAIN_ENCODER, "positions": NOISY} | groups)
    with torch.no_grad():
        for name, parameter in objective.named_parameters():
            if ".blocks." in name:
                parameter.mul_(4)
        objective.masked_tokens.projection.weight.mul_(10)
    objective.to(device)
    optimiser = make_optimiser(objective, tiny_config().optim, device)
    ranks, autocast = Ranks(0, 1, 1, device), autocast or nullcontext()
    return TrainingStep(objective, objective, optimiser, ranks, autocast, clip, decay_mask_token)


def make_batches(number, count=2, device=CPU, images=4, sampler=None):
    generator = torch.Generator().manual_seed(number)
    sampler = sampler or MultiBlockMasks(4)
    return [
        (torch.randn(images, 3, 32, 32, generator=generator).to(device), sampler.sample(images, generator=generator))
        for _ in range(count)
    ]


def values_of(number):
    """Schedules that all move."""
    return ScheduledValues(
        lr=1e-3 * (1 + number % 3), weight_decay=0.05 * (1 + number), ema_momentum=0.9 + 0.01 * number
    )


def take(step, numbers, batches=make_batches):
    """The outcomes of these steps; their batches, schedules and seeds are functions of their numbers."""
    return read_outcomes([step(batches(number), values_of(number), seed=number) for number in numbers])


def state_of(step):
    return {name: tensor.clone() for name, tensor in collect_tensors(step.objective, step.optimiser).items()}


def assert_same_state(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
