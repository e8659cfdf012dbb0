"""Numbers to figures, one function a figure: those of the paper by their numbers, drawn from folders of runs alone."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from stop_mim.analysis.covariance import AXES, noise_history, noise_spectrum
from stop_mim.analysis.demo_figures import draw_clouds
from stop_mim.analysis.drawing import (
    BLUE,
    GREY,
    MARKERS,
    NARROW,
    ORANGE,
    SERIES,
    STYLE,
    WIDE,
    accuracy_label,
    add_legend_below,
    add_letter,
    darkened,
    draw_against_sigma,
    draw_image,
    mark_patch,
    save_figure,
    seeds_label,
    seen_patches,
    set_sigma_axis,
    without_ticks,
)
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
from stop_mim.analysis.theory_figure import theory_figure
from stop_mim.errors import InputError
from stop_mim.positions import Grid, StochasticPositions
from stop_mim.seeds import seeded_generator
from stop_mim.training.config import PositionsConfig

# Runs side by side in one picture; of more, evenly spaced ones are taken.
MOST_SIDE_BY_SIDE = 3
# Figures that show an accuracy.
SCORED = ("1", "3", "4")
QUERY_DRAWS = 256


def draw_figures(
    names: Sequence[str],
    runs: Sequence[str | Path],
    out: str | Path,
    tell: Callable[[str], None] = lambda text: None,
    score: str | None = None,
) -> list[Path]:
    """Draw figures by name from the folders of runs, each as PDF and PNG; gives their files.

    Figures of accuracies show `score`, such as linear/top1, or what is nearest to the paper's protocol. Of "all" those are
    left out that these runs do not suffice for; `tell` is told which, and why.
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
                asked = (paths, score) if name in SCORED else (paths,)
                written += save_figure(FIGURES[name](*asked), Path(out) / f"figure-{name}")
        except InputError as error:
            if "all" not in names:
                raise
            tell(f"Figure {name} is left out: {error}")
    return written


def idea_figure(runs: Sequence[Path], score: str | None = None) -> Figure:
    """Figure 1, the idea: a masked patch whose place is certain, the same with noise, samples of positions, what it brings.

    The last part needs runs with and without noise that were scored alike, and is left out without them.
    """
    run = _nearest_to_the_paper(runs)
    positions, size = run.objective.positions, run.config.encoder.image_size
    assert isinstance(positions, StochasticPositions)
    image, masks = sample_images(run, 1)[0], sample_masks(run, 1)
    patch, scores = central_target(masks, run.grid), _scores_beside(run, runs, score)
    figure = Figure(figsize=(WIDE, 2.3), layout="constrained")
    ratios = [1, 1, 1.15, *([0.6] if scores else [])]
    panels = figure.subplots(1, len(ratios), gridspec_kw={"width_ratios": ratios})
    known, guessed, cloud = panels[:3]
    for axes in (known, guessed):
        draw_image(axes, darkened(image, seen_patches(masks.context[0], run.grid), run.grid, dim=0.25))
    known.set(title="fixed position", xlabel="always its own ψ\n")
    mark_patch(known, patch, run.grid, size, ORANGE)
    guessed.set_title(f"stochastic, σ = {positions.sigma:g}")
    _draw_guesses(guessed, positions, patch, size)
    with torch.no_grad():
        draw_clouds(cloud, positions, 200, seeded_generator("cpu", 0, "clouds"))
    cloud.set(title="samples of four ψ̂", aspect="equal")
    if scores:
        _draw_bars(panels[3], *scores)
    for axes, letter in zip(panels, "abcd", strict=False):
        add_letter(axes, letter)
    return figure


def _nearest_to_the_paper(runs: Sequence[Path]) -> AnalysedRun:
    noisy = [run for run in _records(runs, "1") if _has_noise(run)]
    if not noisy:
        raise InputError("Figure 1 is about noise: name a run with stochastic positions and a sigma above 0.")
    usual = PositionsConfig().sigma
    return open_run(min(noisy, key=lambda run: (noise_of(run.config).form != "tied", _ratio(run, usual))).path)


def _ratio(run: RunRecords, sigma: float) -> float:
    return abs(math.log(noise_of(run.config).sigma / sigma))


def _scores_beside(run: RunRecords, runs: Sequence[Path], score: str | None) -> tuple[str, dict[str, Spread]] | None:
    """The accuracy of this kind of run and of those without noise; None where they cannot be compared."""
    kinds = (noise_of(run.config), Noise("none", 0.0))
    records = [one for one in _records(runs, "1") if noise_of(one.config) in kinds]
    records = [one for one in records if one.config.positions.kind != "learned"]
    try:
        check_comparable(records)
        accuracy = common_accuracy(records, score)
    except InputError:
        if score is not None:
            raise
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
    axes.set_ylabel(accuracy_label(accuracy))


def _draw_guesses(axes: Axes, positions: StochasticPositions, patch: int, size: Sequence[int]) -> None:
    """Where samples seem to be: the patches whose fixed positions are most like them, the more often the more opaque."""
    found = most_similar(positions, patch, seeded_generator("cpu", 0, "guesses"), draws=1000)
    shares = torch.bincount(found, minlength=math.prod(positions.grid)) / len(found)
    for place in shares.nonzero()[:, 0].tolist():
        opacity = 0.15 + 0.85 * (shares[place] / shares.max()).item()
        mark_patch(axes, place, positions.grid, size, ORANGE, fill=opacity)
    mark_patch(axes, patch, positions.grid, size, "white")
    axes.set_xlabel(f"most like its own ψ\nin {100 * shares[patch].item():.4g}% of draws")


def learned_covariance_figure(runs: Sequence[Path], score: str | None = None) -> Figure:
    """Figure 3: accuracy against sigma, with a learned covariance and with a fixed one."""
    records = _records(runs, "3")
    forms = {noise_of(run.config).form for run in records}
    if not {"tied", "identity"} <= forms or len({noise_of(run.config).sigma for run in records} - {0.0}) < 2:
        raise InputError(
            "Figure 3 compares learned and fixed covariances over sigma: name runs with positions.covariance tied and identity "
            "and at least two values of positions.sigma."
        )
    check_comparable(records)
    accuracy = common_accuracy(records, score)
    figure = Figure(figsize=(NARROW + 0.4, 3.4), layout="constrained")
    axes = figure.subplots()
    draw_against_sigma(axes, spreads_by_sigma(records, lambda run: run.accuracies()[accuracy]), bands=False)
    axes.set_ylabel(accuracy_label(accuracy))
    set_sigma_axis(axes, records)
    add_legend_below(figure, axes, 2, seeds_label(records))
    return figure


def sigma_figure(runs: Sequence[Path], score: str | None = None) -> Figure:
    """Figure 4: norms of A and m̃, and accuracy, against sigma."""
    records = _records(runs, "4")
    records = [run for run in records if noise_of(run.config).form in ("tied", "none")]
    if len({noise_of(run.config).sigma for run in records} - {0.0}) < 2:
        raise InputError(
            "Figure 4 is about sigma: name runs with stochastic positions, tied, of at least two values of positions.sigma."
        )
    check_comparable(records, forms=["tied"])
    accuracy = common_accuracy(records, score)
    panels: list[tuple[str, Callable[[RunRecords], float]]] = [
        (r"$\|A\|$ (Frobenius norm)", lambda run: run.newest("health/A_norm")),
        (r"$\|\tilde{m}\|$ (mask token)", lambda run: run.newest("health/mask_token_norm")),
        (accuracy_label(accuracy), lambda run: run.accuracies()[accuracy]),
    ]
    figure = Figure(figsize=(WIDE, 2.6), layout="constrained")
    for axes, letter, (label, measure) in zip(figure.subplots(1, 3), "abc", panels, strict=True):
        draw_against_sigma(axes, spreads_by_sigma(records, measure))
        axes.set_ylabel(label)
        set_sigma_axis(axes, records)
        add_letter(axes, letter)
    add_legend_below(figure, figure.axes[0], 2, seeds_label(records))
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
            without_ticks(axes)
            mark_patch(axes, query, grid, grid, "white")
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
        draw_image(line[0], image)
        draw_image(line[1], darkened(image, seen_patches(own.context[0], chosen[0].grid), chosen[0].grid))
        mark_patch(line[1], patch, chosen[0].grid, size, "white")
        for axes, objective in zip(line[2:], objectives, strict=True):
            heat = prediction_map(objective, image, own, patch)
            relative = (heat - heat.min()) / (heat.max() - heat.min()).clamp(min=1e-12)
            picture = axes.imshow(relative.numpy(), cmap="magma", vmin=0, vmax=1)
            without_ticks(axes)
            mark_patch(axes, patch, chosen[0].grid, chosen[0].grid, "white")
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
        add_letter(axes, letter)
    add_legend_below(figure, spectra, 1)
    return figure


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


FIGURES: dict[str, Callable[..., Figure]] = {
    "1": idea_figure,
    "3": learned_covariance_figure,
    "4": sigma_figure,
    "5": similarity_figure,
    "6": predictions_figure,
    "covariance": covariance_figure,
    "theory": theory_figure,
}
