"""Configurations: what is written is read again, every field is explained, and bad values are named."""

import ast
import dataclasses
import inspect
import json
import math
import typing

import pytest

from stop_mim.data import augment
from stop_mim.data.augment import AugmentConfig
from stop_mim.errors import InputError
from stop_mim.training import config as config_module
from stop_mim.training.config import (
    CheckpointConfig,
    EncoderConfig,
    LogConfig,
    MaskConfig,
    ObjectiveConfig,
    OptimConfig,
    PositionsConfig,
    PredictorConfig,
    ProbeConfig,
    SpeedConfig,
    TrainConfig,
    from_json,
    to_json,
)

GROUPS = {
    "objective": ObjectiveConfig,
    "encoder": EncoderConfig,
    "predictor": PredictorConfig,
    "positions": PositionsConfig,
    "masks": MaskConfig,
    "augment": AugmentConfig,
    "optim": OptimConfig,
    "speed": SpeedConfig,
    "log": LogConfig,
    "checkpoint": CheckpointConfig,
    "probe": ProbeConfig,
}

# Another value than the default for every field of every group.
OTHER = {
    "objective": {
        "kind": "data2vec",
        "target_layers": 6,
        "beta": 2.0,
        "norm_pixels": False,
        "target_resolution": "max",
        "l1_strength": 0.5,
    },
    "probe": {
        "data": "labelled",
        "label": "class",
        "batch_size": 64,
        "every_steps": 2,
        "score_every_steps": 50,
        "lr": 0.01,
        "neighbours": 10,
        "memory": 512,
        "test_images": 100,
    },
    "encoder": {
        "size": "tiny",
        "image_size": (64, 96),
        "patch_size": 8,
        "width": 48,
        "depth": 3,
        "heads": 2,
    },
    "predictor": {"width": 32, "depth": 2, "heads": 4},
    "positions": {
        "kind": "learned",
        "sigma": 0.5,
        "sigma_start": 0.1,
        "sigma_schedule": "cosine",
        "apply_to": "both",
        "covariance": "low_rank(2)",
        "convention": "release",
        "conditioned": True,
        "jitter_scale": 0.75,
        "jitter_learned": True,
    },
    "masks": {
        "kind": "random",
        "n_blocks": 2,
        "target_scale": (0.1, 0.3),
        "target_aspect": (0.5, 2.0),
        "context_scale": (0.8, 0.9),
        "context_aspect": (0.9, 1.1),
        "target_tokens": 3,
        "context_tokens": 5,
        "mask_ratio": 0.6,
        "compat": "release",
    },
    "augment": {
        "crop_scale": (0.2, 0.9),
        "crop_ratio": (0.5, 2.0),
        "flip_probability": 0.1,
        "blur_probability": 0.2,
        "blur_sigma": (0.2, 1.0),
        "grey_probability": 0.3,
        "jitter_probability": 0.4,
        "jitter_brightness": 0.1,
        "jitter_contrast": 0.2,
        "jitter_saturation": 0.3,
        "jitter_hue": 0.2,
    },
    "optim": {
        "epochs": 10,
        "batch_size": 64,
        "lr": 1e-3,
        "start_lr": 1e-5,
        "final_lr": 1e-6,
        "warmup_epochs": 2.5,
        "weight_decay": 0.1,
        "final_weight_decay": 0.2,
        "hold_after_epoch": 8.0,
        "betas": (0.8, 0.95),
        "clip_gradient_norm": 1.0,
        "ema_start": 0.9,
        "ema_final": 0.99,
    },
    "speed": {
        "device": "cpu",
        "precision": "bf16",
        "batch_size_per_device": 4,
        "loader": "streaming",
        "workers": 3,
        "decode": "cpu",
        "compile": True,
        "graph": False,
        "recompute": True,
    },
    "log": {"every_steps": 2, "health_every_steps": 3, "tensorboard": False},
    "checkpoint": {"every_steps": 5, "keep": 3, "milestone_every_epochs": 7},
}


def other_config() -> TrainConfig:
    groups = {name: kind(**OTHER[name]) for name, kind in GROUPS.items()}
    return TrainConfig(data="photos", out="runs/a", seed=3, stop_after_steps=9, **groups)


def test_the_groups_above_are_all_there_are():
    hints = typing.get_type_hints(TrainConfig)
    assert {name for name, kind in hints.items() if dataclasses.is_dataclass(kind)} == set(GROUPS)
    for name, kind in GROUPS.items():
        assert set(OTHER[name]) == {field.name for field in dataclasses.fields(kind)}
        assert all(getattr(kind(), field) != value for field, value in OTHER[name].items())


@pytest.mark.parametrize("config", [TrainConfig(), other_config()], ids=["defaults", "others"])
def test_json_gives_back_every_field_with_its_type(config):
    again = from_json(to_json(config))
    assert again == config
    for name in GROUPS:
        for field in dataclasses.fields(GROUPS[name]):
            before, after = getattr(getattr(config, name), field.name), getattr(getattr(again, name), field.name)
            assert type(after) in (type(before), float), field.name


def test_a_whole_number_in_the_place_of_a_float_becomes_one():
    text = json.dumps({"optim": {"warmup_epochs": 3, "hold_after_epoch": 4}})
    optim = from_json(text).optim
    assert (type(optim.warmup_epochs), type(optim.hold_after_epoch)) == (float, float)


def test_a_missing_field_gets_its_default():
    assert from_json("{}") == TrainConfig()
    assert from_json('{"optim": {"epochs": 20}}') == TrainConfig(optim=OptimConfig(epochs=20))


def test_a_configuration_from_before_there_were_other_objectives_is_i_jepas():
    old = json.loads(to_json(other_config()))
    del old["objective"]
    config = from_json(json.dumps(old))
    assert config.objective == ObjectiveConfig(kind="ijepa", target_layers=1, beta=1.0)
    assert dataclasses.replace(config, objective=other_config().objective) == other_config()


def test_an_unknown_field_is_refused_by_its_path():
    with pytest.raises(InputError, match=r"unknown field 'optim\.learning_rate'"):
        from_json('{"optim": {"learning_rate": 1}}')
    with pytest.raises(InputError, match="unknown field 'dataset'"):
        from_json('{"dataset": "photos"}')


def test_configurations_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().optim.lr = 1.0


@pytest.mark.parametrize("module", [config_module, augment], ids=["config", "augment"])
def test_every_field_has_a_docstring(module):
    tree = ast.parse(inspect.getsource(module))
    configs = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("Config")]
    assert {node.name for node in configs} == {
        name
        for name, thing in vars(module).items()
        if inspect.isclass(thing) and thing.__module__ == module.__name__
        if name.endswith("Config")
    }
    for node in configs:
        assert ast.get_docstring(node)
        for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
            # A group is explained by its own class.
            if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.annotation) not in vars(module):
                assert isinstance(following, ast.Expr), f"{node.name}.{ast.unparse(statement.target)}"
                assert isinstance(ast.literal_eval(following.value), str)


BAD = [
    ("objective", "target_layers", 0),
    ("objective", "beta", 0.0),
    ("objective", "beta", math.inf),
    ("encoder", "size", "medium"),
    ("encoder", "patch_size", 0),
    ("encoder", "width", 0),
    ("encoder", "depth", 0),
    ("encoder", "heads", -1),
    ("predictor", "heads", 0),
    ("predictor", "heads", -1),
    ("positions", "sigma", -0.1),
    ("positions", "sigma", math.nan),
    ("positions", "sigma_start", math.inf),
    ("positions", "sigma_schedule", "square"),
    ("positions", "apply_to", "all"),
    ("positions", "convention", "Paper"),
    ("positions", "jitter_scale", -0.5),
    ("positions", "jitter_scale", math.nan),
    ("masks", "compat", "paper"),
    ("masks", "target_tokens", 0),
    ("masks", "context_tokens", 0),
    ("augment", "crop_scale", (0.5, 0.2)),
    ("augment", "flip_probability", 1.5),
    ("optim", "epochs", 0),
    ("optim", "batch_size", 0),
    ("optim", "lr", 0.0),
    ("optim", "lr", math.inf),
    ("optim", "start_lr", -1.0),
    ("optim", "final_lr", math.nan),
    ("optim", "warmup_epochs", -1.0),
    ("optim", "warmup_epochs", 301.0),
    ("optim", "weight_decay", -0.1),
    ("optim", "final_weight_decay", -0.1),
    ("optim", "hold_after_epoch", -1.0),
    ("optim", "betas", (0.9, 1.0)),
    ("optim", "clip_gradient_norm", 0.0),
    ("optim", "ema_start", 1.1),
    ("optim", "ema_final", -0.1),
    ("speed", "precision", "fp16"),
    ("speed", "batch_size_per_device", 0),
    ("speed", "loader", "fast"),
    ("speed", "workers", -1),
    ("log", "every_steps", 0),
    ("log", "health_every_steps", 0),
    ("checkpoint", "every_steps", 0),
    ("checkpoint", "keep", 0),
    ("checkpoint", "milestone_every_epochs", 0),
]


@pytest.mark.parametrize(("group", "field", "value"), BAD)
def test_a_bad_value_is_refused_by_the_name_of_its_field(group, field, value):
    config = GROUPS[group]()
    # Set afterwards: the type checks of the tests, which users do not have, would refuse some at once.
    object.__setattr__(config, field, value)
    with pytest.raises(InputError) as error:
        config.__post_init__()
    assert str(error.value).startswith(f"{group}.{field} is {value}: ")


def test_a_bad_number_of_steps_is_refused():
    with pytest.raises(InputError, match="stop_after_steps is 0"):
        TrainConfig(stop_after_steps=0)
