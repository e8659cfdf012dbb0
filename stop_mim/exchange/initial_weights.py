"""Initial weights of a new run, from a whole model or from an encoder; optimiser and schedules start anew."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from timm.layers import Attention
from torch import Tensor, nn

from stop_mim.errors import InputError
from stop_mim.exchange.importing import is_release, read_pickle, released_model
from stop_mim.exchange.loading import load_encoder, locate, objective_of
from stop_mim.models.data2vec import Data2Vec
from stop_mim.models.encoder import Encoder
from stop_mim.models.encoder_file import ENCODER_FILE, misfit, peculiarity
from stop_mim.models.kernels.short_attention import ShortAttention
from stop_mim.models.objective import Objective
from stop_mim.positions import Positions, StochasticPositions
from stop_mim.training.run_folder import RunFolder

# Position tables may have been stored in half precision.
POSITIONS_TOLERANCE = 1e-3


def initialise(objective: Objective, name: str | Path, warn: Callable[[str], None] = lambda text: None) -> str:
    """Load weights into a new objective, all or none; return a short description of what was loaded.

    A run directory, a checkpoint or a release's file is a whole model, which must have the same shapes. Any other name that
    `load_encoder` takes, such as RUN#encoder, FILE#encoder or RUN/encoder.safetensors, is an encoder; the predictor then keeps
    its random weights.
    """
    path, part, kind, _ = locate(name)
    match kind:
        # A run that was copied without its checkpoints is an encoder.
        case "run" | "checkpoint" if part is None and (kind == "checkpoint" or (path / "checkpoints").is_dir()):
            checkpoint = path if kind == "checkpoint" else RunFolder(path).newest_checkpoint()
            if checkpoint is None:
                raise InputError(
                    f"{path} has no checkpoint: give {path / ENCODER_FILE} to start from its encoder alone."
                )
            return _from_checkpoint(objective, checkpoint)
        case "pickle" if part is None and is_release(contents := read_pickle(path)):
            if hint := _hint_about_release(objective.positions, path):
                warn(hint)
            return _from_release(objective, contents, path)
    return _from_encoder(objective, name)


def _from_checkpoint(objective: Objective, path: Path) -> str:
    model = objective_of(path)
    encoder_file = RunFolder(path.parent.parent).encoder_file
    remedy = f"start from its encoder alone, {encoder_file}, or choose a recipe of its shape"
    _require_fit(objective, model.state_dict(), _heads(model), path, remedy)
    objective.load_state_dict(model.state_dict(), strict=True)
    return f"all weights of {path}"


def _from_release(objective: Objective, contents: Mapping[str, object], path: Path) -> str:
    tensors, positions, heads = released_model(contents, path)
    remedy = f"start from an encoder alone, {path}#target_encoder, or choose a recipe of its shape"
    _require_fit(objective, tensors, dict.fromkeys(_heads(objective), heads), path, remedy)
    # Positions are not stored in checkpoints: a resumed run would lose a table that differs from ours.
    ours = objective.positions.table().detach().cpu()[None]
    if (
        positions is None
        or positions.shape != ours.shape
        or not torch.allclose(ours, positions.float(), atol=POSITIONS_TOLERANCE)
    ):
        raise InputError(f"{path}#predictor has other positions than this run; {remedy}.")
    objective.load_state_dict(tensors, strict=True)
    return f"all weights of {path}"


def _hint_about_release(positions: Positions, path: Path) -> str | None:
    """Return a hint if masked tokens follow the paper: a file of StoP's code, which cannot be told apart, has others."""
    if not isinstance(positions, StochasticPositions) or positions.convention == "release":
        return None
    ratio = positions.noise_std / positions.sigma if positions.sigma else 1.0
    noise = (
        "" if ratio == 1 else f" and the noise is {ratio:.3g} times that of a standard deviation of {positions.sigma:g}"
    )
    return (
        f"If {path} was trained with StoP's code, its mask token, which was never trained, comes into use{noise}: add "
        "--positions.convention release to go on as it was trained."
    )


def _require_fit(
    objective: Objective, tensors: dict[str, Tensor], theirs: Mapping[str, int], origin: Path, remedy: str
) -> None:
    """Raise InputError unless the weights and the numbers of heads fit the objective."""
    if wrong := misfit(tensors, objective.state_dict()):
        raise InputError(f"{origin} does not fit this run: {wrong}; {remedy}.")
    for name, heads in _heads(objective).items():
        if theirs[name] != heads:
            raise InputError(
                f"{origin} does not fit this run: {name} has {theirs[name]} heads there and {heads} here; {remedy}."
            )


def _heads(model: nn.Module) -> dict[str, int]:
    kinds = (Attention, ShortAttention)
    return {name: part.num_heads for name, part in model.named_modules() if isinstance(part, kinds)}


def _from_encoder(objective: Objective, name: str | Path) -> str:
    encoder, ours = load_encoder(name), objective.encoder
    if not isinstance(encoder, Encoder) or peculiarity(encoder):
        raise InputError(f"{name} is not a plain Vision Transformer: only those can be trained further.")
    theirs, wanted = _properties(encoder), _properties(ours)
    if wrong := [key for key in theirs | wanted if theirs.get(key) != wanted.get(key)]:
        listed = ", ".join(f"{key} is {theirs.get(key)} instead of {wanted.get(key)}" for key in wrong)
        raise InputError(
            f"{name} does not fit the encoder of this run: its {listed}; choose another one, or set the options of encoder "
            "to its values."
        )
    # The student computes its positions and the teacher reads them from the encoder; they must agree.
    if isinstance(objective, Data2Vec) and not torch.allclose(
        encoder.vit.pos_embed[0].cpu(), objective.positions.table().cpu(), atol=POSITIONS_TOLERANCE
    ):
        raise InputError(
            f"{name} has other positions than the sine-cosine ones of data2vec: choose another encoder or another "
            "objective.kind."
        )
    for part in (ours, objective.frozen):
        part.vit.load_state_dict(encoder.vit.state_dict(), strict=True)
    return f"the encoder of {name}; the predictor is new"


def _properties(encoder: Encoder) -> dict[str, Any]:
    """Return the properties that two encoders must share to exchange weights."""
    # The statistics of images may have been stored in single precision.
    channels = {name: [round(value, 6) for value in getattr(encoder, name)] for name in ("mean", "std")}
    return encoder.architecture() | {"norm_eps": encoder.norm_eps} | channels
