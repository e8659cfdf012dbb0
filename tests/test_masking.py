"""Masks are judged by their statistics: where blocks fall, how large they are, and that nothing is both."""

import math
import random
import statistics

import pytest
import torch

from stop_mim.errors import InputError
from stop_mim.masking import (
    BlockShapes,
    BlockwiseMasks,
    MaskConfig,
    Masks,
    MultiBlockMasks,
    RandomMasks,
    ReleasedMasks,
    build_masks,
)

GRIDS = [(14, 14), (8, 8), (2, 32)]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def coverage(indices, patches):
    """How often each patch occurs, as a part of the images (or blocks)."""
    return torch.bincount(indices.flatten(), minlength=patches) / (indices.numel() / indices.shape[-1])


def extents(indices, columns):
    """Height and width of the smallest rectangle around each set of patches."""
    rows, cols = indices // columns, indices % columns
    return rows.amax(-1) - rows.amin(-1) + 1, cols.amax(-1) - cols.amin(-1) + 1


@pytest.mark.parametrize("grid", GRIDS)
def test_every_position_can_be_context_and_target(grid):
    masks = MultiBlockMasks(grid).sample(2000, generator=seeded())
    patches = grid[0] * grid[1]
    as_context, as_target = coverage(masks.context, patches), coverage(masks.targets.flatten(0, 1), patches)
    assert as_context.min() > 0.05
    assert as_target.min() > 0.001


def test_coverage_is_symmetric_so_nothing_is_cut_in_raster_order():
    masks = MultiBlockMasks(14).sample(5000, generator=seeded())
    for indices in (masks.context, masks.targets.flatten(0, 1)):
        seen = coverage(indices, 196).unflatten(0, (14, 14))
        for mirrored in (seen.flip(0), seen.flip(1)):
            torch.testing.assert_close(seen, mirrored, atol=0.035, rtol=0)


def test_block_shapes_follow_scale_and_aspect_independently():
    shapes = BlockShapes.of((14, 14), (0.15, 0.2), (0.75, 1.5))
    drawn = shapes.draw((50_000, 1), seeded())[:, 0].double()
    area, log_aspect = drawn.prod(-1) / 196, (drawn[:, 0] / drawn[:, 1]).log()
    # Uniform scale has mean 0.175; rounding to whole patches moves it by less than one patch.
    assert area.mean().item() == pytest.approx(0.175, abs=0.003)
    # Half a patch of rounding on sides of about six.
    assert area.min() > 0.15 * (1 - 0.2)
    assert area.max() < 0.2 * (1 + 0.2)
    expected = torch.linspace(0.75, 1.5, 10_001).log().mean().item()
    assert log_aspect.mean().item() == pytest.approx(expected, abs=0.01)
    assert len(drawn.unique(dim=0)) > 7
    correlation = torch.corrcoef(torch.stack([area, log_aspect]))[0, 1]
    assert abs(correlation) < 0.35


def test_sampled_blocks_have_the_shapes_of_the_table():
    sampler = MultiBlockMasks(14)
    targets = sampler.sample(2000, generator=seeded()).targets.flatten(0, 1)
    height, width = extents(targets, 14)
    area = height * width
    # The rectangle around a random subset of a block is the block, but for a few lost edges.
    assert (area >= sampler.target_tokens).all()
    assert area.max() <= 43
    expected = sampler._target_shapes.areas().float() @ sampler._target_shapes.probabilities
    assert area.double().mean().item() == pytest.approx(expected.item(), abs=0.3)
    aspects = (height / width).double()
    assert aspects.quantile(0.01) > 0.65
    assert aspects.quantile(0.99) < 1.65


def test_counts_do_not_depend_on_the_batch_and_waste_little():
    sampler = MultiBlockMasks(14)
    assert sampler.sample(1).context.shape[1] == sampler.sample(512).context.shape[1] == sampler.context_tokens
    assert sampler.target_tokens > 0.85 * sampler.mean_block_area
    assert sampler.context_tokens > 0.6 * sampler.mean_context_available


def test_context_comes_from_the_context_block_outside_the_target_blocks():
    sampler = MultiBlockMasks(14, context_scale=(0.3, 0.3), n_blocks=1)
    masks = sampler.sample(2000, generator=seeded())
    height, width = extents(masks.context, 14)
    # A square block of 0.3 · 196 patches is 8 by 8; a short context may reach outside it.
    assert ((height <= 8) & (width <= 8)).double().mean() > 0.999


@pytest.mark.parametrize("n_blocks", [4, 12])
def test_the_default_context_is_what_nineteen_layouts_in_twenty_leave_however_many_blocks_there_are(n_blocks):
    sampler = MultiBlockMasks(14, n_blocks=n_blocks)
    targets, context = sampler._draw_blocks(2000, "cpu", seeded())
    left = (context & ~targets.any(1)).sum(1)
    assert (left >= sampler.context_tokens).double().mean() > 0.93
    assert (left > sampler.context_tokens).double().mean() < 0.97
    masks = sampler.sample(2000, generator=seeded())
    taken = torch.zeros(2000, 196, dtype=torch.bool).scatter(1, masks.targets.flatten(1), True)
    assert not taken.gather(1, masks.context).any()


def test_a_context_short_of_patches_holds_one_twice_and_not_a_target(monkeypatch):
    sampler = MultiBlockMasks(8, target_tokens=12, context_tokens=20)
    # Blocks side by side, as good a layout as is drawn: sixteen patches are left, and twenty are wanted.
    targets = (torch.arange(64) // 16 == torch.arange(4)[:, None]).expand(200, 4, 64)
    layouts = targets, torch.ones(200, 64, dtype=torch.bool)
    monkeypatch.setattr(sampler, "_draw_layouts", lambda batch_size, device, generator: layouts)
    masks = sampler.sample(200, generator=seeded())
    chosen = torch.zeros(200, 64, dtype=torch.bool).scatter(1, masks.targets.flatten(1), True)
    assert (chosen.sum(1) == 48).all()
    assert masks.context.shape == (200, 20)
    assert not chosen.gather(1, masks.context).any()
    context = torch.zeros(200, 64, dtype=torch.bool).scatter(1, masks.context, True)
    assert (context.sum(1) == 16).all()


def test_a_generator_makes_it_reproducible():
    for sampler in (MultiBlockMasks((8, 16)), RandomMasks((8, 16)), BlockwiseMasks((8, 16)), ReleasedMasks(14)):
        first, second, other = (sampler.sample(9, generator=seeded(seed)) for seed in (5, 5, 6))
        assert torch.equal(first.context, second.context)
        assert torch.equal(first.targets, second.targets)
        assert first.context.shape != other.context.shape or not torch.equal(first.context, other.context)


def test_random_masks_are_uniform():
    masks = RandomMasks((6, 10), mask_ratio=0.75).sample(20_000, generator=seeded())
    assert masks.context.shape[1] == 15
    torch.testing.assert_close(coverage(masks.context, 60), torch.full((60,), 0.25), atol=0.02, rtol=0)


def test_masks_can_be_cut_into_micro_batches():
    masks = RandomMasks(4).sample(10)
    assert len(masks) == 10
    part = masks[2:5]
    assert isinstance(part, Masks)
    assert torch.equal(part.targets, masks.targets[2:5])


def released_shape(grid, scale, aspect, chance):
    area = int(grid * grid * (scale[0] + chance * (scale[1] - scale[0])))
    ratio = aspect[0] + chance * (aspect[1] - aspect[0])
    return [min(round(math.sqrt(side)), grid - 1) for side in (area * ratio, area / ratio)]


def released_batch(grid, images, draw, least):
    """The contexts of the released sampler, image by image in plain loops, cut to the shortest."""

    def block(shape):
        top, left = (draw.randrange(grid - side) for side in shape)
        return {row * grid + column for row in range(top, top + shape[0]) for column in range(left, left + shape[1])}

    target = released_shape(grid, (0.15, 0.2), (0.75, 1.5), draw.random())
    whole = released_shape(grid, (0.85, 1.0), (1.0, 1.0), draw.random())
    contexts = []
    for _ in range(images):
        blocks, kept, tries = [block(target) for _ in range(4)], set(), 0
        while len(kept) < least:
            kept = block(whole).difference(*blocks[: max(4 - tries // 20, 0)])
            tries += 1
        contexts.append(sorted(kept))
    shortest = min(map(len, contexts))
    return torch.tensor([kept[:shortest] for kept in contexts])


class TestRelease:
    """The released sampler's defects, each beside the corrected behaviour above."""

    def test_last_row_and_column_are_never_seen(self):
        sampler = ReleasedMasks(14)
        batches = [sampler.sample(64, generator=seeded(seed)) for seed in range(20)]
        for indices in [batch.context for batch in batches] + [batch.targets for batch in batches]:
            assert (indices // 14).max() <= 12
            assert (indices % 14).max() <= 12

    def test_one_number_drives_scale_and_aspect(self):
        sampler = ReleasedMasks(14)
        shapes = set()
        for seed in range(100):
            height, width = extents(sampler.sample(2, generator=seeded(seed)).targets, 14)
            assert len(height.unique()) == len(width.unique()) == 1
            shapes.add((int(height[0, 0]), int(width[0, 0])))
        assert len(shapes) == 5

    @pytest.mark.parametrize("grid", [14, 8])
    def test_masks_are_distributed_as_in_plain_loops_image_by_image(self, grid):
        sampler, draw = ReleasedMasks(grid), random.Random(0)
        ours = [sampler.sample(64, generator=seeded(seed)) for seed in range(50)]
        contexts = [masks.context for masks in ours], [released_batch(grid, 64, draw, least=11) for _ in range(50)]
        lengths = [[float(kept.shape[1]) for kept in of_one] for of_one in contexts]
        # Three standard errors; of 1,000 batches, the means on 14x14 are 53.1 and 53.3, on 8x8 13.3 and 13.3.
        error = 3 * statistics.stdev(lengths[1]) * math.sqrt(2 / 50)
        assert statistics.mean(lengths[0]) == pytest.approx(statistics.mean(lengths[1]), abs=error)
        rows = [
            torch.bincount(torch.cat([kept.flatten() for kept in of_one]) // grid, minlength=grid) / (50 * 64 * grid)
            for of_one in contexts
        ]
        torch.testing.assert_close(*rows, atol=0.03, rtol=0)
        assert rows[0][0] > 5 * rows[0][grid - 2]
        # Small contexts do not make small targets: their shapes are as drawn.
        chances = [(step + 0.5) / 1000 for step in range(1000)]
        drawn = [math.prod(released_shape(grid, (0.15, 0.2), (0.75, 1.5), chance)) for chance in chances]
        fraction = statistics.mean(area == min(drawn) for area in drawn)
        found = statistics.mean(masks.targets.shape[2] == min(drawn) for masks in ours)
        assert found == pytest.approx(fraction, abs=0.15)
        assert grid != 8 or (min(drawn), fraction) == (9, pytest.approx(0.485, abs=0.002))

    def test_a_layout_that_cannot_be_found_ends(self):
        with pytest.raises(InputError, match="released sampler finds no context of 60"):
            ReleasedMasks(8, min_context=60)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MultiBlockMasks(2), "do not fit a grid of 2x2"),
        (lambda: MultiBlockMasks(8, target_scale=(0.5, 1.5)), "masks.target_scale is .0.5, 1.5"),
        (lambda: MultiBlockMasks(8, target_aspect=(1.5, 0.5)), "masks.target_aspect is .1.5, 0.5"),
        (lambda: MultiBlockMasks(8, target_tokens=30), "masks.target_tokens is 30"),
        (lambda: BlockwiseMasks(4, 0.5, scale=(0.5, 0.2)), "masks.target_scale is .0.5, 0.2"),
        (lambda: RandomMasks(2, mask_ratio=0.05), "masks.mask_ratio is 0.05: on a grid of 2x2"),
        (lambda: MultiBlockMasks(8, context_tokens=60), "leave 3[0-9] context patches, fewer than 60"),
        (lambda: MultiBlockMasks(8, context_tokens=10**20), "fewer than 10"),
        (lambda: MultiBlockMasks(8, target_tokens=12, context_tokens=32), "fewer than 32"),
        (lambda: MultiBlockMasks(8, n_blocks=0), "masks.n_blocks is 0"),
        (lambda: RandomMasks(8, mask_ratio=1.0), "masks.mask_ratio is 1.0"),
    ],
)
def test_what_cannot_fit_is_refused_with_numbers(make, words):
    with pytest.raises(InputError, match=words):
        make()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.gpu
def test_sampling_on_the_gpu_never_waits_for_it():
    samplers = [MultiBlockMasks(14), RandomMasks(14), BlockwiseMasks(14)]
    generator = torch.Generator("cuda").manual_seed(0)
    for sampler in samplers:
        sampler.sample(64, device="cuda", generator=generator)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for sampler in samplers:
            masks = sampler.sample(64, device="cuda", generator=generator)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert masks.context.is_cuda


def agreement(sampler):
    """How often two patches side by side are both masked or both not."""
    masks = sampler.sample(500, generator=seeded())
    masked = torch.zeros(500, 14 * 14).scatter(1, masks.targets[:, 0], 1.0).unflatten(1, (14, 14))
    return (masked[:, 1:] == masked[:, :-1]).float().mean().item()


def test_blockwise_masks_are_blocks_and_random_ones_are_not():
    # Independent patches agree with probability 0.6² + 0.4².
    assert agreement(RandomMasks(14, 0.6)) == pytest.approx(0.52, abs=0.01)
    assert agreement(BlockwiseMasks(14, 0.6)) > 0.8
    # Rectangles of one patch are random masks: sixteen of them are too few, and random patches fill up.
    assert agreement(BlockwiseMasks(14, 0.6, scale=(0.004, 0.006), aspect=(1, 1))) == pytest.approx(0.52, abs=0.01)


def test_one_rectangle_that_is_large_enough_is_the_only_one():
    masks = BlockwiseMasks((10, 10), mask_ratio=0.25, scale=(0.25, 0.25), aspect=(1, 1)).sample(50, generator=seeded())
    rows, columns = masks.targets[:, 0] // 10, masks.targets[:, 0] % 10
    assert ((rows.amax(1) - rows.amin(1)) == 4).all()
    assert ((columns.amax(1) - columns.amin(1)) == 4).all()


def test_samplers_are_built_by_name():
    assert repr(build_masks(MaskConfig("random", mask_ratio=0.5), (4, 4))) == repr(RandomMasks(4, 0.5))
    assert repr(build_masks(MaskConfig(n_blocks=2), (8, 8))) == repr(MultiBlockMasks(8, n_blocks=2))
    assert repr(build_masks(MaskConfig(n_blocks=2, compat="release"), (8, 8))) == repr(ReleasedMasks(8, n_blocks=2))
    with pytest.raises(InputError, match="'blockwize': did you mean 'blockwise'"):
        build_masks(MaskConfig("blockwize"), (8, 8))
