"""The progress display: a time left from the first steps on, and values that say when they were measured."""

import io
import re

import pytest
from rich.console import Console
from test_trainer import make_trainer

from stop_mim.training.callbacks import progress
from stop_mim.training.callbacks.progress import Pace, ProgressDisplay, ShowProgress, time_left

ANSI_CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test moves itself."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_the_time_left_is_known_after_one_step_and_forgets_the_first(clock):
    pace = Pace()
    assert time_left(pace.end(0, 100)) == ""
    clock[0] += 30  # The first step compiles.
    assert time_left(pace.end(1, 100)) == "0:49:30 left"
    clock[0] += 2
    assert time_left(pace.end(2, 100)) == "0:03:16 left"
    for done in range(3, 90):
        clock[0] += 1
        pace.end(done, 100)
    ends = pace.end(89, 100)
    assert time_left(ends) == "0:00:11 left"
    clock[0] += 4
    assert time_left(ends) == "0:00:07 left", "it is counted down between two steps"


def test_lines_outside_of_a_terminal_become_rarer(clock):
    console = Console(file=io.StringIO(), width=200)
    with ProgressDisplay(console) as display:
        for second in range(101):
            clock[0] = 100.0 + second
            display.update("training", second, 1000, "loss 0.5")
    lines = console.file.getvalue().splitlines()
    assert lines[:3] == [
        "training 0/1,000 loss 0.5",
        "training 2/1,000 0:16:38 left loss 0.5",
        "training 5/1,000 0:16:35 left loss 0.5",
    ]
    assert 10 < len(lines) < 16


def test_a_terminal_shows_the_time_that_is_left(clock):
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with ProgressDisplay(console) as display:
        for second in range(3):
            clock[0] = 100.0 + second
            display.update("training", second, 62, "loss 0.5 " * 20)
    assert "2/62 0:01:00 left loss 0.5" in ANSI_CODES.sub("", console.file.getvalue())


def test_values_that_are_measured_rarely_are_shown_with_their_step():
    shown = []
    show, trainer = ShowProgress(lambda *given: shown.append(given)), make_trainer()
    show.start(trainer)
    for step, measured in enumerate(
        [{"loss": 0.5, "health/rankme": 20.0}, {}, {"loss": 0.25, "images_per_second": 12.5}], 1
    ):
        trainer.done, trainer.measurements = step, measured
        show.after_step(trainer, None, [])
    texts = [text for _, _, text in shown]
    assert "decoding" in texts[0]
    assert texts[1:] == [
        "loss 0.5000 (RankMe 20 at step 1)",
        "loss 0.5000 (RankMe 20 at step 1)",
        "loss 0.2500 12.5 images/s (RankMe 20 at step 1)",
    ]
