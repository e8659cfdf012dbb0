"""The arithmetic of summaries, with numbers that were worked out by hand."""

import csv
import json
import math

import pytest
from mini_sweep import VARIANTS, install, mini_config, printed, silent

from stop_mim.errors import InputError
from stop_mim.sweeps.outcome import Outcome, write_outcome
from stop_mim.sweeps.plan import make_plan, run_folder, write_plan
from stop_mim.sweeps.summary import as_json, paired_difference, show_summary, spread, summarise, write_summary

# The 97.5th percentiles of Student's t, as tables print them.
T_1, T_2, T_4 = 12.7062, 4.30265, 2.77645
ACCURACY = "count/linear/top1"


def test_spread_over_seeds():
    found = spread([1.0, 2.0, 4.0, 5.0])
    # Squares of -2, -1, 1, 2 sum to 10; 10 / 3.
    assert (found.n, found.mean) == (4, 3.0)
    assert found.std == pytest.approx(math.sqrt(10 / 3))
    assert spread([7.0]).std is None


def test_paired_difference_of_three_seeds():
    found = paired_difference({0: 13.0, 1: 13.0, 2: 19.0}, {0: 10.0, 1: 12.0, 2: 14.0})
    # Differences 3, 1, 5: mean 3, std 2, standard error 2 / √3.
    assert (found.n, found.mean, found.note) == (3, 3.0, "")
    assert found.low == pytest.approx(3 - T_2 * 2 / math.sqrt(3), abs=1e-4)
    assert found.high == pytest.approx(3 + T_2 * 2 / math.sqrt(3), abs=1e-4)


def test_paired_difference_of_five_seeds_is_narrow_though_seeds_differ_much():
    baseline = {seed: 10.0 * seed for seed in range(5)}
    found = paired_difference({seed: value + 1 + 0.1 * (-1) ** seed for seed, value in baseline.items()}, baseline)
    # Differences 1.1, 0.9, 1.1, 0.9, 1.1: mean 1.02, squares (3 · 0.08² + 2 · 0.12²) / 4 = 0.012.
    reach = T_4 * math.sqrt(0.012 / 5)
    assert found.mean == pytest.approx(1.02)
    assert (found.low, found.high) == (pytest.approx(1.02 - reach, abs=1e-5), pytest.approx(1.02 + reach, abs=1e-5))
    # Without pairing, seeds of std 15.8 would hide it.
    assert found.low > 0


def test_two_seeds_say_that_they_are_no_comparison():
    found = paired_difference({0: 2.0, 1: 5.0}, {0: 1.0, 1: 2.0})
    # Differences 1 and 3: mean 2, std √2, standard error 1.
    assert found.note == "2 seeds: no comparison"
    assert (found.low, found.high) == (pytest.approx(2 - T_1, abs=1e-4), pytest.approx(2 + T_1, abs=1e-4))


def test_one_seed_has_no_interval():
    found = paired_difference({3: 2.0, 4: 9.0}, {3: 1.5})
    assert (found.n, found.mean, found.low, found.high) == (1, 0.5, None, None)
    assert found.note == "one seed: no interval"


def test_without_a_common_seed_there_is_no_difference():
    assert paired_difference({0: 1.0}, {1: 1.0}) is None
    assert paired_difference({}, {}) is None


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """A sweep whose outcomes are written by hand: three seeds of each variant."""
    install(monkeypatch)
    write_plan(tmp_path, make_plan("mini", mini_config(tmp_path, seeds=(0, 1, 2))))
    for name, values in {"fixed": (10.0, 12.0, 14.0), "noisy": (13.0, 13.0, 19.0)}.items():
        for seed, value in enumerate(values):
            metrics = {ACCURACY: value, "health/A_norm": 2 * value}
            write_outcome(run_folder(tmp_path, name, seed), Outcome(metrics=metrics))
    return tmp_path


def test_summary_of_a_folder(sweep):
    found = as_json(summarise(sweep))
    assert list(found["variants"]) == ["fixed", "noisy"]
    assert found["variants"]["noisy"]["overrides"] == dict(VARIANTS[1].overrides)
    fixed, noisy = (found["variants"][name]["scores"][ACCURACY] for name in ("fixed", "noisy"))
    assert fixed == {
        "n": 3,
        "mean": 12.0,
        "std": 2.0,
        "by_seed": {"0": 10.0, "1": 12.0, "2": 14.0},
        "difference": None,
    }
    assert noisy["mean"] == 15.0
    assert noisy["std"] == pytest.approx(math.sqrt(12))
    assert noisy["difference"]["mean"] == 3.0
    assert noisy["difference"]["low"] == pytest.approx(-1.96833, abs=1e-4)
    assert noisy["difference"]["high"] == pytest.approx(7.96833, abs=1e-4)
    assert (found["failed"], found["unfinished"], found["note"]) == ([], [], "")


def test_another_baseline_turns_the_differences_round(sweep):
    found = summarise(sweep, baseline="noisy")
    assert found.scores["noisy"][ACCURACY].difference is None
    assert found.scores["fixed"][ACCURACY].difference.mean == -3.0
    with pytest.raises(InputError, match=r"There is no variant 'loud' in .*: choose one of fixed, noisy"):
        summarise(sweep, baseline="loud")


def test_failed_runs_are_named_and_their_seeds_not_paired(sweep):
    write_outcome(run_folder(sweep, "noisy", 1), Outcome(error="The loss was not finite: lower optim.lr."))
    found = summarise(sweep)
    assert found.failed == {("noisy", 1): "The loss was not finite: lower optim.lr."}
    apart = found.scores["noisy"][ACCURACY].difference
    # Differences 3 and 5 remain.
    assert (apart.n, apart.mean) == (2, 4.0)
    assert found.scores["fixed"][ACCURACY].over_seeds.n == 3
    console = silent()
    show_summary(found, console)
    assert "noisy seed 1 failed: The loss was not finite: lower optim.lr." in printed(console)
    assert "this is no comparison, give at least 3 seeds" in printed(console)


def test_unfinished_runs_are_named(sweep):
    run_folder(sweep, "noisy", 7).mkdir()
    found = summarise(sweep, asked=[("fixed", 0), ("fixed", 9)])
    assert found.unfinished == [("fixed", 9), ("noisy", 7)]


def test_numbers_that_are_none_are_left_out(sweep):
    write_outcome(run_folder(sweep, "noisy", 2), Outcome(metrics={ACCURACY: 19.0, "health/A_norm": math.nan}))
    row = summarise(sweep).scores["noisy"]
    assert row[ACCURACY].over_seeds.n == 3
    assert row["health/A_norm"].over_seeds.n == 2


def test_files_and_tables_hold_the_same_numbers(sweep):
    summary, console = summarise(sweep), silent()
    write_summary(sweep, summary)
    assert json.loads((sweep / "summary.json").read_text()) == json.loads(json.dumps(as_json(summary)))
    with (sweep / "summary.csv").open() as stream:
        rows = {(row["variant"], row["score"]): row for row in csv.DictReader(stream)}
    assert float(rows["noisy", ACCURACY]["difference"]) == 3.0
    assert float(rows["noisy", ACCURACY]["high"]) == pytest.approx(7.96833, abs=1e-4)
    assert rows["fixed", ACCURACY]["difference"] == ""
    assert float(rows["fixed", "health/A_norm"]["mean"]) == 24.0
    show_summary(summary, console)
    text = printed(console)
    assert "15.00 ± 3.46" in text
    assert "+3.00 [-1.97, +7.97]" in text
    assert "|A|" in text
    assert "no comparison" not in text


def test_a_folder_without_a_sweep(tmp_path):
    with pytest.raises(InputError, match=r"holds no sweep \(no sweep.json\)"):
        summarise(tmp_path)
