"""Means, standard deviations and paired differences over seeds, in numbers worked out by hand; files and tables."""

import csv
import json
import math
from pathlib import Path

import pytest
from mini_sweep import mini_config

from stop_mim.sweeps.plan import make_plan
from stop_mim.sweeps.summary import (
    Summary,
    as_json,
    compare,
    paired_difference,
    show_summary,
    summarise,
    write_summary,
)

# Student's t at 97.5% for 1, 2 and 4 degrees of freedom, from a table.
T_1, T_2, T_4 = 12.7062, 4.30265, 2.77645
BY_SEED = {"fixed": (10.0, 12.0, 14.0), "noisy": (13.0, 13.0, 19.0)}
SCORES = {variant: {seed: {"top1": value} for seed, value in enumerate(own)} for variant, own in BY_SEED.items()}
HEALTH = {variant: {seed: {"A_norm": 2 * value} for seed, value in enumerate(own)} for variant, own in BY_SEED.items()}


@pytest.mark.parametrize(
    ("values", "baseline", "mean", "reach"),
    [
        # Differences 3, 1, 5: mean 3, std 2, standard error 2 / √3.
        ((13.0, 13.0, 19.0), (10.0, 12.0, 14.0), 3.0, T_2 * 2 / math.sqrt(3)),
        # Differences 1.1, 0.9, 1.1, 0.9, 1.1 although seeds differ by 10: squares (3 · 0.08² + 2 · 0.12²) / 4 = 0.012.
        ((1.1, 10.9, 21.1, 30.9, 41.1), (0.0, 10.0, 20.0, 30.0, 40.0), 1.02, T_4 * math.sqrt(0.012 / 5)),
        # Differences 1 and 3: std √2, standard error 1.
        ((2.0, 5.0), (1.0, 2.0), 2.0, T_1),
    ],
)
def test_paired_differences(values, baseline, mean, reach):
    found = paired_difference(dict(enumerate(values)), dict(enumerate(baseline)))
    assert found.pairs == len(values)
    assert found.difference == pytest.approx(mean)
    assert (found.low, found.high) == (pytest.approx(mean - reach, abs=1e-3), pytest.approx(mean + reach, abs=1e-3))


def test_few_common_seeds():
    found = paired_difference({3: 2.0, 4: 9.0}, {3: 1.5})
    assert (found.pairs, found.difference, found.low, found.high) == (1, 0.5, None, None)
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


def test_numbers_that_are_not_finite_are_left_out():
    broken = {**SCORES, "noisy": {**SCORES["noisy"], 2: {"top1": math.nan}}}
    numbers = compare(broken, "fixed")
    assert (numbers["fixed"]["top1"].n, numbers["noisy"]["top1"].n) == (3, 2)


@pytest.mark.usefixtures("mini")
def test_files_and_tables_hold_the_same_numbers(console):
    failed = {"noisy/seed-3": "The loss is not finite."}
    numbers = (compare(values, "fixed") for values in (SCORES, HEALTH))
    summary = Summary(make_plan("mini", mini_config()), *numbers, failed, ["fixed/seed-4"])
    write_summary(Path("out"), summary)
    stored = json.loads(Path("out/summary.json").read_text())
    assert stored == json.loads(json.dumps(as_json(summary)))
    assert stored["variants"]["noisy"]["overrides"] == {"positions.kind": "stochastic", "positions.sigma": 1.0}
    assert stored["variants"]["fixed"]["scores"]["top1"] == {
        "n": 3,
        "mean": 12.0,
        "std": 2.0,
        "by_seed": {"0": 10.0, "1": 12.0, "2": 14.0},
        "difference": None,
    }
    with Path("out/summary.csv").open() as stream:
        rows = {(row["variant"], row["score"]): row for row in csv.DictReader(stream)}
    assert float(rows["noisy", "top1"]["difference"]) == 3.0
    assert float(rows["noisy", "top1"]["high"]) == pytest.approx(7.96833, abs=1e-4)
    assert rows["fixed", "top1"]["difference"] == ""
    assert (
        float(rows["noisy", "health/A_norm"]["mean"]) == stored["variants"]["noisy"]["health"]["A_norm"]["mean"] == 30
    )
    assert "| noisy | 3 | 15.00 ± 3.46 | 30.00 ± 6.93 |" in Path("out/summary.md").read_text()
    assert r"noisy & 3 & +3.00 [-1.97, +7.97] &" in Path("out/summary.tex").read_text()
    show_summary(summary, console)
    text = console.file.getvalue()
    words = ("15.00 ± 3.46", "+3.00 [-1.97, +7.97]", "|A|", "noisy/seed-3 failed: The loss is", "fixed/seed-4 is not")
    assert all(one in text for one in words)
    assert "no comparison" not in text


@pytest.mark.usefixtures("mini")
def test_a_directory_without_finished_runs_has_an_empty_summary(console):
    plan = make_plan("mini", mini_config())
    found = summarise(plan, {"noisy/seed-1": "It failed."})
    assert found.scores == found.health == {"fixed": {}, "noisy": {}}
    assert found.unfinished == ["fixed/seed-0", "noisy/seed-0", "fixed/seed-1"]
    show_summary(found, console)


@pytest.mark.usefixtures("stand_in")
def test_variants_that_were_neither_chosen_nor_run_are_not_shown(console):
    plan = make_plan("mini", mini_config(variants=("noisy",)))

    def written(run):
        Path("out", run).mkdir(parents=True)
        Path("out", run, "scores.json").write_text(json.dumps({"scores": 7}))
        summary = summarise(plan, {})
        write_summary(plan.out, summary)
        show_summary(summary, console)
        return console.file.getvalue(), Path("out/summary.md").read_text()

    # A copy of a run is not counted.
    written("noisy/seed-0.old")
    for text in written("noisy/seed-0"):
        assert "7.00" in text
        assert "No differences: the baseline fixed has no finished run." in " ".join(text.split())
        assert text.count("fixed") == 1
    for text in written("fixed/seed-0"):
        assert "difference to fixed" in text
    assert list(json.loads(Path("out/summary.json").read_text())["variants"]) == ["fixed", "noisy"]
