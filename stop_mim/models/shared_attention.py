"""Attention in which several blocks of masked tokens share one context: the context does not see them, and they do not
see each other. A kernel for NVIDIA GPUs computes what is seen and no more; elsewhere a mask does the same.
"""

import math
from dataclasses import dataclass
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from timm.layers import Attention
from torch import Tensor

from stop_mim.models.short_attention import HEAD_WIDTHS, triton

if triton is not None:
    import triton.language as tl

LONGEST_PART = 64


@dataclass(frozen=True)
class SharedContext:
    """How a sequence is laid out: the context first, then the blocks, all of one length."""

    n_context: int
    n_blocks: int
    n_target: int

    def mask(self, device: torch.device) -> Bool[Tensor, "n_tokens n_tokens"]:
        """Which tokens (columns) a token (row) sees: all see the context, masked ones also those of their block."""
        blocks = torch.arange(self.n_blocks, device=device).repeat_interleave(self.n_target)
        block_of = torch.cat([torch.full((self.n_context,), -1, device=device), blocks])
        return (block_of[None, :] == -1) | (block_of[:, None] == block_of[None, :])


if triton is not None:

    @triton.jit
    @no_type_check
    def _load(start, rows, columns, inside, STRIDE: tl.constexpr):
        return tl.load(start + rows[:, None] * STRIDE + columns[None, :], mask=inside[:, None], other=0.0)

    @triton.jit
    @no_type_check
    def _store(start, rows, columns, inside, values, STRIDE: tl.constexpr):
        values = values.to(start.dtype.element_ty)
        tl.store(start + rows[:, None] * STRIDE + columns[None, :], values, mask=inside[:, None])

    @triton.jit
    @no_type_check
    def _scores(q, k, inside, log2_scale):
        return tl.where(inside[None, :], tl.dot(q, tl.trans(k)) * log2_scale, -1e30)

    @triton.jit
    @no_type_check
    def _own_weights(q, k, inside, log2_scale):
        scores = _scores(q, k, inside, log2_scale)
        weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
        return weights / tl.sum(weights, 1)[:, None]

    @triton.jit
    @no_type_check
    def _weights(q, k, inside, k_context, inside_context, log2_scale):
        """Softmax over the context and the own block together, in two parts."""
        seen, own = _scores(q, k_context, inside_context, log2_scale), _scores(q, k, inside, log2_scale)
        largest = tl.maximum(tl.max(seen, 1), tl.max(own, 1))[:, None]
        seen, own = tl.exp2(seen - largest), tl.exp2(own - largest)
        total = (tl.sum(seen, 1) + tl.sum(own, 1))[:, None]
        return seen / total, own / total

    @triton.jit
    @no_type_check
    def _forward_kernel(
        qkv,
        output,
        n_context,
        n_blocks,
        n_target,
        log2_scale,
        HEADS: tl.constexpr,
        WIDTH: tl.constexpr,
        CONTEXT_TILE: tl.constexpr,
        TARGET_TILE: tl.constexpr,
    ):
        DIM: tl.constexpr = HEADS * WIDTH
        sequence, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
        first = sequence * (n_context + n_blocks * n_target)
        qkv += first * 3 * DIM + head * WIDTH
        output += first * DIM + head * WIDTH
        columns, context = tl.arange(0, WIDTH), tl.arange(0, CONTEXT_TILE)
        in_context = context < n_context
        q_context = _load(qkv, context, columns, in_context, 3 * DIM)
        k_context = _load(qkv + DIM, context, columns, in_context, 3 * DIM)
        v_context = _load(qkv + 2 * DIM, context, columns, in_context, 3 * DIM)
        weights = _own_weights(q_context, k_context, in_context, log2_scale)
        _store(output, context, columns, in_context, tl.dot(weights.to(q_context.dtype), v_context), DIM)
        within = tl.arange(0, TARGET_TILE)
        inside = within < n_target
        for block in range(n_blocks):
            rows = n_context + block * n_target + within
            q = _load(qkv, rows, columns, inside, 3 * DIM)
            k = _load(qkv + DIM, rows, columns, inside, 3 * DIM)
            v = _load(qkv + 2 * DIM, rows, columns, inside, 3 * DIM)
            seen, own = _weights(q, k, inside, k_context, in_context, log2_scale)
            attended = tl.dot(seen.to(q.dtype), v_context) + tl.dot(own.to(q.dtype), v)
            _store(output, rows, columns, inside, attended, DIM)

    @triton.jit
    @no_type_check
    def _backward_kernel(
        qkv,
        d_output,
        d_qkv,
        n_context,
        n_blocks,
        n_target,
        log2_scale,
        scale,
        HEADS: tl.constexpr,
        WIDTH: tl.constexpr,
        CONTEXT_TILE: tl.constexpr,
        TARGET_TILE: tl.constexpr,
    ):
        DIM: tl.constexpr = HEADS * WIDTH
        sequence, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
        first = sequence * (n_context + n_blocks * n_target)
        qkv += first * 3 * DIM + head * WIDTH
        d_qkv += first * 3 * DIM + head * WIDTH
        d_output += first * DIM + head * WIDTH
        columns, context = tl.arange(0, WIDTH), tl.arange(0, CONTEXT_TILE)
        in_context = context < n_context
        q_context = _load(qkv, context, columns, in_context, 3 * DIM)
        k_context = _load(qkv + DIM, context, columns, in_context, 3 * DIM)
        v_context = _load(qkv + 2 * DIM, context, columns, in_context, 3 * DIM)
        d_seen_by_context = _load(d_output, context, columns, in_context, DIM)
        weights = _own_weights(q_context, k_context, in_context, log2_scale)
        d_weights = tl.dot(d_seen_by_context, tl.trans(v_context))
        d_scores = (weights * (d_weights - tl.sum(weights * d_weights, 1)[:, None]) * scale).to(q_context.dtype)
        _store(d_qkv, context, columns, in_context, tl.dot(d_scores, k_context), 3 * DIM)
        d_k_context = tl.dot(tl.trans(d_scores), q_context)
        d_v_context = tl.dot(tl.trans(weights.to(q_context.dtype)), d_seen_by_context)
        within = tl.arange(0, TARGET_TILE)
        inside = within < n_target
        for block in range(n_blocks):
            rows = n_context + block * n_target + within
            q = _load(qkv, rows, columns, inside, 3 * DIM)
            k = _load(qkv + DIM, rows, columns, inside, 3 * DIM)
            v = _load(qkv + 2 * DIM, rows, columns, inside, 3 * DIM)
            d_attended = _load(d_output, rows, columns, inside, DIM)
            seen, own = _weights(q, k, inside, k_context, in_context, log2_scale)
            d_seen, d_own = tl.dot(d_attended, tl.trans(v_context)), tl.dot(d_attended, tl.trans(v))
            mean = (tl.sum(seen * d_seen, 1) + tl.sum(own * d_own, 1))[:, None]
            d_v_context += tl.dot(tl.trans(seen.to(q.dtype)), d_attended)
            _store(d_qkv + 2 * DIM, rows, columns, inside, tl.dot(tl.trans(own.to(q.dtype)), d_attended), 3 * DIM)
            d_seen = (seen * (d_seen - mean) * scale).to(q.dtype)
            d_own = (own * (d_own - mean) * scale).to(q.dtype)
            _store(d_qkv, rows, columns, inside, tl.dot(d_seen, k_context) + tl.dot(d_own, k), 3 * DIM)
            _store(d_qkv + DIM, rows, columns, inside, tl.dot(tl.trans(d_own), q), 3 * DIM)
            d_k_context += tl.dot(tl.trans(d_seen), q)
        _store(d_qkv + DIM, context, columns, in_context, d_k_context, 3 * DIM)
        _store(d_qkv + 2 * DIM, context, columns, in_context, d_v_context, 3 * DIM)


def _launch(kernel: Any, qkv: Tensor, tensors: tuple[Tensor, ...], heads: int, layout: list[int], *more: float) -> None:
    width = qkv.shape[2] // (3 * heads)
    n_context, _, n_target = layout
    tiles = [max(16, triton.next_power_of_2(n)) for n in (n_context, n_target)]
    constants = {"HEADS": heads, "WIDTH": width, "CONTEXT_TILE": tiles[0], "TARGET_TILE": tiles[1]}
    log2_scale = math.log2(math.e) / math.sqrt(width)
    warps = 4 if max(tiles) > 32 else 2
    kernel[(len(qkv) * heads,)](qkv, *tensors, *layout, log2_scale, *more, **constants, num_warps=warps)


@torch.library.custom_op("stop_mim::shared_attention", mutates_args=())
def _shared_attention(qkv: Tensor, heads: int, layout: list[int]) -> Tensor:
    output = qkv.new_empty(*qkv.shape[:2], qkv.shape[2] // 3)
    _launch(_forward_kernel, qkv, (output,), heads, layout)
    return output


@torch.library.custom_op("stop_mim::shared_attention_backward", mutates_args=())
def _shared_attention_backward(qkv: Tensor, d_output: Tensor, heads: int, layout: list[int]) -> Tensor:
    d_qkv, scale = torch.empty_like(qkv), 1 / math.sqrt(qkv.shape[2] // (3 * heads))
    _launch(_backward_kernel, qkv, (d_output.contiguous(), d_qkv), heads, layout, scale)
    return d_qkv


@_shared_attention.register_fake
def _(qkv: Tensor, heads: int, layout: list[int]) -> Tensor:
    return qkv.new_empty(*qkv.shape[:2], qkv.shape[2] // 3)


@_shared_attention_backward.register_fake
def _(qkv: Tensor, d_output: Tensor, heads: int, layout: list[int]) -> Tensor:
    return torch.empty_like(qkv)


def _remember(ctx: Any, inputs: tuple[Tensor, int, list[int]], output: Tensor) -> None:
    qkv, ctx.heads, ctx.layout = inputs
    ctx.save_for_backward(qkv)


def _differentiate(ctx: Any, d_output: Tensor) -> tuple[Tensor, None, None]:
    (qkv,) = ctx.saved_tensors
    return _shared_attention_backward(qkv, d_output, ctx.heads, ctx.layout), None, None


_shared_attention.register_autograd(_differentiate, setup_context=_remember)


def attend_shared(
    qkv: Float[Tensor, "batch n three_dims"], heads: int, layout: SharedContext
) -> Float[Tensor, "batch n dim"]:
    """Attention from queries, keys and values side by side, by the kernel where it applies."""
    batch, n, width = qkv.shape
    head_width = width // (3 * heads)
    fits = max(layout.n_context, layout.n_target) <= LONGEST_PART and head_width in HEAD_WIDTHS
    if triton is not None and qkv.is_cuda and qkv.dtype == torch.bfloat16 and fits and qkv.is_contiguous():
        return _shared_attention(qkv, heads, [layout.n_context, layout.n_blocks, layout.n_target])
    q, k, v = qkv.reshape(batch, n, 3, heads, head_width).permute(2, 0, 3, 1, 4).unbind(0)
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=layout.mask(qkv.device))
    return attended.transpose(1, 2).reshape(batch, n, width // 3)


class SharedContextAttention(Attention):
    """timm's attention for sequences with a shared context; its layers hand the layout on in place of a mask."""

    def forward(
        self, x: Float[Tensor, "batch n dim"], attn_mask: SharedContext | None = None, is_causal: bool = False
    ) -> Float[Tensor, "batch n dim"]:
        """What the tokens of every part see."""
        if attn_mask is None:
            return super().forward(x)
        return self.proj(attend_shared(self.qkv(x), self.num_heads, attn_mask))
