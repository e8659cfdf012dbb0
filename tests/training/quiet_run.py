"""Runs that print nothing, from their first step or from where they stopped, and what they measured."""

import io

from rich.console import Console

from stop_mim.training.config import PositionsConfig
from stop_mim.training.pretrain import resume, train
from stop_mim.training.run_folder import read_metrics

TOTAL, MID_EPOCH = 21, 10
MOVING = PositionsConfig(sigma_start=0.05, sigma=2.0, sigma_schedule="cosine")


def quietly(function, *arguments, **options):
    """With everything that a person would have seen, as text."""
    console = Console(file=io.StringIO(), width=200)
    return function(*arguments, console=console, **options), console.file.getvalue()


def run(config):
    return quietly(train, config)[0]


def go_on(path, **options):
    return quietly(resume, path, **options)[0]


def comparable(folder):
    """What was measured at each step, but for the speed."""
    return [
        {name: value for name, value in line.items() if name != "images_per_second"} for line in read_metrics(folder)
    ]
