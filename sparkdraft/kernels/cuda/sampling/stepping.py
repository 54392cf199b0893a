"""The bookkeeping of a decode step on the device: kernels/reference/stepping.py in two launches before the model and
one after it, where torch makes some eighty. A program takes one sequence. No time passes in Triton's interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from sparkdraft.kernels.cuda.elementwise import run
from sparkdraft.kernels.cuda.runtime.pdl import enter
from sparkdraft.kernels.ops import LEVELS, MOST_SURE, WIDEST, DraftTerms, Ends, PackedRows, SampledRows
from sparkdraft.kernels.reference.stepping import MOST_NANOSECONDS

_WIDEST, _MOST_SURE, _LEVELS = tl.constexpr(WIDEST), tl.constexpr(MOST_SURE), tl.constexpr(LEVELS)
TILE = 64  # drafts that are compared with all borders at once
_MOST_NANOSECONDS = tl.constexpr(MOST_NANOSECONDS)


@triton.jit
def _survivals(
    gaps, most, temperature, fits, fair, stride_gaps, stride_fits, seq, inside,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """float32 [seqs, BLOCK]: 0 past the drafts of a sequence, and in one whose drafts are all verified."""
    column = tl.arange(0, BLOCK)
    is_draft = inside[:, None] & (column < DEPTH)[None, :]
    gap = tl.load(gaps + seq.to(tl.int64)[:, None] * stride_gaps + column[None, :], mask=is_draft, other=0.0)
    gap = tl.where(gap == gap, tl.minimum(tl.maximum(gap, -_WIDEST), _WIDEST), -_WIDEST)
    fit = fits + tl.where(tl.load(temperature + seq, mask=inside, other=0.0) > 0, stride_fits, 0)
    own = tl.load(fit[:, None] + 2 + column[None, :], mask=is_draft, other=0.0)
    score = tl.load(fit)[:, None] * gap + tl.load(fit + 1)[:, None] + own
    share = tl.load(fair + seq, mask=inside, other=-1.0)
    chance = tl.maximum(tl.minimum(share[:, None] / (1.0 + tl.exp(-score)), _MOST_SURE), 0.0)
    allowed = tl.load(most + seq, mask=inside, other=0)
    return tl.where(is_draft & (column[None, :] < allowed[:, None]), tl.cumprod(chance, 1), 0.0)


@triton.jit(do_not_specialize=["most", "temperature", "fits", "fair", "worth", "stride_gaps", "stride_fits", "seqs"])
def _admit_drafts(
    gaps, most, temperature, fits, fair, worth, out, stride_gaps, stride_fits, seqs,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the border is one of the whole batch."""
    enter(PDL)
    border = (1 + tl.arange(0, _LEVELS)).to(tl.float32) / _LEVELS
    number = tl.zeros([_LEVELS], tl.int32)
    total = tl.zeros([_LEVELS], tl.float32)
    for first in range(0, seqs, BLOCK_S):
        seq = first + tl.arange(0, BLOCK_S)
        survival = _survivals(
            gaps, most, temperature, fits, fair, stride_gaps, stride_fits, seq, seq < seqs, DEPTH, BLOCK
        )
        flat = tl.reshape(survival, [BLOCK_S * BLOCK, 1])
        reaches = flat >= border[None, :]
        number += tl.sum(reaches.to(tl.int32), 0)
        total += tl.sum(tl.where(reaches, flat, 0.0), 0)
    gain = total - tl.load(worth + number)
    chosen = tl.max(tl.where(gain == tl.max(gain, 0), border, 0.0), 0)
    for first in range(0, seqs, BLOCK_S):
        seq = first + tl.arange(0, BLOCK_S)
        survival = _survivals(
            gaps, most, temperature, fits, fair, stride_gaps, stride_fits, seq, seq < seqs, DEPTH, BLOCK
        )
        kept = tl.sum((survival >= chosen).to(tl.int32), 1)
        whole = tl.load(fair + seq, mask=seq < seqs, other=0.0) < 0
        tl.store(out + seq, tl.where(whole, tl.load(most + seq, mask=seq < seqs, other=0), kept), mask=seq < seqs)


def admit_drafts(gaps: Tensor, most: Tensor, temperature: Tensor, terms: DraftTerms) -> Tensor:
    seqs, depth = gaps.shape
    assert all(t.dtype == torch.float32 and t.stride(-1) == 1 for t in (gaps, temperature, *terms)), terms
    assert len(most) == len(temperature) == len(terms.fair) == seqs and most.is_contiguous(), (seqs, most.shape)
    assert terms.fits.shape[1] >= 2 + depth and len(terms.worth) > seqs * depth, (terms.fits.shape, terms.worth.shape)
    out = torch.empty((seqs,), dtype=torch.int32, device=gaps.device)
    block = triton.next_power_of_2(depth)
    if seqs:
        run(
            _admit_drafts, (1,), gaps, most, temperature, *terms, out, gaps.stride(0), terms.fits.stride(0), seqs,
            DEPTH=depth, BLOCK=block, BLOCK_S=max(TILE // block, 1), num_warps=4,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["length", "token", "first_position", "fill", "num_blocks"])
def _make_rows(
    length, tables, token, first_position, ids, positions, slots, context_len, stride_table, fill, num_blocks,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    seq = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    written = tl.load(length + seq)
    place = tl.maximum(written - 1 + column, 0)
    position = place
    if FIRST:
        position = tl.load(first_position + seq) + column
    slot = _slot(tables + seq.to(tl.int64) * stride_table, place, inside & (written > 0), num_blocks, BLOCK_SIZE)
    rest = tl.full([BLOCK], 0, tl.int32) + fill
    target = seq * WIDTH + column
    tl.store(ids + target, tl.where(column == 0, tl.load(token + seq), rest), mask=inside)
    tl.store(positions + target, position, mask=inside)
    tl.store(slots + target, slot, mask=inside)
    seen = tl.minimum(written - 1 + WIDTH, num_blocks * BLOCK_SIZE)
    tl.store(context_len + seq, tl.where(written > 0, seen, 0))


@triton.jit
def _slot(table, place, wanted, num_blocks, BLOCK_SIZE: tl.constexpr):
    block = place // BLOCK_SIZE
    kept = wanted & (block < num_blocks)
    return tl.where(kept, tl.load(table + block, mask=kept, other=0) * BLOCK_SIZE + place % BLOCK_SIZE, -1)


def make_rows(
    length: Tensor, tables: Tensor, token: Tensor, width: int, block_size: int, fill: int, first: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    seqs, device = length.shape[0], length.device
    assert tables.shape[0] == token.shape[0] == seqs and tables.stride(1) == 1, (tables.shape, token.shape)
    ids, positions, slots = (torch.empty((seqs * width,), dtype=torch.int32, device=device) for _ in range(3))
    context_len = torch.empty((seqs,), dtype=torch.int32, device=device)
    if seqs:
        run(
            _make_rows, (seqs,), length, tables, token, first, ids, positions, slots, context_len,
            tables.stride(0), fill, tables.shape[1], WIDTH=width, BLOCK_SIZE=block_size, FIRST=first is not None,
            BLOCK=triton.next_power_of_2(width), num_warps=1,
        )  # fmt: skip
    return ids, positions, slots, context_len


@triton.jit(
    do_not_specialize=["length", "token", "drafts", "kept", "stamp", "stride_drafts", "num_blocks", "seqs", "room"]
)
def _pack_rows(
    length, tables, token, drafts, kept, stamp, ids, positions, slots, seq_of, context_len, query_start, places,
    stride_table, stride_drafts, num_blocks, seqs, room,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr,
    TIMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One sequence: every program counts the rows of all."""
    enter(PDL)
    seq = tl.program_id(0)
    each = tl.arange(0, BLOCK_S)
    theirs = tl.minimum(tl.load(kept + each, mask=each < seqs, other=0), WIDTH - 1) + 1
    theirs = tl.where(tl.load(length + each, mask=each < seqs, other=0) > 0, theirs, 0)
    total, start = tl.sum(theirs, 0), tl.sum(tl.where(each < seq, theirs, 0), 0)
    rows = tl.sum(tl.where(each == seq, theirs, 0), 0)

    column = tl.arange(0, BLOCK)
    inside, live = column < WIDTH, column < rows
    target = tl.where(live, start + column, total + seq * WIDTH - start + column - rows)
    written = tl.load(length + seq)
    place = tl.maximum(written - 1 + column, 0)
    slot = _slot(tables + seq.to(tl.int64) * stride_table, place, live, num_blocks, BLOCK_SIZE)
    value = tl.zeros([BLOCK], tl.int32) + tl.load(token + seq)
    if WIDTH > 1:
        draft = tl.load(drafts + seq.to(tl.int64) * stride_drafts + column - 1, mask=inside & (column > 0), other=0)
        value = tl.where(column == 0, value, draft.to(tl.int32))
    has_row = inside & (target < room)
    tl.store(ids + target, tl.where(live, value, 0), mask=has_row)
    tl.store(positions + target, tl.where(live, place, 0), mask=has_row)
    tl.store(slots + target, slot, mask=has_row)
    tl.store(seq_of + target, tl.zeros([BLOCK], tl.int32) + seq, mask=has_row)
    tl.store(places + seq * WIDTH + column, target, mask=inside)
    tl.store(context_len + seq, tl.where(written > 0, written - 1 + rows, 0))
    tl.store(query_start + seq, start)
    if seq == seqs - 1:
        tl.store(query_start + seqs, total)
        if TIMED:
            tl.store(stamp, globaltimer())


def pack_rows(
    length: Tensor,
    tables: Tensor,
    token: Tensor,
    drafts: Tensor | None,
    kept: Tensor,
    block_size: int,
    stamp: Tensor,
    room: int | None = None,
) -> PackedRows:
    seqs, device, width = length.shape[0], length.device, 1 if drafts is None else 1 + drafts.shape[1]
    room = seqs * width if room is None else room
    assert tables.shape[0] == seqs and tables.stride(1) == 1 and room <= seqs * width, (tables.shape, seqs, room)
    assert all(len(t) == seqs and t.is_contiguous() for t in (length, token, kept)), (seqs, kept.shape)
    assert width == 1 or (drafts is not None and drafts.shape[0] == seqs and drafts.stride(1) == 1), drafts

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    ids, positions, slots, seq_of = (integers(room) for _ in range(4))
    rows = PackedRows(ids, positions, slots, seq_of, integers(seqs), integers(seqs + 1), integers(seqs, width))
    if not seqs:
        rows.query_start.zero_()
        return rows
    run(
        _pack_rows, (seqs,), length, tables, token, drafts if width > 1 else None, kept, stamp, *rows, tables.stride(0),
        drafts.stride(0) if drafts is not None and width > 1 else 0, tables.shape[1], seqs, room,
        WIDTH=width, BLOCK_SIZE=block_size, BLOCK=triton.next_power_of_2(width), BLOCK_S=triton.next_power_of_2(seqs),
        TIMED=device.type != "cpu", num_warps=1,
    )  # fmt: skip
    return rows


@triton.jit(do_not_specialize=["kept", "length", "token", "observed", "stamp", "stride_drafts", "room"])
def _accept_drafts(
    samples, drafts, accepted, kept, length, token, observed, slots, places, stamp, result, kept_slots, stride_drafts,
    room, DEPTH: tl.constexpr, GIVEN: tl.constexpr, BLOCK: tl.constexpr, TIMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    seq = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column <= DEPTH
    place = tl.load(places + seq * (DEPTH + 1) + column, mask=inside, other=0)
    has_row = inside & (place < room)
    sample = tl.load(samples + place, mask=has_row, other=0).to(tl.int32)
    if GIVEN:
        count = tl.load(accepted + seq).to(tl.int32)
    elif DEPTH > 0:
        is_draft = column < DEPTH
        draft = tl.load(drafts + seq.to(tl.int64) * stride_drafts + column, mask=is_draft, other=0).to(tl.int32)
        count = tl.min(tl.where(is_draft & (draft != sample), column, DEPTH), 0)  # the first that is not the sample
    else:
        count = 0
    verified = tl.minimum(tl.load(kept + seq), DEPTH)
    count = tl.minimum(count, verified)
    written = tl.load(length + seq)
    alive = written > 0
    slot = tl.load(slots + place, mask=has_row, other=-1)
    tl.store(kept_slots + place, tl.where(column <= count, slot, -1), mask=has_row)
    said = result + seq * (DEPTH + 4)
    tl.store(said + column, sample, mask=inside)
    tl.store(said + DEPTH + 1, count)
    tl.store(said + DEPTH + 2, verified)
    passed = tl.full([], 0, tl.int64)
    if TIMED:
        passed = tl.minimum(globaltimer() - tl.load(stamp), _MOST_NANOSECONDS)
    tl.store(said + DEPTH + 3, passed.to(tl.int32))
    tl.store(token + seq, tl.sum(tl.where(column == count, sample, 0), 0))
    tl.store(length + seq, tl.where(alive, written + count + 1, written))
    if DEPTH > 0:
        tl.store(observed + seq, tl.where(alive, written + count, 0))


def accept_drafts(
    drafts: Tensor | None,
    samples: Tensor,
    kept: Tensor,
    length: Tensor,
    token: Tensor,
    observed: Tensor,
    rows: PackedRows,
    stamp: Tensor,
    accepted: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    seqs, depth, device = rows.places.shape[0], rows.places.shape[1] - 1, samples.device
    assert samples.shape == rows.slots.shape and samples.is_contiguous(), (samples.shape, rows.slots.shape)
    assert not depth or (drafts is not None and drafts.shape == (seqs, depth) and drafts.stride(1) == 1), drafts
    assert all(len(t) == seqs and t.is_contiguous() for t in (kept, length, token, observed)), (seqs, length.shape)
    result = torch.empty((seqs, depth + 4), dtype=torch.int32, device=device)
    kept_slots = torch.empty_like(rows.slots)
    if seqs:
        run(
            _accept_drafts, (seqs,), samples, drafts if depth else None, accepted,
            kept, length, token, observed, rows.slots, rows.places, stamp, result, kept_slots,
            drafts.stride(0) if depth and drafts is not None else 0, len(rows.slots),
            DEPTH=depth, GIVEN=accepted is not None, BLOCK=triton.next_power_of_2(depth + 1),
            TIMED=device.type != "cpu", num_warps=1,
        )  # fmt: skip
    return result, kept_slots


@triton.jit(do_not_specialize=["end_row", "end_positions", "length", "edit_slots", "num_ends", "num_rows"])
def _sampled_rows(
    end_slot, end_row, end_positions, seq_of, positions, ids, slots, length, edit_slots, out, num_ends, num_rows,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, total = number - num_ends, num_ends + num_rows
    is_end, is_row = number < num_ends, (row >= 0) & (row < num_rows)
    own = tl.load(seq_of + row, mask=is_row, other=-1)
    position, id_ = tl.load(positions + row, mask=is_row, other=0), tl.load(ids + row, mask=is_row, other=0)
    ahead = tl.where(is_row, position - (tl.load(length + own, mask=is_row, other=0) - 1), 0)
    own = tl.where(is_row & (tl.load(slots + row, mask=is_row, other=-1) >= 0), own, -1)
    own = tl.where(is_end, tl.load(end_slot + number, mask=is_end, other=0).to(tl.int32), own)
    last = tl.load(end_row + number, mask=is_end, other=0)
    position = tl.where(is_end, tl.load(end_positions + last, mask=is_end, other=0), position)
    edited = tl.load(edit_slots + own, mask=own >= 0, other=-1)
    inside = number < total
    tl.store(out + number, own, mask=inside)
    tl.store(out + total + number, position + 1, mask=inside)
    tl.store(out + 2 * total + number, edited, mask=inside)
    tl.store(out + 3 * total + number, id_, mask=inside)
    tl.store(out + 4 * total + number, ahead, mask=inside)


def sampled_rows(rows: PackedRows | None, ends: Ends | None, length: Tensor, edit_slots: Tensor) -> SampledRows:
    num_ends, num_rows = len(ends.slot) if ends else 0, len(rows.seq_of) if rows else 0
    assert length.is_contiguous() and edit_slots.is_contiguous()
    out = torch.empty((5, num_ends + num_rows), dtype=torch.int32, device=length.device)
    # What is not there is not read.
    of_ends = (ends.slot, ends.row, ends.positions) if ends else (length,) * 3
    of_rows = (rows.seq_of, rows.positions, rows.ids, rows.slots) if rows else (length,) * 4
    assert all(each.is_contiguous() for each in (*of_ends, *of_rows))
    run(
        _sampled_rows, (triton.cdiv(num_ends + num_rows, 128),), *of_ends, *of_rows, length, edit_slots, out,
        num_ends, num_rows, BLOCK=128, num_warps=4,
    )  # fmt: skip
    return SampledRows(*out)
