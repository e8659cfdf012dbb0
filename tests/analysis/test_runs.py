import json
import math
import shutil

import pytest
import torch
from analysed_runs import pretend, probed, train_tiny

from stop_mim.analysis.runs import (
    Noise,
    check_comparable,
    check_same_grid,
    common_accuracy,
    noise_of,
    open_run,
    read_records,
    spread,
    spreads_by_sigma,
)
from stop_mim.errors import InputError
from stop_mim.training.checkpoint import checkpoints_in, read_checkpoint
from stop_mim.training.config import EncoderConfig, OptimConfig, PositionsConfig


def evaluation(metrics, label="class", data="data/train.parquet", protocol=None):
    return {"label": label, "data": data, "protocol": protocol or {"name": "usual"}, "metrics": metrics}


def test_a_run_is_opened_with_its_newest_weights_in_evaluation_mode(stop_run):
    run = open_run(stop_run)
    assert (run.name, run.step, run.grid, run.last_step) == ("stop", 8, (4, 6), 8)
    assert not run.objective.training
    assert not run.objective.positions.training
    newest = read_checkpoint(checkpoints_in(stop_run / "checkpoints")[8])
    for name, tensor in run.objective.state_dict().items():
        assert torch.equal(tensor, newest.tensors[f"model.{name}"])
    assert run.newest("health/A_norm") == pytest.approx(
        run.objective.predictor.projection.weight.norm().item(), rel=1e-5
    )
    assert run.results == []


def test_sigma_of_a_schedule_is_the_one_of_the_checkpoint(tmp_path):
    folder = train_tiny(
        tmp_path / "scheduled", positions=PositionsConfig(sigma=1.0, sigma_start=0.0), stop_after_steps=5
    )
    run = open_run(folder)
    assert run.step == 5
    assert run.objective.positions.sigma == pytest.approx(4 / 7)
    assert run.objective.positions.sigma == pytest.approx(run.newest("sigma"))


def test_what_is_no_run_is_told_in_one_sentence(stop_run, tmp_path):
    with pytest.raises(InputError, match=r"nothing holds no run .*name the folder of a run\.$"):
        open_run(tmp_path / "nothing")
    empty = pretend(stop_run, tmp_path / "empty")
    shutil.rmtree(empty / "checkpoints")
    with pytest.raises(InputError, match=r"empty has no checkpoint: train it until it has saved one"):
        open_run(empty)
    assert read_records(empty).last_step == 8
    odd = pretend(
        stop_run, tmp_path / "odd", encoder=EncoderConfig("tiny", image_size=(32, 48), patch_size=8, width=48)
    )
    with pytest.raises(InputError, match=r"does not fit its run's configuration"):
        open_run(odd)
    with pytest.raises(InputError, match=r"has no 'probe/linear_top1' in its metrics.jsonl: train it further"):
        read_records(stop_run).newest("probe/linear_top1")


def test_runs_of_different_grids_are_not_compared(stop_run, tmp_path):
    finer = EncoderConfig("tiny", image_size=(32, 48), patch_size=4, width=24, depth=2, heads=2)
    runs = [read_records(path) for path in (stop_run, pretend(stop_run, tmp_path / "finer", encoder=finer))]
    with pytest.raises(InputError, match=r"4x6 patches and .* has 8x12: compare runs of one grid\."):
        check_same_grid(runs)
    check_same_grid([runs[0]] * 2)


def test_noise_by_form_and_sigma(stop_run):
    config = read_records(stop_run).config

    def of(**positions):
        return noise_of(config.__class__(positions=PositionsConfig(**positions)))

    assert noise_of(config) == Noise("tied", 0.25)
    assert of(covariance="identity", sigma=1) == Noise("identity", 1.0)
    for silent in ({"kind": "sincos"}, {"sigma": 0.0}, {"apply_to": "none"}, {"kind": "learned"}):
        assert of(**silent) == Noise("none", 0.0)
    assert of(kind="jittered", jitter_scale=0.7) == Noise("jittered", 0.7)


def test_only_runs_that_differ_in_noise_and_seed_are_comparable(stop_run, tmp_path):
    made = {
        "seed": {"seed": 1},
        "sigma": {"positions": PositionsConfig(sigma=1.0)},
        "fixed": {"positions": PositionsConfig(kind="sincos")},
        "identity": {"positions": PositionsConfig(covariance="identity")},
        "context": {"positions": PositionsConfig(sigma=1.0, apply_to="context")},
        "scheduled": {"positions": PositionsConfig(sigma=1.0, sigma_start=0.0)},
        "learned": {"positions": PositionsConfig(kind="learned")},
        "longer": {"optim": OptimConfig(epochs=5, warmup_epochs=0.5)},
        "released": {"positions": PositionsConfig(kind="sincos", convention="release")},
        "twin": {},
    }
    runs = {name: read_records(pretend(stop_run, tmp_path / name, **change)) for name, change in made.items()}
    first = read_records(stop_run)
    check_comparable([first, runs["seed"], runs["sigma"], runs["fixed"], runs["identity"]])
    check_comparable([runs["fixed"], runs["context"]])
    for name, complaint in {
        "context": "differ in positions.apply_to",
        "scheduled": "differ in positions.sigma_start",
        "released": "differ in positions.convention",
        "longer": "differ in optim.epochs",
        "twin": "are the same run with the same seed: give it once",
        "learned": "has learned positions",
    }.items():
        with pytest.raises(InputError, match=complaint):
            check_comparable([first, runs[name]])
    with pytest.raises(InputError, match="covariance 'identity', which this figure does not compare"):
        check_comparable([first, runs["identity"]], forms=["tied"])
    (runs["sigma"].path / "metrics.jsonl").write_text(json.dumps({"step": 4, "epoch": 1.0}))
    with pytest.raises(InputError, match=r"stands at step 8 and .* at step 4: finish both"):
        check_comparable([first, read_records(runs["sigma"].path)])


def test_the_accuracy_nearest_to_the_papers_that_all_runs_have(stop_run, tmp_path):
    every = {
        "knn/top1@20": 30.0,
        "linear/top1": 50.0,
        "linear/top5": 80.0,
        "low-shot/1%/top1": 10.0,
        "low-shot/1%/top1@0": 9.0,
    }
    both = pretend(stop_run, tmp_path / "both", signs=probed(40.0), results=[evaluation(every)])
    fewer = {name: every[name] for name in ("knn/top1@20", "linear/top1")}
    some = pretend(stop_run, tmp_path / "some", signs=probed(41.0), results=[evaluation(fewer)])
    other = pretend(
        stop_run, tmp_path / "other", signs=probed(42.0), results=[evaluation(fewer, protocol={"name": "odd"})]
    )
    runs = {path.name: read_records(path) for path in (both, some, other)}
    assert len(runs["both"].accuracies()) == 5
    assert common_accuracy([runs["both"]]).startswith("low-shot/1%/top1, data/train.parquet")
    assert common_accuracy([runs["both"], runs["some"]]).startswith("linear/top1, data/train.parquet")
    assert common_accuracy([runs["both"]], "linear/top1").startswith("linear/top1, data/train.parquet")
    with pytest.raises(
        InputError, match=r"do not all have the score 'linear': choose one of knn/top1@20, linear/top1, low-"
    ):
        common_accuracy([runs["both"]], "linear")
    of_both = [
        evaluation({"linear/top1": value}, label, "scenes") for label, value in (("count", 1.0), ("distance", 2.0))
    ]
    scenes = read_records(pretend(stop_run, tmp_path / "scenes", results=of_both))
    for score, value in (("linear/top1", 1.0), ("count/linear/top1", 1.0), ("distance/linear/top1", 2.0)):
        assert scenes.accuracies()[common_accuracy([scenes], score)] == value
    with pytest.raises(InputError, match=r"choose one of count/linear/top1, distance/linear/top1\."):
        common_accuracy([scenes], "top1")
    # What was measured in another way has another name, and only the probe of the training is left.
    assert common_accuracy([runs["some"], runs["other"]]) == "probe/linear_top1"
    assert runs["other"].accuracies()["probe/linear_top1"] == 42.0
    with pytest.raises(InputError, match=r"stop shares no top-1 accuracy with the others: evaluate all of them"):
        common_accuracy([runs["both"], read_records(stop_run)])


def test_spreads_are_means_and_unbiased_deviations_over_seeds(stop_run, tmp_path):
    tied = [PositionsConfig(sigma=sigma) for sigma in (1.0, 0.25)]
    folders = [
        pretend(stop_run, tmp_path / f"{number}", seed=seed, positions=positions, signs=probed(top1))
        for number, (positions, seed, top1) in enumerate(
            [(tied[0], 0, 10.0), (tied[0], 1, 14.0), (tied[1], 0, 20.0), (PositionsConfig(kind="sincos"), 0, 5.0)]
        )
    ]
    found = spreads_by_sigma([read_records(path) for path in folders], lambda run: run.newest("probe/linear_top1"))
    assert list(found) == ["none", "tied"]
    assert list(found["tied"]) == [0.25, 1.0]
    assert (found["tied"][1.0].mean, found["tied"][1.0].count) == (12.0, 2)
    assert found["tied"][1.0].std == pytest.approx(math.sqrt(8))
    assert (found["none"][0.0].mean, found["none"][0.0].count) == (5.0, 1)
    assert math.isnan(found["none"][0.0].std)
    assert spread([1.0, 2.0, 3.0]).std == pytest.approx(1.0)
