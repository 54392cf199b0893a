"""Launches a step before the last one is read, so that a GPU never waits for the host.

The device keeps what a step needs of each decoding request (engine/slots.py). The host is one step behind: it launches
a step, reads the result of the step before and streams it. Who joins or leaves is a write to the slots before the next
launch; ids past the end of a request are dropped. vLLM calls this async scheduling, SGLang the overlap scheduler.

A step without prompts is one CUDA graph. Prompt chunks run in the same pass as the slots. Short ones have graphs too,
without drafts; in a step that drafts they run after the slots, as a graph of their own. Long ones are launched operator
by operator, because they keep a GPU busy. Where a request has a grammar
or wants log-probabilities, the host adds them between the two halves of a step: without drafts the target runs while
the host finds the masks; masks after drafts wait for it.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from sparkdraft.core import Batch, Request, Work
from sparkdraft.engine.accept import NotFinite
from sparkdraft.engine.drafting import Drafting, Outcome
from sparkdraft.engine.graphs import Graphs, gpu_sizes, packed_tokens
from sparkdraft.engine.runner import Rows, Runner
from sparkdraft.engine.sampler import Sampler, SampleRow, read_logprobs, staged
from sparkdraft.engine.slots import Asked, Chunks, Ran, Sampled, Slots, StepKind
from sparkdraft.engine.steps import StepRead, StepResult
from sparkdraft.plan.memory import RING
from sparkdraft.speculation.costs import PLAIN_FIRST
from sparkdraft.text.grammar import GrammarState, Mask

MEASURED = 4  # times that each captured step runs to be timed at start
PROMPT_ROWS = (16, 32, 64, 128, 256, 512)  # tokens of prompts for which steps are captured
PROMPTS = 4  # prompts in such a step, at most
BESIDE = (0, 1, 4, 16)  # slots beside them; and as many as there are


Key = TypeVar("Key")


class PromptKind(NamedTuple):
    """What a step with prompts and without drafts, or its first half, is captured for."""

    seqs: int  # slots
    rows: int  # tokens of all prompts


@dataclass(slots=True)
class Launched:
    batch: Batch
    slot_of: dict[Request, int]  # of those that decode
    firsts: list[Work]  # prompts that end
    depth: int  # of the graph, as the next
    rows: int
    # Whether its time is that of its kind: not if it was captured or launched while the device was idle.
    usual: bool
    needs_host: bool  # between its halves, so that not all of its time is the device's
    scored: list[Request] = field(default_factory=list)  # whose log-probabilities are in 'scores', in this order
    slots: Tensor | None = None  # as Slots.step gives it, on the host, complete once 'done', as are the next two
    first_ids: Tensor | None = None
    scores: Tensor | None = None
    prompt_scores: dict[Request, Any] | None = None
    done: torch.cuda.Event | None = None


@dataclass(slots=True)
class Halfway:
    """A step whose second half waits for the host."""

    kind: StepKind
    ran: Ran
    chunks: Chunks | None
    launched: Launched


class DeviceSteps:
    ahead = 1

    def __init__(self, runner: Runner, sampler: Sampler, drafting: Drafting) -> None:
        self.grammars: dict[Request, GrammarState] = {}
        self._runner, self._sampler, self._drafting = runner, sampler, drafting
        self._proposer, self._device, self._depths = drafting.proposer, sampler.device, drafting.choices
        self.slots = Slots(runner, drafting.proposer, RING, self._device, sampler.edits, drafting.cuts, drafting.ngram)
        self.requests: list[Request] = []  # per slot
        self._slot_of: dict[Request, int] = {}  # never changed in place: launched steps keep it
        self._slots_draw = False  # whether any slot draws its ids or edits its logits
        self._left: list[Request] = []  # have a slot and have ended
        self._unread: deque[Launched] = deque()
        self._halfway: Halfway | None = None
        self._num_waiting = 0  # plain steps whose rows the drafter has not observed
        self._most: list[int] = []  # per slot, the drafts that the device may verify
        self._no_hidden = set[Request]()  # without the hidden state that a chain drafter begins with
        self._read_at = 0.0
        if self._proposer:
            self._proposer.may_pass_over = False  # the slots' tables name all blocks, so no row may be missing
        drafting.matches_itself = False
        assert sampler.edits.tables  # captured steps read them
        ops, has_graphs = runner.model.ops, runner.plan.graphs and self._device.type == "cuda"
        self._steps = Graphs(self.slots.step, ops) if has_graphs else None
        self._forwards = Graphs(self.slots.forward, ops) if has_graphs else None
        self._prompts = Graphs(self._step_with_prompts, ops) if has_graphs else None
        self._prompt_forwards = Graphs(self._forward_prompts, ops) if has_graphs else None
        self._catching_up = Graphs(self.slots.catch_up, ops) if has_graphs else None
        most = runner.plan.max_seqs
        self._most_prompts, self._beside = min(PROMPTS, most), [*(n for n in BESIDE if n < most), most]
        # Of a captured step: the rows at which its prompts end, and their slots; and for a chain drafter the next ids.
        self._ends = torch.zeros(2, self._most_prompts, dtype=torch.int64, device=self._device)
        self._next_ids = torch.zeros(runner.plan.max_step_tokens, dtype=torch.int32, device=self._device)
        self._lost = defaultdict[StepKind, float](float)  # seconds that larger steps took for want of these

    @property
    def num_unread(self) -> int:
        return len(self._unread)

    @property
    def graphs(self) -> list[Graphs[Any]]:
        every = self._steps, self._forwards, self._prompts, self._prompt_forwards, self._catching_up
        return [each for each in every if each]

    def reach(self, depth: int) -> int:
        """The drafter writes as many positions for every slot as for the one that drafts most."""
        depth = self._captured(depth)
        return max(1 + depth, self._proposer.drafter.reach(depth) if self._proposer and depth else 0)

    def may_draft(self, batch: Batch) -> bool:
        """Steps with short prompts are captured without drafts. Beside drafts such prompts take a pass of their own."""
        depth, prompt_rows = max(work.most_drafts for work in batch.work), batch.num_prompt_rows
        prompts = [work for work in batch.work if not work.decodes]
        decoding = len(batch.work) - len(prompts)
        if prompts and all(work.samples for work in prompts) and self._prompt_kind(prompts, decoding):
            apart = self._prompt_kind(prompts, 0) and not any(self._needs_host(work) for work in batch.work)
            if not (apart and self._drafting.pays_beside(prompt_rows)):
                return False
        return prompt_rows + self._size(decoding, depth) * self.reach(depth) <= self._runner.plan.max_step_tokens

    def capture(self) -> None:
        """Captures the steps that requests are likely to need, so that none of them waits for a graph, and tells the
        draft budget what they cost."""
        if not self._steps or not self._prompts:
            return
        most = self._runner.plan.max_step_tokens
        kinds = [
            StepKind(size, depth, size * (1 + depth), draws)
            for depth in self._depths
            for size in gpu_sizes(self._runner.plan.max_seqs, depth > 0)
            for draws in (False, True)
            if size * (1 + depth) <= most
        ]
        self._steps.record(kinds)
        self.measure(self._steps, [kind for kind in kinds if not kind.draws])
        self._ends[1] = self.slots.spare  # a run before the capture fills no other
        self._prompts.record([PromptKind(n, rows) for n in self._beside for rows in PROMPT_ROWS if n + rows <= most])

    def measure(self, steps: Graphs[StepKind], kinds: list[StepKind]) -> None:
        """Times steps of empty slots: they multiply as many rows as others, but have no context to attend to."""
        for kind in kinds:
            result = steps.replay(kind)
            self._synchronize()
            begin = time.perf_counter()
            for _ in range(MEASURED):  # one behind the other, as steps run later: a GPU does not wait for the host
                result = steps.replay(kind)
            self._synchronize()
            seconds = (time.perf_counter() - begin) / MEASURED
            verify = max(float(result[0, kind.depth + 3]) / 1e9, 1e-9)
            for _ in range(PLAIN_FIRST):  # as often as makes them known
                self._drafting.measured_at_start(kind.seqs, kind.depth, kind.rows, seconds, min(verify, seconds))

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def launch(self, batch: Batch) -> None:
        """Launches one more step. The blocks of its requests must cover all that it may write."""
        slot_of, joined = self._place(batch)
        prompts = [work for work in batch.work if not work.decodes] if batch.num_prompt_rows else []
        ends = [work for work in prompts if work.samples]
        depth = self._captured(max([work.most_drafts for work in batch.work]))
        if (depth or prompts) and self._num_waiting:
            self.catch_up()
        self._send(batch, slot_of, joined)
        needs_host = any(self._needs_host(work) for work in batch.work)
        # Short prompts are captured: in one pass with plain slots, and in a pass of their own beside drafts.
        apart = depth > 0 and len(ends) == len(prompts) > 0 and not needs_host
        captured = self._prompt_kind(prompts, 0 if apart else len(slot_of)) if apart or not depth else None
        apart = apart and captured is not None
        size = captured.seqs if captured and not apart else self._size(len(slot_of), depth)
        self._slots_draw = self._slots_draw and any(map(self._draws, self.requests))  # min_tokens may be reached
        kind = StepKind(size, depth, size * (1 + depth), self._slots_draw)
        if depth and not needs_host:
            tokens = sum(1 + work.most_drafts for work in batch.work if work.decodes)
            kind = self._smaller(kind, tokens, bool(prompts) and not apart)
        launched = Launched(batch, slot_of, ends, depth, kind.rows, bool(self._unread), needs_host)
        self._unread.append(launched)
        if needs_host or (prompts and not (captured and ends)):
            chunks = self._chunks(prompts, ends, slot_of, captured) if prompts else None
            ran = self._run(launched, kind, chunks, captured)
            self._halfway = Halfway(kind, ran, chunks, launched)
            if not needs_host:
                self.complete()
        else:
            if apart or not prompts:  # first, because prompts fill slots
                whole = self._replay(self._steps, kind, launched) if self._steps else self.slots.step(kind)
                self._fetch(launched, Sampled(whole, None))
            if captured and self._prompts:
                self._chunks(prompts, ends, slot_of, captured)
                self._fetch(launched, self._replay(self._prompts, captured, launched))
            self._wait_to_observe(launched, has_prompts=bool(prompts))
        for work in ends:
            self._hand_over(work.request)
        for request in [r for r in self._no_hidden if r in slot_of]:
            self._no_hidden.discard(request)
            self._hand_over(request)

    def complete(self) -> None:
        """Samples, accepts and observes. The grammars have taken the ids of the step before."""
        if self._halfway is None:
            return
        halfway, self._halfway = self._halfway, None
        kind, ran, chunks, launched = halfway.kind, halfway.ran, halfway.chunks, halfway.launched
        asked = self._asked(launched, ran)
        for work in launched.batch.work:
            top = work.request.params.prompt_logprobs
            if top is not None and not work.request.output_ids and not work.decodes and chunks:
                scores = self._score_prompt(work, ran, launched.batch, top)
                launched.prompt_scores = (launched.prompt_scores or {}) | {work.request: scores}
        self._fetch(launched, self.slots.finish(kind, ran, chunks, asked))
        self._wait_to_observe(launched, has_prompts=chunks is not None)

    def read(self) -> StepRead:
        launched = self._unread.popleft()
        if launched.done:
            launched.done.synchronize()
        now = time.perf_counter()
        results, verify = self._results(launched)
        seconds = now - self._read_at if self._read_at and launched.usual else 0.0
        self._read_at = now
        if any(not r.ids and not r.work.request.finish for r in results if r.work.samples):
            raise NotFinite
        if verify >= seconds:  # the step before was read late: the time between the two says nothing
            seconds = 0.0
        if launched.needs_host or not seconds:
            verify = 0.0
        return StepRead(launched.batch, results, seconds, verify, launched.rows)

    def learn(self, read: StepRead, num_accepted: Sequence[int]) -> None:
        alone = read.batch.decodes
        decoding = read.results if alone else [result for result in read.results if result.work.decodes]
        if self.slots.text is not None:
            self._drafting.match([(result.work.request, result.matched) for result in decoding])
        if not any(result.num_drafted for result in decoding):
            alone = alone and not any(result.work.most_drafts for result in decoding)  # no text matched after all
            requests = [result.work.request for result in decoding]
            self._drafting.learn_plain(requests, read.seconds, read.verify_seconds * alone)
            return
        steps = [
            Outcome(r.work.request, r.num_drafted, r.num_draft, accepted, r.gaps, r.source)
            for r, accepted in zip(read.results, num_accepted, strict=True)
            if r.work.decodes
        ]
        self._drafting.learn_drafted(steps, read.rows, read.seconds, read.verify_seconds * alone)

    def forget(self, request: Request) -> None:
        self._sampler.forget(request)
        self._no_hidden.discard(request)
        if request in self._slot_of and request not in self._left:
            self._left.append(request)

    def abandon(self) -> None:
        self._unread.clear()
        self._halfway = None
        self._read_at = 0.0

    def catch_up(self) -> None:
        """Shows the drafter the rows of plain steps."""
        seqs, self._num_waiting = self._size(len(self.requests)), 0
        if self._catching_up:
            if seqs not in self._catching_up:
                self._read_at = 0.0
            self._catching_up.replay(seqs)
        else:
            self.slots.catch_up(seqs)

    # ---- slots

    def _place(self, batch: Batch) -> tuple[dict[Request, int], list[Work]]:
        """Gives and takes slots: (the slot of each request that decodes, the work of requests that are new)."""
        if self._left:
            self._take_back()
        slot_of = self._slot_of
        joining = [work for work in batch.work if work.samples and work.request not in slot_of]
        decoding = [work for work in joining if work.decodes]
        if decoding:  # launched steps keep the dictionary that they were given
            slot_of = dict(slot_of)
        # Those that decode come first: the slots of a step are the first ones.
        for work in sorted(joining, key=lambda work: not work.decodes):
            if work.decodes:
                slot_of[work.request] = len(self.requests)
            self.requests.append(work.request)
            work.request.sent_blocks = 0
            if work.decodes and self.slots.chain and not self._knows(work.request):
                self._no_hidden.add(work.request)
                work.most_drafts = 0
        if joining:
            self._slots_changed()
        assert len(slot_of) == sum(work.decodes for work in batch.work), "a slot has no work in this step"
        assert len(self.requests) <= self._runner.plan.max_seqs, len(self.requests)
        if joining:
            self._write(joining)
        return slot_of, decoding

    def _slots_changed(self) -> None:
        self._slot_of = {request: slot for slot, request in enumerate(self.requests)}
        self._slots_draw = any(map(self._draws, self.requests))

    def _take_back(self) -> None:
        """Takes the slots of requests that have ended. The last slots move up, so that those in use are the first."""
        if self._num_waiting:
            self.catch_up()
        ended, before = set(self._left), len(self.requests)
        kept = before - len(ended)
        holes = [slot for slot in range(kept) if self.requests[slot] in ended]
        moved = [slot for slot in range(kept, before) if self.requests[slot] not in ended]
        for hole, slot in zip(holes, moved, strict=True):
            self.requests[hole] = self.requests[slot]
        del self.requests[kept:]
        self._left.clear()
        self._most = []
        self._slots_changed()
        self.slots.move(self._staged([holes, moved], torch.int64) if holes else None, kept)

    def _write(self, joining: list[Work]) -> None:
        """Fills the slots of new requests. The slot of a prompt that ends in this step is empty until then."""
        slot_of, requests = self._slot_of, [work.request for work in joining]
        edited = self._sampler.edits.slots(requests) or [-1] * len(requests)
        state, floats, integers = [], [], []
        for work, edit in zip(joining, edited, strict=True):
            request, params = work.request, work.request.params
            token, length, observed = 0, 0, 0
            if work.decodes:
                length, observed = request.num_tokens, request.num_computed
                token = request.ids(length - 1, length)[0]
            state.append((token, length, observed, 0, edit))
            floats.append((params.temperature, params.min_p, params.top_p))
            integers.append((params.top_k, request.seed))
        index = self._staged([slot_of[request] for request in requests], torch.int64)
        slots = self.slots
        if slots.text is not None:
            for request in requests:
                ids = self._staged(request.ids(0, request.num_tokens), torch.int32)
                slots.text[slot_of[request], : len(ids)].copy_(ids)
        slots.state.index_copy_(1, index, self._staged(state, torch.int32).T)
        slots.floats.index_copy_(1, index, self._staged(floats, torch.float32).T)
        slots.integers.index_copy_(1, index, self._staged(integers, torch.int64).T)
        self._most = []

    def _send(self, batch: Batch, slot_of: dict[Request, int], joined: list[Work]) -> None:
        """Sends what the host decides about a step, where it has changed: the drafts of each slot, and its new
        blocks."""
        slots, most = self.slots, [0] * len(slot_of)
        for work in batch.work:
            if work.most_drafts:
                most[slot_of[work.request]] = work.most_drafts
        if most != self._most:
            slots.most[: len(most)].copy_(self._staged(most, torch.int32), non_blocking=True)
            self._most = most
        width = slots.tables.shape[1]
        places: list[int] = []
        blocks: list[int] = []
        for slot, request in enumerate(self.requests):
            known, now = request.sent_blocks, len(request.blocks)
            if known < now:
                places += range(slot * width + known, slot * width + now)
                blocks += request.blocks[known:now].tolist()
                request.sent_blocks = now
        if blocks:
            both = self._staged([places, blocks], torch.int64)
            slots.tables.view(-1)[both[0]] = both[1].int()
        depths = {work.request: work.most_drafts for work in batch.work if work.most_drafts}
        if slots.cuts and depths and (terms := self._drafting.cut_terms(list(slot_of), depths)):
            slots.terms[: len(terms)].copy_(self._staged(terms, torch.float32), non_blocking=True)

    def _knows(self, request: Request) -> bool:
        return self._proposer is not None and self._proposer.knows(request)

    def _hand_over(self, request: Request) -> None:
        if self._proposer:
            self._proposer.hand_over(request)

    def _draws(self, request: Request) -> bool:
        return request.params.temperature > 0 or self._sampler.edits.asks(request)

    # ---- a step

    def _replay(self, graphs: Graphs[Key], key: Key, launched: Launched) -> Any:
        if key not in graphs:
            launched.usual, self._read_at = False, 0.0  # it keeps the host from reading the step before in time
        return graphs.replay(key)

    def _wait_to_observe(self, launched: Launched, has_prompts: bool) -> None:
        """The rows of a plain step wait in the ring; when it is full, the drafter observes them."""
        at_once = self._proposer is None or self.slots.chain or launched.depth or has_prompts
        self._num_waiting += not at_once
        if self._num_waiting == RING:
            self.catch_up()

    def _prompt_kind(self, prompts: list[Work], decoding: int) -> PromptKind | None:
        """The smallest captured step that holds these prompts beside so many slots; None: there is none."""
        if not self._prompts or not 0 < len(prompts) <= self._most_prompts:
            return None
        rows = sum(work.num_known for work in prompts)
        seqs = next(n for n in self._beside if n >= decoding)
        kinds = (PromptKind(seqs, n) for n in PROMPT_ROWS if n >= rows)
        return next((kind for kind in kinds if self._prompts and kind in self._prompts), None)

    def _run(self, launched: Launched, kind: StepKind, chunks: Chunks | None, captured: PromptKind | None) -> Ran:
        """The first half of a step."""
        ran: Ran
        if captured and self._prompt_forwards:
            ran = self._replay(self._prompt_forwards, captured, launched)
        elif chunks is None and self._forwards:
            ran = self._replay(self._forwards, kind, launched)
        else:
            ran = self.slots.forward(kind, chunks)
        return ran

    def _step_with_prompts(self, kind: PromptKind) -> Sampled:
        step, chunks = StepKind(kind.seqs, 0, kind.seqs, True), self._captured_chunks(kind)
        return self.slots.finish(step, self.slots.forward(step, chunks), chunks)

    def _forward_prompts(self, kind: PromptKind) -> Ran:
        return self.slots.forward(StepKind(kind.seqs, 0, kind.seqs, False), self._captured_chunks(kind))

    def _captured_chunks(self, kind: PromptKind) -> Chunks:
        """The prompts of a captured step, in buffers that `_chunks` fills."""
        inputs, next_ids = self._runner.inputs, self._next_ids[: kind.rows] if self.slots.chain else None
        view = inputs.view(self._most_prompts, kind.rows, self._runner.plan.max_model_len)
        parts = inputs.token_ids[: kind.rows], inputs.positions[: kind.rows], inputs.slots[: kind.rows]
        return Chunks(*parts, view, self._ends[0], self._ends[1], next_ids)

    def _chunks(
        self, prompts: list[Work], ends: list[Work], slot_of: dict[Request, int], captured: PromptKind | None
    ) -> Chunks:
        """Lays out prompt chunks one after the other, padded as the captured step is."""
        inputs, plan = self._runner.inputs, self._runner.plan
        parts = [Rows(_known_ids(work), work.start, work.request.blocks, 0, 0) for work in prompts]
        seqs, rows = len(prompts), sum(work.num_known for work in prompts)
        if captured:
            seqs, rows = self._most_prompts, captured.rows
        inputs.fill(parts, seqs, rows)
        longest, context = max(work.num_known for work in prompts), max(work.stop for work in prompts)
        if slot_of:
            context = max(context, *(r.next_start + 1 + max(self._depths) for r in slot_of))
        view = inputs.view(seqs, longest, min(context, plan.max_model_len))
        last, end = [], 0
        for work in prompts:
            end += work.num_known
            last.append(end - 1)
        rows_of_ends = [row for row, work in zip(last, prompts, strict=True) if work.samples]
        slots_of_ends = [self._slot_of[work.request] for work in ends]
        if captured and ends:
            spare = self._most_prompts - len(ends)
            padded = rows_of_ends + rows_of_ends[:1] * spare, slots_of_ends + [self.slots.spare] * spare
            self._ends.copy_(self._staged(padded, torch.int64), non_blocking=True)
            index = self._ends[:, : len(ends)]
        else:
            index = self._staged([rows_of_ends, slots_of_ends], torch.int64)
        following = None
        if self.slots.chain:
            known = self._staged([i for work in prompts for i in _following(work)], torch.int32)
            self._next_ids[: len(known)].copy_(known, non_blocking=True)
            following = self._next_ids[:rows]
        parts_of = inputs.token_ids[:rows], inputs.positions[:rows], inputs.slots[:rows]
        return Chunks(*parts_of, view, index[0], index[1], following)

    def _captured(self, depth: int) -> int:
        return next(d for d in self._depths if d >= depth)

    def _size(self, num_requests: int, depth: int = 0) -> int:
        """The number of slots of a step. On a GPU it is one of a few sizes that are captured; the spare slots are
        empty."""
        if not self._steps or not num_requests:
            return num_requests
        sizes = gpu_sizes(self._runner.plan.max_seqs, depth > 0)
        return next(size for size in sizes if size >= num_requests)

    def _smaller(self, kind: StepKind, tokens: int, has_prompts: bool) -> StepKind:
        """The step that runs no more than these tokens need. Beside prompts it is not captured. Else a kind runs, and
        is captured the next time, once larger steps have lost as much for want of it as that takes."""
        smaller = kind._replace(rows=int(packed_tokens(tokens, kind.rows)))
        if has_prompts or self._steps is None or smaller in self._steps:
            return smaller
        self._lost[smaller] += self._drafting.saved(kind.seqs, kind.rows, smaller.rows)
        if self._lost[smaller] < self._steps.seconds:
            return kind
        del self._lost[smaller]
        return smaller

    def _staged(self, values: Sequence[Any], dtype: torch.dtype) -> Tensor:
        return staged(values, dtype, self._device)

    # ---- grammars and log-probabilities

    def _needs_host(self, work: Work) -> bool:
        params = work.request.params
        scores_prompt = params.prompt_logprobs is not None and not work.decodes
        return (work.samples and (params.logprobs is not None or work.request in self.grammars)) or scores_prompt

    def _asked(self, launched: Launched, ran: Ran) -> Asked | None:
        """What the samples of a step depend on beside the slots: masks of grammars; and whose scores are wanted."""
        works = [work for work in launched.batch.work if work.samples and not work.request.finish]
        held = [work for work in works if work.request in self.grammars]
        launched.scored = [work.request for work in works if work.request.params.logprobs is not None]
        if not held and not launched.scored:
            return None
        first = len(launched.firsts)
        first_row = {work.request: i for i, work in enumerate(launched.firsts)}
        which = [-1] * (first + (len(ran.rows.ids) if ran.rows else 0))
        masks: list[Mask] = []
        drafted = self._drafts_of(ran, launched) if any(work.decodes for work in held) else {}
        for work in held:
            begin, drafts = drafted[work.request] if work.decodes else (first_row[work.request] - first, [])
            for column, mask in enumerate(self.grammars[work.request].masks(drafts)):
                which[first + begin + column] = len(masks)
                masks.append(self._sampler.keep_open(mask, SampleRow(work.request, drafts[:column])))
        scored = None
        if launched.scored:
            rows = []
            for request in launched.scored:
                if request in launched.slot_of:
                    assert ran.rows is not None
                    rows.append(first + ran.rows.places[launched.slot_of[request]].long())
                else:  # as many as of a slot, so that all have one shape
                    alone = self._staged([first_row[request]], torch.int64)
                    rows.append(alone.expand(1 + launched.depth))
            scored = torch.cat(rows)
        if not masks:
            return Asked(None, None, scored)
        table = torch.from_numpy(np.stack(masks))
        if self._device.type != "cpu":
            table = table.pin_memory().to(self._device, non_blocking=True)
        return Asked(table, self._staged(which, torch.int32), scored)

    def _drafts_of(self, ran: Ran, launched: Launched) -> dict[Request, tuple[int, list[int]]]:
        """Per request that decodes: its first row among the slots' rows, and its drafts. Waits for the target where
        there are any."""
        if ran.drafts is None:
            return {request: (slot, []) for request, slot in launched.slot_of.items()}
        assert ran.rows is not None and ran.kept is not None
        rows = torch.cat((torch.stack((ran.rows.query_start[:-1], ran.kept), 1), ran.drafts.int()), 1).tolist()
        return {
            request: (rows[slot][0], rows[slot][2 : 2 + rows[slot][1]]) for request, slot in launched.slot_of.items()
        }

    def _score_prompt(self, work: Work, ran: Ran, batch: Batch, top: int) -> Any:
        row = 0
        for other in batch.work:
            if other is work:
                break
            row += 0 if other.decodes else other.num_known
        return self._runner.prompt_logprobs(work, row, top, ran.residual)

    # ---- results

    def _fetch(self, launched: Launched, written: Sampled) -> None:
        """Starts copying a step's result to the host. The next replay overwrites it, but only after this copy."""
        if written.slots is not None:
            launched.slots = self._to_host(written.slots)
        if written.firsts is not None:
            launched.first_ids = self._to_host(written.firsts)
        if written.scores is not None:
            launched.scores = self._to_host(written.scores)
        if self._device.type != "cpu":
            launched.done = torch.cuda.Event()
            launched.done.record()

    def _to_host(self, part: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return part.clone()
        host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
        host.copy_(part, non_blocking=True)
        return host

    def _results(self, launched: Launched) -> tuple[list[StepResult], float]:
        """The results of a step that is done, and the seconds that verifying took; 0 if they are not known."""
        rows: list[list[int]] = []
        gaps: list[list[float]] = []
        matched: list[int] = []
        if launched.slots is not None:
            slots, end = launched.slots.numpy(), launched.depth + 4
            rows = slots[:, :end].tolist()
            matched = [0] * len(rows)
            if launched.depth or self.slots.text is not None:
                matched = slots[:, end].tolist()
            gaps = slots[:, end + 1 :].view(np.float32).tolist() if launched.depth else []
        firsts = launched.first_ids.tolist()[: len(launched.firsts)] if launched.first_ids is not None else []
        first_of = dict(zip((work.request for work in launched.firsts), firsts, strict=True))
        results = []
        for work in launched.batch.work:
            result = StepResult(work)
            if work.decodes:
                slot = launched.slot_of[work.request]
                row, drafted = rows[slot], work.most_drafts
                if not matched[slot] and not self._proposer:
                    drafted = 0
                result.source = ("ngram" if matched[slot] else self._drafting.model) if drafted else ""
                result.ids, result.num_drafted, result.num_draft = row[: row[-3] + 1], drafted, row[-2]
                result.gaps = gaps[slot][:drafted] if drafted else []
                result.matched = matched[slot]
            elif work.samples:
                first = first_of[work.request]
                result.ids = [first] if first >= 0 else []
            if launched.prompt_scores:
                result.prompt_logprobs = launched.prompt_scores.get(work.request)
            results.append(result)
        self._add_scores(launched, results)
        return results, rows[0][-1] / 1e9 if rows else 0.0

    def _add_scores(self, launched: Launched, results: list[StepResult]) -> None:
        if launched.scores is None:
            return
        each = len(launched.scores) // len(launched.scored)
        of = {request: launched.scores[i * each : (i + 1) * each] for i, request in enumerate(launched.scored)}
        for result in results:
            if result.work.request in of and result.ids:
                top = result.work.request.params.logprobs
                assert top is not None
                result.logprobs = read_logprobs(of[result.work.request][: len(result.ids)], result.ids, top)


def _known_ids(work: Work) -> list[int]:
    return work.request.ids(work.start, work.start + work.num_known)


def _following(work: Work) -> list[int]:
    """The id after each token of a chunk; 0 after the last one of a prompt, which this step samples."""
    ids = work.request.ids(work.start + 1, work.start + 1 + work.num_known)
    return ids + [0] * (work.num_known - len(ids))
