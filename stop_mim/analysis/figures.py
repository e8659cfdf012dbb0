"""Numbers to figures, one function a figure: those of the paper by their numbers, drawn from folders of runs alone."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator
from torch import Tensor

from stop_mim.analysis import theory
from stop_mim.analysis.covariance import AXES, noise_history, noise_spectrum
from stop_mim.analysis.predictions import (
    central_target,
    feature_objective,
    prediction_map,
    sample_images,
    sample_masks,
)
from stop_mim.analysis.runs import (
    AnalysedRun,
    Noise,
    RunRecords,
    Spread,
    check_comparable,
    check_same_grid,
    common_accuracy,
    grouped,
    noise_of,
    open_run,
    read_records,
    spreads_by_sigma,
)
from stop_mim.analysis.similarity import identified, most_similar, similarity_maps
from stop_mim.errors import InputError
from stop_mim.files import write_atomically
from stop_mim.positions import Grid, StochasticPositions
from stop_mim.seeds import seeded_generator
from stop_mim.training.config import PositionsConfig

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
WIDE, NARROW = 7.2, 3.6
"""Widths in inches of figures over two columns and over one."""

# Runs side by side in one picture; of more, evenly spaced ones are taken.
MOST_SIDE_BY_SIDE = 3
QUERY_DRAWS = 256

FigureFunction = Callable[[Sequence[Path]], Figure]


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
        _draw_clouds(cloud, positions, draws, generator)
        samples = positions.sample(torch.full((1, draws), middle), generator=generator)[0]
        _draw_similarity(maps[0], positions, positions.mean(torch.tensor([[middle]]))[0], middle, "fixed position")
        _draw_similarity(maps[1], positions, samples[:1], middle, "one sample")
        _draw_similarity(maps[2], positions, samples, middle, f"mean of {draws} samples")
        figure.savefig(path, dpi=150)


def _draw_clouds(axes: Axes, positions: StochasticPositions, draws: int, generator: torch.Generator) -> None:
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


def draw_figures(
    names: Sequence[str], runs: Sequence[str | Path], out: str | Path, tell: Callable[[str], None] = lambda text: None
) -> list[Path]:
    """Draw figures by name from the folders of runs, each as PDF and PNG; gives their files.

    Of "all" those are left out that these runs do not suffice for; `tell` is told which, and why.
    """
    unknown = [name for name in names if name not in (*FIGURES, "all")]
    if unknown or not names:
        choices = f"choose among {', '.join(FIGURES)} and all"
        raise InputError(
            f"There is no figure '{unknown[0]}': {choices}." if unknown else f"No figure is named: {choices}."
        )
    paths, written = [Path(run) for run in runs], list[Path]()
    for name in FIGURES if "all" in names else dict.fromkeys(names):
        try:
            with matplotlib.rc_context(STYLE):
                written += save_figure(FIGURES[name](paths), Path(out) / f"figure-{name}")
        except InputError as error:
            if "all" not in names:
                raise
            tell(f"Figure {name} is left out: {error}")
    return written


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


def idea_figure(runs: Sequence[Path]) -> Figure:
    """Figure 1, the idea: a masked patch whose place is certain, the same with noise, samples of positions, what it brings.

    The last part needs runs with and without noise that were scored alike, and is left out without them.
    """
    run = _nearest_to_the_paper(runs)
    positions, size = run.objective.positions, run.config.encoder.image_size
    assert isinstance(positions, StochasticPositions)
    image, masks = sample_images(run, 1)[0], sample_masks(run, 1)
    patch, scores = central_target(masks, run.grid), _scores_beside(run, runs)
    figure = Figure(figsize=(WIDE, 2.3), layout="constrained")
    ratios = [1, 1, 1.15, *([0.6] if scores else [])]
    panels = figure.subplots(1, len(ratios), gridspec_kw={"width_ratios": ratios})
    known, guessed, cloud = panels[:3]
    for axes in (known, guessed):
        _draw_image(axes, _masked(image, _seen(masks.context[0], run.grid), run.grid, dim=0.25))
    known.set(title="fixed position", xlabel="always its own ψ\n")
    _mark(known, patch, run.grid, size, ORANGE)
    guessed.set_title(f"stochastic, σ = {positions.sigma:g}")
    _draw_guesses(guessed, positions, patch, size)
    with torch.no_grad():
        _draw_clouds(cloud, positions, 200, seeded_generator("cpu", 0, "clouds"))
    cloud.set(title="samples of four ψ̂", aspect="equal")
    if scores:
        _draw_bars(panels[3], *scores)
    for axes, letter in zip(panels, "abcd", strict=False):
        _letter(axes, letter)
    return figure


def _nearest_to_the_paper(runs: Sequence[Path]) -> AnalysedRun:
    noisy = [run for run in _records(runs, "1") if _has_noise(run)]
    if not noisy:
        raise InputError("Figure 1 is about noise: name a run with stochastic positions and a sigma above 0.")
    usual = PositionsConfig().sigma
    return open_run(min(noisy, key=lambda run: (noise_of(run.config).form != "tied", _ratio(run, usual))).path)


def _ratio(run: RunRecords, sigma: float) -> float:
    return abs(math.log(noise_of(run.config).sigma / sigma))


def _scores_beside(run: RunRecords, runs: Sequence[Path]) -> tuple[str, dict[str, Spread]] | None:
    """The accuracy of this kind of run and of those without noise; None where they cannot be compared."""
    kinds = (noise_of(run.config), Noise("none", 0.0))
    records = [one for one in _records(runs, "1") if noise_of(one.config) in kinds]
    try:
        check_comparable(records)
        accuracy = common_accuracy(records)
    except InputError:
        return None
    found = spreads_by_sigma(records, lambda one: one.accuracies()[accuracy])
    spreads = {_form(Noise(form, sigma)): value for form, by in found.items() for sigma, value in by.items()}
    return (accuracy, spreads) if len(spreads) == 2 else None


def _draw_bars(axes: Axes, accuracy: str, spreads: dict[str, Spread]) -> None:
    values = list(spreads.values())
    stds = [0.0 if math.isnan(value.std) else value.std for value in values]
    axes.bar(range(2), [value.mean for value in values], yerr=stds, color=[GREY, BLUE], width=0.6, capsize=3)
    names = [f"{name.removesuffix(' positions')}\nn = {value.count}" for name, value in spreads.items()]
    axes.set_xticks(range(2), names)
    axes.set_ylabel(_accuracy_label(accuracy))


def _draw_guesses(axes: Axes, positions: StochasticPositions, patch: int, size: Sequence[int]) -> None:
    """Where samples seem to be: the patches whose fixed positions are most like them, the more often the more opaque."""
    found = most_similar(positions, patch, seeded_generator("cpu", 0, "guesses"), draws=1000)
    shares = torch.bincount(found, minlength=math.prod(positions.grid)) / len(found)
    for place in shares.nonzero()[:, 0].tolist():
        opacity = 0.15 + 0.85 * (shares[place] / shares.max()).item()
        _mark(axes, place, positions.grid, size, ORANGE, fill=opacity)
    _mark(axes, patch, positions.grid, size, "white")
    axes.set_xlabel(f"most like its own ψ\nin {100 * shares[patch].item():.4g}% of draws")


def learned_covariance_figure(runs: Sequence[Path]) -> Figure:
    """Figure 3: accuracy against sigma, with a learned covariance and with a fixed one."""
    records = _records(runs, "3")
    forms = {noise_of(run.config).form for run in records}
    if not {"tied", "identity"} <= forms or len({noise_of(run.config).sigma for run in records} - {0.0}) < 2:
        raise InputError(
            "Figure 3 compares learned and fixed covariances over sigma: name runs with positions.covariance tied and identity "
            "and at least two values of positions.sigma."
        )
    check_comparable(records)
    accuracy = common_accuracy(records)
    figure = Figure(figsize=(NARROW + 0.4, 3.4), layout="constrained")
    axes = figure.subplots()
    _draw_against_sigma(axes, spreads_by_sigma(records, lambda run: run.accuracies()[accuracy]), bands=False)
    axes.set_ylabel(_accuracy_label(accuracy))
    _sigma_axis(axes, records)
    _legend_below(figure, axes, 2, _seeds(records))
    return figure


def sigma_figure(runs: Sequence[Path]) -> Figure:
    """Figure 4: norms of A and m̃, and accuracy, against sigma."""
    records = _records(runs, "4")
    records = [run for run in records if noise_of(run.config).form in ("tied", "none")]
    if len({noise_of(run.config).sigma for run in records} - {0.0}) < 2:
        raise InputError(
            "Figure 4 is about sigma: name runs with stochastic positions, tied, of at least two values of positions.sigma."
        )
    check_comparable(records, forms=["tied"])
    accuracy = common_accuracy(records)
    panels: list[tuple[str, Callable[[RunRecords], float]]] = [
        (r"$\|A\|$ (Frobenius norm)", lambda run: run.newest("health/A_norm")),
        (r"$\|\tilde{m}\|$ (mask token)", lambda run: run.newest("health/mask_token_norm")),
        (_accuracy_label(accuracy), lambda run: run.accuracies()[accuracy]),
    ]
    figure = Figure(figsize=(WIDE, 2.6), layout="constrained")
    for axes, letter, (label, measure) in zip(figure.subplots(1, 3), "abc", panels, strict=True):
        _draw_against_sigma(axes, spreads_by_sigma(records, measure))
        axes.set_ylabel(label)
        _sigma_axis(axes, records)
        _letter(axes, letter)
    _legend_below(figure, figure.axes[0], 2, _seeds(records))
    return figure


def similarity_figure(runs: Sequence[Path]) -> Figure:
    """Figure 5: cosines of a query position to all fixed ones: without noise, one sample, and the mean of many."""
    noisy = _side_by_side(runs, "5")
    grid, queries = noisy[0].grid, _queries(noisy[0].grid)
    titles = [
        "without\nnoise",
        *(f"{_label(run)}\n{kind}" for run in noisy for kind in ("one sample", f"mean of {QUERY_DRAWS}")),
    ]
    figure = Figure(
        figsize=(1.2 + 1.02 * len(titles), 0.7 + 1.02 * grid[0] / grid[1] * len(queries)), layout="constrained"
    )
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
            _without_ticks(axes)
            _mark(axes, query, grid, grid, "white")
        line[0].set_ylabel(f"row {query // grid[1] + 1}\ncolumn {query % grid[1] + 1}", fontsize=8)
    for axes, title in zip(panels[0], titles, strict=True):
        axes.set_title(title, fontsize=8)
    figure.colorbar(picture, ax=panels, label="cosine similarity to ψ", shrink=0.8, aspect=30)
    return figure


def predictions_figure(runs: Sequence[Path], n_images: int = 4) -> Figure:
    """Figure 6: for one masked patch of each image, how like the prediction is to the features of all patches."""
    chosen = _side_by_side(runs, "6", noise=False)
    objectives = [feature_objective(run.objective) for run in chosen]
    for run in chosen[1:]:
        if run.config.data != chosen[0].config.data:
            raise InputError(
                f"{chosen[0].path} was trained on '{chosen[0].config.data}' and {run.path} on '{run.config.data}': figure 6 "
                "compares runs on the same images."
            )
    images, masks = sample_images(chosen[0], n_images), sample_masks(chosen[0], n_images)
    titles = ["image", "context", *(_label(run) for run in chosen)]
    height, width = chosen[0].config.encoder.image_size
    figure = Figure(figsize=(0.9 + 1.2 * len(titles), 0.4 + 1.2 * height / width * len(images)), layout="constrained")
    panels = figure.subplots(len(images), len(titles), squeeze=False)
    for number, (image, line) in enumerate(zip(images, panels, strict=True)):
        own, size = masks[number : number + 1], image.shape[1:]
        patch = central_target(own, chosen[0].grid)
        _draw_image(line[0], image)
        _draw_image(line[1], _masked(image, _seen(own.context[0], chosen[0].grid), chosen[0].grid))
        _mark(line[1], patch, chosen[0].grid, size, "white")
        for axes, objective in zip(line[2:], objectives, strict=True):
            heat = prediction_map(objective, image, own, patch)
            relative = (heat - heat.min()) / (heat.max() - heat.min()).clamp(min=1e-12)
            picture = axes.imshow(relative.numpy(), cmap="magma", vmin=0, vmax=1)
            _without_ticks(axes)
            _mark(axes, patch, chosen[0].grid, chosen[0].grid, "white")
    for axes, title in zip(panels[0], titles, strict=True):
        axes.set_title(title, fontsize=8)
    label = "softmax of cosines, lowest to highest of each map"
    figure.colorbar(picture, ax=panels, label=label, ticks=[0, 1], shrink=0.7, aspect=30)
    return figure


def covariance_figure(runs: Sequence[Path]) -> Figure:
    """Not in the paper: the spectrum of Σ, the frequencies that its noise goes to, and the noise over training."""
    noisy = _side_by_side(runs, "covariance")
    figure = Figure(figsize=(WIDE, 2.6 + 0.16 * len(noisy)), layout="constrained")
    spectra, waves, history = figure.subplots(1, 3)
    for run, colour, marker in zip(noisy, SERIES, MARKERS, strict=False):
        positions, past = run.objective.positions, noise_history(run.metrics)
        assert isinstance(positions, StochasticPositions)
        spectrum, told = noise_spectrum(positions), identified(positions, _generator(run))
        rank = f"effective rank {spectrum.effective_rank:.1f} of {len(spectrum.eigenvalues)}"
        label = f"{_label(run)}: {rank}; best decoder finds the patch in {100 * told:.0f}%"
        order = range(1, len(spectrum.eigenvalues) + 1)
        spectra.plot(order, spectrum.eigenvalues.clamp(min=1e-12).tolist(), color=colour, label=label)
        if spectrum.by_frequency is not None and spectrum.frequencies is not None:
            for values, dashes in zip(spectrum.by_frequency, ("-", "--"), strict=True):
                x, y = spectrum.frequencies.tolist(), values.tolist()
                waves.plot(x, y, color=colour, linestyle=dashes, marker=marker, markersize=2.5, linewidth=1.2)
        history.plot(past.steps, past.noise_to_signal, color=colour)
    spectra.set(xlabel="direction, by variance", ylabel="variance (eigenvalue of Σ)", yscale="log")
    waves.set(xlabel="frequency (radians / patch)", ylabel=f"variance of a feature\n{AXES[0]} –, {AXES[1]} - -")
    waves.set(xscale="log", yscale="log")
    # Their range is often less than a power of ten, where the usual ticks are none or too many.
    waves.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    waves.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    waves.yaxis.set_minor_formatter(NullFormatter())
    history.set(xlabel="training step", ylabel=r"noise to signal, $\|An\|\,/\,\|\psi\|$")
    history.set_ylim(bottom=0)
    for axes, letter in zip((spectra, waves, history), "abc", strict=True):
        _letter(axes, letter)
    _legend_below(figure, spectra, 1)
    return figure


def theory_figure(runs: Sequence[Path] = ()) -> Figure:
    """Both propositions by simulation; no run has a part in it."""
    figure = Figure(figsize=(WIDE, 5.4), layout="constrained")
    (flat, peaked), (gradients, norms) = figure.subplots(2, 2)
    _draw_smoothing(flat, theory.uniform_prior(6.0), 8.0, "positions uniform from -6 to 6")
    for border in (-6, 6):
        flat.axvline(border, color=GREY, linewidth=0.8, linestyle=":")
    _draw_smoothing(peaked, theory.normal_prior(1.0), 3.0, "positions normal, standard deviation 1")
    figure.legend(*flat.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    _draw_zero_gradients(gradients)
    _draw_toy_norms(norms)
    for axes, letter in zip((flat, peaked, gradients, norms), "abcd", strict=True):
        _letter(axes, letter)
    return figure


def _draw_smoothing(axes: Axes, prior: theory.Prior, reach: float, title: str) -> None:
    noisy = torch.linspace(-reach, reach, 401, dtype=torch.float64)
    network, points = theory.train_predictor(theory.square_wave, prior, steps=2000), noisy[::16]
    curves: dict[str, tuple[Tensor, dict[str, Any]]] = {
        "clean, E[Y | X = r]": (theory.square_wave(noisy), {"color": GREY, "linewidth": 1}),
        "proposition 1: clean ∗ Gaussian": (
            theory.convolution(theory.square_wave, noisy),
            {"color": ORANGE, "linestyle": "--"},
        ),
        "optimum, E[Y | R = r]": (
            theory.optimal_predictor(theory.square_wave, prior, noisy),
            {"color": BLUE, "linewidth": 2.5},
        ),
    }
    for label, (values, style) in curves.items():
        axes.plot(noisy.numpy(), values.numpy(), label=label, **style)
    dots: dict[str, Any] = {"color": BLACK, "linestyle": "none", "marker": "o", "markersize": 3}
    axes.plot(points.numpy(), network(points).numpy(), label="trained network", **dots)
    axes.set(title=title, xlabel="noisy position r = x + z, z of unit variance", ylabel="prediction")


def _draw_zero_gradients(axes: Axes) -> None:
    counts = [10**power for power in (2, 3, 4, 5)]
    kinds = {"tied": (BLUE, "-", 5.0), "untied": (VERMILION, "-", 5.0), "deterministic": (BLACK, ":", 2.5)}
    for informative, marker in ((True, "o"), (False, "^")):
        found = [theory.gradients_at_zero(theory.ToyTask(informative=informative), count) for count in counts]
        for name, (colour, dashes, size) in kinds.items():
            norms = [getattr(one, name).norm().item() for one in found]
            axes.plot(counts, norms, color=colour, linestyle=dashes, marker=marker, markersize=size)
        axes.plot([], [], color=GREY, marker=marker, linestyle="none", label=_telling(informative))
    for name, (colour, dashes, _) in kinds.items():
        axes.plot([], [], color=colour, linestyle=dashes, label=name.replace("deterministic", "without noise"))
    axes.set(xscale="log", yscale="log", xlabel="samples in the estimate", ylabel="norm of the gradient at A = 0")
    axes.set_ylim(bottom=3e-4)
    axes.legend(loc="lower left", ncols=2, columnspacing=1.0)


def _telling(informative: bool) -> str:
    return "context matters" if informative else "context irrelevant"


def _draw_toy_norms(axes: Axes, seeds: int = 3) -> None:
    cases: tuple[tuple[theory.Tying, bool, str], ...] = (
        ("tied", True, BLUE),
        ("untied", True, VERMILION),
        ("tied", False, SKY),
    )
    for tying, informative, colour in cases:
        task = theory.ToyTask(informative=informative)
        histories = [theory.train_toy(task, tying, seed=seed) for seed in range(seeds)]
        norms = torch.tensor([history.noise_norm for history in histories])
        label = f"{tying}, {_telling(informative)}"
        mean, std = norms.mean(0).numpy(), norms.std(0).numpy()
        axes.plot(histories[0].steps, mean, color=colour, label=label)
        axes.fill_between(histories[0].steps, mean - std, mean + std, color=colour, alpha=0.25, linewidth=0)
    axes.set(xlabel="training step", ylabel=r"$\|A\|$ of the noise")
    axes.set_ylim(bottom=0)
    axes.legend(title=f"mean ± s.d., {seeds} seeds", title_fontsize=8)


def _records(runs: Sequence[Path], figure: str) -> list[RunRecords]:
    if not runs:
        raise InputError(f"Figure {figure} needs runs: name their folders with --runs.")
    return [read_records(path) for path in runs]


def _side_by_side(runs: Sequence[Path], figure: str, noise: bool = True) -> list[AnalysedRun]:
    """One run of every kind, the lowest seed's, with little noise before much; of too many kinds evenly spaced ones.

    Of too many kinds those of the paper come first: tied, and without noise. `noise`: none but runs with noise.
    """
    records = _records(runs, figure)
    check_same_grid(records)
    kinds = [min(group, key=lambda run: run.config.seed) for group in grouped(records, _label).values()]
    if noise:
        kinds = [run for run in kinds if _has_noise(run)]
        if not kinds:
            raise InputError(
                f"Figure {figure} is about noise: name a run with stochastic positions and a sigma above 0."
            )
    kinds.sort(key=lambda run: (noise_of(run.config).form != "none", noise_of(run.config).sigma))
    if len(kinds) > MOST_SIDE_BY_SIDE:
        kinds = [run for run in kinds if noise_of(run.config).form in ("tied", "none")] or kinds
    last, shown = len(kinds) - 1, min(len(kinds), MOST_SIDE_BY_SIDE)
    return [open_run(kinds[round(place * last / max(1, shown - 1))].path) for place in range(shown)]


def _has_noise(run: RunRecords) -> bool:
    return noise_of(run.config).form not in ("none", "jittered")


def _label(run: RunRecords) -> str:
    """What a run is called in a figure: its noise, and the tokens that it goes to if those are not the paper's."""
    noise, tokens = noise_of(run.config), run.config.positions.apply_to
    if noise.form == "none":
        return "learned positions" if run.config.positions.kind == "learned" else "fixed positions"
    if noise.form == "jittered":
        return f"jittered by {noise.sigma:g} patches"
    to = "" if tokens == "masked" else f", {tokens} tokens"
    return f"{_form(noise)}, σ = {noise.sigma:g}{to}"


def _form(noise: Noise) -> str:
    return {"tied": "StoP", "identity": "Σ = σI", "none": "fixed positions"}.get(noise.form, noise.form)


def _generator(run: AnalysedRun) -> torch.Generator:
    return seeded_generator("cpu", run.config.seed, "figure")


def _queries(grid: Grid) -> list[int]:
    """Three patches: near a corner, in the middle, and at the lower edge."""
    rows, columns = grid
    places = [(rows // 5, columns // 5), (rows // 2, columns // 2), (rows - 1, columns * 3 // 4)]
    return [row * columns + column for row, column in places]


def _seen(context: Tensor, grid: Grid) -> Bool[Tensor, "rows columns"]:
    seen = torch.zeros(math.prod(grid), dtype=torch.bool)
    seen[context] = True
    return seen.unflatten(0, grid)


def _masked(
    image: UInt8[Tensor, "3 height width"], seen: Bool[Tensor, "rows columns"], grid: Grid, dim: float = 0.0
) -> UInt8[Tensor, "3 height width"]:
    """The image with the patches that are not seen made this dark."""
    height, width = image.shape[1] // grid[0], image.shape[2] // grid[1]
    light = torch.where(seen, 1.0, dim).repeat_interleave(height, 0).repeat_interleave(width, 1)
    return (image * light).to(torch.uint8)


def _draw_image(axes: Axes, image: UInt8[Tensor, "3 height width"]) -> None:
    axes.imshow(image.permute(1, 2, 0).numpy())
    _without_ticks(axes)


def _without_ticks(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def _mark(axes: Axes, patch: int, grid: Grid, size: Sequence[int], colour: str, fill: float | None = None) -> None:
    """Outline a patch of a picture of that (height, width), or fill it with this opacity."""
    height, width = size[0] / grid[0], size[1] / grid[1]
    corner = (patch % grid[1] * width - 0.5, patch // grid[1] * height - 0.5)
    if fill is None:
        for edge, thickness in ((BLACK, 2.2), (colour, 1.2)):
            outline = Rectangle(corner, width, height, fill=False, edgecolor=edge, linewidth=thickness, clip_on=False)
            axes.add_patch(outline)
    else:
        axes.add_patch(Rectangle(corner, width, height, facecolor=colour, alpha=fill, linewidth=0))


def _letter(axes: Axes, letter: str) -> None:
    axes.set_title(letter, loc="left", fontweight="bold")


def _draw_against_sigma(axes: Axes, spreads: dict[str, dict[float, Spread]], bands: bool = True) -> None:
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


def _legend_below(figure: Figure, axes: Axes, columns: int, title: str | None = None) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, title=title, title_fontsize=8, loc="outside lower center", ncols=columns)


def _sigma_axis(axes: Axes, runs: Sequence[RunRecords]) -> None:
    sigmas = sorted({noise_of(run.config).sigma for run in runs} - {0.0})
    meaning = "variance" if runs[0].config.positions.convention == "paper" else "standard deviation"
    axes.set_xscale("log")
    axes.set_xlabel(f"σ ({meaning} of n)")
    if len(sigmas) <= 6:
        axes.xaxis.set_major_locator(FixedLocator(sigmas))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))


def _accuracy_label(name: str) -> str:
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


def _seeds(runs: Sequence[RunRecords]) -> str:
    counts = {len(group) for group in grouped(runs, lambda run: noise_of(run.config)).values()}
    if counts == {1}:
        return "one seed each"
    return f"mean ± s.d., {'–'.join(map(str, sorted({min(counts), max(counts)})))} seeds"


FIGURES: dict[str, FigureFunction] = {
    "1": idea_figure,
    "3": learned_covariance_figure,
    "4": sigma_figure,
    "5": similarity_figure,
    "6": predictions_figure,
    "covariance": covariance_figure,
    "theory": theory_figure,
}
