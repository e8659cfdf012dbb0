"""Folders as Hugging Face's transformers keep them: read without the package, and written as an IJepaModel."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from stop_mim.data.augment import IMAGENET_MEAN, IMAGENET_STD, ChannelValues
from stop_mim.errors import InputError
from stop_mim.exchange.hub_names import encoder_from_hub_names, to_hub_names
from stop_mim.models.encoder import Encoder, encoder_metadata, read_safetensors

CONFIG_FILE, WEIGHTS_FILE, PREPROCESSOR_FILE = "config.json", "model.safetensors", "preprocessor_config.json"
BICUBIC = 3


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder; of a folder without one: nothing."""
    return _read_json(folder / CONFIG_FILE)


def read_hub_folder(folder: Path) -> Encoder:
    """The encoder of a folder that holds an I-JEPA, ViT or MAE model of transformers."""
    file = folder / WEIGHTS_FILE
    if not file.exists():
        raise InputError(f"{folder} holds no {WEIGHTS_FILE}: save the model there again, as one file of safetensors.")
    tensors, _ = read_safetensors(file)
    values = _read_json(folder / PREPROCESSOR_FILE)
    mean = _channels(values.get("image_mean"), IMAGENET_MEAN, folder)
    std = _channels(values.get("image_std"), IMAGENET_STD, folder)
    return encoder_from_hub_names(tensors, read_config(folder), str(folder), mean, std)


def write_hub_folder(encoder: Encoder, folder: Path) -> None:
    """Config, weights and preprocessing, as IJepaModel.from_pretrained and AutoImageProcessor read them."""
    encoder_metadata(encoder)
    if encoder.vit.has_class_token:
        raise InputError("This encoder has a class token and IJepaModel has none: export it to timm instead.")
    if encoder.patch_size[0] != encoder.patch_size[1]:
        raise InputError(
            f"Patches are {encoder.patch_size} pixels and IJepaModel's are square: export it to timm instead."
        )
    _write_json(folder / CONFIG_FILE, ijepa_config(encoder))
    _write_json(folder / PREPROCESSOR_FILE, preprocessor_config(encoder))
    tensors = {name: tensor.detach().cpu() for name, tensor in encoder.vit.state_dict().items()}
    save_file(to_hub_names(tensors), folder / WEIGHTS_FILE, {"format": "pt"})


def ijepa_config(encoder: Encoder) -> dict[str, Any]:
    """What IJepaConfig holds of this encoder."""
    height, width = encoder.image_size
    return {
        "architectures": ["IJepaModel"],
        "model_type": "ijepa",
        "hidden_size": encoder.dim,
        "num_hidden_layers": encoder.depth,
        "num_attention_heads": encoder.heads,
        "intermediate_size": encoder.vit.blocks[0].mlp.fc1.out_features,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": encoder.norm_eps,
        "image_size": height if height == width else [height, width],
        "patch_size": encoder.patch_size[0],
        "num_channels": 3,
        "qkv_bias": encoder.vit.blocks[0].attn.qkv.bias is not None,
    }


def preprocessor_config(encoder: Encoder) -> dict[str, Any]:
    """How images become what the encoder was trained on."""
    height, width = encoder.image_size
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": height, "width": width},
        "resample": BICUBIC,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(encoder.mean),
        "image_std": list(encoder.std),
    }


def _channels(values: Any, default: ChannelValues, folder: Path) -> ChannelValues:
    if values is None:
        return default
    if not (isinstance(values, list) and len(values) == 3 and all(isinstance(value, int | float) for value in values)):
        raise InputError(
            f"{folder / PREPROCESSOR_FILE} has {values} for a mean or std: give a number for each channel."
        )
    return float(values[0]), float(values[1]), float(values[2])


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read ({error}): restore it.") from error
    if not isinstance(found, dict):
        raise InputError(f"{file} holds no fields by name: restore it.")
    return found


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n")
