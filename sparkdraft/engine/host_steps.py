"""Runs a step and waits for it: the host proposes, cuts, samples and accepts. The only way on a CPU.

A GPU's steps are launched before the last one is read (engine/device_steps.py); tests hold the two together.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sparkdraft.core import Batch, Request
from sparkdraft.engine.accept import committed
from sparkdraft.engine.drafting import Drafting
from sparkdraft.engine.graphs import Graphs
from sparkdraft.engine.runner import Runner
from sparkdraft.engine.sampler import Sampled, Sampler, SampleRow
from sparkdraft.engine.steps import StepRead, StepResult
from sparkdraft.text.grammar import GrammarState


class HostSteps:
    ahead = 0

    def __init__(self, runner: Runner, sampler: Sampler, drafting: Drafting) -> None:
        self.grammars: dict[Request, GrammarState] = {}
        self._runner, self._sampler, self._drafting = runner, sampler, drafting
        self._done: StepRead | None = None
        self._drafted_seconds = 0.0

    @property
    def num_unread(self) -> int:
        return int(self._done is not None)

    @property
    def graphs(self) -> list[Graphs[Any]]:
        proposer = self._drafting.proposer
        found = [self._runner.graphs, *(proposer.graphs if proposer else ())]
        return [each for each in found if each]

    def reach(self, depth: int) -> int:
        return 0

    def may_draft(self, batch: Batch) -> bool:
        return True  # the scheduler has counted every row

    def capture(self) -> None:
        pass  # the runner has captured what it can, and captures the rest when it comes up

    def launch(self, batch: Batch) -> None:
        begin = time.perf_counter()
        self._drafting.propose(batch)
        self._drop_refused_drafts(batch)
        drafted = time.perf_counter()
        sampled = self._sampler(self._runner.run(batch), self._sample_rows(batch))
        results = self._results(batch, sampled)
        end = time.perf_counter()
        self._done = StepRead(batch, results, end - begin, end - drafted)

    def complete(self) -> None:
        pass

    def read(self) -> StepRead:
        done, self._done = self._done, None
        assert done, "no step was launched"
        return done

    def learn(self, read: StepRead, num_accepted: Sequence[int]) -> None:
        self._drafting.observe(read.batch, num_accepted, self._runner)
        self._drafting.timed(read.batch, read.seconds - read.verify_seconds, read.verify_seconds)

    def forget(self, request: Request) -> None:
        self._sampler.forget(request)

    def abandon(self) -> None:
        self._done = None

    # ---- the parts

    def _drop_refused_drafts(self, batch: Batch) -> None:
        """Drops the drafts from the first one on that breaks the request's grammar."""
        for work in batch.work:
            grammar = self.grammars.get(work.request)
            if grammar and work.drafts:
                valid = grammar.num_valid(work.drafts)
                work.num_refused = work.num_draft - valid
                work.drafts = work.drafts[:valid]

    def _sample_rows(self, batch: Batch) -> list[SampleRow]:
        """One row per id that may be committed: after the known ids, then after each draft."""
        return [
            SampleRow(w.request, w.drafts[:i], self.grammars.get(w.request))
            for w in batch.work
            for i in range(w.num_sampled)
        ]

    def _results(self, batch: Batch, sampled: Sampled) -> list[StepResult]:
        ids, first, row, results = sampled.ids.tolist(), 0, 0, []
        for work in batch.work:
            result = StepResult(work, num_drafted=work.num_draft, num_draft=work.num_draft, source=work.source)
            if work.samples:
                result.ids = committed(work.drafts, ids[first : first + work.num_sampled])
                result.logprobs = sampled.report(first, result.ids)
                first += work.num_sampled
            top = work.request.params.prompt_logprobs
            if top is not None and not work.request.output_ids:
                result.prompt_logprobs = self._runner.prompt_logprobs(work, row, top)
            row += work.num_scheduled
            results.append(result)
        return results
