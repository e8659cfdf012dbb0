"""The weights that a new run begins with: a whole model's, or an encoder's; optimiser and schedules are new."""

from collections.abc import Mapping
from pathlib import Path

import torch
from timm.layers import Attention
from torch import Tensor, nn

from stop_mim.errors import InputError
from stop_mim.exchange.loading import SAFETENSORS, is_checkpoint, load_encoder, split_part
from stop_mim.exchange.pickles import read_pickle
from stop_mim.exchange.released import is_release, released_model
from stop_mim.models.data2vec import Data2Vec
from stop_mim.models.encoder import ENCODER_FILE, Encoder, misfit
from stop_mim.models.ijepa import IJEPA
from stop_mim.models.objective import Objective
from stop_mim.training.build import build_objective
from stop_mim.training.checkpoint import read_checkpoint
from stop_mim.training.config import PositionsConfig, TrainConfig
from stop_mim.training.run_folder import RunFolder

SAME_POSITIONS = 1e-3
"""Half precision rounds positions by less."""


def initialise(objective: Objective, name: str | Path) -> str:
    """Give a new objective the weights of this name, all that it has or none; tells in a few words which they were.

    A run's folder, a checkpoint or a release's file is a whole model, which must be of the same make. Anything else that
    `load_encoder` takes, FILE#encoder and RUN/encoder.safetensors too, is an encoder: what predicts stays new.
    """
    path, part = split_part(name)
    if path.is_dir() and (path / "checkpoints").is_dir():
        return _from_checkpoint(objective, _newest(path))
    if path.is_file() and path.suffix == SAFETENSORS and is_checkpoint(path):
        return _from_checkpoint(objective, path)
    if path.is_file() and path.suffix != SAFETENSORS and part is None:
        contents = read_pickle(path)
        if is_release(contents):
            return _from_release(objective, contents, path)
    return _from_encoder(objective, name)


def _newest(run: Path) -> Path:
    newest = RunFolder(run).newest_checkpoint()
    if newest is None:
        raise InputError(f"{run} holds no checkpoint: name {run / ENCODER_FILE} to begin with its encoder alone.")
    return newest


def _from_checkpoint(objective: Objective, path: Path) -> str:
    run = RunFolder(path.parent.parent)
    if not run.config_file.exists():
        raise InputError(f"{path} lies outside of its run: put it back into the run's folder 'checkpoints'.")
    prefix = "model."
    tensors = {name: tensor for name, tensor in read_checkpoint(path).tensors.items() if name.startswith(prefix)}
    remedy = f"begin with its encoder alone, {run.encoder_file}, or choose a recipe of its make"
    tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    _require_fit(objective, tensors, run.config(), str(path), remedy)
    objective.load_state_dict(tensors, strict=True)
    return f"all weights of {path}"


def _from_release(objective: Objective, contents: Mapping[str, object], path: Path) -> str:
    model = released_model(contents, path, PositionsConfig(kind="sincos"))
    remedy = f"begin with an encoder alone, {path}#target_encoder, or choose a recipe of its make"
    _require_fit(objective, model.tensors, model.config, str(path), remedy)
    # The positions are computed anew whenever the run is continued: others than ours would be lost there.
    if isinstance(objective, IJEPA) and not model.has_our_positions(objective):
        raise InputError(f"{path}#predictor has other positions than this run, which it would unlearn; {remedy}.")
    objective.load_state_dict(model.tensors, strict=True)
    return f"all weights of {path}"


def _require_fit(
    objective: Objective, tensors: dict[str, Tensor], config: TrainConfig, origin: str, remedy: str
) -> None:
    with torch.device("meta"):
        theirs = build_objective(config)
    if wrong := misfit(tensors, objective.state_dict()):
        raise InputError(f"{origin} does not fit this run: of its weights are {wrong}; {remedy}.")
    for name, heads in _heads(theirs).items():
        if _heads(objective)[name] != heads:
            raise InputError(
                f"{origin} does not fit this run: {name} has {heads} heads there and {_heads(objective)[name]} here; {remedy}."
            )


def _from_encoder(objective: Objective, name: str | Path) -> str:
    encoder, ours = load_encoder(name), objective.encoder
    if not isinstance(encoder, Encoder):
        raise InputError(f"{name} is no plain Vision Transformer: only such encoders can be trained on.")
    if wrong := misfit(encoder.vit.state_dict(), ours.vit.state_dict()):
        raise InputError(
            f"{name} does not fit the encoder of this run: of its weights are {wrong}; choose encoder.size, "
            "encoder.image_size and encoder.patch_size as it has them."
        )
    for what in ("heads", "norm_eps", "mean", "std"):
        theirs, own = getattr(encoder, what), getattr(ours, what)
        if torch.tensor(theirs).sub(torch.tensor(own)).abs().max() > 1e-7:
            raise InputError(f"{name} does not fit the encoder of this run: its {what} is {theirs}, here it is {own}.")
    # Its student has positions of its own, which must be those that its teacher finds in the encoder.
    if isinstance(objective, Data2Vec) and not torch.allclose(
        encoder.vit.pos_embed[0].cpu(), objective.positions.table().cpu(), atol=SAME_POSITIONS
    ):
        raise InputError(
            f"{name} has other positions than the sine-cosine ones of data2vec: choose an encoder with those, or another "
            "objective.kind."
        )
    for part in (ours, objective.frozen):
        part.vit.load_state_dict(encoder.vit.state_dict(), strict=True)
    return f"the encoder of {name}; what predicts is new"


def _heads(model: nn.Module) -> dict[str, int]:
    return {name: part.num_heads for name, part in model.named_modules() if isinstance(part, Attention)}
