"""Vision Transformers of the Hugging Face hub with the interface of our encoder, for evaluation."""

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from stop_mim.data.augment import IMAGENET_MEAN, IMAGENET_STD, ChannelValues
from stop_mim.errors import InputError, MissingExtra
from stop_mim.models.layers import Images, Pool, patch_grid, pool_tokens, require_layers
from stop_mim.models.preprocessing import STANDARD, Preprocessing, make_transform
from stop_mim.positions import Grid

KNOWN = "ViT, DeiT, DINO, DINOv2, I-JEPA, MAE, BEiT and data2vec"
# The model types whose last layer, a classifier's, is left out.
WITH_POOLER = ("vit", "deit", "ijepa", "beit", "data2vec-vision")


class HubEncoder(nn.Module):
    """A transformers model; a call returns normed patch tokens (of BEiT and data2vec, which have no last norm, plain ones)."""

    pool: Pool = "mean"
    """What `embed` returns of a layer: the mean of its patches, or its class token."""
    guessed_heads = False

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
        self.image_size = self._own_size = (self.grid[0] * self.patch_size[0], self.grid[1] * self.patch_size[1])
        self.pools: tuple[Pool, ...] = ("mean",)
        if getattr(getattr(model, "embeddings", None), "cls_token", None) is not None:
            # BEiT and data2vec are fine-tuned on the mean of their patches, which their config.json says.
            self.pools = ("mean", "cls") if getattr(config, "use_mean_pooling", False) else ("cls", "mean")

    @property
    def transform(self) -> Callable[[Any], Tensor]:
        """The preprocessing: from a PIL image to a normalised tensor (3, H, W) of the encoder's image size."""
        return make_transform(self.image_size, self.mean, self.std, self.preprocessing)

    def forward(self, images: Images) -> Float[Tensor, "batch n_patches dim"]:
        """Return normed tokens of all patches."""
        n_patches = math.prod(patch_grid(images, self.patch_size))
        return self.model.layernorm(self._run(images)[-1])[:, -n_patches:]

    def embed(self, images: Images, layers: int = 1) -> Float[Tensor, "batch layers_times_dim"]:
        """Return normed tokens of the last layers, pooled as `pool` says and concatenated; the last layer comes last."""
        require_layers(layers, self.depth)
        n_patches = math.prod(patch_grid(images, self.patch_size))
        found = [self.model.layernorm(tokens) for tokens in self._run(images)[-layers:]]
        return torch.cat([pool_tokens(tokens, n_patches, self.pool) for tokens in found], dim=1)

    def _run(self, images: Tensor) -> tuple[Tensor, ...]:
        # DINOv2 always interpolates its positions and has no such argument.
        asked = not self.model.config.model_type.startswith("dinov2")
        options = {"interpolate_pos_encoding": True} if asked and images.shape[-2:] != self._own_size else {}
        return self.model(images, output_hidden_states=True, **options).hidden_states


def load_hub_encoder(name: str, pretrained: bool = True) -> HubEncoder:
    """Load a model from the hub or from a local folder; no code of the model runs, nor code in a file of weights."""
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
        options: dict[str, Any] = {"add_pooling_layer": False} if config.model_type in WITH_POOLER else {}
        if pretrained:
            # Without safetensors (DINO, data2vec) a pickle is read as far as it holds tensors alone.
            safe = {"weights_only": True, "trust_remote_code": False}
            model, report = kind.from_pretrained(name, config=config, output_loading_info=True, **safe, **options)
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
            f"hf:{name} could not be loaded ({reason}): check the name and the network; a file of weights must hold tensors "
            "alone."
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
