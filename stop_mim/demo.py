"""The demo: train a very small StoP model on the embedded scenes, and show that it has learned something."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Int, UInt8
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from stop_mim.analysis.figures import FIGURES
from stop_mim.analysis.report import write_report
from stop_mim.data.image_source import ImageSource
from stop_mim.data.sources import open_source
from stop_mim.errors import InputError
from stop_mim.evaluation.clevr import count_classes, distance_classes
from stop_mim.evaluation.features import pixel_features, pooled_features
from stop_mim.evaluation.knn import knn
from stop_mim.evaluation.linear import linear_probe
from stop_mim.exchange.loading import load_encoder
from stop_mim.files import write_atomically
from stop_mim.seeds import derive_seed
from stop_mim.training.build import build_encoder
from stop_mim.training.config import TrainConfig
from stop_mim.training.loop import train
from stop_mim.training.progress import ProgressDisplay
from stop_mim.training.recipes import find_recipe

DEFAULT_FOLDER = Path("stop-mim-demo")
TASKS = {"count": count_classes, "distance": distance_classes}
# Self-supervised features are for when labels are few: so many of the scenes are used with theirs.
LABELLED_SCENES = 1000
TEST_SCENES = "scenes:count=5000,size=64"
NEIGHBOURS = 20
SCORES_FILE, REPORT_FILE = "demo.json", "report.html"


def run_demo(config: TrainConfig | None = None, console: Console | None = None) -> Path:
    """Train, compare, draw; returns the folder that holds it all."""
    console = console or Console()
    config = config or find_recipe("demo")
    config = replace(config, out=str(free_folder(Path(config.out or DEFAULT_FOLDER))))
    console.print("Drawing scenes, then training a small StoP model on them (about two minutes on two cores).")
    with ProgressDisplay(console) as display:
        train_source, test_source = open_source(config.data), open_source(TEST_SCENES, "test")
        display.say(f"{len(train_source):,} scenes to learn from without labels, {len(test_source):,} to be tested on.")
    threads = torch.get_num_threads()
    # Its model is too small to be divided: threads that sleep while they wait for each other are slower than one alone.
    torch.set_num_threads(1)
    try:
        result = train(config, recipe="demo", console=console)
    finally:
        torch.set_num_threads(threads)
    if not result.finished:
        raise InputError(f"The demo was interrupted: continue its training with 'stop-mim resume {result.folder}'.")
    scores = compare(config, result.folder, train_source, test_source, console)
    write_atomically(result.folder / SCORES_FILE, lambda file: file.write_text(json.dumps(scores, indent=2)))
    draw(result.folder)
    write_report([result.folder], result.folder / REPORT_FILE)
    show_scores(scores, result.folder, console)
    return result.folder


def compare(
    config: TrainConfig, folder: Path, train_source: ImageSource, test_source: ImageSource, console: Console
) -> dict[str, dict[str, float]]:
    """Test accuracy in percent of frozen features: trained, untrained (the same first weights) and pixels."""
    torch.manual_seed(derive_seed(config.seed, "weights"))
    untrained = build_encoder(config.encoder)
    trained = load_encoder(folder)
    images = [_stacked(train_source)[:LABELLED_SCENES], _stacked(test_source)]
    features = {
        "trained": [pooled_features(trained, part) for part in images],
        "untrained": [pooled_features(untrained, part) for part in images],
        "pixels": [pixel_features(part) for part in images],
    }
    labels = {task: [_labels(train_source, task)[:LABELLED_SCENES], _labels(test_source, task)] for task in TASKS}
    scores: dict[str, dict[str, float]] = {}
    with ProgressDisplay(console) as display:
        for number, (name, (train_features, test_features)) in enumerate(features.items(), start=1):
            scores[name] = {}
            for task, (train_labels, test_labels) in labels.items():
                classes, cpu = int(train_labels.max()) + 1, torch.device("cpu")
                sets = (
                    {"last1": [train_features]},
                    train_labels,
                    {"last1": [test_features]},
                    test_labels,
                    classes,
                    cpu,
                )
                neighbours = ([train_features], train_labels, [test_features], test_labels, classes, cpu, (NEIGHBOURS,))
                probes = [*linear_probe(*sets, standardise=(True,)), *knn(*neighbours)]
                scores[name] |= {f"{task}/{probe}": value for probe, value in probes}
            display.update("probing", number, len(features), name)
    return scores


def _stacked(source: ImageSource) -> UInt8[Tensor, "n 3 height width"]:
    images = source.stacked()
    if images is None or not set(TASKS) <= set(source.labels):
        raise InputError(f"The demo's data are '{source.name}': it needs scenes, with their counts and distances.")
    return images


def _labels(source: ImageSource, task: str) -> Int[Tensor, " n"]:
    return TASKS[task](source.labels[task])


def draw(folder: Path) -> None:
    """Draw the loss curve and the sampled positions."""
    for name in ("loss", "positions"):
        FIGURES[name]([folder], None).savefig(folder / f"{name}.png", dpi=150)


def show_scores(scores: dict[str, dict[str, float]], folder: Path, console: Console) -> None:
    """The table, and what to type next."""
    title = f"Frozen features, probes with {LABELLED_SCENES} labels: test accuracy in %"
    table = Table(title=title, title_justify="left")
    table.add_column("features")
    probes = {"linear/top1": "linear", f"knn/top1@{NEIGHBOURS}": f"{NEIGHBOURS}-NN"}
    for task in TASKS:
        for probe in probes.values():
            table.add_column(f"{task}\n{probe}", justify="right")
    names = {"trained": "StoP, trained", "untrained": "the same, untrained", "pixels": "pixels"}
    for name, values in scores.items():
        style = "bold green" if name == "trained" else None
        table.add_row(
            names[name], *(f"{values[f'{task}/{probe}']:.1f}" for task in TASKS for probe in probes), style=style
        )
    table.add_row("chance", *("12.5", "12.5", "16.7", "16.7"), style="dim")
    console.print(table)
    console.print(
        f"Loss curve: {escape(str(folder / 'loss.png'))}   Sampled positions: {escape(str(folder / 'positions.png'))}"
    )
    console.print(f"A page to look at, in a browser: {escape(str(folder / REPORT_FILE))}", soft_wrap=True)
    console.print("Next, with your own images (a folder, or a parquet file):", style="bold")
    for line in (
        "stop-mim pretrain stop-tiny-imagenet --data YOUR_FOLDER",
        "stop-mim pretrain --help",
        f"stop-mim evaluate {folder} untrained:{folder} --task clevr --data scenes:count=2000",
        f"python -c \"from stop_mim import load_encoder; print(load_encoder('{folder}'))\"",
    ):
        console.print(f"  {escape(line)}", highlight=False, soft_wrap=True)


def free_folder(wanted: Path) -> Path:
    """The wanted folder, or the first of its numbered successors that is not there yet."""
    candidates = [wanted, *(wanted.with_name(f"{wanted.name}-{number}") for number in range(2, 1000))]
    return next(path for path in candidates if not path.exists())
