"""What tasks, encoders and processes share: images decoded once, features computed once, weights looked at once."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from quick_evaluation import QUICK, silent

from stop_mim.evaluation import features as features_module
from stop_mim.evaluation import session as session_module
from stop_mim.evaluation.config import LinearSGDOptions
from stop_mim.evaluation.evaluate import evaluate


def test_features_are_computed_once(run, colours, monkeypatch):
    config = replace(QUICK, task=("linear", "knn"), data=str(colours))
    evaluate([str(run)], config, silent())

    def never(*arguments, **options):
        raise AssertionError("the features are stored")

    monkeypatch.setattr("stop_mim.evaluation.features.labelled_views", never)
    first, second = evaluate([str(run)], config, silent())
    assert len(json.loads((run / "results.json").read_text())["evaluations"]) == 2
    assert first.metrics["linear/top1"] == 100
    assert second.metrics["knn/top1@3"] > 50


def test_two_processes_share_the_work(run, colours, tmp_path):
    """Features and SGD heads under torchrun are those of one process."""
    options = [
        *("--task", "knn", "linear-sgd", "--data", str(colours), "--knn.neighbours", "3", "--speed.device", "cpu"),
        *("--linear-sgd.epochs", "1", "--linear-sgd.batch-size", "16", "--linear-sgd.lrs", "0.01"),
        *("--json", str(tmp_path / "two.json")),
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "stop_mim"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "STOP_MIM_CACHE": str(tmp_path / "own")}
    ended = subprocess.run(
        [*command, "evaluate", str(run), *options], env=environment, capture_output=True, text=True, timeout=180
    )
    assert ended.returncode == 0, ended.stderr
    two = json.loads((tmp_path / "two.json").read_text())["evaluations"]
    config = replace(QUICK, task=("knn", "linear-sgd"), data=str(colours), linear_sgd=LinearSGDOptions(1, 16, (0.01,)))
    one = evaluate([str(run)], config, silent())
    assert two[0]["facts"]["processes"] == 2
    assert two[0]["metrics"] == pytest.approx(one[0].metrics)
    heads = {name: value for name, value in one[1].metrics.items() if name.endswith("/top1")}
    assert len(heads) == 5
    # The processes see other batches: of the few test images one or two may be told differently.
    assert {name: two[1]["metrics"][name] for name in heads} == pytest.approx(heads, abs=15)


def test_images_are_decoded_for_the_first_encoder_alone(run, alike, monkeypatch):
    config = replace(QUICK, task=("knn",), data=str(alike))
    monkeypatch.setenv("STOP_MIM_DECODED_GIB", "0")
    (expected,) = evaluate([f"untrained:{run}"], config, silent())
    shutil.rmtree(Path(os.environ["STOP_MIM_CACHE"]) / "features")
    monkeypatch.delenv("STOP_MIM_DECODED_GIB")
    monkeypatch.setattr("stop_mim.data.stored.LEAST_CACHED_BYTES", 1)
    evaluate([str(run)], config, silent())
    monkeypatch.setattr("stop_mim.data.image_source.decode_image", lambda *arguments: pytest.fail("decoded again"))
    (found,) = evaluate([f"untrained:{run}"], config, silent())
    assert found.metrics == expected.metrics
    assert found.facts["data_fingerprint"] == expected.facts["data_fingerprint"]


def test_the_weights_are_looked_at_once_for_all_tasks_before_they_move(run, alike, monkeypatch):
    looked = []

    def fingerprint(encoder, original=features_module.encoder_fingerprint):
        looked.append(next(encoder.parameters()).device)
        return original(encoder)

    for module in (features_module, session_module):
        monkeypatch.setattr(module, "encoder_fingerprint", fingerprint)
    config = replace(QUICK, task=("linear", "knn", "low-shot"), data=str(alike))
    found = evaluate([str(run)], config, silent())
    # Its own, and once in the name of the features of each split.
    assert len(looked) == 3
    assert len({one.facts["encoder_fingerprint"] for one in found}) == 1
