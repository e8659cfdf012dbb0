"""The progress display: a time left from the first steps on, and values that say when they were measured."""

import io
import re

import pytest
from rich.console import Console
from test_trainer import make_trainer

from stop_mim.training.callbacks import progress
from stop_mim.training.callbacks.progress import ProgressDisplay, ShowProgress
from stop_mim.training.step import StepOutcome

ANSI_CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test moves itself."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def show_steps(clock, seconds, total, **options):
    """The first step takes half a minute, the others a second each."""
    console = Console(file=io.StringIO(), get_time=lambda: clock[0], **options)
    with ProgressDisplay(console) as display:
        for step in range(seconds + 1):
            display.update("training", step, total, "loss 0.5 " * 20)
            clock[0] += 1 if step else 30
    return ANSI_CODES.sub("", console.file.getvalue())


def test_lines_outside_of_a_terminal_become_rarer_and_tell_the_time_that_is_left(clock):
    lines = show_steps(clock, 100, 1000, width=500).splitlines()
    assert [line.split(" loss")[0] for line in lines[:4]] == [
        "training 0/1,000",
        "training 1/1,000",
        "training 4/1,000 0:16:36 left",
        "training 9/1,000 0:16:31 left",
    ]
    assert 10 < len(lines) < 16


def test_a_terminal_shows_the_time_that_is_left(clock):
    text = show_steps(clock, 3, 63, width=80, force_terminal=True)
    assert "3/63 0:01:00 left loss 0.5" in text


def test_values_that_are_measured_rarely_are_shown_with_their_step():
    shown = []
    show, trainer = ShowProgress(lambda *given: shown.append(given)), make_trainer()
    show.start(trainer)
    measurements = [{"health/rankme": 20.0}, {}, {"images_per_second": 12.5}]
    for step, (measured, loss) in enumerate(zip(measurements, (0.5, None, 0.25), strict=True), 1):
        trainer.done, trainer.measurements = step, measured
        if loss is not None:
            trainer.loss = loss
        show.after_step(trainer, None, [] if loss is None else [StepOutcome(loss, 1.0, True)])
    assert [(done, end) for done, end, _ in shown] == [(step, trainer.last_step) for step in range(4)]
    texts = [text for _, _, text in shown]
    assert "decoding" in texts[0]
    assert texts[1:] == [
        "loss 0.5000 (RankMe 20 at step 1)",
        "loss 0.5000 (RankMe 20 at step 1)",
        "12.5 images/s loss 0.2500 (RankMe 20 at step 1)",
    ]
