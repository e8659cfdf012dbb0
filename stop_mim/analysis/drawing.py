"""How figures look: colours, sizes, marks and axes that several of them share."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator
from torch import Tensor

from stop_mim.analysis.runs import RunRecords, Spread, grouped, noise_of
from stop_mim.errors import InputError
from stop_mim.files import write_atomically
from stop_mim.positions import Grid

# Okabe and Ito's colours, told apart by everybody.
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
    # Text that stays text in a PDF.
    "pdf.fonttype": 42,
}
PNG_DPI = 200
# Of a number under an axis, as a part of the narrowest axis of sigmas.
LABEL_WIDTH = 0.15
WIDE, NARROW = 7.2, 3.6
"""Widths in inches of figures over two columns and over one."""


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Write a figure as PDF and PNG, the same bytes for the same figure; gives the two files."""
    files = [path.with_name(f"{path.name}.{kind}") for kind in ("pdf", "png")]
    undated = {"pdf": {"CreationDate": None}, "png": {"Software": None}}
    for file in files:
        kind = file.suffix[1:]

        def write(temporary: Path, kind: str = kind) -> None:
            figure.savefig(temporary, format=kind, dpi=PNG_DPI, metadata=undated[kind])

        try:
            write_atomically(file, write)
        except OSError as error:
            raise InputError(
                f"{file} cannot be written ({error.strerror}): name a folder that can with --out."
            ) from error
    return files


def seen_patches(context: Tensor, grid: Grid) -> Bool[Tensor, "rows columns"]:
    """Which patches of the grid are context."""
    seen = torch.zeros(math.prod(grid), dtype=torch.bool)
    seen[context] = True
    return seen.unflatten(0, grid)


def darkened(
    image: UInt8[Tensor, "3 height width"], seen: Bool[Tensor, "rows columns"], grid: Grid, dim: float = 0.0
) -> UInt8[Tensor, "3 height width"]:
    """The image with the patches that are not seen made this dark."""
    height, width = image.shape[1] // grid[0], image.shape[2] // grid[1]
    light = torch.where(seen, 1.0, dim).repeat_interleave(height, 0).repeat_interleave(width, 1)
    return (image * light).to(torch.uint8)


def draw_image(axes: Axes, image: UInt8[Tensor, "3 height width"]) -> None:
    """Show an image without ticks."""
    axes.imshow(image.permute(1, 2, 0).numpy())
    without_ticks(axes)


def without_ticks(axes: Axes) -> None:
    """Axes that are a picture."""
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


def add_letter(axes: Axes, letter: str) -> None:
    """Name a panel."""
    axes.set_title(letter, loc="left", fontweight="bold")


def draw_against_sigma(axes: Axes, spreads: dict[str, dict[float, Spread]], bands: bool = True) -> None:
    """A line for every form of noise, with bands or bars of ± a standard deviation, and a level for runs without any."""
    level = spreads.get("none", {}).get(0.0)
    if level is not None:
        axes.axhline(level.mean, color=GREY, linestyle="--", label="fixed positions (σ = 0)")
        if level.count > 1:
            axes.axhspan(level.mean - level.std, level.mean + level.std, color=GREY, alpha=0.2, linewidth=0)
    known = {"tied": "learned, Σ = σAAᵀ (StoP)", "identity": "fixed, Σ = σI"}
    forms = dict.fromkeys(
        [form for form in ("tied", "identity", *sorted(spreads)) if form in spreads and form != "none"]
    )
    for number, (form, colour, marker) in enumerate(zip(forms, SERIES, MARKERS, strict=False)):
        # Bars beside one another: at one place they would hide each other.
        sigmas = [sigma * (1 if bands else 1.06**number) for sigma in spreads[form]]
        means = [value.mean for value in spreads[form].values()]
        stds = [0.0 if math.isnan(value.std) else value.std for value in spreads[form].values()]
        if bands:
            axes.plot(sigmas, means, color=colour, marker=marker, label=known.get(form, form))
            low, high = ([mean + sign * std for mean, std in zip(means, stds, strict=True)] for sign in (-1, 1))
            axes.fill_between(sigmas, low, high, color=colour, alpha=0.2, linewidth=0)
        else:
            axes.errorbar(sigmas, means, yerr=stds, color=colour, marker=marker, capsize=3, label=known.get(form, form))


def add_legend_below(figure: Figure, axes: Axes, columns: int, title: str | None = None) -> None:
    """One legend for the whole figure, below it."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, title=title, title_fontsize=8, loc="outside lower center", ncols=columns)


def set_sigma_axis(axes: Axes, runs: Sequence[RunRecords]) -> None:
    """A logarithmic axis with a tick for every sigma that was run, and its value where there is room for it."""
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


def accuracy_label(name: str) -> str:
    """What an accuracy is called on an axis."""
    protocol, *about = name.split(", ")
    told = {"probe/linear_top1": "online linear probe", "probe/knn_top1": "online kNN"}
    words = told.get(protocol, protocol.replace("/top1", "").replace("_", " "))
    shown = [_short(part) for part in about if not part.startswith("protocol ")]
    return "\n".join(["top-1 accuracy (%)", ", ".join([words, *shown])])


def _short(data: str) -> str:
    """A data set without its options, its file's path or, where that is called after its split, its file."""
    kind, _, rest = data.partition(":")
    path = Path(rest or kind)
    return kind if kind == "scenes" else path.parent.name or path.stem if path.suffix == ".parquet" else path.name


def seeds_label(runs: Sequence[RunRecords]) -> str:
    """How many seeds a figure is of."""
    counts = {len(group) for group in grouped(runs, lambda run: noise_of(run.config)).values()}
    if counts == {1}:
        return "one seed each"
    return f"mean ± s.d., {'–'.join(map(str, sorted({min(counts), max(counts)})))} seeds"
