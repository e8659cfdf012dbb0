"""`--compat`: a recipe as it is, as the releases' code trains, or as the paper's text describes it.

docs/method.md lists what differs, and which row of the paper's tables each stands for.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from stop_mim.errors import InputError

if TYPE_CHECKING:
    from stop_mim.training.config import TrainConfig

Compat = Literal["corrected", "release", "paper-text"]


def with_compat(config: "TrainConfig", compat: Compat) -> "TrainConfig":
    """Return the config with every field changed that `compat` stands for; "corrected" changes none."""
    if compat == "corrected":
        return config
    if config.objective.kind != "ijepa":
        raise InputError(
            f"compat is {compat}, which exists for I-JEPA and StoP alone, and the objective is {config.objective.kind}: "
            "leave it out."
        )
    positions, augment = config.positions, replace(config.augment, jitter_probability=0.0)
    if compat == "paper-text":
        plain = replace(augment, flip_probability=0.0, blur_probability=0.0, grey_probability=0.0)
        return replace(config, positions=replace(positions, sigma=0.25, convention="paper"), augment=plain)
    # I-JEPA's own release neither changes colours nor leaves out m̃, and it trains fixed positions only.
    is_stop = positions.kind == "stochastic"
    flip, blur, grey = (0.5, 0.5, 0.2) if is_stop else (0.0, 0.0, 0.0)
    return replace(
        config,
        encoder=replace(config.encoder, initialisation="release"),
        positions=replace(positions, convention="release") if is_stop else positions,
        masks=replace(config.masks, compat="release"),
        augment=replace(augment, flip_probability=flip, blur_probability=blur, grey_probability=grey),
        optim=replace(config.optim, decay_mask_token=True, ema_start=0.996),
    )
