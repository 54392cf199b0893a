"""Which experts the rows of a batch go to, and the work of a batch cut into blocks of rows that share an expert.

A *pair* is a row and one of its experts; pair p is row p // top_k and its choice p % top_k. All launches are shaped by
the numbers of rows, experts and choices; how many rows an expert has is known on the device alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkdraft.kernels.cuda.elementwise import run
from sparkdraft.kernels.cuda.matmul import norm_logits
from sparkdraft.kernels.cuda.pdl import enter
from sparkdraft.kernels.norm import Normed
from sparkdraft.kernels.routing import Routing
from sparkdraft.weights.linear import Linear

MOST_EXPERTS, MOST_CHOICES = 512, 16
CHUNK = 4096  # pairs that a program looks at in one go, at most
_NAN = tl.constexpr(2**31 - 1)  # the key of NaN, which is the largest, as in torch's sort; it is NaN's bits too
_TAKEN = tl.constexpr(-(2**31))  # below every key
FIELDS = tl.constexpr(3)  # of a block: its expert, and its first and last place in `Blocks.order`; the last is not in


@triton.jit
def _flip(bits):
    """From the bits of a float32 to an int32 in the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["live"])
def _route(
    logits, scale, live, ids, weights, stride_logits,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, RENORMALISE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row. Whatever the logits hold, its experts are TOP_K different ones; a dead row has none."""
    enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, BLOCK_C)
    mask = choice < TOP_K
    if live is not None:  # noqa: SIM102 (the inner one is decided on the device)
        if row >= tl.load(live):
            tl.store(ids + row * TOP_K + choice, tl.full([BLOCK_C], -1, tl.int32), mask=mask)
            tl.store(weights + row * TOP_K + choice, tl.zeros([BLOCK_C], tl.float32), mask=mask)
            return
    expert = tl.arange(0, BLOCK_E)
    value = tl.load(logits + row * stride_logits + expert, mask=expert < EXPERTS, other=float("-inf"))
    key = _flip((value + 0.0).to(tl.int32, bitcast=True))  # -0 + 0 = 0, which it equals
    key = tl.where(value == value, key, _NAN)
    key = tl.where(expert < EXPERTS, key, _TAKEN)
    chosen = tl.zeros([BLOCK_C], tl.int32)
    best = tl.zeros([BLOCK_C], tl.int32)
    for number in tl.static_range(TOP_K):
        top = tl.max(key, 0)
        first = tl.min(tl.where(key == top, expert, BLOCK_E), 0)
        chosen = tl.where(choice == number, first, chosen)
        best = tl.where(choice == number, top, best)
        key = tl.where(expert == first, _TAKEN, key)
    picked = tl.where(mask, _flip(best).to(tl.float32, bitcast=True), float("-inf"))
    peak = tl.max(picked, 0)
    share = tl.exp(picked - peak)
    share /= tl.sum(share, 0) if RENORMALISE else tl.sum(tl.exp(value - peak), 0)
    if scale is not None:
        share *= tl.load(scale + chosen, mask=mask, other=0.0)
    tl.store(ids + row * TOP_K + choice, chosen, mask=mask)
    tl.store(weights + row * TOP_K + choice, share, mask=mask)


def norm_route(
    normed: Normed,
    router: Linear,
    top_k: int,
    renormalise: bool,
    scale: Tensor | None = None,
    live: Tensor | None = None,  # int32 [1]: the number of rows that are sent anywhere; None: all
) -> Routing:
    logits = norm_logits(normed, router)
    rows, experts = logits.shape
    assert 0 < top_k <= min(experts, MOST_CHOICES) and experts <= MOST_EXPERTS, (experts, top_k)
    assert logits.stride(1) == 1 and (scale is None or scale.dtype == torch.float32), logits.stride()
    ids = torch.empty((rows, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((rows, top_k), dtype=torch.float32, device=logits.device)
    if rows:
        block = triton.next_power_of_2(experts)
        run(
            _route, (rows,), logits, scale, live, ids, weights, logits.stride(0),
            EXPERTS=experts, TOP_K=top_k, RENORMALISE=renormalise,
            BLOCK_E=block, BLOCK_C=triton.next_power_of_2(top_k), num_warps=1,
        )  # fmt: skip
    return Routing(ids, weights)


class Blocks(NamedTuple):
    """Pairs in order of their experts, cut into blocks of up to 'size' pairs of one expert."""

    order: Tensor  # int32 [pairs]: numbers of pairs, those of an expert side by side and in order
    table: Tensor  # int32 [most, 3]: expert, first and last place in the order; the expert is -1 where no block is
    size: int

    @property
    def most(self) -> int:
        """As many as there can be, whatever the routing."""
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
