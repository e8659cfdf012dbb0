"""Self-attention of short sequences in one kernel each for forward and backward: up to 128 tokens fit into one tile.

The backward pass needs neither the output nor the softmax's sums, no second kernel, and writes the gradient in the
layout of the linear layer before it. For NVIDIA GPUs; everything else is computed by torch's attention.
"""

import math
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from jaxtyping import Float
from timm.layers import Attention
from torch import Tensor, nn

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

LONGEST = 128
HEAD_WIDTHS = (16, 32, 64, 128)
# The fastest for each tile on an H200.
FORWARD_WARPS = {16: 1, 32: 2, 64: 4, 128: 8}
BACKWARD_WARPS = {16: 1, 32: 2, 64: 4, 128: 4}

if triton is not None:

    @triton.jit
    @no_type_check
    def _load_head(start, offsets, inside):
        return tl.load(start + offsets, mask=inside[:, None], other=0.0)

    @triton.jit
    @no_type_check
    def _softmax(q, k, inside, log2_scale):
        scores = tl.where(inside[None, :], tl.dot(q, tl.trans(k)) * log2_scale, -1e30)
        weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
        return weights / tl.sum(weights, 1)[:, None]

    @triton.jit
    @no_type_check
    def _forward_kernel(qkv, output, n, log2_scale, HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
        sequence, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
        rows, columns = tl.arange(0, TILE), tl.arange(0, WIDTH)
        inside = rows < n
        qkv += sequence.to(tl.int64) * n * 3 * HEADS * WIDTH + head * WIDTH
        offsets = rows[:, None] * (3 * HEADS * WIDTH) + columns[None, :]
        q = _load_head(qkv, offsets, inside)
        k = _load_head(qkv + HEADS * WIDTH, offsets, inside)
        v = _load_head(qkv + 2 * HEADS * WIDTH, offsets, inside)
        attended = tl.dot(_softmax(q, k, inside, log2_scale).to(q.dtype), v)
        output += sequence.to(tl.int64) * n * HEADS * WIDTH + head * WIDTH
        tl.store(output + rows[:, None] * (HEADS * WIDTH) + columns[None, :], attended.to(q.dtype), inside[:, None])

    @triton.jit
    @no_type_check
    def _backward_kernel(
        qkv, d_output, d_qkv, n, log2_scale, scale, HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr
    ):
        sequence, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
        rows, columns = tl.arange(0, TILE), tl.arange(0, WIDTH)
        inside = rows < n
        start = sequence.to(tl.int64) * n * 3 * HEADS * WIDTH + head * WIDTH
        offsets = start + rows[:, None] * (3 * HEADS * WIDTH) + columns[None, :]
        q = _load_head(qkv, offsets, inside)
        k = _load_head(qkv + HEADS * WIDTH, offsets, inside)
        v = _load_head(qkv + 2 * HEADS * WIDTH, offsets, inside)
        d_output += sequence.to(tl.int64) * n * HEADS * WIDTH + head * WIDTH
        d_attended = _load_head(d_output, rows[:, None] * (HEADS * WIDTH) + columns[None, :], inside)
        weights = _softmax(q, k, inside, log2_scale)
        d_v = tl.dot(tl.trans(weights.to(q.dtype)), d_attended)
        tl.store(d_qkv + 2 * HEADS * WIDTH + offsets, d_v.to(q.dtype), inside[:, None])
        d_weights = tl.dot(d_attended, tl.trans(v))
        centred = d_weights - tl.sum(weights * d_weights, 1)[:, None]
        d_scores = (weights * centred * scale).to(q.dtype)
        tl.store(d_qkv + offsets, tl.dot(d_scores, k).to(q.dtype), inside[:, None])
        tl.store(d_qkv + HEADS * WIDTH + offsets, tl.dot(tl.trans(d_scores), q).to(q.dtype), inside[:, None])


def _launch(
    kernel: Any, warps: dict[int, int], qkv: Tensor, tensors: tuple[Tensor, ...], heads: int, *scales: float
) -> None:
    sequences, n, width = qkv.shape
    tile = max(16, triton.next_power_of_2(n))
    constants = {"HEADS": heads, "WIDTH": width // (3 * heads), "TILE": tile}
    kernel[(sequences * heads,)](qkv, *tensors, n, *scales, **constants, num_warps=warps[tile])


def _scale(width: int, heads: int) -> float:
    return 1 / math.sqrt(width // (3 * heads))


@torch.library.custom_op("stop_mim::short_attention", mutates_args=())
def _short_attention(qkv: Tensor, heads: int) -> Tensor:
    output = qkv.new_empty(*qkv.shape[:2], qkv.shape[2] // 3)
    _launch(_forward_kernel, FORWARD_WARPS, qkv, (output,), heads, _scale(qkv.shape[2], heads) * math.log2(math.e))
    return output


@torch.library.custom_op("stop_mim::short_attention_backward", mutates_args=())
def _short_attention_backward(qkv: Tensor, d_output: Tensor, heads: int) -> Tensor:
    d_qkv, scale = torch.empty_like(qkv), _scale(qkv.shape[2], heads)
    tensors = (d_output.contiguous(), d_qkv)
    _launch(_backward_kernel, BACKWARD_WARPS, qkv, tensors, heads, scale * math.log2(math.e), scale)
    return d_qkv


@_short_attention.register_fake
def _(qkv: Tensor, heads: int) -> Tensor:
    return qkv.new_empty(*qkv.shape[:2], qkv.shape[2] // 3)


@_short_attention_backward.register_fake
def _(qkv: Tensor, d_output: Tensor, heads: int) -> Tensor:
    return torch.empty_like(qkv)


def _remember(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    qkv, ctx.heads = inputs
    ctx.save_for_backward(qkv)


def _differentiate(ctx: Any, d_output: Tensor) -> tuple[Tensor, None]:
    (qkv,) = ctx.saved_tensors
    return _short_attention_backward(qkv, d_output, ctx.heads), None


_short_attention.register_autograd(_differentiate, setup_context=_remember)


def attend(qkv: Float[Tensor, "batch n three_dims"], heads: int) -> Float[Tensor, "batch n dim"]:
    """Compute self-attention from concatenated queries, keys and values, by the kernel if it supports them."""
    batch, n, width = qkv.shape
    head_width = width // (3 * heads)
    fits = n <= LONGEST and head_width in HEAD_WIDTHS and qkv.dtype == torch.bfloat16
    if triton is not None and qkv.is_cuda and fits and qkv.is_contiguous():
        return _short_attention(qkv, heads)
    q, k, v = qkv.reshape(batch, n, 3, heads, head_width).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, n, width // 3)


def is_plain_attention(attention: Any) -> bool:
    """Return whether this is attention with nothing added: no norms, no gate, no dropout."""
    if isinstance(attention, ShortAttention):
        return True
    norms = (attention.q_norm, attention.k_norm, getattr(attention, "norm", nn.Identity()))
    drops = attention.attn_drop.p or attention.proj_drop.p
    gate = getattr(attention, "gate", None)
    return all(isinstance(norm, nn.Identity) for norm in norms) and not drops and gate is None


class ShortAttention(nn.Module):
    """Takes the place of timm's plain attention in a layer, with its weights under the same names."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.qkv, self.proj, self.num_heads = attention.qkv, attention.proj, attention.num_heads

    def forward(
        self, x: Float[Tensor, "batch n dim"], attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Float[Tensor, "batch n dim"]:
        """Return the attended tokens. The last two arguments are those of timm's layers; only their defaults work."""
        if attn_mask is not None or is_causal:
            raise ValueError("ShortAttention has no masks: keep timm's attention in layers that need them.")
        return self.proj(attend(self.qkv(x), self.num_heads))
