"""Planned memory against what torch keeps and what a GPU measures; planned communication against what is sent."""

from dataclasses import replace

import pytest
import torch

from stop_mim import cli
from stop_mim.benchmark.config import PlanConfig
from stop_mim.benchmark.scaling import GIB, Sizes, choose, fits, lay_out, layouts
from stop_mim.masking import build_masks
from stop_mim.models.build import build_objective
from stop_mim.training.config import EncoderConfig, PredictorConfig, SpeedConfig
from stop_mim.training.continuation import fit_processes
from stop_mim.training.distributed import Ranks
from stop_mim.training.inputs import split_batch
from stop_mim.training.pretrain import memory_of_step
from stop_mim.training.recipes import find_recipe
from stop_mim.training.trial import forget_peak


def kept_bytes(config, images):
    """What autograd keeps for the backward pass of a loss in bf16, without weights."""
    torch.manual_seed(0)
    objective = build_objective(config)
    weights = {parameter.untyped_storage().data_ptr() for parameter in objective.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    masks = build_masks(config.masks, objective.encoder.grid).sample(images)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        loss = objective(torch.randn(images, 3, *config.encoder.image_size), masks)
    assert loss.requires_grad
    return sum(size for place, (size, _) in kept.items() if place not in weights)


def test_planned_activations_are_what_autograd_keeps():
    config = replace(
        find_recipe("stop-vitb16"),
        encoder=EncoderConfig("tiny", image_size=(64, 64), patch_size=8, width=96, depth=4, heads=3),
        predictor=PredictorConfig(width=48, depth=3, heads=3),
    )
    # The difference leaves out copies of the weights.
    kept = (kept_bytes(config, 12) - kept_bytes(config, 4)) / 8
    sizes = replace(Sizes.of(config), target_values=0)
    assert sizes.activations(recompute=False) == pytest.approx(kept, rel=0.1)
    assert sizes.activations(recompute=True) < kept / 2


def test_sharding_divides_the_state_and_hybrid_spares_the_network():
    sizes = Sizes.of(find_recipe("stop-vith14"))
    plan = PlanConfig(gpus=64)
    none, hybrid, full = (lay_out(sizes, plan, kind, False, 32, 1) for kind in ("none", "hybrid", "full"))
    assert full.state < hybrid.state < none.state / 4
    assert none.activations == hybrid.activations == full.activations
    # A ring of all GPUs sends nearly two copies of the gradients.
    assert none.sent_within == pytest.approx(2 * 4 * sizes.trained * 63 / 64 / 1e9)
    assert hybrid.sent_between < none.sent_between < full.sent_between
    alone = lay_out(sizes, PlanConfig(gpus=1), "none", False, 32, 1)
    assert (alone.sent_within, alone.sent_between) == (0, 0)


def test_the_choice_fits_and_recomputes_only_where_it_must():
    config = replace(find_recipe("stop-vith14"), encoder=EncoderConfig("giant", image_size=(224, 224), patch_size=16))
    for memory in (80.0, 24.0):
        plan = PlanConfig(gpus=8, memory=memory)
        best = choose(layouts(config, plan), plan)
        assert best is not None
        assert fits(best, plan)
        assert (best.sharding, best.recompute) == (("none", False) if memory == 80 else ("full", False))
        assert best.per_device * best.batches * 8 == config.optim.batch_size
    tiny = PlanConfig(gpus=1, memory=8.0)
    assert choose(layouts(config, tiny), tiny) is None


def test_the_command_says_what_to_use_or_that_it_does_not_fit(capsys):
    cli.main(["plan", "stop-vitb16", "--gpus", "16", "--memory", "80", "--images-per-second", "2000"])
    shown = capsys.readouterr().out
    assert "Use: --speed.batch-size-per-device 128" in shown
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "stop-vith14", "--gpus", "1", "--memory", "8"])
    assert ended.value.code == 2
    assert "does not fit 1 GPUs of 8 GiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], "optim.batch_size is 2048: it must be a multiple of 3 "),
        (["--optim.batch-size", "96", "--masks.compat", "release"], "96 with 32 images on a device"),
        (["--masks.mask-ratio", "0.9"], "masks.mask_ratio is 0.9, which has no effect"),
    ],
)
def test_what_training_refuses_is_not_planned(options, named, capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", "stop-vitb16", "--gpus", "3", *options])
    assert named in capsys.readouterr().err


def test_released_masks_are_planned_alike_each_time_and_in_batches_that_training_has():
    config, plan = find_recipe("stop-vitb16", "release"), PlanConfig(gpus=8)
    first = layouts(config, plan)
    Sizes.of.cache_clear()
    assert layouts(config, plan) == first
    assert {layout.per_device for layout in first} == {64}


@pytest.mark.parametrize(("processes", "images"), [(8, 64), (16, 32), (32, 16), (64, 8)])
def test_released_masks_are_planned_trained_and_resumed_in_batches_that_divide_those_of_64_images(processes, images):
    config, ranks = find_recipe("stop-vitb16", "release"), Ranks(0, processes, processes, torch.device("cpu"))
    config = replace(config, optim=replace(config.optim, batch_size=1536))
    assert {layout.per_device for layout in layouts(config, PlanConfig(gpus=processes))} == {images}
    resumed = fit_processes(replace(config, speed=SpeedConfig(batch_size_per_device=64)), ranks)
    assert split_batch(resumed, ranks) == split_batch(config, ranks) == (images, 1536 // (images * processes))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["stop-vitb16", "stop-vitl16"])
@pytest.mark.parametrize("images", [32, 128])
def test_planned_memory_is_what_a_gpu_measures(recipe, images, capsys):
    config, device = replace(find_recipe(recipe), speed=SpeedConfig("cuda")), torch.device("cuda")
    forget_peak(device)
    before = torch.cuda.memory_allocated()
    measured = (memory_of_step(config, device, images) - before) / GIB
    sizes = Sizes.of(config)
    layout = lay_out(sizes, PlanConfig(gpus=1), "none", False, images, 1)
    planned = layout.state + layout.activations
    with capsys.disabled():
        print(
            f"{recipe}, {images} images: planned {planned:.2f}, measured {measured:.2f} GiB, {before / GIB:.2f} before"
        )
    # Without other processes or accumulation, gradients take the place of activations, and are never there with all of them.
    assert planned - 4 * sizes.trained / GIB == pytest.approx(measured, rel=0.05)
