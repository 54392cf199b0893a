"""The bookkeeping of a decode step on the device: where its rows stand, and what became of its drafts.

A step has the same number of rows for each lane (engine/lanes.py), a handful of integers: one program takes one lane,
so that what torch does in some thirty launches is one before the model and one after it. Meaning and names are those of
kernels/reference.py; what a lane is, and which request has it, is left to the engine.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkdraft.kernels.cuda.elementwise import run
from sparkdraft.kernels.cuda.pdl import enter


@triton.jit(do_not_specialize=["length", "token", "drafts", "first_position", "stride_drafts", "fill", "num_blocks"])
def _make_rows(
    length, tables, token, drafts, first_position, ids, positions, slots, context_len, stride_table, stride_drafts,
    fill, num_blocks, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, DRAFTS: tl.constexpr, FIRST: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    lane = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    written = tl.load(length + lane)
    place = tl.maximum(written - 1 + column, 0)
    position = place
    if FIRST:
        position = tl.load(first_position + lane) + column
    block = place // BLOCK_SIZE
    kept = inside & (written > 0) & (block < num_blocks)
    number = tl.load(tables + lane.to(tl.int64) * stride_table + block, mask=kept, other=0)
    slot = tl.where(kept, number * BLOCK_SIZE + place % BLOCK_SIZE, -1)
    first = tl.load(token + lane)
    if DRAFTS:
        rest = tl.load(drafts + lane.to(tl.int64) * stride_drafts + column - 1, mask=inside & (column > 0), other=0)
        rest = rest.to(tl.int32)
    else:
        rest = tl.full([BLOCK], 0, tl.int32) + fill
    target = lane * WIDTH + column
    tl.store(ids + target, tl.where(column == 0, first, rest), mask=inside)
    tl.store(positions + target, position, mask=inside)
    tl.store(slots + target, slot, mask=inside)
    tl.store(context_len + lane, tl.where(written > 0, written - 1 + WIDTH, 0))


def make_rows(
    length: Tensor,  # int32 [seqs]: committed ids of each lane; 0 where it is empty
    tables: Tensor,  # int32 [seqs, max_blocks]
    token: Tensor,  # int32 [seqs]: the last committed id
    drafts: Tensor | None,  # integers [seqs, width - 1]
    width: int,
    block_size: int,
    fill: int,
    first: Tensor | None = None,  # int32 [seqs]: the position of 'token'; None: length - 1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # int32 [seqs * width] three times, int32 [seqs]
    """Ids, positions and slots of each lane's rows from its last id on, and the keys its last row sees.

    What follows the id are the drafts, or 'fill' where there are none. An empty lane's rows, and rows past the last
    block of the tables, have slot -1; an empty lane sees no keys. Where the tables leave out some of a lane's blocks,
    'length' counts the ids in those that are left, and 'first' says at which position the last of them is.
    """
    seqs, device = length.shape[0], length.device
    assert tables.shape[0] == token.shape[0] == seqs and tables.stride(1) == 1, (tables.shape, token.shape)
    assert drafts is None or (drafts.shape == (seqs, width - 1) and drafts.stride(1) == 1), (drafts, width)
    ids, positions, slots = (torch.empty((seqs * width,), dtype=torch.int32, device=device) for _ in range(3))
    context_len = torch.empty((seqs,), dtype=torch.int32, device=device)
    if seqs:
        run(
            _make_rows, (seqs,), length, tables, token, drafts, first, ids, positions, slots, context_len,
            tables.stride(0), 0 if drafts is None else drafts.stride(0), fill, tables.shape[1],
            WIDTH=width, BLOCK_SIZE=block_size, DRAFTS=drafts is not None and width > 1, FIRST=first is not None,
            BLOCK=triton.next_power_of_2(width), num_warps=1,
        )  # fmt: skip
    return ids, positions, slots, context_len


@triton.jit(do_not_specialize=["most", "length", "token", "observed", "stride_drafts", "stride_samples"])
def _accept_drafts(
    samples, drafts, accepted, most, length, token, observed, slots, result, kept_slots, stride_drafts, stride_samples,
    DEPTH: tl.constexpr, GIVEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    lane = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column <= DEPTH
    sample = tl.load(samples + lane.to(tl.int64) * stride_samples + column, mask=inside, other=0).to(tl.int32)
    if GIVEN:
        count = tl.load(accepted + lane).to(tl.int32)
    elif DEPTH > 0:
        is_draft = column < DEPTH
        draft = tl.load(drafts + lane.to(tl.int64) * stride_drafts + column, mask=is_draft, other=0).to(tl.int32)
        count = tl.min(tl.where(is_draft & (draft != sample), column, DEPTH), 0)  # the first that is not the sample
    else:
        count = 0
    count = tl.minimum(count, tl.load(most + lane))
    written = tl.load(length + lane)
    alive = written > 0
    slot = tl.load(slots + lane * (DEPTH + 1) + column, mask=inside, other=-1)
    tl.store(kept_slots + lane * (DEPTH + 1) + column, tl.where(column <= count, slot, -1), mask=inside)
    tl.store(result + lane * (DEPTH + 2) + column, sample, mask=inside)
    tl.store(result + lane * (DEPTH + 2) + DEPTH + 1, count)
    tl.store(token + lane, tl.sum(tl.where(column == count, sample, 0), 0))
    tl.store(length + lane, tl.where(alive, written + count + 1, written))
    if DEPTH > 0:
        tl.store(observed + lane, tl.where(alive, written + count, 0))


def accept_drafts(
    drafts: Tensor | None,  # integers [seqs, depth]; None: depth 0
    samples: Tensor,  # integers [seqs, depth + 1], the target's own in each row
    most: Tensor,  # int32 [seqs]: drafts that a lane takes at most
    length: Tensor,  # int32 [seqs], changed in place, as are the next two
    token: Tensor,
    observed: Tensor,  # positions that the drafter has seen
    slots: Tensor,  # int32 [seqs * (depth + 1)], of the step's rows
    accepted: Tensor | None = None,  # integers [seqs]: how many drafts stand, where that is not what the samples say
) -> tuple[Tensor, Tensor]:  # int32 [seqs, depth + 2], int32 [seqs * (depth + 1)]
    """Accept each draft that, like all before it, equals the sample in its place, and move the lanes on.

    Gives what was sampled and how many drafts stand, and the slots of the rows that are now committed, -1 for others.
    A lane's last id becomes the sample after its last draft that stands; an empty lane stays empty. At depth 0 nothing
    is drafted, so 'observed' stays too.
    """
    seqs, depth, device = samples.shape[0], samples.shape[1] - 1, samples.device
    assert samples.stride(1) == 1 and slots.is_contiguous() and len(slots) == seqs * (depth + 1), slots.shape
    assert not depth or (drafts is not None and drafts.shape == (seqs, depth) and drafts.stride(1) == 1), drafts
    assert all(len(t) == seqs and t.is_contiguous() for t in (most, length, token, observed)), (seqs, length.shape)
    result = torch.empty((seqs, depth + 2), dtype=torch.int32, device=device)
    kept_slots = torch.empty((seqs * (depth + 1),), dtype=torch.int32, device=device)
    if seqs:
        run(
            _accept_drafts, (seqs,), samples, drafts if depth else None, accepted,
            most, length, token, observed, slots, result, kept_slots,
            drafts.stride(0) if depth and drafts is not None else 0, samples.stride(0),
            DEPTH=depth, GIVEN=accepted is not None, BLOCK=triton.next_power_of_2(depth + 1), num_warps=1,
        )  # fmt: skip
    return result, kept_slots
