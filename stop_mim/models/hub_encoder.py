"""Vision Transformers of the Hugging Face hub with the interface of our encoder, for evaluation."""

import math
from collections.abc import Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor

from stop_mim.data.augment import IMAGENET_MEAN, IMAGENET_STD, ChannelValues
from stop_mim.errors import InputError, MissingExtra, first_line
from stop_mim.models.encoder import STANDARD, FrozenEncoder, Images, Preprocessing
from stop_mim.records import from_plain

KNOWN = "ViT, DeiT, DINO, DINOv2, I-JEPA, MAE, BEiT and data2vec"
# Other models with these attributes may have layers of several widths, as Swin has.
PLAIN = ("vit", "vit_mae", "deit", "dinov2", "dinov2_with_registers", "ijepa", "vit_msn", "beit", "data2vec-vision")
# The model types whose last layer, a classifier's, is left out.
WITH_POOLER = ("vit", "deit", "ijepa", "beit", "data2vec-vision")
# PIL's numbers of filters.
FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
# Image processors for which one number as the size is the short side's; the others resize both sides to it.
SHORT_SIDE = ("Bit", "CLIP", "ConvNext")
# Image processors that crop unless their file says that they do not.
CROPPING = ("Bit", "CLIP", "DeiT")


class HubEncoder(FrozenEncoder):
    """A transformers model; a call returns normed patch tokens (of BEiT and data2vec, which have no last norm, plain ones)."""

    def __init__(
        self,
        model: Any,
        mean: ChannelValues = IMAGENET_MEAN,
        std: ChannelValues = IMAGENET_STD,
        preprocessing: Preprocessing = STANDARD,
    ) -> None:
        config = model.config
        side, sizes = config.patch_size, config.image_size
        height, width = (sizes, sizes) if isinstance(sizes, int) else sizes
        grid = (height // side, width // side)
        super().__init__(config.hidden_size, config.num_hidden_layers, grid, (side, side), mean, std)
        self.model: Any = model
        self.preprocessing = preprocessing
        self.pools = ("mean",)
        if getattr(getattr(model, "embeddings", None), "cls_token", None) is not None:
            # BEiT and data2vec are fine-tuned on the mean of their patches, which their config.json says.
            self.pools = ("mean", "cls") if getattr(config, "use_mean_pooling", False) else ("cls", "mean")

    def forward(self, images: Images) -> Float[Tensor, "batch n_patches dim"]:
        return self.last_layers(images, 1)[0][:, -math.prod(self.grid_of(images)) :]

    def last_layers(self, images: Images, layers: int) -> list[Float[Tensor, "batch n_tokens dim"]]:
        # DINOv2 always interpolates its positions and has no such argument.
        asked = not self.model.config.model_type.startswith("dinov2")
        options = {"interpolate_pos_encoding": True} if asked and self.grid_of(images) != self.grid else {}
        outputs = self.model(images, output_hidden_states=True, **options).hidden_states
        return [self.model.layernorm(tokens) for tokens in outputs[-layers:]]


def require_plain(config: Mapping[str, Any], name: str) -> None:
    """Raise InputError unless a config.json describes a model that can be loaded here."""
    kind = config.get("model_type", "model of another library")
    if kind not in PLAIN or not isinstance(config.get("patch_size", 16), int):
        raise InputError(f"hf:{name} is a '{kind}', not a plain Vision Transformer: choose {KNOWN} models.")


def load_hub_encoder(name: str, pretrained: bool = True) -> HubEncoder:
    """Load a model from the hub or from a local folder; no code of the model runs, nor code in a file of weights."""
    try:
        import transformers
    except ImportError as error:
        raise MissingExtra("hf: encoders", "transformers", "hf") from error
    # It warns of weights that do not belong to the encoder, such as a decoder's.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        # Before the weights, which may be large, are downloaded.
        require_plain(config.to_dict(), name)
        # transformers' MAE masks patches at random; its encoder is a plain ViT with the same weights.
        if config.model_type == "vit_mae":
            config = transformers.ViTConfig(**{k: v for k, v in config.to_dict().items() if k != "model_type"})
        options: dict[str, Any] = {"add_pooling_layer": False} if config.model_type in WITH_POOLER else {}
        if pretrained:
            # Without safetensors (DINO, data2vec) a pickle is read, which may contain only tensors.
            options |= {"weights_only": True, "trust_remote_code": False, "output_loading_info": True}
            model, report = transformers.AutoModel.from_pretrained(name, config=config, **options)
            if missing := sorted(report["missing_keys"]):
                raise ValueError(f"it lacks {len(missing)} weights, {missing[0]} among them")
        else:
            model = transformers.AutoModel.from_config(config, **options)
    except InputError:
        raise
    # The hub, the network and the models raise all kinds of errors.
    except Exception as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise InputError(
            f"hf:{name} could not be loaded ({reason}): check the name and the network; a file of weights must contain only "
            "tensors."
        ) from error
    return HubEncoder(model, *_preprocessing(name)).eval()


def _preprocessing(name: str) -> tuple[ChannelValues, ChannelValues, Preprocessing]:
    from transformers.image_processing_base import ImageProcessingMixin

    try:
        values, _ = ImageProcessingMixin.get_image_processor_dict(name)
    except OSError:
        values = {}
    return read_hub_preprocessing(values, f"hf:{name}")


def read_hub_preprocessing(
    values: Mapping[str, Any], origin: str
) -> tuple[ChannelValues, ChannelValues, Preprocessing]:
    """Return mean, standard deviation and resizing of a Hugging Face preprocessor_config.json; empty: our defaults."""
    if not values:
        return IMAGENET_MEAN, IMAGENET_STD, STANDARD
    try:
        mean = from_plain(ChannelValues, values.get("image_mean") or IMAGENET_MEAN, "image_mean")
        std = from_plain(ChannelValues, values.get("image_std") or IMAGENET_STD, "image_std")
        if values.get("do_normalize") is False:
            mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        interpolation = FILTERS.get(values.get("resample", 2), "bilinear")
        kind = str(values.get("image_processor_type") or values.get("feature_extractor_type"))
        size, crop, kept = values.get("size"), values.get("crop_size"), 1.0
        if isinstance(size, int) and kind.startswith(SHORT_SIDE):
            size = {"shortest_edge": size}
        keeps_shape = isinstance(size, Mapping) and "shortest_edge" in size
        if size and crop and values.get("do_center_crop", kind.startswith(CROPPING)):
            resized = _long_side(size["shortest_edge"] if keeps_shape else size, "size")
            kept = _long_side(crop, "crop_size") / resized
    except (InputError, KeyError, TypeError, ZeroDivisionError) as error:
        reason = first_line(error).rstrip(".")
        raise InputError(f"The preprocessing in {origin} cannot be read ({reason}): restore it.") from error
    return mean, std, Preprocessing(interpolation, kept, "center" if keeps_shape else "squash")


def _long_side(size: Any, name: str) -> int:
    """Return the longer side of a size: one number, two, or two by name."""
    sides = size.values() if isinstance(size, Mapping) else size if isinstance(size, list) else [size]
    return max(from_plain(int, side, name) for side in sides)
