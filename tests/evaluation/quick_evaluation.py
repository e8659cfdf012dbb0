"""An evaluation whose every task ends within seconds, and what the command says."""

import io

import pytest
from rich.console import Console

from stop_mim.cli import main
from stop_mim.evaluation.config import EvaluateConfig, KnnConfig, LinearSGDOptions, LowShotConfig, VideoConfig
from stop_mim.evaluation.finetune import FinetuneConfig, LowShotFinetuneConfig
from stop_mim.evaluation.video import PropagationConfig
from stop_mim.training.config import SpeedConfig

QUICK = EvaluateConfig(
    low_shot=LowShotConfig(("25%", "2"), draws=2),
    knn=KnnConfig((3,)),
    linear_sgd=LinearSGDOptions(epochs=2, batch_size=16),
    finetune=FinetuneConfig(epochs=2, batch_size=16, warmup_epochs=0.5),
    finetune_low_shot=LowShotFinetuneConfig(epochs=2, batch_size=8, warmup_epochs=0.5, mixup=0.0, cutmix=0.0),
    video=VideoConfig(propagation=PropagationConfig(short_side=32)),
    speed=SpeedConfig(device="cpu", workers=0),
)


def silent():
    return Console(file=io.StringIO(), width=160)


def names_of(evaluation):
    return set(evaluation.metrics)


def complaint(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", *(str(argument) for argument in arguments)])
    captured = capsys.readouterr()
    assert ended.value.code == 2
    assert "Traceback" not in captured.err
    last = captured.err.strip().splitlines()[-1]
    assert last.startswith("stop-mim: ")
    return last
