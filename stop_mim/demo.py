"""The demo: train a small StoP model on synthetic scenes, and compare its frozen features with untrained ones and pixels."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import torch
from jaxtyping import Float, UInt8
from rich.console import Console
from rich.table import Table
from torch import Tensor

from stop_mim.analysis import FIGURES
from stop_mim.analysis.figures import STYLE
from stop_mim.analysis.report import write_report
from stop_mim.data.augment import normalise, resize_batch
from stop_mim.data.image_source import ImageSource
from stop_mim.data.sources import open_source
from stop_mim.errors import InputError
from stop_mim.evaluation.data import count_classes, distance_classes
from stop_mim.evaluation.features import LabelledFeatures
from stop_mim.evaluation.subject import feature_task
from stop_mim.exchange.loading import load_encoder
from stop_mim.models.encoder import FrozenEncoder
from stop_mim.results import RESULTS_FILE, UNTRAINED, Evaluation, add_results, today
from stop_mim.tables import say
from stop_mim.training.config import TrainConfig
from stop_mim.training.pretrain import train
from stop_mim.training.run_folder import RunFolder

# Labels of scenes: how they become classes, and the accuracy in percent of a guess.
LABELS = {"count": (count_classes, 100 / 8), "distance": (distance_classes, 100 / 6)}
# Self-supervised features are for cases with few labels.
LABELLED_SCENES = 1000
TEST_SCENES = "scenes:count=5000,size=64"
NEIGHBOURS = 20
# The tasks with their options.
PROBES: dict[str, dict[str, Any]] = {
    "linear": {"standardise": (True,), "layers": (1,)},
    "knn": {"neighbours": (NEIGHBOURS,)},
}
PIXELS = "pixels"


def run_demo(config: TrainConfig, console: Console | None = None) -> Path:
    """Train, probe and draw; return the run directory."""
    console = console or Console()
    out = unused(Path(config.out or "stop-mim-demo"))
    RunFolder(out).require_new()
    config = replace(config, out=str(out))
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
    evaluations = list(evaluate(config, result.folder, *sources))
    add_results(result.folder / RESULTS_FILE, [one for one in evaluations if one.encoder != PIXELS])
    for name in ("loss", "positions"):
        with matplotlib.rc_context(STYLE):
            FIGURES[name]([result.folder], None).savefig(result.folder / f"{name}.png", dpi=150)
    write_report([result.folder], result.folder / "report.html")
    show(evaluations, result.folder, console)
    return result.folder


def evaluate(
    config: TrainConfig, run: Path, train_source: ImageSource, test_source: ImageSource
) -> Iterator[Evaluation]:
    """Yield the scores of trained features, of features of the run's initial weights, and of pixels."""
    # Scenes are held in memory.
    images = [part for source in (train_source, test_source) if (part := source.stacked()) is not None]
    images[0] = images[0][:LABELLED_SCENES]
    encoders = {name: load_encoder(name).eval() for name in (str(run), f"{UNTRAINED}{run}")}
    features = {name: [embed(encoder, part) for part in images] for name, encoder in encoders.items()}
    features[PIXELS] = [part.flatten(1).float() / 255 for part in images]
    protocol, facts = {"name": "demo", "labels": LABELLED_SCENES}, {"date": today()}
    for encoder, (train_part, test_part) in features.items():
        for label, (classes_of, chance) in LABELS.items():
            train_labels, test_labels = (classes_of(source.labels[label]) for source in (train_source, test_source))
            learned = LabelledFeatures.in_memory(train_part, train_labels[:LABELLED_SCENES])
            tested = LabelledFeatures.in_memory(test_part, test_labels)
            for task, options in PROBES.items():
                probe = feature_task(task, int(learned.labels.max()) + 1, **options)
                about = (encoder, task, label, config.data, TEST_SCENES, protocol, config.seed)
                yield Evaluation(*about, {"chance": chance, **facts}, scores=list(probe.scores(learned, tested)))


@torch.inference_mode()
def embed(encoder: FrozenEncoder, pixels: UInt8[Tensor, "n 3 height width"]) -> Float[Tensor, "n dim"]:
    """Return the features of images in memory, in full precision; `evaluate` caches them in half precision."""
    return encoder.embed(normalise(resize_batch(pixels, encoder.image_size), encoder.mean, encoder.std))


def show(evaluations: Sequence[Evaluation], run: Path, console: Console) -> None:
    """Print the table, the files and the next commands."""
    title = f"Frozen features, probes with {LABELLED_SCENES} labels: test accuracy in %"
    table = Table("features", title=title, title_justify="left")
    for label in LABELS:
        for probe in ("linear", f"{NEIGHBOURS}-NN"):
            table.add_column(f"{label}\n{probe}", justify="right")
    names = {str(run): "StoP, trained", f"{UNTRAINED}{run}": "the same, untrained", PIXELS: "pixels"}
    for encoder, name in names.items():
        scores = [score for one in evaluations if one.encoder == encoder for score in one.scores if score.headline]
        table.add_row(name, *(score.number for score in scores), style="bold green" if encoder == str(run) else None)
    table.add_row("chance", *(f"{chance:.1f}" for _, chance in LABELS.values() for _ in PROBES), style="dim")
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
        say(console, line)


def unused(wanted: Path) -> Path:
    """Return the path, with the first number that makes it new if it exists."""
    candidates = [wanted, *(wanted.with_name(f"{wanted.name}-{number}") for number in range(2, 1000))]
    return next(path for path in candidates if not path.exists())
