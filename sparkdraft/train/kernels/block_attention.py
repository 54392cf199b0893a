"""Attention of drafter training as Triton kernels, forward and backward: train/model.py defines it.

A program takes one block and one K/V head, all rows x grouped heads in one tile; the backward pass recomputes the
weights from the saved log-sum-exp. Gradients of the context are gathered, not scattered: a program owns a tile of keys
and walks the query rows that can see it, so there are no atomics and every run gives the same bits. Nothing is read
back to the host; batches and their order are the trainer's.

    _forward, _grad_block  program (block, K/V head):     [start ... anchor) in tiles of keys, and the block's own rows
    _grad_context          program (key tile, K/V head):  query rows [low * W ... high * W) in tiles of lanes

A lane is one (query row, head of the group); low and high are the first block whose anchor is past the tile's first
key, and the first whose document starts past its last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkdraft.kernels.cuda.runtime import tuned
from sparkdraft.kernels.cuda.runtime.gpu import Gpu, gpu_of

OWN = 16  # lanes for a block's own keys: the least that a matrix instruction takes, and the widest block


@dataclass(frozen=True, slots=True)
class Tiles:
    """Shapes of a launch, from the tables of tuned/."""

    keys: int  # keys a step
    lanes: int  # most lanes of a program that owns a block
    key_lanes: int  # lanes a step of a program that owns keys
    warps: int
    stages: int


@triton.jit
def _load_rows(base, row, inside, stride, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """[rows, DIM] of one head, zero outside: 0 * NaN of what lies there would poison a sum."""
    dim = tl.arange(0, DIM)[None, :]
    mask = inside[:, None] & (dim < HEAD_DIM)
    return tl.load(base + row.to(tl.int64)[:, None] * stride + dim, mask=mask, other=0.0)


@triton.jit
def _load_lanes(base, row, head, valid, stride_row, stride_head, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    dim = tl.arange(0, DIM)[None, :]
    offset = row.to(tl.int64)[:, None] * stride_row + head[:, None] * stride_head + dim
    return tl.load(base + offset, mask=valid[:, None] & (dim < HEAD_DIM), other=0.0)


@triton.jit
def _store_rows(base, value, row, head, inside, heads, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Into a dense [rows, heads, HEAD_DIM]; 'head' is a number, or one for each row."""
    dim = tl.arange(0, DIM)[None, :]
    offset = ((row.to(tl.int64) * heads + head) * HEAD_DIM)[:, None] + dim
    tl.store(base + offset, value.to(base.dtype.element_ty), mask=inside[:, None] & (dim < HEAD_DIM))


@triton.jit
def _fold(acc, peak, total, q, k, v, seen, scale_log2, PRECISION: tl.constexpr):
    """One step of online softmax. A row sees at least its own block in the end, but perhaps no key of this tile."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    scores = tl.where(seen[None, :], scores, float("-inf"))
    peak_now = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - peak_now[:, None])
    fade = tl.exp2(peak - peak_now)
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return acc, peak_now, total


@triton.jit(do_not_specialize=["starts", "anchors"])
def _forward(
    q, block_k, block_v, context_k, context_v, out, lse, starts, anchors, scale_log2,
    stride_q_row, stride_q_head, stride_bk_row, stride_bk_head, stride_bv_row, stride_bv_head,
    stride_ck_row, stride_ck_head, stride_cv_row, stride_cv_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    LANES: tl.constexpr, KEYS: tl.constexpr, OWN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    QUERIES: tl.constexpr = LANES // GROUP
    block = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    lane = tl.arange(0, LANES)
    query = tl.program_id(1) * QUERIES + lane // GROUP
    valid = (lane < QUERIES * GROUP) & (query < WIDTH)
    row = block * WIDTH + query
    head = kv_head * GROUP + lane % GROUP
    q_tile = _load_lanes(q, row, head, valid, stride_q_row, stride_q_head, HEAD_DIM, DIM)
    context_k += kv_head * stride_ck_head
    context_v += kv_head * stride_cv_head
    start = tl.load(starts + block)
    stop = tl.load(anchors + block)
    acc = tl.zeros([LANES, DIM], tl.float32)
    peak = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for first in tl.range(start, stop, KEYS):
        key = first + tl.arange(0, KEYS)
        k = _load_rows(context_k, key, key < stop, stride_ck_row, HEAD_DIM, DIM)
        v = _load_rows(context_v, key, key < stop, stride_cv_row, HEAD_DIM, DIM)
        acc, peak, total = _fold(acc, peak, total, q_tile, k, v, key < stop, scale_log2, PRECISION)
    own = tl.arange(0, OWN)
    k = _load_rows(block_k + kv_head * stride_bk_head, block * WIDTH + own, own < WIDTH, stride_bk_row, HEAD_DIM, DIM)
    v = _load_rows(block_v + kv_head * stride_bv_head, block * WIDTH + own, own < WIDTH, stride_bv_row, HEAD_DIM, DIM)
    acc, peak, total = _fold(acc, peak, total, q_tile, k, v, own < WIDTH, scale_log2, PRECISION)
    _store_rows(out, acc / total[:, None], row, head, valid, KV_HEADS * GROUP, HEAD_DIM, DIM)
    tl.store(lse + row.to(tl.int64) * (KV_HEADS * GROUP) + head, peak + tl.log2(total), mask=valid)


@triton.jit
def _weights_and_grad(q, grad, k, v, lse, delta, seen, scale_log2, PRECISION: tl.constexpr):
    """P and dS (without the scale), [lanes, keys]. What is not seen may overflow before the mask, not after."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    weights = tl.where(seen, tl.exp2(scores - lse[:, None]), 0.0)
    grad_weights = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
    return weights, weights * (grad_weights - delta[:, None])


@triton.jit(do_not_specialize=["starts", "anchors"])
def _grad_block(
    q, block_k, block_v, context_k, context_v, out, grad, lse, delta, grad_q, grad_block_k, grad_block_v,
    starts, anchors, scale, scale_log2,
    stride_q_row, stride_q_head, stride_bk_row, stride_bk_head, stride_bv_row, stride_bv_head,
    stride_ck_row, stride_ck_head, stride_cv_row, stride_cv_head, stride_g_row, stride_g_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    LANES: tl.constexpr, KEYS: tl.constexpr, OWN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one block's own rows, and delta = sum(out * grad) of each lane, which _grad_context needs too."""
    QUERIES: tl.constexpr = LANES // GROUP
    HEADS: tl.constexpr = KV_HEADS * GROUP
    DTYPE: tl.constexpr = q.dtype.element_ty
    block = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    context_k += kv_head * stride_ck_head
    context_v += kv_head * stride_cv_head
    start = tl.load(starts + block)
    stop = tl.load(anchors + block)
    own = tl.arange(0, OWN)
    own_row = block * WIDTH + own
    own_k = _load_rows(block_k + kv_head * stride_bk_head, own_row, own < WIDTH, stride_bk_row, HEAD_DIM, DIM)
    own_v = _load_rows(block_v + kv_head * stride_bv_head, own_row, own < WIDTH, stride_bv_row, HEAD_DIM, DIM)
    own_grad_k = tl.zeros([OWN, DIM], tl.float32)
    own_grad_v = tl.zeros([OWN, DIM], tl.float32)
    lane = tl.arange(0, LANES)
    head = kv_head * GROUP + lane % GROUP
    for tile in range(0, WIDTH, QUERIES):  # once, but for wide groups
        query = tile + lane // GROUP
        valid = (lane < QUERIES * GROUP) & (query < WIDTH)
        row = block * WIDTH + query
        q_tile = _load_lanes(q, row, head, valid, stride_q_row, stride_q_head, HEAD_DIM, DIM)
        grad_tile = _load_lanes(grad, row, head, valid, stride_g_row, stride_g_head, HEAD_DIM, DIM)
        out_tile = _load_lanes(out, row, head, valid, HEADS * HEAD_DIM, HEAD_DIM, HEAD_DIM, DIM)
        line = row.to(tl.int64) * HEADS + head
        lse_tile = tl.load(lse + line, mask=valid, other=0.0)
        delta_tile = tl.sum(out_tile.to(tl.float32) * grad_tile.to(tl.float32), 1)
        tl.store(delta + line, delta_tile, mask=valid)

        own_seen = valid[:, None] & (own < WIDTH)[None, :]
        own_weights, own_grad_scores = _weights_and_grad(
            q_tile, grad_tile, own_k, own_v, lse_tile, delta_tile, own_seen, scale_log2, PRECISION
        )
        own_grad_v = tl.dot(tl.trans(own_weights.to(DTYPE)), grad_tile, own_grad_v, input_precision=PRECISION)
        own_grad_k = tl.dot(tl.trans(own_grad_scores.to(DTYPE)), q_tile, own_grad_k, input_precision=PRECISION)
        acc = tl.dot(own_grad_scores.to(DTYPE), own_k, input_precision=PRECISION)
        for first in tl.range(start, stop, KEYS):
            key = first + tl.arange(0, KEYS)
            k = _load_rows(context_k, key, key < stop, stride_ck_row, HEAD_DIM, DIM)
            v = _load_rows(context_v, key, key < stop, stride_cv_row, HEAD_DIM, DIM)
            seen = valid[:, None] & (key < stop)[None, :]
            _, grad_scores = _weights_and_grad(
                q_tile, grad_tile, k, v, lse_tile, delta_tile, seen, scale_log2, PRECISION
            )
            acc = tl.dot(grad_scores.to(DTYPE), k, acc, input_precision=PRECISION)
        _store_rows(grad_q, acc * scale, row, head, valid, HEADS, HEAD_DIM, DIM)
    _store_rows(grad_block_k, own_grad_k * scale, own_row, kv_head, own < WIDTH, KV_HEADS, HEAD_DIM, DIM)
    _store_rows(grad_block_v, own_grad_v, own_row, kv_head, own < WIDTH, KV_HEADS, HEAD_DIM, DIM)


@triton.jit(do_not_specialize=["starts", "anchors", "lows", "highs", "tokens"])
def _grad_context(
    q, context_k, context_v, grad, lse, delta, grad_context_k, grad_context_v,
    starts, anchors, lows, highs, tokens, scale, scale_log2,
    stride_q_row, stride_q_head, stride_ck_row, stride_ck_head, stride_cv_row, stride_cv_head,
    stride_g_row, stride_g_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    LANES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of keys. Lanes of neighbouring blocks share a tile, so narrow blocks fill it too."""
    QUERIES: tl.constexpr = LANES // GROUP
    HEADS: tl.constexpr = KV_HEADS * GROUP
    DTYPE: tl.constexpr = q.dtype.element_ty
    tile = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    key = tile * KEYS + tl.arange(0, KEYS)
    inside = key < tokens
    k = _load_rows(context_k + kv_head * stride_ck_head, key, inside, stride_ck_row, HEAD_DIM, DIM)
    v = _load_rows(context_v + kv_head * stride_cv_head, key, inside, stride_cv_row, HEAD_DIM, DIM)
    acc_k = tl.zeros([KEYS, DIM], tl.float32)
    acc_v = tl.zeros([KEYS, DIM], tl.float32)
    lane = tl.arange(0, LANES)
    head = kv_head * GROUP + lane % GROUP
    stop = tl.load(highs + tile) * WIDTH
    for first in tl.range(tl.load(lows + tile) * WIDTH, stop, QUERIES):
        row = first + lane // GROUP
        valid = (lane < QUERIES * GROUP) & (row < stop)
        line = row.to(tl.int64) * HEADS + head
        q_tile = _load_lanes(q, row, head, valid, stride_q_row, stride_q_head, HEAD_DIM, DIM)
        grad_tile = _load_lanes(grad, row, head, valid, stride_g_row, stride_g_head, HEAD_DIM, DIM)
        lse_tile = tl.load(lse + line, mask=valid, other=0.0)
        delta_tile = tl.load(delta + line, mask=valid, other=0.0)
        start = tl.load(starts + row // WIDTH, mask=valid, other=0)
        anchor = tl.load(anchors + row // WIDTH, mask=valid, other=0)  # 0: a lane that is not there sees nothing
        seen = (key[:, None] >= start[None, :]) & (key[:, None] < anchor[None, :])
        # Transposed, [keys, lanes]: the weights are then the left side of the next product, and stay in registers.
        scores = tl.dot(k, tl.trans(q_tile), input_precision=PRECISION) * scale_log2
        weights = tl.where(seen, tl.exp2(scores - lse_tile[None, :]), 0.0)
        acc_v = tl.dot(weights.to(DTYPE), grad_tile, acc_v, input_precision=PRECISION)
        grad_weights = tl.dot(v, tl.trans(grad_tile), input_precision=PRECISION)
        grad_scores = weights * (grad_weights - delta_tile[None, :])
        acc_k = tl.dot(grad_scores.to(DTYPE), q_tile, acc_k, input_precision=PRECISION)
    _store_rows(grad_context_k, acc_k * scale, key, kv_head, inside, KV_HEADS, HEAD_DIM, DIM)
    _store_rows(grad_context_v, acc_v, key, kv_head, inside, KV_HEADS, HEAD_DIM, DIM)


def _padded(head_dim: int) -> int:
    return max(triton.next_power_of_2(head_dim), 32)


def _tiles(head_dim: int, dtype: torch.dtype, gpu: Gpu) -> Tiles:
    """By padded head_dim; float32 is for tests and toys."""
    known = tuned.tables(gpu)["block_attention", f"{8 * dtype.itemsize}bit"]
    assert (_padded(head_dim),) in known, f"no tile for heads of {head_dim} in {dtype}"
    return Tiles(*known[_padded(head_dim),])


def _block_lanes(width: int, group: int, most: int) -> int:
    assert 1 <= width <= OWN and group <= most, (width, group)
    return min(max(triton.next_power_of_2(width * group), 16), most)


def _strides(*tensors: Tensor) -> list[int]:
    assert all(t.stride(2) == 1 for t in tensors), [t.stride() for t in tensors]
    return [t.stride(i) for t in tensors for i in (0, 1)]


def _constants(q: Tensor, kv_heads: int, width: int) -> dict[str, Any]:
    return {
        "KV_HEADS": kv_heads,
        "GROUP": q.shape[1] // kv_heads,
        "WIDTH": width,
        "HEAD_DIM": q.shape[2],
        "DIM": _padded(q.shape[2]),
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, block_k: Tensor, block_v: Tensor, context_k: Tensor, context_v: Tensor,
        starts: Tensor, anchors: Tensor, width: int, scale: float,
    ) -> Tensor:  # fmt: skip
        rows, heads, head_dim = q.shape
        kv_heads, tile = block_k.shape[1], _tiles(head_dim, q.dtype, gpu_of(q.device))
        lanes = _block_lanes(width, heads // kv_heads, tile.lanes)
        out = torch.empty((rows, heads, head_dim), dtype=q.dtype, device=q.device)
        lse = torch.empty((rows, heads), dtype=torch.float32, device=q.device)  # of base 2
        if rows:
            grid = (rows // width * kv_heads, triton.cdiv(width, lanes // (heads // kv_heads)))
            _forward[grid](
                q, block_k, block_v, context_k, context_v, out, lse, starts, anchors, scale * math.log2(math.e),
                *_strides(q, block_k, block_v, context_k, context_v),
                **_constants(q, kv_heads, width), LANES=lanes, KEYS=tile.keys, OWN=OWN,
                num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
        ctx.save_for_backward(q, block_k, block_v, context_k, context_v, out, lse, starts, anchors)
        ctx.width, ctx.scale = width, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, block_k, block_v, context_k, context_v, out, lse, starts, anchors = ctx.saved_tensors
        inputs, edges = (q, block_k, block_v, context_k, context_v), (starts, anchors)
        if not len(q):
            return (*(torch.zeros_like(t) for t in inputs), None, None, None, None)
        grad = grads[0] if grads[0].stride(2) == 1 else grads[0].contiguous()
        results = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in inputs]
        delta = torch.empty(lse.shape, dtype=torch.float32, device=lse.device)
        _launch_grad_block(inputs, out, grad, lse, delta, results[:3], edges, ctx.width, ctx.scale)
        if len(context_k):
            _launch_grad_context(inputs, grad, lse, delta, results[3:], edges, ctx.width, ctx.scale)
        return (*results, None, None, None, None)


def _launch_grad_block(
    inputs: tuple[Tensor, ...], out: Tensor, grad: Tensor, lse: Tensor, delta: Tensor, results: list[Tensor],
    edges: tuple[Tensor, Tensor], width: int, scale: float,
) -> None:  # fmt: skip
    q, kv_heads = inputs[0], inputs[1].shape[1]
    tile = _tiles(q.shape[2], q.dtype, gpu_of(q.device))
    _grad_block[(q.shape[0] // width * kv_heads,)](
        *inputs, out, grad, lse, delta, *results, *edges, scale, scale * math.log2(math.e),
        *_strides(*inputs, grad), **_constants(q, kv_heads, width),
        LANES=_block_lanes(width, q.shape[1] // kv_heads, tile.lanes), KEYS=tile.keys, OWN=OWN,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _launch_grad_context(
    inputs: tuple[Tensor, ...], grad: Tensor, lse: Tensor, delta: Tensor, results: list[Tensor],
    edges: tuple[Tensor, Tensor], width: int, scale: float,
) -> None:  # fmt: skip
    q, _, _, context_k, context_v = inputs
    (tokens, kv_heads), tile = context_k.shape[:2], _tiles(q.shape[2], q.dtype, gpu_of(q.device))
    starts, anchors = edges
    assert q.shape[1] // kv_heads <= tile.key_lanes, (q.shape, kv_heads)
    first = torch.arange(0, tokens, tile.keys, dtype=torch.int32, device=q.device)  # of each tile
    lows = torch.searchsorted(anchors, first, right=True, out_int32=True)
    highs = torch.searchsorted(starts, first + tile.keys, out_int32=True)
    _grad_context[(len(first) * kv_heads,)](
        q, context_k, context_v, grad, lse, delta, *results, *edges, lows, highs, tokens,
        scale, scale * math.log2(math.e), *_strides(q, context_k, context_v, grad),
        **_constants(q, kv_heads, width), LANES=tile.key_lanes, KEYS=tile.keys,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def block_attention(
    q: Tensor,  # [blocks * width, heads, head_dim]
    block_k: Tensor,  # [blocks * width, kv_heads, head_dim]
    block_v: Tensor,
    context_k: Tensor,  # [tokens, kv_heads, head_dim]
    context_v: Tensor,
    starts: Tensor,  # int32 [blocks]
    anchors: Tensor,  # int32 [blocks]
    width: int,
    scale: float,
) -> Tensor:  # [blocks * width, heads, head_dim]
    assert starts.dtype == anchors.dtype == torch.int32, (starts.dtype, anchors.dtype)
    assert starts.is_contiguous() and anchors.is_contiguous(), (starts.stride(), anchors.stride())
    out: Tensor = _BlockAttention.apply(q, block_k, block_v, context_k, context_v, starts, anchors, width, scale)
    return out
