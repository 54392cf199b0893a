"""The state of decoding requests on the device, one slot per request, and a whole step over all slots as one function.

Drafting, cutting, verifying, sampling, accepting and observing read and change the slots in place. No number of a step
passes through the host, so a step can be captured as a whole and launched before the last one has been read.
engine/device_steps.py decides which request has which slot, and when.

    a slot            token, the last committed id, at position length - 1: the anchor of the next step
    rows of a step    | prompt chunks | token | draft 1 | ... | draft kept | token ... | padding |   slot after slot
    after it          length grows by 1 + accepted; rows behind the accepted ones are overwritten by the next step

The number of rows of a captured step is fixed and holds the drafts that the host asked for, however they are spread
over the slots. Where the drafter is not sure enough of a draft the device drops it (`cut`), and what is left is padding
(kernels/reference/stepping.py): it writes nothing, attends to nothing and reaches no expert.

A step has two halves: `forward` drafts and runs the target, `finish` samples, accepts and observes. Prompt chunks lie
in front of the slots' rows in the same pass. The chunk that ends a prompt samples the request's first id and fills its
slot, so the next step decodes it.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sparkdraft.core import MAX_LOGPROBS
from sparkdraft.drafters.base import Anchors, CommittedRows, Score
from sparkdraft.engine.accept import NONE
from sparkdraft.engine.proposer import Proposer, max_context
from sparkdraft.engine.runner import Runner
from sparkdraft.engine.sampler import EditTables, ids_of, pick, pick_sure, top_logprobs
from sparkdraft.kernels.ops import WIDEST, AttentionView, DraftTerms, Draws, Ends, LogitEdits, PackedRows
from sparkdraft.models.common.blocks import Step


class Given(Protocol):
    """For benchmarks: what becomes of drafts, whatever was drafted and sampled."""

    def gaps(self, seqs: int, depth: int) -> Tensor:
        """float32 [seqs, depth]: how sure the drafter is said to be."""

    def accepted(self, seqs: int, depth: int) -> Tensor:
        """integers [seqs]: the number of drafts that the target accepts of whole blocks. Ends the step."""


MIN_MATCH = 8  # ids at a text's end that must be there before, for what followed them to be drafted


class StepKind(NamedTuple):
    """What a graph is made for; everything else is read on the device."""

    seqs: int
    depth: int  # drafts that are made for each slot
    rows: int  # last ids and drafts to verify, with padding
    draws: bool  # whether any slot samples or edits its logits, in whatever way


class Chunks(NamedTuple):
    """Prompt chunks of a step, on the device, which may have padding behind them: of tokens and of sequences."""

    ids: Tensor  # int32 [tokens], as are the next two
    positions: Tensor
    slots: Tensor
    view: AttentionView  # of these tokens alone
    ends: Tensor  # int64 [prompts that end]: the row of the last token of each
    slot: Tensor  # int64 [prompts that end]: the slot that it takes
    next_ids: Tensor | None = None  # int32 [tokens]: the id after each, for a chain drafter; any where it is sampled


class Ran(NamedTuple):
    """What the first half of a step leaves to the second."""

    residual: Tensor  # [tokens, hidden]: prompt chunks, the slots' rows, padding
    aux_hidden: Tensor | None  # of the same tokens; None where the drafter observes them later
    positions: Tensor  # int32 [tokens]
    first: Tensor | None = None  # int32 [1]: the first row of the slots; None: 0
    order: Tensor | None = None  # int64 [tokens]: of each token, its place among chunks and then slots with padding
    rows: PackedRows | None = None  # of the slots; None where none decodes, as are the next three
    kept: Tensor | None = None
    drafts: Tensor | None = None  # None at depth 0
    matched: Tensor | None = None  # int32 [seqs]; None at depth 0 where requests do not draft from their own text
    gaps: Tensor | None = None  # None where blocks are not cut


class Asked(NamedTuple):
    """What the host adds to the second half of a step: grammars, and the wish for log-probabilities."""

    masks: Tensor | None  # uint8 [n, bytes]: ids that a row may take
    which: Tensor | None  # int32 [rows]: the mask of each row of logits; negative: none
    scored: Tensor | None  # int64 [m]: rows of logits whose log-probabilities are wanted


class Sampled(NamedTuple):
    """What a step has written: of slots as `Slots.step` returns it, and of prompts that ended."""

    slots: Tensor | None  # int32 [seqs, ...]
    firsts: Tensor | None  # int32 [prompts that end]; NONE where the step computed NaN
    scores: Tensor | None = None  # float32 [m, 1 + 2 * MAX_LOGPROBS], see sampler.top_logprobs


class Slots:
    def __init__(
        self,
        runner: Runner,
        proposer: Proposer | None,
        ring: int,
        device: torch.device,
        edits: EditTables,
        cuts: bool = False,
        reads_text: bool = False,
    ) -> None:
        """ring: the number of plain steps whose hidden states are kept for a drafter that does not see them at once.
        edits: what requests ask of their logits. cuts: whether blocks of drafts are cut. reads_text: whether requests
        also draft from their own text."""
        plan = runner.plan
        self.runner, self.plan, self.device = runner, plan, device
        self.drafter = proposer.drafter if proposer else None
        self.chain = proposer is not None and proposer.chain
        self.given: Given | None = None
        self.edits = edits
        num_slots, max_blocks = plan.max_seqs, -(-plan.max_model_len // plan.block_size)

        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # One more than there are requests: a captured step has room for more prompts that end than do, and fills it.
        self.spare = num_slots
        # edit_slots: of each slot, in the tables of 'edits'; -1: none
        self.state = integers(5, num_slots + 1)
        self.token, self.length, self.observed, self.most, self.edit_slots = self.state
        self.edit_slots.fill_(-1)
        self.tables = integers(num_slots, max_blocks)
        # The sampling parameters of each slot, as in ops.Draws: temperature, min_p, top_p; top_k, seed.
        self.floats = torch.zeros(3, num_slots + 1, device=device)
        self.integers = integers(2, num_slots + 1, dtype=torch.int64)
        # The ids of each slot, from position 0 on, if requests draft from them.
        self.text = integers(num_slots, plan.max_model_len) if reads_text else None
        self._matched: Tensor | None = None  # int32 [seqs]: the match that a slot's drafts follow; 0: the drafter's
        self._unused = integers(num_slots, 1)  # takes a draft where nothing is drafted
        aux_shape = runner.aux_hidden.shape[1:]
        kept = (num_slots, ring, *aux_shape) if self.drafter and not self.chain else (0,)
        self.ring = torch.zeros(
            kept, dtype=runner.aux_hidden.dtype, device=device
        )  # indexed by position modulo its size
        # The hidden state of each slot's last committed row, for a chain drafter.
        self.hidden = torch.zeros(
            (num_slots + 1 if self.chain else 0, *aux_shape), dtype=runner.aux_hidden.dtype, device=device
        )
        deepest = proposer.max_depth if proposer else 0
        most = max(1 + deepest, ring, plan.max_step_tokens + num_slots)
        self._numbers = torch.arange(most, dtype=torch.int32, device=device)
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
        """One step without prompts. Returns int32 [seqs, depth + 4]: the sample of each of a slot's rows, the number of
        accepted drafts (NONE if the slot computed NaN), that of verified ones, and the nanoseconds that verifying took.
        If the step drafts or requests draft from their own text, the length of the match at the end of the slot's text
        follows (0: none, drafts are the drafter's), and where blocks are cut, the bits of the gaps of its drafts."""
        written = self.finish(kind, self.forward(kind)).slots
        assert written is not None
        return written

    def forward(self, kind: StepKind, chunks: Chunks | None = None) -> Ran:
        """Drafts, and runs the target over prompt chunks, the slots' last ids and their drafts."""
        seqs, depth, model, plan = kind.seqs, kind.depth, self.runner.model, self.plan
        self._matched = None
        drafts = self._draft(kind) if depth else None
        gaps = self._cut_by(kind) if depth and self.cuts else None
        kept = self._kept(seqs, gaps, depth)
        matched = self._match(seqs, self._unused) if self.text is not None and not depth else self._matched
        tables, rows = self.tables[:seqs], None
        if seqs:
            length, token = self.length[:seqs], self.token[:seqs]
            rows = model.ops.pack_rows(length, tables, token, drafts, kept, plan.block_size, self._stamp, kind.rows)
            view = AttentionView(rows.query_start, rows.context_len, tables, 1 + depth, plan.max_model_len)
            parts = rows.ids, rows.positions, rows.slots
        first = order = None
        if chunks is not None and rows is None:
            view, parts = chunks.view, (chunks.ids, chunks.positions, chunks.slots)
        elif chunks is not None and rows is not None:
            first = chunks.view.query_start[-1:]
            order = self._order(len(chunks.ids), len(rows.ids), first)
            view = _both(chunks.view, rows, tables, 1 + depth)
            ids, positions, slots = (
                torch.cat(both)[order] for both in zip(chunks[:3], (rows.ids, rows.positions, rows.slots), strict=True)
            )
            parts = ids, positions, slots
        ids, positions, slots = parts
        if self.runner.kv.begin:
            self.runner.kv.begin(slots, view)
        verify = Step(ids, positions, slots, view, self.runner.kv.layers, view.query_start[-1:])
        # Where the drafter drafts, it observes committed rows at once; rows of plain steps wait in the ring. A chain
        # drafter, which is cheap to run, observes all of them at once, and so does every drafter beside prompts.
        aux_hidden = None
        if self.drafter:
            aux_hidden = self.runner.aux_hidden[: len(ids)] if self._observes(kind, chunks) else self.ring[:seqs]
        residual = model.forward(verify, self.runner.aux_layers, aux_hidden)
        return Ran(residual, aux_hidden, positions, first, order, rows, kept if seqs else None, drafts, matched, gaps)

    def finish(self, kind: StepKind, ran: Ran, chunks: Chunks | None = None, asked: Asked | None = None) -> Sampled:
        """Samples, accepts drafts, fills the slots of prompts that ended, and lets the drafter observe."""
        num_ends = len(chunks.ends) if chunks else 0
        if not num_ends and not kind.seqs:
            self._observe(kind, ran, chunks, None, None)
            return Sampled(None, None)
        samples, scores = self._sample(kind, ran, chunks, asked)
        firsts, samples = samples[:num_ends], samples[num_ends:]
        if chunks and num_ends > 1:  # what ends in the spare slot is the first end again
            firsts = firsts.where(chunks.slot != self.spare, firsts[:1])
        result = kept_slots = None
        if ran.rows:
            result, kept_slots = self._accept(kind, ran, samples)
        self._observe(kind, ran, chunks, kept_slots, samples, firsts)
        if chunks and num_ends:
            firsts = self._begin(kind, ran, chunks, firsts)
        if result is not None and ran.matched is not None:
            result = torch.cat((result, ran.matched.unsqueeze(1)), 1)
        if result is not None and ran.gaps is not None:
            result = torch.cat((result, ran.gaps.view(torch.int32)), 1)
        return Sampled(result, firsts, scores)

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

    def move(self, moved: Tensor | None, kept: int) -> None:
        """Moves slots, int64 [2, n]: to and from; then all from 'kept' on are empty."""
        if moved is not None:
            to, source = moved
            for part in (self.state, self.floats, self.integers):
                part[:, to] = part[:, source]
            for table in (self.tables, self.ring, self.hidden, self.text):
                if table is not None and len(table):
                    table[to] = table[source]
        self.length[kept:].zero_()

    # ---- the parts

    def _count(self, number: int) -> Tensor:  # int32 [number]
        return self._numbers[:number]

    def _slots(self, positions: Tensor) -> Tensor:  # int32 [seqs, n] -> int32 [seqs, n]
        size, number = self.plan.block_size, self.tables.shape[1]
        inside = (positions // size).clamp(max=number - 1).long()
        slots = self.tables[: len(positions)].gather(1, inside) * size + positions % size
        return slots.where(positions < number * size, -1)

    def _draft(self, kind: StepKind) -> Tensor:  # int32 [seqs, depth]
        """Drafts of the drafter, and in their place those that follow a match in a slot's own text."""
        drafts = self._draft_by_model(kind) if self.drafter else self.token.new_zeros(kind.seqs, kind.depth)
        self._matched = self._match(kind.seqs, drafts)
        return drafts

    def _match(self, seqs: int, drafts: Tensor) -> Tensor:  # int32 [seqs]
        """The length of the match at the end of each slot's text; what followed it takes the place of its drafts."""
        if self.text is None:
            return torch.zeros_like(self.most[:seqs])
        return self.runner.model.ops.match_text(self.text[:seqs], self.length[:seqs], MIN_MATCH, drafts[:seqs])

    def _draft_by_model(self, kind: StepKind) -> Tensor:  # int32 [seqs, depth]
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
        """How sure the drafter is of the drafts that it has just made; a copied draft is seldom wrong."""
        gaps = self.given.gaps(kind.seqs, kind.depth) if self.given else torch.cat(self._gaps, 1)
        assert self._matched is not None
        return gaps if self.text is None else gaps.masked_fill(self._matched.unsqueeze(1) > 0, WIDEST)

    def _kept(self, seqs: int, gaps: Tensor | None, depth: int) -> Tensor:  # int32 [seqs]
        """How many drafts of each slot are verified."""
        most = self.most[:seqs]
        if self._matched is not None and not self.drafter:  # nothing is drafted where nothing matches
            return most.where(self._matched > 0, 0)
        return most if gaps is None else self._cut(gaps)

    def _cut(self, gaps: Tensor) -> Tensor:  # int32 [seqs]
        seqs = len(gaps)
        terms = self._terms._replace(fair=self._terms.fair[:seqs])
        return self.runner.model.ops.admit_drafts(gaps, self.most[:seqs], self.floats[0, :seqs], terms)

    def _pick(self, kind: StepKind, score: Score, each: int, drafted: int = 0, ids: Tensor | None = None) -> Tensor:
        """int32 [seqs, each]. spec.drafter.Pick within a step."""
        draws = None
        if kind.draws:
            slots = self._count(kind.seqs).repeat_interleave(each)
            positions = (self.length[: kind.seqs].unsqueeze(1) + drafted + self._count(each)).flatten()
            draws = Draws(slots, positions, self.floats, self.integers)
        ops = self.runner.model.ops
        if self.cuts:
            picked, gaps = pick_sure(ops, score(False), draws, ids)
            self._gaps.append(gaps.view(kind.seqs, each))
        else:
            picked = ids_of(score(True), ids) if draws is None else pick(ops, score(False), draws, ids)
        return picked.view(kind.seqs, each).int()

    def _order(self, chunk_rows: int, slot_rows: int, live: Tensor) -> Tensor:  # int64 [chunk rows + slot rows]
        """The places, among chunks with their padding and then slots with theirs, of a step's rows: the 'live' rows of
        chunks, the slots' rows, and the padding of the chunks."""
        row = self._count(chunk_rows + slot_rows)
        behind = torch.where(row < live + slot_rows, row - live + chunk_rows, row - slot_rows)
        return torch.where(row < live, row, behind).long()

    def _observes(self, kind: StepKind, chunks: Chunks | None) -> bool:
        """Whether the drafter is shown a step's tokens at once, and not from the ring."""
        return kind.depth > 0 or self.chain or chunks is not None

    def _sample(
        self, kind: StepKind, ran: Ran, chunks: Chunks | None, asked: Asked | None
    ) -> tuple[Tensor, Tensor | None]:
        """int32 [prompts that end, then the slots' rows]: the target's own ids, and the scores that are asked for."""
        model, residual = self.runner.model, ran.residual
        if chunks and ran.first is not None and ran.rows:
            own = self._count(len(ran.rows.ids)) + ran.first
            residual = residual[torch.cat((chunks.ends, own))]
        elif chunks:
            residual = residual[chunks.ends]
        if not kind.draws and asked is None:
            return model.likeliest(residual).int(), None
        logits = model.logits(residual)
        raw = logits[asked.scored] if asked is not None and asked.scored is not None else None
        draws = None
        if kind.draws:
            ends = Ends(chunks.slot, chunks.ends, chunks.positions) if chunks and len(chunks.ends) else None
            rows = model.ops.sampled_rows(ran.rows, ends, self.length, self.edit_slots)
            edits = LogitEdits(rows.edited, rows.positions, rows.ids, rows.ahead, self.edits.tables)
            model.ops.edit_logits(logits, edits)
            draws = Draws(rows.slots, rows.positions, self.floats, self.integers)
        if asked is not None and asked.masks is not None and asked.which is not None:
            model.ops.forbid_bits(logits, asked.masks, asked.which)
        samples = pick(model.ops, logits, draws)
        scores = None if raw is None or asked is None else top_logprobs(raw, samples[asked.scored], MAX_LOGPROBS)
        return samples.int(), scores

    def _accept(self, kind: StepKind, ran: Ran, samples: Tensor) -> tuple[Tensor, Tensor]:
        """`Slots.step`'s result, and the slots of the rows that are now committed."""
        seqs, depth, rows, first = kind.seqs, kind.depth, ran.rows, 0 if ran.first is None else ran.first
        assert rows is not None and ran.kept is not None
        state = self.length[:seqs], self.token[:seqs], self.observed[:seqs]
        given = self.given.accepted(seqs, depth) if self.given else None
        before = None if self.text is None else state[0].clone()
        ops = self.runner.model.ops
        result, kept_slots = ops.accept_drafts(ran.drafts, samples, ran.kept, *state, rows, self._stamp, given)
        accepted = result[:, depth + 1]
        if kind.draws:
            edited = self.edit_slots[:seqs].where(self.length[:seqs] > 0, -1)  # of empty slots nothing is counted
            ops.count_ids(self.edits.tables.counts, edited, result[:, : depth + 1], accepted)
        if self.text is not None and before is not None:
            ops.append_text(self.text[:seqs], before, result[:, : depth + 1], accepted + 1)
        places = rows.places.long()
        if kind.rows < places.numel():
            places = places.clamp(max=kind.rows - 1)  # those without a row are not read
        if self.chain:  # the row of the last accepted draft
            assert ran.aux_hidden is not None
            self.hidden[:seqs] = ran.aux_hidden[first + places.gather(1, accepted.long().unsqueeze(1)).squeeze(1)]
        if ran.first is not None and self.drafter and not depth:
            self.observed[:seqs] = (self.length[:seqs] - 1).clamp(min=0)  # of an empty slot 0
        # After a NaN every layer's output is NaN in all places, so the first of a row shows it.
        accepted.masked_fill_(ran.residual[first + places[:, 0], 0].isnan(), NONE)
        return result, kept_slots

    def _observe(
        self,
        kind: StepKind,
        ran: Ran,
        chunks: Chunks | None,
        kept_slots: Tensor | None,
        samples: Tensor | None,
        firsts: Tensor | None = None,
    ) -> None:
        """Shows the drafter the tokens of prompts and those that were committed."""
        if not self.drafter or not self._observes(kind, chunks):
            return
        assert ran.aux_hidden is not None
        slots = [part for part in (chunks.slots if chunks else None, kept_slots) if part is not None]
        following: list[Tensor] = []
        if self.chain and chunks and chunks.next_ids is not None:
            some = chunks.next_ids
            following.append(some if firsts is None else some.index_copy(0, chunks.ends, firsts))
        if self.chain and samples is not None and kept_slots is not None:
            following.append(samples)  # the id after a committed row is that row's sample
        after = _ordered(following, ran.order) if following else None
        self.drafter.observe(CommittedRows(ran.aux_hidden, ran.positions, _ordered(slots, ran.order), after))

    def _begin(self, kind: StepKind, ran: Ran, chunks: Chunks, firsts: Tensor) -> Tensor:  # int32 [prompts that end]
        """Fills the slots of prompts that ended. Returns their first ids, NONE where the step computed NaN."""
        stop = chunks.positions[chunks.ends] + 1
        self.token[chunks.slot], self.length[chunks.slot], self.observed[chunks.slot] = firsts, stop + 1, stop
        if self.text is not None:
            slot = chunks.slot.where(chunks.slot != self.spare, chunks.slot[:1])
            self.text[slot, stop.clamp(max=self.text.shape[1] - 1).long()] = firsts
        if self.chain:
            assert ran.aux_hidden is not None
            self.hidden[chunks.slot] = ran.aux_hidden[chunks.ends]
        if kind.draws:
            edited = self.edit_slots[chunks.slot]
            self.runner.model.ops.count_ids(self.edits.tables.counts, edited, firsts.unsqueeze(1))
        return firsts.masked_fill(ran.residual[chunks.ends, 0].isnan(), NONE)


def _ordered(parts: list[Tensor], order: Tensor | None) -> Tensor:
    together = parts[0] if len(parts) == 1 else torch.cat(parts)
    return together if order is None else together[order]


def _both(chunks: AttentionView, rows: PackedRows, tables: Tensor, width: int) -> AttentionView:
    """The sequences of prompt chunks, and behind them the slots."""
    start = torch.cat((chunks.query_start[:-1], rows.query_start + chunks.query_start[-1:]))
    context = torch.cat((chunks.context_len, rows.context_len))
    both = torch.cat((chunks.block_tables, tables))
    return AttentionView(start, context, both, max(chunks.max_query, width), chunks.max_context)
