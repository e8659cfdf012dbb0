"""Other implementations of I-JEPA at our sizes; the rows of performance.py measure them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from stop_mim.benchmark.flops import TokenCounts
from stop_mim.masking import Masks
from stop_mim.models.encoder import SIZES, Dimensions
from stop_mim.training.config import EncoderConfig, TrainConfig

CONTENDERS = {
    "plain": "plain_ijepa:plain_contender",
    "lightly": "lightly_ijepa:lightly_contender",
    "stable-pretraining": "stable_pretraining_ijepa:stable_pretraining_contender",
}


@dataclass(frozen=True)
class Setting:
    """The sizes that every implementation gets."""

    config: TrainConfig
    device: torch.device
    counts: TokenCounts
    per_device: int
    autocast: AbstractContextManager[Any]


@dataclass(frozen=True)
class Contender:
    """The training step of another implementation."""

    step: Callable[[Sequence[tuple[Tensor, Masks]]], tuple[int, int]]
    """Takes a step on some batches; returns the context and target tokens per image."""
    collate: Callable[[], Masks] | None
    """Returns its own masks for a batch, on the CPU; None: it draws them in its step and ignores the given ones."""
    note: str = ""
    """A remark on its numbers."""


def make_contender(name: str, setting: Setting) -> Contender:
    """Build the implementation of this name; ImportError if its package is not installed."""
    return resolve_name(CONTENDERS[name])(setting)


def encoder_dimensions(config: EncoderConfig) -> Dimensions:
    """Return width, depth, heads and MLP ratio of the encoder."""
    given = {name: getattr(config, name) for name in ("width", "depth", "heads") if getattr(config, name) is not None}
    return replace(SIZES[config.size], **given)
