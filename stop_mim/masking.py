"""Mask samplers: which patches are context and which are targets, for a whole batch at once, on any device.

The number of tokens is fixed when a sampler is made, so that all batches have the same shapes; docs/method.md describes
how it is chosen and what is lost.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from stop_mim.errors import InputError
from stop_mim.options import MaskConfig, Range
from stop_mim.positions import Grid, as_grid
from stop_mim.registry import Registry

# Layouts drawn for each image, of which the first with enough context patches is used: with the default counts one in
# twenty is short, so that less than one image in a hundred thousand stays short.
LAYOUT_DRAWS = 4
# With the default counts, this fraction of the blocks, and of the contexts, is too small.
TOO_SMALL_BLOCKS, TOO_SMALL_CONTEXTS = 0.10, 0.05
# A context count is an error if fewer layouts than this fraction can provide it.
FEASIBLE_LAYOUTS, USUAL_LAYOUTS = 0.05, 0.5
# The released code draws masks for the images of one GPU, which are 64, and a context that is too small 20 times.
RELEASE_IMAGES, RELEASE_DRAWS = 64, 20
# This many blocks of the published sizes cover the published fraction of the patches in nearly all images.
BLOCKWISE_DRAWS = 16


Device = torch.device | str
Generator = torch.Generator | None


@dataclass(frozen=True)
class Masks:
    """Patch indices, row-major over the grid and ascending: context patches and target blocks of each image."""

    context: Int[Tensor, "batch n_context"]
    targets: Int[Tensor, "batch n_blocks n_target"]
    grid: Grid | None = None
    """The grid that the indices are of, where it is known."""

    def __len__(self) -> int:
        return len(self.context)

    def __getitem__(self, images: slice) -> "Masks":
        return Masks(self.context[images], self.targets[images], self.grid)


@runtime_checkable
class MaskSampler(Protocol):
    """Draws masks; `repr` describes the sampler in the log."""

    grid: Grid

    @property
    def has_fixed_counts(self) -> bool:
        """Whether the masks of all batches have the same shape."""
        ...

    def sample(self, batch_size: int, device: Device = "cpu", generator: Generator = None) -> Masks:
        """Draw masks for a batch; the generator must be on the same device."""
        ...


MASKS: Registry[Callable[[MaskConfig, Grid], MaskSampler]] = Registry("kind of masks", __name__)
"""Functions from options and grid to a sampler, by `masks.kind`."""


def build_masks(config: MaskConfig, grid: Grid) -> MaskSampler:
    """Build the sampler of `masks.kind`."""
    return MASKS.find(config.kind)(config, grid)


@MASKS.register("random")
def _random(config: MaskConfig, grid: Grid) -> MaskSampler:
    return RandomMasks(grid, config.mask_ratio)


@MASKS.register("blockwise")
def _blockwise(config: MaskConfig, grid: Grid) -> MaskSampler:
    return BlockwiseMasks(grid, config.mask_ratio, config.target_scale, config.target_aspect)


@MASKS.register("multiblock")
def _multiblock(config: MaskConfig, grid: Grid) -> MaskSampler:
    ranges = (config.target_scale, config.target_aspect, config.context_scale, config.context_aspect)
    if config.compat == "release":
        return ReleasedMasks(grid, config.n_blocks, *ranges)
    return MultiBlockMasks(grid, config.n_blocks, *ranges, config.target_tokens, config.context_tokens)


class RandomMasks:
    """Uniform random masking: a fraction of the patches is one target block, the rest is context."""

    has_fixed_counts = True

    def __init__(self, grid: Grid | int, mask_ratio: float = 0.75) -> None:
        MaskConfig("random", mask_ratio=mask_ratio)
        self.grid = as_grid(grid)
        patches = math.prod(self.grid)
        self.target_tokens = round(mask_ratio * patches)
        self.context_tokens = patches - self.target_tokens
        if not (self.target_tokens and self.context_tokens):
            raise InputError(
                f"masks.mask_ratio is {mask_ratio}: on a grid of {_grid_name(self.grid)} it gives {self.context_tokens} "
                f"context and {self.target_tokens} target patches, and both must be at least 1."
            )

    def sample(self, batch_size: int, device: Device = "cpu", generator: Generator = None) -> Masks:
        """Draw masks for a batch; the generator must be on the same device."""
        order = self._scores(batch_size, device, generator).argsort(dim=1)
        context, target = order.split([self.context_tokens, self.target_tokens], dim=1)
        return Masks(context.sort(dim=1).values, target.sort(dim=1).values[:, None], self.grid)

    def _scores(self, batch_size: int, device: Device, generator: Generator) -> Float[Tensor, "batch patches"]:
        """Draw a number for each patch; the patches with the largest ones become targets."""
        return torch.rand(batch_size, math.prod(self.grid), device=device, generator=generator)

    def __repr__(self) -> str:
        counts = f"{self.context_tokens} context, {self.target_tokens} target tokens"
        return f"{type(self).__name__}(grid={_grid_name(self.grid)}, {counts})"


class BlockwiseMasks(RandomMasks):
    """Block-wise masking: one target block, a union of rectangles with a fixed number of patches; the rest is context.

    Rectangles are drawn until they cover that many patches; of the last one, a uniformly random subset is kept. If all of
    them cover too few, random patches fill up. `scale` is a fraction of the grid's area, `aspect` is height over width.
    """

    def __init__(
        self, grid: Grid | int, mask_ratio: float = 0.6, scale: Range = (0.08, 0.4), aspect: Range = (0.3, 3.3)
    ) -> None:
        super().__init__(grid, mask_ratio)
        MaskConfig("blockwise", target_scale=scale, target_aspect=aspect)
        self._shapes = BlockShapes.of(self.grid, scale, aspect)

    def _scores(self, batch_size: int, device: Device, generator: Generator) -> Float[Tensor, "batch patches"]:
        """Draw rectangles; the earlier a rectangle covers a patch, the larger its number."""
        shapes = self._shapes.on(device).draw((batch_size, BLOCKWISE_DRAWS), generator)
        blocks = _place_blocks(shapes, self.grid, generator)
        numbers = torch.arange(BLOCKWISE_DRAWS, device=blocks.device)[:, None]
        first = torch.where(blocks, numbers, BLOCKWISE_DRAWS).amin(1)
        return -(first + torch.rand(first.shape, device=device, generator=generator))


class MultiBlockMasks:
    """I-JEPA's masks: several rectangular target blocks, and one large context block minus the targets.

    Shapes and places of the blocks differ from image to image. Of a block or context with more patches than the fixed
    count, a uniformly random subset is kept.

    Args:
        grid: rows and columns of patches.
        n_blocks: target blocks an image.
        target_scale: smallest and largest area of a target block, as a fraction of the grid's.
        target_aspect: smallest and largest height over width of a target block.
        context_scale: smallest and largest area of the context block.
        context_aspect: smallest and largest height over width of the context block.
        target_tokens: fixed count of patches per target block; by default nine blocks in ten have enough.
        context_tokens: fixed count of patches per context; by default nineteen layouts in twenty leave enough.
    """

    has_fixed_counts = True

    def __init__(
        self,
        grid: Grid | int,
        n_blocks: int = 4,
        target_scale: Range = (0.15, 0.2),
        target_aspect: Range = (0.75, 1.5),
        context_scale: Range = (0.85, 1.0),
        context_aspect: Range = (1.0, 1.0),
        target_tokens: int | None = None,
        context_tokens: int | None = None,
    ) -> None:
        ranges = (target_scale, target_aspect, context_scale, context_aspect)
        # It checks the values.
        MaskConfig("multiblock", n_blocks, *ranges, target_tokens, context_tokens)
        self.grid, self.n_blocks, self._target_scale = as_grid(grid), n_blocks, target_scale
        self._target_shapes = BlockShapes.of(self.grid, target_scale, target_aspect)
        self._context_shapes = BlockShapes.of(self.grid, context_scale, context_aspect)
        self._fix_target_tokens(target_tokens)
        self._fix_context_tokens(context_tokens)

    def _fix_target_tokens(self, wanted: int | None) -> None:
        areas = self._target_shapes.areas()
        self.mean_block_area = float((areas * self._target_shapes.probabilities).sum())
        self.target_tokens = self._target_shapes.area_quantile(TOO_SMALL_BLOCKS) if wanted is None else wanted
        if not 1 <= self.target_tokens <= int(areas.max()):
            raise InputError(
                f"masks.target_tokens is {self.target_tokens}: target blocks on a grid of {_grid_name(self.grid)} have 1 "
                f"to {int(areas.max())} patches; choose a number in that range."
            )
        self._target_shapes = self._target_shapes.at_least(self.target_tokens)

    def _fix_context_tokens(self, wanted: int | None) -> None:
        generator = torch.Generator().manual_seed(0)
        targets, context = self._draw_blocks(4096, "cpu", generator)
        available = (context & ~targets.any(1)).sum(1)
        self.mean_context_available = float(available.float().mean())
        spare = math.prod(self.grid) - self.n_blocks * self.target_tokens
        usual = int(available.float().quantile(TOO_SMALL_CONTEXTS, interpolation="lower"))
        # A context that leaves room for blocks without overlap is worth some patches, but not most: many blocks overlap.
        default = spare if usual / 2 < spare < usual else usual
        self.context_tokens = default if wanted is None else wanted
        # A count that leaves no room for blocks without overlap must be possible in most layouts.
        least = FEASIBLE_LAYOUTS if self.context_tokens <= spare else USUAL_LAYOUTS
        # A number above the grid's may be too large for a tensor.
        feasible = float((available >= min(self.context_tokens, math.prod(self.grid) + 1)).float().mean())
        if self.context_tokens < 1 or feasible < least:
            most = int(available.float().quantile(1 - least, interpolation="lower"))
            raise InputError(
                f"The masks do not fit a grid of {_grid_name(self.grid)} patches: {self.n_blocks} target blocks of scale "
                f"{self._target_scale} leave {most} context patches, fewer than {max(1, self.context_tokens)}; use smaller or "
                "fewer blocks, fewer masks.context_tokens or smaller patches."
            )

    def sample(self, batch_size: int, device: Device = "cpu", generator: Generator = None) -> Masks:
        """Draw masks for a batch; the generator must be on the same device."""
        targets, context = self._draw_layouts(batch_size, device, generator)
        scores = torch.rand(targets.shape, device=device, generator=generator)
        chosen = scores.masked_fill(~targets, -1.0).topk(self.target_tokens, dim=-1).indices
        taken = torch.zeros_like(context).scatter(1, chosen.flatten(1), True)
        # A short context, which is rare, is filled with patches outside all blocks, then with target patches not chosen.
        free = ~targets.any(1)
        preference = (~taken).float() + free + (free & context)
        scores = preference + torch.rand(preference.shape, device=device, generator=generator)
        best = scores.topk(self.context_tokens, dim=-1)
        # If even these are too few, a context patch is used twice: a target is not context unless targets fill the image.
        context_indices = torch.where(best.values < 1, best.indices[:, :1], best.indices)
        return Masks(context_indices.sort(dim=-1).values, chosen.sort(dim=-1).values, self.grid)

    def _draw_layouts(
        self, batch_size: int, device: Device, generator: Generator
    ) -> tuple[Bool[Tensor, "batch blocks patches"], Bool[Tensor, "batch patches"]]:
        """Draw a few layouts an image, and return the first with enough context patches."""
        targets, context = self._draw_blocks(batch_size * LAYOUT_DRAWS, device, generator)
        available = (context & ~targets.any(1)).sum(1).clamp(max=self.context_tokens).unflatten(0, (batch_size, -1))
        # argmax may return any of equal values: earlier draws are made strictly better.
        earliness = torch.arange(LAYOUT_DRAWS, 0, -1, device=available.device)
        best = (available * (LAYOUT_DRAWS + 1) + earliness).argmax(1)
        rows = best + torch.arange(batch_size, device=best.device) * LAYOUT_DRAWS
        return targets[rows], context[rows]

    def _draw_blocks(
        self, layouts: int, device: Device, generator: Generator
    ) -> tuple[Bool[Tensor, "layouts blocks patches"], Bool[Tensor, "layouts patches"]]:
        targets = self._target_shapes.on(device).draw((layouts, self.n_blocks), generator)
        context = self._context_shapes.on(device).draw((layouts, 1), generator)
        return _place_blocks(targets, self.grid, generator), _place_blocks(context, self.grid, generator)[:, 0]

    def __repr__(self) -> str:
        return (
            f"MultiBlockMasks(grid={_grid_name(self.grid)}, context {self.context_tokens} of "
            f"{self.mean_context_available:.0f} tokens, targets {self.n_blocks} x {self.target_tokens} of "
            f"{self.mean_block_area:.0f})"
        )


class ReleasedMasks:
    """The masks of the released I-JEPA and StoP code, with its defects.

    All blocks of a batch have one shape, no block reaches the last row or column, and contexts are cut to the shortest of
    the batch, in raster order. The masks depend on all images of the batch: draw them for `RELEASE_IMAGES` images.

    A context that is too small is drawn again, image by image; after `RELEASE_DRAWS` draws it may cover the last target
    block, then the last two, and so on.

    The arguments are those of `MultiBlockMasks` without numbers of tokens, and `min_context`: fewest patches of a context
    that is not drawn again.
    """

    has_fixed_counts = False

    def __init__(
        self,
        grid: Grid | int,
        n_blocks: int = 4,
        target_scale: Range = (0.15, 0.2),
        target_aspect: Range = (0.75, 1.5),
        context_scale: Range = (0.85, 1.0),
        context_aspect: Range = (1.0, 1.0),
        min_context: int = 11,
    ) -> None:
        self.grid, self.n_blocks, self.min_context = as_grid(grid), n_blocks, min_context
        self._ranges = (target_scale, target_aspect, context_scale, context_aspect)
        # It checks the values.
        MaskConfig("multiblock", n_blocks, *self._ranges)
        # A grid that is too small is an error here, not in the first step.
        self.sample(1, generator=torch.Generator().manual_seed(0))

    def sample(self, batch_size: int, device: Device = "cpu", generator: Generator = None) -> Masks:
        """Draw masks for a batch; the generator must be on the same device."""
        target_scale, target_aspect, context_scale, context_aspect = self._ranges
        target_shape = self._shape(target_scale, target_aspect, device, generator)
        context_shape = self._shape(context_scale, context_aspect, device, generator)
        targets = self._blocks((batch_size, self.n_blocks), target_shape, device, generator)
        context = torch.zeros_like(targets[:, 0])
        for kept_out in range(self.n_blocks, -1, -1):
            drawn = self._blocks((batch_size, RELEASE_DRAWS), context_shape, device, generator)
            drawn &= ~targets[:, :kept_out].any(1, keepdim=True)
            first = (drawn.sum(-1) >= self.min_context).int().argmax(1)
            is_short = context.sum(1, keepdim=True) < self.min_context
            context = torch.where(is_short, drawn[torch.arange(batch_size), first], context)
            shortest = int(context.sum(1).min())
            if shortest >= self.min_context:
                kept = math.prod(target_shape)
                return Masks(_in_raster_order(context, shortest), _in_raster_order(targets, kept), self.grid)
        raise InputError(
            f"The released sampler finds no context of {self.min_context} patches on a grid of {_grid_name(self.grid)}: use "
            "smaller patches, or masks.compat None."
        )

    def _shape(self, scale: Range, aspect: Range, device: Device, generator: Generator) -> tuple[int, int]:
        """Draw height and width of a block from one random number."""
        chance = float(torch.rand((), device=device, generator=generator))
        area = int(math.prod(self.grid) * (scale[0] + chance * (scale[1] - scale[0])))
        ratio = aspect[0] + chance * (aspect[1] - aspect[0])
        height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        return max(1, min(height, self.grid[0] - 1)), max(1, min(width, self.grid[1] - 1))

    def _blocks(
        self, count: tuple[int, int], shape: Grid, device: Device, generator: Generator
    ) -> Bool[Tensor, "batch blocks patches"]:
        """Place blocks of one shape, never in the last row or column."""
        corners = torch.stack(
            [
                torch.randint(max(1, limit - side), count, device=device, generator=generator)
                for side, limit in zip(shape, self.grid, strict=True)
            ],
            dim=-1,
        )
        return _block_masks(corners, torch.tensor(shape, device=device).expand_as(corners), self.grid)

    def __repr__(self) -> str:
        return f"ReleasedMasks(grid={_grid_name(self.grid)}, {self.n_blocks} blocks)"


@dataclass(frozen=True)
class BlockShapes:
    """The block shapes that are possible for a range of scales and aspects on a grid, with their probabilities."""

    shapes: Int[Tensor, "n_shapes 2"]
    probabilities: Float[Tensor, "n_shapes"]
    _copies: dict[torch.device, "BlockShapes"] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(grid: Grid, scale: Range, aspect: Range, resolution: int = 256) -> "BlockShapes":
        """Tabulate independent, uniform scales and aspects: sides in whole patches, the area kept where the grid is narrow."""
        middle = (torch.arange(resolution, dtype=torch.float64) + 0.5) / resolution
        areas = (math.prod(grid) * (scale[0] + middle * (scale[1] - scale[0])))[:, None]
        ratios = (aspect[0] + middle * (aspect[1] - aspect[0]))[None]
        heights = (areas * ratios).sqrt().clamp(max=grid[0])
        widths = (areas / heights).clamp(max=grid[1])
        heights = (areas / widths).clamp(max=grid[0])
        sides = torch.stack([heights, widths], dim=-1).round().long().clamp(min=1).flatten(0, 1)
        shapes, counts = sides.unique(dim=0, return_counts=True)
        return BlockShapes(shapes, (counts / counts.sum()).float())

    def areas(self) -> Int[Tensor, "n_shapes"]:
        return self.shapes.prod(-1)

    def area_quantile(self, fraction: float) -> int:
        """Return the area that all but this fraction of the blocks reach."""
        areas, order = self.areas().sort()
        below = self.probabilities[order].cumsum(0)
        return int(areas[min(int((below <= fraction).sum()), len(areas) - 1)])

    def at_least(self, area: int) -> "BlockShapes":
        """Return the shapes with at least this area."""
        large = self.areas() >= area
        return BlockShapes(self.shapes[large], self.probabilities[large] / self.probabilities[large].sum())

    def on(self, device: Device) -> "BlockShapes":
        """Return the table on a device; it is copied there once."""
        device = torch.device(device)
        if device not in self._copies:
            self._copies[device] = BlockShapes(self.shapes.to(device), self.probabilities.to(device))
        return self._copies[device]

    def draw(self, count: tuple[int, int], generator: Generator) -> Int[Tensor, "layouts blocks 2"]:
        chance = torch.rand(count, device=self.shapes.device, generator=generator)
        drawn = torch.searchsorted(self.probabilities.cumsum(0), chance, right=True)
        return self.shapes[drawn.clamp(max=len(self.shapes) - 1)]


def _place_blocks(
    shapes: Int[Tensor, "layouts blocks 2"], grid: Grid, generator: Generator
) -> Bool[Tensor, "layouts blocks patches"]:
    """Place blocks of these shapes uniformly on the grid, including its last row and column."""
    limits = torch.stack([torch.full_like(shapes[..., axis], grid[axis]) for axis in (0, 1)], dim=-1)
    places = torch.rand(shapes.shape, device=shapes.device, generator=generator)
    corners = (places * (limits - shapes + 1)).long().minimum(limits - shapes)
    return _block_masks(corners, shapes, grid)


def _block_masks(
    corners: Int[Tensor, "batch blocks 2"], shapes: Int[Tensor, "batch blocks 2"], grid: Grid
) -> Bool[Tensor, "batch blocks patches"]:
    inside = []
    for axis in (0, 1):
        numbers, first = torch.arange(grid[axis], device=corners.device), corners[..., axis, None]
        inside.append((numbers >= first) & (numbers < first + shapes[..., axis, None]))
    return (inside[0][..., :, None] & inside[1][..., None, :]).flatten(-2)


def _in_raster_order(masks: Bool[Tensor, "... patches"], count: int) -> Int[Tensor, "... count"]:
    """Return the first patches of each mask."""
    return masks.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :count]


def _grid_name(grid: Grid) -> str:
    return f"{grid[0]}x{grid[1]}"
