"""Decode steps that the device prepares by itself (engine/slots.py).

Each sequence drafts, and of all drafts the likeliest to survive are verified. Their tokens lie side by side at the
front of the step. Behind them is padding: it belongs to no sequence and has slot -1, so no kernel writes, attends or
routes for it.

    columns    | seq 0: token d1 d2 d3 | seq 1: token d1 d2 d3 |       width 4; seq 0 keeps 1 draft, seq 1 keeps 2
    rows       | token d1 | token d1 d2 | padding |                    query_start 0, 2, 5; room 6: one row of padding
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from sparkdraft.kernels.ops import LEVELS, MOST_SURE, WIDEST, DraftTerms, Ends, PackedRows, SampledRows

MOST_NANOSECONDS = 2**31 - 1


def admit_drafts(gaps: Tensor, most: Tensor, temperature: Tensor, terms: DraftTerms) -> Tensor:
    """All drafts whose survival reaches a border are kept: the highest border at which the survivals kept exceed their
    cost by most, or none if nothing does. speculation/budget.py does the same on the host."""
    depth, device = gaps.shape[1], gaps.device
    slope, base, own = (part.squeeze(-1) for part in terms.fits.split((1, 1, terms.fits.shape[1] - 2), dim=1))
    drawn = (temperature > 0).long()
    gap = gaps.nan_to_num(-WIDEST).clamp(-WIDEST, WIDEST)
    score = slope[drawn].unsqueeze(1) * gap + base[drawn].unsqueeze(1) + own.view(2, -1)[drawn, :depth]
    survival = (terms.fair.unsqueeze(1) * torch.sigmoid(score)).clamp(0.0, MOST_SURE).cumprod(1)
    survival = survival.where(torch.arange(depth, device=device) < most.unsqueeze(1), 0.0)
    borders = torch.arange(LEVELS, 0, -1, device=device) / LEVELS  # nothing reaches the first
    reaches = survival.flatten() >= borders.unsqueeze(1)
    gain = survival.flatten().where(reaches, 0.0).sum(1) - terms.worth[reaches.sum(1)]
    kept = (survival >= borders[gain.argmax()]).sum(1)
    return kept.where(terms.fair >= 0, most).int()


def make_rows(
    length: Tensor, tables: Tensor, token: Tensor, width: int, block_size: int, fill: int, first: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """An empty sequence's rows, and rows past the last block of the tables, have slot -1. An empty sequence sees no
    keys, and no sequence sees more than its blocks hold. Where the tables leave out blocks, 'length' counts the ids in
    those that are left, and 'first' is the position of the last."""
    alive, count = length > 0, torch.arange(width, dtype=torch.int32, device=length.device)
    ids = torch.cat([token.unsqueeze(1), token.new_full((len(token), width - 1), fill)], 1)
    places, slots = _slots(length, tables, count, block_size)
    positions = places if first is None else first.unsqueeze(1) + count
    context = (length - 1 + width).clamp(max=tables.shape[1] * block_size).where(alive, 0)
    return ids.flatten(), positions.flatten(), slots.flatten(), context


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
    """Padding has id 0 and position 0."""
    stamp.fill_(time.perf_counter_ns())
    seqs, device = len(length), length.device
    width = 1 if drafts is None else 1 + drafts.shape[1]
    count, seq = (torch.arange(n, dtype=torch.int32, device=device) for n in (width, seqs))
    rows = (1 + kept.clamp(max=width - 1)).where(length > 0, 0).int()
    ends, live = rows.cumsum(0, dtype=torch.int32), count < rows.unsqueeze(1)
    starts = (ends - rows).unsqueeze(1)
    behind = rows.sum() + seq.unsqueeze(1) * width - starts + count - rows.unsqueeze(1)
    places = torch.where(live, starts + count, behind).int()
    ids = token.unsqueeze(1) if drafts is None else torch.cat([token.unsqueeze(1), drafts.int()], 1)
    positions, slots = _slots(length, tables, count, block_size)

    def packed(values: Tensor) -> Tensor:
        return torch.empty_like(values.flatten()).scatter_(0, places.flatten().long(), values.flatten())[:room]

    context = (length - 1 + rows).where(length > 0, 0)
    query_start = torch.cat([ends.new_zeros(1), ends])
    seq_of = seq.unsqueeze(1).expand(-1, width).contiguous()
    of_live = packed(ids.where(live, 0)), packed(positions.where(live, 0)), packed(slots.where(live, -1))
    return PackedRows(*of_live, packed(seq_of), context, query_start, places)


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
    """A sequence's last id becomes the sample after its last accepted draft; an empty one stays empty. At depth 0
    nothing is drafted, and 'observed' stays."""
    seqs, width = rows.places.shape
    places = rows.places.flatten().long()
    inside, room = places.clamp(max=len(samples) - 1), len(samples)
    samples = samples.int()[inside].where(places < room, 0).view(seqs, width)
    if accepted is None:
        same = samples[:, :0] if drafts is None else (drafts == samples[:, :-1]).int()
        accepted = same.cumprod(1).sum(1)
    kept = kept.clamp(max=width - 1)
    count, alive = torch.minimum(accepted.int(), kept), length > 0
    committed = torch.arange(width, device=samples.device) <= count.unsqueeze(1)
    kept_slots = rows.slots.new_full((seqs * width,), -1)
    kept_slots[places] = rows.slots[inside].where(committed.flatten(), -1)
    if width > 1:
        observed.copy_((length + count).where(alive, 0))
    token.copy_(samples.gather(1, count.long().unsqueeze(1)).squeeze(1))
    length += (count + 1).where(alive, 0)
    passed = (time.perf_counter_ns() - stamp).clamp(max=MOST_NANOSECONDS).int().expand(seqs)
    return torch.cat([samples, torch.stack((count, kept, passed), 1)], 1), kept_slots[:room]


def sampled_rows(rows: PackedRows | None, ends: Ends | None, length: Tensor, edit_slots: Tensor) -> SampledRows:
    parts = []
    if ends is not None:
        none = torch.zeros_like(ends.slot)
        parts.append((ends.slot, ends.positions[ends.row] + 1, edit_slots[ends.slot], none, none))
    if rows is not None:
        slot, alive = rows.seq_of.long(), rows.slots >= 0
        own, edited = slot.where(alive, -1), edit_slots[slot].where(alive, -1)
        parts.append((own, rows.positions + 1, edited, rows.ids, rows.positions - (length[slot] - 1)))
    return SampledRows(*(torch.cat(each).int() for each in zip(*parts, strict=True)))


def _slots(length: Tensor, tables: Tensor, count: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Positions of a sequence's columns, and their slots; -1 in an empty sequence and past the blocks."""
    places = (length.unsqueeze(1) - 1 + count).clamp(min=0)
    block = places // block_size
    numbers = tables.gather(1, block.clamp(max=tables.shape[1] - 1).long())
    inside = (length > 0).unsqueeze(1) & (block < tables.shape[1])
    return places, (numbers * block_size + places % block_size).where(inside, -1)
