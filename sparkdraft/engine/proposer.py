"""The host's side of drafting by a model: shows the drafter committed tokens, and asks it for drafts.

Tokens of a prompt chunk are observed at once. Decode tokens wait until the request drafts again or a block of the cache
becomes full, and are then observed together. So a paused drafter costs about 1 % of a step, and a full block has its
draft K/V before another request can find it in the prefix cache.

    committed tokens | observed ................ | pending |         pending never reaches across a full block
    K/V of a draft                                         | anchor, drafts |   overwritten once they are committed

In a batch so large that no draft could pay, tokens of requests that did not ask for drafts are passed over
(`pass_over`). Their blocks are marked, also in the prefix cache. Later drafts do not read marked blocks, and a request
drafts again from the first block on that was observed from its beginning. A chain drafter begins with the hidden state
of a request's last token, so its tokens are never passed over.

On a GPU, drafts are made within a step of all slots (engine/slots.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from sparkdraft.core import Request, Work
from sparkdraft.drafters.base import Anchors, CommittedRows, Drafter, Score
from sparkdraft.engine.graphs import Graphs
from sparkdraft.engine.runner import IntArray, Rows, Runner, StepInputs
from sparkdraft.engine.sampler import draws_of, pick, pick_sure
from sparkdraft.kernels.ops import CannotCapture, Ops
from sparkdraft.plan.resolve import Plan

Table = Any  # a tensor; on a CPU its numpy view, because torch takes thirty microseconds to copy a few kilobytes
Key = TypeVar("Key")


class PassShape(NamedTuple):
    """What a drafter's pass is captured for."""

    seqs: int
    each: int  # rows of logits per sequence


class RowsShape(NamedTuple):
    """What observing is captured for."""

    rows: int


class Drafts(NamedTuple):
    """The drafts of one request and their gaps (engine/sampler.py), which may be missing."""

    ids: list[int]
    gaps: list[float]


@dataclass(slots=True)
class Pending:
    """Hidden states of committed tokens that the drafter has not observed: positions [start, start + count)."""

    start: int
    hidden: Tensor  # [room, aux layers, hidden]
    rows: Table  # the same memory as 'hidden'
    count: int = 0
    last: int = 0  # the row of the last committed position; it stays after all rows were observed

    def add(self, rows: Table, first: int, count: int) -> None:
        end = self.count + count
        self.rows[self.count : end] = rows[first : first + count]
        self.count, self.last = end, end - 1


class Proposer:
    def __init__(self, drafter: Drafter, plan: Plan, device: torch.device, ops: Ops) -> None:
        self.drafter, self.plan, self.device, self.ops = drafter, plan, device, ops
        self.chain = drafter.caps.chain
        self._keeps = bool(drafter.caps.kv)  # whether observing writes anything
        self.max_depth = drafter.caps.max_depth
        self.finds_gaps = True  # whether to find out how sure each draft is; engine/drafting.py decides
        max_blocks = -(-plan.max_model_len // plan.block_size)
        self._inputs = StepInputs(plan.max_seqs, plan.max_seqs, max_blocks, plan.block_size, device)  # the anchors
        self._anchors: dict[int, Anchors] = {}  # per number of anchors: views of the inputs
        self._works: list[Work] = []  # the work whose drafts are being made
        self._score: Score | None = None  # the pass that is running
        self._gaps_found: list[Tensor] = []  # of the passes of one proposal: float32 [works, each]
        self._pending: dict[Request, Pending] = {}
        self._handed_over: set[Request] = set()  # requests whose hidden states the slots of a GPU keep
        self._seen: SeenRows | None = None  # created with the first rows, as are the next two
        self._rows: Table = None  # the runner's aux_hidden
        # [max_seqs, aux layers, hidden]: the rows before the anchors, for a chain drafter
        self._hidden = torch.empty(0)
        self._passes = Graphs(self._run_pass, ops) if plan.graphs else None
        self._observing = Graphs(self._observe, ops) if plan.graphs else None
        self._gaps = np.zeros(plan.num_blocks, dtype=bool)  # per block: whether it has rows that were passed over
        self._has_gaps = False  # whether any row was ever passed over: checking the blocks takes 0.5 % of a step
        self.unrecorded: list[str] = []  # why drafts are not replayed although the plan says so
        # The slots of a GPU read all blocks: engine/device_steps.py sets this to False.
        self.may_pass_over = not self.chain

    @property
    def graphs(self) -> list[Graphs[Any]]:
        return [each for each in (self._passes, self._observing) if each]

    def observe(self, work: Work, runner: Runner, row: int) -> None:
        """Takes the work's committed tokens, which begin at 'row' of the last batch."""
        request, count = work.request, work.request.num_computed - work.start
        self._mark(work, count, gap=False)
        if self._seen is None:
            self._attach(runner.aux_hidden)
        if not work.decodes:
            rows, inputs = slice(row, row + count), runner.inputs
            following = self._ids_after(request, work.start, count) if self.chain else None
            seen = CommittedRows(runner.aux_hidden[rows], inputs.positions[rows], inputs.slots[rows], following)
            if self._keeps:
                self.drafter.observe(seen)
            if self.chain:  # a chunk may leave one known row, and drafts may follow that one
                self.resume(request, self._rows[row + count - 1])
            return
        pending = self._pending.get(request) or self._wait(request, work.start)
        assert pending.start + pending.count == work.start, (pending.start, pending.count, work.start)
        pending.add(self._rows, row, count)
        if pending.start // self.plan.block_size != (pending.start + pending.count) // self.plan.block_size:
            self.flush([request])

    def pass_over(self, work: Work) -> None:
        """Does not show the work's tokens to the drafter, nor those of the request that are pending."""
        self._has_gaps = True
        self._mark(work, work.request.num_computed - work.start, gap=True)
        self._pending.pop(work.request, None)  # pending rows are all in the block of this work's first row

    def is_ready(self, request: Request) -> bool:
        """Return whether the request can draft: no token of the block that it is writing was passed over."""
        position, size = request.num_computed, self.plan.block_size
        whole = position % size == 0 or not self._gaps[request.blocks[position // size]]
        return whole and self.knows(request)

    def knows(self, request: Request) -> bool:
        """Whether what its drafts begin with is there: a chain drafter lacks the hidden state of a last token that came
        from the prefix cache."""
        return not self.chain or request in self._pending or request in self._handed_over

    def flush(self, requests: list[Request]) -> None:
        """Lets the drafter observe all pending tokens of these requests in one pass."""
        waiting = [(r, self._pending[r]) for r in requests if r in self._pending and self._pending[r].count]
        if not waiting:
            return
        assert self._seen
        if self._keeps:
            num_rows = self._seen.fill(waiting, self.plan.block_size)
            self._observing = self._replay(self._observing, self._observe, RowsShape(num_rows))[0]
        for _, pending in waiting:
            pending.start, pending.count = pending.start + pending.count, 0

    def release(self, request: Request) -> None:
        self._pending.pop(request, None)
        self._handed_over.discard(request)

    def hand_over(self, request: Request) -> None:
        """Overlapped steps begin: the device has taken what is pending, and keeps what follows itself."""
        self.release(request)
        self._handed_over.add(request)

    def propose(self, works: list[Work]) -> list[Drafts]:
        """Drafts for each work, as many as it has room for."""
        self.flush([w.request for w in works])
        self._inputs.fill(
            [
                Rows(w.request.ids(w.start, w.start + 1), w.start, w.request.blocks, 0, 1, self._visible(w))
                for w in works
            ]
        )
        if self.chain:
            self._hidden[: len(works)] = self.last_hidden([w.request for w in works])
        self._works, depth = works, max(w.most_drafts for w in works)
        self._gaps_found = []
        ids = self.drafter.propose(self._anchors_of(len(works)), depth, self._pick).tolist()
        gaps = torch.cat(self._gaps_found, 1).tolist() if self._gaps_found else [[]] * len(works)
        most = [work.most_drafts for work in works]
        return [Drafts(drafts[:room], sure[:room]) for drafts, sure, room in zip(ids, gaps, most, strict=True)]

    def _pick(self, score: Score, each: int, drafted: int = 0, ids: Tensor | None = None) -> Tensor:
        """drafters.base.Pick: replays the pass if it was captured; rows are sampled outside of the graph."""
        works, self._score = self._works, score
        self._passes, logits = self._replay(self._passes, self._run_pass, PassShape(len(works), each))
        requests, positions = [w.request for w in works], [w.request.num_tokens + drafted for w in works]
        draws = draws_of(requests, positions, self.device, each)
        if not self.finds_gaps:
            return pick(self.ops, logits, draws, ids).view(len(works), each)
        sure = pick_sure(self.ops, logits, draws, ids)
        self._gaps_found.append(sure.gaps.view(len(works), each))
        return sure.ids.view(len(works), each)

    def _run_pass(self, shape: PassShape) -> Tensor:
        assert self._score
        return self._score(False)

    def _anchors_of(self, seqs: int) -> Anchors:
        if seqs not in self._anchors:
            inputs, hidden = self._inputs, self._hidden[:seqs] if self.chain else None
            state = inputs.token_ids[:seqs], inputs.context_len[:seqs], inputs.block_tables[:seqs]
            size, positions = self.plan.block_size, inputs.positions[:seqs]
            self._anchors[seqs] = Anchors(*state, size, max_context(self.drafter, self.plan), positions, hidden)
        return self._anchors[seqs]

    # ---- the hidden states that a chain drafter begins with

    def last_hidden(self, requests: list[Request]) -> Tensor:
        """The hidden state of the last committed token of each request: [requests, aux layers, hidden]."""
        kept = (self._pending[r] for r in requests)
        return torch.stack([pending.hidden[pending.last] for pending in kept])

    def resume(self, request: Request, hidden: Table) -> None:
        """Continues where the drafter has observed all tokens of the request. hidden: [aux layers, hidden], of its last
        token."""
        pending = self._pending.get(request) or self._wait(request, 0)
        pending.start, pending.count, pending.last = request.num_computed, 0, 0
        pending.rows[0] = hidden

    def _attach(self, aux_hidden: Tensor) -> None:
        """aux_hidden: where the runner leaves hidden states, [rows, aux layers, hidden]."""
        plan, self._rows = self.plan, _table(aux_hidden)
        self._seen = SeenRows(plan.max_seqs * self._room, aux_hidden, self.chain)
        if self.chain:
            self._hidden = aux_hidden.new_zeros((plan.max_seqs, *aux_hidden.shape[1:]))

    @property
    def _room(self) -> int:
        """Pending tokens of a request at most: those of one block, and of a step that reaches across its end."""
        return self.plan.block_size + 1 + self.max_depth

    def _wait(self, request: Request, start: int) -> Pending:
        assert self._seen
        room = torch.empty(
            (self._room, *self._seen.hidden.shape[1:]), dtype=self._seen.hidden.dtype, device=self.device
        )
        pending = self._pending[request] = Pending(start, room, _table(room))
        return pending

    def _ids_after(self, request: Request, start: int, count: int) -> Tensor:
        """int32 [count]: the id that follows each token from position 'start' on."""
        ids = request.ids(start + 1, start + 1 + count)
        return torch.tensor(ids, dtype=torch.int32, device=self.device)

    def _mark(self, work: Work, count: int, gap: bool) -> None:
        """Marks blocks: a block has a gap once one of its tokens is passed over, until its tokens are written again."""
        start, size = work.start, self.plan.block_size
        if gap and count == 1:  # as in most steps
            self._gaps[work.request.blocks[start // size]] = True
            return
        if not gap and start % size and start % size + count <= size:
            return  # the step stays within a block, which keeps its mark: true for most steps
        begun = start // size if gap else -(-start // size)
        end = -(-(start + count) // size)
        if begun < end:
            self._gaps[np.frombuffer(work.request.blocks, dtype=np.int32)[begun:end]] = gap

    def _visible(self, work: Work) -> IntArray | None:
        """The request's blocks that the drafter is shown; None: all. Blocks with gaps are left out, and those between
        the first and the last that a drafter sees."""
        size, sees = self.plan.block_size, self.drafter.caps.sees
        distant = sees.left_out(work.start, size) if sees else 0
        if not self._has_gaps and not distant:
            return None
        blocks = np.frombuffer(work.request.blocks, dtype=np.int32)
        hidden = self._gaps[blocks]
        hidden[work.start // size :] = False  # not written yet, or checked by `is_ready`
        if sees and distant:
            kept = sees.kept(size)
            hidden[kept : kept + distant] = True
        return blocks[~hidden] if hidden.any() else None

    def _replay(
        self, graphs: Graphs[Key] | None, run: Callable[[Key], Tensor], key: Key
    ) -> tuple[Graphs[Key] | None, Tensor]:
        """Replays a pass where that is possible; a drafter that cannot be captured is launched plainly."""
        if graphs is None:
            return None, run(key)
        try:
            return graphs, graphs.replay(key)
        except CannotCapture as reason:
            self.unrecorded.append(f"the drafter calls '{reason}', which is not one of the CPU kernels")
            return None, run(key)

    def _observe(self, shape: RowsShape) -> Tensor:
        assert self._seen
        self.drafter.observe(self._seen.first(shape.rows))
        return self._seen.hidden


def max_context(drafter: Drafter, plan: Plan) -> int:
    """An upper bound on the tokens that a draft block sees, itself included."""
    sees = drafter.caps.sees
    most = sees.most(plan.block_size) + 1 + drafter.caps.max_depth if sees else plan.max_model_len
    return min(most, plan.max_model_len)


class SeenRows:
    """The buffers from which the drafter observes tokens, at fixed addresses."""

    def __init__(self, room: int, aux_hidden: Tensor, chain: bool) -> None:
        """aux_hidden: hidden states, for their shape and device."""
        self._room, self._device = room, aux_hidden.device
        self._host = torch.zeros(2 + chain, room, dtype=torch.int32)  # positions, slots, ids that follow
        self._array = self._host.numpy()
        integers = self._host if self._device.type == "cpu" else self._host.to(self._device)
        self._integers = tuple(integers)
        self.hidden = aux_hidden.new_zeros((room, *aux_hidden.shape[1:]))
        self._rows = _table(self.hidden)

    def first(self, count: int) -> CommittedRows:
        return CommittedRows(self.hidden[:count], *(numbers[:count] for numbers in self._integers))

    def fill(self, waiting: list[tuple[Request, Pending]], block_size: int) -> int:
        """Returns the number of tokens to observe, padded to a power of two so that few numbers are captured."""
        end = 0
        for request, pending in waiting:
            span = np.arange(pending.start, pending.start + pending.count)
            blocks = np.frombuffer(request.blocks, dtype=np.int32)
            begin, end = end, end + pending.count
            self._array[0, begin:end] = span
            self._array[1, begin:end] = blocks[span // block_size] * block_size + span % block_size
            if len(self._array) > 2:
                self._array[2, begin:end] = request.ids(pending.start + 1, pending.start + 1 + pending.count)
            self._rows[begin:end] = pending.rows[: pending.count]
        begin, end = end, min(1 << (end - 1).bit_length(), self._room)
        self._array[1, begin:end] = -1
        # this copy waits, because the host may refill its side before the device has read it
        if self._device.type != "cpu":
            for mine, theirs in zip(self._integers, self._host, strict=True):
                mine[:end].copy_(theirs[:end])
        return end


def _table(aux_hidden: Tensor) -> Table:
    return aux_hidden.numpy() if aux_hidden.device.type == "cpu" else aux_hidden
