"""The engine: it takes requests, runs steps and returns outputs. `Engine.step` is the whole journey of a token.

The scheduler decides, the drafter proposes, the runner runs the model, the sampler samples, and each request's `Output`
makes text. It is not thread-safe: one caller adds, steps and aborts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch

from sparkdraft.backend import DRAFTING, GROWTH, PREFIX_CACHE
from sparkdraft.cache.blocks import BlockPool
from sparkdraft.cache.groups import CacheGroup
from sparkdraft.cache.prefix import PrefixCache
from sparkdraft.core import Batch, Fallback, FinishReason, Request, SamplingParams, StepOutput, UserError
from sparkdraft.drafters.vocabulary import IdCounts
from sparkdraft.engine.accept import committed
from sparkdraft.engine.drafting import Drafting, Outcome
from sparkdraft.engine.drift import StepDrift
from sparkdraft.engine.output import Output
from sparkdraft.engine.overlap import AHEAD, OverlappedSteps
from sparkdraft.engine.pace import PromptPace
from sparkdraft.engine.runner import Runner
from sparkdraft.engine.sampler import Sampled, Sampler, SampleRow
from sparkdraft.engine.scheduler import Scheduler
from sparkdraft.plan.resolve import Plan
from sparkdraft.text.grammar import Grammar, GrammarCompiler
from sparkdraft.text.tokenizer import Vocabulary

TRIAL_STEPS = 5  # steps per depth at start: the first reads the prompt, the second is captured, three are measured


class Engine:
    def __init__(
        self,
        plan: Plan,
        runner: Runner,
        sampler: Sampler,
        tokenizer: Vocabulary,
        drafting: Drafting,
        overlap: OverlappedSteps | None = None,
        groups: Sequence[CacheGroup] = (),
        fallbacks: Sequence[Fallback] = (),
        counts: IdCounts | None = None,
    ) -> None:
        """overlap: runs the steps in which all requests only decode; without it the host runs every step. groups: what
        requests hold beside their blocks. fallbacks: what loading settled for. counts: of the ids that requests write,
        if they are counted."""
        self.plan, self.runner, self.sampler, self.tokenizer = plan, runner, sampler, tokenizer
        self.drafting, self.overlap, self._fallbacks, self._counts = drafting, overlap, fallbacks, counts
        self.grammars = GrammarCompiler(tokenizer, sampler.vocab_size)
        self.pool = BlockPool(plan.num_blocks)
        prefix = PrefixCache(self.pool, plan.block_size, plan.prefix_cache)
        self.pace = PromptPace(plan.max_step_ms / 1e3, plan.max_step_tokens)
        self.scheduler = Scheduler(
            self.pool, prefix, plan.max_seqs, plan.max_step_tokens, drafting.lookahead, groups, self.pace
        )
        self.drift = StepDrift()
        self._outputs: dict[Request, Output] = {}
        self._by_id: dict[str, list[Request]] = {}
        self._ended: list[StepOutput] = []  # outputs of requests that were aborted or read since the last step
        self._removed: list[str] = []  # ids removed by this step or abort; if it fails, their last outputs are lost
        self._numbers = count()

    def add(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        request_id: str | None = None,
        grammar: Grammar | None = None,
    ) -> str:
        """Queues a request; it runs from the next step on. Returns the id that its outputs carry.

        grammar: that of params, compiled in advance by `grammars.compile` (in any thread).
        """
        self._check(prompt_ids, params)
        if params.grammar and grammar is None:
            grammar = self.grammars.compile(params.grammar)
        name = request_id or f"request-{next(self._numbers)}"
        if name in self._by_id or any(output.request_id == name for output in self._ended):
            raise UserError(f"request id '{name}' is in use, or its end has not been read; choose another")
        max_output = min(params.max_tokens, self.plan.max_model_len - len(prompt_ids))
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(7), "little")
        self._by_id[name] = [
            Request(name, i, prompt_ids, params, _signed64(seed + i), max_output) for i in range(params.n)
        ]
        for request in self._by_id[name]:
            self._outputs[request] = Output(request, self.tokenizer, grammar.start() if grammar else None)
        self.scheduler.add(self._by_id[name][0])  # its siblings follow once the prompt is in the prefix cache
        return name

    def abort(self, request_id: str) -> None:
        """Ends a request now. An id that has ended already is no error."""
        self._removed.clear()
        if request_id in self._by_id:
            self._ended += self.read_launched()
        for request in list(self._by_id.get(request_id, ())):
            request.finish = FinishReason.ABORT
            self._ended.append(StepOutput(request.id, request.index, [], "", request.finish))
            self._remove(request)

    def fail_batch(self) -> list[str]:
        """After an exception in a step or an abort: drops every request that may be left half changed. Returns their
        ids.

        These are all running requests and their siblings; waiting requests stay. If nothing runs, the first waiting
        request is dropped, because admitting it is what failed. Afterwards all blocks are free and the prefix cache is
        empty, because a block may lack tokens. On a GPU this waits for everything that was launched; a GPU that cannot
        finish raises here, and its process must end.
        """
        if self.plan.device == "cuda":
            torch.cuda.synchronize()
        if self.overlap:
            self.overlap.abandon()
        waiting = self.scheduler.waiting
        broken = self.scheduler.running + [r for r in waiting if r.blocks]
        names = [*self._removed, *(request.id for request in broken)] or [r.id for r in list(waiting)[:1]]
        for name in names:
            for request in list(self._by_id.get(name, ())):
                self._remove(request)
        for request in waiting:  # one that was preempted or refused in this step may still hold something
            self.drafting.release(request)
            self.scheduler.groups.drop(request)
        self.scheduler.prefix.clear()
        self._ended = [output for output in self._ended if output.request_id not in names]
        return list(dict.fromkeys(names))

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._ended)

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Runs one pass of the target over everything that is scheduled."""
        begin = time.perf_counter()
        self._removed.clear()
        depths = self.drafting.depths(self.scheduler.decoding())
        if self.overlap and self._can_overlap(self.overlap, depths):
            return self._overlap_step(self.overlap, depths)
        if read := self.read_launched():
            return self._take_ended() + read  # these ids may end requests, so the next step is decided anew
        batch = self.scheduler.schedule(depths)
        if not batch.work:
            return self._take_ended()
        self.scheduler.groups.send()
        self.drafting.propose(batch)
        self._drop_refused_drafts(batch)
        drafted = time.perf_counter()
        logits = self.runner.run(batch)
        sampled = self.sampler(logits, self._sample_rows(batch))
        self._score_prompts(batch)
        outputs = self._commit(batch, sampled)
        end = time.perf_counter()
        self.drafting.timed(batch, drafted - begin, end - drafted)
        for output, work in zip(outputs, (w for w in batch.work if w.samples), strict=True):
            self._follow_up(output, work.request)
        if num_decoding := sum(work.decodes for work in batch.work):
            self.pace.learn(num_decoding, batch.num_prompt_rows, end - begin)
        if batch.decodes:
            self.drift.learn(num_decoding, batch.num_rows, sum(w.stop for w in batch.work), end - begin)
        return self._take_ended() + outputs

    def warm_up(self) -> None:
        """Runs the shapes that a single request brings: this compiles kernels, captures steps, and measures the cost of
        a step at each depth. Raises NotFinite."""
        self._try(0, [*range(16)], 1)  # whatever the depths, a model that computes NaN shows it here
        if self.drafting.proposer:
            self.runner.record_rows(1 + self.drafting.max_depth)
        for depth in self.drafting.choices:
            self._try(depth, [*range(16)], TRIAL_STEPS)  # drafted by the model
        for depth in self.drafting.choices:  # and by its own text
            if not self.drafting.has_experts:
                self._try(depth, [5] * 16, TRIAL_STEPS, following=5)
                continue
            for _ in range(TRIAL_STEPS - 1):  # equal ids would be sent to the same experts, and seem to cost nothing
                self._try(depth, [*range(16)] * 2, 2, following=0)
        self._ended.clear()
        self.reset_counts()

    def _try(self, depth: int, ids: list[int], steps: int, following: int | None = None) -> None:
        """Steps of one request, the first of which reads its prompt. following: the id that it always writes."""
        bias = {} if following is None else {following: 100.0}
        name = self.add(ids, SamplingParams(8 * depth + 8, num_draft=depth, logit_bias=bias, ignore_eos=True))
        for _ in range(steps):
            self.step()
        self.abort(name)

    def reset_counts(self) -> None:
        """Starts counting anew: the requests so far were not a user's."""
        self.scheduler.num_preempted = 0
        self.drafting.reset_counts()
        self.drift.forget_recent()
        if self._counts:
            self._counts.forget()
        if self.runner.kv.meter:
            self.runner.kv.meter.forget()

    def kv_errors(self) -> dict[str, Any] | None:
        """The errors that the cache has measured of itself (cache/formats/turboquant.py). Waits for the device."""
        return self.runner.kv.meter.errors() if self.runner.kv.meter else None

    def switch(self, part: str, on: bool) -> None:
        """Does without a part, or takes it up again (sparkdraft/backend.py names them)."""
        if part == DRAFTING:
            self.drafting.is_off = not on
        elif part == PREFIX_CACHE:
            self.scheduler.prefix.enabled = on and self.plan.prefix_cache
            if not on:
                self.scheduler.prefix.clear()
        elif part == GROWTH and self.plan.device == "cuda":  # the cache is allocated in full; torch keeps more
            torch.cuda.empty_cache()
        elif part == GROWTH and on:
            self.pool.give_back()
        elif part == GROWTH:
            self.pool.hold(keep=-(-self.plan.max_model_len // self.plan.block_size) + 1)  # one request can always run

    @property
    def fallbacks(self) -> list[Fallback]:
        """Return what runs differently from what was asked: the plan's fallbacks, and those of loading and running."""
        slow, proposer = "are launched one operator at a time", self.drafting.proposer
        compiler = self.runner.model.ops.compiler
        late = compiler.compiled_late if compiler else ()
        return [
            *self.plan.fallbacks,
            *self._fallbacks,
            *(Fallback(f"decode steps {slow}", why) for why in self.runner.unrecorded),
            *(Fallback(f"drafts {slow}", why) for why in (proposer.unrecorded if proposer else ())),
            *(Fallback("GPU kernels are compiled one by one", why) for why in late),
        ]

    @property
    def decodes_exactly(self) -> bool:
        """Return whether a token of one request has the same bits alone and beside its drafts.

        Torch's float32 products on a CPU sum in an order that depends on the number of rows. On a GPU bits are the same
        for up to 16 tokens, which is one request with its drafts.
        """
        return self.plan.kernels != "reference"

    # ---- overlapped steps

    def _can_overlap(self, overlap: OverlappedSteps, depths: dict[Request, int]) -> bool:
        deepest, running = max(depths.values(), default=0), self.scheduler.running
        return (
            self.scheduler.only_decoding
            and overlap.num_rows(len(running), deepest) <= self.plan.max_step_tokens
            and all(overlap.takes(request, deepest) for request in running)
            and not self.drafting.drafts_from_text(depths)
            and self.scheduler.reserve(overlap.max_unread_ids + overlap.reach(deepest))
        )

    def _overlap_step(self, overlap: OverlappedSteps, depths: dict[Request, int]) -> list[StepOutput]:
        """Launches a step, then reads the one before it."""
        self.scheduler.groups.send()
        running = self.scheduler.running
        terms = self.drafting.cut_terms(running, depths) if overlap.slots.cuts else []
        overlap.launch(running, [depths.get(r, 0) for r in running], terms)
        outputs = self._read_step(overlap) if overlap.num_unread == AHEAD else []
        if any(output.finish for output in outputs):
            outputs += self.read_launched()  # the step already launched still contains the request that ended
        return self._take_ended() + outputs

    @torch.inference_mode()
    def read_launched(self) -> list[StepOutput]:
        """Reads every launched step and ends the overlap."""
        outputs: list[StepOutput] = []
        if self.overlap and self.overlap.requests:
            while self.overlap.num_unread:
                outputs += self._read_step(self.overlap)
            self.overlap.end()
            for request in [r for r in self.scheduler.running if r.finish]:
                self._remove(request)
        return outputs

    def _read_step(self, overlap: OverlappedSteps) -> list[StepOutput]:
        """Commits the results of a step. Results of requests that ended in an earlier step are dropped."""
        outputs, steps = [], []
        for result in overlap.read():
            request = result.request
            if request.finish:
                continue
            output = self._outputs[request].push(result.ids)
            output.num_accepted = _num_accepted(result.ids, output)
            self.scheduler.commit(request, len(output.ids))
            outputs.append(output)
            steps.append(Outcome(request, result.drafted, result.num_draft, output.num_accepted, result.gaps))
        if steps:
            self.drafting.learn_overlapped(steps, overlap.step_seconds, overlap.verify_seconds)
            self.pace.learn(len(steps), 0, overlap.step_seconds)
            rows, context = sum(1 + step.verified for step in steps), sum(s.request.num_tokens for s in steps)
            self.drift.learn(len(steps), rows, context, overlap.step_seconds)
        for output, step in zip(outputs, steps, strict=True):
            if step.request.finish:  # it is removed once every launched step has been read
                output.speculation = self.drafting.report(step.request)
        return outputs

    def _check(self, prompt_ids: list[int], params: SamplingParams) -> None:
        limit, vocab = self.plan.max_model_len, self.sampler.vocab_size
        if not prompt_ids:
            raise UserError("the prompt is empty: give at least one token")
        if len(prompt_ids) >= limit:
            raise UserError(
                f"the prompt has {len(prompt_ids)} tokens and the context holds {limit} with the output; shorten it"
            )
        for name, ids in (("prompt", prompt_ids), ("logit_bias", params.logit_bias), ("stop_ids", params.stop_ids)):
            wrong = next((i for i in ids if not 0 <= i < vocab), None)
            if wrong is not None:
                raise UserError(f"{name} holds the token id {wrong}; ids go from 0 to {vocab - 1}")
        self.drafting.check(params)

    def _drop_refused_drafts(self, batch: Batch) -> None:
        """Drops the drafts from the first one on that breaks the request's grammar."""
        for work in batch.work:
            grammar = self._outputs[work.request].grammar
            if grammar and work.drafts:
                valid = grammar.num_valid(work.drafts)
                work.num_refused = work.num_draft - valid
                work.drafts = work.drafts[:valid]

    def _sample_rows(self, batch: Batch) -> list[SampleRow]:
        """One row per id that may be committed: after the known ids, then after each draft."""
        return [
            SampleRow(w.request, w.drafts[:i], self._outputs[w.request].grammar)
            for w in batch.work
            for i in range(w.num_sampled)
        ]

    def _score_prompts(self, batch: Batch) -> None:
        row = 0
        for work in batch.work:
            top = work.request.params.prompt_logprobs
            if top is not None and not work.request.output_ids:
                self._outputs[work.request].push_prompt(work.start, self.runner.prompt_logprobs(work, row, top))
            row += work.num_scheduled

    def _commit(self, batch: Batch, sampled: Sampled) -> list[StepOutput]:
        """Accepts drafts, makes outputs and advances each request."""
        outputs: list[StepOutput] = []
        ids, first = sampled.ids.tolist(), 0
        num_accepted = [0] * len(batch.work)
        for i, work in enumerate(batch.work):
            num_rows = work.num_known
            if work.samples:
                new = committed(work.drafts, ids[first : first + work.num_sampled])
                output = self._outputs[work.request].push(new, sampled.report(first, new))
                output.num_accepted = num_accepted[i] = _num_accepted(new, output)
                num_rows += len(output.ids) - 1  # the last id is known, but its row is not computed yet
                outputs.append(output)
                first += work.num_sampled
            self.scheduler.commit(work.request, num_rows)
        self.drafting.observe(batch, num_accepted, self.runner)
        return outputs

    def _follow_up(self, output: StepOutput, request: Request) -> None:
        if request.index == 0 and len(request.output_ids) == len(output.ids):  # these ids are its first output
            for sibling in self._by_id[request.id][1:]:
                self.scheduler.add(sibling)
        if request.finish:
            output.speculation = self.drafting.report(request)
            self._remove(request)

    def _remove(self, request: Request) -> None:
        self._removed.append(request.id)
        if self._counts:
            self._counts.add(request.output_ids)
        self.scheduler.finish(request)
        self.sampler.forget(request)
        self.drafting.release(request)
        del self._outputs[request]
        siblings = self._by_id[request.id]
        siblings.remove(request)
        if not siblings:
            del self._by_id[request.id]

    def _take_ended(self) -> list[StepOutput]:
        ended, self._ended = self._ended, []
        return ended


def _num_accepted(new: list[int], output: StepOutput) -> int:
    """How many of the ids that were taken are drafts: all of 'new' but its last, or all if a stop cut that off."""
    return min(len(new) - 1, len(output.ids))


def _signed64(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63
