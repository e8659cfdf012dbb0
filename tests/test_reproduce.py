"""docs/reproduce.md: its commands are accepted, and its hours follow from the measured speeds."""

import re
import shlex
from pathlib import Path

import pytest

from stop_mim.cli import COMMANDS
from stop_mim.evaluation.config import evaluate_config
from stop_mim.parsing import parse
from stop_mim.sweeps.grid import SWEEPS
from stop_mim.sweeps.plan import SweepConfig
from stop_mim.training.config import TrainConfig
from stop_mim.training.recipes import find_recipe

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "reproduce.md").read_text()
IMAGES = 1_281_167
EVALUATE = evaluate_config()


def commands():
    found = [shlex.split(command)[1:] for command in re.findall(r"`(stop-mim [^`…]*)`", PAGE)]
    return [command for command in found if "--help" not in command]


def test_every_command_is_accepted():
    parsed = set()
    for command, name, *options in commands():
        kind = {"pretrain": TrainConfig, "sweep": SweepConfig, "evaluate": EVALUATE, "figure": COMMANDS["figure"]}[
            command
        ]
        key = (command, *(word for word in options if word.startswith("-")))
        default = {"default": find_recipe(name)} if command == "pretrain" else {}
        # Of commands with the same options, one is parsed.
        if key not in parsed:
            _, unknown = parse(kind, [name, *options] if command == "figure" else options, prog=command, **default)
            assert unknown == []
        parsed.add(key)
    assert {key[0] for key in parsed} == {"pretrain", "sweep", "evaluate", "figure"}


def test_hours_are_those_of_the_measured_speeds():
    measured = (DOCS / "results" / "performance.md").read_text()
    rows = re.findall(r"stop-mim pretrain (\S+) .*?` \| (\d+) \| ([\d,]+) \| (\d+) \|", PAGE)
    assert len(rows) == 7
    for recipe, epochs, speed, hours in rows:
        assert f"| {speed} [" in measured
        assert find_recipe(recipe).optim.epochs == int(epochs)
        assert int(hours) == round(int(epochs) * IMAGES / int(speed.replace(",", "")) / 3600)


def rows(table: int) -> list[list[str]]:
    """The cells of a table of the paper, without its header."""
    section = PAGE.split(f"\n| table {table} " if table > 5 else f"\n## Table {table}:")[1]
    section = section.split("\n\n" if table > 5 else "\n## ")[0]
    return [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]


@pytest.mark.parametrize(("table", "count"), [(1, 6), (2, 10), (3, 9), (4, 10), (5, 2), (6, 3), (7, 4), (8, 4)])
def test_every_row_of_the_paper_is_there(table, count):
    assert len(rows(table)) == count


@pytest.mark.parametrize(("table", "sweep"), [(6, "positions"), (7, "tokens"), (8, "resolution")])
def test_variants_of_the_ablations_exist(table, sweep):
    assert {row[1].strip("`") for row in rows(table)} <= {*SWEEPS[sweep]().variants}
