"""What the device keeps of requests that decode, one lane each, and a whole step over them as one function.

Drafting, verifying, sampling, accepting and observing read and change the lanes where they are: no number of a step
passes through the host, so a step can be recorded whole and launched before the last one has been read. Who flies in
which lane, and when, is engine/flight.py's business.

    a lane            token, the last committed id, at position length - 1: the anchor of the next step
    rows of a step    | token | draft 1 | ... | draft depth |      positions length - 1 .. length - 1 + depth
    after it          length grows by 1 + accepted; rows behind the accepted ones are overwritten by the next step
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparkdraft.core import SamplingParams
from sparkdraft.engine.blockdraft import BlockDraft
from sparkdraft.engine.runner import Runner
from sparkdraft.engine.sampler import Filters, Knobs, allowed, argmax
from sparkdraft.kernels.view import AttentionView
from sparkdraft.models.blocks import Step
from sparkdraft.spec.drafter import DraftBlock

Accept = Callable[[Tensor], Tensor]  # samples int32 [seqs, 1 + depth] -> how many drafts stand, int32 [seqs]


class StepKind(NamedTuple):
    """What a recording is made for; everything else is read on the device."""

    seqs: int
    depth: int
    draws: bool  # some lane samples, with these filters on the way
    filters: Filters


@dataclass(frozen=True, slots=True)
class LaneRows:
    """The same number of rows for each lane, from its anchor on."""

    ids: Tensor  # int32 [seqs * width], as are the next two
    positions: Tensor
    slots: Tensor  # -1 in an empty lane
    view: AttentionView


class Lanes:
    def __init__(self, runner: Runner, block: BlockDraft | None, ring: int, device: torch.device) -> None:
        """ring: plain steps whose hidden states are kept for the drafter, at most."""
        plan = runner.plan
        self.runner, self.block, self.plan, self.device = runner, block, plan, device
        self.accept: Accept | None = None  # says how many stand, whatever was sampled: for benchmarks
        lanes, max_blocks = plan.max_seqs, -(-plan.max_model_len // plan.block_size)

        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.token, self.length, self.observed, self.most = (integers(lanes) for _ in range(4))
        self.seed = integers(lanes, dtype=torch.int64)
        self.tables = integers(lanes, max_blocks)
        self.knobs = Knobs.of([SamplingParams()] * lanes, device)
        kept = (lanes, ring, *runner.taps.shape[1:]) if block else (0,)
        self.ring = torch.zeros(kept, dtype=runner.taps.dtype, device=device)  # by position modulo its size
        deepest = block.block_size if block else 0
        self._numbers = torch.arange(max(lanes + 1, deepest, ring), dtype=torch.int32, device=device)
        self._columns: Tensor | None = None  # int64 [draft vocabulary], the ids that columns of its logits stand for

    def step(self, kind: StepKind) -> Tensor:
        """int32 [seqs, depth + 2]: what was sampled in each row, then how many drafts were accepted."""
        seqs, depth, ops = kind.seqs, kind.depth, self.runner.model.ops
        drafts = self._draft(kind) if depth else None
        rows = self._rows(seqs, 1 + depth, drafts)
        if self.runner.kv.begin:
            self.runner.kv.begin(rows.slots, rows.view)
        verify = Step(rows.ids, rows.positions, rows.slots, rows.view, self.runner.kv.layers)
        # Committed rows go to the drafter at once where it drafts; those of plain steps wait in the ring.
        taps = (self.runner.taps[: seqs * (1 + depth)] if depth else self.ring[:seqs]) if self.block else None
        residual = self.runner.model.forward(verify, self.runner.tap_layers, taps)
        if kind.draws:
            samples = self._pick(self.runner.model.logits(residual), rows.positions.view(seqs, -1) + 1, kind)
        else:
            samples = self.runner.model.likeliest(residual).view(seqs, -1).int()
        given = self.accept(samples) if self.accept else None
        state = (t[:seqs] for t in (self.most, self.length, self.token, self.observed))
        result, kept_slots = ops.settle(drafts, samples, *state, rows.slots, given)
        if self.runner.kv.commit:
            alive = self.length[:seqs] > 0
            self.runner.kv.commit((result[:, -1] + 1).where(alive, 0))
        if self.block and depth:
            assert taps is not None
            self.block.drafter.observe(taps, rows.positions, kept_slots)
        out: Tensor = result
        return out

    def catch_up(self, seqs: int) -> Tensor:
        """Let the drafter see the plain rows that wait in the ring, of all lanes in one pass."""
        assert self.block
        size = self.ring.shape[1]
        last = self.length[:seqs].unsqueeze(1) - 1
        positions = last - size + self._count(size)  # int32 [seqs, ring]
        waits = positions >= self.observed[:seqs].unsqueeze(1)
        positions = positions.clamp(min=0)
        slots = self._slots(positions).where(waits, -1)
        index = (positions % size).long()[:, :, None, None].expand(-1, -1, *self.ring.shape[2:])
        taps = self.ring[:seqs].gather(1, index).flatten(0, 1)
        self.block.drafter.observe(taps, positions.flatten(), slots.flatten())
        self.observed[:seqs] = last.squeeze(1).clamp(min=0)
        return self.observed

    # ---- the parts

    def _count(self, number: int) -> Tensor:  # int32 [number]
        return self._numbers[:number]

    def _rows(self, seqs: int, width: int, drafts: Tensor | None, fill: int = 0) -> LaneRows:
        state, size = (self.length[:seqs], self.tables[:seqs], self.token[:seqs]), self.plan.block_size
        ids, positions, slots, context = self.runner.model.ops.lay_out(*state, drafts, width, size, fill)
        starts = self._count(seqs + 1) * width
        view = AttentionView(starts, context, self.tables[:seqs], width, self.plan.max_model_len)
        return LaneRows(ids, positions, slots, view)

    def _slots(self, positions: Tensor) -> Tensor:  # int32 [seqs, n] -> int32 [seqs, n]
        size, number = self.plan.block_size, self.tables.shape[1]
        # A block's masks may stick out of the context's end: their rows are never used, but must not write elsewhere.
        inside = (positions // size).clamp(max=number - 1).long()
        slots = self.tables[: len(positions)].gather(1, inside) * size + positions % size
        return slots.where(positions < number * size, -1)

    def _draft(self, kind: StepKind) -> Tensor:  # int32 [seqs, depth]
        assert self.block
        drafter, (seqs, depth) = self.block.drafter, kind[:2]
        width = self.block.width(depth)
        rows = self._rows(seqs, width, None, drafter.caps.mask_id)
        wanted = self._count(seqs).unsqueeze(1) * width + self._count(depth) + 1
        block = DraftBlock(rows.ids, rows.positions, rows.slots, rows.view, wanted.flatten().contiguous())
        if not kind.draws:
            return drafter.to_target(drafter.likeliest(block).view(seqs, depth).int())
        logits = drafter.propose(block)
        if self._columns is None:  # in the first step, which is never one that is being recorded
            self._columns = drafter.to_target(torch.arange(logits.shape[1], device=self.device))
        picked = self._pick(logits, rows.positions.view(seqs, -1)[:, 1 : depth + 1], kind, self._columns)
        return drafter.to_target(picked)

    def _pick(self, logits: Tensor, positions: Tensor, kind: StepKind, columns: Tensor | None = None) -> Tensor:
        """The id of each row, int32 [seqs, rows a lane]: what the dice say, or of a lane that draws none its best.

        positions: of the ids that are picked; columns: the ids that the columns of the logits stand for.
        """
        best = argmax(logits).view(positions.shape)
        rows, each = len(logits), positions.shape[1]
        lane = torch.arange(rows, device=self.device) // each
        knobs = self.knobs.at(lane)
        scaled = allowed(logits, knobs, kind.filters)
        drawn = self.runner.model.ops.draw(scaled, self.seed[lane], positions.flatten().long(), columns)
        return best.where(self.knobs.temperature[: len(positions)].unsqueeze(1) == 0, drawn.view(best.shape)).int()
