"""The engine: it takes requests, runs steps and returns outputs. `Engine.step` is the whole journey of a token.

The scheduler decides what a step runs; `steps` drafts, runs the model, samples and accepts; each request's `Output`
makes text. It is not thread-safe: one caller adds, steps and aborts.
"""

from __future__ import annotations

import os
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
from sparkdraft.engine.drafting import Drafting
from sparkdraft.engine.drift import StepDrift
from sparkdraft.engine.host_steps import HostSteps
from sparkdraft.engine.output import Output
from sparkdraft.engine.pace import PromptPace
from sparkdraft.engine.runner import Runner
from sparkdraft.engine.sampler import Sampler
from sparkdraft.engine.scheduler import Scheduler
from sparkdraft.engine.steps import StepRead, StepResult, Steps
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
        steps: Steps | None = None,
        groups: Sequence[CacheGroup] = (),
        fallbacks: Sequence[Fallback] = (),
        counts: IdCounts | None = None,
    ) -> None:
        """steps: runs the steps; None: the host runs them. groups: what requests hold beside their blocks. fallbacks:
        what loading settled for. counts: of the ids that requests write, if they are counted."""
        self.plan, self.runner, self.sampler, self.tokenizer = plan, runner, sampler, tokenizer
        self.drafting, self._fallbacks, self._counts = drafting, fallbacks, counts
        self.steps: Steps = steps or HostSteps(runner, sampler, drafting)
        self.grammars = GrammarCompiler(tokenizer, sampler.vocab_size)
        self.pool = BlockPool(plan.num_blocks)
        prefix = PrefixCache(self.pool, plan.block_size, plan.prefix_cache)
        self.pace = PromptPace(plan.max_step_ms / 1e3, plan.max_step_tokens, plan.device == "cpu")
        self.scheduler = Scheduler(
            self.pool,
            prefix,
            plan.max_seqs,
            plan.max_step_tokens,
            drafting.max_depth,
            groups,
            self.pace,
            plan.max_model_len,
        )
        self.drift = StepDrift()
        self.is_warm = False  # whether steps were run, captured and timed before the first request
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
            state = grammar.start() if grammar else None
            self._outputs[request] = Output(request, self.tokenizer, state)
            if state:
                self.steps.grammars[request] = state
        self.scheduler.add(self._by_id[name][0])  # its siblings follow once the prompt is in the prefix cache
        return name

    def abort(self, request_id: str) -> None:
        """Ends a request now. An id that has ended already is no error."""
        self._removed.clear()
        for request in list(self._by_id.get(request_id, ())):
            request.finish = FinishReason.ABORT
            self._ended.append(StepOutput(request.id, request.index, [], "", request.finish))
            self._remove(request)
        if not self.scheduler.running:
            self.steps.abandon()

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
        self.steps.abandon()
        waiting = self.scheduler.waiting
        broken = self.scheduler.running + [r for r in waiting if r.blocks]
        names = [*self._removed, *(request.id for request in broken)] or [r.id for r in list(waiting)[:1]]
        for name in names:
            for request in list(self._by_id.get(name, ())):
                self._remove(request)
        for request in waiting:  # one that was preempted or refused in this step may still hold something
            self.drafting.release(request)
            self.steps.forget(request)
            self.scheduler.groups.drop(request)
        self.scheduler.prefix.clear()
        self._ended = [output for output in self._ended if output.request_id not in names]
        return list(dict.fromkeys(names))

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._ended)

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Launches a step, then reads the one before it; on a CPU the same one."""
        self._removed.clear()
        batch = self._schedule()
        if batch:
            self._launch(batch)
        outputs: list[StepOutput] = []
        if self.steps.num_unread > (self.steps.ahead if batch else 0):
            outputs = self._commit(self.steps.read())
        self.steps.complete()
        return self._take_ended() + outputs

    def _schedule(self) -> Batch | None:
        """The work of the next step; None: there is none, or a launched step must be read first."""
        batch = self.scheduler.schedule(self.drafting.depths(self.scheduler.decoding()))
        if batch is None or not batch.work:
            return None
        for request in batch.preempted:
            self.drafting.forget_rows(request)
            self.steps.forget(request)
        deepest = max(work.most_drafts for work in batch.work)
        if deepest and not (self.steps.may_draft(batch) and self.scheduler.reserve(self.steps.reach(deepest))):
            for work in batch.work:
                work.most_drafts = 0
        return batch

    def _launch(self, batch: Batch) -> None:
        """Starts a step. A prompt's tokens count as computed from here on: later steps run after this one."""
        self.scheduler.groups.send()
        self.steps.launch(batch)
        for work in batch.work:
            if not work.decodes:
                self.scheduler.commit(work.request, work.num_known)
            if work.samples:
                work.request.least_unread += 1
                work.request.most_unread += 1 + work.most_drafts

    def _commit(self, read: StepRead) -> list[StepOutput]:
        """Makes outputs of what a step wrote and advances its requests, but for those that have ended since."""
        kept: list[StepResult] = []
        for result in read.results:
            work, request = result.work, result.work.request
            if work.samples:
                request.least_unread -= 1
                request.most_unread -= 1 + work.most_drafts
            if not request.finish:
                kept.append(result)
        if len(kept) < len(read.results):  # it ran more requests than are left, so its time says nothing of them
            read.results, read.seconds, read.verify_seconds = kept, 0.0, 0.0
        outputs: list[StepOutput] = []
        sampled: list[Request] = []
        num_accepted = [0] * len(read.results)
        for i, result in enumerate(read.results):
            work, request = result.work, result.work.request
            if result.prompt_logprobs is not None:
                self._outputs[request].push_prompt(work.start, result.prompt_logprobs)
            if work.samples:
                output = self._outputs[request].push(result.ids, result.logprobs)
                # All new ids but the last are drafts, or all of those that were taken if a stop cut that off.
                output.num_accepted = num_accepted[i] = min(len(result.ids) - 1, len(output.ids))
                # The last id is known, but its token is not computed yet. A prompt's tokens were committed at launch.
                if count := len(output.ids) - (not work.decodes):
                    self.scheduler.commit(request, count)
                outputs.append(output)
                sampled.append(request)
        self.steps.learn(read, num_accepted)
        self._learn_time(read)
        for output, request in zip(outputs, sampled, strict=True):
            self._follow_up(output, request)
        if not self.scheduler.running:
            self.steps.abandon()  # what is launched holds ended requests only
        return outputs

    @torch.inference_mode()
    def drain(self) -> list[StepOutput]:
        """Reads every launched step."""
        outputs: list[StepOutput] = []
        while self.steps.num_unread:
            outputs += self._commit(self.steps.read())
        return outputs

    def _learn_time(self, read: StepRead) -> None:
        if not read.seconds:
            return
        decoding = [result for result in read.results if result.work.decodes]
        self.pace.learn(len(decoding), read.batch.num_prompt_rows, read.seconds)
        if decoding and read.batch.decodes:
            rows = sum([1 + result.num_draft for result in decoding])
            context = sum([result.work.request.num_tokens for result in decoding])
            self.drift.learn(len(decoding), rows, context, read.seconds)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Runs the shapes that a single request brings: this compiles kernels, captures steps, and measures the cost of
        a step at each depth. Raises NotFinite."""
        self.steps.capture()
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
        self.is_warm = True

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
            *(Fallback(f"some steps {slow}", why) for graphs in self.steps.graphs for why in graphs.fallbacks),
            *(Fallback("GPU kernels are compiled one by one", why) for why in late),
        ]

    @property
    def decodes_exactly(self) -> bool:
        """Return whether a token of one request has the same bits alone and beside its drafts.

        Torch's float32 products on a CPU sum in an order that depends on the number of rows. On a GPU bits are the same
        for up to 16 tokens, which is one request with its drafts.
        """
        return self.plan.kernels != "reference"

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
        self.steps.forget(request)
        self.steps.grammars.pop(request, None)
        self.drafting.release(request)
        del self._outputs[request]
        siblings = self._by_id[request.id]
        siblings.remove(request)
        if not siblings:
            del self._by_id[request.id]

    def _take_ended(self) -> list[StepOutput]:
        ended, self._ended = self._ended, []
        return ended


def _signed64(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63
