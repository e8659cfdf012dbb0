"""Weights under timm's names, which the releases of I-JEPA, StoP and MAE share: what they build is read off their shapes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from stop_mim.data.augment import IMAGENET_MEAN, IMAGENET_STD
from stop_mim.errors import InputError
from stop_mim.models.encoder import NORM_EPS, SIZES, Encoder, fill_encoder, misfit, mlp_ratio, shell

# No file of weights says how many heads share the width.
HEADS = {dimensions.width: dimensions.heads for dimensions in SIZES.values()}
CLASSIFIER = ("head.weight", "head.bias")
PATCHES, POSITIONS, HIDDEN = "patch_embed.proj.weight", "pos_embed", "blocks.0.mlp.fc1.weight"


def encoder_from_timm_names(
    tensors: Mapping[str, Tensor],
    origin: str,
    heads: int | None = None,
    image_size: Sequence[int] | None = None,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    norm_eps: float = NORM_EPS,
) -> Encoder:
    """An encoder from all of these weights, but for a classifier's; whatever is missing, unknown or misshaped is told.

    What shapes do not tell is taken from timm and the releases: 64 features a head (80 in huge, 88 in giant models), and
    square images.
    """
    tensors = {name: tensor for name, tensor in tensors.items() if name not in CLASSIFIER}
    vit = shell(infer_architecture(tensors, origin, heads, image_size), norm_eps)
    if wrong := misfit(tensors, vit.state_dict()):
        raise InputError(f"{origin} does not fit a plain Vision Transformer: of its weights are {wrong}.")
    return fill_encoder(vit, tensors, mean, std)


def infer_architecture(
    tensors: Mapping[str, Tensor], origin: str, heads: int | None = None, image_size: Sequence[int] | None = None
) -> dict[str, Any]:
    """Arguments of timm's VisionTransformer, from the shapes of its weights."""
    for name, dimensions in ((PATCHES, 4), (POSITIONS, 3), (HIDDEN, 2)):
        if name not in tensors or tensors[name].dim() != dimensions:
            raise InputError(
                f"{origin} holds no Vision Transformer (no {name} of {dimensions} dimensions): it has "
                f"{', '.join(list(tensors)[:3]) or 'nothing'}{' …' if len(tensors) > 3 else ''}."
            )
    width, channels, *patch_size = tensors[PATCHES].shape
    if channels != 3:
        raise InputError(f"{origin} is for images of {channels} channels: only colour images, of 3, can be used.")
    if heads is None and width not in HEADS:
        raise InputError(
            f"{origin} is {width} wide, and does not say how many heads share it: known are the widths "
            f"{', '.join(map(str, HEADS))}; save the encoder with stop_mim.save_encoder instead."
        )
    heads = heads or HEADS[width]
    if heads < 1 or width % heads:
        raise InputError(f"{origin} is {width} wide, which {heads} heads cannot share: correct its number of heads.")
    class_token = "cls_token" in tensors
    grid, in_positions = _grid(tensors[POSITIONS].shape[1], class_token, image_size, patch_size, origin)
    architecture = {
        "img_size": [grid[0] * patch_size[0], grid[1] * patch_size[1]],
        "patch_size": patch_size,
        "embed_dim": width,
        "depth": 1 + max(_block_number(name) for name in tensors),
        "num_heads": heads,
        "mlp_ratio": mlp_ratio(tensors[HIDDEN].shape[0], width),
        "class_token": class_token,
        "global_pool": "avg",
        "fc_norm": False,
        "num_classes": 0,
        "dynamic_img_size": True,
        "qkv_bias": "blocks.0.attn.qkv.bias" in tensors,
    }
    return architecture if in_positions == class_token else {**architecture, "no_embed_class": True}


def _grid(
    positions: int, class_token: bool, image_size: Sequence[int] | None, patch_size: Sequence[int], origin: str
) -> tuple[tuple[int, int], bool]:
    """Rows and columns of the patches, and whether the class token has a position too."""
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
        f"{origin} has {positions} positions{' with that of its class token' if class_token else ''}, which is no square: "
        "only square images can be told from the weights alone."
    )


def _block_number(name: str) -> int:
    parts = name.split(".")
    return int(parts[1]) if len(parts) > 1 and parts[0] == "blocks" and parts[1].isdecimal() else 0
