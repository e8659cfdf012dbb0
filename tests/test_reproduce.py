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


def rows(header: str) -> list[list[str]]:
    """Return the cells of the table whose header begins so."""
    lines = PAGE.split(f"\n| {header} |")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def runs() -> list[tuple[str, str, str, list[str]]]:
    """Return name, recipe, options and the other cells of every run."""
    found = []
    for names, options, *others in rows("run | options"):
        recipe = re.search(r"recipe `(\S+)`", options)
        flags = re.findall(r"`(--[^`]*)`", options)
        for name in re.findall(r"`(\S+)`", names):
            found.append((name, recipe.group(1) if recipe else name, " ".join(flags), others))
    return found


def commands():
    found = [shlex.split(command)[1:] for command in re.findall(r"`*(stop-mim [^`…\n]*)[`\n]", PAGE)]
    trainings = [
        ["pretrain", recipe, "--data", "$IN1K", "--out", name, *options.split()] for name, recipe, options, _ in runs()
    ]
    return trainings + [command for command in found if command[0] != "pretrain"]


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
    timed = [(recipe, *others) for _, recipe, _, others in runs() if others[2]]
    assert len(timed) == 7
    for recipe, epochs, speed, hours in timed:
        assert f"| {speed} [" in measured
        assert find_recipe(recipe).optim.epochs == int(epochs)
        assert int(hours.split()[0]) == round(int(epochs) * IMAGES / int(speed.replace(",", "")) / 3600)


@pytest.mark.parametrize(
    ("header", "counts"), [("run | 1%", [6, 10, 6, 9, 9, 9]), ("run | CIFAR-100", [10, 10, 10, 10, 10])]
)
def test_every_number_of_the_papers_tables_is_there(header, counts):
    table = {row[0].strip("`"): row[1:] for row in rows(header)}
    assert {*table} <= {name for name, *_ in runs()}
    assert [sum(bool(cell) for cell in column) for column in zip(*table.values(), strict=True)] == counts


@pytest.mark.parametrize(("sweep", "count"), [("positions", 3), ("tokens", 4), ("resolution", 4)])
def test_variants_of_the_ablations_exist(sweep, count):
    (cell,) = [variants for name, variants in rows("sweep | variants, with the paper's top-1") if f"`{sweep}`" in name]
    named = re.findall(r"`(\S+)` \d\d\.\d", cell)
    assert len(named) == count
    assert {*named} <= {*SWEEPS[sweep]().variants}
