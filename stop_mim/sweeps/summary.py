"""What a sweep found: mean and spread over seeds, and paired differences to the baseline, from the folders of its runs."""

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from scipy import stats

from stop_mim.errors import InputError
from stop_mim.files import write_atomically
from stop_mim.sweeps.outcome import Outcome, read_outcome
from stop_mim.sweeps.plan import Plan, read_plan, run_folder

SUMMARY_JSON, SUMMARY_CSV = "summary.json", "summary.csv"
FORMAT = "stop-mim sweep summary 1"
CONFIDENCE = 0.95
LEAST_SEEDS = 3
# Shown beside the scores, with the names that the paper gives them.
SIGNS = {"health/A_norm": "|A|", "health/mask_token_norm": "|m̃|"}


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (n - 1 in its denominator) over seeds; one seed has none."""

    n: int
    mean: float
    std: float | None


@dataclass(frozen=True)
class Difference:
    """Mean over common seeds of variant minus baseline, and its 95% interval by Student's t; one seed has none."""

    n: int
    mean: float
    low: float | None
    high: float | None
    note: str


def spread(values: Sequence[float]) -> Spread:
    """Mean and standard deviation."""
    std = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Spread(len(values), float(np.mean(values)), std)


def paired_difference(values: Mapping[int, float], baseline: Mapping[int, float]) -> Difference | None:
    """How far a variant is from the baseline, both by seed; none without a common seed."""
    differences = [values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())]
    if not differences:
        return None
    found = spread(differences)
    if found.std is None:
        return Difference(1, found.mean, None, None, seeds_note(1))
    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, found.n - 1))
    reach = quantile * found.std / math.sqrt(found.n)
    return Difference(found.n, found.mean, found.mean - reach, found.mean + reach, seeds_note(found.n))


def seeds_note(n: int) -> str:
    """What so few seeds do not allow."""
    if n == 1:
        return "one seed: no interval"
    return f"{n} seeds: no comparison" if n < LEAST_SEEDS else ""


@dataclass(frozen=True)
class Score:
    """One number of one variant, over seeds."""

    by_seed: dict[int, float]
    over_seeds: Spread
    difference: Difference | None
    """To the baseline; the baseline has none."""


@dataclass(frozen=True)
class Summary:
    """A sweep as far as it has been run."""

    plan: Plan
    scores: dict[str, dict[str, Score]]
    """By variant, then by name; a variant of which no run is finished has none."""
    failed: dict[tuple[str, int], str]
    """Why, by variant and seed."""
    unfinished: list[tuple[str, int]]

    def columns(self) -> list[str]:
        """The scores and signs that tables show."""
        return [*self.plan.shown, *SIGNS]

    def fewest_seeds(self) -> int:
        """Of all variants that have been run."""
        return min((score.over_seeds.n for row in self.scores.values() for score in row.values()), default=0)


def summarise(out: Path, baseline: str | None = None, asked: Sequence[tuple[str, int]] = ()) -> Summary:
    """All runs that lie in the folder of a sweep; those that were asked for and are not finished are named."""
    plan = read_plan(out)
    baseline = baseline or plan.baseline
    if baseline not in plan.names():
        raise InputError(f"There is no variant '{baseline}' in {out}: choose one of {', '.join(plan.names())}.")
    outcomes = {
        (name, seed): read_outcome(run_folder(out, name, seed)) for name in plan.names() for seed in _seeds(out / name)
    }
    finished = {key: one for key, one in outcomes.items() if one is not None and one.error is None}
    failed = {key: one.error for key, one in outcomes.items() if one is not None and one.error is not None}
    open_ones = [key for key in dict.fromkeys([*asked, *outcomes]) if key not in finished and key not in failed]
    scores = _scores(plan.names(), baseline, finished)
    return Summary(replace(plan, baseline=baseline), scores, failed, open_ones)


def _seeds(folder: Path) -> list[int]:
    names = [path.name.removeprefix("seed-") for path in folder.glob("seed-*") if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal())


def _scores(
    variants: Sequence[str], baseline: str, finished: Mapping[tuple[str, int], Outcome]
) -> dict[str, dict[str, Score]]:
    values: dict[str, dict[str, dict[int, float]]] = {name: {} for name in variants}
    for (variant, seed), outcome in finished.items():
        for metric, value in outcome.metrics.items():
            if math.isfinite(value):
                values[variant].setdefault(metric, {})[seed] = value
    return {
        variant: {
            metric: Score(
                by_seed,
                spread(list(by_seed.values())),
                None if variant == baseline else paired_difference(by_seed, values[baseline].get(metric, {})),
            )
            for metric, by_seed in row.items()
        }
        for variant, row in values.items()
    }


def as_json(summary: Summary) -> dict[str, Any]:
    """All of it as plain values; nothing in it depends on when or how fast it was measured."""
    plan = summary.plan
    return {
        "format": FORMAT,
        "sweep": plan.sweep,
        "scale": plan.scale,
        "recipe": plan.recipe,
        "epochs": plan.base.optim.epochs,
        "baseline": plan.baseline,
        "confidence": CONFIDENCE,
        "note": seeds_note(summary.fewest_seeds()),
        "shown": summary.columns(),
        "variants": {
            variant.name: {
                "overrides": dict(variant.overrides),
                "scores": {
                    name: {
                        **asdict(score.over_seeds),
                        "by_seed": {str(seed): value for seed, value in score.by_seed.items()},
                        "difference": None if score.difference is None else asdict(score.difference),
                    }
                    for name, score in summary.scores[variant.name].items()
                },
            }
            for variant in plan.variants
        },
        "failed": [{"variant": name, "seed": seed, "error": why} for (name, seed), why in summary.failed.items()],
        "unfinished": [{"variant": name, "seed": seed} for name, seed in summary.unfinished],
    }


def write_summary(out: Path, summary: Summary) -> None:
    """summary.json and summary.csv, a line a number."""
    text = json.dumps(as_json(summary), indent=2)
    write_atomically(out / SUMMARY_JSON, lambda file: file.write_text(text + "\n"))
    write_atomically(out / SUMMARY_CSV, lambda file: _write_csv(file, summary))


def _write_csv(file: Path, summary: Summary) -> None:
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(
            ["sweep", "scale", "variant", "score", "n", "mean", "std", "difference", "low", "high", "pairs", "note"]
        )
        for variant, row in summary.scores.items():
            for name, score in row.items():
                over, apart = score.over_seeds, score.difference
                compared: list[Any] = ["", "", "", "", seeds_note(over.n)]
                if apart is not None:
                    compared = [apart.mean, _blank(apart.low), _blank(apart.high), apart.n, apart.note]
                first = [summary.plan.sweep, summary.plan.scale, variant, name]
                writer.writerow([*first, over.n, over.mean, _blank(over.std), *compared])


def _blank(value: float | None) -> float | str:
    return "" if value is None else value


def show_summary(summary: Summary, console: Console) -> None:
    """The two tables, if anything is finished, and what must be said of them."""
    if any(summary.scores.values()):
        console.print(means_table(summary))
        console.print(differences_table(summary))
    for line in _remarks(summary):
        style = "yellow" if " failed: " in line else None
        console.print(escape(line), highlight=False, soft_wrap=True, style=style)


def _remarks(summary: Summary) -> Iterator[str]:
    for (name, seed), why in summary.failed.items():
        yield f"{name} seed {seed} failed: {why}"
    for name, seed in summary.unfinished:
        yield f"{name} seed {seed} is not finished."
    fewest = summary.fewest_seeds()
    if 0 < fewest < LEAST_SEEDS:
        why = "One seed has no interval" if fewest == 1 else "Two seeds have intervals, but hardly any certainty"
        yield f"{why}: this is no comparison, give at least {LEAST_SEEDS} seeds."
    if fewest > 1:
        yield "Intervals are of single differences over seeds (Student's t), on one test set, not corrected for their number."
    if fewest and summary.plan.probe.kind == "scenes":
        yield "Chance: count 12.5, distance 16.7."


def means_table(summary: Summary) -> Table:
    """A row for each variant: mean ± standard deviation over seeds."""
    plan = summary.plan
    title = (
        f"{plan.sweep} at {plan.scale} scale, epochs: {plan.base.optim.epochs}; mean ± std over seeds (accuracies in %)"
    )
    table = _table(title, summary, ["n"])
    for variant, row in summary.scores.items():
        n = max((score.over_seeds.n for score in row.values()), default=0)
        table.add_row(escape(variant), str(n), *(_mean_cell(row.get(name)) for name in summary.columns()))
    return table


def differences_table(summary: Summary) -> Table:
    """A row for each variant but the baseline: paired difference and its interval."""
    title = f"difference to {summary.plan.baseline}, same seeds [95% interval]"
    table = _table(title, summary, ["pairs"])
    for variant, row in summary.scores.items():
        found = [row[name].difference for name in summary.columns() if name in row]
        pairs = max((one.n for one in found if one is not None), default=0)
        if variant != summary.plan.baseline:
            cells = (_difference_cell(row.get(name)) for name in summary.columns())
            table.add_row(escape(variant), str(pairs), *cells)
    return table


def _table(title: str, summary: Summary, after: list[str]) -> Table:
    table = Table(title=escape(title), title_justify="left")
    table.add_column("variant", no_wrap=True)
    headings = [SIGNS.get(name, name.removesuffix("/top1").replace("/", "\n")) for name in summary.columns()]
    for heading in [*after, *headings]:
        table.add_column(escape(heading), justify="right")
    return table


def _mean_cell(score: Score | None) -> str:
    if score is None:
        return "–"
    over = score.over_seeds
    return f"{over.mean:.2f}" + ("" if over.std is None else f" ± {over.std:.2f}")


def _difference_cell(score: Score | None) -> str:
    if score is None or score.difference is None:
        return "–"
    apart = score.difference
    interval = "" if apart.low is None else f" [{apart.low:+.2f}, {apart.high:+.2f}]"
    return escape(f"{apart.mean:+.2f}{interval}")
