"""How many operations a training step asks for, from its shapes: matrix products alone, two operations a multiplication.

What is computed twice to save memory, or in a norm, a softmax or the optimiser, is not counted.
"""

import dataclasses
from dataclasses import dataclass

from stop_mim.masking import Masks
from stop_mim.models.encoder import SIZES, Dimensions
from stop_mim.training.config import EncoderConfig, PositionsConfig, TrainConfig

PREDICTOR_MLP_RATIO = 4.0


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of one image: all patches, those of the context, the target blocks and the patches of each."""

    grid: int
    context: int
    blocks: int
    target: int

    @staticmethod
    def of(masks: Masks, grid: tuple[int, int]) -> "TokenCounts":
        """As these masks have them."""
        return TokenCounts(grid[0] * grid[1], masks.context.shape[1], masks.targets.shape[1], masks.targets.shape[2])


@dataclass(frozen=True)
class PartFlops:
    """Operations of a part in its forward pass."""

    products: int
    """Products whose two factors both get gradients, where the part learns."""
    from_data: int = 0
    """Products with pixels or noise, which get no gradient."""

    @property
    def forward(self) -> int:
        """Of the forward pass."""
        return self.products + self.from_data

    @property
    def training(self) -> int:
        """Of forward and backward pass: one product for the gradient of each factor."""
        return 3 * self.products + 2 * self.from_data


def layers_flops(tokens: int, dimensions: Dimensions) -> int:
    """Of transformer layers on a sequence: queries, keys, values, attention, its projection and the two of the MLP."""
    width, hidden = dimensions.width, int(dimensions.width * dimensions.mlp_ratio)
    linear = 2 * tokens * (4 * width**2 + 2 * width * hidden)
    attention = 4 * tokens**2 * width
    return dimensions.depth * (linear + attention)


def encoder_dimensions(config: EncoderConfig) -> Dimensions:
    """Width, depth and heads as the configuration has them."""
    given = {name: getattr(config, name) for name in ("width", "depth", "heads") if getattr(config, name) is not None}
    return dataclasses.replace(SIZES[config.size], **given)


def learned_flops(config: TrainConfig, counts: TokenCounts) -> dict[str, PartFlops]:
    """Of one image in each part that learns."""
    encoder, pixels = encoder_dimensions(config.encoder), 3 * config.encoder.patch_size**2
    masked = counts.blocks * counts.target
    embedding = 2 * counts.context * pixels * encoder.width
    if config.objective.kind == "data2vec":
        head = 2 * masked * encoder.width**2
        noise = _noise_flops(config.positions, counts, pixels, encoder.width)
        return {"encoder": PartFlops(layers_flops(counts.context + masked, encoder) + head, embedding + noise)}
    width = config.predictor.width
    predictor = Dimensions(width, config.predictor.depth, 1, PREDICTOR_MLP_RATIO)
    outputs = pixels if config.objective.kind == "mae" else encoder.width
    layers = counts.blocks * layers_flops(counts.context + counts.target, predictor)
    ends = 2 * counts.context * encoder.width * width + 2 * masked * width * outputs
    return {
        "encoder": PartFlops(layers_flops(counts.context, encoder), embedding),
        "predictor": PartFlops(layers + ends, _noise_flops(config.positions, counts, encoder.width, width)),
    }


def target_flops(config: TrainConfig, counts: TokenCounts) -> int:
    """Of one image in the target encoder, which sees all patches and learns by no gradient; MAE has none."""
    if config.objective.kind == "mae":
        return 0
    encoder = encoder_dimensions(config.encoder)
    return 2 * counts.grid * 3 * config.encoder.patch_size**2 * encoder.width + layers_flops(counts.grid, encoder)


def step_flops(config: TrainConfig, counts: TokenCounts, images: int) -> int:
    """Of a whole step of so many images: the target once, what learns three times."""
    learned = sum(part.training for part in learned_flops(config, counts).values())
    return images * (learned + target_flops(config, counts))


def _noise_flops(positions: PositionsConfig, counts: TokenCounts, inputs: int, outputs: int) -> int:
    """Of A n, where A is a matrix."""
    silent = positions.sigma == 0 and not positions.sigma_start
    if positions.kind != "stochastic" or silent or positions.covariance in ("identity", "diagonal"):
        return 0
    rank = positions.covariance.removeprefix("low_rank(").removesuffix(")")
    columns = int(rank) if rank.isdecimal() else inputs
    masked = counts.blocks * counts.target if positions.apply_to in ("masked", "both") else 0
    context = counts.context if positions.apply_to in ("context", "both") else 0
    return 2 * (masked + context) * columns * outputs
