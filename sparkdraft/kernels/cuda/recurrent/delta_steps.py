"""The gated delta rule (kernels/reference/recurrent.py) of short sequences; delta_chunks.py takes prompts.

A program has some columns of one head's state in registers: it reads them once, replays the records, runs the step's
rows, and writes the state at most once. Running a row and replaying a record both change the state by `_update`, whose
roundings are written out, so both leave the same bits. The compiler may not fuse products and sums, which it would do
differently in the copies of an unrolled loop.

No program waits for another, and none reads what another writes:

    state, updates        each program has its own columns
    keys, decays          are read at positions from base to the step's first row, and written from there on; the ring
                          has places for both (record_ring)
    base                  is read by all programs of a head, of which the last may write it (`_take_base`)
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkdraft.kernels.cuda.elementwise import run
from sparkdraft.kernels.cuda.recurrent.delta_chunks import log_decay, run_chunks
from sparkdraft.kernels.cuda.runtime import tuned
from sparkdraft.kernels.cuda.runtime.gpu import Gpu, gpu_of
from sparkdraft.kernels.cuda.runtime.pdl import enter
from sparkdraft.kernels.ops import FOLD, AttentionView, DeltaParams, RecurrentState, record_ring

KERNEL = "delta_rule"  # in the tables of tuned tiles
MOST_SLICES = 32
UNIT = tl.constexpr(1 << 26)  # positions stay below this; above it `base` counts the programs that have read it


class Tile(NamedTuple):
    block_v: int  # columns of a program
    warps: int


@triton.jit
def _take_base(place, first, SLICES: tl.constexpr, FOLD: tl.constexpr):
    """`base` before the step, and where the step leaves it.

    Each of a head's programs reads it by adding a unit above all positions. The last one takes the units away and
    writes the new base.
    """
    found = tl.atomic_add(place, UNIT, sem="relaxed")
    base = found % UNIT
    fold = tl.maximum(base, first // FOLD * FOLD)
    if found // UNIT == SLICES - 1:
        tl.atomic_xchg(place, fold, sem="relaxed")
    return base, fold


@triton.jit
def _update(state, decay, key, update):
    """decay * S + key update^T: one rounding of the product, one of the sum. The only way in which a state changes."""
    return tl.fma(key[:, None], update[None, :], state * decay)


@triton.jit
def _read_record(keys, updates, decays, position, good, RING: tl.constexpr, KEYS: tl.constexpr,
                 VALUES: tl.constexpr, HEADS: tl.constexpr):  # fmt: skip
    place = position % RING
    key = tl.load(keys + place * KEYS, mask=good, other=0.0)
    update = tl.load(updates + place * VALUES, mask=good, other=0.0)
    return key, update, tl.load(decays + place * HEADS, mask=good, other=0.0)


@triton.jit
def _read_row(queries, keys, values, decay_beta, row, good, stride_qkv, stride_ab, HEADS: tl.constexpr):
    """As they are stored: nothing waits for them before they are needed."""
    at = row.to(tl.int64) * stride_qkv
    ab = decay_beta + row.to(tl.int64) * stride_ab
    query = tl.load(queries + at, mask=good, other=0.0)
    key = tl.load(keys + at, mask=good, other=0.0)
    value = tl.load(values + at, mask=good, other=0.0)
    return query, key, value, tl.load(ab, mask=good, other=0.0), tl.load(ab + HEADS, mask=good, other=0.0)


@triton.jit(do_not_specialize=["slots", "query_start", "context_len", "decay_beta", "stride_ab"])
def _delta_rule(
    qkv, decay_beta, state, base, keys, updates, decays, slots, query_start, context_len, rate, bias, out,
    stride_qkv, stride_ab, eps, scale,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    RING: tl.constexpr, MOST_ROWS: tl.constexpr, FOLD: tl.constexpr,
    BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    SLICES: tl.constexpr = VALUE_DIM // BLOCK_V
    sequence = tl.program_id(1)
    head, part = tl.program_id(0) // SLICES, tl.program_id(0) % SLICES
    key_head = head // (HEADS // KEY_HEADS)
    begin = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - begin
    if count == 0:
        return
    first = tl.load(context_len + sequence) - count
    slot = tl.load(slots + sequence).to(tl.int64)
    k = tl.arange(0, KEY_DIM)
    v = part * BLOCK_V + tl.arange(0, BLOCK_V)
    out += head * VALUE_DIM + v
    if slot < 0:  # rows of nobody
        for i in range(count):
            nothing = tl.zeros([BLOCK_V], out.dtype.element_ty)
            tl.store(out + (begin + i).to(tl.int64) * (HEADS * VALUE_DIM), nothing)
        return
    long = count > MOST_ROWS

    # Replay
    began, fold = 0, 0
    place = base + slot * HEADS + head
    if first > 0:
        if long:  # `run_chunks` moves it
            began = tl.load(place)
            fold = first
        else:
            began, fold = _take_base(place, first, SLICES, FOLD)
    elif not long:
        tl.store(place, 0)  # whatever it was, and all write the same
    memory = state + (slot * HEADS + head) * (KEY_DIM * VALUE_DIM) + k[:, None] * VALUE_DIM + v[None, :]
    s = tl.load(memory, mask=first > 0, other=0.0)
    keys += slot * RING * (KEY_HEADS * KEY_DIM) + key_head * KEY_DIM + k
    updates += slot * RING * (HEADS * VALUE_DIM) + head * VALUE_DIM + v
    decays += slot * RING * HEADS + head
    key, update, decay = _read_record(
        keys, updates, decays, began, began < first, RING, KEY_HEADS * KEY_DIM, HEADS * VALUE_DIM, HEADS
    )
    for position in range(began, first):
        next_key, next_update, next_decay = _read_record(
            keys, updates, decays, position + 1, position + 1 < first,
            RING, KEY_HEADS * KEY_DIM, HEADS * VALUE_DIM, HEADS,
        )  # fmt: skip
        if (position == fold) & (fold > began):
            tl.store(memory, s)
        s = _update(s, decay, key, update)
        key, update, decay = next_key, next_update, next_decay
    if (fold == first) & ((fold > began) | (first == 0)):
        tl.store(memory, s)
    if long:
        return

    # Run
    queries = qkv + key_head * KEY_DIM + k
    values = qkv + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v
    decay_beta += head
    rate_of, bias_of = tl.load(rate + head), tl.load(bias + head)
    raw_q, raw_k, raw_v, a, b = _read_row(
        queries, queries + KEY_HEADS * KEY_DIM, values, decay_beta, begin, count > 0, stride_qkv, stride_ab, HEADS
    )
    for i in range(count):
        next_q, next_k, next_v, next_a, next_b = _read_row(
            queries, queries + KEY_HEADS * KEY_DIM, values, decay_beta, begin + i + 1, i + 1 < count,
            stride_qkv, stride_ab, HEADS,
        )  # fmt: skip
        wide_k, wide_q = raw_k.to(tl.float32), raw_q.to(tl.float32)
        key_norm = tl.rsqrt(tl.sum(wide_k * wide_k, 0) + eps)
        unit_k = wide_k * key_norm
        unit_q = wide_q * (tl.rsqrt(tl.sum(wide_q * wide_q, 0) + eps) * scale)
        own_decay = tl.exp(log_decay(a, rate_of, bias_of))
        beta = 1.0 / (1.0 + tl.exp(-b.to(tl.float32)))
        by_key = tl.sum(unit_k[:, None] * s, 0)
        by_query = tl.sum(unit_q[:, None] * s, 0)
        u = beta * tl.fma(-own_decay, by_key, raw_v.to(tl.float32))
        o = tl.fma(tl.sum(unit_q * unit_k, 0), u, own_decay * by_query)
        s = _update(s, own_decay, unit_k, u)
        tl.store(out + (begin + i).to(tl.int64) * (HEADS * VALUE_DIM), o.to(out.dtype.element_ty))
        at = (first + i) % RING
        tl.store(updates + at * (HEADS * VALUE_DIM), u)
        if part == 0:
            tl.store(decays + at * HEADS, own_decay)
            if head % (HEADS // KEY_HEADS) == 0:
                tl.store(keys + at * (KEY_HEADS * KEY_DIM), unit_k)
        raw_q, raw_k, raw_v, a, b = next_q, next_k, next_v, next_a, next_b


@lru_cache
def choose_tile(key_dim: int, value_dim: int, gpu: Gpu) -> Tile:
    found = tuned.find(gpu, tile_key(key_dim, value_dim))
    if found:
        return Tile(*found)
    return Tile(min(16, value_dim & -value_dim), 1)


def tile_key(key_dim: int, value_dim: int) -> tuned.Key:
    return tuned.Key(KERNEL, "32bit", (key_dim, value_dim))


def check_shape(params: DeltaParams) -> None:
    for name, dim in (("key_dim", params.key_dim), ("value_dim", params.value_dim)):
        assert dim >= 8 and dim & (dim - 1) == 0, f"{name} {dim} is no power of two from 8 on"


def delta_rule(
    qkv: Tensor,
    decay_beta: Tensor,
    memory: RecurrentState,
    slots: Tensor,
    view: AttentionView,
    params: DeltaParams,
) -> Tensor:
    """One launch for sequences of few rows, and two more where the host's bound on rows allows parts of prompts."""
    check_shape(params)
    assert qkv.stride(1) == decay_beta.stride(1) == 1, (qkv.stride(), decay_beta.stride())
    assert memory.ring >= record_ring(memory.most_rows), (memory.ring, memory.most_rows)
    kept = (memory.state, memory.base, memory.keys, memory.updates, memory.decays)
    assert all(each.is_contiguous() for each in kept), [each.stride() for each in kept]
    rows, seqs, heads = qkv.shape[0], slots.shape[0], params.num_value_heads
    out = torch.empty((rows, heads * params.value_dim), dtype=qkv.dtype, device=qkv.device)
    if not rows or not seqs:
        return out
    tile = choose_tile(params.key_dim, params.value_dim, gpu_of(qkv.device))
    slices = params.value_dim // tile.block_v
    assert slices <= MOST_SLICES, (params.value_dim, tile)
    run(
        _delta_rule, (heads * slices, seqs), qkv, decay_beta, *kept, slots, view.query_start, view.context_len,
        params.rate, params.bias, out, qkv.stride(0), decay_beta.stride(0), params.eps, params.key_dim**-0.5,
        KEY_HEADS=params.num_key_heads, HEADS=heads, KEY_DIM=params.key_dim, VALUE_DIM=params.value_dim,
        RING=memory.ring, MOST_ROWS=memory.most_rows, FOLD=FOLD, BLOCK_V=tile.block_v,
        num_warps=tile.warps, enable_fp_fusion=False,
    )  # fmt: skip
    if view.max_query > memory.most_rows:
        run_chunks(qkv, decay_beta, memory, slots, view, params, out)
    return out
