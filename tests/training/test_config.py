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
from stop_mim.training.config import OptimConfig, TrainConfig, to_json
from stop_mim.training.recipes import RECIPES


def from_json(text):
    return from_plain(TrainConfig, json.loads(text))


@pytest.mark.parametrize("name", ["stop-vith14", "stop-vitl16", "data2vec-vitb16"])
def test_json_gives_back_every_field_with_its_type(name):
    config = dataclasses.replace(RECIPES[name](), out="runs/a", seed=3, stop_after_steps=9)
    again = from_json(to_json(config))
    assert again == config
    for group in dataclasses.fields(config):
        before, after = getattr(config, group.name), getattr(again, group.name)
        for field in dataclasses.fields(before) if dataclasses.is_dataclass(before) else ():
            kinds = type(getattr(before, field.name)), float
            assert type(getattr(after, field.name)) in kinds, field.name


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
    ("group", "field", "value"),
    [
        ("optim", "lr", math.inf),
        ("optim", "final_lr", math.nan),
        ("optim", "warmup_epochs", 301.0),
        ("optim", "betas", (0.9, 1.0)),
        ("optim", "clip_gradient_norm", 0.0),
        ("optim", "ema_final", 1.1),
        ("speed", "precision", "fp16"),
        ("speed", "batch_size_per_device", 0),
        ("probe", "batch_size", 1),
        ("probe", "neighbours", 5000),
        ("checkpoint", "keep", 0),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(group, field, value):
    config = getattr(TrainConfig(), group)
    # Set afterwards: the type checks of the tests, which users do not have, would refuse some at once.
    object.__setattr__(config, field, value)
    with pytest.raises(InputError) as error:
        config.__post_init__()
    assert str(error.value).startswith(f"{group}.{field} is {value}: ")


def test_a_bad_number_of_steps_is_refused():
    with pytest.raises(InputError, match="stop_after_steps is 0"):
        TrainConfig(stop_after_steps=0)
