"""Runs to one self-contained page: what was run, what was measured, and what the models learned, to be clicked through.

Tables and texts are in the page itself, escaped by the template; report.js draws charts and maps from the embedded data.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console
from rich.markup import escape

import stop_mim
from stop_mim.analysis.report_data import (
    Looks,
    Pictures,
    Plain,
    ReportedRun,
    choose_pictures,
    curve,
    look_at,
    picture_url,
    points_a_curve,
    read_runs,
)
from stop_mim.errors import InputError
from stop_mim.evaluation.results import is_accuracy
from stop_mim.files import require_writable, write_atomically
from stop_mim.models.encoder import SIZES
from stop_mim.training.config import TrainConfig, to_json

HERE = Path(__file__).parent
# The file in which `stop-mim demo` leaves the scores of its model, of an untrained one and of pixels.
DEMO_SCORES = "demo.json"
NOTHING = "–"


@dataclass(frozen=True)
class Chart:
    """A measurement over steps: where it stands in the page, and what it means."""

    section: str
    measurement: str
    title: str
    meaning: str


CHARTS = (
    Chart("loss", "loss", "Loss", "mean since the line before"),
    Chart("loss", "lr", "Learning rate", ""),
    Chart("loss", "weight_decay", "Weight decay", ""),
    Chart("loss", "ema_momentum", "Momentum of the target encoder", ""),
    Chart("loss", "sigma", "Sigma, the strength of the noise", ""),
    Chart("loss", "gradient_norm", "Norm of the gradient", ""),
    Chart("loss", "images_per_second", "Speed", "images per second"),
    Chart("health", "health/rankme", "RankMe", "effective rank of the features; low is a collapse"),
    Chart("health", "health/feature_std", "Spread of the features", "standard deviation over patches; 0 is a collapse"),
    Chart("health", "health/A_norm", "|A|", "Frobenius norm of the projection from encoder to predictor"),
    Chart("health", "health/mask_token_norm", "|m̃|", "norm of the learned mask token"),
    Chart("health", "health/noise_to_signal", "Noise to signal", "‖A n‖ over ‖ψ‖"),
    Chart("health", "health/ema_distance", "Distance to the target encoder", "relative to the encoder's weights"),
    Chart("probes", "probe/linear_top1", "Linear probe while training", "top-1 accuracy in %"),
    Chart("probes", "probe/knn_top1", "Nearest neighbours while training", "top-1 accuracy in %"),
)


@dataclass(frozen=True)
class Table:
    """A table of texts, whose first column names its rows."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    differing: frozenset[int] = frozenset()
    """Numbers of the rows in which the runs are not alike."""
    folded: bool = False
    """Whether it is shown only to who asks for it."""
    by_run: bool = True
    """Whether every column but the first is a run's."""


def write_report(
    runs: Sequence[Path], out: Path, images: Sequence[Path] | None = None, console: Console | None = None
) -> Path:
    """Write the page on these runs and return its path; `images` are shown instead of some of the first run's data."""
    out = Path(out)
    require_writable(f"The report {out}", out)
    reported = read_runs([Path(path) for path in runs])
    pictures = choose_pictures(reported, images)
    page = render_page(reported, pictures).encode("utf-8", "replace")
    try:
        write_atomically(out, lambda file: file.write_bytes(page))
    except OSError as error:
        raise InputError(
            f"The report {out} cannot be written ({error.strerror}): name a file in a folder that can."
        ) from error
    if console is not None:
        console.print(f"Report: {escape(str(out))} ({len(page) / 1e6:.1f} MB)", highlight=False, soft_wrap=True)
    return out


def render_page(runs: Sequence[ReportedRun], pictures: Pictures) -> str:
    """The page as HTML."""
    looks = [look_at(run, pictures, len(runs)) for run in runs]
    data, numbers = page_data(runs, looks, pictures), [key_numbers(run) for run in runs]
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html").render(
        title=" · ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs",
        runs=runs,
        looks=looks,
        pictures=pictures,
        several=len(runs) > 1,
        numbers=numbers,
        comparison=numbers_table(numbers, runs),
        settings=settings_table(runs),
        differences=differences_table(runs),
        spectra=spectrum_table(runs, looks),
        scores=score_tables(runs),
        configurations=[to_json(run.records.config) for run in runs],
        sessions=[json.dumps(run.sessions, indent=2, ensure_ascii=False) for run in runs],
        warnings=sum(len(run.warnings) for run in runs),
        written=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        version=stop_mim.__version__,
        style=(HERE / "report.css").read_text(),
        script=(HERE / "report.js").read_text(),
        data=embedded_json(data),
        charted={chart["section"] for chart in data["charts"]},
        objectives=len({run.records.config.objective.kind for run in runs}),
        positioned=any(data["positions"]),
        predicted=any(data["predictions"]),
        featured=any(data["features"]),
    )


def embedded_json(value: Any) -> str:
    """JSON that is safe between script tags: nothing in it can end them, and every browser reads it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    # All else beyond ASCII, the line separators U+2028 and U+2029 among it, is escaped by json already.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page_data(runs: Sequence[ReportedRun], looks: Sequence[Looks], pictures: Pictures) -> Plain:
    """What report.js draws."""
    return {
        "runs": [run.name for run in runs],
        "grid": list(runs[0].records.grid),
        "charts": [*_charts(runs), *_spectrum_charts(looks)],
        "positions": [look.positions for look in looks],
        "predictions": [look.predictions for look in looks],
        "features": [look.features for look in looks],
        "pictures": [picture_url(image) for image in pictures.pixels],
    }


def _charts(runs: Sequence[ReportedRun]) -> list[Plain]:
    most, charts = points_a_curve(len(runs)), []
    for chart in CHARTS:
        series = [
            {"run": number, **points}
            for number, run in enumerate(runs)
            if (points := curve(run.records.metrics, chart.measurement, most)) is not None
        ]
        if series and not (chart.measurement == "sigma" and all(not any(one["y"]) for one in series)):
            charts.append(
                {
                    "section": chart.section,
                    "title": chart.title,
                    "meaning": chart.meaning,
                    "x": "step",
                    "series": series,
                }
            )
    return charts


def _spectrum_charts(looks: Sequence[Looks]) -> list[Plain]:
    found = [(number, look.spectrum) for number, look in enumerate(looks) if look.spectrum is not None]
    eigenvalues = [{"run": number, "x": one["x"], "y": one["y"]} for number, one in found]
    frequencies = [
        {"run": number, "x": one["frequencies"][::-1], "y": one["variances"][::-1]}
        for number, one in found
        if "frequencies" in one
    ]
    kinds = [
        ("Spectrum of Σ", "variance along each of its directions", "direction", eigenvalues, ["y"]),
        ("Noise by frequency of ψ", "mean variance of sine and cosine", "radians a patch", frequencies, ["x", "y"]),
    ]
    return [
        {"section": "noise", "title": title, "meaning": meaning, "x": x, "series": series, "log": log}
        for title, meaning, x, series, log in kinds
        if series
    ]


def key_numbers(run: ReportedRun) -> dict[str, str]:
    """What one wants to know of a run first."""
    metrics, newest = run.records.metrics, _newest(run.records.metrics)
    found = {"Steps": f"{run.records.last_step:,}" if metrics else NOTHING}
    if skipped := newest.get("not_finite"):
        found["Skipped steps"] = f"{skipped:,.0f}"
    found["Loss"] = _number(newest.get("loss"))
    limit = newest.get("health/rank_limit")
    found["RankMe"] = _number(newest.get("health/rankme")) + (f" of {limit:.0f}" if limit else "")
    for title, name in (("|A|", "A_norm"), ("|m̃|", "mask_token_norm"), ("Noise to signal", "noise_to_signal")):
        found[title] = _number(newest.get(f"health/{name}"))
    for title, name in (("Linear probe", "linear"), ("kNN probe", "knn")):
        if (score := newest.get(f"probe/{name}_top1")) is not None:
            found[title] = f"{score:.1f}%"
    return found


def _newest(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in metrics:
        found |= {name: value for name, value in line.items() if isinstance(value, int | float)}
    return found


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3g}"


def numbers_table(numbers: Sequence[Mapping[str, str]], runs: Sequence[ReportedRun]) -> Table:
    """The key numbers of several runs, a row each."""
    names = list(dict.fromkeys(name for one in numbers for name in one))
    rows = [
        [run.name, run.state.kind, *(one.get(name, NOTHING) for name in names)]
        for run, one in zip(runs, numbers, strict=True)
    ]
    return Table("The runs at their last recorded step", ["run", "state", *names], rows)


def settings_table(runs: Sequence[ReportedRun]) -> Table:
    """The main settings of each run, in words."""
    columns = [
        {
            **settings(run.records.config, run.recipe),
            "Checkpoint": f"step {run.model.step:,}" if run.model else NOTHING,
            **surroundings(run.sessions),
        }
        for run in runs
    ]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    differing = frozenset(n for n, row in enumerate(rows) if len(set(row[1:])) > 1 and row[0] != "Started")
    return Table("Main settings, versions and hardware", ["setting", *(run.name for run in runs)], rows, differing)


def settings(config: TrainConfig, recipe: str) -> dict[str, str]:
    """A configuration in words."""
    encoder, optim, size = config.encoder, config.optim, SIZES[config.encoder.size]
    height, width = encoder.image_size
    rows, columns = height // encoder.patch_size, width // encoder.patch_size
    shape = (
        f"width {encoder.width or size.width}, depth {encoder.depth or size.depth}, {encoder.heads or size.heads} heads"
    )
    predictor = f"width {config.predictor.width}, depth {config.predictor.depth}"
    momentum = "none" if config.objective.kind == "mae" else f"{optim.ema_start:g} → {optim.ema_final:g}"
    return {
        "Recipe": recipe,
        "Data": config.data,
        "Objective": {"ijepa": "I-JEPA", "mae": "MAE", "data2vec": "data2vec"}[config.objective.kind],
        "Encoder": f"{encoder.size}: {shape}",
        "Images": f"{height}×{width} pixels in patches of {encoder.patch_size}: {rows}×{columns}",
        "Predictor": "none" if config.objective.kind == "data2vec" else predictor,
        "Positions": positions_in_words(config),
        "Masks": masks_in_words(config),
        "Length": f"{optim.epochs:,} epochs, {optim.batch_size:,} images a step",
        "Learning rate": f"{optim.start_lr:g} → {optim.lr:g} in {optim.warmup_epochs:g} epochs → {optim.final_lr:g}",
        "Weight decay": f"{optim.weight_decay:g} → {optim.final_weight_decay:g}",
        "Target's momentum": momentum,
        "Seed": str(config.seed),
    }


def positions_in_words(config: TrainConfig) -> str:
    """What the predictor's positions are."""
    positions = config.positions
    if positions.kind == "jittered":
        learned = "learned, from " if positions.jitter_learned else ""
        return f"jittered: coordinates ± {learned}{positions.jitter_scale:g} patches, on {positions.apply_to} tokens"
    if positions.kind != "stochastic":
        return {"sincos": "fixed sine-cosine", "learned": "learned"}[positions.kind]
    start = "" if positions.sigma_start is None else f"{positions.sigma_start:g} → "
    words = [
        f"stochastic: σ = {start}{positions.sigma:g}",
        f"{positions.covariance} Σ",
        f"on {positions.apply_to} tokens",
    ]
    words += [f"{positions.convention}'s convention"] if positions.convention != "paper" else []
    return ", ".join(words + (["dealt out by the context"] if positions.conditioned else []))


def masks_in_words(config: TrainConfig) -> str:
    """Which patches are masked."""
    masks = config.masks
    low, high = masks.target_scale
    released = ", as released" if masks.compat else ""
    if masks.kind == "multiblock":
        return f"{masks.n_blocks} target blocks of {low:.0%} to {high:.0%} of the image{released}"
    return f"{masks.mask_ratio:.0%} of the patches, {masks.kind}{released}"


def surroundings(sessions: Sequence[Plain]) -> dict[str, str]:
    """Versions and hardware of the newest session."""
    newest = sessions[-1] if sessions else {}
    packages = newest.get("packages")
    versions = (
        [f"{name} {version}" for name, version in packages.items() if version] if isinstance(packages, dict) else []
    )
    threads = newest.get("threads")
    hardware = newest.get("gpu") or (f"CPU, {threads} thread{'s' * (threads != 1)}" if threads else NOTHING)
    resumed = f", resumed {len(sessions) - 1} times" if len(sessions) > 1 else ""
    started = str(sessions[0].get("started", NOTHING)) if sessions else NOTHING
    return {
        "Hardware": f"{hardware}; {newest.get('platform', NOTHING)}",
        "Versions": ", ".join([f"Python {newest.get('python', NOTHING)}", *versions]),
        "Started": started.replace("T", " ").replace("+00:00", " UTC") + resumed,
    }


def differences_table(runs: Sequence[ReportedRun]) -> Table | None:
    """Every field of the configurations in which several runs differ, by its name on the command line."""
    columns = [_fields(run.records.config) for run in runs]
    names = [name for name in columns[0] if len({repr(column[name]) for column in columns}) > 1 and name != "out"]
    rows = [[name, *(str(column[name]) for column in columns)] for name in names]
    head = ["field", *(run.name for run in runs)]
    return Table("Every field in which the runs differ", head, rows) if rows else None


def _fields(config: TrainConfig) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in dataclasses.asdict(config).items():
        found |= (
            {f"{name}.{inner}": part for inner, part in value.items()} if isinstance(value, dict) else {name: value}
        )
    return found


def spectrum_table(runs: Sequence[ReportedRun], looks: Sequence[Looks]) -> Table | None:
    """Σ in a few numbers."""
    rows = [
        [run.name, f"{look.spectrum['effective_rank']:.1f} of {look.spectrum['dim']}", f"{look.spectrum['trace']:.3g}"]
        for run, look in zip(runs, looks, strict=True)
        if look.spectrum is not None
    ]
    return Table("The noise at the last checkpoint", ["run", "effective rank", "trace of Σ"], rows) if rows else None


def score_tables(runs: Sequence[ReportedRun]) -> list[Table]:
    """What evaluations found: the main scores, then all others; and the scores of a demo."""
    data = list(dict.fromkeys(str(one.get("data")) for run in runs for one in run.records.results))
    columns = [scores_of(run.records.results, with_data=len(data) > 1) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    main = [name for name in names if "top5" not in name and "/last" not in name]
    others = [name for name in names if name not in main]
    head, tables, where = ["score", *(run.name for run in runs)], [], f" on {data[0]}" if len(data) == 1 else ""
    for caption, part in ((f"Test scores in %{where}", main), (f"All other test scores in %{where}", others)):
        rows = [[name, *(column.get(name, NOTHING) for column in columns)] for name in part]
        tables += [Table(caption, head, rows, folded=part is others)] if rows else []
    return tables + [table for run in runs if (table := _demo_table(run)) is not None]


def scores_of(results: Sequence[Plain], with_data: bool = False) -> dict[str, str]:
    """The scores of a run's evaluations by what they are, with their 95% interval or their spread over draws."""
    found = {}
    for one in results:
        metrics, intervals = one.get("metrics", {}), one.get("intervals", {})
        keys = ("label", "data") if with_data else ("label",)
        about = [str(one[key]) for key in keys if one.get(key) not in (None, "", "class")]
        if (file := Path(str(one.get("encoder"))).name).startswith("step-"):
            about.append(file.removesuffix(".safetensors"))
        for name, value in metrics.items():
            of_one_draw = one.get("task") == "low-shot" and "@" in name
            if of_one_draw or not (is_accuracy(name) or name.startswith("video/")) or name.endswith("_std"):
                continue
            spread, (low, high) = metrics.get(f"{name}_std"), intervals.get(name, (None, None))
            extent = f" ± {spread:.1f}" if spread is not None else "" if low is None else f" [{low:.1f}, {high:.1f}]"
            found[" · ".join([name, *about])] = f"{value:.1f}{extent}"
    return found


def _demo_table(run: ReportedRun) -> Table | None:
    try:
        scores = json.loads((run.records.path / DEMO_SCORES).read_text())
        head = list(dict.fromkeys(name for values in scores.values() for name in values))
        rows = [[kind, *(f"{values[name]:.1f}" for name in head)] for kind, values in scores.items()]
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return None
    caption = f"{run.name}: frozen features of the demo, test accuracy in %"
    return Table(caption, ["features", *head], rows, by_run=False)
