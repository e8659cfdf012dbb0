"""Weights under the names of Hugging Face's I-JEPA, ViT and MAE models, to and from timm's."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stop_mim.data.augment import IMAGENET_MEAN, IMAGENET_STD, ChannelValues
from stop_mim.errors import InputError
from stop_mim.exchange.timm_names import encoder_from_timm_names
from stop_mim.models.encoder import Encoder
from stop_mim.models.hub_encoder import HubEncoder

CONVERTIBLE = ("ijepa", "vit", "vit_mae")
# timm's names, and those that Hugging Face stores.
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
# Newer versions of transformers hold the same weights under other names than they store.
HELD = {
    "attention.q_proj.": f"{QUERY}.",
    "attention.k_proj.": f"{KEY}.",
    "attention.v_proj.": f"{VALUE}.",
    "attention.o_proj.": "attention.output.dense.",
    "mlp.fc1.": "intermediate.dense.",
    "mlp.fc2.": "output.dense.",
}
# What lies around the encoder in models for one task; of the encoder itself nothing is left out.
AROUND = ("pooler.", "classifier.", "decoder.", "embeddings.mask_token")


def from_hub(hub: HubEncoder) -> Encoder:
    """The same encoder as a timm model, which can be fine-tuned, trained on and exported."""
    config = hub.model.config.to_dict()
    return encoder_from_hub_names(
        hub.model.state_dict(), config, f"The {config['model_type']} model", hub.mean, hub.std
    )


def is_convertible(config: Mapping[str, Any]) -> bool:
    """Whether a model with this configuration is a plain Vision Transformer under the names known here."""
    return config.get("model_type") in CONVERTIBLE and config.get("hidden_act", "gelu") == "gelu"


def encoder_from_hub_names(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    origin: str,
    mean: ChannelValues = IMAGENET_MEAN,
    std: ChannelValues = IMAGENET_STD,
) -> Encoder:
    """An encoder from a model's weights and its config.json."""
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
                f"{origin} does not fit its config.json: {name} is {config[name]} there, its weights have {value}."
            )
    return encoder


def to_timm_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's weights under timm's names, with query, key and value joined; unknown names stay as they are."""
    whole = {theirs: ours for ours, theirs in WHOLE.items()}
    layer = {theirs: ours for ours, theirs in LAYER.items()}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        name = _as_stored(name)
        match = re.fullmatch(r"encoder\.layer\.(\d+)\.(.+)\.(weight|bias)", name)
        if match and match[2] in layer:
            found[f"blocks.{match[1]}.{layer[match[2]]}.{match[3]}"] = tensor
        elif not name.startswith(AROUND):
            found[whole.get(name, name)] = tensor
    for name in [name for name in found if f".{QUERY}." in name]:
        names = [name.replace(QUERY, part) for part in (QUERY, KEY, VALUE)]
        if len({found[part].shape if part in found else None for part in names}) == 1:
            number, kind = name.split(".")[2], name.split(".")[-1]
            found[f"blocks.{number}.attn.qkv.{kind}"] = torch.cat([found.pop(part) for part in names])
    return found


def to_hub_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights under timm's names as Hugging Face stores them, with query, key and value apart."""
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
    # In models for one task the encoder's names begin with its own.
    name = re.sub(r"^layers\.", "encoder.layer.", re.sub(r"^(vit|ijepa)\.", "", name))
    for held, stored in HELD.items():
        name = name.replace(f".{held}", f".{stored}") if name.startswith("encoder.layer.") else name
    return name
