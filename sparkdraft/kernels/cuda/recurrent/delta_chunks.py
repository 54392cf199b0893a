"""The gated delta rule over parts of prompts: 64 rows at a time, as matmuls.

Chunks lie at multiples of 64, so a chunk does not depend on where a step begins; the first and the last of a step may
have fewer rows. Within a chunk, with G the sum of log decays up to and including a row, and D_ij = exp(G_i - G_j) for j
<= i:

    T = (I + L)^-1,    L = tril(beta_i (k_i . k_j) D_ij, -1)           `_inside`, a program per chunk and head:
    A = tril((q_i . k_j) D_ij)                                         nothing here knows the state

    U = T diag(beta) (V - e^G K S)                                     `_through`, a program per head and some columns,
    O = e^G Q S + A U                                                  chunk after chunk
    S = e^G_last S + (e^(G_last - G) K)^T U

Norms of keys and queries multiply rows and columns of products, and K and Q enter these as they are stored. In bfloat16
their products are exact then, and a product with the state takes two passes, one for each half of the state's numbers
(`_times`); everything else takes three passes of tf32. On an H200, states are off by 1e-6 of the largest number in
float32, and by 1e-5 in bfloat16.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkdraft.kernels.cuda.elementwise import run
from sparkdraft.kernels.cuda.recurrent.layer import count_tiles, find_tile
from sparkdraft.kernels.cuda.runtime import tuned
from sparkdraft.kernels.cuda.runtime.gpu import Gpu, gpu_of
from sparkdraft.kernels.cuda.runtime.pdl import enter
from sparkdraft.kernels.ops import AttentionView, DeltaParams, RecurrentState

INSIDE, THROUGH = "delta_inside", "delta_through"  # in the tables of tuned tiles
CHUNK = 64
SOLVED = tl.constexpr(16)  # rows of a block that is inverted row by row
FACTORS = tl.constexpr(4)  # vectors per chunk and head, see `_inside`
HALVES = {torch.bfloat16: tl.bfloat16}  # types of rows whose products with a state are made of the state's halves


class Inside(NamedTuple):
    warps: int


class Through(NamedTuple):
    block_v: int  # columns of a program
    warps: int
    stages: int


@triton.jit
def log_decay(a, rate, bias):
    """rate * softplus(a + bias); the quotient makes up for what 1 + e^x rounds away."""
    x = a.to(tl.float32) + bias
    e = tl.exp(tl.minimum(x, 20.0))
    whole = 1.0 + e
    small = tl.where(whole == 1.0, e, tl.log(whole) * (e / tl.maximum(whole - 1.0, 1e-30)))
    return rate * tl.where(x > 20.0, x, small)


@triton.jit
def _products(left, right, real, KEY_DIM: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Rows by rows as they are stored, float32 [CHUNK, CHUNK], and the squares of the left ones."""
    WIDTH: tl.constexpr = KEY_DIM if KEY_DIM < 64 else 64  # at a time, for want of registers
    k = tl.arange(0, WIDTH)[None, :]
    squares = tl.zeros([CHUNK], tl.float32)
    acc = tl.zeros([CHUNK, CHUNK], tl.float32)
    for first in range(0, KEY_DIM, WIDTH):
        a = tl.load(left[:, None] + first + k, mask=real[:, None], other=0.0)
        b = tl.load(right[:, None] + first + k, mask=real[:, None], other=0.0)
        squares += tl.sum(a.to(tl.float32) * a.to(tl.float32), 1)
        if a.dtype == tl.float32:
            acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
        else:
            acc = tl.dot(a, tl.trans(b), acc)
    return acc, squares


@triton.jit
def _split(numbers, HALF: tl.constexpr):
    """Two numbers of 16 bits each, whose sum is the given one but for 2^-17 of it."""
    upper = numbers.to(HALF)
    return upper, (numbers - upper.to(tl.float32)).to(HALF)


@triton.jit
def _times(rows, numbers, acc, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """acc + rows . numbers; rows as they are stored, numbers in float32. HALF: the rows' type, or None."""
    if HALF is not None:
        upper, lower = _split(numbers, HALF)
        return tl.dot(rows, upper, tl.dot(rows, lower, acc))
    else:
        return tl.dot(rows.to(tl.float32), numbers, acc, input_precision=PRECISION)


@triton.jit
def _matrix_times(place, numbers, acc, CHUNK: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a matrix that `_inside` left, times numbers in float32."""
    i = tl.arange(0, CHUNK)
    tile = i[:, None] * CHUNK + i[None, :]
    if HALF is not None:
        upper, lower = _split(numbers, HALF)
        left = tl.load(place + tile)
        acc = tl.dot(tl.load(place + CHUNK * CHUNK + tile), upper, acc)
        return tl.dot(left, upper, tl.dot(left, lower, acc))
    else:
        return tl.dot(tl.load(place + tile), numbers, acc, input_precision=PRECISION)


@triton.jit
def _leave(place, numbers, CHUNK: tl.constexpr, HALF: tl.constexpr):
    i = tl.arange(0, CHUNK)
    tile = i[:, None] * CHUNK + i[None, :]
    if HALF is not None:
        upper, lower = _split(numbers, HALF)
        tl.store(place + tile, upper)
        tl.store(place + CHUNK * CHUNK + tile, lower)
    else:
        tl.store(place + tile, numbers)


@triton.jit
def _join(place, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """Joins pairs of inverted blocks of SIZE rows: the lower left of a pair becomes -(lower right)^-1 . (lower left) .
    (upper left)^-1."""
    if SIZE < CHUNK:
        r = tl.arange(0, SIZE)
        for pair in tl.static_range(CHUNK // (2 * SIZE)):
            upper_left = place + pair * (2 * SIZE * (CHUNK + 1)) + r[:, None] * CHUNK + r[None, :]
            lower_left = upper_left + SIZE * CHUNK
            product = tl.dot(tl.load(lower_left + SIZE), tl.load(lower_left), input_precision="ieee")
            product = tl.dot(product, tl.load(upper_left), input_precision="ieee")
            tl.debug_barrier()
            tl.store(lower_left, -product)
        tl.debug_barrier()
        _join(place, 2 * SIZE, CHUNK)


@triton.jit
def _invert(lower, place, CHUNK: tl.constexpr):
    """(I + lower)^-1 of a matrix that is 0 on and above its diagonal: its diagonal blocks row by row, then pairs of
    them. place: float32 [CHUNK, CHUNK] to work in."""
    i, r = tl.arange(0, CHUNK), tl.arange(0, SOLVED)
    whole_tile = place + i[:, None] * CHUNK + i[None, :]
    diagonal = place + tl.arange(0, CHUNK // SOLVED)[:, None, None] * (SOLVED * (CHUNK + 1))
    diagonal += r[None, :, None] * CHUNK + r[None, None, :]
    tl.store(whole_tile, lower)
    tl.debug_barrier()
    blocks = tl.load(diagonal)
    inverse = tl.where((r[:, None] == r[None, :])[None, :, :], 1.0, tl.zeros_like(blocks))
    for row in range(1, SOLVED):
        is_row = (r == row)[None, :, None]
        line = tl.sum(tl.where(is_row, blocks, 0.0), 1)
        inverse -= tl.where(is_row, tl.sum(line[:, :, None] * inverse, 1)[:, None, :], 0.0)
    tl.debug_barrier()
    tl.store(diagonal, inverse)
    tl.debug_barrier()
    _join(place, SOLVED, CHUNK)
    whole = tl.load(whole_tile)
    tl.debug_barrier()  # the place may be used for other things
    return whole


@triton.jit(do_not_specialize=["slots", "query_start", "context_len", "decay_beta", "seqs", "stride_ab"])
def _inside(
    qkv, decay_beta, slots, query_start, context_len, rate, bias, work, solved, scores, factors,
    seqs, stride_qkv, stride_ab, eps, scale,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, MOST_ROWS: tl.constexpr,
    CHUNK: tl.constexpr, HALF: tl.constexpr, BLOCK_S: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """solved: T diag(beta); work: the same memory as float32. scores: A.

    factors: of K S, of Q S, of U in K^T U, and of S, the same in all its places.
    """
    enter(PDL)
    head, number = tl.program_id(0), tl.program_id(1)
    sequence, chunk = find_tile(number, query_start, seqs, CHUNK, 2, BLOCK_S)
    begin = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - begin
    first = tl.load(context_len + sequence) - count
    place = (first // CHUNK + chunk) * CHUNK - first  # of the chunk's first row in the step
    if (count <= MOST_ROWS) | (tl.load(slots + sequence) < 0) | (place >= count):
        return
    i = tl.arange(0, CHUNK)
    row = place + i
    real = (row >= 0) & (row < count)
    at = (begin + row).to(tl.int64)
    keys = qkv + at * stride_qkv + (KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY_DIM
    products, squares = _products(keys, keys, real, KEY_DIM, CHUNK, PRECISION)
    key_norm = tl.rsqrt(squares + eps)
    a = tl.load(decay_beta + at * stride_ab + head, mask=real, other=0.0)
    b = tl.load(decay_beta + at * stride_ab + HEADS + head, mask=real, other=0.0).to(tl.float32)
    log_decays = tl.where(real, log_decay(a, tl.load(rate + head), tl.load(bias + head)), 0.0)
    beta = tl.where(real, 1.0 / (1.0 + tl.exp(-b)), 0.0)
    sums = tl.cumsum(log_decays, 0)
    last = tl.sum(log_decays, 0)
    which = number.to(tl.int64) * HEADS + head
    PARTS: tl.constexpr = 1 if HALF is None else 2
    vector = factors + which * (FACTORS * CHUNK) + i
    tl.store(vector, tl.exp(sums) * key_norm)
    tl.store(vector + 2 * CHUNK, tl.exp(tl.minimum(last - sums, 0.0)) * key_norm)
    tl.store(vector + 3 * CHUNK, tl.exp(last + tl.zeros([CHUNK], tl.float32)))
    before = i[:, None] > i[None, :]
    fade = tl.where(before, tl.exp(tl.where(before, sums[:, None] - sums[None, :], 0.0)), 0.0)
    lower = products * fade * key_norm[None, :] * (beta * key_norm)[:, None]
    inverse = _invert(lower, work + which * (CHUNK * CHUNK), CHUNK)
    _leave(solved + which * (PARTS * CHUNK * CHUNK), inverse * beta[None, :], CHUNK, HALF)

    products, squares = _products(keys - KEY_HEADS * KEY_DIM, keys, real, KEY_DIM, CHUNK, PRECISION)
    query_norm = tl.rsqrt(squares + eps) * scale
    tl.store(vector + CHUNK, tl.exp(sums) * query_norm)
    until = i[:, None] >= i[None, :]
    fade = tl.where(until, tl.exp(tl.where(until, sums[:, None] - sums[None, :], 0.0)), 0.0)
    score = products * fade * key_norm[None, :] * query_norm[:, None]
    _leave(scores + which * (PARTS * CHUNK * CHUNK), score, CHUNK, HALF)


@triton.jit(do_not_specialize=["slots", "query_start", "context_len"])
def _through(
    qkv, state, base, slots, query_start, context_len, solved, scores, factors, out, stride_qkv,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    MOST_ROWS: tl.constexpr, CHUNK: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    SLICES: tl.constexpr = VALUE_DIM // BLOCK_V
    sequence = tl.program_id(1)
    head, part = tl.program_id(0) // SLICES, tl.program_id(0) % SLICES
    begin = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - begin
    slot = tl.load(slots + sequence).to(tl.int64)
    if (count <= MOST_ROWS) | (slot < 0):
        return
    first = tl.load(context_len + sequence) - count
    i = tl.arange(0, CHUNK)
    k = tl.arange(0, KEY_DIM)
    v = part * BLOCK_V + tl.arange(0, BLOCK_V)
    memory = state + (slot * HEADS + head) * (KEY_DIM * VALUE_DIM) + k[:, None] * VALUE_DIM + v[None, :]
    s = tl.load(memory, mask=first > 0, other=0.0)
    queries = qkv + (head // (HEADS // KEY_HEADS)) * KEY_DIM + k[None, :]
    values = qkv + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v[None, :]
    number = (begin // CHUNK + 2 * sequence).to(tl.int64)  # as in `find_tile`
    PARTS: tl.constexpr = 1 if HALF is None else 2
    skipped = first % CHUNK  # positions of the first chunk before the step
    zero = tl.zeros([CHUNK, BLOCK_V], tl.float32)
    for chunk in tl.range(0, tl.cdiv(skipped + count, CHUNK), num_stages=STAGES):
        row = chunk * CHUNK - skipped + i
        real = ((row >= 0) & (row < count))[:, None]
        at = (begin + row).to(tl.int64)[:, None]
        which = (number + chunk) * HEADS + head
        vector = factors + which * (FACTORS * CHUNK)
        key = tl.load(queries + KEY_HEADS * KEY_DIM + at * stride_qkv, mask=real, other=0.0)
        value = tl.load(values + at * stride_qkv, mask=real, other=0.0)
        rest = value.to(tl.float32) - tl.load(vector + i)[:, None] * _times(key, s, zero, HALF, PRECISION)
        update = _matrix_times(solved + which * (PARTS * CHUNK * CHUNK), rest, zero, CHUNK, HALF, PRECISION)
        query = tl.load(queries + at * stride_qkv, mask=real, other=0.0)
        o = tl.load(vector + CHUNK + i)[:, None] * _times(query, s, zero, HALF, PRECISION)
        o = _matrix_times(scores + which * (PARTS * CHUNK * CHUNK), update, o, CHUNK, HALF, PRECISION)
        faded = tl.load(vector + 2 * CHUNK + i)[:, None] * update
        s = _times(tl.trans(key), faded, s * tl.load(vector + 3 * CHUNK), HALF, PRECISION)
        tl.store(out + at * (HEADS * VALUE_DIM) + head * VALUE_DIM + v[None, :], o.to(out.dtype.element_ty), mask=real)
    tl.store(memory, s)
    if part == 0:
        tl.store(base + slot * HEADS + head, first + count)


@lru_cache
def choose_tiles(heads: int, key_dim: int, value_dim: int, itemsize: int, gpu: Gpu) -> tuple[Inside, Through]:
    inside, through = (tuned.find(gpu, key) for key in tile_keys(heads, key_dim, value_dim, itemsize))
    # Eight warps over 16 columns in float32 address shared memory that is not theirs on an H200, with Triton 3.6.
    guess = [min(32, value_dim), 4, 2] if gpu.roomy and itemsize == 2 else [min(16, value_dim), 4, 1]
    return Inside(*(inside or [4])), Through(*(through or guess))


def tile_keys(heads: int, key_dim: int, value_dim: int, itemsize: int) -> list[tuned.Key]:
    form, shape = f"{8 * itemsize}bit", (heads, key_dim, value_dim)
    return [tuned.Key(kernel, form, shape) for kernel in (INSIDE, THROUGH)]


def run_chunks(
    qkv: Tensor,
    decay_beta: Tensor,
    memory: RecurrentState,  # its state is that before the step's first row, unless that is at position 0
    slots: Tensor,
    view: AttentionView,
    params: DeltaParams,
    out: Tensor,  # [rows, value_heads * value_dim], written where a sequence has more than memory.most_rows rows
) -> None:
    rows, seqs, heads = qkv.shape[0], slots.shape[0], params.num_value_heads
    assert params.key_dim >= 16 and params.value_dim >= 16, "tensor cores take no less"
    chunks, device = count_tiles(rows, seqs, CHUNK, 2), qkv.device
    work, scores = (torch.empty((chunks, heads, CHUNK, CHUNK), dtype=torch.float32, device=device) for _ in range(2))
    factors = torch.empty((chunks, heads, FACTORS.value, CHUNK), dtype=torch.float32, device=device)
    solved, half = work, HALVES.get(qkv.dtype)
    if half is not None:
        solved, scores = solved.view(qkv.dtype), scores.view(qkv.dtype)
    inside, through = choose_tiles(heads, params.key_dim, params.value_dim, qkv.element_size(), gpu_of(device))
    shape = {
        "KEY_HEADS": params.num_key_heads, "HEADS": heads, "KEY_DIM": params.key_dim,
        "MOST_ROWS": memory.most_rows, "CHUNK": CHUNK, "HALF": half, "PRECISION": "tf32x3",
    }  # fmt: skip
    batch = slots, view.query_start, view.context_len
    run(
        _inside, (heads, chunks), qkv, decay_beta, *batch, params.rate, params.bias, work, solved, scores, factors,
        seqs, qkv.stride(0), decay_beta.stride(0), params.eps, params.key_dim**-0.5,
        BLOCK_S=triton.next_power_of_2(seqs), num_warps=inside.warps, **shape,
    )  # fmt: skip
    run(
        _through, (heads * params.value_dim // through.block_v, seqs),
        qkv, memory.state, memory.base, *batch, solved, scores, factors, out, qkv.stride(0),
        VALUE_DIM=params.value_dim, BLOCK_V=through.block_v, STAGES=through.stages,
        num_warps=through.warps, **shape,
    )  # fmt: skip
