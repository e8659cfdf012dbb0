"""One step: accumulation, weight decay, clipping, schedules, and an update that is not made when it is not finite."""

from contextlib import nullcontext

import pytest
import torch
from tiny_run import CPU, tiny_config, tiny_objective

from stop_mim.masking import BlockwiseMasks, MultiBlockMasks, RandomMasks
from stop_mim.models.ijepa import IJEPA
from stop_mim.training.checkpoint import collect_tensors
from stop_mim.training.config import EncoderConfig, MaskConfig, ObjectiveConfig, PositionsConfig
from stop_mim.training.distributed import Ranks
from stop_mim.training.schedules import ScheduledValues
from stop_mim.training.step import TrainingStep, make_optimiser, read_outcomes

ALONE = Ranks(0, 1, 1, CPU)
VALUES = ScheduledValues(lr=1e-3, weight_decay=0.1, ema_momentum=0.9)
PLAIN_ENCODER = EncoderConfig("tiny", image_size=(32, 32), patch_size=8, width=24, depth=2, heads=2)


def make(sigma=0.0):
    objective = tiny_objective(positions=PositionsConfig(sigma=sigma), encoder=PLAIN_ENCODER)
    return objective, make_optimiser(objective, tiny_config().optim, CPU)


def a_batch(seed=0, count=8):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 32, 32, generator=generator), MultiBlockMasks(4).sample(count, generator=generator)


def do_step(objective, optimiser, batches, values=VALUES, clip=None, seed=0, **options):
    step = TrainingStep(objective, objective, optimiser, ALONE, nullcontext(), clip, **options)
    (outcome,) = read_outcomes([step(batches, values, seed)])
    return outcome


def snapshot(objective, optimiser):
    return {name: tensor.clone() for name, tensor in collect_tensors(objective, optimiser).items()}


def test_two_half_batches_are_one_whole_batch():
    images, masks = a_batch()
    outcomes, ends, gradients = [], [], []
    for batches in ([(images, masks)], [(images[:4], masks[:4]), (images[4:], masks[4:])]):
        objective, optimiser = make()
        outcomes.append(do_step(objective, optimiser, batches))
        gradients.append([parameter.grad for parameter in objective.parameters() if parameter.grad is not None])
        outcomes.append(do_step(objective, optimiser, batches))
        ends.append(snapshot(objective, optimiser))
    for whole, halves in zip(outcomes[:2], outcomes[2:], strict=True):
        assert halves.loss == pytest.approx(whole.loss, abs=1e-6)
        assert halves.gradient_norm == pytest.approx(whole.gradient_norm, abs=1e-6)
    for whole, halves in zip(*gradients, strict=True):
        torch.testing.assert_close(halves, whole, atol=1e-6, rtol=1e-4)
    # Adam divides by the gradient's size, so that weights with a gradient of nearly zero may differ by more.
    for name in ends[0]:
        torch.testing.assert_close(ends[0][name], ends[1][name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("with_mask_token", [False, True])
def test_everything_that_learns_is_optimised_once_and_only_matrices_decay(with_mask_token):
    objective, optimiser = make()
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
    do_step(objective, optimiser, [a_batch()], values, decay_mask_token=with_mask_token)
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
    batches = [a_batch(n) for n in range(5)]
    objective, optimiser = make()
    for batch, scheduled in zip(batches, values, strict=True):
        do_step(objective, optimiser, [batch], scheduled, clip=0.05)
    other, _ = make()
    plain_steps(other, batches, values, clip=0.05)
    expected = other.state_dict()
    for name, tensor in objective.state_dict().items():
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
    objective, optimiser = make()
    assert do_step(objective, optimiser, [a_batch()]).updated
    before = snapshot(objective, optimiser)
    with monkeypatch.context() as patch:
        poison(patch, value)
        outcome = do_step(objective, optimiser, [a_batch(1), a_batch(2)], clip=1.0)
    assert not outcome.updated
    after = collect_tensors(objective, optimiser)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    assert {tensor.item() for name, tensor in after.items() if name.startswith("optimiser.step.")} == {1.0}


def noisy_loss(batches=1, seed=0):
    objective, optimiser = make(sigma=4.0)
    torch.nn.init.normal_(objective.predictor.projection.weight)
    return do_step(objective, optimiser, [a_batch()] * batches, ScheduledValues(0.0, 0.0, 1.0), seed=seed).loss


def test_the_seed_decides_the_noise_and_torchs_own_generator_is_left_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    objective, optimiser = make(sigma=4.0)
    step = TrainingStep(objective, objective, optimiser, ALONE, nullcontext())
    assert noisy_loss() == noisy_loss() != noisy_loss(seed=1)
    # Every batch of a step has other noise.
    assert noisy_loss(batches=2) != noisy_loss()
    torch.set_rng_state(before)
    step([a_batch()], VALUES, seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def whole_noise(step, processes, n_batches, images=8):
    """The noise of all images of a step, from all processes."""
    masks, parts = a_batch(count=images // processes // n_batches)[1], {}
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
    objective, optimiser = make(sigma=4.0)
    step = TrainingStep(objective, objective, optimiser, ALONE, nullcontext())
    whole = whole_noise(step, 1, 1)
    assert len(whole.flatten(1).unique(dim=0)) == len(whole)
    for processes, n_batches in ((1, 4), (2, 1), (4, 2), (8, 1)):
        assert torch.equal(whole_noise(step, processes, n_batches), whole)


OTHERS = {
    "mae": (ObjectiveConfig("mae"), MaskConfig("random"), RandomMasks(4)),
    "data2vec": (ObjectiveConfig("data2vec", target_layers=2), MaskConfig("blockwise"), BlockwiseMasks(4)),
}


def make_other(kind, positions):
    objective, masks, sampler = OTHERS[kind]
    model = tiny_objective(objective=objective, masks=masks, positions=positions, encoder=PLAIN_ENCODER)
    batch = (
        torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0)),
        sampler.sample(8, generator=torch.Generator().manual_seed(0)),
    )
    return model, make_optimiser(model, tiny_config().optim, CPU), batch


@pytest.mark.parametrize("positions", [PositionsConfig(kind="sincos"), PositionsConfig()])
@pytest.mark.parametrize("kind", OTHERS)
def test_other_objectives_take_the_same_steps(kind, positions):
    objective, optimiser, batch = make_other(kind, positions)
    before = snapshot(objective, optimiser)
    losses = [do_step(objective, optimiser, [batch], ScheduledValues(3e-3, 0.0, 0.9)).loss for _ in range(12)]
    assert losses[-1] < losses[0]
    learned = {name: parameter for name, parameter in objective.named_parameters() if parameter.requires_grad}
    # As DistributedDataParallel wants it.
    assert all(parameter.grad is not None for parameter in learned.values())
    moved = {
        name for name, tensor in objective.state_dict().items() if not torch.equal(tensor, before[f"model.{name}"])
    }
    followers = {name.replace("encoder.", "target.") for name in learned if name.startswith("encoder.")}
    assert moved == set(learned) | (followers if kind == "data2vec" else set())
