"""Overlapped steps: while the same requests only decode, the next step is launched before the last one is read.

The device keeps what a step needs (engine/slots.py), so it never waits for the host. The host is one step behind:
it launches a step, reads the result of the step before and streams it. Ids past the end of a request are dropped. A
request that joins, leaves or needs the host within a step (a grammar, log-probabilities, drafts from its own text) ends
the overlap; it starts again when all requests only decode. vLLM calls this async scheduling, SGLang the overlap
scheduler.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparkdraft.core import Request
from sparkdraft.engine.accept import NotFinite
from sparkdraft.engine.graphs import Graphs, gpu_sizes
from sparkdraft.engine.proposer import Proposer
from sparkdraft.engine.runner import Runner
from sparkdraft.engine.sampler import Draws, EditTables
from sparkdraft.engine.slots import Slots, StepKind

RING = 16  # plain steps after which the drafter observes their rows
AHEAD = 2  # launched steps that are unread, at most: one runs, one waits for it


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did to one request."""

    request: Request
    ids: list[int]  # the accepted drafts, and the target's own sample after them; none if the step computed NaN
    drafted: int
    num_draft: int  # that were verified: as many, or fewer where the block was cut
    gaps: list[float]  # of what was drafted (engine/sampler.py); empty where blocks are not cut


@dataclass(frozen=True, slots=True)
class Launched:
    depths: list[int]  # per slot
    result: Tensor  # as Slots.step gives it, on the host, complete once 'done'
    done: torch.cuda.Event | None
    # whether it was replayed; a step that is launched plainly or captured takes the host many times as long
    usual: bool
    depth: int  # of the graph

    def read(self, requests: list[Request]) -> tuple[list[StepResult], float]:
        """The results of these requests, and the seconds that verifying took; 0 if they are not known."""
        if self.done:
            self.done.synchronize()
        end = self.depth + 4
        rows: list[list[int]] = self.result[:, :end].tolist()
        gaps: list[list[float]] = self.result[:, end:].contiguous().view(torch.float32).tolist()
        results = [
            StepResult(request, row[: row[-3] + 1], drafted, row[-2], sure[:drafted])
            for request, drafted, row, sure in zip(requests, self.depths, rows, gaps, strict=False)
        ]
        return results, rows[0][-1] / 1e9


class OverlappedSteps:
    def __init__(
        self,
        runner: Runner,
        proposer: Proposer | None,
        device: torch.device,
        depths: Sequence[int],
        cuts: bool = False,
        edits: EditTables | None = None,
    ) -> None:
        """depths: the depths at which steps are captured. A step of another depth runs at the next larger one.
        cuts: whether the device cuts blocks of drafts. edits: of the sampler; without them, requests that ask for
        penalties or biases end the overlap."""
        self.slots = Slots(runner, proposer, RING, device, cuts, edits)
        self.requests: list[Request] = []  # per slot
        self.step_seconds = 0.0  # time of the step read last; 0 if it says nothing about the next step of its kind
        self.verify_seconds = 0.0  # and the part of it after drafting; 0 if it is not known
        self._runner, self._proposer, self._device, self._depths = runner, proposer, device, depths
        self._unread: deque[Launched] = deque()
        self._num_waiting = 0  # plain steps whose rows the drafter has not observed
        self._num_blocks: list[int] = []  # per slot, the number of blocks that the device knows
        self._most: list[int] = []
        self._draws = self._edits = False
        self._read_at = 0.0
        if proposer:
            # the device's tables name all blocks of a request, so no rows may be missing
            proposer.may_pass_over = False
        on_gpu = device.type == "cuda"
        self._steps = Graphs(self.slots.step, runner.model.ops) if on_gpu else None
        self._catching_up = Graphs(self.slots.catch_up, runner.model.ops) if on_gpu else None

    @property
    def num_unread(self) -> int:
        return len(self._unread)

    @property
    def max_unread_ids(self) -> int:
        """Ids that a request may have beyond those that the host knows."""
        return sum(1 + max(launched.depths) for launched in self._unread)

    def takes(self, request: Request, depth: int) -> bool:
        """Return whether its steps do not need the host, and everything that launched steps may write fits into its
        context."""
        params, plan = request.params, self._runner.plan
        plain = not params.grammar and params.logprobs is None
        if self.slots.edits is None:
            plain = plain and not (params.has_penalties or params.logit_bias or params.min_tokens)
        room = request.num_tokens + self.max_unread_ids + self.reach(depth) <= plan.max_model_len
        # The step that writes a request's first id is the host's: other texts of the same prompt begin with it.
        return plain and room and bool(request.output_ids) and (not self._proposer or self._proposer.knows(request))

    def reach(self, depth: int) -> int:
        """Positions, from the anchor on, that a step of this depth writes."""
        if not self._proposer or not depth:
            return 1
        depth = self._recorded(depth)
        return max(1 + depth, self._proposer.drafter.reach(depth))

    def num_rows(self, num_requests: int, depth: int) -> int:
        """Rows of a step of this depth, including those of spare slots."""
        return self._size(num_requests) * self.reach(depth)

    def launch(self, requests: list[Request], depths: list[int], terms: Sequence[float] = ()) -> None:
        """Launch one more step. The first one gives these requests their slots. Their blocks must cover all that it may
        write. terms: by what blocks of drafts are cut (Slots.terms); none: as before."""
        if not self.requests:
            self._start(requests)
        assert self.requests == requests and self.num_unread < AHEAD
        depth = max(depths)
        if depth and self._num_waiting:
            self.catch_up()
        self._send(depths)
        if terms:
            self.slots.terms[: len(terms)].copy_(self._staged(terms, torch.float32), non_blocking=True)
        kind = StepKind(self._size(len(self.requests)), self._recorded(depth), self._draws, self._edits)
        usual = self._steps is None or kind in self._steps
        if not usual:
            self._read_at = 0.0  # it keeps the host from reading the step before in time
        result = self._steps.replay(kind) if self._steps else self.slots.step(kind)
        self._unread.append(self._fetch(Launched(depths, result, None, usual, kind.depth)))
        self._num_waiting += self._proposer is not None and not self.slots.chain and not depth
        if self._num_waiting == RING:
            self.catch_up()

    def read(self) -> list[StepResult]:
        """Wait for the oldest unread step and return its results. Raises NotFinite."""
        launched = self._unread.popleft()
        (results, verify), now = launched.read(self.requests), time.perf_counter()
        self.step_seconds = now - self._read_at if self._read_at and launched.usual else 0.0
        # A step that seems shorter than its verification was read late after the one before: its parts are not known.
        self.verify_seconds = verify if verify < self.step_seconds else 0.0
        self._read_at = now
        if any(not result.ids and not result.request.finish for result in results):
            raise NotFinite
        return results

    def end(self) -> None:
        """Leave everything as the host expects it, once every step has been read."""
        assert not self._unread
        if self._num_waiting:
            self.catch_up()
        if self._proposer and self.slots.chain:
            for request, hidden in zip(self.requests, self.slots.hidden, strict=False):
                self._proposer.resume(request, hidden)
        if self.slots.edits is not None:
            for request in self.requests:
                self.slots.edits.counted(request)
        self.requests, self._read_at = [], 0.0

    def abandon(self) -> None:
        """Drop launched steps without reading them: the caller ends all their requests."""
        self._unread.clear()
        self._num_waiting = 0
        self.requests, self._read_at = [], 0.0

    def catch_up(self) -> None:
        seqs, self._num_waiting = self._size(len(self.requests)), 0
        if self._catching_up:
            if seqs not in self._catching_up:
                self._read_at = 0.0
            self._catching_up.replay(seqs)
        else:
            self.slots.catch_up(seqs)

    # ---- the parts

    def _recorded(self, depth: int) -> int:
        return next(d for d in self._depths if d >= depth)

    def _size(self, num_requests: int) -> int:
        """The number of slots of a step. On a GPU it is one of a few sizes that are captured; the spare slots are
        empty."""
        if not self._steps:
            return num_requests
        return next(s for s in gpu_sizes(self._runner.plan.max_seqs) if s >= num_requests)

    def _start(self, requests: list[Request]) -> None:
        self.requests, slots, device = list(requests), self.slots, self._device
        if self._proposer:
            self._proposer.flush(requests)
            if slots.chain:
                slots.hidden[: len(requests)] = self._proposer.last_hidden(requests)
            for request in requests:
                self._proposer.hand_over(request)
        spare = [0] * (len(slots.length) - len(requests))
        anchors = [r.num_computed for r in requests]
        assert all(r.num_tokens == r.num_computed + 1 for r in requests)
        last = [r.ids(a, a + 1)[0] for r, a in zip(requests, anchors, strict=True)]
        numbers = torch.tensor([last + spare, [a + 1 for a in anchors] + spare, anchors + spare], dtype=torch.int32)
        for kept, values in zip((slots.token, slots.length, slots.observed), numbers, strict=True):
            kept.copy_(values)  # in place, because graphs know them by their address
        draws = Draws.of(requests, anchors, device)
        self._draws = draws is not None
        edited = slots.edits.slots(requests) if slots.edits is not None else None
        self._edits = edited is not None
        slots.edit_slots.copy_(torch.tensor([*(edited or [-1] * len(requests)), *(-1 for _ in spare)]))
        if draws:
            slots.floats[:, : len(requests)] = draws.floats.view(3, -1)
            # without positions, which the device keeps itself
            slots.integers[:, : len(requests)] = draws.integers.view(3, -1)[:2]
        else:
            slots.floats.zero_()
        self._num_blocks, self._most = [0] * len(requests), []

    def _send(self, depths: list[int]) -> None:
        """Send what the host decides about a step, where it has changed: the depth of each slot, and its new blocks."""
        slots = self.slots
        if depths != self._most:
            slots.most[: len(depths)].copy_(self._staged(depths), non_blocking=True)
            self._most = depths
        width = slots.tables.shape[1]
        places: list[int] = []
        blocks: list[int] = []
        for slot, request in enumerate(self.requests):
            known, now = self._num_blocks[slot], len(request.blocks)
            places += range(slot * width + known, slot * width + now)
            blocks += request.blocks[known:now].tolist()
            self._num_blocks[slot] = now
        if blocks:
            both = self._staged([*places, *blocks]).to(self._device, non_blocking=True)
            slots.tables.view(-1)[both[: len(places)].long()] = both[len(places) :]

    def _staged(self, values: Sequence[float], dtype: torch.dtype = torch.int32) -> Tensor:
        """A copy in pinned memory. Torch's allocator does not reuse it while a copy from it is under way."""
        on_gpu = self._device.type == "cuda"
        return torch.tensor(values, dtype=dtype, pin_memory=on_gpu)

    def _fetch(self, launched: Launched) -> Launched:
        """Start copying a step's result to the host. The next replay overwrites it, but only after this copy."""
        result = launched.result
        if self._device.type == "cpu":
            return replace(launched, result=result.clone())
        host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
        host.copy_(result, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return replace(launched, result=host, done=done)
