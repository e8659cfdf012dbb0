"""Configurations: what is written is read again, every field is explained, and bad values are named."""

import ast
import dataclasses
import inspect
import json
import math

import pytest

from stop_mim.errors import InputError
from stop_mim.records import from_plain
from stop_mim.training import config as config_module
from stop_mim.training.config import OptimConfig, ProbeConfig, TrainConfig, to_json
from stop_mim.training.recipes import RECIPES


def from_json(text):
    return from_plain(TrainConfig, json.loads(text))


def test_json_gives_back_every_field():
    for recipe in RECIPES.values():
        config = dataclasses.replace(recipe(), out="runs/a", seed=3, stop_after_steps=9)
        assert from_json(to_json(config)) == config


def test_a_missing_field_gets_its_default_and_an_integer_becomes_a_float():
    assert from_json("{}") == TrainConfig()
    assert from_json('{"optim": {"epochs": 20}}') == TrainConfig(optim=OptimConfig(epochs=20))
    optim = from_json(json.dumps({"optim": {"warmup_epochs": 3, "hold_after_epoch": 4}})).optim
    assert (type(optim.warmup_epochs), type(optim.hold_after_epoch)) == (float, float)


def test_an_unknown_field_is_refused_by_its_path():
    with pytest.raises(InputError, match=r"optim\.learning_rate"):
        from_json('{"optim": {"learning_rate": 1}}')
    with pytest.raises(InputError, match="dataset"):
        from_json('{"dataset": "photos"}')


def test_every_field_has_a_docstring():
    tree = ast.parse(inspect.getsource(config_module))
    configs = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("Config")]
    assert len(configs) >= 6
    for node in configs:
        assert ast.get_docstring(node)
        for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
            # A group is explained by its own class.
            if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.annotation) not in vars(config_module):
                assert isinstance(following, ast.Expr), f"{node.name}.{ast.unparse(statement.target)}"
                assert isinstance(ast.literal_eval(following.value), str)


@pytest.mark.parametrize(
    ("config", "values", "named"),
    [
        (OptimConfig, {"lr": math.inf}, "optim.lr is inf"),
        (OptimConfig, {"epochs": 3, "warmup_epochs": 4.0}, "optim.warmup_epochs is 4.0"),
        (ProbeConfig, {"batch_size": 1}, "probe.batch_size is 1"),
        (ProbeConfig, {"neighbours": 5000}, "probe.neighbours is 5000"),
        (TrainConfig, {"stop_after_steps": 0}, "stop_after_steps is 0"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(config, values, named):
    with pytest.raises(InputError, match=f"^{named}: "):
        config(**values)
