"""Filters and draws in one pass of a few small kernels: any mix of parameters, no sort, no wait for the host.

top_k, top_p and min_p each say the same thing: ids below some probability are out. So a row has one floor, and where
top_k or top_p ask for it, the floor is searched: every round compares the row with `STEPS` thresholds at once and
keeps the interval that holds the floor, an eighth of the one before. top_k counts ids, top_p sums the probabilities
of those that top_k and min_p left. Rows that are done, and rows without filters, leave a round at once.

Scaled logits are (x - largest) / temperature. A row is read by `PARTS` programs, the same ones in any batch, so its
draw does not depend on its company.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkdraft.kernels.cuda.elementwise import run
from sparkdraft.kernels.cuda.runtime.pdl import enter
from sparkdraft.kernels.cuda.sampling.argmax import best_of_part
from sparkdraft.kernels.noise import ID, POSITION, SEED

PARTS, BLOCK = 16, 1024  # of a row; columns that a program reads at a time
STEPS = 8  # thresholds of a round
ROUNDS = 14  # at most: an interval of 104 then ends below a float's resolution, for top_k and for top_p
WIDTH = 8  # numbers of a row's state
LEAST = tl.constexpr(-104.0)  # exp of less is 0
LIKELY = tl.constexpr(-30.0)  # what all ids below hold together is less than any 1 - top_p
TOP_K, TOP_P, DONE = tl.constexpr(0.0), tl.constexpr(1.0), tl.constexpr(2.0)  # what a row searches for
HIGHEST = tl.constexpr(0.015625)  # above 0, the largest scaled logit
OF_SEED, OF_POSITION, OF_ID = tl.constexpr(SEED), tl.constexpr(POSITION), tl.constexpr(ID)
MIX_1, MIX_2 = tl.constexpr(-4658895280553007687), tl.constexpr(-7723592293110705685)


@triton.jit
def _gumbel(at, ids):
    """kernels/noise.py. at: seed and position of the row, mixed."""
    x = at + ids.to(tl.int64) * OF_ID
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * MIX_1  # int64 shifts carry the sign in: mask it off
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * MIX_2
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    uniform = (((x >> 41) & 0x7FFFFF).to(tl.float32) + 0.5) / 8388608.0
    return -tl.log(-tl.log(uniform))


@triton.jit
def _next(state, sums, floats, integers, row, rows, PARTS: tl.constexpr, STEPS: tl.constexpr, FIRST: tl.constexpr):
    """What a row searches for after the round before: (what, low, high, goal, floor). Every program of a row computes
    it from the same sums.

    What is sought, the floor, is the largest number above which there is enough. [low, high) holds it. goal is the
    count or the sum that is enough, negative while it is not known.
    """
    min_p, top_p = tl.load(floats + rows + row), tl.load(floats + 2 * rows + row)
    top_k = tl.load(integers + row)
    if FIRST:
        floor = tl.where(min_p > 0, tl.log(min_p), float("-inf"))
        goal = tl.where(top_k > 0, top_k.to(tl.float32), -1.0)
        what = tl.where(top_k > 0, TOP_K, tl.where(top_p < 1, TOP_P, DONE))
        what = tl.where(tl.load(floats + row) > 0, what, DONE)
        low = tl.maximum(floor, tl.where(what == TOP_K, LEAST, LIKELY))
        high = low * 0 + HIGHEST
    else:
        what, low, high = tl.load(state), tl.load(state + 1), tl.load(state + 2)
        goal, floor = tl.load(state + 3), tl.load(state + 4)
        if what != DONE:
            step, part = tl.arange(0, STEPS), tl.arange(0, PARTS)
            found = tl.sum(tl.load(sums + row * PARTS * STEPS + part[:, None] * STEPS + step[None, :]), 0)  # [STEPS]
            whole = tl.sum(tl.where(step == 0, found, 0.0), 0)
            goal = tl.where(goal < 0, top_p * whole, goal)
            enough = tl.sum((found >= goal).to(tl.int32), 0)  # of the thresholds, from the lowest on
            last = tl.maximum(enough - 1, 0)
            width = (high - low) / STEPS
            high = tl.where(enough == STEPS, high, low + width * enough)
            here = tl.sum(tl.where(step == last, found, 0.0), 0)
            above = tl.sum(tl.where(step == enough, found, 0.0), 0)
            low = low + width * last
            single = high - low <= 1e-6 * (1 - low)  # beyond a float's resolution: only equal numbers are left
            if what == TOP_K:
                # All survive where fewer than k are left. Exactly k above: nothing is between low and the floor.
                if (enough == 0) | (here == goal) | single:
                    floor = tl.where(enough == 0, floor, tl.maximum(floor, low))
                    what = tl.where(top_p < 1, TOP_P, DONE)
                    low, high = tl.maximum(floor, LIKELY), high * 0 + HIGHEST
                    goal = goal * 0 - 1.0
            else:
                # Between the two thresholds is a single number, so the lower one parts the row as the floor does.
                if (enough == 0) | single | ((enough < STEPS) & (here - above < 1.5 * tl.exp(low))):
                    floor = tl.where(enough == 0, floor, tl.maximum(floor, low))
                    what = DONE
    return what, low, high, goal, floor


@triton.jit
def _narrow(
    logits, tops, floats, integers, states, sums, stride_row, columns, rows, ROUND: tl.constexpr,
    PARTS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One round: the ids (or their probabilities) of one part of a row that reach each threshold. States and sums of
    rounds alternate between two places."""
    enter(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    before, here = states + ((1 - ROUND % 2) * rows + row) * WIDTH, states + (ROUND % 2 * rows + row) * WIDTH
    sums_before, sums_here = sums + (1 - ROUND % 2) * rows * PARTS * STEPS, sums + ROUND % 2 * rows * PARTS * STEPS
    what, low, high, goal, floor = _next(before, sums_before, floats, integers, row, rows, PARTS, STEPS, ROUND == 0)
    if part == 0:
        tl.store(here, what)
        tl.store(here + 1, low)
        tl.store(here + 2, high)
        tl.store(here + 3, goal)
        tl.store(here + 4, floor)
    if what != DONE:
        top = tl.max(tl.load(tops + row * PARTS + tl.arange(0, PARTS)), 0)
        temperature = tl.maximum(tl.load(floats + row), 1e-5)
        step = tl.arange(0, STEPS)
        threshold = low + (high - low) / STEPS * step
        # The first sum of top_p's first round is that of all that is left.
        threshold = tl.where(step == tl.where(goal < 0, 0, -1), tl.maximum(floor, LEAST), threshold)
        each = tl.cdiv(columns, PARTS)
        end = tl.minimum((part + 1) * each, columns)
        total = tl.zeros([STEPS], tl.float32)
        for first in range(part * each, end, BLOCK):
            column = first + tl.arange(0, BLOCK)
            value = tl.load(logits + row * stride_row + column, mask=column < end, other=float("-inf"))
            scaled = (value - top) / temperature
            weight = tl.where(what == TOP_K, 1.0, tl.exp(scaled))
            total += tl.sum(tl.where(scaled[None, :] >= threshold[:, None], weight[None, :], 0.0), 1)
        tl.store(sums_here + (row * PARTS + part) * STEPS + step, total)


@triton.jit
def _take_largest(
    logits, tops, top_ids, bests, seconds, best_ids, row, part, first, end, top, place, stride_row, widest,
    SURE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best of a greedy row's part is its largest logit; its second is the sum of exp(logit - the row's largest) of
    the others that come within 'widest'."""
    target = row * PARTS + part
    best_of_row = tl.load(top_ids + row * PARTS + place)
    total = tl.zeros([BLOCK], tl.float32)
    if SURE:
        for start in range(first, end, BLOCK):
            column = start + tl.arange(0, BLOCK)
            value = tl.load(logits + row * stride_row + column, mask=column < end, other=float("-inf"))
            total += tl.where((value >= top - widest) & (column != best_of_row), tl.exp(value - top), 0.0)
    tl.store(bests + target, tl.load(tops + target))
    tl.store(seconds + target, tl.sum(total, 0))
    tl.store(best_ids + target, tl.load(top_ids + target))


@triton.jit
def _draw_of_part(
    logits, tops, top_ids, floats, integers, states, sums, ids, bests, seconds, best_ids, stride_row, columns, rows,
    widest, DRAWS: tl.constexpr, ROUNDS: tl.constexpr, HAS_IDS: tl.constexpr, SURE: tl.constexpr,
    PARTS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The two best scores of one part of one row, and the column of the first."""
    enter(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top, place = tl.max(tl.load(tops + row * PARTS + tl.arange(0, PARTS)), 0, return_indices=True)
    each = tl.cdiv(columns, PARTS)
    first, end = part * each, tl.minimum((part + 1) * each, columns)
    if DRAWS:
        temperature = tl.load(floats + row)
        if (temperature == 0) | (top == float("inf")):
            _take_largest(
                logits, tops, top_ids, bests, seconds, best_ids, row, part, first, end, top, place, stride_row, widest,
                SURE, PARTS, BLOCK,
            )  # fmt: skip
        else:
            last: tl.constexpr = ROUNDS - 1
            state, sum_ = states + (last % 2 * rows + row) * WIDTH, sums + last % 2 * rows * PARTS * STEPS
            what, low, _high, _goal, floor = _next(state, sum_, floats, integers, row, rows, PARTS, STEPS, ROUNDS == 0)
            floor = tl.where(what == DONE, floor, tl.maximum(floor, low))  # out of rounds: enough is above low
            mixed = tl.load(integers + rows + row) * OF_SEED + tl.load(integers + 2 * rows + row) * OF_POSITION
            temperature = tl.maximum(temperature, 1e-5)
            peak = tl.full([BLOCK], float("-inf"), tl.float32)
            next_ = tl.full([BLOCK], float("-inf"), tl.float32)
            found = tl.full([BLOCK], 0, tl.int32)
            for start in range(first, end, BLOCK):
                column = start + tl.arange(0, BLOCK)
                value = tl.load(logits + row * stride_row + column, mask=column < end, other=float("-inf"))
                scaled = (value - top) / temperature
                id_ = column.to(tl.int64)
                if HAS_IDS:
                    id_ = tl.load(ids + column, mask=column < end, other=0)
                score = tl.where((scaled >= floor) & (column < end), scaled + _gumbel(mixed, id_), float("-inf"))
                larger = score > peak
                next_ = tl.maximum(next_, tl.where(larger, peak, score))
                found = tl.where(larger, column, found)
                peak = tl.where(larger, score, peak)
            best = tl.max(peak, 0)
            own = tl.min(tl.where(peak == best, found, columns), 0)
            others = tl.where((peak == best) & (found == own), next_, peak)
            tl.store(bests + row * PARTS + part, best)
            tl.store(seconds + row * PARTS + part, tl.max(others, 0))
            tl.store(best_ids + row * PARTS + part, own)
    else:
        _take_largest(
            logits, tops, top_ids, bests, seconds, best_ids, row, part, first, end, top, place, stride_row, widest,
            SURE, PARTS, BLOCK,
        )  # fmt: skip


@triton.jit
def _draw_of_row(
    bests, seconds, best_ids, floats, out, gaps, widest,
    DRAWS: tl.constexpr, SURE: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The parts are in order, so the lowest column wins a tie."""
    enter(PDL)
    row, part = tl.program_id(0), tl.arange(0, PARTS)
    each = tl.load(bests + row * PARTS + part)
    best, place = tl.max(each, 0, return_indices=True)
    tl.store(out + row, tl.load(best_ids + row * PARTS + place).to(tl.int64))
    if SURE:
        second = tl.load(seconds + row * PARTS + part)
        gap = -tl.log(tl.sum(second, 0))
        if DRAWS:
            apart = best - tl.max(tl.where(part == place, second, tl.maximum(each, second)), 0)
            gap = tl.where(tl.load(floats + row) != 0, apart, gap)
        tl.store(gaps + row, tl.minimum(gap, widest))


def sample(logits: Tensor, floats: Tensor | None, integers: Tensor | None, ids: Tensor | None = None) -> Tensor:
    return _sample(logits, floats, integers, ids, None)[0]


def sample_sure(
    logits: Tensor, floats: Tensor | None, integers: Tensor | None, ids: Tensor | None, widest: float
) -> tuple[Tensor, Tensor]:
    return _sample(logits, floats, integers, ids, widest)


def _sample(
    logits: Tensor, floats: Tensor | None, integers: Tensor | None, ids: Tensor | None, widest: float | None
) -> tuple[Tensor, Tensor]:
    (rows, columns), device = logits.shape, logits.device
    assert logits.stride(1) == 1 and logits.dtype == torch.float32, (logits.stride(), logits.dtype)
    out, gaps = (torch.empty((rows,), dtype=dtype, device=device) for dtype in (torch.int64, torch.float32))
    if not rows:
        return out, gaps
    tops, bests, seconds = torch.empty((3, rows, PARTS), dtype=torch.float32, device=device)
    top_ids, best_ids = torch.empty((2, rows, PARTS), dtype=torch.int32, device=device)
    stride, cut = logits.stride(0), {"PARTS": PARTS, "BLOCK": BLOCK, "num_warps": 4}
    run(best_of_part, (rows, PARTS), logits, tops, top_ids, stride, columns, **cut)
    states = sums = tops  # not read where nothing draws
    search = cut | {"STEPS": STEPS, "WIDTH": WIDTH}
    draws = floats is not None and integers is not None
    if floats is not None and integers is not None:
        floats, integers = floats.contiguous(), integers.contiguous()
        states = torch.empty((2, rows, WIDTH), dtype=torch.float32, device=device)
        sums = torch.empty((2, rows, PARTS, STEPS), dtype=torch.float32, device=device)
        for number in range(ROUNDS):
            run(
                _narrow, (rows, PARTS), logits, tops, floats, integers, states, sums, stride, columns, rows,
                ROUND=number and 2 - number % 2, **search,
            )  # fmt: skip
    sure = widest is not None
    run(
        _draw_of_part, (rows, PARTS), logits, tops, top_ids, floats if draws else tops, integers if draws else tops,
        states, sums, ids if ids is not None else best_ids, bests, seconds, best_ids, stride, columns, rows,
        widest or 0.0, DRAWS=draws, ROUNDS=ROUNDS, HAS_IDS=ids is not None, SURE=sure, **search,
    )  # fmt: skip
    run(
        _draw_of_row, (rows,), bests, seconds, best_ids, floats if draws else tops, out, gaps, widest or 0.0,
        DRAWS=draws, SURE=sure, PARTS=PARTS, num_warps=1,
    )  # fmt: skip
    return out, gaps
