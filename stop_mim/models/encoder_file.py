"""Encoders in files: saved as safetensors under timm's names, and built from weights under those names."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from timm.layers import Attention, LayerNorm, Mlp
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from stop_mim.data.augment import IMAGENET_MEAN, IMAGENET_STD, ChannelValues
from stop_mim.errors import InputError, first_line
from stop_mim.files import read_safetensors, write_atomically
from stop_mim.models.encoder import SIZES, STANDARD, TOKENS_ONLY, Encoder, Preprocessing, mlp_ratio
from stop_mim.models.kernels.short_attention import ShortAttention
from stop_mim.positions import SinCosPositions
from stop_mim.records import from_plain

ENCODER_FILE = "encoder.safetensors"
FILE_FORMAT = "stop-mim encoder"
NORM_EPS = 1e-6
# A file of weights does not store the number of heads: it follows from the width.
HEADS = {dimensions.width: dimensions.heads for dimensions in SIZES.values()}
CLASSIFIER = ("head.weight", "head.bias")
PATCHES, POSITIONS, HIDDEN = "patch_embed.proj.weight", "pos_embed", "blocks.0.mlp.fc1.weight"


def save_encoder(encoder: Encoder, path: str | Path) -> None:
    """Save an encoder as safetensors with timm's names; the metadata describe how to build the model."""
    if Path(path).suffix != ".safetensors":
        raise InputError(
            f"The encoder's file is '{path}': choose a name that ends in .safetensors, so that it can be loaded again."
        )
    metadata = encoder_metadata(encoder)
    tensors = {name: tensor.detach().contiguous() for name, tensor in encoder.vit.state_dict().items()}
    write_atomically(Path(path), lambda temporary: save_file(tensors, temporary, metadata))


def encoder_metadata(encoder: Encoder) -> dict[str, str]:
    """Return the metadata to build an encoder from; raise InputError unless it is a plain Vision Transformer."""
    if wrong := peculiarity(encoder):
        raise InputError(
            f"This encoder is not a plain Vision Transformer ({wrong}): only those can be saved or exported."
        )
    metadata = {
        "format": FILE_FORMAT,
        "architecture": json.dumps(encoder.architecture()),
        "mean": json.dumps(encoder.mean),
        "std": json.dumps(encoder.std),
    }
    if encoder.norm_eps != NORM_EPS:
        metadata["norm_eps"] = json.dumps(encoder.norm_eps)
    if encoder.preprocessing != STANDARD:
        metadata["preprocessing"] = json.dumps(asdict(encoder.preprocessing))
    return metadata


def peculiarity(encoder: Encoder) -> str | None:
    """Describe how an encoder differs from a plain Vision Transformer; None if it does not."""
    for block in encoder.vit.blocks:
        # ShortAttention computes the same as Attention.
        is_known = type(block.attn) in (Attention, ShortAttention) and type(block.mlp) is Mlp
        if type(block) is not Block or not is_known:
            return "its layers are of another kind"
        activation = block.mlp.act
        if not isinstance(activation, nn.GELU) or activation.approximate != "none":
            return f"{activation} in its layers"
    return misfit(encoder.vit.state_dict(), shell(encoder.architecture()).state_dict())


def read_encoder(file: Path) -> Encoder:
    """Read a .safetensors file with timm's names: one of `save_encoder`, or weights alone."""
    tensors, metadata = read_safetensors(file)
    return encoder_of(tensors, metadata, str(file))


@dataclass(frozen=True)
class Metadata:
    """The metadata of a file of `save_encoder`, besides its format."""

    architecture: dict[str, Any]
    mean: ChannelValues
    std: ChannelValues
    norm_eps: float = NORM_EPS
    preprocessing: Preprocessing = STANDARD


def encoder_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], origin: str) -> Encoder:
    """Build an encoder from the contents of a file; without our metadata, default values are assumed."""
    if metadata.get("format") != FILE_FORMAT:
        return encoder_from_timm_names(tensors, origin)
    try:
        texts = {field.name: metadata[field.name] for field in fields(Metadata) if field.name in metadata}
        stored = from_plain(Metadata, {name: json.loads(text) for name, text in texts.items()})
        heads = from_plain(int, stored.architecture.get("num_heads"), "num_heads")
        image_size = from_plain(tuple[int, int], stored.architecture.get("img_size"), "img_size")
    # An InputError is a ValueError; JSON that is nested too deeply is a RecursionError.
    except (ValueError, RecursionError) as error:
        reason = first_line(error).rstrip(".")
        raise InputError(f"{origin} has metadata that cannot be read ({reason}): save it again.") from error
    return encoder_from_timm_names(
        tensors, origin, heads, image_size, stored.mean, stored.std, stored.norm_eps, stored.preprocessing
    )


def encoder_from_timm_names(
    tensors: Mapping[str, Tensor],
    origin: str,
    heads: int | None = None,
    image_size: Sequence[int] | None = None,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    norm_eps: float = NORM_EPS,
    preprocessing: Preprocessing = STANDARD,
) -> Encoder:
    """Build an encoder from weights under timm's names; missing, unknown and misshaped weights are an InputError.

    Args:
        origin: name of the weights in errors.
        heads: number of heads; None: 64 features a head (80 in huge, 88 in giant models).
        image_size: height and width; None: square images, from the number of positions.
    """
    vit = shell(_architecture(tensors, origin, heads, image_size), norm_eps)
    encoder = Encoder(vit, mean, std).eval()
    load_weights(encoder, tensors, origin)
    encoder.guessed_heads, encoder.preprocessing = heads is None, preprocessing
    return encoder


def _architecture(
    tensors: Mapping[str, Tensor], origin: str, heads: int | None, image_size: Sequence[int] | None
) -> dict[str, Any]:
    """Derive the arguments of timm's VisionTransformer from the shapes of its weights."""
    for name, dimensions in ((PATCHES, 4), (POSITIONS, 3), (HIDDEN, 2)):
        if name not in tensors or tensors[name].dim() != dimensions or not tensors[name].numel():
            raise InputError(
                f"{origin} is not a Vision Transformer (no {name} of {dimensions} dimensions): it has "
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
    heads = HEADS[width] if heads is None else heads
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


def shell(architecture: dict[str, Any], norm_eps: float = NORM_EPS) -> VisionTransformer:
    """Return timm's model on the meta device, without memory for its weights."""
    with torch.device("meta"):
        return VisionTransformer(**architecture, norm_layer=partial(LayerNorm, eps=norm_eps), weight_init="skip")


def misfit(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """Describe how named tensors differ from the expected ones: missing, unknown and misshaped. None if they fit."""
    missing = [name for name in expected if name not in tensors]
    unknown = [name for name in tensors if name not in expected]
    misshaped = [
        f"{name} is {_size(tensors[name])} instead of {_size(expected[name])}"
        for name in expected
        if name in tensors and tensors[name].shape != expected[name].shape
    ]
    found = {"missing": missing, "unknown": unknown, "of another shape": misshaped}
    parts = [f"{len(names)} {kind} ({_first_few(names)})" for kind, names in found.items() if names]
    return "; ".join(parts) or None


def count_layers(tensors: Mapping[str, Tensor]) -> int:
    """Return the number of layers that have weights."""
    return len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})


def load_weights(encoder: Encoder, tensors: Mapping[str, Tensor], origin: str) -> None:
    """Give an encoder on the meta device its weights; raise InputError if they do not fit."""
    tensors = {name: tensor for name, tensor in tensors.items() if name not in CLASSIFIER}
    if wrong := misfit(tensors, encoder.vit.state_dict()):
        raise InputError(
            f"{origin} does not fit a plain Vision Transformer of its architecture ({wrong}): give another file."
        )
    # Copies: the tensors may be memory-mapped from a file that is replaced later.
    copies = {name: tensor.to(torch.float32, copy=True) for name, tensor in tensors.items()}
    encoder.vit.load_state_dict(copies, strict=True, assign=True)
    encoder.vit.pos_embed.requires_grad_(not _are_sincos(encoder))


def _are_sincos(encoder: Encoder) -> bool:
    """Whether the positions are the fixed ones, up to half precision, and thus not trained."""
    patches = encoder.vit.pos_embed.detach()[0, -encoder.grid[0] * encoder.grid[1] :]
    return encoder.dim % 4 == 0 and torch.allclose(
        patches, SinCosPositions(encoder.grid, encoder.dim).table(), atol=1e-3
    )


def _size(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a single number"


def _first_few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
