"""Attention by our kernels is attention: against torch's own, forward and backward, and in timm's layers."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from compiled_kernels import compiled_for_hopper
from timm.layers import Attention
from timm.models.vision_transformer import Block, VisionTransformer

import stop_mim
from stop_mim.models import short_attention
from stop_mim.models.shared_attention import SharedContext, attend_shared
from stop_mim.models.short_attention import LONGEST, attend, is_plain_attention, use_short_attention

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def reference(qkv, heads):
    """The definition, in the precision of the input."""
    q, k, v = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def random_qkv(*shape, device="cpu", scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)


@pytest.mark.parametrize(("n", "heads", "width"), [(1, 1, 16), (13, 2, 16), (49, 3, 32), (LONGEST + 5, 2, 8)])
def test_elsewhere_than_on_a_gpu_it_is_torchs_attention(n, heads, width):
    qkv = random_qkv(2, n, 3 * heads * width).requires_grad_()
    expected = reference(qkv, heads)
    torch.testing.assert_close(attend(qkv, heads), expected, atol=1e-5, rtol=1e-4)
    upstream = torch.randn_like(expected)
    (ours,) = torch.autograd.grad(attend(qkv, heads), qkv, upstream)
    (theirs,) = torch.autograd.grad(expected, qkv, upstream)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def make_vit(**options):
    torch.manual_seed(0)
    return VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=0, global_pool="", **options
    )


def outputs_and_gradients(vit):
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    vit.zero_grad()
    tokens = vit(images)
    tokens.square().sum().backward()
    return tokens.detach(), {name: p.grad.clone() for name, p in vit.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("class_token", [False, True])
def test_an_encoder_computes_what_it_did(class_token):
    vit = make_vit(class_token=class_token)
    names = list(vit.state_dict())
    tokens, gradients = outputs_and_gradients(vit)
    use_short_attention(list(vit.blocks))
    assert all("forward" in vars(block.attn) for block in vit.blocks)
    assert list(vit.state_dict()) == names
    new_tokens, new_gradients = outputs_and_gradients(vit)
    torch.testing.assert_close(new_tokens, tokens, atol=1e-5, rtol=1e-5)
    assert new_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(new_gradients[name], gradient, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("extra", [{"qk_norm": True}, {"attn_drop_rate": 0.1}, {"proj_drop_rate": 0.1}])
def test_attention_with_anything_more_is_left_alone(extra):
    vit = make_vit(**extra)
    use_short_attention(list(vit.blocks))
    assert not any("forward" in vars(block.attn) for block in vit.blocks)
    assert not any(is_plain_attention(block.attn) for block in vit.blocks)


@pytest.mark.parametrize("extra", [{"gated": True}, {"scale_norm": True, "norm_layer": torch.nn.LayerNorm}])
def test_gates_and_norms_of_the_output_are_something_more(extra):
    try:
        attention = Attention(32, 2, **extra)
    except TypeError:
        pytest.skip(f"this timm has no attention with {next(iter(extra))}")
    assert not is_plain_attention(attention)


def test_other_kinds_of_attention_and_layers_without_any_are_left_alone():
    class OtherAttention(Attention):
        pass

    block = Block(32, 2)
    block.attn = OtherAttention(32, 2)
    use_short_attention([block, torch.nn.Linear(2, 2)])
    assert "forward" not in vars(block.attn)


def test_masks_and_causality_are_kept():
    torch.manual_seed(0)
    block = Block(32, 2, qkv_bias=True).eval()
    tokens, mask = torch.randn(2, 6, 32), torch.rand(6, 6) > 0.5
    mask |= torch.eye(6, dtype=torch.bool)
    plain, masked = block(tokens), block(tokens, attn_mask=mask)
    causal = block.attn(tokens, is_causal=True)
    use_short_attention([block])
    torch.testing.assert_close(block(tokens), plain)
    torch.testing.assert_close(block(tokens, attn_mask=mask), masked)
    torch.testing.assert_close(block.attn(tokens, is_causal=True), causal)
    assert not torch.allclose(masked, plain, atol=1e-3)
    assert not torch.allclose(causal, block.attn(tokens), atol=1e-3)


COMPARE = """
import torch
import torch.nn.functional as F
from stop_mim.models.shared_attention import SharedContext

torch.manual_seed(0)

def compare(ours, theirs, qkv, size=1):
    tolerance = {"atol": 1e-5 * size**2, "rtol": 1e-4}
    torch.testing.assert_close(ours, theirs, **tolerance)
    upstream = torch.randn_like(theirs).transpose(0, 1).contiguous().transpose(0, 1)
    gradients = [torch.autograd.grad(output, qkv, upstream)[0] for output in (ours, theirs)]
    torch.testing.assert_close(*gradients, **tolerance)
    assert gradients[0].abs().max() > 0.01

def split(qkv, heads):
    return qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
"""
SHORT = """
for batch, n, heads, width, size in (
    (2, 13, 2, 16, 1), (1, 33, 1, 16, 1), (1, 1, 1, 16, 1), (1, 16, 3, 32, 1), (1, 20, 1, 16, 20)
):
    # The largest scores of the last one are far beyond what exp can take.
    qkv = (size * torch.randn(batch, n, 3 * heads * width)).requires_grad_()
    expected = F.scaled_dot_product_attention(*split(qkv, heads)).transpose(1, 2).flatten(2)
    compare(torch.ops.stop_mim.short_attention(qkv, heads), expected, qkv, size)
"""
SHARED = """
for layout, heads, width in (((5, 3, 4), 2, 16), ((17, 2, 3), 1, 16), ((3, 1, 18), 1, 32)):
    n_context, n_blocks, n_target = layout
    n = n_context + n_blocks * n_target
    qkv = torch.randn(2, n, 3 * heads * width, requires_grad=True)
    mask = SharedContext(*layout).mask(torch.device("cpu"))
    expected = F.scaled_dot_product_attention(*split(qkv, heads), attn_mask=mask).transpose(1, 2).flatten(2)
    compare(torch.ops.stop_mim.shared_attention(qkv, heads, list(layout)), expected, qkv)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("script", [SHORT, SHARED], ids=["short", "shared"])
def test_the_kernels_are_attention_in_tritons_interpreter(script):
    paths = [str(Path(stop_mim.__path__[0]).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    program = f"{COMPARE}{script}\nprint('the same')"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    if "only 0-dimensional arrays can be converted to Python scalars" in done.stderr:
        pytest.skip("triton's interpreter cannot count loops with this numpy")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "the same\n"


def forbid_torchs(monkeypatch):
    def attention(*arguments, **options):
        raise AssertionError("torch's attention was called in place of the kernel")

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)


@needs_gpu
@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("n", [5, 20, 49, 64, 82, 128])
def test_the_kernels_are_attention_on_a_gpu(monkeypatch, n, width):
    forbid_torchs(monkeypatch)
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


@needs_gpu
@pytest.mark.parametrize("layout", [(4, 4, 2), (20, 4, 12), (49, 4, 33), (64, 1, 64)])
@pytest.mark.parametrize("width", [16, 32, 64])
def test_the_kernels_of_a_shared_context_are_masked_attention_on_a_gpu(monkeypatch, layout, width):
    forbid_torchs(monkeypatch)
    heads, shape = 3, SharedContext(*layout)
    n = layout[0] + layout[1] * layout[2]
    qkv = random_qkv(9, n, 3 * heads * width, device="cuda", scale=1.5).bfloat16()
    upstream = random_qkv(9, n, heads * width, device="cuda").bfloat16()
    ours, exact = qkv.clone().requires_grad_(), qkv.float().requires_grad_()
    output = attend_shared(ours, heads, shape)
    q, k, v = exact.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    hidden = torch.full((n, n), -torch.inf, device="cuda").masked_fill(shape.mask(qkv.device), 0.0)
    weights = (q @ k.mT / width**0.5 + hidden).softmax(-1)
    expected = (weights @ v).transpose(1, 2).flatten(2)
    output.backward(upstream)
    expected.backward(upstream.float())
    torch.testing.assert_close(output.float(), expected, atol=0.02, rtol=0.02)
    assert (ours.grad.float() - exact.grad).norm() < 0.01 * exact.grad.norm()


@needs_gpu
def test_what_the_kernel_is_not_made_for_is_computed_by_torch():
    for qkv in (
        random_qkv(2, LONGEST + 1, 96, device="cuda").bfloat16(),
        random_qkv(2, 20, 96, device="cuda"),
        random_qkv(2, 20, 3 * 2 * 24, device="cuda").bfloat16(),
        random_qkv(2, 20, 192, device="cuda").bfloat16()[..., ::2],
    ):
        expected = reference(qkv.float(), 2)
        torch.testing.assert_close(attend(qkv, 2).float(), expected, atol=0.02, rtol=0.02)


@needs_gpu
def test_an_encoder_on_a_gpu_computes_what_it_did():
    vit = make_vit(class_token=False).cuda()
    images = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(1)).cuda()
    found = []
    for _ in range(2):
        vit.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            tokens = vit(images)
        F.layer_norm(tokens.float(), tokens.shape[-1:])[..., 0].sum().backward()
        found.append((tokens.detach().float(), vit.blocks[0].attn.qkv.weight.grad.clone()))
        use_short_attention(list(vit.blocks))
    (before, gradient), (after, new_gradient) = found
    torch.testing.assert_close(after, before, atol=0.05, rtol=0.05)
    assert (new_gradient - gradient).norm() < 0.05 * gradient.norm()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("tile", [16, 128])
@pytest.mark.filterwarnings("ignore::UserWarning:triton")
def test_the_kernels_compile_for_a_gpu_that_is_not_there(tile):
    for kernel in (short_attention._forward_kernel, short_attention._backward_kernel):
        assert b"ELF" in compiled_for_hopper(kernel, {"HEADS": 2, "WIDTH": 32, "TILE": tile})
