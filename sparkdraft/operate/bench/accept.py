"""Measures how many drafts the target accepts, by class of prompt, temperature and context.

The prompts of a class run as one batch. Counts are the engine's own; 'all' is their sum, never a mean of means.
Position k is scored only where every draft before it was accepted. "No loops" counts the steps before a response begins
to repeat itself (text/repetition.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sparkdraft.core import SamplingParams, StepOutput
from sparkdraft.engine.engine import Engine
from sparkdraft.llm import LLM
from sparkdraft.speculation.stats import SpecStats
from sparkdraft.text.repetition import LoopRule, loop_start
from sparkdraft.weights.loader import Progress

ALL = "all"
LOOP = LoopRule(max_period=128, min_repeated=48)


@dataclass(slots=True)
class Row:
    """The counts of one class, or of all classes together."""

    prompts: int = 0
    prompt_tokens: int = 0
    tokens: int = 0  # tokens written
    stats: SpecStats = field(default_factory=SpecStats)
    no_loops: SpecStats = field(default_factory=SpecStats)  # of the steps that began before a loop

    def add(self, other: Row) -> None:
        self.prompts += other.prompts
        self.prompt_tokens += other.prompt_tokens
        self.tokens += other.tokens
        self.stats.merge(other.stats)
        self.no_loops.merge(other.no_loops)

    def as_dict(self) -> dict[str, object]:
        """Times are left out: in a batch each request is charged with the whole step."""
        counts = {key: value for key, value in self.stats.as_dict().items() if not key.endswith("_ms")}
        counts |= {"per_position_reached": self.stats.per_position_reached, "per_position": self.stats.per_position()}
        ours = {"prompts": self.prompts, "prompt_tokens": self.prompt_tokens, "tokens": self.tokens}
        cut = {
            "num_spec_steps_no_loops": self.no_loops.num_spec_steps,
            "mean_acceptance_length_no_loops": self.no_loops.mean_acceptance_length,
            "per_position_no_loops": self.no_loops.per_position(),
        }
        return ours | {"num_plain_steps": self.stats.num_plain_steps} | counts | cut


@dataclass(slots=True)
class Trace:
    """A response as it is written, with its drafting steps in order."""

    ids: list[int] = field(default_factory=list)
    steps: list[tuple[int, str, int, int]] = field(default_factory=list)  # (anchor, source, drafted, accepted)
    counted: dict[str, list[int]] = field(default_factory=dict)  # source -> [drafted, accepted], so far

    def add(self, piece: StepOutput, counted: dict[str, list[int]]) -> None:
        """Add a piece. Its step drafted if the request's counts grew; the step's anchor is the last id before it."""
        for source, (drafted, accepted) in counted.items():
            was_drafted, was_accepted = self.counted.get(source, (0, 0))
            if drafted > was_drafted:
                self.steps.append((len(self.ids) - 1, source, drafted - was_drafted, accepted - was_accepted))
        self.counted |= counted
        self.ids += piece.ids

    def count(self, stats: SpecStats, before: int) -> None:
        """Record the steps whose anchor is before an index of the response."""
        for anchor, source, drafted, accepted in self.steps:
            if anchor < before:
                stats.record(drafted, accepted, source)


Done = Callable[[int], None]  # called with the number of prompts that have ended since the last call
Work = Callable[[list[list[int]], Done], Row]  # runs the prompts of one class


def over_classes(work: Work, classes: dict[str, list[list[int]]], progress: Progress) -> dict[str, Row]:
    """Run 'work' on each class and add 'all', the sum of the results."""
    ended, total = 0, sum(map(len, classes.values()))

    def done(more: int) -> None:
        nonlocal ended
        ended += more
        progress(ended, total)

    rows, everything = {name: work(prompts, done) for name, prompts in classes.items()}, Row()
    for row in rows.values():
        everything.add(row)
    return rows | {ALL: everything}


def measure(llm: LLM, params: SamplingParams, prompts: list[list[int]], done: Done) -> Row:
    """Run all prompts in one batch. Counts are the growth of the engine's own totals."""
    engine, before = llm.engine, SpecStats()
    before.merge(engine.drafting.total)
    row = Row(len(prompts), sum(map(len, prompts)))
    traces = {engine.add(ids, params): Trace() for ids in prompts}
    while engine.has_work:
        pieces = traced_step(engine, traces)
        row.tokens += sum(len(piece.ids) for piece in pieces)
        done(sum(piece.finish is not None for piece in pieces))
    total = engine.drafting.total
    row.stats = SpecStats(total.num_plain_steps - before.num_plain_steps, total.steps - before.steps)
    for trace in traces.values():
        trace.count(row.no_loops, loop_start(trace.ids, LOOP))
    return row


def traced_step(engine: Engine, traces: dict[str, Trace]) -> list[StepOutput]:
    """Run one step and add it to the requests' traces."""
    # a request that is admitted now drafts later
    running = {request.id: request for request in engine.scheduler.running}
    pieces = engine.step()
    for piece in pieces:
        request = running.get(piece.request_id)
        report = piece.speculation or (engine.drafting.report(request) if request else None)
        traces[piece.request_id].add(piece, report["sources"] if report else {})
    return pieces


def decode(llm: LLM, ids: list[int], params: SamplingParams) -> tuple[list[int], float]:
    """Return the ids that one stream writes, and the seconds from its first token to its last."""
    written, times = [], []
    for piece in llm.stream(ids, params):
        times.append(time.perf_counter())
        written += piece.ids
    return written, times[-1] - times[0]


def table(rows: dict[str, Row]) -> str:
    lines = ["class     prompts  tokens  steps  length  no loops   rate    1st    2nd    3rd"]
    for name, row in rows.items():
        rates = [row.stats.draft_acceptance_rate, *(row.stats.per_position() + [None] * 3)[:3]]
        length = f"{row.stats.mean_acceptance_length or 0:6.2f}  {row.no_loops.mean_acceptance_length or 0:8.2f}"
        shares = "  ".join("    -" if rate is None else f"{rate:5.1%}" for rate in rates)
        lines.append(f"{name:<9} {row.prompts:7}  {row.tokens:6}  {row.stats.num_spec_steps:5}  {length}  {shares}")
    for label, stats in (("by position", rows[ALL].stats), ("  no loops", rows[ALL].no_loops)):
        shares = " ".join("-" if share is None else f"{share:.3f}" for share in stats.per_position())
        lines.append(f"{label:<12} {shares}")
    return "\n".join(lines)
