"""The state of decoding requests on the device, one lane per request, and a whole step over all lanes as one function.

Drafting, verifying, sampling, accepting and observing read and change the lanes in place. No number of a step passes
through the host, so a step can be recorded as a whole and launched before the last one has been read. engine/overlap.py
decides which request has which lane, and when.

    a lane            token, the last committed id, at position length - 1: the anchor of the next step
    rows of a step    | token | draft 1 | ... | draft depth |      positions length - 1 .. length - 1 + depth
    after it          length grows by 1 + accepted; rows behind the accepted ones are overwritten by the next step
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sparkdraft.engine.proposer import Proposer, max_context
from sparkdraft.engine.runner import Runner
from sparkdraft.engine.sampler import Draws, Filters, ids_of, pick
from sparkdraft.kernels.view import AttentionView
from sparkdraft.models.blocks import Step
from sparkdraft.spec.drafter import Anchors, CommittedRows, Score

Accept = Callable[[Tensor], Tensor]  # samples int32 [seqs, 1 + depth] -> number of accepted drafts, int32 [seqs]


class StepKind(NamedTuple):
    """What a recording is made for; everything else is read on the device."""

    seqs: int
    depth: int
    draws: bool  # whether any lane samples; 'filters' says with which filters
    filters: Filters


@dataclass(frozen=True, slots=True)
class LaneRows:
    """Rows of all lanes, the same number per lane, from the anchor on."""

    ids: Tensor  # int32 [seqs * width], as are positions and slots
    positions: Tensor
    slots: Tensor  # -1 in an empty lane
    view: AttentionView


class Lanes:
    def __init__(self, runner: Runner, proposer: Proposer | None, ring: int, device: torch.device) -> None:
        """ring: the number of plain steps whose hidden states are kept for a drafter that does not see them at once."""
        plan = runner.plan
        self.runner, self.plan, self.device = runner, plan, device
        self.drafter = proposer.drafter if proposer else None
        self.chain = proposer is not None and proposer.chain
        self.accept: Accept | None = None  # for benchmarks: sets how many drafts are accepted, whatever was sampled
        lanes, max_blocks = plan.max_seqs, -(-plan.max_model_len // plan.block_size)

        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.token, self.length, self.observed, self.most = (integers(lanes) for _ in range(4))
        self.tables = integers(lanes, max_blocks)
        # The sampling parameters of each lane, as in sampler.Draws: temperature, min_p, top_p; top_k, seed.
        self.floats, self.integers = torch.zeros(3, lanes, device=device), integers(2, lanes, dtype=torch.int64)
        tapped = runner.taps.shape[1:]
        kept = (lanes, ring, *tapped) if self.drafter and not self.chain else (0,)
        self.ring = torch.zeros(kept, dtype=runner.taps.dtype, device=device)  # indexed by position modulo its size
        # The hidden state of each lane's last committed row, for a chain drafter.
        self.hidden = torch.zeros((lanes if self.chain else 0, *tapped), dtype=runner.taps.dtype, device=device)
        deepest = 1 + proposer.max_depth if proposer else 1
        self._numbers = torch.arange(max(lanes + 1, deepest, ring), dtype=torch.int32, device=device)
        self._columns = torch.arange(max_blocks, dtype=torch.int32, device=device)

    def step(self, kind: StepKind) -> Tensor:
        """One step. Returns int32 [seqs, depth + 2]: the sample of each row, then the number of accepted drafts."""
        seqs, depth, model, taps = kind.seqs, kind.depth, self.runner.model, None
        drafts = self._draft(kind) if depth else None
        rows = self._rows(seqs, 1 + depth, drafts)
        if self.runner.kv.begin:
            self.runner.kv.begin(rows.slots, rows.view)
        verify = Step(rows.ids, rows.positions, rows.slots, rows.view, self.runner.kv.layers)
        # Where the drafter drafts, it observes committed rows at once; rows of plain steps wait in the ring. A chain
        # drafter, which is cheap to run, observes all of them at once.
        at_once = depth > 0 or self.chain
        if self.drafter:
            taps = self.runner.taps[: seqs * (1 + depth)] if at_once else self.ring[:seqs]
        residual = model.forward(verify, self.runner.tap_layers, taps)
        samples = self._pick(
            kind, lambda best: model.likeliest(residual) if best else model.logits(residual), 1 + depth
        )
        given = self.accept(samples) if self.accept else None
        state = (t[:seqs] for t in (self.most, self.length, self.token, self.observed))
        result, kept_slots = model.ops.accept_drafts(drafts, samples, *state, rows.slots, given)
        if self.runner.kv.commit:
            alive = self.length[:seqs] > 0
            self.runner.kv.commit((result[:, -1] + 1).where(alive, 0))
        if self.drafter and at_once:
            assert taps is not None
            following = samples.flatten() if self.chain else None  # the id after a committed row is that row's sample
            self.drafter.observe(CommittedRows(taps, rows.positions, kept_slots, following))
            if self.chain:
                accepted = self._count(seqs) * (1 + depth) + result[:, -1]  # the row of the last accepted draft
                self.hidden[:seqs] = taps[accepted.long()]
        out: Tensor = result
        return out

    def catch_up(self, seqs: int) -> Tensor:
        """Let the drafter observe the plain rows that wait in the ring, of all lanes in one pass."""
        assert self.drafter and not self.chain
        size = self.ring.shape[1]
        last = self.length[:seqs].unsqueeze(1) - 1
        positions = last - size + self._count(size)  # int32 [seqs, ring]
        waits = positions >= self.observed[:seqs].unsqueeze(1)
        positions = positions.clamp(min=0)
        slots = self._slots(positions).where(waits, -1)
        index = (positions % size).long()[:, :, None, None].expand(-1, -1, *self.ring.shape[2:])
        hidden = self.ring[:seqs].gather(1, index).flatten(0, 1)
        self.drafter.observe(CommittedRows(hidden, positions.flatten(), slots.flatten()))
        self.observed[:seqs] = last.squeeze(1).clamp(min=0)
        return self.observed

    # ---- the parts

    def _count(self, number: int) -> Tensor:  # int32 [number]
        return self._numbers[:number]

    def _rows(self, seqs: int, width: int, drafts: Tensor | None) -> LaneRows:
        state, size = (self.length[:seqs], self.tables[:seqs], self.token[:seqs]), self.plan.block_size
        ids, positions, slots, context = self.runner.model.ops.make_rows(*state, drafts, width, size, 0)
        starts = self._count(seqs + 1) * width
        view = AttentionView(starts, context, self.tables[:seqs], width, self.plan.max_model_len)
        return LaneRows(ids, positions, slots, view)

    def _slots(self, positions: Tensor) -> Tensor:  # int32 [seqs, n] -> int32 [seqs, n]
        size, number = self.plan.block_size, self.tables.shape[1]
        inside = (positions // size).clamp(max=number - 1).long()
        slots = self.tables[: len(positions)].gather(1, inside) * size + positions % size
        return slots.where(positions < number * size, -1)

    def _draft(self, kind: StepKind) -> Tensor:  # int32 [seqs, depth]
        assert self.drafter
        seqs, plan = kind.seqs, self.plan
        length, tables, positions = self._seen(seqs)
        hidden = self.hidden[:seqs] if self.chain else None
        most = max_context(self.drafter, plan)
        anchors = Anchors(self.token[:seqs], length, tables, plan.block_size, most, positions, hidden)
        return self.drafter.propose(anchors, kind.depth, partial(self._pick, kind))

    def _seen(self, seqs: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Lengths, tables and positions of the lanes as their anchors have them: without the blocks that the drafter is
        not shown. The same as the host's Proposer._visible."""
        assert self.drafter
        length, tables, size = self.length[:seqs], self.tables[:seqs], self.plan.block_size
        sees = self.drafter.caps.sees
        if sees is None:
            return length, tables, None
        kept, column = sees.kept(size), self._columns[: -(-max_context(self.drafter, self.plan) // size) + 1]
        left_out = ((length - 1 - sees.last).div(size, rounding_mode="floor") - kept).clamp(min=0).unsqueeze(1)
        source = (column + left_out * (column >= kept)).clamp(max=tables.shape[1] - 1)
        return length - left_out.squeeze(1) * size, tables.gather(1, source.long()), (length - 1).clamp(min=0)

    def _pick(self, kind: StepKind, score: Score, each: int, drafted: int = 0, ids: Tensor | None = None) -> Tensor:
        """int32 [seqs, each]. spec.drafter.Pick within a step; it picks the target's own samples too."""
        if not kind.draws:
            return ids_of(score(True), ids).view(kind.seqs, each).int()
        lane = torch.arange(kind.seqs * each, device=self.device) // each
        positions = (self.length[: kind.seqs].unsqueeze(1) + drafted + self._count(each)).flatten()
        integers = torch.cat((self.integers.index_select(1, lane), positions.unsqueeze(0)))
        draws = Draws(self.floats.index_select(1, lane), integers, kind.filters, mixed=True)
        return pick(self.runner.model.ops, score(False), draws, ids).view(kind.seqs, each).int()
