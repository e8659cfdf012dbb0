"""The demo: train a small StoP model on embedded scenes, and compare its frozen features with untrained ones and pixels."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import matplotlib
import torch
from jaxtyping import Float, Int
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from stop_mim.analysis.drawing import STYLE
from stop_mim.analysis.figures import FIGURES
from stop_mim.analysis.report import write_report
from stop_mim.data.image_source import ImageSource
from stop_mim.data.sources import open_source
from stop_mim.errors import InputError
from stop_mim.evaluation.data import count_classes, distance_classes
from stop_mim.evaluation.features import pixel_features, pooled_features
from stop_mim.evaluation.probes import knn, linear_probe
from stop_mim.exchange.loading import load_encoder
from stop_mim.models.build import build_encoder
from stop_mim.results import RESULTS_FILE, UNTRAINED, Evaluation, Score, add_results, today
from stop_mim.seeds import derive_seed
from stop_mim.training.config import TrainConfig
from stop_mim.training.pretrain import train
from stop_mim.training.recipes import find_recipe

TASKS = {"count": count_classes, "distance": distance_classes}
CHANCE = {"count": 100 / 8, "distance": 100 / 6}
# Self-supervised features are for cases with few labels.
LABELLED_SCENES = 1000
TEST_SCENES = "scenes:count=5000,size=64"
NEIGHBOURS = 20
PROBES = {"linear/top1": "linear", f"knn/neighbours={NEIGHBOURS}/top1": f"{NEIGHBOURS}-NN"}
NAMES = {"trained": "StoP, trained", "untrained": "the same, untrained", "pixels": "pixels"}

Scores = dict[str, dict[str, Score]]
"""Test scores by features, and by task and probe."""


def run_demo(config: TrainConfig | None = None, console: Console | None = None) -> Path:
    """Train, probe and draw; return the run directory."""
    console = console or Console()
    config = config or find_recipe("demo")
    config = replace(config, out=str(unused(Path(config.out or "stop-mim-demo"))))
    console.print("Drawing scenes, then training a small StoP model on them (about two minutes on two cores).")
    sources = open_source(config.data), open_source(TEST_SCENES, "test")
    console.print(f"{len(sources[0]):,} scenes for training without labels, {len(sources[1]):,} for testing.")
    threads = torch.get_num_threads()
    # The model is too small for several threads: one alone is faster.
    torch.set_num_threads(1)
    try:
        result = train(config, recipe="demo", console=console)
    finally:
        torch.set_num_threads(threads)
    if not result.finished:
        raise InputError(f"The demo was interrupted: continue its training with 'stop-mim resume {result.folder}'.")
    scores = compare(config, result.folder, *sources)
    add_results(result.folder / RESULTS_FILE, [*as_evaluations(scores, result.folder, config)])
    for name in ("loss", "positions"):
        with matplotlib.rc_context(STYLE):
            FIGURES[name]([result.folder], None).savefig(result.folder / f"{name}.png", dpi=150)
    write_report([result.folder], result.folder / "report.html")
    show(scores, result.folder, console)
    return result.folder


def compare(config: TrainConfig, run: Path, train_source: ImageSource, test_source: ImageSource) -> Scores:
    """Return the scores of trained features, of untrained ones (with the same initial weights) and of pixels."""
    torch.manual_seed(derive_seed(config.seed, "weights"))
    encoders = {"trained": load_encoder(run), "untrained": build_encoder(config.encoder)}
    # Scenes are held in memory.
    images = [part for source in (train_source, test_source) if (part := source.stacked()) is not None]
    images[0] = images[0][:LABELLED_SCENES]
    features = {name: [pooled_features(encoder, part) for part in images] for name, encoder in encoders.items()}
    features["pixels"] = [pixel_features(part) for part in images]
    scores: Scores = {name: {} for name in features}
    for task, classes_of in TASKS.items():
        train_labels, test_labels = (classes_of(source.labels[task]) for source in (train_source, test_source))
        for name, (train_part, test_part) in features.items():
            found = probe(train_part, train_labels[:LABELLED_SCENES], test_part, test_labels)
            scores[name] |= {f"{task}/{kind}": value for kind, value in found.items()}
    return scores


def probe(
    train_features: Float[Tensor, "n dim"],
    train_labels: Int[Tensor, " n"],
    test_features: Float[Tensor, "m dim"],
    test_labels: Int[Tensor, " m"],
) -> dict[str, Score]:
    """Return the test scores of a linear probe on standardised features, and of nearest neighbours."""
    train_set, test_set = ([train_features], train_labels), ([test_features], test_labels)
    rest = (int(train_labels.max()) + 1, torch.device("cpu"))
    named = [({1: features}, labels) for features, labels in (train_set, test_set)]
    probes = {
        "linear": linear_probe(*named[0], *named[1], *rest, standardise=(True,)),
        "knn": knn(*train_set, *test_set, *rest, (NEIGHBOURS,)),
    }
    return {f"{name}/{score.name}": score for name, scores in probes.items() for score in scores}


def as_evaluations(scores: Scores, run: Path, config: TrainConfig) -> Iterator[Evaluation]:
    """Yield the results of the trained and the untrained encoder as `stop-mim evaluate` would record them."""
    for encoder, features in ((str(run), "trained"), (f"{UNTRAINED}{run}", "untrained")):
        for task in TASKS:
            for name in ("linear", "knn"):
                found = [one for key, one in scores[features].items() if key.startswith(f"{task}/{name}/")]
                protocol, facts = {"name": "demo", "labels": LABELLED_SCENES}, {"chance": CHANCE[task], "date": today()}
                data = config.data, TEST_SCENES
                yield Evaluation(encoder, name, task, *data, protocol, config.seed, facts, scores=found)


def show(scores: Scores, run: Path, console: Console) -> None:
    """Print the table, the files and the next commands."""
    table = Table(
        title=f"Frozen features, probes with {LABELLED_SCENES} labels: test accuracy in %", title_justify="left"
    )
    table.add_column("features")
    for task in TASKS:
        for probe_name in PROBES.values():
            table.add_column(f"{task}\n{probe_name}", justify="right")
    for name, values in scores.items():
        cells = (values[f"{task}/{kind}"].number for task in TASKS for kind in PROBES)
        table.add_row(NAMES[name], *cells, style="bold green" if name == "trained" else None)
    table.add_row("chance", *(f"{CHANCE[task]:.1f}" for task in TASKS for _ in PROBES), style="dim")
    console.print(table)
    for line in (
        f"Loss curve: {run / 'loss.png'}   Sampled positions: {run / 'positions.png'}",
        f"Report, for a browser: {run / 'report.html'}",
        "Next, with your own images (a folder, or a parquet file):",
        "  stop-mim pretrain stop-photos --data YOUR_FOLDER",
        "  stop-mim pretrain --help",
        f"  stop-mim evaluate {run} untrained:{run} --task clevr --data scenes:count=2000",
        f"  python -c \"from stop_mim import load_encoder; print(load_encoder('{run}'))\"",
    ):
        console.print(escape(line), highlight=False, soft_wrap=True)


def unused(wanted: Path) -> Path:
    """Return the path, with the first number that makes it new if it exists."""
    candidates = [wanted, *(wanted.with_name(f"{wanted.name}-{number}") for number in range(2, 1000))]
    return next(path for path in candidates if not path.exists())
