"""How large the runs of a sweep are: the recipe they vary, what of it is reduced, and how they are probed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from stop_mim.errors import InputError
from stop_mim.sweeps.config import SweepConfig
from stop_mim.sweeps.grid import with_overrides
from stop_mim.sweeps.probe import Probe
from stop_mim.training.config import TrainConfig
from stop_mim.training.recipes import find_recipe


@dataclass(frozen=True)
class Scale:
    """A recipe as the runs of a sweep use it."""

    name: str
    summary: str
    recipe: str
    overrides: Mapping[str, Any]
    probe: Probe
    shown: tuple[str, ...]
    """The scores that the table shows; the summary's files have all."""


SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            "demo",
            "the demo's model on 2,000 scenes, 1,500 steps of the demo's 2,618",
            "demo",
            {
                "data": "scenes:count=2000,size=64",
                "optim.epochs": 12,
                "optim.warmup_epochs": 1.2,
                "log.every_steps": 25,
                "log.health_every_steps": 250,
                "log.tensorboard": False,
                "checkpoint.every_steps": 250,
                "checkpoint.keep": 1,
            },
            Probe("scenes", "scenes:count=1000,size=64", "scenes:count=10000,size=64"),
            ("count/linear/top1", "distance/linear/top1"),
        ),
        Scale(
            "tiny-imagenet",
            "ViT-S/8 on 64x64 images, 20 epochs of the recipe's 100",
            "stop-tiny-imagenet",
            {"optim.epochs": 20, "optim.warmup_epochs": 2.0, "checkpoint.keep": 1},
            Probe("labelled", "", tasks=("linear", "knn", "low-shot"), standardise=(True,), layers=(1,)),
            ("linear/top1", "knn/top1@20", "low-shot/1%/top1"),
        ),
        Scale(
            "imagenet",
            "ViT-B/16, 300 epochs as in the paper's ablations, probed with 1% of the labels",
            "stop-vitb16",
            {"optim.epochs": 300, "checkpoint.keep": 1, "checkpoint.milestone_every_epochs": None},
            Probe("labelled", "", tasks=("low-shot",), layers=(1,)),
            ("low-shot/1%/top1",),
        ),
    )
}


def find_scale(name: str) -> Scale:
    """The scale of that name."""
    if name not in SCALES:
        raise InputError(f"There is no scale '{name}': choose one of {', '.join(SCALES)}.")
    return SCALES[name]


def base_config(scale: Scale, config: SweepConfig) -> TrainConfig:
    """The run that all variants vary."""
    base = with_overrides(find_recipe(scale.recipe), scale.overrides)
    if config.data:
        base = replace(base, data=config.data)
    if config.epochs is not None:
        if config.epochs < 1:
            raise InputError(f"epochs is {config.epochs}: give a number above zero.")
        warmup = base.optim.warmup_epochs * config.epochs / base.optim.epochs
        base = replace(base, optim=replace(base.optim, epochs=config.epochs, warmup_epochs=warmup))
    return replace(base, speed=config.speed)


def probe_of(scale: Scale, config: SweepConfig) -> Probe:
    """The probes, on the data that were asked for."""
    if scale.probe.kind == "scenes":
        given = config.probe_data or config.test_data or config.low_shot_list
        if given:
            raise InputError(f"The scale {scale.name} has probes of its own: leave '{given}' out.")
        return scale.probe
    list_file = None if config.low_shot_list is None else str(config.low_shot_list)
    return replace(scale.probe, data=config.probe_data or config.data, test_data=config.test_data, list_file=list_file)


def shown_scores(scale: Scale, probe: Probe) -> tuple[str, ...]:
    """The scores that the table shows; few labels from a list go by that name."""
    if probe.list_file is None:
        return scale.shown
    return tuple("low-shot/list/top1" if name.startswith("low-shot/") else name for name in scale.shown)
