"""Scales of sweeps: the recipe that the runs vary, what is reduced in it, and how the encoders are evaluated."""

from collections.abc import Callable
from dataclasses import dataclass

from stop_mim.registry import Registry
from stop_mim.sweeps.grid import Overrides


@dataclass(frozen=True)
class Scale:
    """A recipe as the runs of a sweep use it."""

    recipe: str
    overrides: Overrides
    evaluate: tuple[str, ...]
    """Options of `stop-mim evaluate`; without --data, the images of the sweep's options are used."""
    shown: tuple[str, ...] = ()
    """Scores that the tables show, where they are measured; default: all."""


# With labels drawn at random, and with labels of a list.
LOW_SHOT = ("low-shot/1%/top1", "low-shot/list/top1")

SCALES: Registry[Callable[[], Scale]] = Registry("scale")


@SCALES.register("demo")
def demo() -> Scale:
    """The demo's model on 2,000 scenes, 1,500 steps of the demo's 2,618."""
    return Scale(
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
        (
            *("--task", "clevr", "--data", "scenes:count=1000,size=64", "--test-data", "scenes:count=10000,size=64"),
            *("--linear.standardise", "True", "--linear.layers", "1"),
        ),
        ("count/clevr/top1", "distance/clevr/top1"),
    )


@SCALES.register("tiny-imagenet")
def tiny_imagenet() -> Scale:
    """ViT-S/8 on 64x64 images, 54 epochs of the recipe's 280; four seeds decide half a point of linear probing."""
    return Scale(
        "stop-tiny-imagenet",
        {"optim.epochs": 54, "optim.warmup_epochs": 5.0, "checkpoint.keep": 1},
        (
            *("--task", "linear", "knn", "low-shot", "--low-shot.amounts", "1%"),
            *("--linear.standardise", "True", "--linear.layers", "1"),
        ),
        ("linear/top1", "knn/neighbours=20/top1", *LOW_SHOT),
    )


@SCALES.register("imagenet")
def imagenet() -> Scale:
    """ViT-B/16, 300 epochs as in the paper's ablations, probed with 1% of the labels."""
    return Scale(
        "stop-vitb16",
        {"optim.epochs": 300, "checkpoint.keep": 1, "checkpoint.milestone_every_epochs": None},
        ("--task", "low-shot", "--low-shot.amounts", "1%", "--low-shot.total-penalty", "0.0025"),
        LOW_SHOT,
    )
