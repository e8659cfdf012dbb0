"""One tiny trained run, and copies of it that pretend to be other runs with chosen numbers."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from stop_mim.results import Evaluation, Score, add_results
from stop_mim.training.config import (
    CheckpointConfig,
    EncoderConfig,
    LogConfig,
    OptimConfig,
    PredictorConfig,
    SpeedConfig,
    TrainConfig,
    to_json,
)
from stop_mim.training.pretrain import train
from stop_mim.training.run_folder import RunFolder

SIZE, GRID, PATCH_SIZE = (32, 48), (4, 6), 8


def tiny_config(out, **groups):
    """Four steps an epoch, two epochs, a milestone after each; 4x6 patches."""
    config = TrainConfig(
        data="scenes:count=32,size=40",
        out=str(out),
        encoder=EncoderConfig("tiny", image_size=SIZE, patch_size=PATCH_SIZE, width=24, depth=2, heads=2),
        predictor=PredictorConfig(width=16, depth=1, heads=2),
        optim=OptimConfig(epochs=2, batch_size=8, warmup_epochs=0.5, lr=2e-3, start_lr=5e-4, ema_start=0.9),
        speed=SpeedConfig(device="cpu", workers=0),
        log=LogConfig(every_steps=1, health_every_steps=2, tensorboard=False),
        checkpoint=CheckpointConfig(every_steps=100, keep=1, milestone_every_epochs=1),
    )
    return replace(config, **groups)


def train_tiny(out, **groups) -> Path:
    return train(tiny_config(out, **groups), console=Console(file=io.StringIO())).folder


def pretend(base: Path, out: Path, seed=0, signs=None, positions=None, results=None, **changes) -> Path:
    """A copy of a run with another configuration, and with these values in the last line of its metrics."""
    shutil.copytree(base, out)
    config = RunFolder(base).config()
    config = replace(config, seed=seed, positions=positions or config.positions, **changes)
    (out / "config.json").write_text(to_json(config))
    lines = [json.loads(line) for line in (base / "metrics.jsonl").read_text().splitlines()]
    lines[-1] |= signs or {}
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    add_results(out / "results.json", results or [])
    return out


def evaluation(task, *scores, label="class", data="data/train.parquet", encoder="run", **protocol):
    return Evaluation(encoder, task, label, data, "", protocol, 0, scores=list(scores))


def top1(value, **more):
    return Score("top1", value, headline=True, **more)


def write_status(run, state, step, message=""):
    status = {"state": state, "step": step, "total_steps": 8, "message": message}
    (run / "status.json").write_text(json.dumps({**status, "updated": "2026-01-02T03:04:05+00:00"}))


def probed(top1, A_norm=1.0, mask_token_norm=0.1, noise_to_signal=0.0):
    return {
        "probe/linear_top1": top1,
        "probe/knn_top1": top1 / 2,
        "health/A_norm": A_norm,
        "health/mask_token_norm": mask_token_norm,
        "health/noise_to_signal": noise_to_signal,
    }
