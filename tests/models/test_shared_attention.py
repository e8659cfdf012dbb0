"""Attention with a shared context: what sees what, by mask and by kernel."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from compiled_kernels import compiled_for_hopper

from stop_mim.models import shared_attention
from stop_mim.models.shared_attention import SharedContext, SharedContextAttention, attend_shared

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LAYOUTS = [(5, 3, 4), (20, 4, 12), (17, 2, 20)]

INTERPRETED = """
import torch
from stop_mim.models import shared_attention
from stop_mim.models.shared_attention import SharedContext, attend_shared
torch.manual_seed(0)
for heads, width, layout in ((2, 16, (5, 3, 4)), (1, 32, (20, 4, 12)), (2, 16, (17, 2, 20))):
    qkv = torch.randn(2, layout[0] + layout[1] * layout[2], 3 * heads * width, requires_grad=True)
    by_kernel = torch.ops.stop_mim.shared_attention(qkv, heads, list(layout))
    given = torch.randn_like(by_kernel)
    (gradient,) = torch.autograd.grad(by_kernel, qkv, given)
    by_mask = attend_shared(qkv, heads, SharedContext(*layout))
    torch.testing.assert_close(by_kernel, by_mask, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, torch.autograd.grad(by_mask, qkv, given)[0], atol=1e-5, rtol=1e-5)
print("agreed")
"""


def test_the_mask_shows_the_context_to_all_and_a_block_to_itself():
    seen = SharedContext(2, 2, 1).mask(torch.device("cpu"))
    expected = [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    assert seen.int().tolist() == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_block_gets_what_it_would_get_alone(layout):
    n_context, n_blocks, n_target = layout
    torch.manual_seed(0)
    attention = SharedContextAttention(24, 2, qkv_bias=True)
    tokens = torch.randn(3, n_context + n_blocks * n_target, 24)
    together = attention(tokens, attn_mask=SharedContext(*layout))
    context = tokens[:, :n_context]
    torch.testing.assert_close(together[:, :n_context], attention(context), atol=1e-6, rtol=1e-5)
    for block in range(n_blocks):
        start = n_context + block * n_target
        own = tokens[:, start : start + n_target]
        alone = attention(torch.cat([context, own], dim=1))[:, n_context:]
        torch.testing.assert_close(together[:, start : start + n_target], alone, atol=1e-6, rtol=1e-5)


@needs_triton
def test_the_kernels_agree_with_the_mask_in_tritons_interpreter():
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.strip() == "agreed", done.stderr


@needs_gpu
@pytest.mark.parametrize("layout", [*LAYOUTS, (49, 4, 33), (64, 4, 64)])
@pytest.mark.parametrize("head_width", [16, 32, 64])
def test_the_kernels_agree_with_the_mask_on_a_gpu(layout, head_width):
    torch.manual_seed(0)
    shape = (3, layout[0] + layout[1] * layout[2], 3 * 2 * head_width)
    half = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    full = half.detach().float().requires_grad_()
    given = torch.randn(*shape[:2], shape[2] // 3, device="cuda")
    by_kernel = attend_shared(half, 2, SharedContext(*layout))
    by_mask = attend_shared(full, 2, SharedContext(*layout))
    torch.testing.assert_close(by_kernel.float(), by_mask, atol=0.02, rtol=0.02)
    (gradient,) = torch.autograd.grad(by_kernel, half, given.bfloat16())
    (expected,) = torch.autograd.grad(by_mask, full, given)
    torch.testing.assert_close(gradient.float(), expected, atol=0.05, rtol=0.05)


@needs_triton
@pytest.mark.parametrize(("context_tile", "target_tile"), [(32, 16), (16, 32), (64, 64)])
@pytest.mark.filterwarnings("ignore::UserWarning:triton")
def test_the_kernels_compile_for_a_gpu_that_is_not_there(context_tile, target_tile):
    """The interpreter lets a variable change its shape in a loop, the compiler does not."""
    constants = {"HEADS": 3, "WIDTH": 32, "CONTEXT_TILE": context_tile, "TARGET_TILE": target_tile}
    for kernel in (shared_attention._forward_kernel, shared_attention._backward_kernel):
        assert b"ELF" in compiled_for_hopper(kernel, constants)
