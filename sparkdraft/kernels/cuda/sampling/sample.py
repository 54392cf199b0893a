"""Filters and draws in three launches, whatever the mix of parameters: no sort, no wait for the host.

A row is cut into groups of `GROUP` columns, and the first kernel finds each group's largest logit. The k-th largest of
these is at most the row's k-th largest logit, and hardly less, so few ids beside the k likeliest reach it. The second
kernel collects those; the third compares each with every other, which is the definition of top_k and top_p.

Where top_k is off, or leaves more than `MOST` ids, the second kernel draws from all that min_p leaves, in parts. The
third asks whether the best draw is one that the filters keep: fewer than k ids are likelier, and they hold less than
top_p. If not, no id that is as unlikely is kept either, and the next best is asked; a part's draw bounds what it can
draw from fewer ids, so only the part that leads is drawn anew. Groups that hold nothing likelier are not read.

Scaled logits are (x - largest) / temperature. Parts and groups are the same ones in any batch, so a row's draw does
not depend on its company.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkdraft.kernels.cuda.elementwise import run
from sparkdraft.kernels.cuda.runtime.pdl import enter
from sparkdraft.kernels.cuda.sampling.argmax import argmax
from sparkdraft.kernels.noise import ID, POSITION, SEED
from sparkdraft.kernels.ops import Draws

GROUP = 128  # columns whose largest logit is known
FIRST_BLOCK = 4096  # columns of a program of the first kernel
PARTS, BLOCK = 16, 1024  # of a row; columns that a program draws from at a time
WIDE_BLOCK = 8192  # columns that the program of a whole row reads at a time
MOST = 256  # ids of a row that are compared with each other, CHUNK at a time
CHUNK = 32
LEAST = tl.constexpr(-104.0)  # exp of less is 0
HIGHEST = tl.constexpr(0.015625)  # above 0, the largest scaled logit
HALVINGS = tl.constexpr(40)  # of an interval of 104, which then ends below a float's resolution
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
def _numbers(logits, column, columns):
    """Logits of a row; -inf in place of NaN and behind the last column."""
    value = tl.load(logits + column, mask=column < columns, other=float("-inf"))
    return tl.where(value == value, value, float("-inf"))


@triton.jit
def _largest_of_groups(
    logits, tops, stride_row, columns, groups, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    enter(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = part * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    top = tl.max(_numbers(logits + row * stride_row, column, columns), 1)
    tl.store(tops + row * groups + group, top, mask=group < groups)


@triton.jit
def _parameters(slots, floats, integers, row, top, stride_floats, DRAWS: tl.constexpr):
    """Whether a row takes its largest logit, and its temperature, min_p's floor, top_p, top_k and seed."""
    takes_largest, temperature, floor, top_p = 1, 1.0, float("-inf"), 1.0
    top_k, seed = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    if DRAWS:
        slot = tl.load(slots + row)
        own, least = floats + tl.maximum(slot, 0), integers + tl.maximum(slot, 0)
        temperature = tl.load(own)
        largest = (slot < 0) | (temperature == 0) | (top == float("inf")) | (top == float("-inf"))
        takes_largest = largest.to(tl.int32)
        temperature = tl.maximum(temperature, 1e-5)
        min_p = tl.load(own + stride_floats)
        floor = tl.where(min_p > 0, tl.log(min_p), float("-inf"))
        top_p = tl.load(own + 2 * stride_floats)
        top_k, seed = tl.load(least), tl.load(least + stride_floats)
    return takes_largest, temperature, floor, top_p, top_k, seed


@triton.jit
def _first_of(logits, tops, top, group, columns, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """The first column of a row's largest logit; tops: of its groups, in registers."""
    first = tl.min(tl.where(tops == top, group, GROUPS), 0)
    column = first * GROUP + tl.arange(0, GROUP)
    return tl.min(tl.where(_numbers(logits, column, columns) == top, column, columns), 0)


@triton.jit
def _bound_of_few(scaled, top_k):
    """A number that at least top_k groups reach, exactly as many if halving finds one; LEAST where there are fewer."""
    low, high = LEAST, HIGHEST
    reach, halvings = tl.sum((scaled >= low).to(tl.int32), 0), 0
    while (reach > top_k) & (halvings < HALVINGS):
        middle = (low + high) * 0.5
        here = tl.sum((scaled >= middle).to(tl.int32), 0)
        low, high = tl.where(here >= top_k, middle, low), tl.where(here >= top_k, high, middle)
        reach = tl.where(here >= top_k, here, reach)
        halvings += 1
    return low


@triton.jit
def _collect(
    logits, scaled_tops, group, kept, kept_scaled, top, temperature, bound, first, end, columns,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Stores the columns of a part that reach the bound, in order, and returns how many there are, or that there are
    more than `MOST`."""
    wanted = (group >= first) & (group < end) & (scaled_tops >= bound)
    here, count = tl.min(tl.where(wanted, group, GROUPS), 0), 0
    while (here < end) & (count <= MOST):
        column = here * GROUP + tl.arange(0, GROUP)
        scaled = (_numbers(logits, column, columns) - top) / temperature
        reach = (scaled >= bound).to(tl.int32)
        place = count + tl.cumsum(reach, 0) - 1
        inside = (reach > 0) & (place < MOST)
        tl.store(kept + place, column, mask=inside)
        tl.store(kept_scaled + place, scaled, mask=inside)
        count += tl.sum(reach, 0)
        here = tl.min(tl.where(wanted & (group > here), group, GROUPS), 0)
    return count


@triton.jit
def _draw_columns(
    logits, ids, noise, top, temperature, floor, above, without, first, end, HAS_IDS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The best score of some columns of a row, its scaled logit and its column, and what those that reach the floor
    hold together. Columns that are not above 'above', and the column 'without', are not drawn."""
    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    of_peak = tl.full([BLOCK], float("-inf"), tl.float32)
    found = tl.full([BLOCK], 0, tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(first, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        scaled = (_numbers(logits, column, end) - top) / temperature
        id_ = column.to(tl.int64)
        if HAS_IDS:
            id_ = tl.load(ids + column, mask=column < end, other=0)
        reach = scaled >= floor
        mass += tl.where(reach, tl.exp(scaled), 0.0)
        drawn = reach & (scaled > above) & (column != without)
        score = tl.where(drawn, scaled + _gumbel(noise, id_), float("-inf"))
        larger = score > peak
        found = tl.where(larger, column, found)
        of_peak = tl.where(larger, scaled, of_peak)
        peak = tl.where(larger, score, peak)
    best = tl.max(peak, 0)
    own = tl.min(tl.where((peak == best) & (peak > float("-inf")), found, end), 0)
    return best, tl.max(tl.where((peak == best) & (found == own), of_peak, float("-inf")), 0), own, tl.sum(mass, 0)


@triton.jit(do_not_specialize=["slots", "positions", "stride_floats"])
def _draw_of_part(
    logits, tops, slots, positions, floats, integers, ids, scores, scaled_found, found, masses, counts, kept,
    kept_scaled, stride_row, columns, groups, stride_floats, widest, DRAWS: tl.constexpr, HAS_IDS: tl.constexpr,
    SURE: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One part of a row: the few ids that top_k may leave, or the best draw from all that min_p leaves. 'masses' is
    what the latter hold together; of a row that takes its largest, the sum of exp(logit - largest) of the others that
    come within 'widest' of it."""
    enter(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * stride_row
    target = row * PARTS + part
    group = tl.arange(0, GROUPS)
    largest = tl.load(tops + row * groups + group, mask=group < groups, other=float("-inf"))
    top = tl.max(largest, 0)
    each = tl.cdiv(groups, PARTS)
    first, end = part * each, tl.minimum((part + 1) * each, groups)
    takes_largest, temperature, floor, _top_p, top_k, seed = _parameters(
        slots, floats, integers, row, top, stride_floats, DRAWS
    )
    if takes_largest != 0:
        if SURE:
            best = _first_of(logits, largest, top, group, columns, GROUPS, GROUP)
            total = tl.zeros([BLOCK], tl.float32)
            for start in range(first * GROUP, tl.minimum(end * GROUP, columns), BLOCK):
                column = start + tl.arange(0, BLOCK)
                value = _numbers(logits, column, tl.minimum(end * GROUP, columns))
                total += tl.where((value >= top - widest) & (column != best), tl.exp(value - top), 0.0)
            tl.store(masses + target, tl.sum(total, 0))
    elif (top_k > 0) & (top_k <= MOST):
        scaled = (largest - top) / temperature
        bound = tl.maximum(_bound_of_few(scaled, top_k), floor)
        count = _collect(
            logits, scaled, group, kept + target * MOST, kept_scaled + target * MOST, top, temperature, bound,
            first, end, columns, GROUPS, GROUP, MOST,
        )  # fmt: skip
        tl.store(counts + target, count)
        tl.store(scores + target, float("inf"))  # where they are too many: a bound of what the part draws
        tl.store(scaled_found + target, float("-inf"))
        tl.store(found + target, 0)
        tl.store(masses + target, 0.0)
    else:
        noise = seed * OF_SEED + tl.load(positions + row).to(tl.int64) * OF_POSITION
        best, own, column, mass = _draw_columns(
            logits, ids, noise, top, temperature, floor, float("-inf"), -1, first * GROUP,
            tl.minimum(end * GROUP, columns), HAS_IDS, BLOCK,
        )  # fmt: skip
        tl.store(counts + target, MOST + 1)
        tl.store(scores + target, best)
        tl.store(scaled_found + target, own)
        tl.store(found + target, column)
        tl.store(masses + target, mass)


@triton.jit
def _place(number, count, ends, MOST: tl.constexpr):
    """Where the n-th id that was collected lies, whose parts have so many and end there."""
    behind = ends[None, :] <= number[:, None]
    before = tl.sum(tl.where(behind, count[None, :], 0), 1)
    return tl.sum(behind.to(tl.int32), 1) * MOST + number - before


@triton.jit
def _draw_of_few(
    kept, kept_scaled, count, ids, noise, top_k, top_p, columns,
    HAS_IDS: tl.constexpr, MOST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The column that is drawn from those that were collected, and how far its score stands above the next."""
    total, ends, number = tl.sum(count, 0), tl.cumsum(count, 0), tl.arange(0, MOST)
    place = _place(number, count, ends, MOST)
    scaled = tl.load(kept_scaled + place, mask=number < total, other=float("-inf"))
    column = tl.load(kept + place, mask=number < total, other=0)
    likelier, mass = tl.zeros([MOST], tl.int32), tl.zeros([MOST], tl.float32)
    for start in range(0, total, CHUNK):
        others = start + tl.arange(0, CHUNK)
        other = tl.load(kept_scaled + _place(others, count, ends, MOST), mask=others < total, other=float("-inf"))
        above = other[None, :] > scaled[:, None]
        likelier += tl.sum(above.to(tl.int32), 1)
        mass += tl.sum(tl.where(above, tl.exp(other)[None, :], 0.0), 1)
    keeps = (number < total) & (likelier < top_k)
    whole = tl.sum(tl.where(keeps, tl.exp(scaled), 0.0), 0)
    enough = tl.where(top_p < 1, top_p * whole, float("inf"))  # what is kept has less above it
    keeps = keeps & ((mass < enough) | (likelier == 0))
    id_ = column.to(tl.int64)
    if HAS_IDS:
        id_ = tl.load(ids + column, mask=number < total, other=0)
    score = tl.where(keeps, scaled + _gumbel(noise, id_), float("-inf"))
    best = tl.max(score, 0)
    taken = tl.min(tl.where(score == best, column, columns), 0)
    return taken, best - tl.max(tl.where(column == taken, float("-inf"), score), 0)


@triton.jit
def _over(
    logits, tops, top, temperature, threshold, columns, groups, STRICT: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """How many ids of a row are above a threshold (or reach it), and what they hold together."""
    block, group = tl.arange(0, BLOCKS), tl.arange(0, BLOCK // GROUP)
    group = block[:, None] * (BLOCK // GROUP) + group[None, :]
    peak = (tl.max(tl.load(tops + group, mask=group < groups, other=float("-inf")), 1) - top) / temperature
    wanted = peak > threshold if STRICT else peak >= threshold
    here = tl.min(tl.where(wanted, block, BLOCKS), 0)
    count, mass = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.float32)
    while here < BLOCKS:
        scaled = (_numbers(logits, here * BLOCK + tl.arange(0, BLOCK), columns) - top) / temperature
        over = scaled > threshold if STRICT else scaled >= threshold
        count += over.to(tl.int32)
        mass += tl.where(over, tl.exp(scaled), 0.0)
        here = tl.min(tl.where(wanted & (block > here), block, BLOCKS), 0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _draw_of_many(
    logits, tops, ids, score, own, column, whole, noise, top, temperature, floor, top_k, top_p, widest, columns, groups,
    HAS_IDS: tl.constexpr, SURE: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The column that is drawn, and how far its score stands above the next. score, own, column: of each part the best
    score, or a bound of it, its scaled logit and its column; whole: what all ids hold that min_p leaves."""
    if (top_k > 0) & (top_p < 1):  # top_p is a share of what top_k leaves: that floor is searched
        low, high = tl.maximum(floor, LEAST), HIGHEST
        reach, whole = _over(logits, tops, top, temperature, low, columns, groups, False, BLOCKS, WIDE, GROUP)
        halvings = 0
        while (reach > top_k) & (halvings < HALVINGS):
            middle = (low + high) * 0.5
            here, mass = _over(logits, tops, top, temperature, middle, columns, groups, False, BLOCKS, WIDE, GROUP)
            enough = here >= top_k
            low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
            reach, whole = tl.where(enough, here, reach), tl.where(enough, mass, whole)
            halvings += 1
        floor = low
    part, each = tl.arange(0, PARTS), tl.cdiv(groups, PARTS) * GROUP
    below, taken, left = float("-inf"), -1, 1  # ids that are not above 'below' are out
    best, second = float("-inf"), float("-inf")
    if SURE:
        left = 2
    while left > 0:
        leader = tl.max(score, 0)
        which = tl.min(tl.where(score == leader, part, PARTS), 0)
        scaled = tl.max(tl.where(part == which, own, float("-inf")), 0)
        place = tl.max(tl.where(part == which, column, 0), 0)
        if leader <= best - widest:
            left = 0
        elif (scaled <= below) | (scaled < floor) | (place == taken):
            draw, of_draw, drawn, _mass = _draw_columns(
                logits, ids, noise, top, temperature, floor, below, taken, which * each,
                tl.minimum((which + 1) * each, columns), HAS_IDS, BLOCK,
            )  # fmt: skip
            score = tl.where(part == which, draw, score)
            own = tl.where(part == which, of_draw, own)
            column = tl.where(part == which, drawn, column)
        else:
            keeps = 1
            if (top_k > 0) | (top_p < 1):
                count, mass = _over(logits, tops, top, temperature, scaled, columns, groups, True, BLOCKS, WIDE, GROUP)
                keeps_k = (top_k <= 0) | (count < top_k)
                keeps = (((top_p >= 1) | (mass < top_p * whole)) & keeps_k | (count == 0)).to(tl.int32)
            if keeps == 0:
                below = scaled
            elif taken < 0:
                best, taken, left = leader, place, left - 1
            else:
                second, left = leader, 0
    return taken, best - second


@triton.jit(do_not_specialize=["slots", "positions", "stride_floats"])
def _draw_of_row(
    logits, tops, slots, positions, floats, integers, ids, scores, scaled_found, found, masses, counts, kept,
    kept_scaled, out, gaps, stride_row, columns, groups, stride_floats, widest, DRAWS: tl.constexpr,
    HAS_IDS: tl.constexpr, SURE: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, MOST: tl.constexpr, CHUNK: tl.constexpr, BLOCKS: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride_row
    tops += row * groups
    group, of_part = tl.arange(0, GROUPS), row * PARTS + tl.arange(0, PARTS)
    largest = tl.load(tops + group, mask=group < groups, other=float("-inf"))
    top = tl.max(largest, 0)
    takes_largest, temperature, floor, top_p, top_k, seed = _parameters(
        slots, floats, integers, row, top, stride_floats, DRAWS
    )
    if takes_largest != 0:
        taken = _first_of(logits, largest, top, group, columns, GROUPS, GROUP)
        gap = widest
        if SURE:
            gap = -tl.log(tl.sum(tl.load(masses + of_part), 0))
    else:
        noise = seed * OF_SEED + tl.load(positions + row).to(tl.int64) * OF_POSITION
        count = tl.load(counts + of_part)
        if tl.sum(count, 0) <= MOST:
            place = row * PARTS * MOST
            taken, gap = _draw_of_few(
                kept + place, kept_scaled + place, count, ids, noise, top_k, top_p, columns, HAS_IDS, MOST, CHUNK
            )
        else:
            score, own, column = tl.load(scores + of_part), tl.load(scaled_found + of_part), tl.load(found + of_part)
            taken, gap = _draw_of_many(
                logits, tops, ids, score, own, column, tl.sum(tl.load(masses + of_part), 0), noise, top, temperature,
                floor, top_k, top_p, widest, columns, groups, HAS_IDS, SURE, PARTS, GROUP, BLOCKS, WIDE, BLOCK,
            )  # fmt: skip
    tl.store(out + row, taken.to(tl.int64))
    if SURE:
        tl.store(gaps + row, tl.minimum(gap, widest))


def sample(logits: Tensor, draws: Draws | None, ids: Tensor | None = None) -> Tensor:
    return argmax(logits) if draws is None else _sample(logits, draws, ids, None)[0]


def sample_sure(logits: Tensor, draws: Draws | None, ids: Tensor | None, widest: float) -> tuple[Tensor, Tensor]:
    return _sample(logits, draws, ids, widest)


def _sample(logits: Tensor, draws: Draws | None, ids: Tensor | None, widest: float | None) -> tuple[Tensor, Tensor]:
    (rows, columns), device = logits.shape, logits.device
    assert logits.stride(1) == 1 and logits.dtype == torch.float32, (logits.stride(), logits.dtype)
    out, gaps = (torch.empty((rows,), dtype=dtype, device=device) for dtype in (torch.int64, torch.float32))
    if not rows:
        return out, gaps

    def made(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty((rows, *shape), dtype=dtype, device=device)

    groups, stride = triton.cdiv(columns, GROUP), logits.stride(0)
    tops = made(torch.float32, groups)
    run(
        _largest_of_groups, (rows, triton.cdiv(columns, FIRST_BLOCK)), logits, tops, stride, columns, groups,
        GROUP=GROUP, BLOCK=FIRST_BLOCK, num_warps=4,
    )  # fmt: skip
    tables = tuple(draws) if draws is not None else (tops,) * 4  # not read
    stride_floats = draws.floats.shape[1] if draws is not None else 0
    assert all(table.is_contiguous() for table in tables)
    parts = [made(dtype, PARTS) for dtype in (torch.float32, torch.float32, torch.int32, torch.float32, torch.int32)]
    parts += [made(dtype, PARTS, MOST) for dtype in (torch.int32, torch.float32)]
    given = (tops, *tables, ids, *parts)
    sizes = (stride, columns, groups, stride_floats, widest or 0.0)
    cut = {
        "DRAWS": draws is not None, "HAS_IDS": ids is not None, "SURE": widest is not None, "PARTS": PARTS,
        "GROUPS": triton.next_power_of_2(groups), "GROUP": GROUP, "BLOCK": BLOCK, "MOST": MOST,
    }  # fmt: skip
    run(_draw_of_part, (rows, PARTS), logits, *given, *sizes, **cut, num_warps=4)
    blocks = triton.next_power_of_2(triton.cdiv(columns, WIDE_BLOCK))
    run(
        _draw_of_row, (rows,), logits, *given, out, gaps, *sizes, **cut, CHUNK=CHUNK, BLOCKS=blocks, WIDE=WIDE_BLOCK,
        num_warps=8,
    )  # fmt: skip
    return out, gaps
