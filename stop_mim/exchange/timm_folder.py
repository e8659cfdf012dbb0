"""Folders as timm keeps them on the hub: weights, and a config.json from which timm.create_model builds the model."""

import json
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer

from stop_mim.errors import InputError
from stop_mim.exchange.timm_names import CLASSIFIER
from stop_mim.models.encoder import (
    FILE_FORMAT,
    NORM_EPS,
    Encoder,
    encoder_metadata,
    encoder_of,
    fill_encoder,
    misfit,
    read_safetensors,
)

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
# A name in timm's registry to hang the arguments on: all that differs is told beside it.
ARCHITECTURES = {
    192: "vit_tiny_patch16_224",
    384: "vit_small_patch16_224",
    768: "vit_base_patch16_224",
    1024: "vit_large_patch16_224",
    1280: "vit_huge_patch14_224",
    1408: "vit_giant_patch14_224",
}


def write_timm_folder(encoder: Encoder, folder: Path) -> None:
    """Weights that load with strict=True, and a config.json for timm.create_model("local-dir:…", pretrained=True)."""
    metadata = encoder_metadata(encoder)
    if encoder.norm_eps != NORM_EPS:
        raise InputError(
            f"The norms of this encoder have eps {encoder.norm_eps:g} and timm's {NORM_EPS:g}: its tokens would differ; keep "
            "it as a Hugging Face model."
        )
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in encoder.vit.state_dict().items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata)
    (folder / CONFIG_FILE).write_text(json.dumps(timm_config(encoder), indent=2) + "\n")


def timm_config(encoder: Encoder) -> dict[str, Any]:
    """What timm's hub format tells of an encoder."""
    arguments = {name: value for name, value in encoder.architecture().items() if name != "num_classes"}
    return {
        "architecture": ARCHITECTURES.get(encoder.dim, ARCHITECTURES[384]),
        "num_classes": 0,
        "num_features": encoder.dim,
        "global_pool": "avg",
        "model_args": arguments,
        "pretrained_cfg": {
            "num_classes": 0,
            "input_size": [3, *encoder.image_size],
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "crop_mode": "center",
            "mean": list(encoder.mean),
            "std": list(encoder.std),
            "pool_size": None,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }


def read_timm_folder(folder: Path) -> Encoder:
    """The encoder of a folder in timm's hub format, which holds a plain Vision Transformer; timm says how it is built."""
    file = folder / WEIGHTS_FILE
    if not file.exists():
        raise InputError(f"{folder} holds no {WEIGHTS_FILE}: save the model there again, as safetensors.")
    tensors, metadata = read_safetensors(file)
    if metadata.get("format") == FILE_FORMAT:
        return encoder_of(tensors, metadata, file)
    try:
        with torch.device("meta"):
            vit = timm.create_model(f"local-dir:{folder}", num_classes=0, dynamic_img_size=True)
    # What is wrong with a config.json, each model finds out in its own way.
    except Exception as error:
        raise InputError(
            f"timm cannot build the model of {folder / CONFIG_FILE} ({error}): restore that file."
        ) from error
    if not isinstance(vit, VisionTransformer):
        raise InputError(f"{folder} holds a {type(vit).__name__}: choose a plain Vision Transformer of timm's.")
    tensors = {name: tensor for name, tensor in tensors.items() if name not in CLASSIFIER}
    if wrong := misfit(tensors, vit.state_dict()):
        raise InputError(f"{file} does not fit the {CONFIG_FILE} beside it: of its weights are {wrong}.")
    return fill_encoder(vit, tensors, vit.pretrained_cfg["mean"], vit.pretrained_cfg["std"])
