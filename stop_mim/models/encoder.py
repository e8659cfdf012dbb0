"""The encoder: a timm Vision Transformer that can encode a subset of patches, and the interface of all encoders.

Its weights have timm's names, so that timm loads what is trained here; `encoder_file.py` saves and reads them.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from timm.data.transforms_factory import create_transform
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision.transforms import Compose

from stop_mim.data.augment import IMAGENET_MEAN, IMAGENET_STD, ChannelValues
from stop_mim.data.decode import upright_rgb
from stop_mim.errors import InputError
from stop_mim.models.config import EncoderSize, Initialisation
from stop_mim.positions import Grid, SinCosPositions

Images = Float[Tensor, "batch 3 height width"]
Pool = Literal["mean", "cls"]

# timm's arguments for a model without a classifier, for images of any size.
TOKENS_ONLY: dict[str, Any] = {"global_pool": "avg", "fc_norm": False, "num_classes": 0, "dynamic_img_size": True}

WEIGHT_STD = 0.02


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


@dataclass(frozen=True)
class Preprocessing:
    """How images are resized and cropped to the encoder's size, under timm's names; the defaults are our encoders'."""

    interpolation: str = "bicubic"
    crop_pct: float = 1.0
    """Part of the resized image's short side that the crop keeps."""
    crop_mode: str = "center"
    """center: resize the short side and crop; squash: resize both sides."""

    @classmethod
    def of_timm(cls, values: Mapping[str, Any]) -> "Preprocessing":
        """Read timm's `pretrained_cfg`."""
        return cls(**{one.name: values[one.name] for one in fields(cls) if values.get(one.name) is not None})


STANDARD = Preprocessing()


class FrozenEncoder(nn.Module, ABC):
    """The interface of encoders for evaluation, whether ours, timm's or of the Hugging Face hub.

    A call returns normed patch tokens (B, N, D), `embed` pooled features (B, layers · D).
    """

    pool: Pool = "mean"
    """What `embed` returns of a layer: the mean of its patches, or its class token."""
    pools: tuple[Pool, ...]
    """The values that `pool` may have, the usual one first."""
    preprocessing = STANDARD
    guessed_heads = False
    """Whether the number of heads was not stored with the weights."""

    def __init__(
        self, dim: int, depth: int, grid: Grid, patch_size: tuple[int, int], mean: Sequence[float], std: Sequence[float]
    ) -> None:
        super().__init__()
        self.dim, self.depth, self.grid, self.patch_size = dim, depth, grid, patch_size
        self.image_size = (grid[0] * patch_size[0], grid[1] * patch_size[1])
        self.mean: ChannelValues = (mean[0], mean[1], mean[2])
        self.std: ChannelValues = (std[0], std[1], std[2])

    @abstractmethod
    def last_layers(self, images: Images, layers: int) -> list[Float[Tensor, "batch n_tokens dim"]]:
        """Return the normed tokens of the last layers, prefix tokens included; the last layer comes last."""

    def embed(self, images: Images, layers: int = 1) -> Float[Tensor, "batch layers_times_dim"]:
        """Return normed tokens of the last layers, pooled as `pool` says and concatenated; the last layer comes last."""
        if not 1 <= layers <= self.depth:
            raise InputError(f"layers is {layers}: this encoder has {self.depth} layers, choose 1 to {self.depth}.")
        found = self.last_layers(images, layers)
        if self.pool == "cls":
            return torch.cat([tokens[:, 0] for tokens in found], dim=1)
        first = found[0].shape[1] - math.prod(self.grid_of(images))
        return torch.cat([tokens[:, first:].mean(1) for tokens in found], dim=1)

    def grid_of(self, images: Images) -> Grid:
        """Return rows and columns of patches of images of this size."""
        height, width = images.shape[-2:]
        if height % self.patch_size[0] or width % self.patch_size[1]:
            raise InputError(
                f"Images of {height}x{width} pixels cannot be cut into patches of {self.patch_size[0]}x{self.patch_size[1]}: "
                "resize them to multiples of the patch size."
            )
        return height // self.patch_size[0], width // self.patch_size[1]

    @property
    def transform(self) -> Callable[[Any], Tensor]:
        """The preprocessing: from a PIL image to a normalised tensor (3, H, W) of the encoder's image size.

        An image of any mode but floating point is turned upright and made RGB, as in training; the rest is timm's.
        """
        how = asdict(self.preprocessing)
        resize = create_transform((3, *self.image_size), mean=self.mean, std=self.std, **how)
        return Compose([upright_rgb, resize])


class Encoder(FrozenEncoder):
    """A timm Vision Transformer; a call returns normed patch tokens.

    Args:
        vit: timm's model.
        mean: mean of the image normalisation, by channel.
        std: standard deviation of the image normalisation, by channel.
    """

    recompute = False
    """Whether activations are recomputed for the gradient instead of kept; see `use_fast_kernels`."""

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

    def embed(self, images: Images, layers: int = 1) -> Float[Tensor, "batch layers_times_dim"]:
        pooled = super().embed(images, layers).unflatten(1, (layers, self.dim))
        # Some of timm's models have their last norm here, after pooling; in others this changes nothing.
        return self.vit.fc_norm(pooled).flatten(1)

    def last_layers(self, images: Images, layers: int) -> list[Float[Tensor, "batch n_tokens dim"]]:
        """Return the tokens of the last layers; they are normed unless the model's last norm comes after pooling."""
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
        return self.vit.fc_norm(self.vit.norm(tokens))

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
        return self.vit.blocks[0].norm1.eps


def create_encoder(
    size: EncoderSize | Dimensions,
    image_size: tuple[int, int] | int = 224,
    patch_size: int = 16,
    initialisation: Initialisation = "scaled",
) -> Encoder:
    """Create an encoder without class token, with fixed sine-cosine positions; see `initialise_transformer` for its weights."""
    if not isinstance(size, Dimensions) and size not in SIZES:
        raise InputError(f"The encoder's size is '{size}': choose one of {', '.join(SIZES)}.")
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


def initialise_transformer(
    parts: Iterable[nn.Module], blocks: Iterable[Any], initialisation: Initialisation = "scaled"
) -> None:
    """Draw truncated normal weights for all linear layers of `parts`, and scale the residual branches of `blocks` by depth.

    Layer l (from 1) has the last weight of both branches divided by √(2l), so that the sum of all branches has the same
    scale at any depth. "release" leaves all weights as they are drawn, all with the same standard deviation.
    """
    released = initialisation == "release"
    for layer in (layer for part in parts for layer in part.modules()):
        if isinstance(layer, nn.Linear | nn.Conv2d):
            # Patches have unit variance and must keep it: with a fixed small std, positions would dominate small patches,
            # and the first targets, features of this network, would depend on positions alone.
            keeps_variance = isinstance(layer, nn.Conv2d) and not released
            fan_in = layer.weight[0].numel()
            nn.init.trunc_normal_(layer.weight, std=1 / math.sqrt(fan_in) if keeps_variance else WEIGHT_STD)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    with torch.no_grad():
        for depth, block in enumerate([] if released else blocks, start=1):
            for branch_end in (block.attn.proj, block.mlp.fc2):
                branch_end.weight.div_(math.sqrt(2 * depth))


def run_layer(
    layer: nn.Module, tokens: Float[Tensor, "batch n dim"], recompute: bool, *arguments: Any
) -> Float[Tensor, "batch m dim"]:
    """Call a layer; with `recompute`, keep only its input and compute the rest again for the gradient."""
    if recompute and torch.is_grad_enabled():
        # The layers draw no random numbers, and a CUDA graph cannot save the state of a generator.
        return checkpoint(layer, tokens, *arguments, use_reentrant=False, preserve_rng_state=False)
    return layer(tokens, *arguments)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode; afterwards every module has the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
