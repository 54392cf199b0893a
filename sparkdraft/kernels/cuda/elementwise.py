"""The small operators around the matmuls: norms, rotary embedding, gates and the write into the cache.

Each reads its rows once, works in float32 and writes once. They are bound by launches and bytes, so norm, rotation and
write are one launch (`rope_write`), and each begins while its predecessor still runs (pdl.py). Padding may hold
anything: positions are clamped into the table, and slots outside the cache are skipped.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkdraft.kernels.cuda.linear import few_tokens
from sparkdraft.kernels.cuda.linear.few_tokens import activate
from sparkdraft.kernels.cuda.runtime import pdl
from sparkdraft.kernels.cuda.runtime.pdl import enter
from sparkdraft.kernels.ops import Activation, Norm, Normed, RopeArgs

TILE = 2048  # elements a program holds when it takes several heads, or a slice of a row


def run(kernel, grid: tuple[int, ...], first: Tensor, *arguments: object, **options: object) -> None:
    """Launches a kernel that enters by pdl.py, over its neighbours where the GPU can; 'first' is its first argument."""
    on = pdl.active(first.device)
    kernel[grid](first, *arguments, PDL=on, **options, **pdl.options(on))


@triton.jit
def _rms_norm(x, weight, out, stride_x, dim, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < dim
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    enter(PDL)
    value = tl.load(x + row * stride_x + column, mask=inside, other=0.0).to(tl.float32)
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
        run(_rms_norm, (rows,), x, weight, out, x.stride(-2), dim, eps, BLOCK=block, num_warps=warps)
    return out


@triton.jit
def _norm_gain(
    q_norm, k_norm, column, inside, is_query, is_value,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, V_NORM: tl.constexpr,
):  # fmt: skip
    """The gain of each (head, column): queries, keys and values lie in one tile; values have none."""
    q_gain = tl.full(column.shape, 1.0, tl.float32)
    k_gain = tl.full(column.shape, 1.0, tl.float32)
    if Q_NORM:
        q_gain = tl.load(q_norm + column, mask=inside, other=0.0).to(tl.float32)
    if K_NORM:
        k_gain = tl.load(k_norm + column, mask=inside, other=0.0).to(tl.float32)
    gain = tl.where(is_query[:, None], q_gain[None, :], k_gain[None, :])
    if V_NORM:
        gain = tl.where(is_value[:, None], 1.0, gain)
    return gain


@triton.jit
def _apply_norm(value, rms, gain, normed, DTYPE: tl.constexpr):
    """x * rms * gain where the head has a norm; rounded to the tensor's type before the rotation."""
    scaled = (value * rms[:, None] * gain).to(DTYPE).to(tl.float32)
    return tl.where(normed[:, None], scaled, value)


@triton.jit
def _put(
    value, column, inside, head, start, k_line, v_line, kept, stride_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Stores a range of columns: queries in place, keys and values into the cache."""
    rounded = value.to(DTYPE)
    tl.store(start + column[None, :], rounded, mask=(head < HEADS)[:, None] & inside[None, :])
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS) & kept
    is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS) & kept
    k_target = k_line + (head - HEADS)[:, None] * stride_head + column[None, :]
    v_target = v_line + (head - HEADS - KV_HEADS)[:, None] * stride_head + column[None, :]
    tl.store(k_target, rounded.to(k_line.dtype.element_ty), mask=is_key[:, None] & inside[None, :])
    tl.store(v_target, rounded.to(v_line.dtype.element_ty), mask=is_value[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["positions", "slots", "num_slots"])
def _rope_write(
    qkv, positions, table, q_norm, k_norm, k_cache, v_cache, slots,
    stride_row, stride_table, stride_block, stride_head, stride_position, max_position, num_slots, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, V_NORM: tl.constexpr, V_FROM_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # A head is three column ranges: a = [0, HALF), b = [HALF, 2 HALF), rest = [2 HALF, HEAD_DIM). The pair (a, b)
    # rotates, the rest (partial rotary) is only normed. Heads of V do not rotate, and may read the keys' projection.
    DTYPE: tl.constexpr = qkv.dtype.element_ty
    NORM: tl.constexpr = Q_NORM or K_NORM or V_NORM
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < HEADS + 2 * KV_HEADS
    is_query = head < HEADS
    turns = head < HEADS + KV_HEADS
    source = head
    if V_FROM_K:
        source = tl.where(turns, head, head - KV_HEADS)
    half = tl.arange(0, BLOCK_HALF)
    in_half = half < HALF
    start = qkv + row * stride_row + source[:, None] * HEAD_DIM
    mask = is_head[:, None] & in_half[None, :]
    if NORM:
        gain_a = _norm_gain(q_norm, k_norm, half, in_half, is_query, ~turns, Q_NORM, K_NORM, V_NORM)
        gain_b = _norm_gain(q_norm, k_norm, HALF + half, in_half, is_query, ~turns, Q_NORM, K_NORM, V_NORM)
    enter(PDL)

    slot = tl.load(slots + row).to(tl.int64)
    kept = (slot >= 0) & (slot < num_slots)
    line = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_position
    k_line, v_line = k_cache + line, v_cache + line
    position = tl.load(positions + row).to(tl.int64)
    position = tl.minimum(tl.maximum(position, 0), max_position - 1)  # a padding row may hold any number
    a = tl.load(start + half[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(start + HALF + half[None, :], mask=mask, other=0.0).to(tl.float32)

    if NORM:
        normed = (is_query & Q_NORM) | ((head >= HEADS) & turns & K_NORM) | (~turns & V_NORM)
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
    if BLOCK_REST > 0:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)
        in_rest = rest < HEAD_DIM
        c = tl.load(start + rest[None, :], mask=is_head[:, None] & in_rest[None, :], other=0.0).to(tl.float32)
        if NORM:
            squares += tl.sum(c * c, 1)
            gain = _norm_gain(q_norm, k_norm, rest, in_rest, is_query, ~turns, Q_NORM, K_NORM, V_NORM)
            c = _apply_norm(c, tl.rsqrt(squares / HEAD_DIM + eps), gain, normed, DTYPE)
        _put(c, rest, in_rest, head, start, k_line, v_line, kept, stride_head, HEADS, KV_HEADS, DTYPE)
    if NORM:
        rms = tl.rsqrt(squares / HEAD_DIM + eps)
        a = _apply_norm(a, rms, gain_a, normed, DTYPE)
        b = _apply_norm(b, rms, gain_b, normed, DTYPE)

    angle = table + position * stride_table + half
    cos = tl.load(angle, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angle + HALF, mask=in_half, other=0.0).to(tl.float32)[None, :]
    new_a = tl.where(turns[:, None], a * cos - b * sin, a)
    new_b = tl.where(turns[:, None], b * cos + a * sin, b)
    _put(new_a, half, in_half, head, start, k_line, v_line, kept, stride_head, HEADS, KV_HEADS, DTYPE)
    _put(new_b, HALF + half, in_half, head, start, k_line, v_line, kept, stride_head, HEADS, KV_HEADS, DTYPE)


def rope_write(qkv: Tensor, args: RopeArgs, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    positions, table, num_heads, num_kv_heads, q_norm, k_norm, eps, values = args
    assert qkv.stride(1) == 1 and table.stride(1) == 1, (qkv.stride(), table.stride())
    assert k_cache.stride(3) == 1 and k_cache.stride() == v_cache.stride(), (k_cache.stride(), v_cache.stride())
    rows, heads = qkv.shape[0], num_heads + 2 * num_kv_heads
    if not rows:
        return
    head_dim, half = qkv.shape[1] // args.projected_heads, table.shape[1] // 2
    block_half, rest = triton.next_power_of_2(half), head_dim - 2 * half
    block_h = min(triton.next_power_of_2(heads), max(TILE // (2 * block_half), 1))
    blocks, _, block_size, _ = k_cache.shape
    run(
        _rope_write, (rows, triton.cdiv(heads, block_h)),
        qkv, positions, table, q_norm, k_norm, k_cache, v_cache, slots,
        qkv.stride(0), table.stride(0), *k_cache.stride()[:3], table.shape[0], blocks * block_size, eps,
        HEADS=num_heads, KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, HALF=half,
        Q_NORM=q_norm is not None, K_NORM=k_norm is not None,
        V_NORM=values != "given", V_FROM_K=values == "keys", BLOCK_SIZE=block_size,
        BLOCK_H=block_h, BLOCK_HALF=block_half, BLOCK_REST=triton.next_power_of_2(rest) if rest else 0,
        num_warps=4,
    )  # fmt: skip


def rope_queries(q: Tensor, args: RopeArgs) -> None:
    """`rope_write` without keys and values: nothing is written to the cache that it is given."""
    nowhere = q.view(q.shape[0], 1, args.num_heads, -1)
    rope_write(q, args, nowhere, nowhere, args.positions)


@triton.jit
def _gated(
    gate_up, out, stride_row, inter,
    ACT: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inter
    gate = tl.load(gate_up + row * stride_row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride_row + inter + column, mask=inside, other=0.0).to(tl.float32)
    value = activate(gate, up, ACT, LIMIT)
    tl.store(out + row * inter + column, value.to(out.dtype.element_ty), mask=inside)


def gated(gate_up: Tensor, activation: Activation) -> Tensor:  # [rows, 2 * inter] -> [rows, inter]
    assert gate_up.stride(1) == 1, gate_up.stride()
    rows, inter = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, inter), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(triton.next_power_of_2(inter), TILE // 2)
        run(
            _gated, (rows, triton.cdiv(inter, block)), gate_up, out, gate_up.stride(0), inter,
            ACT=activation.kind, LIMIT=activation.limit, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _sigmoid_gate(
    x, gate, stride_x, stride_gate, width, PER_ROW: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    z = tl.load(gate + row * stride_gate + (column * 0 if PER_ROW else column), mask=inside, other=0.0).to(tl.float32)
    place = x + row * stride_x + column
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32) * (1.0 / (1.0 + tl.exp(-z)))
    tl.store(place, value.to(x.dtype.element_ty), mask=inside)


def sigmoid_gate(x: Tensor, gate: Tensor) -> None:  # [rows, width] twice, or one gate per row: [rows, 1]
    rows, width = x.shape
    assert x.stride(1) == gate.stride(1) == 1 and gate.shape in ((rows, width), (rows, 1)), (x.stride(), gate.shape)
    if rows:
        block = min(triton.next_power_of_2(width), TILE // 2)
        run(
            _sigmoid_gate, (rows, triton.cdiv(width, block)), x, gate, x.stride(0), gate.stride(0), width,
            PER_ROW=gate.shape[1] == 1 < width, BLOCK=block, num_warps=4,
        )  # fmt: skip


@triton.jit
def _add_normed(
    residual, y, weight, gain, scaled, squares, stride_residual, stride_y, eps, scale,
    DIM: tl.constexpr, PREPARE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row. PREPARE: for the norm that reads it next, as few_tokens.py does."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < DIM
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PREPARE:
        next_factor = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    enter(PDL)
    value = tl.load(y + row * stride_y + column, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(residual + row * stride_residual + column, mask=inside, other=0.0).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / DIM + eps) * factor
    after = ((before + normed) * scale).to(residual.dtype.element_ty)
    tl.store(residual + row * stride_residual + column, after, mask=inside)
    if PREPARE:
        wide = after.to(tl.float32)
        tl.store(scaled + row * DIM + column, (wide * next_factor).to(scaled.dtype.element_ty), mask=inside)
        tl.store(squares + row, tl.sum(wide * wide, 0))


def add_normed(residual: Tensor, y: Tensor, norm: Norm, then: Norm, scale: float = 1.0) -> Normed:
    """Few rows are prepared for 'then'."""
    rows, dim = residual.shape
    assert residual.stride(1) == y.stride(1) == 1 and y.shape == residual.shape, (residual.stride(), y.stride())
    for gain in (norm.gain, then.gain):
        assert gain.shape == (dim,) and gain.is_contiguous(), (gain.shape, gain.stride(), dim)
    if not rows:
        return Normed(residual, then)
    scaled = squares = None
    if rows <= few_tokens.MOST_TOKENS:
        scaled = torch.empty((rows, dim), dtype=residual.dtype, device=residual.device)
        squares = torch.empty((rows, 1), dtype=torch.float32, device=residual.device)
    block = triton.next_power_of_2(dim)
    run(
        _add_normed, (rows,), residual, y, norm.gain, then.gain, scaled, squares,
        residual.stride(0), y.stride(0), norm.eps, float(scale),
        DIM=dim, PREPARE=scaled is not None, BLOCK=block, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return Normed(residual, then, scaled, squares)


@triton.jit
def _tap(
    residual, aux_hidden, positions, stride_residual, stride_row, stride_place, dim,
    RING: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    target = aux_hidden + row * stride_row
    if RING > 0:
        target += tl.load(positions + row).to(tl.int64) % RING * stride_place
    column = tl.arange(0, BLOCK)
    value = tl.load(residual + row * stride_residual + column, mask=column < dim)
    tl.store(target + column, value, mask=column < dim)


def store_aux(residual: Tensor, aux: Tensor, index: int, positions: Tensor) -> None:
    rows, dim = residual.shape
    ring = aux.shape[1] if aux.dim() == 4 else 0
    assert residual.stride(1) == aux.stride(-1) == 1 and len(aux) >= rows, (residual.stride(), aux.shape)
    if rows:
        block = triton.next_power_of_2(dim)
        run(
            _tap, (rows,), residual, aux[..., index, :], positions,
            residual.stride(0), aux.stride(0), aux.stride(1) if ring else 0, dim,
            RING=ring, BLOCK=block, num_warps=min(max(block // 512, 1), 16),
        )  # fmt: skip
