"""The report: one self-contained HTML page about runs, with tables in the page and charts and maps drawn by report.js."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console
from rich.markup import escape

import stop_mim
from stop_mim.analysis.report_data import Looks, Pictures, Plain, charts, choose_pictures, look_at, picture_url
from stop_mim.analysis.runs import RunRecords, check_same_grid, open_run, read_records
from stop_mim.errors import InputError
from stop_mim.files import require_writable, write_atomically
from stop_mim.sweeps.grid import changes
from stop_mim.training.callbacks.health import HealthSigns, find_symptoms
from stop_mim.training.config import to_json
from stop_mim.training.run_folder import RunFolder

HERE = Path(__file__).parent
# Where `stop-mim demo` writes its scores.
DEMO_SCORES = "demo.json"
NOTHING = "–"
MODEL_SECTIONS = ("noise", "positions", "predictions", "features")
# Config fields that every report shows; of several runs it shows those that differ too.
MAIN_FIELDS = (
    *("data", "objective.kind", "encoder.size", "encoder.image_size", "encoder.patch_size"),
    *("positions.kind", "positions.sigma", "positions.covariance", "masks.kind"),
    *("optim.epochs", "optim.batch_size", "optim.lr", "seed"),
)
NEWEST = {
    "loss": "Loss",
    "health/rankme": "RankMe",
    "health/rank_limit": "RankMe, upper limit",
    "health/A_norm": "|A|",
    "health/mask_token_norm": "|m̃|",
    "health/noise_to_signal": "Noise to signal",
    "probe/linear_top1": "Online linear probe, %",
    "probe/knn_top1": "Online kNN probe, %",
    "not_finite": "Skipped steps",
}


@dataclass(frozen=True)
class Table:
    """A table of texts whose first column names the rows."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def write_report(
    runs: Sequence[Path], out: Path, images: Sequence[Path] | None = None, console: Console | None = None
) -> Path:
    """Write the page about runs; return its path.

    Args:
        runs: run directories, whose grids of patches must be the same.
        images: at most 16 images for predictions and features; None: images of the first run's data.
        console: told where the page is.
    """
    out = Path(out)
    require_writable(f"The report {out}", out)
    if not runs:
        raise InputError("No run is given: name at least one run directory.")
    if len({Path(path).resolve() for path in runs}) < len(runs):
        raise InputError(f"A run is given twice: {', '.join(map(str, runs))}.")
    records = [read_records(path) for path in runs]
    check_same_grid(records)
    page = render_page(records, choose_pictures(records, images)).encode("utf-8", "replace")
    write_atomically(out, lambda file: file.write_bytes(page))
    if console is not None:
        console.print(f"Report: {escape(str(out))} ({len(page) / 1e6:.1f} MB)", highlight=False, soft_wrap=True)
    return out


def render_page(runs: Sequence[RunRecords], pictures: Pictures) -> str:
    """Return the page as HTML."""
    looks = [_look(run, pictures, len(runs)) for run in runs]
    names = [run.name for run in runs]
    names = names if len(set(names)) == len(names) else [str(run.path) for run in runs]
    sessions = [_sessions(run) for run in runs]
    drawn = charts(runs, looks)
    data = {
        "runs": names,
        "grid": list(runs[0].grid),
        "charts": drawn,
        "positions": [look.positions for look in looks],
        "predictions": [look.predictions for look in looks],
        "features": [look.features for look in looks],
        "pictures": [picture_url(image) for image in pictures.pixels if any(look.features for look in looks)],
    }
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html").render(
        runs=[
            {
                "name": name,
                "state": run.status.state,
                "status": status_text(run),
                "warnings": list(health_warnings(run)),
                "notes": look.notes,
                "config": to_json(run.config),
                "sessions": json.dumps(session, indent=2, ensure_ascii=False),
            }
            for name, run, look, session in zip(names, runs, looks, sessions, strict=True)
        ],
        summary=summary_table(runs, names, looks),
        settings=settings_table(runs, names, sessions),
        scores=[*score_tables(runs, names), *demo_tables(runs, names)],
        pictures=pictures,
        sections={chart["section"] for chart in drawn}
        | {section for section in MODEL_SECTIONS if any(getattr(look, section, None) for look in looks)},
        objectives=len({run.config.objective.kind for run in runs}),
        written=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        version=stop_mim.__version__,
        style=(HERE / "report.css").read_text(),
        script=(HERE / "report.js").read_text(),
        data=embedded_json(data),
    )


def _look(run: RunRecords, pictures: Pictures, n_runs: int) -> Looks:
    try:
        return look_at(open_run(run.path), pictures, n_runs)
    except InputError as error:
        return Looks(notes=dict.fromkeys(MODEL_SECTIONS, str(error)))


def _sessions(run: RunRecords) -> list[Plain]:
    """Return the versions and hardware of each session of a run."""
    try:
        return json.loads(RunFolder(run.path).environment_file.read_text())
    except (FileNotFoundError, ValueError):
        return []


def embedded_json(value: Any) -> str:
    """Return JSON that is safe inside a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def status_text(run: RunRecords) -> str:
    """Return the state of a run in words."""
    status, total = run.status, run.total_steps
    step = max(status.step, run.last_step)
    steps = f"step {step:,}" + (f" of {total:,}" if total else "")
    updated = f"last update {status.updated}" if status.state == "running" else ""
    return ", ".join(filter(None, [status.state, steps, updated])) + (f": {status.message}" if status.message else "")


def health_warnings(run: RunRecords) -> Iterator[str]:
    """Yield the warnings of the health signs in a run's metrics, as they were given while it trained."""
    first, known = None, set[str]()
    names = [field.name for field in fields(HealthSigns)]
    for line in run.metrics:
        if all(isinstance(line.get(f"health/{name}"), int | float) for name in names):
            values: Mapping[str, Any] = {name: line[f"health/{name}"] for name in names}
            signs = HealthSigns(**values)
            first = first or signs
            symptoms = find_symptoms(signs, first)
            yield from (f"Step {line['step']:,}: {text}" for name, text in symptoms.items() if name not in known)
            known = set(symptoms)


def summary_table(runs: Sequence[RunRecords], names: Sequence[str], looks: Sequence[Looks]) -> Table:
    """Return the newest value of the main measurements, and the noise at the newest checkpoint."""
    newest: list[dict[str, float]] = [{} for _ in runs]
    for found, run in zip(newest, runs, strict=True):
        for line in run.metrics:
            found |= {name: value for name, value in line.items() if isinstance(value, int | float)}
    columns = [
        {"Step": f"{run.last_step:,}" if run.metrics else NOTHING}
        | {title: f"{found[key]:.4g}" for key, title in NEWEST.items() if key in found}
        | (
            {"Effective rank of Σ": look.spectrum["effective_rank"], "Trace of Σ": look.spectrum["trace"]}
            if look.spectrum
            else {}
        )
        for run, found, look in zip(runs, newest, looks, strict=True)
    ]
    return _by_run("Newest measurements", names, columns)


def settings_table(runs: Sequence[RunRecords], names: Sequence[str], sessions: Sequence[list[Plain]]) -> Table:
    """Return the main config fields, all fields in which the runs differ, and where they were trained."""
    differing = [name for run in runs[1:] for name in changes(runs[0].config, run.config) if name != "out"]
    columns = [
        {name: str(attrgetter(name)(run.config)) for name in (*MAIN_FIELDS, *differing)}
        | ({"left out of the data": left_out} if (left_out := RunFolder(run.path).skipped()) else {})
        | _where(session)
        for run, session in zip(runs, sessions, strict=True)
    ]
    return _by_run("Settings", names, columns)


def _where(sessions: Sequence[Plain]) -> dict[str, str]:
    if not sessions:
        return {}
    first, last = sessions[0], sessions[-1]
    return {
        "recipe": str(first.get("recipe", "custom")),
        "started": f"{first.get('started', NOTHING)}, {len(sessions)} session{'s' * (len(sessions) > 1)}",
        "hardware": str(last.get("gpu") or last.get("platform", NOTHING)),
        "versions": ", ".join(f"{name} {version}" for name, version in last.get("packages", {}).items() if version),
    }


def score_tables(runs: Sequence[RunRecords], names: Sequence[str]) -> list[Table]:
    """Return a table of headline test scores for each dataset."""
    columns: dict[str, list[dict[str, str]]] = {}
    for number, run in enumerate(runs):
        for one in run.results:
            # Scores of a single checkpoint are not those of the run.
            of_checkpoint = f" · {Path(one.encoder).stem}" if one not in run.evaluations else ""
            found = {f"{one.name_of(score)}{of_checkpoint}": score.text for score in one.scores if score.headline}
            columns.setdefault(one.data, [{} for _ in runs])[number] |= found
    return [_by_run(f"Test scores in % on {data}", names, found) for data, found in columns.items() if any(found)]


def demo_tables(runs: Sequence[RunRecords], names: Sequence[str]) -> Iterator[Table]:
    """Yield the scores that `stop-mim demo` wrote: trained, untrained and pixels."""
    for run, name in zip(runs, names, strict=True):
        if (file := run.path / DEMO_SCORES).exists():
            scores: dict[str, dict[str, float]] = json.loads(file.read_text())
            columns = [{score: f"{value:.1f}" for score, value in found.items()} for found in scores.values()]
            yield _by_run(f"{name}: test accuracy in % of frozen features", list(scores), columns)


def _by_run(caption: str, names: Sequence[str], columns: Sequence[Mapping[str, str]]) -> Table:
    rows = dict.fromkeys(row for column in columns for row in column)
    return Table(caption, ["", *names], [[row, *(column.get(row, NOTHING) for column in columns)] for row in rows])
