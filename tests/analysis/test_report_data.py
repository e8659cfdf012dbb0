"""The numbers of a report: states of runs, maps of positions, long curves made short."""

import torch
from analysed_runs import GRID, pretend
from parsed_page import levels

from stop_mim.analysis.report_data import position_maps, read_runs, rounded, spread_out, thinned
from stop_mim.positions import SinCosPositions, StochasticPositions
from stop_mim.training.trainer import MAX_NOT_FINITE_IN_A_ROW

N_PATCHES = GRID[0] * GRID[1]


def test_position_maps_are_cosines_and_noise_lowers_them():
    table = SinCosPositions(GRID, 16)
    maps = position_maps(StochasticPositions(table, None, sigma=0.5, covariance="identity"), budget=10**6)
    assert maps["queries"] == list(range(N_PATCHES))
    low, high = maps["low"], maps["high"]
    fixed, mean = (low + (high - low) * levels(maps[kind], N_PATCHES, N_PATCHES) for kind in ("fixed", "mean"))
    assert torch.allclose(
        fixed, torch.cosine_similarity(table.table()[:, None], table.table()[None], dim=2).double(), atol=0.01
    )
    assert (mean.diagonal() < 0.95).all()
    assert (mean.diagonal() > 0.5).all()
    assert "mean" not in position_maps(table, budget=10**6)


def test_states(stop_run, tmp_path):
    finished = read_runs([stop_run])[0]
    assert (finished.state.kind, finished.state.text) == ("finished", "finished: all 8 steps")
    stopped = pretend(stop_run, tmp_path / "stopped")
    lines = (stopped / "metrics.jsonl").read_text().splitlines(keepends=True)
    (stopped / "metrics.jsonl").write_text("".join(lines[:3]))
    assert read_runs([stopped])[0].state.text == "unfinished: step 3 of 8"
    diverged = pretend(stop_run, tmp_path / "diverged")
    warning = (
        "2026-01-01 00:00:00 Warning: Step 9: the loss or its gradient is not finite (nan); the step was skipped.\n"
    )
    with (diverged / "log.txt").open("a") as file:
        file.write(warning * (MAX_NOT_FINITE_IN_A_ROW - 1))
    assert read_runs([diverged])[0].state.kind == "finished"
    with (diverged / "log.txt").open("a") as file:
        file.write("2026-01-01 00:00:00 Saved step 8.\n" + warning)
    assert read_runs([diverged])[0].state.kind == "failed"


def test_a_long_curve_keeps_its_peaks():
    points = [(float(step), 1.0) for step in range(100_000)]
    points[54_321] = (54_321.0, 9.0)
    points[12_345] = (12_345.0, -3.0)
    kept = thinned(points, 300)
    assert len(kept) <= 300
    assert {points[0], points[-1], points[54_321], points[12_345]} <= set(kept)
    assert kept == sorted(kept)
    assert thinned(points[:300], 300) == points[:300]


def test_queries_are_thinned_to_what_there_is_room_for():
    assert spread_out((4, 6), 24) == list(range(24))
    assert spread_out((4, 6), 23) == [0, 2, 4, 12, 14, 16]
    assert spread_out((4, 6), 1) == [0]


def test_numbers_are_rounded_to_four_digits():
    assert [rounded(value) for value in (0.123456, 12345.6, -1e-9, 0.0)] == [0.1235, 12350.0, -1e-9, 0.0]
