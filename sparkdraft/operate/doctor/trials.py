"""The doctor's own requests: one as a user's would run, which is counted, and some whose kernels are watched.

What is counted and watched is caught where it happens: methods of the engine are replaced while a request runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sparkdraft.core import Batch, Request, SamplingParams
from sparkdraft.drafters.base import Anchors, Pick, Score
from sparkdraft.engine.engine import Engine
from sparkdraft.operate.doctor.watch import Watch, watching
from sparkdraft.operate.forecast.bandwidth import wait
from sparkdraft.speculation.stats import SpecStats

PROMPT = 40  # rows of the prompt
STEPS = 12  # that are counted


@dataclass(slots=True)
class Counted:
    """What a request did."""

    replays: int = 0  # of recordings: the target's steps and the drafter's passes
    replayed: int = 0  # steps that had one or more
    ahead: int = 0  # steps that were launched before the last was read
    steps: int = 0
    kernels: int = 0  # of the largest recording that was replayed; 0: a CUDA graph does not tell
    seconds: list[float] = field(default_factory=list)  # of plain steps
    drafting: SpecStats = field(default_factory=SpecStats)  # of the request with drafts

    def proofs(self, engine: Engine) -> dict[str, str]:
        """By the name of a fact."""
        size = f", the largest of {self.kernels} kernels" if self.kernels else ""
        replayed = f"{self.replayed} of {self.steps} steps replayed a recording{size}"
        found = {"decode steps": replayed if self.replayed else ""}
        found["overlapped steps"] = f"{self.ahead} of {self.steps} steps were launched ahead" if self.ahead else ""
        if engine.drafting.proposer:
            made, taken = self.drafting.num_draft_tokens, self.drafting.num_accepted_draft_tokens
            found["blocks of drafts"] = f"{made} drafts after a random text, {taken} accepted"
        return found


def run_counted(engine: Engine) -> Counted:
    """A request without drafts, which is timed, and one with."""
    counted = Counted()
    depths = (0, engine.drafting.max_depth) if engine.drafting.proposer else (0,)
    with _counting(engine, counted):
        for depth in depths:
            engine.reset_counts()
            params = SamplingParams((STEPS + 4) * (depth + 1), num_draft=depth, ignore_eos=True)
            name = engine.add(_ids(engine), params)
            for _ in range(STEPS):
                before, begin = counted.replays, time.perf_counter()
                engine.step()
                if not depth:
                    wait(engine.plan.device)
                    counted.seconds.append(time.perf_counter() - begin)
                counted.steps += 1
                counted.replayed += counted.replays > before
            counted.drafting = engine.drafting.so_far()
            engine.abort(name)
            while engine.has_work:
                engine.step()
    return counted


@contextmanager
def _counting(engine: Engine, counted: Counted) -> Iterator[None]:
    """Count replays and launches by taking the place of the methods that make them."""
    recording, overlap = engine.runner.model.ops.Graph, engine.overlap
    if recording:
        replay = recording.replay

        def counted_replay(self: Any) -> Tensor:
            counted.replays += 1
            counted.kernels = max(counted.kernels, len(getattr(self, "kernels", ())))
            out: Tensor = replay(self)
            return out

        recording.replay = counted_replay  # type: ignore[method-assign]
    if overlap:
        launch = overlap.launch

        def counted_launch(requests: list[Request], depths: list[int], terms: Sequence[float] = ()) -> None:
            launch(requests, depths, terms)
            counted.ahead += 1

        overlap.launch = counted_launch  # type: ignore[method-assign]
    try:
        yield
    finally:
        if recording:
            recording.replay = replay  # type: ignore[method-assign]
        if overlap:
            del overlap.launch


def run_watched(engine: Engine) -> tuple[Watch, Watch]:
    """The kernels of a prompt's step and of a step of one row: of the target alone, not of sampling or drafting."""
    runner, graphs, overlap, seen = engine.runner, engine.runner.graphs, engine.overlap, list[Watch]()
    run, runner.graphs, engine.overlap = runner.run, None, None

    def watched(batch: Batch) -> Tensor:
        with watching(runner.model, engine.plan.kernels) as watch:
            logits = run(batch)
        seen.append(watch)
        return logits

    runner.run = watched  # type: ignore[method-assign]
    try:
        name = engine.add(_ids(engine), SamplingParams(8, num_draft=0, ignore_eos=True))
        engine.step()
        engine.step()
        engine.abort(name)
        while engine.has_work:
            engine.step()
    finally:
        del runner.run
        runner.graphs, engine.overlap = graphs, overlap
    return seen[0], seen[1]


def run_drafter_watched(engine: Engine) -> Watch | None:
    """The kernels of a drafter's pass; None: there is no drafter, or it is not made of layers."""
    proposer, seen, overlap = engine.drafting.proposer, list[Watch](), engine.overlap
    if not proposer or not hasattr(proposer.drafter, "layers"):
        return None
    drafter: Any = proposer.drafter
    propose, engine.overlap = drafter.propose, None

    def watched(anchors: Anchors, depth: int, pick: Pick) -> Tensor:
        def watched_pick(score: Score, each: int, drafted: int = 0, ids: Tensor | None = None) -> Tensor:
            with watching(drafter, engine.plan.kernels) as watch:
                score(False)  # once more than the recording, which launches nothing that could be seen
            seen.append(watch)
            return pick(score, each, drafted, ids)

        drafts: Tensor = propose(anchors, depth, watched_pick)
        return drafts

    drafter.propose = watched
    try:
        name = engine.add(_ids(engine), SamplingParams(64, num_draft=engine.drafting.max_depth, ignore_eos=True))
        for _ in range(4):  # the first reads the prompt, and another may draft from the text
            if not seen:
                engine.step()
        engine.abort(name)
        while engine.has_work:
            engine.step()
    finally:
        del drafter.propose
        engine.overlap = overlap
    return seen[0] if seen else Watch()


def _ids(engine: Engine) -> list[int]:
    """A prompt that no request before has had, so that it is run and not found in the prefix cache."""
    count, start = min(PROMPT, engine.plan.max_model_len // 2), time.perf_counter_ns()
    return [(start + 7919 * i) % engine.sampler.vocab_size for i in range(count)]
