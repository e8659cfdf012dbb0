"""Medians, quartiles, rates and the union of intervals; on a GPU, that events and the profiler see its work."""

import pytest
import torch

from stop_mim.benchmark.timing import Spread, busy_seconds, call_seconds, covered, run_seconds

CPU = torch.device("cpu")


def test_spreads():
    assert Spread.of([3.0, 1.0, 2.0, 5.0, 4.0]) == Spread(3.0, 2.0, 4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)
    assert Spread(4.0, 2.0, 8.0).scaled(3) == Spread(12.0, 6.0, 24.0)
    assert Spread(0.5, 0.25, 1.0).over(10) == Spread(20.0, 10.0, 40.0)
    assert Spread(6.0, 5.0, 8.0).less(Spread(2.0, 1.0, 7.0)) == Spread(4.0, 0.0, 7.0)


@pytest.mark.parametrize(
    ("intervals", "length"),
    [
        ([], 0.0),
        ([(5.0, 6.0), (1.0, 5.5)], 5.0),
        ([(0.0, 10.0), (2.0, 3.0), (4.0, 11.0)], 11.0),
    ],
)
def test_overlapping_intervals_count_once(intervals, length):
    assert covered(intervals) == length


def test_a_run_is_divided_by_its_steps(monkeypatch):
    ticks = iter([0.0, 10.0, 20.0, 40.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    calls = []
    assert run_seconds(lambda: calls.append(1), CPU, steps=5, repeats=2) == [2.0, 4.0]
    assert len(calls) == 10


@pytest.mark.gpu
def test_events_and_profiler_see_the_work_of_a_gpu():
    device = torch.device("cuda", 0)
    matrix = torch.randn(4096, 4096, device=device)

    def work():
        return matrix @ matrix

    assert min(call_seconds(work, device, 5, 3)) > 0
    assert busy_seconds(work, device, 5) > 0
