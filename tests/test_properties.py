"""Properties over many grids, sizes and dtypes; hypothesis draws the same examples every time."""

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from stop_mim.errors import InputError
from stop_mim.masking import BlockwiseMasks, MultiBlockMasks, RandomMasks
from stop_mim.models.build import build_encoder
from stop_mim.models.config import EncoderConfig

SHORT = settings(max_examples=10, derandomize=True, deadline=None, database=None)
sides = st.integers(1, 10)


@SHORT
@given(sides, sides, st.integers(1, 5), st.integers(0, 2**31))
def test_masks_are_patches_of_the_grid_and_targets_are_no_context(height, width, batch, seed):
    generator = torch.Generator().manual_seed(seed)
    for kind in (MultiBlockMasks, RandomMasks, BlockwiseMasks):
        try:
            sampler = kind((height, width))
        except InputError:
            continue
        masks = sampler.sample(batch, generator=generator)
        blocks = 4 if kind is MultiBlockMasks else 1
        assert masks.context.shape == (batch, sampler.context_tokens)
        assert masks.targets.shape == (batch, blocks, sampler.target_tokens)
        assert all((indices.diff(dim=-1) > 0).all() for indices in (masks.context, masks.targets))
        if kind is not MultiBlockMasks:
            assert sampler.context_tokens + sampler.target_tokens == height * width
        for context, targets in zip(masks.context, masks.targets.flatten(1), strict=True):
            assert set(context.tolist() + targets.tolist()) <= set(range(height * width))
            assert not set(context.tolist()) & set(targets.tolist())


@SHORT
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.sampled_from([torch.float32, torch.bfloat16]))
def test_encoders_give_a_token_for_each_patch_of_any_size_and_dtype(rows, columns, batch, dtype):
    encoder = build_encoder(EncoderConfig("tiny", image_size=(8, 8), patch_size=4, width=16, depth=1, heads=2)).to(
        dtype
    )
    tokens = encoder(torch.zeros(batch, 3, 4 * rows, 4 * columns, dtype=dtype))
    assert tokens.shape == (batch, rows * columns, 16)
    assert tokens.dtype == dtype
    assert torch.isfinite(tokens).all()
