"""Runs of every objective: resumed bit for bit, probed without harm, refused where they cannot work."""

import math

import pytest
import torch
from quiet_run import MID_EPOCH, MOVING, TOTAL, comparable, go_on, run
from tiny_run import checkpoint_at, tiny_config, write_colours

from stop_mim.errors import InputError
from stop_mim.exchange.loading import load_encoder
from stop_mim.training.config import MaskConfig, ObjectiveConfig, PositionsConfig, ProbeConfig
from stop_mim.training.run_folder import read_metrics

MAE = {"objective": ObjectiveConfig("mae"), "masks": MaskConfig("random")}
DATA2VEC = {
    "objective": ObjectiveConfig("data2vec", target_layers=2, beta=2.0),
    "masks": MaskConfig("blockwise", mask_ratio=0.6),
}
OBJECTIVES = {
    "mae": MAE | {"positions": PositionsConfig(kind="sincos")},
    "stop-mae": MAE | {"positions": MOVING},
    "data2vec": DATA2VEC | {"positions": PositionsConfig(kind="sincos")},
    "stop-data2vec": DATA2VEC | {"positions": MOVING},
    "ijepa from two layers": {"objective": ObjectiveConfig(target_layers=2, beta=0.5)},
}


@pytest.mark.parametrize("case", OBJECTIVES)
def test_a_run_of_any_objective_is_resumed_bit_for_bit(tmp_path, case):
    groups = OBJECTIVES[case]
    run(tiny_config(out=tmp_path / "whole", **groups))
    run(tiny_config(out=tmp_path / "parts", stop_after_steps=MID_EPOCH, **groups))
    assert go_on(tmp_path / "parts").finished
    whole, parts = checkpoint_at(tmp_path / "whole", TOTAL), checkpoint_at(tmp_path / "parts", TOTAL)
    assert whole.state == parts.state
    assert whole.tensors.keys() == parts.tensors.keys()
    assert all(torch.equal(tensor, parts.tensors[name]) for name, tensor in whole.tensors.items())
    for one, other in zip(comparable(tmp_path / "whole"), comparable(tmp_path / "parts"), strict=True):
        assert {name: other[name] for name in one} == one
    lines = read_metrics(tmp_path / "whole")
    assert sum(line["loss"] for line in lines[-5:]) < sum(line["loss"] for line in lines[:5])
    assert [line["sigma"] for line in lines][:: TOTAL - 1] == pytest.approx(
        [0.05, 2.0] if case.startswith("stop") else [0.25, 0.25] if case.startswith("ijepa") else [0.0, 0.0]
    )
    assert all(math.isfinite(value) for line in lines for value in line.values())
    kept = "model.encoder.vit." if "mae" in case else "model.target.vit."
    for name, tensor in load_encoder(tmp_path / "whole").vit.state_dict().items():
        assert torch.equal(tensor, whole.tensors[kept + name]), name


@pytest.mark.parametrize("case", ["stop-mae", "stop-data2vec"])
def test_a_probe_of_another_objective_changes_nothing_in_it(tmp_path, case):
    colours = write_colours(tmp_path / "colours")
    probe = ProbeConfig(str(colours), batch_size=8, every_steps=2, score_every_steps=7, neighbours=3, memory=32)
    run(tiny_config(out=tmp_path / "plain", **OBJECTIVES[case]))
    run(tiny_config(out=tmp_path / "probed", probe=probe, **OBJECTIVES[case]))
    plain, probed = checkpoint_at(tmp_path / "plain", TOTAL), checkpoint_at(tmp_path / "probed", TOTAL)
    assert all(torch.equal(tensor, probed.tensors[name]) for name, tensor in plain.tensors.items())
    scores = [line for line in read_metrics(tmp_path / "probed") if "probe/linear_top1" in line]
    assert [line["step"] for line in scores] == [7, 14, 21]
    assert scores[-1]["probe/knn_top1"] > 50


def test_what_an_objective_cannot_do_is_refused_before_the_data_are_read(tmp_path):
    for groups, text in (
        ({"objective": ObjectiveConfig("data2vec")}, r"masks\.kind is multiblock"),
        (DATA2VEC | {"positions": PositionsConfig(kind="learned")}, r"positions\.kind is learned"),
        ({"objective": ObjectiveConfig(target_layers=3)}, r"objective\.target_layers is 3"),
    ):
        with pytest.raises(InputError, match=text):
            run(tiny_config(tmp_path / "missing", tmp_path / "run", **groups))
        assert not (tmp_path / "run").exists()
