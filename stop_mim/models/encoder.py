"""The encoder: a timm Vision Transformer that can encode a subset of patches, and its files.

Its weights have timm's names, so that timm loads what is trained here.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from safetensors.torch import save_file
from timm.layers import Attention, LayerNorm, Mlp, resample_abs_pos_embed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from stop_mim.data.augment import IMAGENET_MEAN, IMAGENET_STD
from stop_mim.errors import InputError
from stop_mim.files import write_atomically
from stop_mim.models.config import EncoderSize, Initialisation
from stop_mim.models.frozen_encoder import STANDARD, FrozenEncoder, Preprocessing
from stop_mim.models.kernels.short_attention import ShortAttention
from stop_mim.models.layers import Images, initialise_transformer, run_layer
from stop_mim.positions import SinCosPositions

ENCODER_FILE = "encoder.safetensors"
FILE_FORMAT = "stop-mim encoder"
NORM_EPS = 1e-6
# timm's arguments for a model without a classifier, for images of any size.
TOKENS_ONLY: dict[str, Any] = {"global_pool": "avg", "fc_norm": False, "num_classes": 0, "dynamic_img_size": True}


@dataclass(frozen=True)
class Dimensions:
    """Width, depth, number of heads and relative width of the MLPs of a transformer."""

    width: int
    depth: int
    heads: int
    mlp_ratio: float = 4.0


SIZES: dict[str, Dimensions] = {
    "tiny": Dimensions(192, 12, 3),
    "small": Dimensions(384, 12, 6),
    "base": Dimensions(768, 12, 12),
    "large": Dimensions(1024, 24, 16),
    "huge": Dimensions(1280, 32, 16),
    "giant": Dimensions(1408, 40, 16, 48 / 11),
}


class Encoder(FrozenEncoder):
    """A timm Vision Transformer; a call returns normed patch tokens.

    Args:
        vit: timm's model.
        mean: mean of the image normalisation, by channel.
        std: standard deviation of the image normalisation, by channel.
    """

    recompute = False
    """Whether activations are computed again for the gradient; see `use_fast_kernels`."""

    def __init__(
        self, vit: VisionTransformer, mean: Sequence[float] = IMAGENET_MEAN, std: Sequence[float] = IMAGENET_STD
    ) -> None:
        patches = vit.patch_embed
        super().__init__(vit.embed_dim, len(vit.blocks), tuple(patches.grid_size), tuple(patches.patch_size), mean, std)
        self.vit = vit
        self.heads: int = vit.blocks[0].attn.num_heads
        # Models with a class token are probed on it.
        self.pools = ("cls", "mean") if vit.has_class_token else ("mean",)

    def forward(
        self, images: Images, indices: Int[Tensor, "batch n"] | None = None
    ) -> Float[Tensor, "batch n_patches dim"]:
        """Return normed tokens of all patches, or see and return only those with these row-major indices."""
        return self.transform_tokens(self.embed_patches(images, indices))[:, self.vit.num_prefix_tokens :]

    def last_layers(self, images: Images, layers: int) -> list[Float[Tensor, "batch n_tokens dim"]]:
        """Return the normed tokens of the last layers, prefix tokens included; the last layer comes last."""
        tokens, found = self.embed_patches(images), []
        for number, block in enumerate(self.vit.blocks, start=1):
            tokens = block(tokens)
            if number > self.depth - layers:
                found.append(self.vit.norm(tokens))
        return found

    def embed_patches(
        self, images: Images, indices: Int[Tensor, "batch n"] | None = None
    ) -> Float[Tensor, "batch n_tokens dim"]:
        """Return the tokens before the first layer, prefix tokens included, of all patches or of those with these indices."""
        vit = self.vit
        if vit.num_prefix_tokens:
            self.grid_of(images)
            tokens = vit.norm_pre(vit._pos_embed(vit.patch_embed(images)))
            if indices is None:
                return tokens
            prefix, patches = tokens.split([vit.num_prefix_tokens, tokens.shape[1] - vit.num_prefix_tokens], dim=1)
            return torch.cat([prefix, gather_patches(patches, indices)], dim=1)
        positions = self.positions_for(images)
        patches = cut_patches(images, self.patch_size)
        if indices is not None:
            # Before the projection, so that only these patches are embedded.
            patches, positions = gather_patches(patches, indices), positions[0][indices]
        projection = vit.patch_embed.proj
        embedded = F.linear(patches, projection.weight.flatten(1), projection.bias)
        return vit.norm_pre(vit.pos_drop(vit.patch_embed.norm(embedded) + positions))

    def transform_tokens(self, tokens: Float[Tensor, "batch n_tokens dim"]) -> Float[Tensor, "batch n_tokens dim"]:
        """Return the tokens after all layers and the last norm."""
        for block in self.vit.blocks:
            tokens = run_layer(block, tokens, self.recompute)
        return self.vit.norm(tokens)

    def positions_for(self, images: Images) -> Float[Tensor, "1 n_patches dim"]:
        """Return the positions for images of this size, for an encoder without prefix tokens."""
        grid, positions = self.grid_of(images), self.vit.pos_embed
        if grid == self.grid:
            return positions
        return resample_abs_pos_embed(positions, list(grid), list(self.grid), num_prefix_tokens=0)

    def architecture(self) -> dict[str, Any]:
        """Return the arguments of timm's VisionTransformer for this architecture; `norm_eps` is stored separately."""
        vit = self.vit
        architecture = {
            "img_size": list(self.image_size),
            "patch_size": list(self.patch_size),
            "embed_dim": self.dim,
            "depth": self.depth,
            "num_heads": self.heads,
            "mlp_ratio": mlp_ratio(vit.blocks[0].mlp.fc1.out_features, self.dim),
            "class_token": vit.has_class_token,
            **TOKENS_ONLY,
        }
        qkv_bias = vit.blocks[0].attn.qkv.bias is not None
        unusual = {"qkv_bias": (qkv_bias, True), "no_embed_class": (vit.no_embed_class, False)}
        return architecture | {name: value for name, (value, usual) in unusual.items() if value != usual}

    @property
    def norm_eps(self) -> float:
        """The epsilon of the layer norms."""
        return self.vit.blocks[0].norm1.eps


def create_encoder(
    size: EncoderSize | Dimensions,
    image_size: tuple[int, int] | int = 224,
    patch_size: int = 16,
    initialisation: Initialisation = "scaled",
) -> Encoder:
    """Create an encoder without class token, with fixed sine-cosine positions; see `initialise_transformer` for its weights."""
    dimensions = size if isinstance(size, Dimensions) else SIZES[size]
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    if patch_size < 1 or height % patch_size or width % patch_size or min(height, width) < 1:
        raise InputError(
            f"encoder.patch_size is {patch_size}: choose a size that divides both sides of images of {height}x{width} "
            "pixels."
        )
    if dimensions.heads < 1 or dimensions.width % (4 * dimensions.heads):
        raise InputError(
            f"encoder.width is {dimensions.width} with {dimensions.heads} heads: the width must be a multiple of four times "
            "the number of heads."
        )
    vit = VisionTransformer(
        img_size=(height, width),
        patch_size=patch_size,
        embed_dim=dimensions.width,
        depth=dimensions.depth,
        num_heads=dimensions.heads,
        mlp_ratio=dimensions.mlp_ratio,
        class_token=False,
        **TOKENS_ONLY,
    )
    initialise_transformer([vit], vit.blocks, initialisation)
    grid = (height // patch_size, width // patch_size)
    vit.pos_embed = nn.Parameter(SinCosPositions(grid, dimensions.width).table()[None].clone(), requires_grad=False)
    return Encoder(vit)


def cut_patches(
    images: Float[Tensor, "batch channels height width"], patch_size: tuple[int, int]
) -> Float[Tensor, "batch n_patches pixels"]:
    """Cut images into patches, row-major, with their pixels in the order of a convolution's weight."""
    height, width = patch_size
    patches = images.unflatten(3, (-1, width)).unflatten(2, (-1, height))  # (B, C, rows, height, columns, width)
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def gather_patches(
    patches: Float[Tensor, "batch n_patches dim"], indices: Int[Tensor, "batch n"]
) -> Float[Tensor, "batch n dim"]:
    """Return the patches with these indices, which differ by image."""
    return torch.gather(patches, 1, indices[..., None].expand(-1, -1, patches.shape[-1]))


def mlp_ratio(hidden: int, width: int) -> float:
    """Return the ratio from which timm, which rounds down, computes this hidden width."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)


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


def require_depth(depth: Any, tensors: Mapping[str, Tensor], origin: str) -> None:
    """Raise InputError unless the weights have that many layers; a depth of millions would fill the memory."""
    if depth != (layers := count_layers(tensors)):
        raise InputError(f"{origin} names a depth of {depth} and has the weights of {layers} layers: save it again.")


def count_layers(tensors: Mapping[str, Tensor]) -> int:
    """Return the number of layers that have weights."""
    return len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})


def fill_encoder(
    vit: VisionTransformer, tensors: Mapping[str, Tensor], origin: str, mean: Sequence[float], std: Sequence[float]
) -> Encoder:
    """Load weights into a `shell` and return the encoder in evaluation mode; raise InputError if they do not fit."""
    if wrong := misfit(tensors, vit.state_dict()):
        raise InputError(f"{origin} does not fit a plain Vision Transformer of its architecture: {wrong}.")
    # Copies: the tensors may be memory-mapped from a file that is replaced later.
    copies = {name: tensor.to(torch.float32, copy=True) for name, tensor in tensors.items()}
    vit.load_state_dict(copies, strict=True, assign=True)
    encoder = Encoder(vit, mean, std)
    vit.pos_embed.requires_grad_(not _are_sincos(encoder))
    return encoder.eval()


def _are_sincos(encoder: Encoder) -> bool:
    """Whether the positions are the fixed ones, up to half precision, and thus not trained."""
    patches = encoder.vit.pos_embed.detach()[0, -encoder.grid[0] * encoder.grid[1] :]
    return encoder.dim % 4 == 0 and torch.allclose(
        patches, SinCosPositions(encoder.grid, encoder.dim).table(), atol=1e-3
    )


def encoder_metadata(encoder: Encoder) -> dict[str, str]:
    """Return how to build an encoder, as metadata of a file; raise InputError unless it is a plain Vision Transformer."""
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
        metadata["preprocessing"] = json.dumps(encoder.preprocessing._asdict())
    return metadata


def peculiarity(encoder: Encoder) -> str | None:
    """Describe what an encoder has that a plain Vision Transformer has not; None if it is one."""
    for block in encoder.vit.blocks:
        # ShortAttention computes what the attention that it replaced computes.
        is_known = type(block.attn) in (Attention, ShortAttention) and type(block.mlp) is Mlp
        if type(block) is not Block or not is_known:
            return "its layers are of another kind"
        activation = block.mlp.act
        if not isinstance(activation, nn.GELU) or activation.approximate != "none":
            return f"{activation} in its layers"
    return misfit(encoder.vit.state_dict(), shell(encoder.architecture()).state_dict())


def save_encoder(encoder: Encoder, path: str | Path) -> None:
    """Save an encoder as safetensors, with timm's names, and how to build the model in the metadata."""
    metadata = encoder_metadata(encoder)
    tensors = {name: tensor.detach().contiguous() for name, tensor in encoder.vit.state_dict().items()}
    write_atomically(Path(path), lambda temporary: save_file(tensors, temporary, metadata))


def encoder_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], file: Path) -> Encoder:
    """Build the encoder from the contents of a file of `save_encoder`."""
    try:
        values = {name: json.loads(value) for name, value in metadata.items() if name != "format"}
        require_depth(values["architecture"]["depth"], tensors, str(file))
        vit = shell(values["architecture"], values.get("norm_eps", NORM_EPS))
        mean, std = values["mean"], values["std"]
        preprocessing = Preprocessing(**values.get("preprocessing", {}))
    except InputError:
        raise
    # timm raises all kinds of errors for arguments that it does not know.
    except Exception as error:
        raise InputError(f"{file} has an architecture that cannot be built ({error}): save it again.") from error
    encoder = fill_encoder(vit, tensors, str(file), mean, std)
    encoder.preprocessing = preprocessing
    return encoder


def _size(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a single number"


def _first_few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def load_timm_encoder(name: str, pretrained: bool = True) -> Encoder:
    """Return timm's Vision Transformer of this name."""
    if name.split(".")[0] not in timm.list_models():
        close = timm.list_models(f"*{name.split('_patch')[0]}*")[:3] or timm.list_models("vit_small*")[:3]
        raise InputError(f"timm has no model '{name}': choose another, such as {', '.join(close)}.")
    try:
        model = timm.create_model(name, pretrained=pretrained, num_classes=0, dynamic_img_size=True)
    except TypeError:
        model = None
    except Exception as error:
        raise InputError(
            f"timm's weights of '{name}' cannot be loaded ({type(error).__name__}): check the name and the network, or "
            "download them first."
        ) from error
    if not isinstance(model, VisionTransformer):
        raise InputError(f"timm's '{name}' is not a plain Vision Transformer: choose one of timm's vit_* models.")
    encoder = Encoder(model, model.pretrained_cfg["mean"], model.pretrained_cfg["std"]).eval()
    encoder.preprocessing = Preprocessing.of_timm(model.pretrained_cfg)
    return encoder
