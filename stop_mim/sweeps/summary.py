"""The summary of a sweep: mean and standard deviation over seeds, and differences to the baseline paired by seed."""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from scipy import stats

from stop_mim.files import write_atomically
from stop_mim.records import write_json
from stop_mim.results import read_results
from stop_mim.sweeps.plan import SCORES_FILE, Plan, Probe, runs_by_seed
from stop_mim.tables import Table, say, write_tables
from stop_mim.training.callbacks.health import SIGNS, signs_in
from stop_mim.training.run_folder import read_metrics

SUMMARY_JSON, SUMMARY_CSV = "summary.json", "summary.csv"
SUMMARY_TABLES = ("summary.md", "summary.tex")
FORMAT = "stop-mim sweep summary 4"
CSV_HEAD = ("sweep", "scale", "variant", "score", "n", "mean", "std", "pairs", "difference", "low", "high")
CONFIDENCE = 0.95
LEAST_SEEDS = 3
# Health signs that the tables show.
SHOWN_SIGNS = ("A_norm", "mask_token_norm")


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (n - 1 in the denominator) over seeds; one seed has no standard deviation."""

    n: int
    mean: float
    std: float | None


@dataclass(frozen=True)
class Difference:
    """Mean over common seeds of variant minus baseline, with its 95% interval by Student's t; one seed has none."""

    pairs: int
    difference: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Number(Spread):
    """A score or a health sign of one variant."""

    by_seed: dict[int, float]
    difference: Difference | None
    """To the baseline; the baseline has none."""


def spread(values: Sequence[float]) -> Spread:
    """Return mean and standard deviation."""
    std = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Spread(len(values), float(np.mean(values)), std)


def paired_difference(values: Mapping[int, float], baseline: Mapping[int, float]) -> Difference | None:
    """Return the difference of values to the baseline's, both by seed; None without a common seed."""
    differences = [values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())]
    if not differences:
        return None
    found = spread(differences)
    if found.std is None:
        return Difference(1, found.mean)
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, found.n - 1)) * found.std / math.sqrt(found.n)
    return Difference(found.n, found.mean, found.mean - reach, found.mean + reach)


def seeds_note(n: int) -> str:
    """Return a warning where seeds are too few for a comparison."""
    if n == 1:
        return "one seed: no interval"
    return f"{n} seeds: no comparison" if n < LEAST_SEEDS else ""


Values = dict[str, dict[int, dict[str, float]]]
"""Values by variant, seed and name."""
Numbers = dict[str, dict[str, Number]]
"""By variant and name; a variant without a finished run has none."""


def compare(values: Values, baseline: str) -> Numbers:
    """Return the values of each variant over seeds; those that are not finite are left out."""
    by_seed: dict[str, dict[str, dict[int, float]]] = {variant: {} for variant in values}
    for variant, runs in values.items():
        for seed, found in runs.items():
            for name, value in found.items():
                if math.isfinite(value):
                    by_seed[variant].setdefault(name, {})[seed] = value
    numbers: Numbers = {variant: {} for variant in values}
    for variant, row in by_seed.items():
        for name, own in row.items():
            others = by_seed.get(baseline, {}).get(name, {})
            apart = None if variant == baseline else paired_difference(own, others)
            numbers[variant][name] = Number(**vars(spread(list(own.values()))), by_seed=own, difference=apart)
    return numbers


@dataclass(frozen=True)
class Summary:
    """The results of a sweep so far: the chosen variants, and others with finished runs."""

    plan: Plan
    scores: Numbers
    health: Numbers
    """By field of HealthSigns."""
    failed: dict[str, str]
    """Reasons by run."""
    unfinished: list[str]
    interrupted_by: str | None = None
    """The signal that stopped the sweep."""

    @property
    def has_baseline(self) -> bool:
        """Whether a run of the baseline is finished."""
        return bool(self.scores.get(self.plan.baseline))

    def shown(self) -> list[str]:
        """Return the names of the scores that tables show: the scale's, then all on the data of --transfer."""
        found = dict.fromkeys(name for row in self.scores.values() for name in row)
        prefixes = tuple(f"{name}/" for name in self.plan.options.transfers)
        transferred = [name for name in found if name.startswith(prefixes)]
        own = [name for name in found if name not in transferred]
        return [*([name for name in self.plan.shown if name in own] or own), *transferred]

    def columns(self) -> dict[str, dict[str, Number]]:
        """Return what tables show: the heading of each column, and its numbers by variant."""
        columns = {name: _column(self.scores, name) for name in self.shown()}
        signs = {SIGNS[name].label: _column(self.health, name) for name in SHOWN_SIGNS}
        return columns | {label: column for label, column in signs.items() if column}

    def fewest_seeds(self) -> int:
        """Return the smallest number of seeds of any number."""
        rows = [*self.scores.values(), *self.health.values()]
        return min((number.n for row in rows for number in row.values()), default=0)


def _column(rows: Numbers, name: str) -> dict[str, Number]:
    return {variant: row[name] for variant, row in rows.items() if name in row}


def read_scores(run: Path, probe: Probe) -> dict[str, float]:
    """Return the headline scores of a run by name; none if it has not been evaluated by this probe."""
    return {
        probe.prefix + evaluation.name_of(score): score.value
        for evaluation in read_results(run / probe.file)
        for score in evaluation.scores
        if score.headline
    }


def read_health(run: Path) -> dict[str, float]:
    """Return the health signs of a run after its last step, by field of HealthSigns."""
    return signs_in((read_metrics(run) or [{}])[-1])


def summarise(plan: Plan, failed: Mapping[str, str], interrupted_by: str | None = None) -> Summary:
    """Summarise all finished runs of a sweep's directory; name those that were asked for and are not finished."""
    scores, health = Values(), Values()
    for variant in plan.variants:
        runs = runs_by_seed(plan.out / variant)
        seeds = {seed: run for seed, run in runs.items() if (run / SCORES_FILE).exists()}
        if seeds or variant in plan.chosen:
            scores[variant] = {
                seed: {name: value for probe in plan.probes for name, value in read_scores(run, probe).items()}
                for seed, run in seeds.items()
            }
            health[variant] = {seed: read_health(run) for seed, run in seeds.items()}
    unfinished = [job.name for job in plan.jobs if not job.finished and job.name not in failed]
    numbers = compare(scores, plan.baseline), compare(health, plan.baseline)
    return Summary(plan, *numbers, dict(failed), unfinished, interrupted_by)


def as_json(summary: Summary) -> dict[str, Any]:
    """Return the summary as JSON values; nothing in it depends on when or how fast it was measured."""
    plan = summary.plan
    return {
        "format": FORMAT,
        "sweep": plan.sweep,
        "scale": plan.options.scale,
        "recipe": plan.recipe,
        "epochs": plan.base.optim.epochs,
        "baseline": plan.baseline,
        "confidence": CONFIDENCE,
        "note": seeds_note(summary.fewest_seeds()),
        "shown": summary.shown(),
        "variants": {
            variant: {
                "overrides": dict(overrides),
                "scores": {name: asdict(number) for name, number in summary.scores.get(variant, {}).items()},
                "health": {name: asdict(number) for name, number in summary.health.get(variant, {}).items()},
            }
            for variant, overrides in plan.variants.items()
        },
        "failed": summary.failed,
        "unfinished": summary.unfinished,
    }


def write_summary(out: Path, summary: Summary) -> None:
    """Write summary.json, summary.csv with one line for each number, and the tables as Markdown and LaTeX."""
    write_json(out / SUMMARY_JSON, as_json(summary))
    write_atomically(out / SUMMARY_CSV, lambda file: _write_csv(file, summary))
    for name in SUMMARY_TABLES:
        write_tables(out / name, summary_tables(summary))


def _write_csv(file: Path, summary: Summary) -> None:
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(CSV_HEAD)
        for variant, scores in summary.scores.items():
            signs = {SIGNS[name].key: number for name, number in summary.health[variant].items()}
            for name, number in (scores | signs).items():
                names = (summary.plan.sweep, summary.plan.options.scale, variant, name)
                apart = ("",) * 4 if number.difference is None else astuple(number.difference)
                writer.writerow([*names, number.n, number.mean, number.std, *apart])


def show_summary(summary: Summary, console: Console) -> None:
    """Print the tables, if any run is finished, and remarks."""
    if any(summary.scores.values()):
        for table in summary_tables(summary):
            console.print(table)
    for line in _remarks(summary):
        say(console, line)


def _remarks(summary: Summary) -> Iterator[str]:
    for name, reason in summary.failed.items():
        yield f"{name} failed: {reason}"
    for name in summary.unfinished:
        yield f"{name} is not finished."
    fewest = summary.fewest_seeds()
    if 0 < fewest < LEAST_SEEDS:
        yield f"{seeds_note(fewest).capitalize()}; give at least {LEAST_SEEDS} seeds."
    if fewest > 1 and summary.has_baseline:
        yield "Intervals: single differences over seeds (Student's t) on one test set, not corrected for their number."


def summary_tables(summary: Summary) -> list[Table]:
    """Return a table of means over seeds and, if the baseline was run, one of differences to it; a row for each variant."""
    plan, columns = summary.plan, summary.columns()
    # Headings of several lines, so that a table fits the screen.
    headings = [name.replace("/", "\n") for name in columns]
    means, differences = [], []
    for variant in summary.scores:
        numbers = [column.get(variant) for column in columns.values()]
        found = [number for number in numbers if number is not None]
        means.append([variant, _count_cell([number.n for number in found]), *map(_mean_cell, numbers)])
        if variant != plan.baseline:
            pairs = [number.difference.pairs for number in found if number.difference is not None]
            differences.append([variant, _count_cell(pairs), *map(_difference_cell, numbers)])
    title = f"{plan.sweep} at {plan.options.scale} scale, epochs: {plan.base.optim.epochs}; mean ± std over seeds (scores in %)"
    note = "" if summary.has_baseline else f"No differences: the baseline {plan.baseline} has no finished run."
    tables = [Table(title, ["variant", "n", *headings], means, note)]
    if summary.has_baseline and differences:
        title = f"difference to {plan.baseline}, same seeds [95% interval]"
        tables.append(Table(title, ["variant", "pairs", *headings], differences))
    return tables


def _count_cell(counts: Sequence[int]) -> str:
    """Return the number of seeds of a row; the fewest and the most where some have no scores on data of --transfer yet."""
    fewest, most = min(counts, default=0), max(counts, default=0)
    return str(most) if fewest == most else f"{fewest} to {most}"


def _mean_cell(number: Number | None) -> str:
    if number is None:
        return "–"
    return f"{number.mean:.2f}" + ("" if number.std is None else f" ± {number.std:.2f}")


def _difference_cell(number: Number | None) -> str:
    if number is None or (apart := number.difference) is None:
        return "–"
    return f"{apart.difference:+.2f}" + ("" if apart.low is None else f" [{apart.low:+.2f}, {apart.high:+.2f}]")
