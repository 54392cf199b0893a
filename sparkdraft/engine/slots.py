"""The state of decoding requests on the device, one slot per request, and a whole step over all slots as one function.

Drafting, cutting, verifying, sampling, accepting and observing read and change the slots in place. No number of a step
passes through the host, so a step can be captured as a whole and launched before the last one has been read.
engine/overlap.py decides which request has which slot, and when.

    a slot            token, the last committed id, at position length - 1: the anchor of the next step
    rows of a step    | token | draft 1 | ... | draft kept |      positions length - 1 .. length - 1 + kept
    after it          length grows by 1 + accepted; rows behind the accepted ones are overwritten by the next step

The number of rows of a captured step is fixed, and how many of them are alive is decided on the device: a slot keeps as
many drafts as the host asked for, or fewer where the drafter is not sure enough of them (`cut`). Rows that are not kept
are dead (kernels/reference/stepping.py): they write nothing, attend to nothing and reach no expert.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sparkdraft.drafters.base import Anchors, CommittedRows, Score
from sparkdraft.engine.accept import NONE
from sparkdraft.engine.proposer import Proposer, max_context
from sparkdraft.engine.runner import Runner
from sparkdraft.engine.sampler import Draws, EditTables, ids_of, pick, pick_sure
from sparkdraft.kernels.ops import AttentionView, DraftTerms, LogitEdits, PackedRows
from sparkdraft.models.common.blocks import Step


class Given(Protocol):
    """For benchmarks: what becomes of drafts, whatever was drafted and sampled."""

    def gaps(self, seqs: int, depth: int) -> Tensor:
        """float32 [seqs, depth]: how sure the drafter is said to be."""

    def accepted(self, seqs: int, depth: int) -> Tensor:
        """integers [seqs]: the number of drafts that the target accepts of whole blocks. Ends the step."""


class StepKind(NamedTuple):
    """What a graph is made for; everything else is read on the device."""

    seqs: int
    depth: int
    draws: bool  # whether any slot samples, with whatever filters
    edits: bool = False  # whether any slot asks for penalties, biases or a least length


class Slots:
    def __init__(
        self,
        runner: Runner,
        proposer: Proposer | None,
        ring: int,
        device: torch.device,
        cuts: bool = False,
        edits: EditTables | None = None,
    ) -> None:
        """ring: the number of plain steps whose hidden states are kept for a drafter that does not see them at once.
        cuts: whether blocks of drafts are cut. edits: what requests ask of their logits."""
        plan = runner.plan
        self.runner, self.plan, self.device = runner, plan, device
        self.drafter = proposer.drafter if proposer else None
        self.chain = proposer is not None and proposer.chain
        self.given: Given | None = None
        self.edits = edits
        num_slots, max_blocks = plan.max_seqs, -(-plan.max_model_len // plan.block_size)

        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.token, self.length, self.observed, self.most = (integers(num_slots) for _ in range(4))
        self.tables = integers(num_slots, max_blocks)
        self.edit_slots = integers(num_slots)  # of each slot, in the tables of 'edits'; -1: none
        # The sampling parameters of each slot, as in sampler.Draws: temperature, min_p, top_p; top_k, seed.
        self.floats, self.integers = torch.zeros(3, num_slots, device=device), integers(2, num_slots, dtype=torch.int64)
        aux_shape = runner.aux_hidden.shape[1:]
        kept = (num_slots, ring, *aux_shape) if self.drafter and not self.chain else (0,)
        self.ring = torch.zeros(
            kept, dtype=runner.aux_hidden.dtype, device=device
        )  # indexed by position modulo its size
        # The hidden state of each slot's last committed row, for a chain drafter.
        self.hidden = torch.zeros(
            (num_slots if self.chain else 0, *aux_shape), dtype=runner.aux_hidden.dtype, device=device
        )
        deepest = proposer.max_depth if proposer else 0
        self._numbers = torch.arange(max(1 + deepest, ring), dtype=torch.int32, device=device)
        self._columns = torch.arange(max_blocks, dtype=torch.int32, device=device)
        self._stamp = torch.zeros(1, dtype=torch.int64, device=device)
        # What the device admits drafts by, in the order of Drafting.cut_terms; no slot is cut before it is sent.
        self.cuts = cuts and proposer is not None
        sizes = (2 * (2 + deepest), num_slots, 1 + num_slots * deepest)
        self.terms = torch.full((sum(sizes),), -1.0, device=device)
        fits, fair, worth = self.terms.split(sizes)
        self._terms = DraftTerms(fits.view(2, -1), fair, worth)
        self._gaps: list[Tensor] = []  # of the passes of one proposal: float32 [seqs, each]

    def step(self, kind: StepKind) -> Tensor:
        """One step. Returns int32 [seqs, depth + 4]: the sample of each of a slot's rows, the number of accepted
        drafts (NONE if the slot computed NaN), that of verified ones, and the nanoseconds that verifying took. Where
        blocks are cut and the step drafts, as many columns as it drafts follow: the bits of the gaps."""
        seqs, depth, model, aux_hidden = kind.seqs, kind.depth, self.runner.model, None
        ops, size = model.ops, self.plan.block_size
        drafts = self._draft(kind) if depth else None
        gaps = self._cut_by(kind) if depth and self.cuts else None
        kept = self.most[:seqs] if gaps is None else self._cut(gaps)
        length, token, observed = self.length[:seqs], self.token[:seqs], self.observed[:seqs]
        rows = ops.pack_rows(length, self.tables[:seqs], token, drafts, kept, size, self._stamp)
        view = AttentionView(rows.query_start, rows.context_len, self.tables[:seqs], 1 + depth, self.plan.max_model_len)
        if self.runner.kv.begin:
            self.runner.kv.begin(rows.slots, view)
        verify = Step(rows.ids, rows.positions, rows.slots, view, self.runner.kv.layers, rows.query_start[seqs:])
        # Where the drafter drafts, it observes committed rows at once; rows of plain steps wait in the ring. A chain
        # drafter, which is cheap to run, observes all of them at once.
        at_once = depth > 0 or self.chain
        if self.drafter:
            aux_hidden = self.runner.aux_hidden[: seqs * (1 + depth)] if at_once else self.ring[:seqs]
        residual = model.forward(verify, self.runner.aux_layers, aux_hidden)
        samples = self._sample(kind, residual, rows)
        given = self.given.accepted(seqs, depth) if self.given else None
        result, kept_slots = ops.accept_drafts(drafts, samples, kept, length, token, observed, rows, self._stamp, given)
        accepted = result[:, depth + 1]
        if kind.edits:
            self._count_committed(result[:, : depth + 1], accepted)
        if self.drafter and at_once:
            assert aux_hidden is not None
            following = samples if self.chain else None  # the id after a committed row is that row's sample
            self.drafter.observe(CommittedRows(aux_hidden, rows.positions, kept_slots, following))
            if self.chain:  # the row of the last accepted draft
                self.hidden[:seqs] = aux_hidden[rows.places.gather(1, accepted.long().unsqueeze(1)).squeeze(1).long()]
        # After a NaN every layer's output is NaN in all places, so the first of a row shows it.
        accepted.masked_fill_(residual[rows.places[:, 0].long(), 0].isnan(), NONE)
        return result if gaps is None else torch.cat((result, gaps.view(torch.int32)), 1)

    def catch_up(self, seqs: int) -> Tensor:
        """Let the drafter observe the plain rows that wait in the ring, of all slots in one pass."""
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
        self._gaps = []
        return self.drafter.propose(anchors, kind.depth, partial(self._pick, kind))

    def _seen(self, seqs: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Lengths, tables and positions of the slots as their anchors have them: without the blocks that the drafter is
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

    def _cut_by(self, kind: StepKind) -> Tensor:  # float32 [seqs, depth]
        """How sure the drafter is of the drafts that it has just made."""
        return self.given.gaps(kind.seqs, kind.depth) if self.given else torch.cat(self._gaps, 1)

    def _cut(self, gaps: Tensor) -> Tensor:  # int32 [seqs]
        seqs = len(gaps)
        terms = self._terms._replace(fair=self._terms.fair[:seqs])
        return self.runner.model.ops.admit_drafts(gaps, self.most[:seqs], self.floats[0, :seqs], terms)

    def _pick(self, kind: StepKind, score: Score, each: int, drafted: int = 0, ids: Tensor | None = None) -> Tensor:
        """int32 [seqs, each]. spec.drafter.Pick within a step."""
        draws = None
        if kind.draws:
            slot = torch.arange(kind.seqs * each, device=self.device) // each
            positions = (self.length[: kind.seqs].unsqueeze(1) + drafted + self._count(each)).flatten()
            draws = self._draws(kind, slot, positions)
        ops = self.runner.model.ops
        if self.cuts:
            picked, gaps = pick_sure(ops, score(False), draws, ids)
            self._gaps.append(gaps.view(kind.seqs, each))
        else:
            picked = ids_of(score(True), ids) if draws is None else pick(ops, score(False), draws, ids)
        return picked.view(kind.seqs, each).int()

    def _sample(self, kind: StepKind, residual: Tensor, rows: PackedRows) -> Tensor:  # int32 [rows]
        """The target's own ids, after each row."""
        model = self.runner.model
        if not kind.draws and not kind.edits:
            return model.likeliest(residual).int()
        logits, draws = model.logits(residual), None
        if kind.edits:
            model.ops.edit_logits(logits, self._edits(rows))
        if kind.draws:
            draws = self._draws(kind, rows.seq_of, rows.positions + 1)
        return pick(model.ops, logits, draws).int()

    def _edits(self, rows: PackedRows) -> LogitEdits:
        assert self.edits is not None
        slot = rows.seq_of.long()
        edited = self.edit_slots[slot].where(rows.slots >= 0, -1)
        ahead = rows.positions - (self.length[slot] - 1)
        return LogitEdits(edited, rows.positions + 1, rows.ids, ahead, self.edits.tables)

    def _count_committed(self, samples: Tensor, accepted: Tensor) -> None:
        """Count the ids that a step has committed: of each slot the accepted drafts and the sample behind them."""
        assert self.edits is not None
        slots, width = self.edit_slots[: len(samples)].unsqueeze(1), samples.shape[1]
        counts = (self._count(width) <= accepted.unsqueeze(1)) & (slots >= 0)
        index = slots.clamp(min=0).long() * self.edits.vocab_size + samples.clamp(min=0)
        self.edits.tables.counts.view(-1).index_add_(0, index.flatten(), counts.flatten().int())

    def _draws(self, kind: StepKind, slot: Tensor, positions: Tensor) -> Draws:
        """The parameters of rows: the slot of each, and the position of the id that it samples."""
        integers = torch.cat((self.integers.index_select(1, slot), positions.unsqueeze(0)))
        return Draws(self.floats.index_select(1, slot), integers)
