"""I-JEPA in plain operations, written from the paper for comparison: what one writes first, with nothing done for speed.

Attention is softmax(Q Kᵀ) V as it stands in books, masks are drawn in Python on the CPU, an image after the other, the
optimiser is AdamW as torch has it, and the target moves in a loop over its parameters.
"""

import copy
import math
import random
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from stop_mim.masking import Masks
from stop_mim.models.encoder import SIZES
from stop_mim.positions import SinCosPositions

NORM_EPS = 1e-6
DRAWS = 100


class PlainAttention(nn.Module):
    """Multi-head attention with all of its weights written out."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, tokens):
        queries, keys, values = self.qkv(tokens).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = queries @ keys.transpose(-2, -1) / math.sqrt(queries.shape[-1])
        return self.proj((scores.softmax(dim=-1) @ values).transpose(1, 2).flatten(2))


class PlainMLP(nn.Module):
    """Two linear layers with a GELU between."""

    def __init__(self, width, hidden):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, tokens):
        return self.fc2(F.gelu(self.fc1(tokens)))


class PlainBlock(nn.Module):
    """A transformer layer that norms first."""

    def __init__(self, width, heads, hidden):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=NORM_EPS), nn.LayerNorm(width, eps=NORM_EPS)
        self.attn, self.mlp = PlainAttention(width, heads), PlainMLP(width, hidden)

    def forward(self, tokens):
        tokens = tokens + self.attn(self.norm1(tokens))
        return tokens + self.mlp(self.norm2(tokens))


class PlainEncoder(nn.Module):
    """A Vision Transformer without class token; of all patches, which it embeds, it encodes those that are asked for."""

    def __init__(self, dimensions, grid, patch_size):
        super().__init__()
        width = dimensions.width
        self.patches = nn.Conv2d(3, width, patch_size, patch_size)
        self.register_buffer("positions", SinCosPositions(grid, width).table()[None].clone(), persistent=False)
        hidden = int(width * dimensions.mlp_ratio)
        self.blocks = nn.Sequential(*(PlainBlock(width, dimensions.heads, hidden) for _ in range(dimensions.depth)))
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)

    def forward(self, images, indices=None):
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.norm(self.blocks(tokens if indices is None else take(tokens, indices)))


class PlainPredictor(nn.Module):
    """A narrow transformer on context and mask tokens, for one target block after the other in the batch."""

    def __init__(self, encoder_width, width, depth, heads, grid):
        super().__init__()
        self.projection, self.head = nn.Linear(encoder_width, width), nn.Linear(width, encoder_width)
        self.register_buffer("positions", SinCosPositions(grid, width).table()[None].clone(), persistent=False)
        self.mask_token = nn.Parameter(0.02 * torch.randn(width))
        self.blocks = nn.Sequential(*(PlainBlock(width, heads, 4 * width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)

    def forward(self, context, context_indices, target_indices):
        blocks, n_target = target_indices.shape[1:]
        positions = self.positions.expand(len(context), -1, -1)
        context = self.projection(context) + take(positions, context_indices)
        masked = take(positions, target_indices.flatten(1)) + self.mask_token
        context = context.repeat_interleave(blocks, dim=0)
        tokens = torch.cat([context, masked.unflatten(1, (blocks, n_target)).flatten(0, 1)], dim=1)
        return self.head(self.norm(self.blocks(tokens))[:, -n_target:]).unflatten(0, (-1, blocks))


class PlainIJEPA(nn.Module):
    """(images, masks) to the loss, with a target encoder that follows the encoder."""

    def __init__(self, encoder, predictor):
        super().__init__()
        self.encoder, self.predictor = encoder, predictor
        self.target = copy.deepcopy(encoder).requires_grad_(False)

    def forward(self, images, masks):
        with torch.no_grad():
            wanted = take(self.target(images), masks.targets.flatten(1))
            wanted = F.layer_norm(wanted, wanted.shape[-1:]).unflatten(1, masks.targets.shape[1:])
        predicted = self.predictor(self.encoder(images, masks.context), masks.context, masks.targets)
        return F.smooth_l1_loss(predicted.float(), wanted.float())

    @torch.no_grad()
    def update_target(self, momentum):
        for theirs, ours in zip(self.target.parameters(), self.encoder.parameters(), strict=True):
            theirs.mul_(momentum).add_((1 - momentum) * ours)


def take(tokens, indices):
    return torch.gather(tokens, 1, indices[..., None].expand(-1, -1, tokens.shape[-1]))


class PlainCollator:
    """Masks in plain Python: one shape of target and context a batch, a place an image, cut to the given numbers of tokens."""

    def __init__(self, masks, grid, counts, batch_size, seed=0):
        self.masks, self.grid, self.counts, self.batch_size = masks, grid, counts, batch_size
        self.random = random.Random(seed)

    def __call__(self):
        target_shape = self.draw_shape(self.masks.target_scale, self.masks.target_aspect, self.counts.target)
        context_shape = self.draw_shape(self.masks.context_scale, self.masks.context_aspect, 1)
        drawn = [self.draw_image(target_shape, context_shape) for _ in range(self.batch_size)]
        contexts, targets = zip(*drawn, strict=True)
        return Masks(torch.tensor(contexts), torch.tensor(targets))

    def draw_shape(self, scale, aspect, least):
        for _ in range(DRAWS):
            area = self.random.uniform(*scale) * self.grid[0] * self.grid[1]
            ratio = self.random.uniform(*aspect)
            height = min(self.grid[0], max(1, round(math.sqrt(area * ratio))))
            width = min(self.grid[1], max(1, round(math.sqrt(area / ratio))))
            if height * width >= least:
                return height, width
        raise RuntimeError(f"no block of {least} patches in {DRAWS} draws")

    def draw_image(self, target_shape, context_shape):
        for _ in range(DRAWS):
            blocks = [self.draw_block(target_shape) for _ in range(self.counts.blocks)]
            taken = set().union(*blocks)
            context = [patch for patch in self.draw_block(context_shape) if patch not in taken]
            # A context that is short is filled up from outside its block, as ours is.
            spare = [patch for patch in range(self.grid[0] * self.grid[1]) if patch not in taken.union(context)]
            if len(context) + len(spare) >= self.counts.context:
                missing = max(0, self.counts.context - len(context))
                chosen = self.random.sample(context, self.counts.context - missing)
                chosen += self.random.sample(spare, missing)
                return sorted(chosen), [sorted(self.random.sample(block, self.counts.target)) for block in blocks]
        raise RuntimeError(f"no layout with {self.counts.context} context patches in {DRAWS} draws")

    def draw_block(self, shape):
        top, left = (self.random.randint(0, limit - side) for limit, side in zip(self.grid, shape, strict=True))
        return [
            row * self.grid[1] + column for row in range(top, top + shape[0]) for column in range(left, left + shape[1])
        ]


def build_plain(config):
    dimensions, predictor = encoder_dimensions(config.encoder), config.predictor
    encoder = PlainEncoder(dimensions, grid_of(config), config.encoder.patch_size)
    heads = predictor.heads or dimensions.heads
    return PlainIJEPA(
        encoder, PlainPredictor(dimensions.width, predictor.width, predictor.depth, heads, grid_of(config))
    )


def encoder_dimensions(config):
    """Return width, depth, heads and MLP ratio of the encoder."""
    given = {name: getattr(config, name) for name in ("width", "depth", "heads") if getattr(config, name) is not None}
    return replace(SIZES[config.size], **given)


def grid_of(config):
    height, width = config.encoder.image_size
    return height // config.encoder.patch_size, width // config.encoder.patch_size
