"""Encoders from files and model folders of timm, of Hugging Face, and of the I-JEPA and StoP releases."""

import difflib
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeGuard, get_args

import numpy as np
import timm
import torch
from timm.layers import PatchEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from stop_mim.data.augment import ChannelValues
from stop_mim.errors import InputError
from stop_mim.files import read_safetensors, require_regular
from stop_mim.models.encoder import Encoder, Preprocessing
from stop_mim.models.encoder_file import FILE_FORMAT, count_layers, encoder_from_timm_names, encoder_of, load_weights
from stop_mim.models.hub_encoder import read_hub_preprocessing
from stop_mim.records import from_plain, read_record

CONFIG_FILE, WEIGHTS_FILE, PREPROCESSOR_FILE = "config.json", "model.safetensors", "preprocessor_config.json"
# Arguments of timm.create_model: no classifier, and images of any size.
WITHOUT_CLASSIFIER: dict[str, Any] = {"num_classes": 0, "dynamic_img_size": True}

CONVERTIBLE = ("ijepa", "vit", "vit_mae")
# timm's names and Hugging Face's names.
WHOLE = {
    "patch_embed.proj.weight": "embeddings.patch_embeddings.projection.weight",
    "patch_embed.proj.bias": "embeddings.patch_embeddings.projection.bias",
    "pos_embed": "embeddings.position_embeddings",
    "cls_token": "embeddings.cls_token",
    "norm.weight": "layernorm.weight",
    "norm.bias": "layernorm.bias",
}
LAYER = {
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "attn.proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
QUERY, KEY, VALUE = (f"attention.attention.{part}" for part in ("query", "key", "value"))
# Task models have other parts, under any name.
ENCODER_PARTS, NOT_ENCODER = ("encoder.", "embeddings.", "layernorm."), "embeddings.mask_token"
NEEDED = {"num_attention_heads", "image_size", "layer_norm_eps"}

# The .pth.tar files of the releases hold an encoder, its target encoder and a predictor.
Part = Literal["encoder", "target_encoder"]
PARTS: tuple[Part, ...] = get_args(Part)
PARALLEL = "module."
# The releases' names of the predictor's parts, and ours.
PREDICTOR_PARTS = {
    "predictor_embed": "projection",
    "predictor_blocks": "blocks",
    "predictor_norm": "norm",
    "predictor_proj": "head",
}
# First bytes of files of torch.save: a zip archive, or a pickle of old versions.
TORCH_FILES = (b"PK", b"\x80\x02")
NO_WEIGHTS = (
    "is neither a file of torch.save (.pth, .pth.tar) nor a .safetensors file: give a file of weights, or a run"
)
SCALAR: Any = np.float64(0).__reduce__()[0]
# Old training scripts store losses and learning rates as NumPy scalars, whose constructor NumPy has since moved.
NUMBERS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (SCALAR, "numpy.core.multiarray.scalar"),
    (SCALAR, "numpy._core.multiarray.scalar"),
    (np.dtype, "numpy.dtype"),
    *(type(np.dtype(kind)) for kind in (np.float64, np.float32, np.float16, np.int64, np.int32, np.bool_)),
]


def read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of config.json in a folder; empty if there is none."""
    return _read_json(folder / CONFIG_FILE)


def load_timm_encoder(name: str, pretrained: bool = True) -> Encoder:
    """Return timm's Vision Transformer of this name."""
    if name.split(".")[0] not in timm.list_models():
        plain = timm.list_models("vit_*", module="vision_transformer")
        close = difflib.get_close_matches(name, plain, cutoff=0)
        raise InputError(f"timm has no model '{name}': choose another, such as {', '.join(close)}.")
    try:
        model = timm.create_model(name, pretrained=pretrained, **WITHOUT_CLASSIFIER)
    except TypeError:
        model = None
    except Exception as error:
        raise InputError(
            f"timm's weights of '{name}' cannot be loaded ({type(error).__name__}): check the name and the network, or "
            "download them first."
        ) from error
    return _of_timm(model, f"timm's '{name}'")


def read_timm_folder(folder: Path) -> Encoder:
    """Load a Vision Transformer from a folder in timm's hub format."""
    if not (file := folder / WEIGHTS_FILE).exists():
        raise InputError(f"{folder} holds no {WEIGHTS_FILE}: save the model there again, as one safetensors file.")
    tensors, metadata = read_safetensors(file)
    if metadata.get("format") == FILE_FORMAT:
        return encoder_of(tensors, metadata, str(file))
    arguments, layers = read_config(folder).get("model_args"), count_layers(tensors)
    # Checked first: building a model with a depth of millions would fill the memory.
    if isinstance(arguments, Mapping) and arguments.get("depth", layers) != layers:
        raise InputError(
            f"{folder / CONFIG_FILE} has a depth of {arguments['depth']}, but {file} has the weights of {layers} layers: "
            "restore both files."
        )
    try:
        with torch.device("meta"):
            model = timm.create_model(f"local-dir:{folder}", **WITHOUT_CLASSIFIER)
    # Each model class fails in its own way on a wrong config.json.
    except Exception as error:
        raise InputError(
            f"timm cannot build the model of {folder / CONFIG_FILE} ({error}): restore that file."
        ) from error
    encoder = _of_timm(model, str(folder))
    load_weights(encoder, tensors, str(file))
    return encoder


def _of_timm(model: Any, name: str) -> Encoder:
    """Return timm's model as an encoder, with timm's preprocessing."""
    if not isinstance(model, VisionTransformer):
        raise InputError(f"{name} is not a plain Vision Transformer: choose one of timm's vit_* models.")
    # Hybrid models embed patches with a convolutional network; parallel layers have no single attention.
    parts = [model.patch_embed, *model.blocks]
    plain = [type(model.patch_embed) is PatchEmbed, *(hasattr(block, "attn") for block in model.blocks)]
    if not all(plain):
        raise InputError(
            f"{name} has a {type(parts[plain.index(False)]).__name__}, which a plain Vision Transformer does not have: choose "
            "another of timm's vit_* models, such as vit_base_patch16_224."
        )
    stored = model.pretrained_cfg
    try:
        mean, std = (from_plain(ChannelValues, stored.get(value), value) for value in ("mean", "std"))
    except InputError as error:
        raise InputError(
            f"The preprocessing of {name} cannot be read ({str(error).rstrip('.')}): restore it."
        ) from error
    encoder = Encoder(model, mean, std).eval()
    encoder.preprocessing = Preprocessing.of_timm(stored)
    return encoder


def is_convertible(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a plain Vision Transformer, and leaves out nothing that is needed here."""
    is_plain = config.get("model_type") in CONVERTIBLE and config.get("hidden_act", "gelu") == "gelu"
    return is_plain and config.keys() >= NEEDED


def read_hub_folder(folder: Path) -> Encoder:
    """Load an I-JEPA, ViT or MAE model of transformers from a folder, without the package transformers."""
    config, images = read_config(folder), _read_json(folder / PREPROCESSOR_FILE)
    try:
        heads = from_plain(int, config.get("num_attention_heads"), "num_attention_heads")
        size = from_plain(int | tuple[int, int], config.get("image_size"), "image_size")
        norm_eps = from_plain(float, config.get("layer_norm_eps"), "layer_norm_eps")
    except InputError as error:
        raise InputError(f"{folder / CONFIG_FILE} cannot be read ({str(error).rstrip('.')}): restore it.") from error
    mean, std, preprocessing = read_hub_preprocessing(images, str(folder / PREPROCESSOR_FILE))
    encoder = encoder_from_timm_names(
        to_timm_names(read_safetensors(folder / WEIGHTS_FILE)[0]),
        str(folder),
        heads,
        (size, size) if isinstance(size, int) else size,
        mean,
        std,
        norm_eps,
        preprocessing,
    )
    found = {
        "hidden_size": encoder.dim,
        "num_hidden_layers": encoder.depth,
        "intermediate_size": encoder.vit.blocks[0].mlp.fc1.out_features,
        "patch_size": encoder.patch_size[0],
    }
    for name, value in found.items():
        if config.get(name, value) not in (value, [value, value]):
            raise InputError(
                f"{folder} does not fit its config.json: {name} is {config[name]} there, {value} in its weights: restore both "
                "files."
            )
    return encoder


def to_timm_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename Hugging Face weights to timm's names and join query, key and value; unknown names stay unchanged."""
    whole = {theirs: ours for ours, theirs in WHOLE.items()}
    layer = {theirs: ours for ours, theirs in LAYER.items()}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        # Task models prefix the names of their encoder.
        name = re.sub(r"^(vit|ijepa)\.", "", name)
        match = re.fullmatch(r"encoder\.layer\.(\d+)\.(.+)\.(weight|bias)", name)
        if match and match[2] in layer:
            found[f"blocks.{match[1]}.{layer[match[2]]}.{match[3]}"] = tensor
        elif name.startswith(ENCODER_PARTS) and name != NOT_ENCODER:
            found[whole.get(name, name)] = tensor
    for name in [name for name in found if f".{QUERY}." in name]:
        names = [name.replace(QUERY, part) for part in (QUERY, KEY, VALUE)]
        if len({found[part].shape if part in found else None for part in names}) == 1:
            number, kind = name.split(".")[2], name.split(".")[-1]
            found[f"blocks.{number}.attn.qkv.{kind}"] = torch.cat([found.pop(part) for part in names])
    return found


def to_hub_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename weights from timm's to Hugging Face's names, and split query, key and value."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in WHOLE:
            found[WHOLE[name]] = tensor
            continue
        _, number, place = name.split(".", 2)
        place, _, kind = place.rpartition(".")
        parts = (
            zip((QUERY, KEY, VALUE), tensor.chunk(3), strict=True) if place == "attn.qkv" else [(LAYER[place], tensor)]
        )
        found |= {f"encoder.layer.{number}.{part}.{kind}": piece.contiguous() for part, piece in parts}
    return found


def _read_json(file: Path) -> dict[str, Any]:
    return read_record(file, dict[str, Any], "restore it") if file.exists() else {}


def read_pickle(path: Path) -> Any:
    """Read a file of torch.save on the CPU; anything but tensors and numbers is an InputError, and no code is run."""
    require_regular(path)
    try:
        with torch.serialization.safe_globals(NUMBERS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    # Truncated and foreign files raise many different errors.
    except Exception as error:
        with path.open("rb") as file:
            is_torch = file.read(2) in TORCH_FILES
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f"is damaged ({type(error).__name__}): download or copy it again" if is_torch else NO_WEIGHTS
        if isinstance(error, pickle.UnpicklingError) and (named or is_torch):
            found = f"{named[1]}, which is not a tensor" if named else "more than tensors"
            what = f"contains {found}: loading it could run code; save only its tensors"
        raise InputError(f"{path} {what}.") from error


def is_release(contents: Any) -> bool:
    """Whether a file's contents have the layout of the releases."""
    return isinstance(contents, Mapping) and any(isinstance(contents.get(part), Mapping) for part in PARTS)


def is_state(value: Any) -> TypeGuard[Mapping[str, Tensor]]:
    """Whether a value is a mapping from names to tensors."""
    return isinstance(value, Mapping) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in value.items())


def state_of(contents: Any, part: str, path: Path) -> dict[str, Tensor]:
    """Return the weights of one part, without the prefix of distributed training."""
    state = contents.get(part) if isinstance(contents, Mapping) else None
    if not is_state(state):
        has = ", ".join(map(str, list(contents)[:8])) if isinstance(contents, Mapping) else "no names"
        raise InputError(
            f"{path} has no weights under '{part}', only {has}: choose another part with #encoder or #target_encoder, or give "
            "another file."
        )
    if state and all(name.startswith(PARALLEL) for name in state):
        return {name.removeprefix(PARALLEL): tensor for name, tensor in state.items()}
    return dict(state)


def released_encoder(contents: Any, path: Path, part: Part) -> Encoder:
    """Build one of the two encoders of a release."""
    return encoder_from_timm_names(state_of(contents, part, path), f"{path}#{part}")


def released_model(contents: Any, path: Path) -> tuple[dict[str, Tensor], Tensor | None, int]:
    """Return all weights of a release under our names, its predictor's positions (1, n_patches, width), and its heads."""
    encoder, target = (released_encoder(contents, path, part) for part in PARTS)
    if encoder.architecture() != target.architecture():
        raise InputError(f"{path} has an encoder and a target encoder of different shapes: download it again.")
    tensors = {f"encoder.{name}": tensor for name, tensor in encoder.state_dict().items()}
    tensors |= {f"target.{name}": tensor for name, tensor in target.state_dict().items()}
    predictor = state_of(contents, "predictor", path)
    positions = predictor.pop("predictor_pos_embed", None)
    for name, tensor in predictor.items():
        part, dot, rest = name.partition(".")
        tensor = tensor.flatten() if name == "mask_token" else tensor
        tensors[f"predictor.{PREDICTOR_PARTS.get(part, part)}{dot}{rest}"] = tensor.to(torch.float32, copy=True)
    return tensors, positions, encoder.heads
