"""One step: accumulation, weight decay, clipping, schedules, and an update that is not made when it is not finite."""

import pytest
import torch
from stepping import assert_same_state, make_batches, make_step, state_of
from tiny_run import CPU, tiny_config

from stop_mim.models.ijepa import IJEPA
from stop_mim.training.config import PositionsConfig
from stop_mim.training.distributed import Ranks
from stop_mim.training.schedules import ScheduledValues
from stop_mim.training.step import read_outcomes

VALUES = ScheduledValues(lr=1e-3, weight_decay=0.1, ema_momentum=0.9)
SILENT = PositionsConfig(sigma=0.0)


def a_batch(number=0, images=8, sampler=None):
    return make_batches(number, 1, images=images, sampler=sampler)[0]


def take_one(step, batches, values=VALUES, seed=0):
    (outcome,) = read_outcomes([step(batches, values, seed)])
    return outcome


def test_two_half_batches_are_one_whole_batch():
    images, masks = a_batch()
    outcomes, gradients = [], []
    for batches in ([(images, masks)], [(images[:4], masks[:4]), (images[4:], masks[4:])]):
        step = make_step(positions=SILENT)
        outcomes.append(take_one(step, batches))
        gradients.append([parameter.grad for parameter in step.objective.parameters() if parameter.grad is not None])
    whole, halves = outcomes
    assert halves.loss == pytest.approx(whole.loss, abs=1e-6)
    assert halves.gradient_norm == pytest.approx(whole.gradient_norm, rel=1e-5)
    for whole, halves in zip(*gradients, strict=True):
        torch.testing.assert_close(halves, whole, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("with_mask_token", [False, True])
def test_everything_that_learns_is_optimised_once_and_only_matrices_decay(with_mask_token):
    step = make_step(positions=SILENT, decay_mask_token=with_mask_token)
    objective, optimiser = step.objective, step.optimiser
    optimised = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    learned = {id(parameter) for parameter in objective.parameters() if parameter.requires_grad}
    assert sorted(map(id, optimised)) == sorted(learned)
    assert not {id(parameter) for parameter in objective.target.parameters()} & learned
    # Decay is the step's: the optimiser would decay a second time.
    assert [group["weight_decay"] for group in optimiser.param_groups] == [0.0]
    still = {name: parameter.clone() for name, parameter in objective.named_parameters()}
    for parameter in optimised:
        parameter.register_hook(torch.zeros_like)
    values = ScheduledValues(lr=0.1, weight_decay=0.5, ema_momentum=1.0)
    take_one(step, [a_batch()], values)
    for name, parameter in objective.named_parameters():
        decays = parameter.ndim > 1 or (with_mask_token and name == "predictor.mask_token")
        kept = 0.95 if parameter.requires_grad and decays else 1.0
        torch.testing.assert_close(parameter.detach(), kept * still[name], atol=0, rtol=1e-6)


def plain_steps(objective, batches, values, clip):
    """The same by torch's own, unfused, AdamW with its own weight decay, and by the target's definition."""
    learned = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    matrices, vectors = [p for p in learned if p.ndim > 1], [p for p in learned if p.ndim <= 1]
    betas = tiny_config().optim.betas
    optimiser = torch.optim.AdamW([{"params": matrices}, {"params": vectors}], betas=betas, foreach=False)
    for batch, scheduled in zip(batches, values, strict=True):
        for group, decay in zip(optimiser.param_groups, (scheduled.weight_decay, 0.0), strict=True):
            group["lr"], group["weight_decay"] = scheduled.lr, decay
        optimiser.zero_grad()
        objective(*batch).backward()
        torch.nn.utils.clip_grad_norm_(learned, clip)
        optimiser.step()
        with torch.no_grad():
            for theirs, ours in zip(objective.target.parameters(), objective.encoder.parameters(), strict=True):
                theirs.mul_(scheduled.ema_momentum).add_((1 - scheduled.ema_momentum) * ours)


def test_steps_are_those_of_torchs_adamw_with_moving_schedules():
    values = [ScheduledValues(1e-3 * (1 + n), 0.1 * n, 0.9 + 0.02 * n) for n in range(5)]
    batches = [(images.double(), masks) for images, masks in map(a_batch, range(5))]
    step, other = make_step(positions=SILENT, clip=0.05), make_step(positions=SILENT).objective.double()
    step.objective.double()
    for batch, scheduled in zip(batches, values, strict=True):
        take_one(step, [batch], scheduled)
    plain_steps(other, batches, values, clip=0.05)
    expected = other.state_dict()
    for name, tensor in step.objective.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], atol=2e-6, rtol=1e-4)


def poisoned_loss(monkeypatch, value):
    real = IJEPA.forward
    monkeypatch.setattr(IJEPA, "forward", lambda self, *arguments: real(self, *arguments) * value)


def poisoned_gradient(monkeypatch, value):
    def forward(self, *arguments):
        self.predictor.head.weight.register_hook(lambda gradient: gradient * value)
        return real(self, *arguments)

    real = IJEPA.forward
    monkeypatch.setattr(IJEPA, "forward", forward)


@pytest.mark.parametrize(
    ("poison", "value"), [(poisoned_loss, float("nan")), (poisoned_gradient, float("inf"))], ids=["loss", "gradient"]
)
def test_a_step_that_is_not_finite_changes_no_bit(monkeypatch, poison, value):
    step = make_step(clip=1.0)
    assert take_one(step, [a_batch()]).updated
    before = state_of(step)
    with monkeypatch.context() as patch:
        poison(patch, value)
        assert not take_one(step, [a_batch(1), a_batch(2)]).updated
    assert_same_state(state_of(step), before)
    assert {tensor.item() for name, tensor in before.items() if name.startswith("optimiser.step.")} == {1.0}


def test_the_seed_decides_the_noise_and_torchs_own_generator_is_left_alone():
    step, still = make_step(), ScheduledValues(0.0, 0.0, 1.0)

    def loss(batches=1, seed=0):
        return take_one(step, [a_batch()] * batches, still, seed).loss

    before = torch.get_rng_state()
    assert loss() == loss() != loss(seed=1)
    # Every batch of a step has other noise.
    assert loss(batches=2) != loss()
    assert torch.equal(torch.get_rng_state(), before)


def whole_noise(step, processes, n_batches, images=8):
    """The noise of all images of a step, from all processes."""
    masks, parts = a_batch(images=images // processes // n_batches)[1], {}
    for rank in range(processes):
        step.ranks, step.generators = Ranks(rank, processes, processes, CPU), {}
        # The second time, the generators exist already.
        for _ in range(2):
            step.schedule(VALUES, seed=5)
            parts |= {(number, rank): step._draw_noise(masks, number, n_batches).masked for number in range(n_batches)}
    return torch.cat([parts[place] for place in sorted(parts)])


@pytest.mark.parametrize("shard_images", [3, 64])
def test_the_noise_of_a_step_does_not_depend_on_the_processes(monkeypatch, shard_images):
    monkeypatch.setattr("stop_mim.training.step.SHARD_IMAGES", shard_images)
    step = make_step()
    whole = whole_noise(step, 1, 1)
    assert len(whole.flatten(1).unique(dim=0)) == len(whole)
    for processes, n_batches in ((1, 4), (2, 1), (4, 2), (8, 1)):
        assert torch.equal(whole_noise(step, processes, n_batches), whole)
