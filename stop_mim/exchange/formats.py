"""Export formats: one decorated function each, which writes the files and returns the code that loads them."""

import io
import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor

from stop_mim.errors import InputError, MissingExtra
from stop_mim.exchange import EXPORTERS
from stop_mim.exchange.importing import CONFIG_FILE, PREPROCESSOR_FILE, WEIGHTS_FILE, to_hub_names
from stop_mim.models.encoder import Encoder, Images
from stop_mim.models.encoder_file import NORM_EPS, encoder_metadata
from stop_mim.models.hub_encoder import FILTERS
from stop_mim.seeds import seeded_generator

PatchTokens = Float[Tensor, "batch n_patches dim"]


class Place(NamedTuple):
    """Where the exported folder will be read from: a path, or a repository of the Hugging Face hub."""

    name: str
    on_hub: bool = False

    def file(self, name: str) -> str:
        """Return a Python expression for the path of a file."""
        if self.on_hub:
            return f"huggingface_hub.hf_hub_download({self.name!r}, {name!r})"
        return repr(f"{self.name}/{name}")

    def imports(self, *modules: str) -> str:
        """Return an import line for these modules and for what `file` needs."""
        return f"import {', '.join([*modules, *(['huggingface_hub'] if self.on_hub else [])])}"


class Exported(NamedTuple):
    """What the model card says of a format.

    - `library`: the hub's name of the library that loads it.
    - `code`: lines of Python that load the files and turn `images` into `tokens`, see `example_images`.
    """

    library: str
    code: list[str]


@EXPORTERS.register("timm")
def write_timm(encoder: Encoder, folder: Path, place: Place) -> Exported:
    """safetensors and config.json for timm.create_model("local-dir:FOLDER", pretrained=True)."""
    metadata = encoder_metadata(encoder)
    if encoder.norm_eps != NORM_EPS:
        raise InputError(
            f"The norms of this encoder have eps {encoder.norm_eps:g} and timm's {NORM_EPS:g}: export it to hf instead."
        )
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in encoder.vit.state_dict().items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata)
    config = {
        # One of timm's registered names; the arguments below replace all of its values.
        "architecture": "vit_base_patch16_224",
        "num_classes": 0,
        "num_features": encoder.dim,
        "global_pool": "avg",
        "model_args": {name: value for name, value in encoder.architecture().items() if name != "num_classes"},
        "pretrained_cfg": {
            "num_classes": 0,
            "input_size": [3, *encoder.image_size],
            "fixed_input_size": True,
            **asdict(encoder.preprocessing),
            "mean": list(encoder.mean),
            "std": list(encoder.std),
            "pool_size": None,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }
    _write_json(folder / CONFIG_FILE, config)
    prefix = encoder.vit.num_prefix_tokens
    source = f"{'hf-hub:' if place.on_hub else 'local-dir:'}{place.name}"
    code = [
        "import timm, torch",
        f"model = timm.create_model({source!r}, pretrained=True).eval()",
        example_images(encoder),
        f"tokens = model.forward_features(images){f'[:, {prefix}:]' if prefix else ''}",
    ]
    return Exported("timm", code)


@EXPORTERS.register("hf")
def write_hub(encoder: Encoder, folder: Path, place: Place) -> Exported:
    """An IJepaModel for transformers, with its image processor."""
    encoder_metadata(encoder)
    if encoder.vit.has_class_token:
        raise InputError("This encoder has a class token, which IJepaModel does not: export it to timm instead.")
    if encoder.patch_size[0] != encoder.patch_size[1]:
        raise InputError(
            f"Patches have {encoder.patch_size} pixels, IJepaModel's are square: export it to timm instead."
        )
    height, width = encoder.image_size
    config = {
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
    _write_json(folder / CONFIG_FILE, config)
    _write_json(folder / PREPROCESSOR_FILE, hub_preprocessing(encoder))
    tensors = {name: tensor.detach().cpu() for name, tensor in encoder.vit.state_dict().items()}
    save_file(to_hub_names(tensors), folder / WEIGHTS_FILE, {"format": "pt"})
    code = [
        "import torch",
        "from transformers import IJepaModel",
        f"model = IJepaModel.from_pretrained({place.name!r}).eval()",
        example_images(encoder),
        "tokens = model(images).last_hidden_state",
    ]
    return Exported("transformers", code)


def hub_preprocessing(encoder: Encoder) -> dict[str, Any]:
    """Return the preprocessor_config.json that resizes and crops images as the encoder's `transform` does.

    transformers resizes the short side to one number: for oblong images to the longer side, as our evaluations do.
    """
    how, (height, width) = encoder.preprocessing, encoder.image_size
    filters = {name: number for number, name in FILTERS.items()}
    if how.interpolation not in filters or how.crop_mode not in ("center", "squash"):
        raise InputError(
            f"This encoder's images are resized with {how.interpolation} and cropped with {how.crop_mode}, which transformers "
            "does not do: export it to timm instead."
        )
    resized_height, resized_width = (math.floor(side / how.crop_pct) for side in (height, width))
    squashed = {"height": resized_height, "width": resized_width}
    return {
        # The one that can do both, in all versions of transformers.
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": squashed if how.crop_mode == "squash" else {"shortest_edge": max(squashed.values())},
        "resample": filters[how.interpolation],
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(encoder.mean),
        "image_std": list(encoder.std),
    }


ONNX_FILE, PROGRAM_FILE = "model.onnx", "model.pt2"
ONNX_TOLERANCE, PROGRAM_TOLERANCE = 1e-4, 1e-5


@EXPORTERS.register("onnx")
def write_onnx(encoder: Encoder, folder: Path, place: Place) -> Exported:
    """An ONNX model for batches of any size; weights of more than 1.5 GiB go into a second file."""
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtra("The export to ONNX", str(error.name), "onnx") from error
    program = torch.onnx.export(
        encoder,
        (_random_images(encoder, 2),),
        dynamo=True,
        input_names=["images"],
        output_names=["tokens"],
        dynamic_shapes=_any_batch(),
        verbose=False,
    )
    assert program is not None
    program.save(folder / ONNX_FILE)
    session = onnxruntime.InferenceSession(folder / ONNX_FILE, providers=["CPUExecutionProvider"])

    def run(images: Images) -> PatchTokens:
        return torch.from_numpy(session.run(["tokens"], {"images": images.numpy()})[0])

    require_same_tokens(encoder, run, ONNX_TOLERANCE, "onnxruntime")
    code = [
        place.imports("onnxruntime", "torch"),
        f"session = onnxruntime.InferenceSession({place.file(ONNX_FILE)})",
        example_images(encoder),
        "tokens = session.run(['tokens'], {'images': images.numpy()})[0]",
    ]
    return Exported("onnx", code)


@EXPORTERS.register("export")
def write_program(encoder: Encoder, folder: Path, place: Place) -> Exported:
    """A torch.export program for batches of any size."""
    program = torch.export.export(encoder, (_random_images(encoder, 2),), dynamic_shapes=_any_batch())
    # Into memory first: on a full disk torch's own writer ends the process.
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    (folder / PROGRAM_FILE).write_bytes(buffer.getbuffer())
    loaded = torch.export.load(folder / PROGRAM_FILE).module()
    require_same_tokens(encoder, loaded, PROGRAM_TOLERANCE, "torch.export")
    code = [
        place.imports("torch"),
        f"model = torch.export.load({place.file(PROGRAM_FILE)}).module()",
        example_images(encoder),
        "tokens = model(images)",
    ]
    return Exported("pytorch", code)


def example_images(encoder: Encoder) -> str:
    """Return the line of Python that makes images for this encoder."""
    height, width = encoder.image_size
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (encoder.mean, encoder.std))
    return f"images = torch.randn(1, 3, {height}, {width})  # yours, normalised by mean ({mean}) and std ({std})"


@torch.no_grad()
def require_same_tokens(encoder: Encoder, run: Callable[[Images], PatchTokens], tolerance: float, name: str) -> None:
    """Raise InputError unless an exported program returns the encoder's tokens."""
    for count in (1, 3):
        images = _random_images(encoder, count)
        difference = (run(images) - encoder(images)).abs().max().item()
        # Written so that NaN is refused too.
        if not difference <= tolerance:
            raise InputError(
                f"The program of {name} returns other tokens than the encoder (they differ by {difference:.2g}): choose "
                "another format."
            )


def _random_images(encoder: Encoder, count: int) -> Images:
    height, width = encoder.image_size
    return torch.randn(count, 3, height, width, generator=seeded_generator("cpu", 0, "exported images", count))


def _any_batch() -> dict[str, dict[int, torch.export.Dim]]:
    return {"images": {0: torch.export.Dim("batch", min=1)}}


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n")
