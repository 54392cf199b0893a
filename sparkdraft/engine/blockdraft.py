"""The tensor side of block drafting: feeds a drafter the hidden states of committed rows, and asks it for blocks.

Rows of a prompt chunk are observed at once. Rows of decoding wait until the request drafts again or a block of the
cache becomes full, and are then observed together: a parked drafter costs about 1 % of a step, and a full block has its
draft K/V before another request can find it in the prefix cache.

    committed rows   | observed ................ | pending |         pending never reaches across a full block
    K/V of a draft                                         | anchor, masks |   overwritten once rows are committed

Observing a row costs up to 2 % of what the target costs for it. In a batch so large that no draft could pay for itself,
rows of requests that did not ask for drafts are passed over (`pass_over`). Their blocks are marked for as long as they
live, also in the prefix cache; later drafts look past them, and a request drafts again from the first block on that was
observed from its beginning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparkdraft.core import Request, Work
from sparkdraft.engine.graphs import Graphs, Shape
from sparkdraft.engine.inputs import IntArray, Rows, StepInputs
from sparkdraft.engine.runner import Runner
from sparkdraft.engine.sampler import pick
from sparkdraft.kernels import Unrecordable
from sparkdraft.plan.resolve import Plan
from sparkdraft.spec.drafter import DraftBlock, Drafter

Table = Any  # a tensor, on a CPU as numpy sees it: torch takes thirty microseconds to copy a few kilobytes


@dataclass(slots=True)
class Pending:
    """Hidden states of committed rows that the drafter has not seen: positions [start, start + count)."""

    start: int
    taps: Tensor  # [room, layers tapped, hidden]
    rows: Table  # the same memory
    count: int = 0

    def add(self, rows: Table, first: int, count: int) -> None:
        end = self.count + count
        self.rows[self.count : end] = rows[first : first + count]
        self.count = end


class BlockDraft:
    def __init__(self, drafter: Drafter, plan: Plan, device: torch.device, ops: ModuleType) -> None:
        self.drafter, self.plan, self.device, self.ops = drafter, plan, device, ops
        self.block_size = drafter.caps.block_size
        max_blocks = -(-plan.max_model_len // plan.block_size)
        rows = plan.max_seqs * self.block_size
        self._inputs = StepInputs(rows, plan.max_seqs, max_blocks, plan.block_size, device)
        self._pending: dict[Request, Pending] = {}
        self._seen = SeenRows(plan.max_seqs * (plan.block_size + self.block_size), drafter, device)
        self._graphs = Graphs(self._propose, ops) if plan.graphs else None
        self._observing = Graphs(self._observe, ops) if plan.graphs else None
        self.unrecorded: list[str] = []  # why drafts are not replayed although the plan says so
        self._targets: Tensor | None = None  # int64 [draft vocabulary], what columns of its logits stand for
        self._target_list: list[int] = []  # the same, for the host
        self._rows: Table = None  # the runner's taps
        self._gaps = np.zeros(plan.num_blocks, dtype=bool)  # by block: it has rows that were passed over
        self._has_gaps = False  # whether any row was ever passed over: looking at the blocks takes 0.5 % of a step
        self.may_pass_over = True  # steps that the device takes by itself look at all blocks: flight.py says no

    def width(self, depth: int) -> int:
        """Rows of a block that drafts 'depth' ids: the trained size, halved as often as that leaves enough.

        Masks see each other, so a narrower block drafts a little worse: of 16 rows, a quarter has its first draft
        accepted in 0.4 % fewer cases and an eighth in 1.4 %, for a quarter and an eighth of what the layers cost.
        """
        return next(w for w in (self.block_size >> n for n in (3, 2, 1, 0)) if depth < w)

    def observe(self, work: Work, num_accepted: int, runner: Runner, row: int) -> None:
        """The work's rows, which begin at 'row' of the batch just run; those of rejected drafts are left out."""
        count = work.num_known + num_accepted
        self._mark(work, count, gap=False)
        if not work.decodes:
            rows, inputs = slice(row, row + count), runner.inputs
            self.drafter.observe(runner.taps[rows], inputs.positions[rows], inputs.slots[rows])
            return
        pending = self._pending.get(work.request)
        if pending is None:
            shape = (self.plan.block_size + self.block_size, *runner.taps.shape[1:])
            room = torch.empty(shape, dtype=runner.taps.dtype, device=runner.taps.device)
            pending = self._pending[work.request] = Pending(work.start, room, _table(room))
            self._rows = _table(runner.taps)
        assert pending.start + pending.count == work.start, (pending.start, pending.count, work.start)
        pending.add(self._rows, row, count)
        if pending.start // self.plan.block_size != (pending.start + pending.count) // self.plan.block_size:
            self.flush([work.request])

    def pass_over(self, work: Work, num_accepted: int) -> None:
        """The work's rows will not be shown to the drafter, and neither will those of it that wait."""
        self._has_gaps = True
        self._mark(work, work.num_known + num_accepted, gap=True)
        self._pending.pop(work.request, None)  # all in the block that this work's first row is in

    def is_ready(self, request: Request) -> bool:
        """Whether it can draft: no row of the block that it is writing was passed over."""
        position, size = request.num_computed, self.plan.block_size
        return position % size == 0 or not self._gaps[request.blocks[position // size]]

    def flush(self, requests: list[Request]) -> None:
        """Let the drafter see all that waits, of all these requests in one pass."""
        waiting = [(r, self._pending[r]) for r in requests if r in self._pending and self._pending[r].count]
        if not waiting:
            return
        shape = Shape(1, self._seen.fill(waiting, self.plan.block_size), 0, 0)
        self._observing = self._replay(self._observing, self._observe, shape)[0]
        for _, pending in waiting:
            pending.start, pending.count = pending.start + pending.count, 0

    def propose(self, works: list[Work]) -> list[list[int]]:
        """Drafts for each, as many as it has room for, in one forward pass of the drafter."""
        self.flush([w.request for w in works])
        depth = max(w.most_drafts for w in works)
        width = self.width(depth)
        mask = [self.drafter.caps.mask_id] * (width - 1)
        parts = [
            Rows(
                [*w.request.ids(w.start, w.start + 1), *mask], w.start, w.request.blocks, 1, depth + 1, self._visible(w)
            )
            for w in works
        ]
        self._inputs.fill(parts)
        shape = Shape(len(works), len(works) * width, width, len(works) * depth)
        self._graphs, logits = self._replay(self._graphs, self._propose, shape)
        ids = self._pick(logits, works, depth)
        return [ids[i * depth : i * depth + w.most_drafts] for i, w in enumerate(works)]

    def _mark(self, work: Work, count: int, gap: bool) -> None:
        """A block has a gap from the first row on that is passed over, until its rows are written anew."""
        start, size = work.start, self.plan.block_size
        if not gap and start % size and start % size + count <= size:
            return  # within a block that keeps its mark: most steps
        begun = start // size if gap else -(-start // size)
        end = -(-(start + count) // size)
        if begun < end:
            self._gaps[np.frombuffer(work.request.blocks, dtype=np.int32)[begun:end]] = gap

    def _visible(self, work: Work) -> IntArray | None:
        """The request's blocks without gaps, and those that the drafts are written to; None if those are all."""
        if not self._has_gaps:
            return None
        blocks = np.frombuffer(work.request.blocks, dtype=np.int32)
        gaps = self._gaps[blocks]
        gaps[work.start // self.plan.block_size :] = False  # not written yet, or `is_ready` has looked at it
        return blocks[~gaps] if gaps.any() else None

    def _pick(self, logits: Tensor, works: list[Work], depth: int) -> list[int]:
        """The likeliest ids; for sampled requests those that the sampler's own dice give with the drafter's logits."""
        rows = [(w.request, w.request.num_tokens + k) for w in works for k in range(depth)]
        if self._targets is None:
            self._targets = self.drafter.to_target(torch.arange(logits.shape[1], device=self.device))
            self._target_list = self._targets.tolist()
        targets = self._target_list
        return [targets[column] for column in pick(self.ops, logits, rows, self._targets).tolist()]

    def release(self, request: Request) -> None:
        self._pending.pop(request, None)

    def _replay(
        self, graphs: Graphs | None, run: Callable[[Shape], Tensor], shape: Shape
    ) -> tuple[Graphs | None, Tensor]:
        """Replay where that is possible; a drafter with an operator that can not be recorded is launched plainly."""
        if graphs is None:
            return None, run(shape)
        try:
            return graphs, graphs.replay(shape)
        except Unrecordable as reason:
            self.unrecorded.append(f"the drafter's '{reason}' is not one of the CPU kernels")
            return None, run(shape)

    def _observe(self, shape: Shape) -> Tensor:
        seen, rows = self._seen, shape.rows
        self.drafter.observe(seen.taps[:rows], seen.positions[:rows], seen.slots[:rows])
        return seen.taps

    def _propose(self, shape: Shape) -> Tensor:
        inputs, rows = self._inputs, shape.rows
        block = DraftBlock(
            inputs.token_ids[:rows],
            inputs.positions[:rows],
            inputs.slots[:rows],
            inputs.view(shape.seqs, shape.max_query, self.plan.max_model_len),
            inputs.logit_rows[: shape.num_read],
        )
        return self.drafter.propose(block)


class SeenRows:
    """Where committed rows are laid for the drafter to see: at fixed addresses, so that seeing can be recorded."""

    def __init__(self, room: int, drafter: Drafter, device: torch.device) -> None:
        self._room, self._device = room, device
        self._host = torch.zeros(2, room, dtype=torch.int32)
        self._array = self._host.numpy()
        self.positions, self.slots = self._host if device.type == "cpu" else self._host.to(device)
        self.taps = torch.empty(0)  # [room, layers tapped, hidden], made when the first rows come
        self._rows: Table = None  # the same memory

    def fill(self, waiting: list[tuple[Request, Pending]], block_size: int) -> int:
        """Returns the rows to be seen: up to a power of two, so that few numbers are recorded; some are nobody's."""
        if not len(self.taps):
            shape = (self._room, *waiting[0][1].taps.shape[1:])
            self.taps = torch.zeros(shape, dtype=waiting[0][1].taps.dtype, device=self._device)
            self._rows = _table(self.taps)
        end = 0
        for request, pending in waiting:
            span = np.arange(pending.start, pending.start + pending.count)
            blocks = np.frombuffer(request.blocks, dtype=np.int32)
            begin, end = end, end + pending.count
            self._array[0, begin:end] = span
            self._array[1, begin:end] = blocks[span // block_size] * block_size + span % block_size
            self._rows[begin:end] = pending.rows[: pending.count]
        begin, end = end, min(1 << (end - 1).bit_length(), self._room)
        self._array[1, begin:end] = -1
        if self._device.type != "cpu":  # waits: the host's side may be filled again before the device gets here
            self.positions[:end].copy_(self._host[0, :end])
            self.slots[:end].copy_(self._host[1, :end])
        return end


def _table(taps: Tensor) -> Table:
    return taps.numpy() if taps.device.type == "cpu" else taps
