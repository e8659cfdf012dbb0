"""Attention by our kernels is attention: compared with torch's, forward and backward."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from timm.layers import Attention

import stop_mim
from stop_mim.models.kernels.short_attention import LONGEST, ShortAttention, attend, is_plain_attention


def reference(qkv, heads):
    """The definition, in the precision of the input."""
    q, k, v = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def random_qkv(*shape, device="cpu", scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)


@pytest.mark.parametrize(
    "extra",
    [
        {"qk_norm": True, "norm_layer": torch.nn.LayerNorm},
        {"attn_drop": 0.1},
        {"proj_drop": 0.1},
        {"gated": True},
        {"scale_norm": True, "norm_layer": torch.nn.LayerNorm},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_attention_with_anything_more_is_not_plain(extra):
    assert is_plain_attention(Attention(32, 2))
    try:
        attention = Attention(32, 2, **extra)
    except TypeError:
        pytest.skip(f"this timm has no attention with {next(iter(extra))}")
    assert not is_plain_attention(attention)


def test_masks_are_refused():
    attention, tokens = ShortAttention(Attention(32, 2)), torch.randn(2, 6, 32)
    with pytest.raises(ValueError, match="no masks"):
        attention(tokens, is_causal=True)


INTERPRETED = """
import torch
import torch.nn.functional as F
import stop_mim.models.kernels.short_attention

torch.manual_seed(0)
for batch, n, heads, width, size in ((2, 13, 2, 16, 1), (1, 33, 1, 32, 20)):
    # The largest scores of the second one overflow exp.
    qkv = (size * torch.randn(batch, n, 3 * heads * width)).requires_grad_()
    q, k, v = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    theirs = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    ours = torch.ops.stop_mim.short_attention(qkv, heads)
    tolerance = {"atol": 1e-5 * size**2, "rtol": 1e-4}
    torch.testing.assert_close(ours, theirs, **tolerance)
    upstream = torch.randn_like(theirs).transpose(0, 1).contiguous().transpose(0, 1)
    gradients = [torch.autograd.grad(output, qkv, upstream)[0] for output in (ours, theirs)]
    torch.testing.assert_close(*gradients, **tolerance)
    assert gradients[0].abs().max() > 0.01
print("the same")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_the_kernels_are_attention_in_tritons_interpreter():
    paths = [str(Path(stop_mim.__path__[0]).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, timeout=300
    )
    if "only 0-dimensional arrays can be converted to Python scalars" in done.stderr:
        pytest.skip("triton's interpreter cannot count loops with this numpy")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "the same\n"


@pytest.mark.gpu
@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("n", [5, 20, 49, 64, 82, 128])
def test_the_kernels_are_attention_on_a_gpu(monkeypatch, n, width):
    monkeypatch.delattr(F, "scaled_dot_product_attention")
    heads = 3
    qkv = random_qkv(17, n, 3 * heads * width, device="cuda", scale=1.5).bfloat16()
    upstream = random_qkv(17, n, heads * width, device="cuda").bfloat16()
    ours, exact = qkv.clone().requires_grad_(), qkv.float().requires_grad_()
    output, expected = attend(ours, heads), reference(exact, heads)
    output.backward(upstream)
    expected.backward(upstream.float())
    # As far from the exact result as torch's own kernel may be: a few units in the eighth bit.
    torch.testing.assert_close(output.float(), expected, atol=0.02, rtol=0.02)
    apart = (ours.grad.float() - exact.grad).norm() / exact.grad.norm()
    assert apart < 0.01
    torch.testing.assert_close(ours.grad.float(), exact.grad, atol=0.05, rtol=0.05)


@pytest.mark.gpu
def test_what_the_kernel_is_not_made_for_is_computed_by_torch():
    for qkv in (
        random_qkv(2, LONGEST + 1, 96, device="cuda").bfloat16(),
        random_qkv(2, 20, 96, device="cuda"),
        random_qkv(2, 20, 3 * 2 * 24, device="cuda").bfloat16(),
        random_qkv(2, 20, 192, device="cuda").bfloat16()[..., ::2],
    ):
        expected = reference(qkv.float(), 2)
        torch.testing.assert_close(attend(qkv, 2).float(), expected, atol=0.02, rtol=0.02)
