"""The operators around a recurrent layer's delta rule: state slots, the convolution, and the norm and gate after it.

A program of the convolution takes some channels of up to 16 rows of one sequence. Rows of the step are read from x,
earlier ones from the ring. Only a sequence's first tile reads the ring, and it alone writes it, after it has read.

Launches are shaped by the number of all rows alone, so a program finds its sequence on the device (`find_tile`).
Sequence s owns the programs from query_start[s] // TILE + EXTRA * s on. Its n rows make at most n // TILE + EXTRA tiles
(EXTRA 1 where tiles begin at its first row, 2 where they lie anywhere); surplus programs have no rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkdraft.kernels.cuda.elementwise import TILE as ELEMENTS
from sparkdraft.kernels.cuda.elementwise import run
from sparkdraft.kernels.cuda.runtime.pdl import enter
from sparkdraft.kernels.ops import AttentionView, RecurrentState


@triton.jit
def find_tile(number, query_start, seqs, TILE: tl.constexpr, EXTRA: tl.constexpr, BLOCK_S: tl.constexpr):
    """The sequence of program 'number', and which of its tiles it is."""
    s = tl.arange(0, BLOCK_S)
    start = tl.load(query_start + s, mask=s < seqs, other=0)
    offset = start // TILE + EXTRA * s
    sequence = tl.sum(((offset <= number) & (s < seqs)).to(tl.int32), 0) - 1
    return sequence, number - (tl.load(query_start + sequence) // TILE + EXTRA * sequence)


def count_tiles(rows: int, seqs: int, tile: int, extra: int) -> int:
    return rows // tile + extra * seqs


MOST_ROWS = 16  # of a tile; more than a convolution is wide
BLOCK_C = 256  # channels of a tile


@triton.jit(do_not_specialize=["slot_of", "query_start", "context_len", "tables", "out", "seqs"])
def _find_states(
    slot_of, query_start, context_len, tables, out, seqs, stride_table,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    s = tl.arange(0, BLOCK)
    inside = s < seqs
    rows = tl.load(query_start + s + 1, mask=inside, other=0) - tl.load(query_start + s, mask=inside, other=0)
    first = tl.load(context_len + s, mask=inside, other=0) - rows
    alive = inside & (rows > 0) & (first >= 0)
    block = tl.load(tables + s.to(tl.int64) * stride_table + first // BLOCK_SIZE, mask=alive, other=-1)
    slot = tl.load(slot_of + block, mask=block >= 0, other=-1)
    tl.store(out + s, slot, mask=inside)


def find_states(slot_of: Tensor, view: AttentionView, block_size: int, out: Tensor) -> None:
    seqs, tables = out.shape[0], view.block_tables
    assert tables.stride(1) == 1 and tables.shape[0] == seqs, (tables.shape, tables.stride(), seqs)
    if seqs:
        run(
            _find_states, (1,), slot_of, view.query_start, view.context_len, tables, out, seqs, tables.stride(0),
            BLOCK_SIZE=block_size, BLOCK=triton.next_power_of_2(seqs), num_warps=1,
        )  # fmt: skip


@triton.jit(do_not_specialize=["slots", "query_start", "context_len", "seqs"])
def _causal_conv(
    x, weight, inputs, slots, query_start, context_len, out, seqs, stride_x,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    sequence, tile = find_tile(tl.program_id(0), query_start, seqs, ROWS, 1, BLOCK_S)
    begin = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - begin
    if tile * ROWS >= count:
        return
    slot = tl.load(slots + sequence).to(tl.int64)
    first = tl.load(context_len + sequence) - count
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = (channel < CHANNELS)[None, :]
    row = tile * ROWS + tl.arange(0, ROWS)
    real = row < count
    ring = inputs + slot * RING * CHANNELS + channel[None, :]
    source = x + channel[None, :]
    total = tl.zeros([ROWS, BLOCK_C], tl.float32)
    at = row
    for back in tl.static_range(WIDTH):  # the row itself first
        of_step = real & (at >= 0) & (slot >= 0)
        value = tl.load(
            source + (begin + at).to(tl.int64)[:, None] * stride_x, of_step[:, None] & is_channel, other=0.0
        )
        value = value.to(tl.float32)
        if tile == 0:
            position = first + at
            before = real & (at < 0) & (position >= 0) & (slot >= 0)
            kept = tl.load(ring + (position % RING)[:, None] * CHANNELS, before[:, None] & is_channel, other=0.0)
            value = tl.where(before[:, None], kept.to(tl.float32), value)
        factor = tl.load(weight + channel * WIDTH + (WIDTH - 1 - back), mask=channel < CHANNELS, other=0.0)
        total = tl.fma(factor[None, :], value, total)
        at = at - 1
    result = total / (1.0 + tl.exp(-total))
    target = out + (begin + row).to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=real[:, None] & is_channel)
    if (tile == 0) & (slot >= 0):
        tl.debug_barrier()  # the ring has been read
        for start in range(tl.maximum(count - RING, 0), count, ROWS):
            kept_row = start + tl.arange(0, ROWS)
            mask = (kept_row < count)[:, None] & is_channel
            given = tl.load(source + (begin + kept_row).to(tl.int64)[:, None] * stride_x, mask=mask)
            tl.store(ring + ((first + kept_row) % RING)[:, None] * CHANNELS, given, mask=mask)


def causal_conv(x: Tensor, weight: Tensor, memory: RecurrentState, slots: Tensor, view: AttentionView) -> Tensor:
    (rows, channels), seqs, inputs = x.shape, slots.shape[0], memory.inputs
    assert x.stride(1) == 1 and weight.is_contiguous() and inputs.is_contiguous(), (x.stride(), weight.stride())
    assert weight.shape[1] <= MOST_ROWS and inputs.dtype == x.dtype, (weight.shape, inputs.dtype, x.dtype)
    out = torch.empty((rows, channels), dtype=x.dtype, device=x.device)
    tile = min(triton.next_power_of_2(view.max_query), MOST_ROWS)
    if rows and seqs:
        run(
            _causal_conv, (count_tiles(rows, seqs, tile, 1), triton.cdiv(channels, BLOCK_C)),
            x, weight, inputs, slots, view.query_start, view.context_len, out, seqs, x.stride(0),
            CHANNELS=channels, WIDTH=weight.shape[1], RING=inputs.shape[1],
            ROWS=tile, BLOCK_C=BLOCK_C, BLOCK_S=triton.next_power_of_2(seqs), num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _gated_norm(
    o, gate, gain, out, stride_o, stride_gate, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_D)
    place = head[:, None] * DIM + column[None, :]
    mask = (head < HEADS)[:, None] & (column < DIM)[None, :]
    factor = tl.load(gain + column, mask=column < DIM, other=0.0).to(tl.float32)
    enter(PDL)
    value = tl.load(o + row * stride_o + place, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(gate + row * stride_gate + place, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / DIM + eps)
    result = value * scale[:, None] * factor[None, :] * (z / (1.0 + tl.exp(-z)))
    tl.store(out + row * HEADS * DIM + place, result.to(out.dtype.element_ty), mask=mask)


def gated_norm(o: Tensor, gate: Tensor, gain: Tensor, eps: float) -> Tensor:  # [rows, heads * dim], gate alike
    assert o.stride(1) == gate.stride(1) == 1 and o.shape == gate.shape, (o.shape, o.stride(), gate.stride())
    (rows, width), dim = o.shape, gain.shape[0]
    out = torch.empty((rows, width), dtype=o.dtype, device=o.device)
    heads, block_d = width // dim, triton.next_power_of_2(dim)
    block_h = min(triton.next_power_of_2(heads), max(ELEMENTS // block_d, 1))
    if rows:
        run(
            _gated_norm, (rows, triton.cdiv(heads, block_h)), o, gate, gain, out, o.stride(0), gate.stride(0), eps,
            HEADS=heads, DIM=dim, BLOCK_H=block_h, BLOCK_D=block_d, num_warps=4,
        )  # fmt: skip
    return out
