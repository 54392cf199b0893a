"""The small operators around the matmuls: RMS norm, rotary embedding, SiLU gate and the write into the cache.

Each reads its rows once, works in float32 and writes once: they are bound by launches and bytes, never by
arithmetic. Padding rows of a captured graph may hold anything: positions are clamped into the table, slots
outside the cache are skipped, and no row reads another; attention itself is in attention.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # elements a program holds when it takes several heads, or a slice of a row


@triton.jit
def _rms_norm(x, weight, out, stride_x, dim, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < dim
    value = tl.load(x + row * stride_x + column, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    scaled = value * tl.rsqrt(tl.sum(value * value, 0) / dim + eps)
    tl.store(out + row * dim + column, (scaled * gain).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [rows, dim] -> [rows, dim]
    assert x.stride(-1) == 1 and (x.dim() == 2 or x.is_contiguous()), (x.shape, x.stride())
    dim = x.shape[-1]
    rows = x.numel() // dim
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(dim)
        warps = min(max(block // 512, 1), 16)
        _rms_norm[(rows,)](x, weight, out, x.stride(-2), dim, eps, BLOCK=block, num_warps=warps)
    return out


@triton.jit
def _norm_gain(q_norm, k_norm, column, inside, is_query, Q_NORM: tl.constexpr, K_NORM: tl.constexpr):
    """The gain of each (head, column): queries and keys lie in one tile and differ in their weights."""
    q_gain = tl.full(column.shape, 1.0, tl.float32)
    k_gain = tl.full(column.shape, 1.0, tl.float32)
    if Q_NORM:
        q_gain = tl.load(q_norm + column, mask=inside, other=0.0).to(tl.float32)
    if K_NORM:
        k_gain = tl.load(k_norm + column, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_query[:, None], q_gain[None, :], k_gain[None, :])


@triton.jit
def _apply_norm(value, rms, gain, normed, DTYPE: tl.constexpr):
    """x * rms * gain where the head has a norm; rounded to the tensor's type before the rotation."""
    scaled = (value * rms[:, None] * gain).to(DTYPE).to(tl.float32)
    return tl.where(normed[:, None], scaled, value)


@triton.jit(do_not_specialize=["positions"])
def _qk_norm_rope(
    qkv, positions, table, q_norm, k_norm, stride_row, stride_table, max_position, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    # A head is three column ranges: a = [0, HALF), b = [HALF, 2 HALF), rest = [2 HALF, HEAD_DIM). The pair
    # (a, b) rotates, the rest (partial rotary) is only normed. Loading the ranges apart saves a shuffle
    # between halves.
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < HEADS + KV_HEADS
    is_query = head < HEADS
    half = tl.arange(0, BLOCK_HALF)
    in_half = half < HALF
    start = qkv + row * stride_row + head[:, None] * HEAD_DIM
    mask = is_head[:, None] & in_half[None, :]
    a = tl.load(start + half[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(start + HALF + half[None, :], mask=mask, other=0.0).to(tl.float32)

    if Q_NORM or K_NORM:
        DTYPE: tl.constexpr = qkv.dtype.element_ty
        normed = (is_query & Q_NORM) | ((head >= HEADS) & K_NORM)
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if BLOCK_REST > 0:
            rest = 2 * HALF + tl.arange(0, BLOCK_REST)
            in_rest = rest < HEAD_DIM
            rest_mask = is_head[:, None] & in_rest[None, :]
            c = tl.load(start + rest[None, :], mask=rest_mask, other=0.0).to(tl.float32)
            rms = tl.rsqrt((squares + tl.sum(c * c, 1)) / HEAD_DIM + eps)
            gain = _norm_gain(q_norm, k_norm, rest, in_rest, is_query, Q_NORM, K_NORM)
            c = _apply_norm(c, rms, gain, normed, DTYPE)
            tl.store(start + rest[None, :], c.to(DTYPE), mask=rest_mask)
        else:
            rms = tl.rsqrt(squares / HEAD_DIM + eps)
        gain_a = _norm_gain(q_norm, k_norm, half, in_half, is_query, Q_NORM, K_NORM)
        gain_b = _norm_gain(q_norm, k_norm, HALF + half, in_half, is_query, Q_NORM, K_NORM)
        a = _apply_norm(a, rms, gain_a, normed, DTYPE)
        b = _apply_norm(b, rms, gain_b, normed, DTYPE)

    position = tl.load(positions + row).to(tl.int64)
    position = tl.minimum(tl.maximum(position, 0), max_position - 1)  # a padding row may hold any number
    angle = table + position * stride_table + half
    cos = tl.load(angle, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angle + HALF, mask=in_half, other=0.0).to(tl.float32)[None, :]
    tl.store(start + half[None, :], (a * cos - b * sin).to(qkv.dtype.element_ty), mask=mask)
    tl.store(start + HALF + half[None, :], (b * cos + a * sin).to(qkv.dtype.element_ty), mask=mask)


def qk_norm_rope(
    qkv: Tensor,  # [rows, (heads + 2 * kv_heads) * head_dim], changed in place
    positions: Tensor,  # int32 [rows]
    table: Tensor,  # float32 [max_position, rotary_dim]: cosines, then sines
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None,  # [head_dim]: RMS norm of each head before it is rotated (Qwen3)
    k_norm: Tensor | None,
    eps: float,
) -> None:
    assert qkv.stride(1) == 1 and table.stride(1) == 1, (qkv.stride(), table.stride())
    rows, head_dim, half = qkv.shape[0], qkv.shape[1] // (num_heads + 2 * num_kv_heads), table.shape[1] // 2
    if not rows:
        return
    block_half, rest = triton.next_power_of_2(half), head_dim - 2 * half
    block_h = min(triton.next_power_of_2(num_heads + num_kv_heads), max(TILE // (2 * block_half), 1))
    grid = (rows, triton.cdiv(num_heads + num_kv_heads, block_h))
    _qk_norm_rope[grid](
        qkv, positions, table, q_norm, k_norm, qkv.stride(0), table.stride(0), table.shape[0], eps,
        HEADS=num_heads, KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, HALF=half,
        Q_NORM=q_norm is not None, K_NORM=k_norm is not None,
        BLOCK_H=block_h, BLOCK_HALF=block_half, BLOCK_REST=triton.next_power_of_2(rest) if rest else 0,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _silu_mul(gate_up, out, stride_row, inter, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inter
    gate = tl.load(gate_up + row * stride_row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride_row + inter + column, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * inter + column, value.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:  # [rows, 2 * inter] -> [rows, inter]
    assert gate_up.stride(1) == 1, gate_up.stride()
    rows, inter = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, inter), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(triton.next_power_of_2(inter), TILE // 2)
        grid = (rows, triton.cdiv(inter, block))
        _silu_mul[grid](gate_up, out, gate_up.stride(0), inter, BLOCK=block, num_warps=4)
    return out


@triton.jit(do_not_specialize=["slots", "num_slots"])
def _kv_write(
    k, v, k_cache, v_cache, slots, num_slots,
    stride_k_row, stride_k_head, stride_v_row, stride_v_head, stride_block, stride_head, stride_position,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < KV_HEADS) & (dim < HEAD_DIM)
    target = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_position
    target += head * stride_head + dim
    k_value = tl.load(k + row * stride_k_row + head * stride_k_head + dim, mask=mask)
    v_value = tl.load(v + row * stride_v_row + head * stride_v_head + dim, mask=mask)
    tl.store(k_cache + target, k_value.to(k_cache.dtype.element_ty), mask=mask)
    tl.store(v_cache + target, v_value.to(v_cache.dtype.element_ty), mask=mask)


def kv_write(
    k: Tensor,  # [rows, kv_heads, head_dim], a strided view of qkv
    v: Tensor,
    k_cache: Tensor,  # [blocks, kv_heads, block_size, head_dim], changed in place
    v_cache: Tensor,
    slots: Tensor,  # int32 [rows]: block * block_size + offset; a negative slot is not written
) -> None:
    assert k.stride(2) == v.stride(2) == k_cache.stride(3) == 1, (k.stride(), v.stride(), k_cache.stride())
    assert k_cache.stride() == v_cache.stride(), (k_cache.stride(), v_cache.stride())
    rows, kv_heads, head_dim = k.shape
    if not rows:
        return
    blocks, _, block_size, _ = k_cache.shape
    block_d = triton.next_power_of_2(head_dim)
    block_h = min(triton.next_power_of_2(kv_heads), max(TILE // block_d, 1))
    _kv_write[(rows, triton.cdiv(kv_heads, block_h))](
        k, v, k_cache, v_cache, slots, blocks * block_size,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), *k_cache.stride()[:3],
        KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, BLOCK_H=block_h, BLOCK_D=block_d,
        num_warps=4,
    )  # fmt: skip
