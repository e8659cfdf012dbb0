"""The options of `stop-mim evaluate`: common ones here, and one group for each registered task that has options."""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from stop_mim.constraints import SEED, SIDE, Checked
from stop_mim.errors import InputError
from stop_mim.files import require_writable
from stop_mim.registry import load_plugins
from stop_mim.tables import check_table_file
from stop_mim.training.config import DeviceConfig


@dataclass(frozen=True)
class EvaluateConfig(Checked):
    """Score encoders on tasks; several encoders are compared in one table."""

    task: tuple[str, ...] = ("all",)
    data: str = ""
    """Labelled images (a folder, a parquet file or folder of them, torchvision:NAME …), or videos in DAVIS's layout."""
    test_data: str | None = None
    """Test images; not given: the test or validation split of the data, or else a fifth of the images, held out."""
    label: str = "auto"
    """Which label to predict, for data that have several; auto: each of them."""
    protocol: str = "auto"
    """imagenet, places205, places365, inat18, cifar100, cifar100-crops, clevr-count, clevr-dist, generic; auto: by the data."""
    pool: Literal["auto", "cls", "mean"] = "auto"
    """Features: class token (cls) or mean of the patches; auto: the class token if there is one (BEiT, data2vec: mean)."""
    image_size: Annotated[int | None, SIDE] = None
    """Side of the images in pixels; not given: the size that the encoder was trained at."""
    seed: Annotated[int, SEED] = 0
    """Seed of held-out images, draws, batch order and augmentation."""
    untrained: Literal["auto", "yes", "no"] = "auto"
    """Whether to score a run's network with its initial weights too, where features are frozen; auto: up to 20,000 images."""
    details: bool = False
    """Show every score, not only the main one of each task."""
    out: Path | None = None
    """Directory whose results.json keeps the scores; default: the run directory, or else the current one."""
    table: Path | None = None
    """File for the table of main scores: .md (Markdown) or .tex (LaTeX)."""
    json: Path | None = None
    """File for all results, as JSON."""
    csv: Path | None = None
    """File for all results, one score a line."""
    speed: DeviceConfig = field(default_factory=DeviceConfig)


def evaluate_config() -> type[EvaluateConfig]:
    """Return EvaluateConfig with a field for the options of each registered task, plugins included."""
    from stop_mim.evaluation.task import TASKS  # Tasks import this module.

    load_plugins()
    tasks = "\n".join(f"{name}: {task.help};" for name, task in TASKS.items())
    left_out = ", ".join(name for name, task in TASKS.items() if not task.in_all)
    everything = f"all: every task that the data and the encoder allow, except {left_out}."
    task = Annotated[tuple[str, ...], tyro.conf.arg(help=f"Tasks to run:\n{tasks}\n{everything}")]
    groups: list[tuple[str, Any, Any]] = [
        (name.replace("-", "_"), task.Options, field(default_factory=task.Options))
        for name, task in TASKS.items()
        if task.Options is not None
    ]
    fields = [("task", task, field(default=("all",))), *groups]
    return dataclasses.make_dataclass(
        "EvaluateConfig", fields, bases=(EvaluateConfig,), frozen=True, namespace={"__doc__": EvaluateConfig.__doc__}
    )


def check_arguments(names: Sequence[str], config: EvaluateConfig) -> None:
    """Raise InputError for missing arguments, unknown tasks and files that cannot be written; does not import torch."""
    from stop_mim.evaluation.task import TASKS

    if not names:
        raise InputError(
            "evaluate needs an encoder first: a run directory, a file, timm:NAME, hf:NAME or masks:FOLDER."
        )
    if not config.task:
        raise InputError("task is empty: give one or more tasks, such as linear knn, or all.")
    for name in config.task:
        if name != "all":
            TASKS.find(name)
    if "all" in config.task and len(config.task) > 1:
        raise InputError(f"task is {' '.join(config.task)}: give all alone, or the tasks by name.")
    if not config.data:
        raise InputError("data is not given: give labelled images or videos with --data.")
    if config.table is not None:
        check_table_file(config.table)
    for path in (config.json, config.csv, config.table):
        if path is not None:
            require_writable(str(path), path)
    files = {name: path for name in ("table", "json", "csv") if (path := getattr(config, name)) is not None}
    for one, other in itertools.combinations(files, 2):
        if files[one].resolve() == files[other].resolve():
            raise InputError(f"{one} and {other} are both {files[one]}: give two files.")
