"""What the engine asks of whoever runs its steps, and what a step brings.

`HostSteps` (engine/host_steps.py) runs a step at once: on a CPU, and as the reference of the other. `DeviceSteps`
(engine/device_steps.py) launches a step on a GPU before the last one is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sparkdraft.core import Batch, Request, TokenLogprob, Work
from sparkdraft.engine.graphs import Graphs
from sparkdraft.text.grammar import GrammarState


@dataclass(slots=True)
class StepResult:
    """What one step did to one request."""

    work: Work
    ids: list[int] = field(default_factory=list)  # accepted drafts, then the target's sample; none within a prompt
    num_drafted: int = 0
    num_draft: int = 0  # that were verified
    source: str = ""  # of the drafts
    matched: int = 0  # ids at the end of its text that were there before, where the device looks for that
    gaps: list[float] = field(default_factory=list)  # of what was drafted (engine/sampler.py); may be missing
    logprobs: list[TokenLogprob] | None = None  # one per id, if asked for
    prompt_logprobs: list[TokenLogprob] | None = None  # of the work's own tokens, if asked for


@dataclass(slots=True)
class StepRead:
    """A step that has been read. Seconds are 0 where they say nothing about other steps of its kind."""

    batch: Batch
    results: list[StepResult]
    seconds: float = 0.0
    verify_seconds: float = 0.0  # the part of it after drafting
    rows: int = 0  # last ids and drafts, with padding, where a device runs them


class Steps(Protocol):
    ahead: int  # how many steps may be unread when the next one is launched
    grammars: dict[Request, GrammarState]  # of requests that have one: their states after the committed text

    @property
    def num_unread(self) -> int: ...

    @property
    def graphs(self) -> list[Graphs[Any]]:
        """The captured steps and passes; none where nothing is captured."""

    def reach(self, depth: int) -> int:
        """Positions, from the last known id on, that a step of this depth writes for every request that decodes; 0 if
        it writes only for those that draft."""

    def may_draft(self, batch: Batch) -> bool:
        """Return whether a step can run this batch with its drafts."""

    def capture(self) -> None:
        """Captures the steps that requests are likely to need, so that none of them waits for a graph."""

    def launch(self, batch: Batch) -> None:
        """Starts a step. Raises NotFinite."""

    def complete(self) -> None:
        """Finishes the launch of a step whose samples need the ids of the step before, which has been committed."""

    def read(self) -> StepRead:
        """Waits for the oldest unread step. Raises NotFinite."""

    def learn(self, read: StepRead, num_accepted: Sequence[int]) -> None:
        """After a step was committed: passes on what its drafts brought. num_accepted: per result."""

    def forget(self, request: Request) -> None:
        """The request has ended or was preempted."""

    def abandon(self) -> None:
        """Drops launched steps without reading them: the caller ends all their requests."""
