"""Penalties, biases and excluded ids in one launch over the rows that have some; the others cost a look at their slot.
What a step commits is counted by another."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparkdraft.kernels.cuda.elementwise import run
from sparkdraft.kernels.cuda.runtime.pdl import enter
from sparkdraft.kernels.ops import IN_PROMPT, LogitEdits

PARTS, BLOCK = 16, 2048  # of a row; columns that a program changes at a time
PROMPT = tl.constexpr(IN_PROMPT)


@triton.jit
def _penalise(
    logits, ids, counts, drafts, repetition, presence, frequency, first, end, BLOCK: tl.constexpr
):  # fmt: skip
    for start in range(first, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < end
        count = tl.load(counts + column, mask=inside, other=0)
        for draft in range(0, drafts):
            count += (column == tl.load(ids - draft)).to(tl.int32)
        output = count % PROMPT
        written = inside & (count > 0)  # few: the others' logits are not read
        value = tl.load(logits + column, mask=written, other=0.0)
        value = tl.where(value > 0, value / repetition, value * repetition)
        value -= frequency * output.to(tl.float32) + presence * (output > 0).to(tl.float32)
        tl.store(logits + column, value, mask=written)


@triton.jit
def _bias(logits, position, biased, bias, until, first, end, most, MOST: tl.constexpr):
    each = tl.arange(0, MOST)
    column = tl.load(biased + each, mask=each < most, other=-1)
    some = (column >= first) & (column < end)
    value = tl.load(logits + column, mask=some, other=0.0) + tl.load(bias + each, mask=some, other=0.0)
    excluded = position < tl.load(until + each, mask=some, other=0)
    tl.store(logits + column, tl.where(excluded, float("-inf"), value), mask=some)


@triton.jit(do_not_specialize=["slots", "positions", "ids", "ahead", "columns"])
def _edit(
    logits, slots, positions, ids, ahead, counts, penalties, biased, bias, until, stride_row, columns, most,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One part of one row."""
    enter(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        logits += row * stride_row
        each = tl.cdiv(columns, PARTS)
        first, end = part * each, tl.minimum((part + 1) * each, columns)
        repetition = tl.load(penalties + 3 * slot)
        presence = tl.load(penalties + 3 * slot + 1)
        frequency = tl.load(penalties + 3 * slot + 2)
        if (repetition != 1) | (presence != 0) | (frequency != 0):
            drafts, counts_here = tl.load(ahead + row), counts + slot * columns
            _penalise(logits, ids + row, counts_here, drafts, repetition, presence, frequency, first, end, BLOCK)
            tl.debug_barrier()  # a biased logit may have been penalised by another thread
        at = slot * most
        _bias(logits, tl.load(positions + row), biased + at, bias + at, until + at, first, end, most, MOST)


def edit_logits(logits: Tensor, edits: LogitEdits) -> None:
    (rows, columns), tables = logits.shape, edits.tables
    assert logits.stride(1) == 1 and all(tensor.is_contiguous() for tensor in (*edits[:-1], *tables))
    if rows:
        most = tables.biased.shape[1]
        run(
            _edit, (rows, PARTS), logits, *edits[:-1], *tables, logits.stride(0), columns, most,
            PARTS=PARTS, BLOCK=BLOCK, MOST=triton.next_power_of_2(most), num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["edit_slots", "samples", "accepted", "columns", "stride_samples", "stride_accepted"])
def _count_ids(
    counts, edit_slots, samples, accepted, columns, stride_samples, stride_accepted,
    WIDTH: tl.constexpr, GIVEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    seq, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    slot, last = tl.load(edit_slots + seq).to(tl.int64), 0
    if GIVEN:
        last = tl.load(accepted + seq * stride_accepted).to(tl.int32)
    wanted = (slot >= 0) & (column <= last) & (column < WIDTH)
    sample = tl.load(samples + seq * stride_samples + column, mask=wanted, other=0)
    tl.atomic_add(counts + slot * columns + sample, 1, mask=wanted, sem="relaxed")


def count_ids(counts: Tensor, edit_slots: Tensor, samples: Tensor, accepted: Tensor | None = None) -> None:
    seqs, width = samples.shape
    assert counts.is_contiguous() and edit_slots.is_contiguous() and samples.stride(1) == 1, samples.stride()
    assert len(edit_slots) == seqs and (accepted is None or len(accepted) == seqs), (seqs, edit_slots.shape)
    if seqs:
        run(
            _count_ids, (seqs,), counts, edit_slots, samples, accepted, counts.shape[1], samples.stride(0),
            accepted.stride(0) if accepted is not None else 0,
            WIDTH=width, GIVEN=accepted is not None, BLOCK=triton.next_power_of_2(width), num_warps=1,
        )  # fmt: skip
