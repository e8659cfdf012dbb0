"""What cannot work is told before the data are read and before there is a folder."""

from dataclasses import replace

import pytest
from quiet_run import run
from tiny_run import CPU, tiny_config

from stop_mim.errors import InputError
from stop_mim.sweeps.grid import SWEEPS, with_overrides
from stop_mim.training.config import (
    MaskConfig,
    ObjectiveConfig,
    PositionsConfig,
    PredictorConfig,
    SpeedConfig,
    TrainConfig,
)
from stop_mim.training.distributed import Ranks
from stop_mim.training.feasibility import require_effects, split_batch
from stop_mim.training.recipes import RECIPES


def test_what_is_wrong_is_told_before_the_data_are_read_and_the_folder_is_made(tmp_path):
    def refused(message, **groups):
        with pytest.raises(InputError, match=message):
            run(tiny_config(**{"data": tmp_path / "missing", "out": tmp_path / "run", **groups}))
        assert not (tmp_path / "run").exists()

    refused("There is no data set")
    refused(r"optim\.batch_size is 8", speed=SpeedConfig("cpu", batch_size_per_device=3))
    refused("masks do not fit", masks=MaskConfig(context_tokens=16))
    refused("There is no covariance 'tight'", positions=PositionsConfig(covariance="tight"))
    refused(r"predictor\.width is 18: give a multiple of 4", predictor=PredictorConfig(18, 1, 2))
    refused("no larger than the data set", data="scenes:count=4,size=32")


NO_EFFECT = [
    ({"objective": ObjectiveConfig("mae", target_resolution="max")}, "objective.target_resolution is max"),
    ({"objective": ObjectiveConfig("data2vec", l1_strength=0.5)}, "objective.l1_strength is 0.5"),
    ({"positions": PositionsConfig("sincos", sigma_start=0.1)}, "positions.sigma_start is 0.1"),
    ({"positions": PositionsConfig("learned", covariance="identity")}, "positions.covariance is identity"),
    ({"positions": PositionsConfig("sincos", apply_to="both")}, "positions.apply_to is both"),
    ({"positions": PositionsConfig(jitter_learned=True)}, "positions.jitter_learned is True"),
    ({"masks": MaskConfig("random", target_tokens=3)}, "masks.target_tokens is 3"),
    ({"masks": MaskConfig("blockwise", context_tokens=3)}, "masks.context_tokens is 3"),
    ({"masks": MaskConfig("random", compat="release")}, "masks.compat is release"),
]


@pytest.mark.parametrize(("groups", "message"), NO_EFFECT)
def test_what_would_have_no_effect_is_refused(tmp_path, groups, message):
    with pytest.raises(InputError, match=f"^{message}, which has no effect"):
        run(tiny_config(data=tmp_path / "missing", out=tmp_path / "run", **groups))


def test_every_recipe_and_every_variant_of_a_sweep_has_the_effects_that_it_asks_for():
    for make in RECIPES.values():
        require_effects(make())
    for sweep in SWEEPS.values():
        for variant in sweep.variants:
            require_effects(with_overrides(tiny_config(), variant.overrides))


def ranks(world_size):
    return Ranks(0, world_size, world_size, CPU)


def test_batches_are_split_over_devices_and_accumulated():
    def split(batch_size, per_device, world_size):
        config = TrainConfig(speed=SpeedConfig(batch_size_per_device=per_device))
        return split_batch(replace(config, optim=replace(config.optim, batch_size=batch_size)), ranks(world_size))

    assert split(64, None, 1) == (64, 1)
    assert split(64, None, 4) == (16, 1)
    assert split(64, 8, 1) == (8, 8)
    assert split(64, 8, 4) == (8, 2)
    for refused in ((64, 8, 3), (64, None, 3), (64, 128, 1), (2, None, 4)):
        with pytest.raises(InputError, match=f"optim.batch_size is {refused[0]}"):
            split(*refused)
