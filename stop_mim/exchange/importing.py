"""Encoders from weights that others saved, in files and model folders: of timm, Hugging Face, I-JEPA's and StoP's releases."""

import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard, get_args

import numpy as np
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from stop_mim.data.augment import IMAGENET_MEAN, IMAGENET_STD
from stop_mim.errors import InputError
from stop_mim.files import read_safetensors, require_regular
from stop_mim.models.encoder import (
    FILE_FORMAT,
    NORM_EPS,
    SIZES,
    TOKENS_ONLY,
    Encoder,
    count_layers,
    encoder_of,
    fill_encoder,
    mlp_ratio,
    require_depth,
    shell,
)
from stop_mim.models.frozen_encoder import Preprocessing
from stop_mim.models.hub_encoder import HubEncoder
from stop_mim.records import read_record

CONFIG_FILE, WEIGHTS_FILE, PREPROCESSOR_FILE = "config.json", "model.safetensors", "preprocessor_config.json"
# A file of weights does not store the number of heads: it follows from the width.
HEADS = {dimensions.width: dimensions.heads for dimensions in SIZES.values()}
CLASSIFIER = ("head.weight", "head.bias")
PATCHES, POSITIONS, HIDDEN = "patch_embed.proj.weight", "pos_embed", "blocks.0.mlp.fc1.weight"

CONVERTIBLE = ("ijepa", "vit", "vit_mae")
# timm's names and the names that Hugging Face stores.
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
# Newer versions of transformers use other names in memory than on disk.
IN_MEMORY = {
    "attention.q_proj.": f"{QUERY}.",
    "attention.k_proj.": f"{KEY}.",
    "attention.v_proj.": f"{VALUE}.",
    "attention.o_proj.": "attention.output.dense.",
    "mlp.fc1.": "intermediate.dense.",
    "mlp.fc2.": "output.dense.",
}
# Parts of task models that do not belong to the encoder.
NOT_ENCODER = ("pooler.", "classifier.", "decoder.", "embeddings.mask_token")

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
    "is neither a file of torch.save (.pth, .pth.tar) nor a .safetensors file: name a file of weights, or a run"
)
SCALAR: Any = np.float64(0).__reduce__()[0]
# Old training scripts store losses and learning rates as NumPy scalars; NumPy has since moved the function that makes them.
NUMBERS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (SCALAR, "numpy.core.multiarray.scalar"),
    (SCALAR, "numpy._core.multiarray.scalar"),
    (np.dtype, "numpy.dtype"),
    *(type(np.dtype(kind)) for kind in (np.float64, np.float32, np.float16, np.int64, np.int32, np.bool_)),
]


def encoder_from_timm_names(
    tensors: Mapping[str, Tensor],
    origin: str,
    heads: int | None = None,
    image_size: Sequence[int] | None = None,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    norm_eps: float = NORM_EPS,
) -> Encoder:
    """Build an encoder from weights under timm's names; missing, unknown and misshaped weights are an InputError.

    Args:
        origin: name of the weights in errors.
        heads: number of heads; None: 64 features a head (80 in huge, 88 in giant models).
        image_size: height and width; None: square images, from the number of positions.
    """
    tensors = {name: tensor for name, tensor in tensors.items() if name not in CLASSIFIER}
    vit = shell(_architecture(tensors, origin, heads, image_size), norm_eps)
    encoder = fill_encoder(vit, tensors, origin, mean, std)
    encoder.guessed_heads = heads is None
    return encoder


def _architecture(
    tensors: Mapping[str, Tensor], origin: str, heads: int | None, image_size: Sequence[int] | None
) -> dict[str, Any]:
    """Read the arguments of timm's VisionTransformer off the shapes of its weights."""
    for name, dimensions in ((PATCHES, 4), (POSITIONS, 3), (HIDDEN, 2)):
        if name not in tensors or tensors[name].dim() != dimensions:
            raise InputError(
                f"{origin} holds no Vision Transformer (no {name} of {dimensions} dimensions): it has "
                f"{', '.join(list(tensors)[:3]) or 'no tensors'}{' …' if len(tensors) > 3 else ''}."
            )
    width, channels, *patch_size = tensors[PATCHES].shape
    if channels != 3:
        raise InputError(f"{origin} takes images of {channels} channels: choose an encoder for 3 channels.")
    if heads is None and width not in HEADS:
        raise InputError(
            f"{origin} has width {width} and does not store its number of heads, which is known only for widths "
            f"{', '.join(map(str, HEADS))}: save the encoder with stop_mim.save_encoder instead."
        )
    heads = heads or HEADS[width]
    if heads < 1 or width % heads:
        raise InputError(f"{origin} has width {width}, which is not divisible by {heads} heads: correct the heads.")
    class_token = "cls_token" in tensors
    grid, in_positions = _grid(tensors[POSITIONS].shape[1], class_token, image_size, patch_size, origin)
    architecture = {
        "img_size": [grid[0] * patch_size[0], grid[1] * patch_size[1]],
        "patch_size": patch_size,
        "embed_dim": width,
        "depth": count_layers(tensors),
        "num_heads": heads,
        "mlp_ratio": mlp_ratio(tensors[HIDDEN].shape[0], width),
        "class_token": class_token,
        **TOKENS_ONLY,
        "qkv_bias": "blocks.0.attn.qkv.bias" in tensors,
    }
    return architecture if in_positions == class_token else {**architecture, "no_embed_class": True}


def _grid(
    positions: int, class_token: bool, image_size: Sequence[int] | None, patch_size: Sequence[int], origin: str
) -> tuple[tuple[int, int], bool]:
    """Return the rows and columns of patches, and whether the class token has a position too."""
    if image_size is not None:
        grid = (image_size[0] // patch_size[0], image_size[1] // patch_size[1])
        if grid[0] * grid[1] in (positions, positions - class_token):
            return grid, grid[0] * grid[1] != positions
        raise InputError(
            f"{origin} has {positions} positions, but images of {image_size[0]}x{image_size[1]} pixels have {grid[0]}x"
            f"{grid[1]} patches of {patch_size[0]}x{patch_size[1]}: correct its image size or its patch size."
        )
    for n_patches in dict.fromkeys((positions - class_token, positions)):
        side = math.isqrt(n_patches)
        if side and side * side == n_patches:
            return (side, side), n_patches != positions
    raise InputError(
        f"{origin} has {positions} positions, which is not a square grid: save the encoder with stop_mim.save_encoder, "
        "which stores the image size."
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of config.json in a folder; empty if there is none."""
    return _read_json(folder / CONFIG_FILE)


def read_timm_folder(folder: Path) -> Encoder:
    """Load a plain Vision Transformer from a folder in timm's hub format."""
    file = _weights_file(folder)
    tensors, metadata = read_safetensors(file)
    if metadata.get("format") == FILE_FORMAT:
        return encoder_of(tensors, metadata, file)
    arguments = read_config(folder).get("model_args")
    if isinstance(arguments, Mapping) and "depth" in arguments:
        require_depth(arguments["depth"], tensors, str(folder / CONFIG_FILE))
    try:
        with torch.device("meta"):
            vit = timm.create_model(f"local-dir:{folder}", num_classes=0, dynamic_img_size=True)
    # Each model class fails in its own way on a wrong config.json.
    except Exception as error:
        raise InputError(
            f"timm cannot build the model of {folder / CONFIG_FILE} ({error}): restore that file."
        ) from error
    if not isinstance(vit, VisionTransformer):
        raise InputError(f"{folder} holds a {type(vit).__name__}: choose a plain Vision Transformer.")
    tensors = {name: tensor for name, tensor in tensors.items() if name not in CLASSIFIER}
    encoder = fill_encoder(vit, tensors, str(file), vit.pretrained_cfg["mean"], vit.pretrained_cfg["std"])
    encoder.preprocessing = Preprocessing.of_timm(vit.pretrained_cfg)
    return encoder


def read_hub_folder(folder: Path) -> Encoder:
    """Load an I-JEPA, ViT or MAE model of transformers from a folder, without the package transformers."""
    tensors, _ = read_safetensors(_weights_file(folder))
    values = _read_json(folder / PREPROCESSOR_FILE)
    mean, std = values.get("image_mean") or IMAGENET_MEAN, values.get("image_std") or IMAGENET_STD
    encoder = encoder_from_hub_names(tensors, read_config(folder), str(folder), mean, std)
    encoder.preprocessing = Preprocessing.of_hub(values) if values else encoder.preprocessing
    return encoder


def from_hub(hub: HubEncoder) -> Encoder:
    """Convert a Hugging Face model to a timm model, which can be fine-tuned, trained further and exported."""
    config = hub.model.config.to_dict()
    origin = f"The {config['model_type']} model"
    encoder = encoder_from_hub_names(hub.model.state_dict(), config, origin, hub.mean, hub.std)
    encoder.preprocessing = hub.preprocessing
    return encoder


def is_convertible(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a plain Vision Transformer whose names are known here."""
    return config.get("model_type") in CONVERTIBLE and config.get("hidden_act", "gelu") == "gelu"


def encoder_from_hub_names(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], origin: str, mean: Sequence[float], std: Sequence[float]
) -> Encoder:
    """Build an encoder from the weights and the config.json of a Hugging Face model."""
    missing = [name for name in ("num_attention_heads", "image_size", "layer_norm_eps") if name not in config]
    if missing or not is_convertible(config):
        what = f"its config.json has no {missing[0]}" if missing else f"it is a '{config.get('model_type')}'"
        raise InputError(f"{origin} cannot be converted ({what}): choose a plain I-JEPA, ViT or MAE model.")
    size = config["image_size"]
    encoder = encoder_from_timm_names(
        to_timm_names(tensors),
        origin,
        heads=config["num_attention_heads"],
        image_size=(size, size) if isinstance(size, int) else tuple(size),
        mean=mean,
        std=std,
        norm_eps=config["layer_norm_eps"],
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
                f"{origin} does not fit its config.json: {name} is {config[name]} there, {value} in its weights."
            )
    return encoder


def to_timm_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename Hugging Face weights to timm's names and join query, key and value; unknown names stay unchanged."""
    whole = {theirs: ours for ours, theirs in WHOLE.items()}
    layer = {theirs: ours for ours, theirs in LAYER.items()}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        name = _as_stored(name)
        match = re.fullmatch(r"encoder\.layer\.(\d+)\.(.+)\.(weight|bias)", name)
        if match and match[2] in layer:
            found[f"blocks.{match[1]}.{layer[match[2]]}.{match[3]}"] = tensor
        elif not name.startswith(NOT_ENCODER):
            found[whole.get(name, name)] = tensor
    for name in [name for name in found if f".{QUERY}." in name]:
        names = [name.replace(QUERY, part) for part in (QUERY, KEY, VALUE)]
        if len({found[part].shape if part in found else None for part in names}) == 1:
            number, kind = name.split(".")[2], name.split(".")[-1]
            found[f"blocks.{number}.attn.qkv.{kind}"] = torch.cat([found.pop(part) for part in names])
    return found


def to_hub_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename weights under timm's names to the names that Hugging Face stores, with query, key and value apart."""
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


def _as_stored(name: str) -> str:
    # Task models prefix the names of their encoder.
    name = re.sub(r"^layers\.", "encoder.layer.", re.sub(r"^(vit|ijepa)\.", "", name))
    for in_memory, stored in IN_MEMORY.items():
        name = name.replace(f".{in_memory}", f".{stored}") if name.startswith("encoder.layer.") else name
    return name


def _weights_file(folder: Path) -> Path:
    if not (folder / WEIGHTS_FILE).exists():
        raise InputError(f"{folder} holds no {WEIGHTS_FILE}: save the model there again, as one safetensors file.")
    return folder / WEIGHTS_FILE


def _read_json(file: Path) -> dict[str, Any]:
    return read_record(file, dict[str, Any], "restore it") if file.exists() else {}


def read_pickle(path: Path) -> Any:
    """Read a torch.save file on the CPU; no code in it runs, and anything but tensors and numbers is an InputError."""
    require_regular(path)
    try:
        with torch.serialization.safe_globals(NUMBERS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f"holds {named[1]}, which is not a tensor" if named else "holds more than tensors"
        raise InputError(
            f"{path} {what}: loading it could run code, so it is refused; save its tensors alone."
        ) from error
    # Truncated and foreign files raise many different errors.
    except Exception as error:
        with path.open("rb") as file:
            is_damaged = file.read(2) in TORCH_FILES
        what = f"is damaged ({type(error).__name__}): download or copy it again" if is_damaged else NO_WEIGHTS
        raise InputError(f"{path} {what}.") from error


def is_release(contents: Any) -> bool:
    """Return whether a file's contents have the layout of the releases."""
    return isinstance(contents, Mapping) and any(isinstance(contents.get(part), Mapping) for part in PARTS)


def is_state(value: Any) -> TypeGuard[Mapping[str, Tensor]]:
    """Return whether a value is a mapping from names to tensors."""
    return isinstance(value, Mapping) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in value.items())


def state_of(contents: Any, part: str, path: Path) -> dict[str, Tensor]:
    """Return the weights of one part, without the prefix of distributed training."""
    state = contents.get(part) if isinstance(contents, Mapping) else None
    if not is_state(state):
        has = ", ".join(map(str, list(contents)[:8])) if isinstance(contents, Mapping) else "no names"
        raise InputError(
            f"{path} holds no weights under '{part}', but {has}: name an encoder in it, as {path}#encoder."
        )
    if state and all(name.startswith(PARALLEL) for name in state):
        return {name.removeprefix(PARALLEL): tensor for name, tensor in state.items()}
    return dict(state)


def released_encoder(contents: Any, path: Path, part: Part) -> Encoder:
    """Build one of the two encoders of a file's contents."""
    return encoder_from_timm_names(state_of(contents, part, path), f"{path}#{part}")


class ReleasedModel(NamedTuple):
    """The weights of a released model under our names, and what is stored otherwise here."""

    tensors: dict[str, Tensor]
    positions: Tensor | None
    """The predictor's positions, (1, n_patches, width)."""
    heads: int
    """The number of attention heads of encoder and predictor."""


def released_model(contents: Any, path: Path) -> ReleasedModel:
    """Convert all parts of a file's contents."""
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
    return ReleasedModel(tensors, positions, encoder.heads)
