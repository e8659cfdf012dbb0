"""`load_encoder`: any encoder by its name: a run, a file, a model folder, `timm:`, `hf:` or `untrained:`."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from stop_mim.errors import InputError
from stop_mim.exchange.importing import (
    PARTS,
    Part,
    encoder_from_timm_names,
    from_hub,
    is_convertible,
    is_release,
    is_state,
    read_config,
    read_hub_folder,
    read_pickle,
    read_timm_folder,
    released_encoder,
    state_of,
)
from stop_mim.exchange.releases import MODEL_FILES, PUBLISHED, RELEASE, RELEASES, fetch_release
from stop_mim.files import read_safetensors
from stop_mim.hub import fetch, hub_or_cache
from stop_mim.models.build import build_encoder
from stop_mim.models.encoder import (
    ENCODER_FILE,
    FILE_FORMAT,
    Encoder,
    FrozenEncoder,
    encoder_of,
    load_timm_encoder,
    misfit,
)
from stop_mim.models.hub_encoder import load_hub_encoder
from stop_mim.registry import Registry
from stop_mim.results import UNTRAINED
from stop_mim.seeds import derive_seed
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


def load_encoder(name: str | Path, pretrained: bool = True) -> FrozenEncoder:
    """Load an encoder by name, in evaluation mode.

    Called with images (B, 3, H, W), normalised with its `mean` and `std`, it returns normed patch tokens (B, N, D);
    `embed(images, layers)` returns average-pooled features (B, layers · D).

    Args:
        name: a run directory, a checkpoint, a .safetensors or .pth file, a folder of timm or Hugging Face, `release:MODEL`
            or `stop-mim/MODEL` (see `stop-mim models`), `timm:MODEL`, `hf:MODEL` or `untrained:RUN`. Of a run, a
            checkpoint or a release's .pth.tar the target encoder; RUN#encoder or FILE#encoder is the other one, which
            gradients train.
        pretrained: False: random weights, for `release:`, `timm:` and `hf:`.
    """
    for prefix, load in ENCODERS.items():
        if str(name).startswith(prefix):
            return load(str(name).removeprefix(prefix), pretrained)
    return _from_path(*split_part(name), str(name))


def _from_path(path: Path, part: Part | None, name: str) -> FrozenEncoder:
    if part is not None and (path.is_dir() or path.suffix == SAFETENSORS):
        return _part_of_run(path, part)
    if path.is_dir():
        return _from_folder(path)
    # A pipe in its place would be waited for without end.
    if not path.is_file():
        raise InputError(f"There is no encoder '{name}': give {_known()}.")
    return _from_safetensors(path) if path.suffix == SAFETENSORS else _from_pickle(path, part)


@ENCODERS.register(RELEASE)
def _from_release(model: str, pretrained: bool) -> FrozenEncoder:
    if pretrained:
        return _from_path(*split_part(f"{RELEASE}{model}"), model)
    return build_encoder(RELEASES.find(model.partition("#")[0]).encoder).eval()


@ENCODERS.register(TIMM)
def _from_timm(model: str, pretrained: bool) -> Encoder:
    with hub_or_cache(f"{TIMM}{model}") if pretrained else nullcontext():
        return load_timm_encoder(model, pretrained)


@ENCODERS.register(HUB)
def _from_hub(model: str, pretrained: bool) -> FrozenEncoder:
    with hub_or_cache(f"{HUB}{model}") if not Path(model).exists() else nullcontext():
        hub = load_hub_encoder(model, pretrained)
    return from_hub(hub) if is_convertible(hub.model.config.to_dict()) else hub


@ENCODERS.register(UNTRAINED)
def _untrained(name: str, pretrained: bool) -> FrozenEncoder:
    """Return the encoder of a run with the weights that it started from, or another model with random weights."""
    if name.startswith(tuple(ENCODERS)):
        torch.manual_seed(0)
        return load_encoder(name, pretrained=False)
    config = RunFolder(Path(name).expanduser()).config()
    torch.manual_seed(derive_seed(config.seed, "weights"))
    return build_encoder(config.encoder).eval()


def split_part(name: str | Path) -> tuple[Path, Part | None]:
    """Return the file or folder of a name such as FILE#encoder, and the part of the file that it asks for.

    Released and published models are downloaded.
    """
    path, (file, _, asked) = Path(name).expanduser(), str(name).rpartition("#")
    part = next((part for part in PARTS if part == asked and not path.exists()), None)
    path = path if part is None else Path(file).expanduser()
    if str(path).startswith(RELEASE):
        return fetch_release(str(path).removeprefix(RELEASE)), part
    if str(path).startswith(PUBLISHED) and not path.exists():
        return fetch(str(path), MODEL_FILES), part
    return path, part


def run_of(name: str | Path) -> Path | None:
    """Return the run directory that an encoder belongs to; None if it is not a run's."""
    path = split_part(name)[0].resolve()
    if is_checkpoint(path):
        folder = path.parent.parent
    elif path.is_dir() or path.name == ENCODER_FILE:
        folder = path if path.is_dir() else path.parent
    else:
        return None
    run = RunFolder(folder)
    return folder if run.config_file.exists() and run.environment_file.exists() else None


def is_checkpoint(path: Path) -> bool:
    """Return whether a file, or a directory of shards, is a checkpoint of a run."""
    if path.suffix == SHARDED and path.is_dir():
        return True
    try:
        return read_safetensors(path, tensors=False)[1].get("format") == CHECKPOINT_FORMAT
    except (InputError, OSError):
        return False


def _known() -> str:
    prefixes = ", ".join(f"{prefix}NAME" for prefix in ENCODERS)
    return f"a run directory, a .safetensors or .pth.tar file, a folder of timm or Hugging Face, or {prefixes}"


def _from_folder(folder: Path) -> FrozenEncoder:
    if is_checkpoint(folder):
        return _from_checkpoint(folder)
    if (folder / ENCODER_FILE).exists():
        return _from_safetensors(folder / ENCODER_FILE)
    config = read_config(folder)
    if "architecture" in config:
        return read_timm_folder(folder)
    if "model_type" in config:
        return read_hub_folder(folder) if is_convertible(config) else load_hub_encoder(str(folder))
    raise InputError(f"{folder} holds no {ENCODER_FILE}: name a run directory that has saved a checkpoint.")


def _from_safetensors(path: Path) -> Encoder:
    if is_checkpoint(path):
        return _from_checkpoint(path)
    tensors, metadata = read_safetensors(path)
    if metadata.get("format") == FILE_FORMAT:
        return encoder_of(tensors, metadata, path)
    return encoder_from_timm_names(tensors, str(path))


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


def run_of_checkpoint(path: Path) -> RunFolder:
    """Return the run whose folder `checkpoints` a checkpoint is in."""
    run = RunFolder(path.parent.parent)
    if not run.config_file.exists():
        raise InputError(f"{path} is outside of its run: put it back into the run's folder 'checkpoints'.")
    return run


def _part_of_run(path: Path, part: Part) -> Encoder:
    """Return an encoder of a checkpoint, or of the newest one of a run."""
    file = RunFolder(path).newest_checkpoint() if path.is_dir() else path
    if file is None or not is_checkpoint(file):
        raise InputError(f"{path} has no checkpoint, and only checkpoints hold two encoders: leave #{part} out.")
    return _from_checkpoint(file, part)


def _from_checkpoint(path: Path, part: Part = "target_encoder") -> Encoder:
    """Return an encoder of a checkpoint; an objective without a target encoder has one for both parts."""
    encoder, tensors = build_encoder(run_of_checkpoint(path).config().encoder), read_checkpoint(path).tensors
    found: dict[str, Tensor] = {}
    for prefix in ("model.encoder.", "model.target.")[: 1 if part == "encoder" else 2]:
        found = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)} or found
    if wrong := misfit(found, encoder.state_dict()):
        raise InputError(f"{path} does not fit the config.json of its run ({wrong}): restore that file.")
    encoder.load_state_dict(found, strict=True)
    return encoder.eval()
