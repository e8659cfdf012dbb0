"""`train` and `evaluate` as functions: what the commands do, with names, paths and options as Python values."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from stop_mim.errors import check_choice
from stop_mim.evaluation.config import evaluate_config
from stop_mim.evaluation.evaluate import evaluate as run_evaluation
from stop_mim.exchange.initial_weights import initialise
from stop_mim.options import Compat
from stop_mim.registry import load_plugins
from stop_mim.results import Evaluation
from stop_mim.sweeps.grid import with_overrides
from stop_mim.training.config import TrainConfig
from stop_mim.training.derived import following
from stop_mim.training.pretrain import TrainResult
from stop_mim.training.pretrain import train as run_training
from stop_mim.training.recipes import find_recipe, with_compat


def train(
    recipe: str | TrainConfig,
    data: str | Path | None = None,
    out: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    init: str | Path | None = None,
    compat: Compat = "corrected",
    console: Console | None = None,
) -> TrainResult:
    """Train an encoder, as `stop-mim pretrain` does; `load_encoder(result.folder)` loads it.

    Args:
        recipe: name of a recipe, or a configuration.
        data: images, by any name that `--data` takes; None: the recipe's.
        out: new run directory; None: runs/RECIPE-DATE-TIME.
        options: fields by their path, such as {"optim.epochs": 10, "positions.sigma": 0.1}.
        init: initial weights, as for `--init`.
        compat: "corrected", or the recipe as "release" or "paper-text" have it.
        console: where progress is shown; None: standard error.
    """
    check_choice("compat", compat, get_args(Compat))
    load_plugins()
    given = {name: str(value) for name, value in (("data", data), ("out", out)) if value is not None}
    given |= options or {}
    config = find_recipe(recipe, compat) if isinstance(recipe, str) else with_compat(recipe, compat)
    config = with_overrides(following(config, given), given)
    weights = None if init is None else partial(initialise, name=init)
    return run_training(config, recipe if isinstance(recipe, str) else "custom", console, weights)


def evaluate(
    encoders: str | Path | Sequence[str | Path],
    task: str | Sequence[str] = "all",
    data: str | Path = "",
    options: Mapping[str, Any] | None = None,
    console: Console | None = None,
) -> list[Evaluation]:
    """Score frozen encoders, as `stop-mim evaluate` does: one result for each encoder, task and label.

    Args:
        encoders: one encoder or several, by any name that `load_encoder` takes.
        task: one task or several, such as "linear" or ["knn", "low-shot"]; "all": as on the command line.
        data: labelled images or videos, by any name that `--data` takes.
        options: fields by their path, such as {"test_data": "photos/val", "knn.neighbours": (5,)}.
        console: where progress and the table are shown; None: standard output.
    """
    names = [encoders] if isinstance(encoders, str | Path) else encoders
    given = {"task": (task,) if isinstance(task, str) else tuple(task), "data": str(data)}
    config = with_overrides(evaluate_config()(), {**given, **(options or {})})
    return run_evaluation([str(name) for name in names], config, console)
