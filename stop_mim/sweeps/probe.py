"""What the encoder of a finished run is good for: the probes of a sweep, kept in the run's results.json."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from stop_mim.data.image_lists import read_image_list
from stop_mim.data.labelled import LabelledSet
from stop_mim.errors import InputError
from stop_mim.evaluation.config import EvaluateConfig, LinearOptions, LowShotConfig, TaskName
from stop_mim.evaluation.evaluate import evaluate
from stop_mim.evaluation.features import encoder_fingerprint, pooled_features
from stop_mim.evaluation.linear import linear_probe
from stop_mim.evaluation.plan import CLEVR_LABELS
from stop_mim.evaluation.results import RESULTS_FILE, Evaluation, add_results, is_accuracy, today
from stop_mim.evaluation.task_data import TaskData, open_task_data
from stop_mim.exchange.loading import load_encoder
from stop_mim.training.config import SpeedConfig
from stop_mim.training.distributed import choose_device
from stop_mim.training.run_folder import environment


@dataclass(frozen=True)
class Probe:
    """Which probes, on which labelled images."""

    kind: Literal["scenes", "labelled"]
    """scenes: one linear probe of counts and one of distances, of images in memory; labelled: tasks of `evaluate`."""
    data: str
    test_data: str | None = None
    tasks: tuple[TaskName, ...] = ()
    amounts: tuple[str, ...] = ("1%",)
    list_file: str | None = None
    standardise: tuple[bool, ...] = (True, False)
    """Of the linear probe on labelled images: with standardised features, without, or both."""
    layers: tuple[int, ...] = (1, 4)
    """Of the same: of the last layer, of several last ones side by side, or both."""
    seed: int = 0
    """Of held-out parts and draws: the same for every run, so that runs differ in their encoders alone."""

    def check(self) -> None:
        """Refuse data without the labels that are needed before hours were spent on training."""
        opened = open_task_data(self.data, self.test_data, seed=self.seed)
        if self.kind == "scenes" and not {one.label for one in opened} >= {*CLEVR_LABELS}:
            raise InputError(f"'{self.data}' has no counts and distances: this scale's probes need scenes.")
        if self.list_file is not None:
            read_image_list(Path(self.list_file), opened[0].train.source)


def probe_run(folder: Path, probe: Probe, speed: SpeedConfig, console: Console) -> dict[str, float]:
    """Probe the encoder of a run, write the results beside it, and return its accuracies by name."""
    if probe.kind == "scenes":
        found = list(_probe_scenes(folder, probe, speed))
        add_results(folder / RESULTS_FILE, found)
    else:
        found = evaluate([str(folder)], _evaluation_of(probe, speed), console)
    return {name: value for evaluation in found for name, value in accuracies(evaluation)}


def accuracies(evaluation: Evaluation) -> Iterator[tuple[str, float]]:
    """The accuracies of an evaluation, without those of single draws; labels other than the class come first."""
    for name, value in evaluation.metrics.items():
        of_one_draw = evaluation.task == "low-shot" and "@" in name
        if is_accuracy(name) and not of_one_draw:
            yield name if evaluation.label == "class" else f"{evaluation.label}/{name}", value


def _evaluation_of(probe: Probe, speed: SpeedConfig) -> EvaluateConfig:
    list_file = None if probe.list_file is None else Path(probe.list_file)
    return EvaluateConfig(
        task=probe.tasks,
        data=probe.data,
        test_data=probe.test_data,
        seed=probe.seed,
        linear=LinearOptions(probe.standardise, probe.layers),
        low_shot=LowShotConfig(amounts=probe.amounts, list_file=list_file),
        speed=speed,
    )


def _probe_scenes(folder: Path, probe: Probe, speed: SpeedConfig) -> Iterator[Evaluation]:
    """The demo's linear probe: last layer, standardised; a quarter of the work of the task clevr of `evaluate`."""
    device = choose_device(speed.device)
    encoder = load_encoder(folder).to(device)
    opened = open_task_data(probe.data, probe.test_data, seed=probe.seed)
    pixels = {part: _pixels(getattr(opened[0], part)) for part in ("train", "test")}
    features = {part: pooled_features(encoder, images) for part, images in pixels.items()}
    for data in opened:
        metrics = linear_probe(
            {"last1": [features["train"]]},
            torch.from_numpy(data.train.classes),
            {"last1": [features["test"]]},
            torch.from_numpy(data.test.classes),
            data.classes,
            device,
            standardise=(True,),
            seed=probe.seed,
        )
        yield Evaluation(
            str(folder),
            "linear",
            data.label,
            probe.data,
            data.test.source.name,
            {"name": "sweep", **asdict(probe)},
            probe.seed,
            dict(metrics),
            {"encoder_fingerprint": encoder_fingerprint(encoder), **_facts(data, device)},
        )


def _facts(data: TaskData, device: torch.device) -> dict[str, Any]:
    around = environment()
    return {
        "data_fingerprint": data.train.fingerprint(),
        "test_fingerprint": data.test.fingerprint(),
        "train_images": len(data.train),
        "test_images": len(data.test),
        "classes": data.classes,
        "date": today(),
        "versions": around["packages"],
        "gpu": around["gpu"],
        "device": str(device),
    }


def _pixels(labelled: LabelledSet) -> torch.Tensor:
    images = labelled.source.stacked()
    if images is None:
        raise InputError(f"'{labelled.source.name}' is not held in memory: this scale's probes need scenes.")
    return images[torch.from_numpy(labelled.indices)]
