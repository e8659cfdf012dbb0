"""Figures of one run that is at hand: what the demo shows of it."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from stop_mim.analysis.drawing import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    VERMILION,
)
from stop_mim.positions import StochasticPositions


def loss_figure(metrics: Sequence[dict[str, float]], path: Path) -> None:
    """Loss, learning rate and effective rank of the target features over the steps of a run."""
    with matplotlib.rc_context({"axes.spines.top": False, "font.size": 9}):
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True)
        upper.plot([line["step"] for line in metrics], [line["loss"] for line in metrics], color=BLUE)
        upper.set_ylabel("loss (smooth L1)")
        upper.set_ylim(bottom=0)
        rate = upper.twinx()
        rate.plot([line["step"] for line in metrics], [line["lr"] for line in metrics], color=GREY, linestyle="--")
        rate.set_ylabel("learning rate (dashed)", color="#666666")
        rate.set_ylim(bottom=0)
        looked_at = [line for line in metrics if "health/rankme" in line]
        lower.plot(
            [line["step"] for line in looked_at],
            [line["health/rankme"] for line in looked_at],
            color=GREEN,
            marker="o",
            markersize=3,
        )
        lower.set_ylabel("RankMe of target features")
        lower.set_ylim(bottom=0)
        lower.set_xlabel("step")
        figure.savefig(path, dpi=150)


def positions_figure(positions: StochasticPositions, path: Path, seed: int = 0, draws: int = 200) -> None:
    """What the noise does to a position: samples around their means, and where a sample seems to be."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = positions.grid
    middle = rows // 2 * columns + columns // 2
    with torch.no_grad(), matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        cloud, *maps = figure.subplots(1, 4, gridspec_kw={"width_ratios": [1.5, 1, 1, 1]})
        draw_clouds(cloud, positions, draws, generator)
        samples = positions.sample(torch.full((1, draws), middle), generator=generator)[0]
        _draw_similarity(maps[0], positions, positions.mean(torch.tensor([[middle]]))[0], middle, "fixed position")
        _draw_similarity(maps[1], positions, samples[:1], middle, "one sample")
        _draw_similarity(maps[2], positions, samples, middle, f"mean of {draws} samples")
        figure.savefig(path, dpi=150)


def draw_clouds(axes: Axes, positions: StochasticPositions, draws: int, generator: torch.Generator) -> None:
    """Samples of four positions around their means, on the net of all means, in two principal directions."""
    table = positions.table()
    rows, columns = positions.grid
    centre = table.mean(0)
    _, _, directions = torch.linalg.svd(table - centre, full_matrices=False)
    flat = (table - centre) @ directions[:2].T
    net = flat.unflatten(0, positions.grid)
    for line in (*net.unbind(0), *net.unbind(1)):
        axes.plot(*line.T.tolist(), color=GREY, linewidth=0.6, zorder=1)
    # One patch in from each corner, as far as the grid has room.
    ends = [(min(1, (size - 1) // 2), size - 1 - min(1, (size - 1) // 2)) for size in (rows, columns)]
    chosen = dict.fromkeys(row * columns + column for row in ends[0] for column in ends[1])
    for patch, colour in zip(chosen, (BLUE, ORANGE, GREEN, VERMILION), strict=False):
        drawn = positions.sample(torch.full((1, draws), patch), generator=generator)[0]
        x, y = ((drawn - centre) @ directions[:2].T).T.tolist()
        axes.scatter(x, y, s=4, alpha=0.4, color=colour, zorder=2)
        axes.scatter(flat[patch, 0].item(), flat[patch, 1].item(), s=40, color=colour, edgecolor="black", zorder=3)
    axes.set_title("samples of four positions", fontsize=9)
    axes.set_xlabel("first principal direction of ψ")
    axes.set_ylabel("second")


def _draw_similarity(
    axes: Axes, positions: StochasticPositions, queries: Float[Tensor, "n dim"], patch: int, title: str
) -> None:
    table = F.normalize(positions.table(), dim=1)
    similarity = (F.normalize(queries, dim=1) @ table.T).mean(0).unflatten(0, positions.grid)
    lowest = (table @ table.T).min().item()
    axes.imshow(similarity.numpy(), cmap="viridis", vmin=lowest, vmax=1)
    row, column = divmod(patch, positions.grid[1])
    axes.plot(column, row, marker="s", markersize=8, markerfacecolor="none", markeredgecolor="white")
    axes.set_title(f"{title}\ncosine to all ψ, {lowest:.2f} to 1", fontsize=9)
    axes.set_xticks([])
    axes.set_yticks([])
