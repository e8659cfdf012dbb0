"""Figures, one decorated function each: the paper's by their numbers, drawn from run directories alone.

A figure is a function `(runs, score) -> Figure`; its docstring's first line is its help. It
raises InputError, which says what is missing, if the runs do not suffice. `score` is the score to show; None: the default.
"""

import math
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import torch
from jaxtyping import Int, UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator
from torch import Tensor

from stop_mim.analysis import FIGURES, theory
from stop_mim.analysis.noise import identified, noise_spectrum, sampled_places, similarity_maps
from stop_mim.analysis.predictions import (
    central_target,
    feature_objective,
    prediction_map,
    sample_images,
    sample_masks,
    sample_pictures,
)
from stop_mim.analysis.runs import (
    Noise,
    RunRecords,
    ScoreKey,
    check_comparable,
    check_same_grid,
    common_score,
    group_seeds,
    grouped,
    read_records,
    run_folders,
    spreads_by_sigma,
)
from stop_mim.errors import InputError
from stop_mim.files import require_creatable, write_atomically
from stop_mim.models.objective import TargetObjective
from stop_mim.positions import Grid, StochasticPositions
from stop_mim.seeds import seeded_generator
from stop_mim.sweeps.summary import Spread
from stop_mim.training.callbacks.health import SIGNS
from stop_mim.training.config import PositionsConfig

# Number of runs side by side; of more, evenly spaced ones are shown.
MOST_SIDE_BY_SIDE = 3
QUERY_DRAWS = 256
N_IMAGES = 4
# Widths of panels in inches.
PANEL, MAP = 2.1, 1.5
POSITION_DRAWS = 200
IDENTIFIED_DRAWS = 64
FEW_POINTS = 30
LINES = ("-", "--", ":")
CONTEXT_LABELS = {True: "context matters", False: "context irrelevant"}
# Okabe and Ito's colours, which colour-blind readers can distinguish.
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


def draw_figures(
    names: Sequence[str],
    runs: Sequence[str | Path],
    out: str | Path,
    warn: Callable[[str], None] = lambda text: None,
    score: str | None = None,
) -> list[Path]:
    """Draw figures by name from runs, each as PDF and PNG; return the files.

    Args:
        names: names in FIGURES, or "all", which skips figures for which the runs do not suffice.
        runs: run directories, or sweep directories, which include their finished runs.
        warn: called with a sentence for each figure that is skipped.
        score: score of figures 1, 3 and 4, such as linear/top1; None: the nearest to the paper's protocol.
    """
    everything = "all" in names
    chosen = {name: FIGURES.find(name) for name in (FIGURES if everything else names)}
    paths, written = run_folders(runs), list[Path]()
    # These are mistakes, and not runs that do not suffice.
    require_creatable(Path(out))
    for path in paths:
        read_records(path)
    for name, draw in chosen.items():
        try:
            with matplotlib.rc_context(STYLE):
                written += save_figure(draw(paths, score), Path(out) / f"figure-{name}")
        except InputError as error:
            if not everything:
                raise InputError(f"Figure {name} cannot be drawn: {error}") from error
            warn(f"Figure {name} is left out: {error}")
    return written


@FIGURES.register("1")
def idea_figure(runs: Sequence[Path], score: str | None = None) -> Figure:
    """The idea: an image with masked patches, their fixed positions, samples of their stochastic positions, and the gain.

    The last part needs runs with and without noise that were scored alike, and is left out without them.
    """
    run = _nearest_to_the_paper(runs)
    compared = _scores_to_compare(run, runs, score)
    figure, panels = _square_panels(run, 4 if compared else 3)
    _draw_idea(panels[:3], run)
    if compared:
        key, spreads = compared
        means, stds = zip(*((one.mean, one.std or 0.0) for one in spreads.values()), strict=True)
        panels[3].bar(range(2), means, yerr=stds, color=[GREY, BLUE], width=0.6, capsize=3)
        names = [f"{name.removesuffix(' positions')}\nn = {one.n}" for name, one in spreads.items()]
        panels[3].set_xticks(range(2), names)
        panels[3].set_ylabel(score_label(key))
        height, width = run.config.encoder.image_size
        panels[3].set_box_aspect(height / width)
    add_letters(figure)
    return figure


def _square_panels(run: RunRecords, count: int) -> tuple[Figure, list[Axes]]:
    """Return a figure with a row of panels of the shape of the run's images."""
    height, width = run.config.encoder.image_size
    figure = Figure(figsize=(PANEL * count, PANEL * height / width + 0.75), layout="constrained")
    return figure, list(figure.subplots(1, count))


def _draw_idea(panels: Sequence[Axes], run: RunRecords) -> int:
    """Draw an image with masked patches, their fixed positions and samples of the stochastic ones; return a masked patch."""
    positions, (rows, columns) = run.objective.positions, run.grid
    assert isinstance(positions, StochasticPositions)
    picture, masks = sample_pictures(run, N_IMAGES)[:2][-1], sample_masks(run, 1)
    masked, patch = sorted(set(masks.targets.flatten().tolist())), central_target(masks, run.grid)
    height, width = picture.shape[1:]
    for axes in panels:
        draw_image(axes, darkened(picture, masks.context[0], run.grid, dim=0.35))
        for line in range(1, columns):
            axes.axvline(line * width / columns - 0.5, color="white", linewidth=0.4, alpha=0.5)
        for line in range(1, rows):
            axes.axhline(line * height / rows - 0.5, color="white", linewidth=0.4, alpha=0.5)
        mark_patch(axes, patch, run.grid, (height, width), ORANGE)
    places = sampled_places(positions, masked, _generator(run), POSITION_DRAWS)
    unit = torch.tensor([width / columns, height / rows])
    for number, one in enumerate(masked):
        colour = (SKY, ORANGE, GREEN, PURPLE)[one % columns % 2 + 2 * (one // columns % 2)]
        centre = (torch.tensor([one % columns, one // columns]) + 0.5) * unit
        drawn = (places[number] + 0.5) * unit
        for axes, where, size in ((panels[1], centre[None], 16), (panels[2], drawn, 2)):
            axes.scatter(where[:, 0].numpy(), where[:, 1].numpy(), size, color=colour, linewidths=0, zorder=3)
    for axes in panels:
        axes.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
    panels[0].set(title="The model sees", xlabel="a few patches (bright),\nand predicts hidden ones")
    panels[1].set(title=f"{_method(run)}: fixed positions", xlabel="a hidden patch has\none position ψ")
    panels[2].set(
        title="StoP: sampled positions", xlabel=f"ψ̂ ~ N(ψ, σAAᵀ), σ = {positions.sigma:g},\na new sample in every step"
    )
    return patch


def _nearest_to_the_paper(runs: Sequence[Path]) -> RunRecords:
    def distance(run: RunRecords) -> tuple[bool, float]:
        return run.noise.form != "tied", abs(math.log(run.noise.sigma / PositionsConfig().sigma))

    return min(_noisy(_records(runs)), key=distance)


def _scores_to_compare(
    run: RunRecords, runs: Sequence[Path], score: str | None
) -> tuple[ScoreKey, dict[str, Spread]] | None:
    """Return the score of runs like this one and of runs without noise; None if they cannot be compared."""
    kinds = (run.noise, Noise("none", 0.0))
    records = [one for one in _records(runs) if one.noise in kinds and one.config.positions.kind != "learned"]
    try:
        check_comparable(records)
        key = common_score(records, score)
    except InputError:
        if score is not None:
            raise
        return None
    found = spreads_by_sigma(records, lambda one: one.scores()[key])
    spreads = {_form(Noise(form, sigma)): value for form, by in found.items() for sigma, value in by.items()}
    return (key, spreads) if len(spreads) == 2 else None


@FIGURES.register("3")
def learned_covariance_figure(runs: Sequence[Path], score: str | None = None) -> Figure:
    """Accuracy with a learned covariance (tied) and a fixed one (identity), against sigma and against the noise they make.

    At the same sigma the two make noise of different power. The second panel has the noise-to-signal ratio ‖ψ̂ - ψ‖ / ‖ψ‖
    of the trained models on its axis, where models of equal power are above each other.
    """
    records = _records(runs)
    forms = {run.noise.form for run in records}
    if not {"tied", "identity"} <= forms or len({run.noise.sigma for run in records} - {0.0}) < 2:
        raise InputError(
            "the runs have no learned and fixed covariances over sigma; give runs with positions.covariance tied and identity, "
            "and with at least two values of positions.sigma."
        )
    check_comparable(records)
    key = common_score(records, score)
    figure = Figure(figsize=(WIDE, 3.2), layout="constrained")
    at_sigma, at_power = figure.subplots(1, 2, sharey=True)
    scores = spreads_by_sigma(records, lambda run: run.scores()[key])
    draw_against_sigma(at_sigma, scores, bands=False)
    set_sigma_axis(at_sigma, records)
    at_sigma.set(title="equal σ", ylabel=score_label(key))
    power = spreads_by_sigma(records, lambda run: run.newest(SIGNS["noise_to_signal"].key))
    draw_against_sigma(at_power, scores, bands=False, places=power)
    at_power.set(title="equal power", xscale="log", xlabel="noise-to-signal ratio ‖ψ̂ − ψ‖ / ‖ψ‖ after training")
    add_letters(figure)
    add_legend_below(figure, at_sigma, 3, seeds_label(records))
    return figure


@FIGURES.register("4")
def sigma_figure(runs: Sequence[Path], score: str | None = None) -> Figure:
    """Norms of A and m̃, and accuracy, against sigma."""
    records = [run for run in _records(runs) if run.noise.form in ("tied", "none")]
    if len({run.noise.sigma for run in records} - {0.0}) < 2:
        raise InputError(
            "the runs have fewer than two sigmas; give runs with tied stochastic positions and two positive values of "
            "positions.sigma."
        )
    check_comparable(records, forms=["tied"])
    key = common_score(records, score)
    panels: list[tuple[str, Callable[[RunRecords], float]]] = [
        (f"{SIGNS['A_norm'].label} (Frobenius norm)", lambda run: run.newest(SIGNS["A_norm"].key)),
        (f"{SIGNS['mask_token_norm'].label} (mask token)", lambda run: run.newest(SIGNS["mask_token_norm"].key)),
        (score_label(key), lambda run: run.scores()[key]),
    ]
    figure = Figure(figsize=(WIDE, 2.6), layout="constrained")
    for axes, (label, measure) in zip(figure.subplots(1, 3), panels, strict=True):
        draw_against_sigma(axes, spreads_by_sigma(records, measure))
        axes.set_ylabel(label)
        set_sigma_axis(axes, records)
    add_letters(figure)
    add_legend_below(figure, figure.axes[0], 2, seeds_label(records))
    return figure


@FIGURES.register("5")
def similarity_figure(runs: Sequence[Path], score: str | None = None) -> Figure:
    """Cosines of a position to all fixed ones: without noise, of one sample, and averaged over many."""
    noisy = _side_by_side(runs)
    grid = rows, columns = noisy[0].grid
    # Near a corner, in the middle, and at the lower edge.
    places = [(rows // 5, columns // 5), (rows // 2, columns // 2), (rows - 1, columns * 3 // 4)]
    queries = [row * columns + column for row, column in places]
    titles = ["without\nnoise"]
    titles += [f"{_label(run)}\n{kind}" for run in noisy for kind in ("one sample", f"mean of {QUERY_DRAWS}")]
    size = (1.2 + 1.02 * len(titles), 0.7 + 1.02 * rows / columns * len(queries))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(queries), len(titles), squeeze=False)
    maps = [
        [similarity_maps(run.objective.positions, query, _generator(run), QUERY_DRAWS) for run in noisy]
        for query in queries
    ]
    drawn = [[row[0].fixed, *(part for one in row for part in (one.sample, one.mean))] for row in maps]
    lowest = min(values.min().item() for row in drawn for values in row)
    for query, line, row in zip(queries, panels, drawn, strict=True):
        for axes, values in zip(line, row, strict=True):
            picture = axes.imshow(values.numpy(), cmap="viridis", vmin=lowest, vmax=1)
            remove_ticks(axes)
            mark_patch(axes, query, grid, grid, "white")
        line[0].set_ylabel(f"row {query // columns + 1}\ncolumn {query % columns + 1}", fontsize=8)
    for axes, title in zip(panels[0], titles, strict=True):
        axes.set_title(title, fontsize=8)
    figure.colorbar(picture, ax=panels, label="cosine similarity to ψ", shrink=0.8, aspect=30)
    return figure


@FIGURES.register("6")
def predictions_figure(runs: Sequence[Path], score: str | None = None) -> Figure:
    """For a masked patch of each image, how similar its prediction is to the features of all patches."""
    chosen = _side_by_side(runs, noise=False)
    objectives = [feature_objective(run.objective) for run in chosen]
    for run in chosen[1:]:
        if run.config.data != chosen[0].config.data:
            raise InputError(
                f"{chosen[0].path} was trained on '{chosen[0].config.data}' and {run.path} on '{run.config.data}': give "
                "runs on the same images."
            )
    images, pictures = sample_images(chosen[0], N_IMAGES), sample_pictures(chosen[0], N_IMAGES)
    masks, grid = sample_masks(chosen[0], N_IMAGES), chosen[0].grid
    titles = ["image", "context", *(_label(run) for run in chosen)]
    height, width = chosen[0].config.encoder.image_size
    size = (0.9 + MAP * len(titles), 0.4 + MAP * height / width * len(images))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(images), len(titles), squeeze=False)
    maps: list[tuple[Axes, int, Tensor]] = []
    for number, (image, picture, line) in enumerate(zip(images, pictures, panels, strict=True)):
        part = masks[number : number + 1]
        patch = central_target(part, grid)
        draw_image(line[0], picture)
        draw_image(line[1], darkened(picture, part.context[0], grid))
        mark_patch(line[1], patch, grid, picture.shape[1:], ORANGE)
        for axes, objective in zip(line[2:], objectives, strict=True):
            maps.append((axes, patch, prediction_map(objective, image, part, patch)))
    for axes, title in zip(panels[0], titles, strict=True):
        axes.set_title(title)
    _draw_heat(figure, maps, panels)
    return figure


def _draw_heat(figure: Figure, maps: Sequence[tuple[Axes, int, Tensor]], panels: Any) -> None:
    """Draw prediction maps of patches with one scale, multiples of equal similarity, and one colour bar next to the panels."""
    values = torch.stack([heat for _, _, heat in maps])
    values = values[0].numel() * values
    for (axes, patch, _), heat in zip(maps, values, strict=True):
        picture = axes.imshow(heat.numpy(), cmap="magma", vmin=values.min().item(), vmax=values.max().item())
        remove_ticks(axes)
        mark_patch(axes, patch, (heat.shape[0], heat.shape[1]), heat.shape, ORANGE)
    label = "similarity to the prediction\n(1: as the average patch)"
    figure.colorbar(picture, ax=panels, label=label, shrink=0.8, aspect=30)


@FIGURES.register("covariance")
def covariance_figure(runs: Sequence[Path], score: str | None = None) -> Figure:
    """The spectrum of Σ, the frequencies of its noise, and the noise over training."""
    noisy = _side_by_side(runs)
    figure = Figure(figsize=(WIDE, 2.6 + 0.16 * len(noisy)), layout="constrained")
    spectra, waves, history = figure.subplots(1, 3)
    noise = SIGNS["noise_to_signal"]
    for run, colour, marker in zip(noisy, SERIES, MARKERS, strict=False):
        positions = run.objective.positions
        assert isinstance(positions, StochasticPositions)
        spectrum, found = noise_spectrum(positions), identified(positions, _generator(run), IDENTIFIED_DRAWS)
        rank = f"effective rank {spectrum.effective_rank:.1f} of {len(spectrum.eigenvalues)}"
        label = f"{_label(run)}: {rank}; best decoder finds the patch in {100 * found:.0f}%"
        order = range(1, len(spectrum.eigenvalues) + 1)
        spectra.plot(order, spectrum.eigenvalues.clamp(min=1e-12).tolist(), color=colour, label=label)
        if spectrum.by_frequency is not None and spectrum.frequencies is not None:
            for values, dashes in zip(spectrum.by_frequency, ("-", "--"), strict=True):
                x, y = spectrum.frequencies.tolist(), values.tolist()
                waves.plot(x, y, color=colour, linestyle=dashes, marker=marker, markersize=2.5, linewidth=1.2)
        past = [line for line in run.metrics if noise.key in line]
        history.plot([line["step"] for line in past], [line[noise.key] for line in past], color=colour)
    spectra.set(xlabel="direction, by variance", ylabel="variance (eigenvalue of Σ)", yscale="log")
    waves.set(xlabel="frequency (radians / patch)", ylabel="variance of a feature\ncolumns –, rows - -")
    waves.set(xscale="log", yscale="log")
    # The range is often less than a power of ten, for which the default ticks are none or too many.
    low, high = waves.get_ylim()
    waves.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if high < 10 * low else (1, 2, 5)))
    waves.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    waves.yaxis.set_minor_formatter(NullFormatter())
    history.set(xlabel="training step", ylabel=f"{noise.label.lower()}\n{noise.meaning}")
    history.set_ylim(bottom=0)
    add_letters(figure)
    add_legend_below(figure, spectra, 1)
    return figure


@FIGURES.register("theory")
def theory_figure(runs: Sequence[Path] = (), score: str | None = None) -> Figure:
    """Both propositions of the paper by simulation; needs no runs."""
    figure = Figure(figsize=(WIDE, 5.4), layout="constrained")
    (flat, peaked), (gradients, norms) = figure.subplots(2, 2)
    _draw_smoothing(flat, theory.uniform_prior(6.0), 8.0, "positions uniform from -6 to 6")
    for border in (-6, 6):
        flat.axvline(border, color=GREY, linewidth=0.8, linestyle=":")
    _draw_smoothing(peaked, theory.normal_prior(1.0), 3.0, "positions normal, standard deviation 1")
    figure.legend(*flat.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    _draw_zero_gradients(gradients)
    _draw_toy_norms(norms)
    add_letters(figure)
    return figure


def _draw_smoothing(axes: Axes, prior: theory.Prior, reach: float, title: str) -> None:
    noisy = torch.linspace(-reach, reach, 401, dtype=torch.float64)
    network, points = theory.train_predictor(theory.square_wave, prior, steps=2000), noisy[::16]
    smooth = theory.convolution(theory.square_wave, noisy)
    optimum = theory.optimal_predictor(theory.square_wave, prior, noisy)
    clean = theory.square_wave(noisy)
    axes.plot(noisy, clean, label="clean, E[Y | X = r]", color=GREY, linewidth=1)
    axes.plot(noisy, smooth, label="proposition 1: clean ∗ Gaussian", color=ORANGE, linestyle="--")
    axes.plot(noisy, optimum, label="optimum, E[Y | R = r]", color=BLUE, linewidth=2.5)
    dots: dict[str, Any] = {"color": BLACK, "linestyle": "none", "marker": "o", "markersize": 3}
    axes.plot(points, network(points), label="trained network", **dots)
    axes.set(title=title, xlabel="noisy position r = x + z, z of unit variance", ylabel="prediction")


def _draw_zero_gradients(axes: Axes) -> None:
    counts = [10**power for power in (2, 3, 4, 5)]
    kinds = {"tied": (BLUE, "-", 5.0), "untied": (VERMILION, "-", 5.0), "deterministic": (BLACK, ":", 2.5)}
    for informative, marker in ((True, "o"), (False, "^")):
        found = [theory.gradients_at_zero(theory.ToyTask(informative=informative), count) for count in counts]
        for name, (colour, dashes, size) in kinds.items():
            norms = [one[name].norm().item() for one in found]
            axes.plot(counts, norms, color=colour, linestyle=dashes, marker=marker, markersize=size)
        axes.plot([], [], color=GREY, marker=marker, linestyle="none", label=CONTEXT_LABELS[informative])
    for name, (colour, dashes, _) in kinds.items():
        axes.plot([], [], color=colour, linestyle=dashes, label=name.replace("deterministic", "without noise"))
    axes.set(xscale="log", yscale="log", xlabel="samples in the estimate", ylabel="norm of the gradient at A = 0")
    axes.set_ylim(bottom=3e-4)
    axes.legend(loc="lower left", ncols=2, columnspacing=1.0)


def _draw_toy_norms(axes: Axes) -> None:
    seeds = 3
    cases: list[tuple[theory.Tying, bool, str]]
    cases = [("tied", True, BLUE), ("untied", True, VERMILION), ("tied", False, SKY)]
    for tying, informative, colour in cases:
        task = theory.ToyTask(informative=informative)
        histories = [theory.train_toy(task, tying, steps=600, seed=seed) for seed in range(seeds)]
        steps, norms = list(histories[0]), torch.tensor([list(history.values()) for history in histories])
        mean, std = norms.mean(0).numpy(), norms.std(0).numpy()
        axes.plot(steps, mean, color=colour, label=f"{tying}, {CONTEXT_LABELS[informative]}")
        axes.fill_between(steps, mean - std, mean + std, color=colour, alpha=0.25, linewidth=0)
    axes.set(xlabel="training step", ylabel=r"$\|A\|$ of the noise")
    axes.set_ylim(bottom=0)
    axes.legend(title=f"mean ± s.d., {seeds} seeds", title_fontsize=8)


@FIGURES.register("loss")
def loss_figure(runs: Sequence[Path], score: str | None = None) -> Figure:
    """Loss, learning rate and effective rank of the target features (RankMe) over training."""
    groups = group_seeds(_records(runs))
    figure = Figure(figsize=(WIDE, 2.4 + 0.16 * math.ceil(len(groups) / 4) * (len(groups) > 1)), layout="constrained")
    rank = SIGNS["rankme"]
    measured = {"loss": "loss", "lr": "learning rate", rank.key: f"{rank.label} (effective rank)"}
    for axes, (name, label) in zip(figure.subplots(1, 3), measured.items(), strict=True):
        for number, group in enumerate(groups):
            for run in group.runs:
                lines = [line for line in run.metrics if name in line]
                style = {"color": SERIES[number % len(SERIES)], "linestyle": LINES[number // len(SERIES) % len(LINES)]}
                # Few points are marked: between them nothing was measured.
                marker = "o" if len(lines) <= FEW_POINTS else None
                own = group.name if run is group.first else None
                steps, values = [line["step"] for line in lines], [line[name] for line in lines]
                axes.plot(steps, values, marker=marker, markersize=3, label=own, **style)
        axes.set(xlabel="training step", ylabel=label)
    add_letters(figure)
    if len(groups) > 1:
        title = "a line for each seed" if any(len(group.runs) > 1 for group in groups) else None
        add_legend_below(figure, figure.axes[0], 4, title)
    return figure


@FIGURES.register("positions")
def positions_figure(runs: Sequence[Path], score: str | None = None) -> Figure:
    """What StoP does: masked patches with fixed and with sampled positions, and what models predict of one of them.

    Of a run with fixed positions on the same images, the prediction is shown too.
    """
    run = _nearest_to_the_paper(runs)
    fixed = [one for one in _records(runs) if one.noise.form == "none" and _inputs(one) == _inputs(run)]
    shown = [(f"Prediction of {_method(one)}", one) for one in fixed[:1]] + [("Prediction of StoP", run)]
    if not isinstance(run.objective, TargetObjective):
        shown = []
    figure, panels = _square_panels(run, 3 + len(shown))
    patch = _draw_idea(panels[:3], run)
    image, masks = sample_images(run, N_IMAGES)[:2][-1], sample_masks(run, 1)
    maps = []
    for axes, (title, one) in zip(panels[3:], shown, strict=True):
        axes.set(title=title, xlabel="for the framed patch: which\npatches it resembles")
        maps.append((axes, patch, prediction_map(feature_objective(one.objective), image, masks, patch)))
    if maps:
        _draw_heat(figure, maps, panels[3:])
    return figure


def _method(run: RunRecords) -> str:
    """Return the name of the method that the run has without StoP."""
    kind = run.config.objective.kind
    return {"ijepa": "I-JEPA", "mae": "MAE"}.get(kind, kind)


def _inputs(run: RunRecords) -> tuple[Any, ...]:
    """Return what must agree where two runs saw the same images, cut into the same patches and masked alike."""
    return run.config.data, run.config.masks, run.config.encoder.image_size, run.grid


def _records(runs: Sequence[Path]) -> list[RunRecords]:
    if not runs:
        raise InputError("No runs are given: give their directories with --runs.")
    return [read_records(path) for path in runs]


def _side_by_side(runs: Sequence[Path], noise: bool = True) -> list[RunRecords]:
    """Return one run of every kind, the one with the lowest seed, in order of increasing noise.

    With too many kinds, the paper's (tied, and without noise) are preferred, evenly spaced. `noise`: only runs with noise.
    """
    records = _records(runs)
    check_same_grid(records)
    kinds = [min(group, key=lambda run: run.config.seed) for group in grouped(records, _label).values()]
    if noise:
        kinds = _noisy(kinds)
    kinds.sort(key=lambda run: (run.noise.form != "none", run.noise.sigma))
    if len(kinds) > MOST_SIDE_BY_SIDE:
        kinds = [run for run in kinds if run.noise.form in ("tied", "none")] or kinds
    last, shown = len(kinds) - 1, min(len(kinds), MOST_SIDE_BY_SIDE)
    return [kinds[round(place * last / max(1, shown - 1))] for place in range(shown)]


def _noisy(runs: Sequence[RunRecords]) -> list[RunRecords]:
    noisy = [run for run in runs if run.noise.form != "none"]
    if not noisy:
        raise InputError("No run has noise: name a run with stochastic positions and a sigma above 0.")
    return noisy


def _label(run: RunRecords) -> str:
    """Return a run's name in a figure: its noise, and the tokens that have it unless they are the masked ones."""
    noise, tokens = run.noise, run.config.positions.apply_to
    if noise.form == "none":
        return "learned positions" if run.config.positions.kind == "learned" else "fixed positions"
    to = "" if tokens == "masked" else f", {tokens} tokens"
    return f"{_form(noise)}, σ = {noise.sigma:g}{to}"


def _form(noise: Noise) -> str:
    return {"tied": "StoP", "identity": "Σ = σI", "none": "fixed positions"}.get(noise.form, noise.form)


def _generator(run: RunRecords) -> torch.Generator:
    return seeded_generator("cpu", run.config.seed, "figure")


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Write a figure as PATH.pdf and PATH.png, the same bytes for the same figure; return the two files."""
    files = []
    for kind, undated in (("pdf", {"CreationDate": None}), ("png", {"Software": None})):
        files.append(path.with_name(f"{path.name}.{kind}"))
        write_atomically(files[-1], partial(figure.savefig, format=kind, dpi=PNG_DPI, metadata=undated))
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
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def mark_patch(axes: Axes, patch: int, grid: Grid, size: Sequence[int], colour: str) -> None:
    """Outline a patch of a picture of that (height, width)."""
    height, width = size[0] / grid[0], size[1] / grid[1]
    corner = (patch % grid[1] * width - 0.5, patch // grid[1] * height - 0.5)
    for edge, thickness in ((BLACK, 2.2), (colour, 1.2)):
        outline = Rectangle(corner, width, height, fill=False, edgecolor=edge, linewidth=thickness, clip_on=False)
        axes.add_patch(outline)


def add_letters(figure: Figure) -> None:
    """Name the panels a, b, c, …."""
    for axes, letter in zip(figure.axes, "abcd", strict=False):
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
        # Error bars are shifted, so that they do not hide each other.
        shift = 1 if bands or places else 1.06**number
        sigmas = [(places[form][sigma].mean if places else sigma) * shift for sigma in spreads[form]]
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
    named = axes.get_legend_handles_labels()
    figure.legend(*named, title=title, title_fontsize=8, loc="outside lower center", ncols=columns)


def set_sigma_axis(axes: Axes, runs: Sequence[RunRecords]) -> None:
    """Set a logarithmic axis with a tick for every sigma of the runs, labelled where there is room."""
    sigmas = sorted({run.noise.sigma for run in runs} - {0.0})
    meaning = "variance" if runs[0].config.positions.convention == "paper" else "standard deviation"
    axes.set(xscale="log", xlabel=f"σ ({meaning} of n)")
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
    words = ", ".join(filter(None, [score.title, data]))
    return "\n".join([what, *textwrap.wrap(words, LABEL_CHARACTERS)])


def seeds_label(runs: Sequence[RunRecords]) -> str:
    """Return how many seeds a figure shows."""
    counts = {len(group) for group in grouped(runs, lambda run: run.noise).values()}
    if counts == {1}:
        return "one seed each"
    return f"mean ± s.d., {'–'.join(map(str, sorted({min(counts), max(counts)})))} seeds"
