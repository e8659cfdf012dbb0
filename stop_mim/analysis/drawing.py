"""Colours, sizes, marks and axes that several figures share."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int, UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator
from torch import Tensor

from stop_mim.analysis.runs import RunRecords, ScoreKey, grouped, noise_of
from stop_mim.files import write_atomically
from stop_mim.positions import Grid
from stop_mim.sweeps.summary import Spread

# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, VERMILION, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#999999"
PURPLE, SKY, BLACK = "#CC79A7", "#56B4E9", "#000000"
SERIES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
MARKERS = ("o", "s", "^", "D", "v", "P")

STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    # Text stays text in a PDF.
    "pdf.fonttype": 42,
}
PNG_DPI = 200
# Least distance between labelled sigmas, as a fraction of the axis.
LABEL_WIDTH = 0.15
# Width of labels of vertical axes, in characters.
LABEL_CHARACTERS = 26
# Width in inches of figures over two columns.
WIDE = 7.2


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Write a figure as PATH.pdf and PATH.png, the same bytes for the same figure; return the two files."""
    undated: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "png": {"Software": None}}
    files = [path.with_name(f"{path.name}.{kind}") for kind in undated]
    for file, (kind, metadata) in zip(files, undated.items(), strict=True):

        def write(temporary: Path, kind: str = kind, metadata: dict[str, Any] = metadata) -> None:
            figure.savefig(temporary, format=kind, dpi=PNG_DPI, metadata=metadata)

        write_atomically(file, write)
    return files


def darkened(
    image: UInt8[Tensor, "3 height width"], context: Int[Tensor, " n"], grid: Grid, dim: float = 0.0
) -> UInt8[Tensor, "3 height width"]:
    """Return the image with patches outside of the context multiplied by `dim`."""
    light = torch.full((math.prod(grid),), dim).index_fill(0, context, 1.0).unflatten(0, grid)
    height, width = image.shape[1] // grid[0], image.shape[2] // grid[1]
    return (image * light.repeat_interleave(height, 0).repeat_interleave(width, 1)).to(torch.uint8)


def draw_image(axes: Axes, image: UInt8[Tensor, "3 height width"]) -> None:
    """Show an image without ticks."""
    axes.imshow(image.permute(1, 2, 0).numpy())
    remove_ticks(axes)


def remove_ticks(axes: Axes) -> None:
    """Remove ticks and frame around a picture."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def mark_patch(axes: Axes, patch: int, grid: Grid, size: Sequence[int], colour: str, fill: float | None = None) -> None:
    """Outline a patch of a picture of that (height, width), or fill it with this opacity."""
    height, width = size[0] / grid[0], size[1] / grid[1]
    corner = (patch % grid[1] * width - 0.5, patch // grid[1] * height - 0.5)
    if fill is None:
        for edge, thickness in ((BLACK, 2.2), (colour, 1.2)):
            outline = Rectangle(corner, width, height, fill=False, edgecolor=edge, linewidth=thickness, clip_on=False)
            axes.add_patch(outline)
    else:
        axes.add_patch(Rectangle(corner, width, height, facecolor=colour, alpha=fill, linewidth=0))


def add_letters(panels: Sequence[Axes]) -> None:
    """Name panels a, b, c, …."""
    for axes, letter in zip(panels, "abcd", strict=False):
        axes.set_title(letter, loc="left", fontweight="bold")


def draw_against_sigma(
    axes: Axes,
    spreads: dict[str, dict[float, Spread]],
    bands: bool = True,
    places: dict[str, dict[float, Spread]] | None = None,
) -> None:
    """Draw a line for every form of noise, ± standard deviation as bands or bars, and a level for runs without noise.

    Each value is drawn at its sigma, or at the mean of its place.
    """
    level = spreads.get("none", {}).get(0.0)
    if level is not None:
        axes.axhline(level.mean, color=GREY, linestyle="--", label="fixed positions (σ = 0)")
        if level.std is not None:
            axes.axhspan(level.mean - level.std, level.mean + level.std, color=GREY, alpha=0.2, linewidth=0)
    known = {"tied": "learned, Σ = σAAᵀ (StoP)", "identity": "fixed, Σ = σI"}
    forms = dict.fromkeys(form for form in (*known, *sorted(spreads)) if form in spreads and form != "none")
    for number, (form, colour, marker) in enumerate(zip(forms, SERIES, MARKERS, strict=False)):
        # Bars are drawn side by side, so that they do not hide each other.
        beside = 1 if bands or places else 1.06**number
        sigmas = [(places[form][sigma].mean if places else sigma) * beside for sigma in spreads[form]]
        means = [value.mean for value in spreads[form].values()]
        stds = [value.std or 0.0 for value in spreads[form].values()]
        if bands:
            axes.plot(sigmas, means, color=colour, marker=marker, label=known.get(form, form))
            low, high = ([mean + sign * std for mean, std in zip(means, stds, strict=True)] for sign in (-1, 1))
            axes.fill_between(sigmas, low, high, color=colour, alpha=0.2, linewidth=0)
        else:
            axes.errorbar(sigmas, means, yerr=stds, color=colour, marker=marker, capsize=3, label=known.get(form, form))


def add_legend_below(figure: Figure, axes: Axes, columns: int, title: str | None = None) -> None:
    """Add one legend below the whole figure."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, title=title, title_fontsize=8, loc="outside lower center", ncols=columns)


def set_sigma_axis(axes: Axes, runs: Sequence[RunRecords]) -> None:
    """Set a logarithmic axis with a tick for every sigma of the runs, labelled where there is room."""
    sigmas = sorted({noise_of(run.config).sigma for run in runs} - {0.0})
    meaning = "variance" if runs[0].config.positions.convention == "paper" else "standard deviation"
    axes.set_xscale("log")
    axes.set_xlabel(f"σ ({meaning} of n)")
    named = sigmas[:1]
    for sigma in sigmas[1:]:
        if math.log(sigma / named[-1]) >= LABEL_WIDTH * math.log(sigmas[-1] / sigmas[0]):
            named.append(sigma)
    axes.set_xticks(sigmas, [f"{sigma:g}" if sigma in named else "" for sigma in sigmas])
    axes.xaxis.set_minor_locator(NullLocator())


def score_label(score: ScoreKey) -> str:
    """Return the label of a score on an axis: its name, and its data without path and options."""
    kind, _, rest = score.data.partition(":")
    path = Path(rest or kind)
    # Files such as train.parquet are named after their split: the folder names the dataset.
    folder = path.parent.name or path.stem
    data = kind if kind == "scenes" else folder if path.suffix == ".parquet" else path.name
    what = "score" if score.rank is None else "top-1 accuracy (%)"
    words = ", ".join(filter(None, [score.name.removesuffix("/top1").replace("/", ", "), data]))
    return "\n".join([what, *textwrap.wrap(words, LABEL_CHARACTERS)])


def seeds_label(runs: Sequence[RunRecords]) -> str:
    """Return how many seeds a figure shows."""
    counts = {len(group) for group in grouped(runs, lambda run: noise_of(run.config)).values()}
    if counts == {1}:
        return "one seed each"
    return f"mean ± s.d., {'–'.join(map(str, sorted({min(counts), max(counts)})))} seeds"
