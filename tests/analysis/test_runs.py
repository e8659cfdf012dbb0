import json

import pytest
import torch
from analysed_runs import evaluation, pretend, probed, top1

from stop_mim.analysis.runs import Noise, RunRecords, check_comparable, common_score, read_records
from stop_mim.errors import InputError
from stop_mim.training.checkpoint import checkpoints_in, read_checkpoint
from stop_mim.training.config import EncoderConfig, OptimConfig, PositionsConfig, TrainConfig


def test_a_run_is_opened_with_its_newest_weights_in_evaluation_mode(stop_run):
    run = read_records(stop_run)
    assert (run.grid, run.last_step) == ((4, 6), 8)
    assert not run.objective.training
    assert not run.objective.positions.training
    newest = read_checkpoint(checkpoints_in(stop_run / "checkpoints")[8])
    for name, tensor in run.objective.state_dict().items():
        assert torch.equal(tensor, newest.tensors[f"model.{name}"])
    assert run.newest("health/A_norm") == pytest.approx(
        run.objective.predictor.projection.weight.norm().item(), rel=1e-5
    )
    assert run.results == []


def test_weights_that_do_not_fit_and_missing_metrics_are_errors(stop_run, tmp_path):
    odd = pretend(
        stop_run, tmp_path / "odd", encoder=EncoderConfig("tiny", image_size=(32, 48), patch_size=8, width=48)
    )
    with pytest.raises(InputError, match="does not fit"):
        _ = read_records(odd).objective
    with pytest.raises(InputError, match="probe/linear_top1"):
        read_records(stop_run).newest("probe/linear_top1")


def test_noise_by_form_and_sigma(tmp_path):
    def of(**positions):
        return RunRecords(tmp_path, TrainConfig(positions=PositionsConfig(**positions)), [], []).noise

    assert of() == Noise("tied", 0.25)
    assert of(covariance="identity", sigma=1) == Noise("identity", 1.0)
    for silent in ({"kind": "sincos"}, {"sigma": 0.0}, {"apply_to": "none"}, {"kind": "learned"}):
        assert of(**silent) == Noise("none", 0.0)


def test_only_runs_that_differ_in_noise_and_seed_are_comparable(stop_run, tmp_path):
    made = {
        "seed": {"seed": 1},
        "sigma": {"positions": PositionsConfig(sigma=1.0)},
        "fixed": {"positions": PositionsConfig(kind="sincos")},
        "identity": {"positions": PositionsConfig(covariance="identity")},
        "context": {"positions": PositionsConfig(sigma=1.0, apply_to="context")},
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
        "released": "differ in positions.convention",
        "longer": "differ in optim.epochs",
        "twin": "the same run with the same seed",
        "learned": "has learned positions",
    }.items():
        with pytest.raises(InputError, match=complaint):
            check_comparable([first, runs[name]])
    with pytest.raises(InputError, match="'identity'"):
        check_comparable([first, runs["identity"]], forms=["tied"])
    (runs["sigma"].path / "metrics.jsonl").write_text(json.dumps({"step": 4, "epoch": 1.0}))
    with pytest.raises(InputError, match=r"at step 8 and .* at step 4"):
        check_comparable([first, read_records(runs["sigma"].path)])


def test_the_scores_of_a_run_are_those_of_its_target(stop_run, tmp_path):
    names = ("run", "run#encoder", "run/checkpoints/step-00000008.safetensors", "untrained:run")
    results = [evaluation("knn", top1(10.0 * number), encoder=name) for number, name in enumerate(names)]
    run = read_records(pretend(stop_run, tmp_path / "run", results=results))
    assert [one.encoder for one in run.evaluations] == ["run"]


def test_the_score_nearest_to_the_papers_that_all_runs_have(stop_run, tmp_path):
    fewer = [evaluation("knn", top1(30.0)), evaluation("linear", top1(50.0))]
    amounts = [top1(20.0, variant={"amount": "10%"}), top1(10.0, variant={"amount": "1%"})]
    checkpoint = evaluation("linear", top1(99.0), encoder="run/checkpoints/step-00000004.safetensors")
    made = {
        "both": [*fewer, evaluation("low-shot", *amounts), checkpoint],
        "some": fewer,
        "other": [evaluation("linear", top1(51.0), name="odd")],
    }
    runs = {
        name: read_records(pretend(stop_run, tmp_path / name, signs=probed(40.0), results=results))
        for name, results in made.items()
    }
    for names, asked, score, value in [
        (["both"], None, "low-shot/1%/top1", 10.0),
        (["both", "some"], None, "linear/top1", 50.0),
        (["both"], "knn/top1", "knn/top1", 30.0),
        (["both"], "probe/knn_top1", "probe/knn_top1", 20.0),
        # What was measured under another protocol is another score: only the online probe is left.
        (["some", "other"], None, "probe/linear_top1", 40.0),
    ]:
        found = common_score([runs[name] for name in names], asked)
        assert (found.name, runs[names[0]].scores()[found]) == (score, value)
    with pytest.raises(InputError, match=r"'guess'.* knn/top1"):
        common_score([runs["both"]], "guess")
    with pytest.raises(InputError, match="other has no score 'linear/top1'"):
        common_score([runs["some"], runs["other"]], "linear/top1")
    with pytest.raises(InputError, match="stop shares no top-1 accuracy"):
        common_score([runs["both"], read_records(stop_run)])
    labels = [evaluation("linear", top1(value), label=label) for label, value in (("count", 1.0), ("distance", 2.0))]
    scenes = read_records(pretend(stop_run, tmp_path / "scenes", results=labels))
    for score, value in (("count/linear/top1", 1.0), ("distance/linear/top1", 2.0)):
        assert scenes.scores()[common_score([scenes], score)] == value
