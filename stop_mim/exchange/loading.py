"""`load_encoder`: loads an encoder by name: a run, a file, a model folder, `timm:`, `hf:` or `untrained:`."""

import os
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Literal, NamedTuple

from stop_mim.errors import InputError
from stop_mim.exchange.importing import (
    CONFIG_FILE,
    PARTS,
    WEIGHTS_FILE,
    Part,
    is_convertible,
    is_release,
    is_state,
    load_timm_encoder,
    read_config,
    read_hub_folder,
    read_pickle,
    read_timm_folder,
    released_encoder,
    state_of,
)
from stop_mim.exchange.releases import MODEL_FILES, PUBLISHED, RELEASE, RELEASES, fetch_release
from stop_mim.files import read_safetensors, user_path
from stop_mim.hub import fetch, hub_or_cache
from stop_mim.models.build import build_encoder, build_objective
from stop_mim.models.encoder import Encoder, FrozenEncoder
from stop_mim.models.encoder_file import ENCODER_FILE, encoder_from_timm_names, misfit, read_encoder
from stop_mim.models.hub_encoder import load_hub_encoder, require_plain
from stop_mim.models.objective import Objective
from stop_mim.registry import Registry
from stop_mim.results import UNTRAINED
from stop_mim.seeds import derive_seed, seeded_weights
from stop_mim.training.checkpoint import FILE_FORMAT as CHECKPOINT_FORMAT
from stop_mim.training.checkpoint import SUFFIX as SHARDED
from stop_mim.training.checkpoint import read_checkpoint
from stop_mim.training.run_folder import RunFolder

SAFETENSORS, TIMM, HUB = ".safetensors", "timm:", "hf:"
# Keys under which training scripts other than the releases' save a model's weights.
STATES = ("model", "state_dict")

Loader = Callable[[str, bool], FrozenEncoder]
ENCODERS: Registry[Loader] = Registry("kind of encoder")
"""Loaders by prefix of the encoder's name; each takes the rest of the name and whether to load trained weights."""

Kind = Literal["run", "checkpoint", "safetensors", "pickle", "timm", "hub", "nothing"]


class Named(NamedTuple):
    """The file or folder that the name of an encoder refers to.

    - `part`: the encoder given as FILE#encoder or FILE#target_encoder; None: the default one.
    - `kind`: a run directory; a checkpoint of a run; another .safetensors file; a file of torch.save; a model folder of timm
      or of the Hugging Face hub; nothing, if the file does not exist.
    - `run`: the run directory that it belongs to, if any.
    """

    path: Path
    part: Part | None
    kind: Kind
    run: Path | None


def locate(name: str | Path) -> Named:
    """Return what the name of an encoder refers to; released and published models are downloaded."""
    path, (file, _, asked) = user_path(name), str(name).rpartition("#")
    part = next((part for part in PARTS if part == asked and not path.exists()), None)
    path = path if part is None else user_path(file)
    if str(path).startswith(RELEASE):
        path = fetch_release(str(path).removeprefix(RELEASE))
    elif str(path).startswith(PUBLISHED) and not path.exists():
        path = fetch(str(path), MODEL_FILES)
    kind = _kind(path)
    return Named(path, part, kind, _run_around(path.resolve(), kind))


def _kind(path: Path) -> Kind:
    if path.is_dir():
        if path.suffix == SHARDED:
            return "checkpoint"
        config = {} if (path / ENCODER_FILE).exists() else read_config(path)
        return "timm" if "architecture" in config else "hub" if "model_type" in config else "run"
    # Reading from a pipe may never end.
    if not path.is_file():
        return "nothing"
    if path.suffix != SAFETENSORS:
        return "pickle"
    is_checkpoint = read_safetensors(path, tensors=False)[1].get("format") == CHECKPOINT_FORMAT
    return "checkpoint" if is_checkpoint else "safetensors"


def _run_around(path: Path, kind: Kind) -> Path | None:
    match kind:
        case "run":
            folder = path
        case "checkpoint":
            folder = path.parent.parent
        case _ if path.name == ENCODER_FILE:
            folder = path.parent
        case _:
            return None
    run = RunFolder(folder)
    return folder if run.config_file.exists() and run.environment_file.exists() else None


def run_of(name: str | Path) -> Path | None:
    """Return the run directory that an encoder belongs to; None if it is not part of a run."""
    return None if str(name).startswith(tuple(ENCODERS)) else locate(name).run


def load_encoder(name: str | Path, pretrained: bool = True) -> FrozenEncoder:
    """Load an encoder by name, in evaluation mode.

    Called with images (B, 3, H, W), normalised with its `mean` and `std`, it returns normed patch tokens (B, N, D);
    `embed(images, layers)` returns average-pooled features (B, layers · D).

    Args:
        name: a run directory, a checkpoint, a .safetensors or .pth file, a folder of timm or Hugging Face, `release:MODEL`
            or `stop-mim/MODEL` (see `stop-mim models`), `timm:MODEL`, `hf:MODEL` or `untrained:RUN`. A run, a checkpoint
            or a release's .pth.tar gives the target encoder; add #encoder for the encoder trained by gradients.
        pretrained: False initialises `release:`, `timm:` and `hf:` models with random weights.
    """
    for prefix, load in ENCODERS.items():
        if str(name).startswith(prefix):
            return load(str(name).removeprefix(prefix), pretrained)
    return _load(locate(name), str(name))


def _load(named: Named, name: str) -> FrozenEncoder:
    path, part = named.path, named.part
    match named.kind:
        case "checkpoint":
            return _from_checkpoint(path, part)
        case "run" if part is not None and (newest := RunFolder(path).newest_checkpoint()) is not None:
            return _from_checkpoint(newest, part)
        case "pickle":
            return _from_pickle(path, part)
        case "nothing":
            raise InputError(f"There is no encoder '{name}': give {_known()}.")
        case _ if part is not None:
            raise InputError(f"{path} has no checkpoint, and only checkpoints hold two encoders: leave #{part} out.")
        case "timm":
            return read_timm_folder(path)
        case "hub":
            return _from_hub(str(path), pretrained=True)
        case "safetensors":
            return read_encoder(path)
        case "run" if not (path / ENCODER_FILE).exists():
            raise InputError(f"{path} has no {ENCODER_FILE}: give a run directory that has saved a checkpoint.")
        case "run":
            return read_encoder(path / ENCODER_FILE)


@ENCODERS.register(RELEASE)
def _from_release(model: str, pretrained: bool) -> FrozenEncoder:
    if pretrained:
        return _load(locate(f"{RELEASE}{model}"), model)
    return build_encoder(RELEASES.find(model.partition("#")[0]).encoder).eval()


@ENCODERS.register(TIMM)
def _from_timm(model: str, pretrained: bool) -> Encoder:
    with hub_or_cache(f"{TIMM}{model}") if pretrained else nullcontext():
        return load_timm_encoder(model, pretrained)


@ENCODERS.register(HUB)
def _from_hub(model: str, pretrained: bool) -> FrozenEncoder:
    """Return a model of transformers, as a timm model if it is a plain Vision Transformer in one safetensors file."""
    model = os.path.expanduser(model)
    is_local = Path(model).exists()
    if not is_local and not re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", model, re.ASCII):
        raise InputError(f"There is no folder '{model}': give {HUB} with a folder, or with OWNER/NAME of the hub.")
    with nullcontext() if is_local else hub_or_cache(f"{HUB}{model}"):
        if pretrained:
            folder = Path(model) if is_local else _fetch_plain(model)
            if is_convertible(read_config(folder)) and (folder / WEIGHTS_FILE).exists():
                return read_hub_folder(folder)
        return load_hub_encoder(model, pretrained)


def _fetch_plain(model: str) -> Path:
    """Return the folder of a model in the hub's cache; its config.json is checked before the weights are downloaded."""
    if not is_convertible(config := read_config(fetch(model, (CONFIG_FILE,)))):
        require_plain(config, model)
    return fetch(model, MODEL_FILES)


@ENCODERS.register(UNTRAINED)
def _untrained(name: str, pretrained: bool) -> FrozenEncoder:
    """Return the encoder of a run with its initial weights, or another model with random weights."""
    if name.startswith(tuple(ENCODERS)):
        with seeded_weights(0):
            return load_encoder(name, pretrained=False)
    run = RunFolder(user_path(name))
    if not run.config_file.exists() or _kind(run.path) != "run":
        raise InputError(
            f"'{name}' is not a run directory, and only runs, {TIMM}NAME, {HUB}NAME and {RELEASE}NAME have untrained "
            f"networks: give {UNTRAINED} with one of these."
        )
    config = run.config()
    with seeded_weights(derive_seed(config.seed, "weights")):
        return build_encoder(config.encoder).eval()


def _known() -> str:
    prefixes = ", ".join(f"{prefix}NAME" for prefix in ENCODERS)
    return f"a run directory, a .safetensors or .pth.tar file, a folder of timm or Hugging Face, or {prefixes}"


def _from_pickle(path: Path, part: Part | None) -> Encoder:
    contents = read_pickle(path)
    if part is not None or is_release(contents):
        return released_encoder(contents, path, part or "target_encoder")
    for name in STATES:
        if isinstance(contents, Mapping) and isinstance(contents.get(name), Mapping):
            return encoder_from_timm_names(state_of(contents, name, path), str(path))
    if is_state(contents) and contents:
        return encoder_from_timm_names(contents, str(path))
    raise InputError(f"{path} holds no weights by name: give {_known()}.")


def objective_of(checkpoint: Path) -> Objective:
    """Return the model of a checkpoint in evaluation mode, built from the config of the run that the checkpoint is in."""
    run, prefix = RunFolder(checkpoint.parent.parent), "model."
    if not run.config_file.exists():
        raise InputError(
            f"{checkpoint} is not in its run directory: move it back into the folder 'checkpoints' of its run."
        )
    objective, stored = build_objective(run.config()), read_checkpoint(checkpoint).tensors
    tensors = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}
    if wrong := misfit(tensors, objective.state_dict()):
        raise InputError(f"{checkpoint} does not fit the config.json of its run ({wrong}): restore that file.")
    objective.load_state_dict(tensors, strict=True)
    return objective.eval()


def _from_checkpoint(path: Path, part: Part | None) -> Encoder:
    """Return an encoder of a checkpoint, by default the target encoder; some objectives have one encoder for both parts."""
    objective = objective_of(path)
    if part != "encoder":
        # The trained encoder's parameters have gradients, for fine-tuning; the target's have none.
        objective.encoder.load_state_dict(objective.frozen.state_dict())
    return objective.encoder
