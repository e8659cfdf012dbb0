"""The .pth.tar files of the I-JEPA and StoP releases: encoder, target encoder and predictor of one training run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from stop_mim.errors import InputError
from stop_mim.exchange.pickles import read_pickle
from stop_mim.exchange.timm_names import encoder_from_timm_names
from stop_mim.models.encoder import SIZES, Encoder, EncoderSize, misfit
from stop_mim.models.ijepa import IJEPA
from stop_mim.models.predictor import Predictor
from stop_mim.positions import SinCosPositions, StochasticPositions
from stop_mim.training.build import build_ijepa
from stop_mim.training.config import EncoderConfig, PositionsConfig, PredictorConfig, TrainConfig

Part = Literal["encoder", "target_encoder"]
PARTS: tuple[Part, ...] = ("encoder", "target_encoder")
PARALLEL = "module."
PREDICTOR_NAMES = {
    "projection": "predictor_embed",
    "blocks": "predictor_blocks",
    "norm": "predictor_norm",
    "head": "predictor_proj",
}
TABLE = "predictor_pos_embed"
# Both tables are computed in double precision and rounded once; half-precision files round again.
TABLE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class ReleasedModel:
    """A whole model of the releases: the configuration that builds it here, and its weights under our names."""

    config: TrainConfig
    tensors: dict[str, Tensor]
    table: Float[Tensor, "n_patches width"]
    """The predictor's positions as the file has them."""

    def build(self) -> IJEPA:
        """The objective with these weights, and with the file's own table of positions should it differ from ours."""
        objective = build_ijepa(self.config)
        objective.load_state_dict(self.tensors, strict=True)
        if not self.has_our_positions(objective):
            positions = objective.predictor.positions
            base = positions.base if isinstance(positions, StochasticPositions) else positions
            assert isinstance(base, SinCosPositions)
            base._table.copy_(self.table)
        return objective

    def has_our_positions(self, objective: IJEPA) -> bool:
        """Whether the file's positions are those that the objective computes, to rounding."""
        table = objective.predictor.positions.table().detach().cpu()
        return table.shape == self.table.shape and torch.allclose(table, self.table, atol=TABLE_TOLERANCE)


def is_release(contents: Any) -> bool:
    """Whether a pickle holds what the releases' training scripts save."""
    return isinstance(contents, Mapping) and any(isinstance(contents.get(part), Mapping) for part in PARTS)


def released_encoder(contents: Any, path: Path, part: Part = "target_encoder") -> Encoder:
    """One of the two encoders of a file that was read already."""
    return encoder_from_timm_names(state_of(contents, part, path), f"{path}#{part}")


def load_released_model(path: Path, positions: PositionsConfig | None = None) -> ReleasedModel:
    """The whole model of a file; whether it was trained with stochastic positions is not in it: say it with `positions`.

    Not given, they are I-JEPA's; the StoP release's are PositionsConfig(convention="release").
    """
    return released_model(read_pickle(path), path, positions or PositionsConfig(kind="sincos"))


def released_model(contents: Any, path: Path, positions: PositionsConfig) -> ReleasedModel:
    """The whole model of a file that was read already."""
    if not is_release(contents):
        raise InputError(f"{path} is no checkpoint of the I-JEPA or StoP release: it holds no 'target_encoder'.")
    encoders = {part: released_encoder(contents, path, part) for part in PARTS}
    encoder, target = encoders["encoder"], encoders["target_encoder"]
    if encoder.architecture() != target.architecture():
        raise InputError(f"{path} has an encoder and a target encoder of different shapes: download it again.")
    predictor = state_of(contents, "predictor", path)
    config = TrainConfig(
        data="", encoder=_encoder_config(encoder), predictor=_predictor_config(predictor, path), positions=positions
    )
    with torch.device("meta"):
        expected = build_ijepa(config).predictor
    if wrong := misfit(predictor, _their_names(expected)):
        raise InputError(f"{path}#predictor does not fit its encoder: of its weights are {wrong}.")
    copies = {name: tensor.to(torch.float32, copy=True) for name, tensor in predictor.items()}
    tensors = {
        f"predictor.{name}": copies[_their_name(name)].view(t.shape) for name, t in expected.state_dict().items()
    }
    tensors |= {f"encoder.vit.{name}": tensor for name, tensor in encoder.vit.state_dict().items()}
    tensors |= {f"target.vit.{name}": tensor for name, tensor in target.vit.state_dict().items()}
    return ReleasedModel(config, tensors, copies[TABLE][0])


def is_state(value: Any) -> TypeGuard[Mapping[str, Tensor]]:
    """Whether it is tensors by name."""
    return isinstance(value, Mapping) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in value.items())


def state_of(contents: Any, part: str, path: Path) -> dict[str, Tensor]:
    """The weights of one part, without the prefix that training on several devices leaves."""
    state = contents.get(part) if isinstance(contents, Mapping) else None
    if not is_state(state):
        has = ", ".join(map(str, list(contents)[:8])) if isinstance(contents, Mapping) else "no names at all"
        raise InputError(f"{path} holds no weights under '{part}': it has {has}; an encoder of it is {path}#encoder.")
    if state and all(name.startswith(PARALLEL) for name in state):
        return {name.removeprefix(PARALLEL): tensor for name, tensor in state.items()}
    return dict(state)


def _their_names(predictor: Predictor) -> dict[str, Tensor]:
    """What the releases store of a predictor of this make."""
    tensors = {_their_name(name): tensor for name, tensor in predictor.state_dict().items()}
    return tensors | {"mask_token": predictor.mask_token[None, None], TABLE: predictor.positions.table()[None]}


def _their_name(name: str) -> str:
    place, dot, rest = name.partition(".")
    return PREDICTOR_NAMES.get(place, place) + dot + rest


def _encoder_config(encoder: Encoder) -> EncoderConfig:
    size = next(name for name in get_args(EncoderSize) if SIZES[name].width == encoder.dim)
    depth = None if encoder.depth == SIZES[size].depth else encoder.depth
    return EncoderConfig(size, encoder.image_size, encoder.patch_size[0], depth=depth)


def _predictor_config(predictor: Mapping[str, Tensor], path: Path) -> PredictorConfig:
    weight = predictor.get("predictor_embed.weight")
    if weight is None or weight.dim() != 2:
        raise InputError(f"{path}#predictor has no predictor_embed.weight: download it again.")
    blocks = {name.split(".")[1] for name in predictor if name.startswith("predictor_blocks.")}
    return PredictorConfig(width=weight.shape[0], depth=max(1, len(blocks)))
