"""Configurations of new runs in files: a run's config.json, or YAML that names the fields that it changes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from stop_mim.errors import InputError, first_line
from stop_mim.files import require_regular
from stop_mim.records import from_plain
from stop_mim.training.config import TrainConfig, flat
from stop_mim.training.derived import following
from stop_mim.training.recipes import find_recipe


def read_config(path: Path) -> TrainConfig:
    """Return the configuration in a JSON or YAML file, for a new run.

    The file has the layout of a run's config.json; fields that it leaves out come from the recipe that it names
    (`recipe: stop-photos`), or the defaults. The `out` and `stop_after_steps` of another run are ignored.
    """
    require_regular(path)
    try:
        text = path.read_text()
        plain = dict(json.loads(text) if path.suffix == ".json" else yaml.load(text, _NoAliases) or {})
        base = find_recipe(plain.pop("recipe")) if "recipe" in plain else TrainConfig()
        config = from_plain(TrainConfig, plain, base=following(base, dict(flat(plain))))
    # A file that is nested too deeply is a RecursionError.
    except (ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
        raise InputError(
            f"{path} cannot be read as a configuration ({first_line(error).rstrip('.')}): correct it."
        ) from error
    return replace(config, out=None, stop_after_steps=None) if path.name == "config.json" else config


class _NoAliases(yaml.SafeLoader):
    """YAML without aliases: a few lines of them can stand for billions of values."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias (*NAME) is not read in configurations")
        return super().compose_node(parent, index)


def run_name(path: Path) -> str:
    """Return what a run of this file is named after: the run directory of a config.json, or the file."""
    return path.absolute().parent.name if path.name == "config.json" else path.stem
