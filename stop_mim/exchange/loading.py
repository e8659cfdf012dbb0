"""Any encoder by its name: our own, the releases', timm's and Hugging Face's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from stop_mim.errors import InputError
from stop_mim.exchange.hub_folder import read_config, read_hub_folder
from stop_mim.exchange.hub_names import from_hub, is_convertible
from stop_mim.exchange.pickles import read_pickle
from stop_mim.exchange.released import PARTS, Part, is_release, is_state, released_encoder, state_of
from stop_mim.exchange.timm_folder import read_timm_folder
from stop_mim.exchange.timm_names import encoder_from_timm_names
from stop_mim.models.encoder import (
    ENCODER_FILE,
    FILE_FORMAT,
    Encoder,
    FrozenEncoder,
    encoder_of,
    load_timm_encoder,
    misfit,
    read_encoder,
    read_safetensors,
)
from stop_mim.models.hub_encoder import load_hub_encoder
from stop_mim.training.build import build_encoder
from stop_mim.training.checkpoint import FILE_FORMAT as CHECKPOINT_FORMAT
from stop_mim.training.checkpoint import read_checkpoint
from stop_mim.training.run_folder import RunFolder

SAFETENSORS, TIMM, HUB = ".safetensors", "timm:", "hf:"
# Under one of these, or by themselves, lie the weights of a model that is no checkpoint of the releases.
STATES = ("model", "state_dict")
KNOWN = (
    "a run's folder, a .safetensors file, a .pth.tar file of a release, a folder of timm's or Hugging Face's, timm:MODEL or "
    "hf:MODEL"
)


def load_encoder(name: str | Path, pretrained: bool = True) -> FrozenEncoder:
    """An encoder by name, in evaluation mode: a run, one of its checkpoints, a file or folder of others, timm: or hf:.

    Called with images (B, 3, H, W), normalised with its `mean` and `std`, it gives normed patch tokens (B, N, D);
    `embed(images, layers)` gives average-pooled features (B, layers · D). Of a release's file it is the target encoder;
    FILE#encoder is the other one.
    """
    text = str(name)
    if text.startswith(TIMM):
        return load_timm_encoder(text.removeprefix(TIMM), pretrained)
    if text.startswith(HUB):
        hub = load_hub_encoder(text.removeprefix(HUB), pretrained)
        return from_hub(hub) if is_convertible(hub.model.config.to_dict()) else hub
    path, part = split_part(name)
    if not path.exists():
        raise InputError(f"There is no encoder '{name}': give {KNOWN}.")
    if path.is_dir():
        return _from_folder(path)
    return _from_safetensors(path) if path.suffix == SAFETENSORS else _from_pickle(path, part)


def split_part(name: str | Path) -> tuple[Path, Part | None]:
    """The file, and the part of it that a name such as FILE#encoder asks for."""
    path, (file, _, part) = Path(name).expanduser(), str(name).rpartition("#")
    if path.exists() or part not in PARTS:
        return path, None
    return Path(file).expanduser(), "encoder" if part == "encoder" else "target_encoder"


def _from_folder(folder: Path) -> FrozenEncoder:
    if (folder / ENCODER_FILE).exists():
        return read_encoder(folder)
    config = read_config(folder)
    if "architecture" in config:
        return read_timm_folder(folder)
    if "model_type" in config:
        return read_hub_folder(folder) if is_convertible(config) else load_hub_encoder(str(folder))
    raise InputError(f"{folder} holds no {ENCODER_FILE}: name the folder of a run that has saved a checkpoint.")


def _from_safetensors(path: Path) -> Encoder:
    if is_checkpoint(path):
        return _target_of(path)
    tensors, metadata = read_safetensors(path)
    if metadata.get("format") == FILE_FORMAT:
        return encoder_of(tensors, metadata, path)
    return encoder_from_timm_names(tensors, str(path))


def _from_pickle(path: Path, part: Part | None) -> Encoder:
    contents = read_pickle(path)
    if part is not None or is_release(contents):
        return released_encoder(contents, path, part or "target_encoder")
    return encoder_from_timm_names(_plain_state(contents, path), str(path))


def _plain_state(contents: Any, path: Path) -> Mapping[str, Tensor]:
    for name in STATES:
        if isinstance(contents, Mapping) and isinstance(contents.get(name), Mapping):
            return state_of(contents, name, path)
    if is_state(contents) and contents:
        return contents
    raise InputError(f"{path} holds no weights by name: give {KNOWN}.")


def is_checkpoint(path: Path) -> bool:
    """Whether a file of safetensors is a checkpoint of a run."""
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("format") == CHECKPOINT_FORMAT
    except (SafetensorError, OSError):
        return False


def _target_of(path: Path) -> Encoder:
    """The target encoder in a checkpoint, or the encoder of an objective without one; the run tells how it is built."""
    run = RunFolder(path.parent.parent)
    if not run.config_file.exists():
        raise InputError(f"{path} lies outside of its run: put it back into the run's folder 'checkpoints'.")
    encoder, tensors = build_encoder(run.config().encoder), read_checkpoint(path).tensors
    found: dict[str, Tensor] = {}
    for prefix in ("model.encoder.", "model.target."):
        found = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)} or found
    if wrong := misfit(found, encoder.state_dict()):
        raise InputError(f"{path} does not fit the config.json of its run ({wrong}): restore that file.")
    encoder.load_state_dict(found, strict=True)
    return encoder.eval()
