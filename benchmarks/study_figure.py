"""Draw the paired differences of docs/experiments.md from the raw results in docs/results/study.

python benchmarks/study_figure.py --out docs/images/study.png
"""

import argparse
import json
import re
from itertools import count
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

from stop_mim.analysis.figures import BLACK, BLUE, GREEN, GREY, STYLE, VERMILION
from stop_mim.sweeps.summary import Difference, paired_difference

RAW = Path(__file__).parents[1] / "docs" / "results" / "study"
# The names of a score in the records of different experiments; of several in one record, the mean is shown.
SCORES = {
    "linear": ("linear/top1", "linear_held", "linear_test"),
    "20-NN": ("knn/neighbours=20/top1", "knn_held", "knn_test"),
    "1% of the labels": ("low-shot/1%/top1", "shot5_held", "shot5_test"),
    "counts": ("scenes/count/linear/top1", "scenes/count/top1", "count_test"),
    "distances": ("scenes/distance/linear/top1", "scenes/distance/top1", "distance_test"),
}
LEAST_PAIRS = 3


class Pairs(NamedTuple):
    """Runs of a variant and of its baseline, each as FILE:NAME, with the same seeds."""

    variant: str
    baseline: str


class Row(NamedTuple):
    """A line of the figure: a variant of the positions, and how it was trained."""

    positions: str
    training: str
    pairs: tuple[Pairs, ...]


STOP, CONTEXT, BOTH = "StoP, noise on masked tokens", "noise on context tokens", "noise on both"
FIXED_CONTEXT = "fixed covariance, context tokens"
LONG = (Pairs("variants:stop-0.25", "chosen:B-ijepa-lr5e-4"), Pairs("seeds:stop-0.25", "seeds:ijepa"))
SHORT = Pairs("ablations:masked", "ablations:none")
CORNER = Pairs("corner:kind-stochastic", "corner:kind-sincos")
SMALL = Pairs("context-small:masked", "context-small:none")
FIRST = Pairs("chosen:D-stop-0.25", "chosen:A-ijepa")
ROWS = (
    Row(STOP, "the next four rows, one pair more", (FIRST, *LONG, CORNER, SHORT, SMALL)),
    Row(STOP, "ViT-S/8, 43 to 54 epochs", LONG),
    Row(STOP, "ViT-S/8, 22 epochs", (SHORT,)),
    Row(STOP, "ViT-S/4, 9,000 images, 120 epochs", (CORNER,)),
    Row(STOP, "small model, 5 epochs", (SMALL,)),
    Row(STOP, "MAE, ViT-S/8, 20 epochs", (Pairs("mae:kind-stochastic", "mae:kind-sincos"),)),
    Row(CONTEXT, "ViT-S/8, 22 epochs", (Pairs("ablations:context", "ablations:none"),)),
    Row(CONTEXT, "small model, 5 epochs", (Pairs("context-small:context", "context-small:none"),)),
    Row(CONTEXT, "small model, new seeds", (Pairs("context-noise:context", "context-noise:none"),)),
    Row(FIXED_CONTEXT, "small model, 5 epochs", (Pairs("context-noise:identity", "context-noise:none"),)),
    Row(BOTH, "ViT-S/8, 22 epochs", (Pairs("ablations:both", "ablations:none"),)),
    Row("fixed covariance, masked tokens", "ViT-S/8, 22 epochs", (Pairs("ablations:fixed-0.01", "ablations:none"),)),
    Row("l1 on A, no noise", "ViT-S/8, 22 epochs", (Pairs("ablations:l1-0.2", "ablations:none"),)),
    Row("jittered coordinates", "ViT-S/8, 22 epochs", (Pairs("jitter:kind-jittered", "jitter:kind-sincos"),)),
)
COLOURS = {STOP: BLUE, CONTEXT: VERMILION, FIXED_CONTEXT: VERMILION, BOTH: GREEN}


def by_seed(raw: Path, runs: str, score: str) -> dict[int, float]:
    """Return a score of runs (FILE:NAME) by seed; a single run without a seed in its name has seed 0."""
    file, _, name = runs.partition(":")
    record = json.loads((raw / f"{file}.json").read_text())
    found = {}
    for run in record.get("runs", ()):
        seed = re.fullmatch(re.escape(name) + r"(?:(?:/seed)?-(\d+))?", run["name"])
        values = [run["scores"][key] for key in SCORES[score] if key in run["scores"]]
        if seed and values:
            found[int(seed[1] or 0)] = mean(values)
    summaries: dict[str, Any] = record.get("summary", {}).get("variants", {}).get(name, {}).get("scores", {})
    for key in filter(summaries.__contains__, SCORES[score]):
        found |= {int(seed): value for seed, value in summaries[key]["by_seed"].items()}
    return found


def differences(raw: Path, pairs: tuple[Pairs, ...], score: str) -> list[float]:
    """Return the differences of variant and baseline, pair by pair."""
    found = []
    for names in pairs:
        variant, baseline = (by_seed(raw, runs, score) for runs in names)
        found += [variant[seed] - baseline[seed] for seed in sorted(variant.keys() & baseline.keys())]
    return found


def interval(found: list[float]) -> Difference:
    """Return the mean of paired differences with its 95% interval by Student's t."""
    numbered = dict(enumerate(found))
    return paired_difference(numbered, dict.fromkeys(numbered, 0.0))


def draw(raw: Path) -> Figure:
    """Return a figure with a panel for each score and a line for each comparison that has enough pairs."""
    figure = Figure(figsize=(8.6, 0.42 * len(ROWS) + 1.1), layout="constrained")
    panels = figure.subplots(1, len(SCORES), sharey=True)
    labels = {}
    for axes, score in zip(panels, SCORES, strict=True):
        axes.axvline(0, color=BLACK, linewidth=0.8)
        axes.grid(axis="x", color="0.92")
        for place, row in zip(count(len(ROWS), -1), ROWS, strict=False):
            found, colour = differences(raw, row.pairs, score), COLOURS.get(row.positions, GREY)
            if len(found) < LEAST_PAIRS:
                continue
            shown = interval(found)
            labels.setdefault(place, f"{row.positions}\n{row.training}, {shown.pairs} pairs")
            axes.plot([shown.low, shown.high], [place, place], color=colour, linewidth=2)
            axes.plot(shown.difference, place, "o", color=colour, markersize=6, markeredgecolor="white")
            axes.plot(found, [place + 0.27] * len(found), "|", color=colour, markersize=5)
        axes.set_title(score)
        axes.tick_params(axis="y", length=0)
    panels[0].set_yticks([*labels], [*labels.values()])
    figure.supxlabel("difference to the same run with fixed positions and no noise, points of top-1", fontsize=9)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the image to write, PNG or PDF")
    out = parser.parse_args().out
    with matplotlib.rc_context(STYLE):
        draw(RAW).savefig(out, dpi=150)


if __name__ == "__main__":
    main()
