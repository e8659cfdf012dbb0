"""Vision Transformers of the Hugging Face hub with the interface of our encoder, for evaluation."""

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from stop_mim.data.augment import IMAGENET_MEAN, IMAGENET_STD, ChannelValues
from stop_mim.errors import InputError, MissingExtra
from stop_mim.models.layers import patch_grid, require_layers
from stop_mim.models.preprocessing import STANDARD, Preprocessing, make_transform
from stop_mim.positions import Grid

KNOWN = "ViT, DeiT, DINOv2, I-JEPA and MAE"


class HubEncoder(nn.Module):
    """A transformers model; a call returns normed patch tokens."""

    def __init__(
        self,
        model: Any,
        mean: ChannelValues = IMAGENET_MEAN,
        std: ChannelValues = IMAGENET_STD,
        preprocessing: Preprocessing = STANDARD,
    ) -> None:
        super().__init__()
        self.model: Any = model
        self.mean, self.std, self.preprocessing = mean, std, preprocessing
        config = model.config
        self.dim: int = config.hidden_size
        self.depth: int = config.num_hidden_layers
        self.patch_size: tuple[int, int] = (config.patch_size, config.patch_size)
        sides = [config.image_size] * 2 if isinstance(config.image_size, int) else config.image_size
        self.grid: Grid = (sides[0] // config.patch_size, sides[1] // config.patch_size)
        self.image_size = (self.grid[0] * self.patch_size[0], self.grid[1] * self.patch_size[1])

    @property
    def transform(self) -> Callable[[Any], Tensor]:
        """The preprocessing: from a PIL image to a normalised tensor (3, H, W) of the encoder's image size."""
        return make_transform(self.image_size, self.mean, self.std, self.preprocessing)

    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch n_patches dim"]:
        """Return normed tokens of all patches."""
        return self._patches(self._run(images)[-1], images)

    def embed(
        self, images: Float[Tensor, "batch 3 height width"], layers: int = 1
    ) -> Float[Tensor, "batch layers_times_dim"]:
        """Return average-pooled normed patch tokens of the last layers, concatenated; the last layer comes last."""
        require_layers(layers, self.depth)
        return torch.cat([self._patches(tokens, images).mean(1) for tokens in self._run(images)[-layers:]], dim=1)

    def _run(self, images: Tensor) -> tuple[Tensor, ...]:
        patch_grid(images, self.patch_size)
        # DINOv2 always interpolates its positions and has no such argument.
        other_size = images.shape[-2:] != self.image_size and self.model.config.model_type != "dinov2"
        options = {"interpolate_pos_encoding": True} if other_size else {}
        return self.model(images, output_hidden_states=True, **options).hidden_states

    def _patches(self, tokens: Tensor, images: Tensor) -> Float[Tensor, "batch n_patches dim"]:
        n_patches = math.prod(patch_grid(images, self.patch_size))
        return self.model.layernorm(tokens)[:, tokens.shape[1] - n_patches :]


def load_hub_encoder(name: str, pretrained: bool = True) -> HubEncoder:
    """Load a model from the hub or from a local folder; it reads safetensors only and runs no code of the model."""
    try:
        import transformers
    except ImportError as error:
        raise MissingExtra("hf: encoders", "transformers", "hf") from error
    kind: Any
    # It warns of weights beside the encoder, such as those of a decoder.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        # transformers' MAE masks patches at random; its encoder is a plain ViT with the same weights.
        is_mae = config.model_type == "vit_mae"
        kind = transformers.ViTModel if is_mae else transformers.AutoModel
        if is_mae:
            config = transformers.ViTConfig(**{k: v for k, v in config.to_dict().items() if k != "model_type"})
        options: dict[str, Any] = {"add_pooling_layer": False} if config.model_type in ("vit", "deit", "ijepa") else {}
        if pretrained:
            model, report = kind.from_pretrained(
                name, config=config, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **options
            )
            if missing := sorted(report["missing_keys"]):
                raise ValueError(f"it lacks {len(missing)} weights, {missing[0]} among them")
        else:
            model = (
                kind(config, **options) if is_mae else transformers.AutoModel.from_config(config, **options)
            ).eval()
    # The hub, the network and the models raise all kinds of errors.
    except Exception as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise InputError(
            f"hf:{name} could not be loaded ({reason}): check the name and the network; its weights must be safetensors."
        ) from error
    if not hasattr(model, "layernorm") or not isinstance(getattr(config, "patch_size", None), int):
        raise InputError(
            f"hf:{name} is a '{config.model_type}', not a plain Vision Transformer: choose {KNOWN} models."
        )
    return HubEncoder(model, *_preprocessing(name)).eval()


def _preprocessing(name: str) -> tuple[ChannelValues, ChannelValues, Preprocessing]:
    from transformers.image_processing_base import ImageProcessingMixin

    try:
        values, _ = ImageProcessingMixin.get_image_processor_dict(name)
        mean, std = values["image_mean"], values["image_std"]
    except (OSError, KeyError):
        return IMAGENET_MEAN, IMAGENET_STD, STANDARD
    return (mean[0], mean[1], mean[2]), (std[0], std[1], std[2]), Preprocessing.of_hub(values)
