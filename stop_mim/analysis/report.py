"""The report: one self-contained HTML page about runs; tables are in the page, report.js draws charts and maps."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console

from stop_mim import __version__
from stop_mim.analysis.report_data import ModelData, Pictures, Plain, charts, choose_pictures, model_data, picture_url
from stop_mim.analysis.runs import (
    INCIDENTAL,
    ONLINE,
    RunGroup,
    RunRecords,
    check_same_grid,
    group_seeds,
    read_records,
    run_folders,
)
from stop_mim.errors import InputError
from stop_mim.files import require_writable, write_atomically
from stop_mim.records import from_plain
from stop_mim.results import UNTRAINED, Evaluation, Measurement, Score, details_table, headline_table
from stop_mim.sweeps.grid import changes
from stop_mim.sweeps.summary import spread
from stop_mim.tables import Table, say
from stop_mim.training.callbacks.health import SIGNS, HealthSigns, Symptoms, signs_in
from stop_mim.training.config import to_json
from stop_mim.training.run_folder import RunFolder

HERE = Path(__file__).parent
PAGES = Environment(
    loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
PAGES.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
NOTHING = "–"
# The name of a score, and how it was measured.
Column = tuple[str, Measurement]
# The state of a group is the first of these that one of its runs has.
STATES = ("failed", "running", "stopped", "unknown", "finished")
MODEL_SECTIONS = ("noise", "positions", "predictions", "features")
# Config fields that every report shows; of several runs it shows those that differ too.
MAIN_FIELDS = (
    *("data", "objective.kind", "encoder.size", "encoder.image_size", "encoder.patch_size"),
    *("positions.kind", "positions.sigma", "positions.covariance", "masks.kind"),
    *("optim.epochs", "optim.batch_size", "optim.lr"),
)
NEWEST_SIGNS = ("rankme", "rank_limit", "A_norm", "mask_token_norm", "noise_to_signal")
# Measurements, by key in metrics.jsonl, whose newest values the summary shows.
NEWEST = {
    "loss": "Loss",
    **{SIGNS[name].key: SIGNS[name].label for name in NEWEST_SIGNS},
    **{key: f"{title}, %" for key, title in ONLINE.items()},
    "not_finite": "Skipped steps",
}


def write_report(
    runs: Sequence[Path], out: Path, images: Sequence[Path] | None = None, console: Console | None = None
) -> Path:
    """Write the page about runs; return its path.

    Args:
        runs: run directories, whose grids of patches must be the same, or directories of sweeps. Runs that differ in their
            seed alone are averaged.
        images: at most 16 images for predictions and features; None: images of the first run's data.
        console: prints the path of the page.
    """
    out = Path(out)
    require_writable(f"The report {out}", out)
    if not runs:
        raise InputError("No run is given: give at least one run directory.")
    folders = run_folders(runs)
    for path, times in Counter(path.resolve() for path in folders).items():
        if times > 1:
            raise InputError(f"The run {path} is given {times} times: give it once.")
    records = [read_records(path) for path in folders]
    check_same_grid(records)
    page = render_page(group_seeds(records), choose_pictures(records, images)).encode("utf-8", "replace")
    write_atomically(out, lambda file: file.write_bytes(page))
    if console is not None:
        say(console, f"Report: {out} ({len(page) / 1e6:.1f} MB)")
    return out


def render_page(groups: Sequence[RunGroup], pictures: Pictures) -> str:
    """Return the page as HTML."""
    models = [_model_data(group.first, pictures, len(groups)) for group in groups]
    drawn = charts(groups, models)
    data = {
        "runs": [group.name for group in groups],
        "grid": list(groups[0].first.grid),
        "charts": drawn,
        "positions": [model.positions for model in models],
        "predictions": [model.predictions for model in models],
        "features": [model.features for model in models],
        "pictures": [picture_url(image) for image in pictures.pixels if any(model.features for model in models)],
    }
    single = len(groups) == len(groups[0].runs) == 1
    return PAGES.get_template("report.html").render(
        groups=[_described(group, model) for group, model in zip(groups, models, strict=True)],
        several_seeds=any(len(group.runs) > 1 for group in groups),
        scores=run_scores(groups[0]) if single else list(compared_scores(groups)),
        details=[details_table(run.results) for group in groups for run in group.runs if run.results] if single else [],
        summary=summary_table(groups, models),
        differences=differences_table(groups),
        settings=settings_table(groups),
        pictures=pictures,
        sections={chart["section"] for chart in drawn}
        | {section for section in MODEL_SECTIONS if any(getattr(model, section, None) for model in models)},
        objectives=len({group.first.config.objective.kind for group in groups}),
        written=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        version=__version__,
        style=(HERE / "report.css").read_text(),
        script=(HERE / "report.js").read_text(),
        data=data,
    )


def _described(group: RunGroup, model: ModelData) -> Plain:
    """Return what the page says about a group in words."""
    several = len(group.runs) > 1
    states = {status_text(run): run.status.state for run in group.runs}
    numbers = ", ".join(str(run.config.seed) for run in group.runs)
    seeds = f"{len(group.runs)} seeds ({numbers}): " if several else ""
    return {
        "name": group.name,
        "state": min(states.values(), key=STATES.index),
        "status": seeds + "; ".join(states),
        "warnings": [
            f"{f'Seed {run.config.seed}, s' if several else 'S'}{text[1:]}"
            for run in group.runs
            for text in health_warnings(run)
        ],
        "notes": model.notes,
        "records": [
            {
                "name": f"{group.name}, seed {run.config.seed}" if several else group.name,
                "config": to_json(run.config),
                "sessions": json.dumps(_sessions(run), indent=2, ensure_ascii=False),
            }
            for run in group.runs
        ],
    }


def _model_data(run: RunRecords, pictures: Pictures, n_runs: int) -> ModelData:
    try:
        # Read again, so that the models of many runs are not all kept in memory.
        return model_data(read_records(run.path), pictures, n_runs)
    except InputError as error:
        return ModelData(notes=dict.fromkeys(MODEL_SECTIONS, str(error)))


def _sessions(run: RunRecords) -> list[Plain]:
    """Return the versions and hardware of each session of a run."""
    try:
        return RunFolder(run.path).sessions()
    except InputError:
        return []


def status_text(run: RunRecords) -> str:
    """Return the state of a run in words."""
    status, total = run.status, run.total_steps
    step = max(status.step, run.last_step)
    steps = f"step {step:,}" + (f" of {total:,}" if total else "")
    updated = f"last update {status.updated}" if status.state == "running" else ""
    return ", ".join(filter(None, [status.state, steps, updated])) + (f": {status.message}" if status.message else "")


def health_warnings(run: RunRecords) -> Iterator[str]:
    """Yield the warnings that a run's health signs gave during training, each with its step."""
    symptoms = Symptoms()
    for line in run.metrics:
        try:
            signs = from_plain(HealthSigns, signs_in(line))
        except InputError:
            continue
        yield from (f"Step {line['step']:,}: {text}" for text in symptoms.new_in(signs))


def over_seeds(values: Sequence[float], digits: str = ".4g") -> str:
    """Return a value, or the mean of several with their standard deviation."""
    found = spread(values)
    return f"{found.mean:{digits}}" + (f" ± {found.std:{digits.replace('4', '2')}}" if found.std else "")


def summary_table(groups: Sequence[RunGroup], models: Sequence[ModelData]) -> Table:
    """Return the newest value of the main measurements, and the noise at the newest checkpoint."""
    columns = []
    for group, model in zip(groups, models, strict=True):
        steps = {f"{run.last_step:,}" if run.metrics else NOTHING for run in group.runs}
        column = {"Step": ", ".join(sorted(steps))}
        for key, title in NEWEST.items():
            if values := [run.last_values[key] for run in group.runs if key in run.last_values]:
                column[title] = over_seeds(values)
        if model.spectrum:
            column |= {"Effective rank of Σ": model.spectrum["effective_rank"], "Trace of Σ": model.spectrum["trace"]}
        columns.append(column)
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, NOTHING) for column in columns)] for name in names]
    return Table("Newest measurements", ["", *(group.name for group in groups)], rows)


def differences_table(groups: Sequence[RunGroup]) -> Table | None:
    """Return the config fields in which the groups differ, a row for each group; None for one group."""
    first = groups[0].first.config
    found = dict.fromkeys(name for group in groups[1:] for name in changes(first, group.first.config))
    names = [name for name in found if name not in INCIDENTAL]
    rows = [[group.name, *(str(attrgetter(name)(group.first.config)) for name in names)] for group in groups]
    return Table("What differs", ["", *names], rows) if names else None


def settings_table(groups: Sequence[RunGroup]) -> Table:
    """Return the main config fields that all runs share, what was left out of their data, and where they were trained."""
    runs = [run for group in groups for run in group.runs]
    columns = [
        {name: str(attrgetter(name)(run.config)) for name in MAIN_FIELDS}
        | {"seed": str(run.config.seed)}
        | ({"left out of the data": left_out} if (left_out := RunFolder(run.path).skipped()) else {})
        | _where(_sessions(run))
        for run in runs
    ]
    rows = []
    for name in dict.fromkeys(name for column in columns for name in column):
        first, *others = dict.fromkeys(column.get(name, NOTHING) for column in columns)
        if name == "seed":
            rows.append([name, ", ".join(sorted([first, *others], key=int))])
        elif not others or name not in MAIN_FIELDS:
            rows.append([name, f"{first} ({len(others)} more)" if others else first])
    return Table("Settings" if len(runs) == 1 else "Settings of all runs", ["", ""], rows)


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


def run_scores(group: RunGroup) -> list[Table]:
    """Return the main scores of a run, of its checkpoints and of its initial weights, a table for each dataset."""
    run, by_data = group.first, dict[str, list[Evaluation]]()
    for one in run.results:
        # The same encoder may have been named in several ways; scores of a checkpoint are not the run's scores.
        name = group.name if one in run.evaluations else f"{group.name}, {Path(one.encoder).stem}"
        name = f"{UNTRAINED}{group.name}" if one.is_baseline else name
        by_data.setdefault(one.data, []).append(replace(one, encoder=name))
    return [headline_table(found) for found in by_data.values() if any(s.headline for one in found for s in one.scores)]


def compared_scores(groups: Sequence[RunGroup]) -> Iterator[Table]:
    """Yield a table for each dataset, a row for each group: the main scores, as mean and deviation over seeds.

    Scores that were measured differently, such as with other test images, are in different columns.
    """
    for data in dict.fromkeys(one.data for group in groups for run in group.runs for one in run.evaluations):
        cells = [_group_scores([run.evaluations for run in group.runs], data) for group in groups]
        columns = list(dict.fromkeys(column for row in cells for column in row))
        rows = [
            [group.name, *(row.get(column, NOTHING) for column in columns)]
            for group, row in zip(groups, cells, strict=True)
        ]
        baselines = [[one for one in run.results if one.is_baseline] for group in groups for run in group.runs]
        before = _group_scores(baselines, data)
        chances = {
            (one.name_of(score), one.measurement()): f"{chance:.1f}"
            for group in groups
            for one in group.first.evaluations
            for score in one.scores
            if one.data == data and (chance := one.chance(score)) is not None
        }
        known = {"untrained": before, "chance": chances}
        extra = [[what, *(found.get(column, NOTHING) for column in columns)] for what, found in known.items() if found]
        if columns:
            yield Table(f"Test scores in % on {data}", ["", *_headings(columns)], [*rows, *extra])


def _headings(columns: Sequence[Column]) -> Iterator[str]:
    """Yield the names of columns; those of the same name have the settings in which they differ."""
    for name, measurement in columns:
        alike = [dict(other) for title, other in columns if title == name]
        differing = {key: value for key, value in measurement if len({other.get(key) for other in alike}) > 1}
        # Fingerprints say little to a reader.
        readable = {key: value for key, value in differing.items() if not key.endswith("_fingerprint")} or differing
        yield f"{name} ({', '.join(f'{key} {value}' for key, value in readable.items())})" if readable else name


def _group_scores(runs: Sequence[Sequence[Evaluation]], data: str) -> dict[Column, str]:
    """Return the main scores by column: of several runs, mean and standard deviation; of one, its interval."""
    found: dict[Column, list[Score]] = {}
    for evaluations in runs:
        scored = [(one, score) for one in evaluations if one.data == data for score in one.scores if score.headline]
        own = {(one.name_of(score), one.measurement()): score for one, score in scored}
        for column, score in own.items():
            found.setdefault(column, []).append(score)
    return {
        column: scores[0].text if len(scores) == 1 else over_seeds([score.value for score in scores], ".1f")
        for column, scores in found.items()
    }
