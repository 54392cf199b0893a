"""Which experts the tokens of a batch go to, and the work cut into blocks of tokens that share an expert.

A *pair* is a row and one of its experts; pair p is row p // top_k and its choice p % top_k. How many rows an expert has
is known on the device alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkdraft.kernels.cuda.elementwise import run
from sparkdraft.kernels.cuda.linear import few_tokens
from sparkdraft.kernels.cuda.linear.few_tokens import load_squares, norm_scale
from sparkdraft.kernels.cuda.linear.matmul import norm_logits
from sparkdraft.kernels.cuda.linear.sweep import sweep
from sparkdraft.kernels.cuda.runtime.ending import counters, is_last, sum_columns
from sparkdraft.kernels.cuda.runtime.pdl import enter
from sparkdraft.kernels.ops import Normed, Routing
from sparkdraft.weights.linear import Linear, WeightTiles

MOST_EXPERTS, MOST_CHOICES = 512, 16
ROUTE_FEW = True  # whether the router of few rows chooses itself; tests and tools compare with a kernel of its own
CHUNK = 4096  # pairs that a program looks at in one go, at most
_NAN = tl.constexpr(2**31 - 1)  # the key of NaN, which is the largest, as in torch's sort; it is NaN's bits too
_TAKEN = tl.constexpr(-(2**31))  # below every key
FIELDS = tl.constexpr(3)  # of a block: its expert, and its first and last place in `Blocks.order`; the last is not in


@triton.jit
def _flip(bits):
    """From the bits of a float32 to an int32 in the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _choose(
    value, scale, live, ids, weights, row, real,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, RENORMALISE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Stores the choices of rows 'row', as far as they are 'real', from their logits [ROWS, BLOCK_E].

    Whatever the logits hold, a row's experts are TOP_K different ones; padding has none, and -1 in their place.
    """
    expert = tl.arange(0, BLOCK_E)[None, :]
    value = tl.where(expert < EXPERTS, value, float("-inf"))
    key = _flip((value + 0.0).to(tl.int32, bitcast=True))  # -0 + 0 = 0, which it equals
    key = tl.where(value == value, key, _NAN)
    key = tl.where(expert < EXPERTS, key, _TAKEN)
    choice = tl.arange(0, BLOCK_C)[None, :]
    chosen = tl.zeros([ROWS, BLOCK_C], tl.int32)
    best = tl.zeros([ROWS, BLOCK_C], tl.int32)
    for number in tl.static_range(TOP_K):
        top = tl.max(key, 1)[:, None]
        first = tl.min(tl.where(key == top, expert, BLOCK_E), 1)[:, None]
        chosen = tl.where(choice == number, first, chosen)
        best = tl.where(choice == number, top, best)
        key = tl.where(expert == first, _TAKEN, key)
    picked = tl.where(choice < TOP_K, _flip(best).to(tl.float32, bitcast=True), float("-inf"))
    peak = tl.max(picked, 1)[:, None]
    share = tl.exp(picked - peak)
    total = sum_columns(share, ROWS, BLOCK_C) if RENORMALISE else sum_columns(tl.exp(value - peak), ROWS, BLOCK_E)
    share /= total[:, None]
    mask = real[:, None] & (choice < TOP_K)
    if scale is not None:
        share *= tl.load(scale + chosen, mask=mask, other=0.0)
    if live is not None:
        alive = (row < tl.load(live))[:, None]
        chosen, share = tl.where(alive, chosen, -1), tl.where(alive, share, 0.0)
    target = row.to(tl.int64)[:, None] * TOP_K + choice
    tl.store(ids + target, chosen, mask=mask)
    tl.store(weights + target, share, mask=mask)


@triton.jit(do_not_specialize=["live"])
def _route(
    logits, scale, live, ids, weights, stride_logits,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, RENORMALISE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row."""
    enter(PDL)
    row = tl.program_id(0) + tl.arange(0, 1)
    expert = tl.arange(0, BLOCK_E)[None, :]
    place = logits + row.to(tl.int64)[:, None] * stride_logits + expert
    value = tl.load(place, mask=expert < EXPERTS, other=0.0)
    _choose(value, scale, live, ids, weights, row, row >= 0, EXPERTS, TOP_K, RENORMALISE, 1, BLOCK_E, BLOCK_C)


@triton.jit(do_not_specialize=["rows", "live"])
def _route_few(
    x, squares, weight, scale, offset, row_scale, bias, factors, live, ids, weights, sums, counter, rows, stride_x, eps,
    LEVELS: tl.constexpr, PLANE: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr,
    PACKED: tl.constexpr, EXPERTS: tl.constexpr, IN: tl.constexpr, PARTS: tl.constexpr, BLOCK_P: tl.constexpr,
    TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, SLICES: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The router's matmul as few_tokens.py cuts it; the last program adds up all parts, in order, and chooses."""
    enter(PDL)
    strip, part = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT
    line = strip * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS)
    parts = load_squares(squares, row, row < rows, PARTS, BLOCK_P)
    acc = sweep(
        x + row.to(tl.int64) * stride_x, row < rows, weight, scale, offset, row_scale,
        tl.minimum(line, EXPERTS - 1).to(tl.int64), None, part,
        LEVELS, PLANE, GROUP, SCALE, OFFSET, PACKED, IN, PRECISION, BLOCK_K, SPLIT, SLICES,
    )  # fmt: skip
    place = sums + (part * ROWS + row)[None, :] * EXPERTS + line[:, None]
    tl.store(place, acc, mask=(row < rows)[None, :] & (line < EXPERTS)[:, None])
    if not is_last(counter, tl.num_programs(0)):
        return
    expert = tl.arange(0, BLOCK_E)[None, :]
    place = sums + row[:, None] * EXPERTS + expert
    mask = (row < rows)[:, None] & (expert < EXPERTS)
    logits = tl.zeros([ROWS, BLOCK_E], tl.float32)
    for each in tl.static_range(SPLIT):
        logits += tl.load(place + each * (ROWS * EXPERTS), mask=mask, other=0.0, cache_modifier=".cg")
    added = 0.0 if bias is None else tl.load(bias + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)
    logits = tl.fma(logits, norm_scale(parts, eps, IN, ROWS, BLOCK_P)[:, None], added)
    _choose(logits, factors, live, ids, weights, row, row < rows, EXPERTS, TOP_K, RENORMALISE, ROWS, BLOCK_E, BLOCK_C)


def norm_route(
    normed: Normed,
    router: Linear,
    top_k: int,
    renormalise: bool,
    scale: Tensor | None = None,
    live: Tensor | None = None,
) -> Routing:
    """One launch for few rows; else the router's logits, and then the choice."""
    rows, device = normed.x.shape[0], normed.x.device
    assert scale is None or scale.dtype == torch.float32, scale.dtype
    ids = torch.empty((rows, top_k), dtype=torch.int32, device=device)
    made = Routing(ids, torch.empty((rows, top_k), dtype=torch.float32, device=device))
    if ROUTE_FEW and router.tiles and 0 < rows <= few_tokens.MOST_TOKENS:
        sizes = _constants(router.tiles.shape[0], top_k, renormalise)
        _run_route_few(normed, router.tiles, scale, live, made, sizes)
    elif rows:
        logits = norm_logits(normed, router)
        assert logits.stride(1) == 1, logits.stride()
        sizes = _constants(logits.shape[1], top_k, renormalise)
        run(_route, (rows,), logits, scale, live, *made, logits.stride(0), **sizes, num_warps=1)
    return made


def _constants(experts: int, top_k: int, renormalise: bool) -> dict[str, object]:
    assert 0 < top_k <= min(experts, MOST_CHOICES) and experts <= MOST_EXPERTS, (experts, top_k)
    return {
        "EXPERTS": experts, "TOP_K": top_k, "RENORMALISE": renormalise,
        "BLOCK_E": triton.next_power_of_2(experts), "BLOCK_C": triton.next_power_of_2(top_k),
    }  # fmt: skip


def _run_route_few(
    normed: Normed, router: WeightTiles, scale: Tensor | None, live: Tensor | None, made: Routing,
    sizes: dict[str, object],
) -> None:  # fmt: skip
    x, squares = few_tokens.prepare(normed)
    launch, options = few_tokens.start(x, router)
    split, device = launch.tile.split, x.device
    sums = torch.empty((split, few_tokens.MOST_TOKENS, router.shape[0]), dtype=torch.float32, device=device)
    few_tokens.run_kernel(
        _route_few, (launch.programs * split,), x, squares, router.codes, router.scale, router.offset,
        router.row_scale, router.bias, scale, live, *made, sums, counters(device), x.shape[0], x.stride(0),
        normed.norm.eps, **sizes, **few_tokens.parts_of(squares), SPLIT=split, **options,
    )  # fmt: skip


class Blocks(NamedTuple):
    """Pairs in order of their experts, cut into blocks of up to 'size' pairs of one expert."""

    order: Tensor  # int32 [pairs]: numbers of pairs, those of an expert side by side and in order
    table: Tensor  # int32 [most, 3]: expert, first and last place in the order; the expert is -1 where no block is
    size: int

    @property
    def most(self) -> int:  # as many as there can be, whatever the routing
        return self.table.shape[0]


@triton.jit(do_not_specialize=["pairs", "most"])
def _cut(
    ids, order, table, pairs, most,
    SIZE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One expert: every program counts all pairs and writes the places and blocks of its own."""
    enter(PDL)
    mine = tl.program_id(0)
    expert = tl.arange(0, BLOCK_E)
    lane = tl.arange(0, BLOCK_P)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, pairs, BLOCK_P):
        found = tl.load(ids + start + lane, mask=start + lane < pairs, other=-1)
        counts += tl.histogram(tl.maximum(found, 0), BLOCK_E, mask=found >= 0)
    blocks = (counts + SIZE - 1) // SIZE
    before = expert < mine
    first, count = tl.sum(tl.where(before, counts, 0), 0), tl.sum(tl.where(expert == mine, counts, 0), 0)
    block, own = tl.sum(tl.where(before, blocks, 0), 0), tl.sum(tl.where(expert == mine, blocks, 0), 0)

    entry = tl.arange(0, BLOCK_T)
    for start in range(0, own, BLOCK_T):
        place = (start + entry) * SIZE
        target = table + (block + start + entry) * FIELDS
        mask = start + entry < own
        tl.store(target, tl.zeros([BLOCK_T], tl.int32) + mine, mask=mask)
        tl.store(target + 1, first + place, mask=mask)
        tl.store(target + 2, first + tl.minimum(place + SIZE, count), mask=mask)
    if mine == tl.num_programs(0) - 1:
        for start in range(block + own, most, BLOCK_T):
            tl.store(table + (start + entry) * FIELDS, tl.full([BLOCK_T], -1, tl.int32), mask=start + entry < most)

    for start in range(0, pairs, BLOCK_P):
        inside = start + lane < pairs
        match = (tl.load(ids + start + lane, mask=inside, other=-1) == mine).to(tl.int32)
        tl.store(order + first + tl.cumsum(match, 0) - 1, start + lane, mask=match != 0)
        first += tl.sum(match, 0)


def cut(routing: Routing, experts: int, size: int) -> Blocks:
    rows, top_k = routing.ids.shape
    pairs = rows * top_k
    used = min(pairs, experts)  # experts with a pair at most; their last blocks need not be full
    most = used if rows <= size else used + (pairs - used) // size
    device = routing.ids.device
    order = torch.empty((pairs,), dtype=torch.int32, device=device)
    table = torch.empty((most, FIELDS.value), dtype=torch.int32, device=device)
    chunk = min(max(triton.next_power_of_2(pairs), 128), CHUNK)
    run(
        _cut, (experts,), routing.ids, order, table, pairs, most,
        SIZE=size, BLOCK_E=triton.next_power_of_2(experts), BLOCK_P=chunk, BLOCK_T=32,
        num_warps=min(max(chunk // 256, 1), 16),
    )  # fmt: skip
    return Blocks(order, table, size)
