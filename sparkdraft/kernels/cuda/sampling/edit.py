"""Penalties, biases and excluded ids in one pass over the rows that have some; the others cost a look at their slot."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparkdraft.kernels.cuda.elementwise import run
from sparkdraft.kernels.cuda.runtime.pdl import enter
from sparkdraft.kernels.ops import IN_PROMPT, LogitEdits

PARTS, BLOCK = 16, 1024  # of a row; columns that a program changes at a time
PROMPT = tl.constexpr(IN_PROMPT)


@triton.jit(do_not_specialize=["columns"])
def _penalise(
    logits, slots, ids, ahead, counts, penalties, stride_row, columns,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        repetition = tl.load(penalties + 3 * slot)
        presence = tl.load(penalties + 3 * slot + 1)
        frequency = tl.load(penalties + 3 * slot + 2)
        if (repetition != 1) | (presence != 0) | (frequency != 0):
            drafts = tl.load(ahead + row)
            each = tl.cdiv(columns, PARTS)
            end = tl.minimum((part + 1) * each, columns)
            for first in range(part * each, end, BLOCK):
                column = first + tl.arange(0, BLOCK)
                inside = column < end
                count = tl.load(counts + slot * columns + column, mask=inside, other=0)
                for draft in range(0, drafts):
                    count += (column == tl.load(ids + row - draft)).to(tl.int32)
                output = count % PROMPT
                value = tl.load(logits + row * stride_row + column, mask=inside, other=0.0)
                value = tl.where(count > 0, tl.where(value > 0, value / repetition, value * repetition), value)
                value -= frequency * output.to(tl.float32) + presence * (output > 0).to(tl.float32)
                tl.store(logits + row * stride_row + column, value, mask=inside & (count > 0))


@triton.jit
def _bias(
    logits, slots, positions, biased, bias, until, stride_row, most, MOST: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    enter(PDL)
    row, each = tl.program_id(0).to(tl.int64), tl.arange(0, MOST)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        inside = each < most
        column = tl.load(biased + slot * most + each, mask=inside, other=-1)
        some = column >= 0
        at = logits + row * stride_row + column
        value = tl.load(at, mask=some, other=0.0) + tl.load(bias + slot * most + each, mask=some, other=0.0)
        excluded = tl.load(positions + row) < tl.load(until + slot * most + each, mask=some, other=0)
        tl.store(at, tl.where(excluded, float("-inf"), value), mask=some)


def edit_logits(logits: Tensor, edits: LogitEdits) -> None:
    (rows, columns), tables = logits.shape, edits.tables
    assert logits.stride(1) == 1 and all(tensor.is_contiguous() for tensor in (*edits[:-1], *tables))
    if not rows:
        return
    run(
        _penalise, (rows, PARTS), logits, edits.slots, edits.ids, edits.ahead, tables.counts, tables.penalties,
        logits.stride(0), columns, PARTS=PARTS, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    most = tables.biased.shape[1]
    run(
        _bias, (rows,), logits, edits.slots, edits.positions, tables.biased, tables.bias, tables.until,
        logits.stride(0), most, MOST=triton.next_power_of_2(most), num_warps=4,
    )  # fmt: skip
