"""`stop-mim plan`: memory and communication per GPU of a recipe on many GPUs, computed from its sizes.

bf16 training on GPUs is assumed: fp32 weights, gradients and moments, bf16 matrix products, an fp32 sum through the
layers. docs/scaling.md compares the numbers with measured ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
from timm.models.vision_transformer import Block
from torch import nn

from stop_mim.benchmark.config import PlanConfig
from stop_mim.benchmark.flops import TokenCounts
from stop_mim.constraints import check_effects
from stop_mim.masking import RELEASE_IMAGES, MaskSampler, build_masks
from stop_mim.models.build import build_objective
from stop_mim.models.data2vec import Data2Vec
from stop_mim.models.predictor import LastBlock
from stop_mim.positions import Grid
from stop_mim.tables import Table
from stop_mim.training.config import Sharding, SpeedConfig, TrainConfig
from stop_mim.training.distributed import Ranks
from stop_mim.training.inputs import split_batch

GIB = 2**30
# The rest is for CUDA's own context, the allocator's fragments and kernels' buffers.
USABLE = 0.9
CONTEXT_GIB = 1.0
# Of a layer that keeps nothing: its input, norm, q, k, v and attended values, or the MLP's hidden ones, in bf16.
TARGET_LAYER_BYTES = 2 * 8
MASK_DRAWS = 16


@dataclass(frozen=True)
class Sizes:
    """What the memory of a recipe depends on, in numbers of values."""

    trained: int
    """Weights with gradients and moments."""
    frozen: int
    """Weights of the target encoder, and fixed tables."""
    largest_layer: int
    outside_layers: int
    """Weights outside the layers, which are not freed when they are gathered."""
    layers: tuple[tuple[int, int, float], ...]
    """Of each layer with gradients: an image's values at its attention, at its MLP, and the MLP's relative width."""
    image_values: int
    """fp32 values of an image that are kept outside these layers."""
    target_values: int
    """Values of an image in a layer of the target encoder, which are not kept."""

    @staticmethod
    @cache
    def of(config: TrainConfig) -> "Sizes":
        """Count the weights of a recipe and an image's values, on the meta device."""
        with torch.device("meta"):
            objective = build_objective(config)
        grid = objective.encoder.grid
        tokens = _most_tokens(build_masks(config.masks, grid), grid)
        trained = sum(p.numel() for p in objective.parameters() if p.requires_grad)
        every = sum(p.numel() for p in objective.parameters())
        blocks = [module for module in objective.modules() if isinstance(module, Block)]
        inside = [sum(p.numel() for p in block.parameters()) for block in blocks]
        dim = objective.encoder.dim
        height, width = config.encoder.image_size
        # Pixels, and of each target patch: noise, prediction, target and error.
        per_image = 3 * height * width + 4 * tokens.blocks * tokens.target * dim
        return Sizes(
            trained,
            every - trained,
            max(inside),
            every - sum(inside),
            tuple(_trained_layers(objective, tokens)),
            per_image,
            tokens.grid * dim,
        )

    def activations(self, recompute: bool) -> int:
        """Return the bytes of one image at the peak: what is kept for the backward pass, and a layer of the target encoder.

        Kept of a layer: the inputs of both norms in fp32 (the sum through the layers), and in bf16 their outputs, q, k and
        v, the attended values, and the hidden values of the MLP before and after its activation.
        """
        whole = [(4 + 2 * 5) * attention + (4 + 2 + 4 * ratio) * mlp for attention, mlp, ratio in self.layers]
        inputs = [4 * attention for attention, _, _ in self.layers]
        kept = sum(inputs) + max(whole) if recompute else sum(whole)
        return round(kept) + 4 * self.image_values + TARGET_LAYER_BYTES * self.target_values


def _most_tokens(masks: MaskSampler, grid: Grid) -> TokenCounts:
    """Return the counts of a batch, or of the largest of several if they change from batch to batch."""
    images, draws = (1, 1) if masks.has_fixed_counts else (RELEASE_IMAGES, MASK_DRAWS)
    generator = torch.Generator().manual_seed(0)
    counts = [TokenCounts.of(masks.sample(images, generator=generator), grid) for _ in range(draws)]
    return max(counts, key=lambda one: one.context + one.blocks * (one.context + one.target))


def _trained_layers(objective: nn.Module, tokens: TokenCounts) -> Iterator[tuple[int, int, float]]:
    """Yield the layers that get gradients; the encoder's see the context, others context and target of every block."""
    for name, block in objective.named_modules():
        if not isinstance(block, Block) or not any(p.requires_grad for p in block.parameters()):
            continue
        width = block.norm1.weight.shape[0]
        # data2vec's encoder sees mask tokens in the place of target patches.
        within_encoder = tokens.grid if isinstance(objective, Data2Vec) else tokens.context
        in_predictor = tokens.blocks * (tokens.context + tokens.target)
        attention = within_encoder if name.startswith("encoder.") else in_predictor
        mlp = tokens.blocks * tokens.target if isinstance(block, LastBlock) else attention
        yield attention * width, mlp * width, block.mlp.fc1.weight.shape[0] / width


@dataclass(frozen=True)
class Layout:
    """One way to spread a run over GPUs."""

    sharding: Sharding
    recompute: bool
    per_device: int
    batches: int
    """Accumulated batches of a step."""
    state: float
    """GiB of weights, gradients and moments, with what is gathered of them."""
    activations: float
    """GiB."""
    sent_within: float
    """GB that a GPU sends to others of its machine in a step."""
    sent_between: float
    """GB that a GPU sends to other machines in a step."""

    @property
    def memory(self) -> float:
        """GiB of one GPU."""
        return self.state + self.activations + CONTEXT_GIB

    def seconds(self, plan: PlanConfig) -> float:
        """Return the time that sending takes in a step; a ring is as slow as its slowest link."""
        times = self.sent_within / plan.within, self.sent_between / plan.between
        return sum(times) if self.sharding == "hybrid" else max(times)

    def images_per_second(self, plan: PlanConfig) -> tuple[float, float] | None:
        """Return the speed of all GPUs if sending waits for computing, and if both happen at once."""
        if plan.images_per_second is None:
            return None
        images = self.per_device * self.batches
        computing = images / plan.images_per_second * (4 / 3 if self.recompute else 1)
        sending = self.seconds(plan)
        return plan.gpus * images / (computing + sending), plan.gpus * images / max(computing, sending)


def lay_out(
    sizes: Sizes, plan: PlanConfig, sharding: Sharding, recompute: bool, per_device: int, batches: int
) -> Layout:
    """Compute memory and communication of one GPU.

    Rings send (n - 1) / n of a tensor for each pass over n GPUs. What leaves a machine is shared by the links of its GPUs.
    """
    gpus, on_machine = plan.gpus, min(plan.gpus, plan.gpus_per_machine)
    machines = -(-gpus // on_machine)
    weights, trained = sizes.trained + sizes.frozen, sizes.trained
    if sharding == "none":
        # bf16 copies of the trained weights, and DDP's buckets of gradients.
        state: float = 4 * weights + 12 * trained + 2 * trained + (4 * trained if gpus > 1 else 0)
        ring = 2 * 4 * trained * (gpus - 1) / gpus
        within, between = ring, ring / on_machine if machines > 1 else 0.0
    else:
        shards = gpus if sharding == "full" else on_machine
        gathered = 4 * sizes.outside_layers + (2 * 2 + 4) * sizes.largest_layer
        state = (4 * weights + 12 * trained) / shards + gathered
        # Weights for the forward pass, those with gradients again for the backward pass, and the gradients.
        ring = (2 * weights + 2 * trained + 4 * trained) * (shards - 1) / shards * batches
        within, between = ring, ring / on_machine if sharding == "full" and machines > 1 else 0.0
        if sharding == "hybrid":
            between = 2 * 4 * trained / shards * (machines - 1) / machines * batches
    activations = sizes.activations(recompute) * per_device / GIB
    return Layout(sharding, recompute, per_device, batches, state / GIB, activations, within / 1e9, between / 1e9)


def layouts(config: TrainConfig, plan: PlanConfig) -> list[Layout]:
    """Return the ways to spread a run, cheapest first: each with the largest batch that fits, or the smallest."""
    check_effects(config)
    ranks = Ranks(0, plan.gpus, plan.gpus_per_machine, torch.device("meta"))
    at_once, batches = split_batch(replace(config, speed=SpeedConfig()), ranks)
    sizes, per_gpu = Sizes.of(config), at_once * batches
    found = []
    shardings: list[Sharding] = ["none", "hybrid", "full"] if plan.gpus > plan.gpus_per_machine else ["none", "full"]
    for sharding in shardings[: 1 if plan.gpus == 1 else None]:
        for recompute in (False, True):
            sizes_of_batch = [number for number in range(at_once, 0, -1) if at_once % number == 0]
            ways = [lay_out(sizes, plan, sharding, recompute, size, per_gpu // size) for size in sizes_of_batch]
            found.append(next((way for way in ways if fits(way, plan)), ways[-1]))
    return found


def fits(layout: Layout, plan: PlanConfig) -> bool:
    """Return whether a layout fits into the memory of a GPU."""
    return layout.memory <= USABLE * plan.memory


def choose(found: list[Layout], plan: PlanConfig) -> Layout | None:
    """Return the layout to use: one that fits, without recomputing if it can, with the least to send."""
    fitting = [layout for layout in found if fits(layout, plan)]
    # Batches of a few images leave a GPU idle.
    roomy = [layout for layout in fitting if layout.per_device >= min(32, layout.per_device * layout.batches)]
    return min(roomy or fitting, key=lambda one: (one.recompute, one.seconds(plan)), default=None)


def plan_table(name: str, config: TrainConfig, plan: PlanConfig, found: list[Layout]) -> Table:
    """Return the layouts as a table."""
    rows = []
    for one in found:
        speed = one.images_per_second(plan)
        rows.append(
            [
                one.sharding,
                "yes" if one.recompute else "no",
                f"{one.per_device} x {one.batches}",
                f"{one.memory:.1f} ({one.state:.1f} + {one.activations:.1f})",
                "yes" if fits(one, plan) else "no",
                f"{one.sent_within:.1f}, {one.sent_between:.1f}",
                "" if speed is None else f"{speed[0]:,.0f} to {speed[1]:,.0f}",
            ]
        )
    sizes = Sizes.of(config)
    caption = (
        f"{name} on {plan.gpus} GPUs of {plan.memory:g} GiB: {sizes.trained / 1e6:.0f} M trained, {sizes.frozen / 1e6:.0f} M "
        f"other weights; batch {config.optim.batch_size}"
    )
    head = ["sharding", "recompute", "images", "GiB", "fits", "GB sent", "images/s"]
    note = (
        "Per GPU. images: at once x accumulated. GiB: all (weights, gradients and moments + activations). GB sent in a step: "
        "within a machine, between machines. images/s: without overlap of computing and sending, and with."
    )
    return Table(caption, head, rows, note, names=2)


def options_of(layout: Layout) -> str:
    """Return the options of `pretrain` for a layout."""
    options = [f"--speed.batch-size-per-device {layout.per_device}"]
    if layout.sharding != "none":
        options.append(f"--speed.sharding {layout.sharding}")
    if layout.recompute:
        options.append("--speed.recompute")
    return " ".join(options)
