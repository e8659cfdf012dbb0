"""The encoder: a timm Vision Transformer that can encode a subset of patches.

It is a timm model and nothing else, so that what is trained here loads there.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import timm
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from stop_mim.data.augment import IMAGENET_MEAN, IMAGENET_STD, ChannelValues
from stop_mim.errors import InputError
from stop_mim.files import write_atomically
from stop_mim.models.initialisation import initialise_transformer
from stop_mim.positions import Grid, SinCosPositions

EncoderSize = Literal["tiny", "small", "base", "large", "huge", "giant"]
ENCODER_FILE = "encoder.safetensors"
FILE_FORMAT = "stop-mim encoder"


@dataclass(frozen=True)
class Dimensions:
    """Width, depth, heads and hidden width of a transformer."""

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


class Encoder(nn.Module):
    """A timm Vision Transformer, called for its normed patch tokens."""

    def __init__(
        self, vit: VisionTransformer, mean: Sequence[float] = IMAGENET_MEAN, std: Sequence[float] = IMAGENET_STD
    ) -> None:
        super().__init__()
        self.vit = vit
        self.mean: ChannelValues = (mean[0], mean[1], mean[2])
        self.std: ChannelValues = (std[0], std[1], std[2])
        self.dim: int = vit.embed_dim
        self.depth = len(vit.blocks)
        self.heads: int = vit.blocks[0].attn.num_heads
        self.grid: Grid = tuple(vit.patch_embed.grid_size)
        self.patch_size: tuple[int, int] = tuple(vit.patch_embed.patch_size)
        self.image_size = (self.grid[0] * self.patch_size[0], self.grid[1] * self.patch_size[1])

    def forward(
        self, images: Float[Tensor, "batch 3 height width"], indices: Int[Tensor, "batch n"] | None = None
    ) -> Float[Tensor, "batch n_patches dim"]:
        """Normed tokens of all patches, or of those with these (row-major) indices alone."""
        return self.vit.norm(self.vit.blocks(self._embed_patches(images, indices)))[:, self.vit.num_prefix_tokens :]

    def embed(
        self, images: Float[Tensor, "batch 3 height width"], layers: int = 1
    ) -> Float[Tensor, "batch layers_times_dim"]:
        """Average-pooled normed patch tokens of the last layers, concatenated; the last layer comes last."""
        if not 1 <= layers <= self.depth:
            raise InputError(f"layers is {layers}: this encoder has {self.depth} layers, choose 1 to {self.depth}.")
        tokens, pooled = self._embed_patches(images, None), []
        for number, block in enumerate(self.vit.blocks, start=1):
            tokens = block(tokens)
            if number > self.depth - layers:
                pooled.append(self.vit.norm(tokens)[:, self.vit.num_prefix_tokens :].mean(1))
        return torch.cat(pooled, dim=1)

    def _embed_patches(
        self, images: Float[Tensor, "batch 3 height width"], indices: Int[Tensor, "batch n"] | None
    ) -> Float[Tensor, "batch n_tokens dim"]:
        vit = self.vit
        grid = self._grid_of(images)
        if vit.num_prefix_tokens:
            tokens = vit.norm_pre(vit._pos_embed(vit.patch_embed(images)))
            if indices is None:
                return tokens
            prefix, patches = tokens.split([vit.num_prefix_tokens, tokens.shape[1] - vit.num_prefix_tokens], dim=1)
            return torch.cat([prefix, gather_patches(patches, indices)], dim=1)
        patches = cut_patches(images, self.patch_size)
        positions = vit.pos_embed
        if grid != self.grid:
            positions = resample_abs_pos_embed(positions, list(grid), list(self.grid), num_prefix_tokens=0)
        if indices is not None:
            # Before the projection, so that only the patches that are needed are embedded.
            patches, positions = gather_patches(patches, indices), positions[0][indices]
        projection = vit.patch_embed.proj
        embedded = F.linear(patches, projection.weight.flatten(1), projection.bias)
        return vit.norm_pre(vit.pos_drop(vit.patch_embed.norm(embedded) + positions))

    def _grid_of(self, images: Float[Tensor, "batch 3 height width"]) -> Grid:
        height, width = images.shape[-2:]
        if height % self.patch_size[0] or width % self.patch_size[1]:
            raise InputError(
                f"Images of {height}x{width} pixels cannot be cut into patches of {self.patch_size[0]}x"
                f"{self.patch_size[1]}: resize them to multiples of the patch size."
            )
        return height // self.patch_size[0], width // self.patch_size[1]

    def architecture(self) -> dict[str, Any]:
        """Arguments of timm's VisionTransformer that make this architecture, for an encoder made here."""
        return {
            "img_size": list(self.image_size),
            "patch_size": list(self.patch_size),
            "embed_dim": self.dim,
            "depth": self.depth,
            "num_heads": self.heads,
            "mlp_ratio": self.vit.blocks[0].mlp.fc1.out_features / self.dim,
            "class_token": False,
            "global_pool": "avg",
            "fc_norm": False,
            "num_classes": 0,
            "dynamic_img_size": True,
        }


def create_encoder(
    size: EncoderSize | Dimensions,
    image_size: tuple[int, int] | int = 224,
    patch_size: int = 16,
    drop_path: float = 0.0,
) -> Encoder:
    """A new encoder without class token, with fixed sine-cosine positions and depth-scaled initial weights."""
    dimensions = size if isinstance(size, Dimensions) else SIZES[size]
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    if patch_size < 1 or height % patch_size or width % patch_size or min(height, width) < 1:
        raise InputError(
            f"encoder.patch_size is {patch_size}: images of {height}x{width} pixels cannot be cut into such patches; "
            "choose a size that divides both sides."
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
        global_pool="avg",
        fc_norm=False,
        num_classes=0,
        dynamic_img_size=True,
        drop_path_rate=drop_path,
    )
    initialise_transformer(vit, vit.blocks)
    grid = (height // patch_size, width // patch_size)
    vit.pos_embed = nn.Parameter(SinCosPositions(grid, dimensions.width).table()[None].clone(), requires_grad=False)
    return Encoder(vit)


def cut_patches(
    images: Float[Tensor, "batch channels height width"], patch_size: tuple[int, int]
) -> Float[Tensor, "batch n_patches pixels"]:
    """Patches of the images, row-major, with their pixels in the order of a convolution's weight."""
    height, width = patch_size
    patches = images.unflatten(3, (-1, width)).unflatten(2, (-1, height))  # (B, C, rows, height, columns, width)
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def gather_patches(
    patches: Float[Tensor, "batch n_patches dim"], indices: Int[Tensor, "batch n"]
) -> Float[Tensor, "batch n dim"]:
    """The patches with these indices, an image at a time."""
    return torch.gather(patches, 1, indices[..., None].expand(-1, -1, patches.shape[-1]))


def save_encoder(encoder: Encoder, path: Path) -> None:
    """Write an encoder made here as safetensors: timm's own names, and in the metadata how to build the model."""
    metadata = {
        "format": FILE_FORMAT,
        "architecture": json.dumps(encoder.architecture()),
        "mean": json.dumps(encoder.mean),
        "std": json.dumps(encoder.std),
    }
    tensors = {name: tensor.detach().contiguous() for name, tensor in encoder.vit.state_dict().items()}
    write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata))


def load_encoder(name: str | Path, pretrained: bool = True) -> Encoder:
    """An encoder by name, in evaluation mode: a run's folder, a .safetensors file, or timm:MODEL.

    Called with images (B, 3, H, W), normalised with its `mean` and `std`, it gives normed patch tokens (B, N, D);
    `embed(images, layers)` gives average-pooled features (B, layers · D).
    """
    if str(name).startswith("timm:"):
        return _load_timm(str(name).removeprefix("timm:"), pretrained).eval()
    path = Path(name)
    if path.is_dir():
        path = path / ENCODER_FILE
        if not path.exists():
            raise InputError(f"{name} holds no {ENCODER_FILE}: name the folder of a run that has saved a checkpoint.")
    if not path.exists():
        raise InputError(f"There is no encoder '{name}': give a run's folder, a .safetensors file or timm:MODEL.")
    return _load_file(path).eval()


def _load_file(path: Path) -> Encoder:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dictionary
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} cannot be read as safetensors ({error}): save or copy it again.") from error
    if metadata.get("format") != FILE_FORMAT:
        raise InputError(f"{path} does not say which architecture it holds: give an encoder that stop-mim saved.")
    encoder = Encoder(
        VisionTransformer(**json.loads(metadata["architecture"])),
        json.loads(metadata["mean"]),
        json.loads(metadata["std"]),
    )
    try:
        encoder.vit.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path} does not fit the architecture that it names ({reason}): save it again.") from error
    encoder.vit.pos_embed.requires_grad_(False)
    return encoder


def _load_timm(name: str, pretrained: bool) -> Encoder:
    if name.split(".")[0] not in timm.list_models():
        close = timm.list_models(f"*{name.split('_patch')[0]}*")[:3] or timm.list_models("vit_small*")[:3]
        raise InputError(f"timm has no model '{name}': it has for instance {', '.join(close)}.")
    try:
        model = timm.create_model(name, pretrained=pretrained, num_classes=0, dynamic_img_size=True)
    except TypeError:
        model = None
    except Exception as error:
        raise InputError(
            f"timm's weights of '{name}' cannot be had ({type(error).__name__}): check the name and the network, or "
            "download them beforehand."
        ) from error
    if not isinstance(model, VisionTransformer):
        raise InputError(f"timm's '{name}' is not a plain Vision Transformer: choose one of timm's vit_* models.")
    return Encoder(model, model.pretrained_cfg["mean"], model.pretrained_cfg["std"])
