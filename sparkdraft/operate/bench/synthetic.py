"""Imposes a given acceptance on drafts, so that drafted speed can be measured with random weights.

Each draft is accepted with one probability if all before it were (a truncated geometric distribution) that gives the
mean length asked for. The outcomes of all steps are drawn beforehand. All real work is still done: the sampler samples,
and its result is then replaced. Two more things are replaced, because random weights would spoil them:

- The drafts' ids (`spread`). Random weights draft one id again and again, and equal ids reach the same experts, so a
  model with experts would read too few of them.
- The drafter's confidence, which decides where blocks are cut: it follows from the probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparkdraft.core import Request, UserError, Work
from sparkdraft.drafters.base import Anchors, Pick
from sparkdraft.engine.device_steps import DeviceSteps
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.host_steps import HostSteps
from sparkdraft.engine.proposer import Drafts
from sparkdraft.engine.sampler import Sampled, Sampler, SampleRow
from sparkdraft.engine.slots import Slots
from sparkdraft.kernels.ops import MOST_SURE, WIDEST

Table = NDArray[np.int32]
Propose = Callable[[Anchors, int, Pick], Tensor]
Drafted = Callable[[list[Work]], list[Drafts]]
ROW_STRIDE, STREAM_STRIDE = 7919, 104729  # between ids: primes
TABLE_ROWS = 4096  # most steps of one pass, where the device reads the table
HALVINGS = 60  # of [0, 1]: beyond float64's resolution
# A draft of the embedded drafter that is reached is accepted with the chance sigmoid(SLOPE * gap + BASE).
SLOPE, BASE = 0.80, -0.26


class Outcomes(NamedTuple):
    """The number of accepted drafts in each step and stream, and the drafter's confidence in each."""

    accepted: Table  # [steps, streams]
    gaps: NDArray[np.float32]  # [steps, streams, depth]: how sure the drafter is said to be of each

    @staticmethod
    def joined(parts: Sequence[Outcomes], steps: int) -> Outcomes:
        """Concatenate outcomes and keep so many steps."""
        accepted, gaps = zip(*parts, strict=True)
        return Outcomes(np.concatenate(accepted)[:steps], np.concatenate(gaps)[:steps])


@dataclass(frozen=True)
class Acceptance:
    """The random process. A length counts the accepted drafts and the target's own id."""

    length: float
    depth: int  # drafts per step

    def __post_init__(self) -> None:
        if not 1 <= self.length <= self.depth + 1:
            raise UserError(
                f"--synthetic-acceptance is {self.length:g}; with {self.depth} drafts per step it must be from 1 to "
                f"{self.depth + 1}, including the target's own id"
            )

    @property
    def p(self) -> float:
        """The probability that a draft is accepted where it is reached. The mean length is 1 + p + p^2 + ... +
        p^depth."""
        low, high = 0.0, 1.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            short = sum(middle**k for k in range(self.depth + 1)) < self.length
            low, high = (middle, high) if short else (low, middle)
        return (low + high) / 2

    @property
    def gap(self) -> float:
        """The confidence of a drafter that knows only this probability."""
        p = min(max(self.p, 1 - MOST_SURE), MOST_SURE)
        return min(max((math.log(p / (1 - p)) - BASE) / SLOPE, -WIDEST), WIDEST)

    def steps(self, tokens: int) -> int:
        """Return the steps that write at least this many tokens on average."""
        return -int(-tokens // self.length)

    def table(self, steps: int, streams: int, seed: int = 0) -> Table:
        """Draw the accepted drafts, int32 [steps, streams], with a mean close to the one asked for even for few steps.
        Forty independent draws of a length of 6.5 are off by 12 % in one run of three. So the distribution is cut into
        steps * streams equal slices and each is drawn from once. Each stream gets one of every 'streams' neighbouring
        slices, so its sum is off by at most 'depth'."""
        rng = np.random.default_rng(seed)
        coarse = rng.permuted(np.tile(np.arange(steps), (streams, 1)), axis=1)  # [streams, steps]
        fine = rng.permuted(np.tile(np.arange(streams), (steps, 1)), axis=1)  # [slices, streams]
        fine_of = np.take_along_axis(fine.T, coarse, axis=1)  # [streams, steps]
        chance = (coarse + (fine_of + rng.random(coarse.shape)) / streams).T / steps  # [steps, streams], in [0, 1)
        at_least = self.p ** np.arange(1, self.depth + 1)  # the probability of 1, 2, ... accepted
        return cast(Table, (chance[:, :, None] < at_least).sum(2, dtype=np.int32))

    def outcomes(self, steps: int, streams: int, seed: int = 0) -> Outcomes:
        gaps = np.full((steps, streams, self.depth), self.gap, np.float32)
        return Outcomes(self.table(steps, streams, seed), gaps)

    def describe(self) -> str:
        return (
            f"each of {self.depth} drafts accepted with p = {self.p:.4f} where reached, "
            f"mean length {self.length:g} (truncated geometric, drawn in equal slices)"
        )


def spread(propose: Propose, vocab_size: int) -> Propose:
    """Wrap 'propose' so that the ids of drafts differ by token, stream and step."""

    def proposed(anchors: Anchors, depth: int, pick: Pick) -> Tensor:
        ids, length = propose(anchors, depth, pick), anchors.length
        stream, row = (torch.arange(n, device=ids.device) for n in ids.shape)
        places = length.unsqueeze(1) * ROW_STRIDE + stream.unsqueeze(1) * STREAM_STRIDE + row * ROW_STRIDE
        return ((ids + places) % vocab_size).to(ids.dtype)

    return proposed


class SyntheticSampler(Sampler):
    """Samples normally, then accepts of each request's drafts as many as the table says; without a table, none.

    The rows of a request are consecutive, and the last one has all of its drafts:

        row    first          first + 1          ...  first + accepted      first + accepted + 1  ...
        says   drafts[0]      drafts[1]          ...  the target's own id   (never looked at)
    """

    @staticmethod
    def install(engine: Engine) -> SyntheticSampler:
        """Replace the sampler of an engine whose steps are the host's."""
        old = engine.sampler
        new = SyntheticSampler(old.vocab_size, old.eos_ids, old.device, old.ops, engine.plan.max_seqs)
        new.stop()
        if proposer := engine.drafting.proposer:
            proposer.propose = new.with_gaps(engine, proposer.propose)  # type: ignore[assignment, method-assign]
        engine.steps = HostSteps(engine.runner, new, engine.drafting)
        return new

    def start(self, outcomes: Outcomes) -> None:
        """Use these outcomes from the next step on, one row per step."""
        self._outcomes: Outcomes | None = outcomes
        self.num_applied = 0

    def stop(self) -> None:
        self._outcomes, self.num_applied = None, 0

    def with_gaps(self, engine: Engine, propose: Drafted) -> Drafted:
        """Wrap 'propose' so that drafts whose gaps are known have the imposed ones."""

        def proposed(works: list[Work]) -> list[Drafts]:
            drafts, gaps = propose(works), self.gaps(works, engine.scheduler.running)
            if gaps is None:
                return drafts
            return [each._replace(gaps=given) if each.gaps else each for each, given in zip(drafts, gaps, strict=True)]

        return proposed

    def gaps(self, works: list[Work], running: list[Request]) -> list[list[float]] | None:
        """The imposed confidence in the drafts that come next; None: the drafter's own."""
        if self._outcomes is None or self.num_applied >= len(self._outcomes.gaps):
            return None
        given = self._outcomes.gaps
        return [given[self.num_applied, running.index(w.request), : w.most_drafts].tolist() for w in works]

    def __call__(self, logits: Tensor, rows: list[SampleRow]) -> Sampled:
        sampled = super().__call__(logits, rows)
        groups = [(first, rows[after - 1].ahead) for first, after in spans(rows)]
        left = self._outcomes.accepted[self.num_applied :].tolist() if self._outcomes else []
        counts = left[0] if left else [0] * len(groups)
        self.num_applied += 1
        given = [(first, drafts, count) for (first, drafts), count in zip(groups, counts, strict=True)]
        return Sampled(cast(Tensor, Overruled(sampled.ids, given, self.vocab_size)), sampled.logits)


class SyntheticSlots:
    """The same for a device's steps: it reads the outcomes by itself, step by step."""

    def __init__(self, slots: Slots, acceptance: Acceptance) -> None:
        device, table = slots.device, (TABLE_ROWS, slots.plan.max_seqs)
        self._slots, self._step = slots, torch.zeros(1, dtype=torch.int64, device=device)
        self._table = torch.zeros(table, dtype=torch.int32, device=device)
        self._gaps = torch.zeros((*table, acceptance.depth), device=device)
        slots.given = self

    @property
    def num_applied(self) -> int:
        return int(self._step.item())

    def start(self, outcomes: Outcomes) -> None:
        steps, streams = outcomes.accepted.shape
        assert steps <= TABLE_ROWS, steps
        self.stop()
        self._table[:steps, :streams] = torch.from_numpy(outcomes.accepted).to(self._table.device)
        self._gaps[:steps, :streams] = torch.from_numpy(outcomes.gaps).to(self._gaps.device)

    def stop(self) -> None:
        self._table.zero_()
        self._step.zero_()
        self._gaps.zero_()

    def gaps(self, seqs: int, depth: int) -> Tensor:
        return self._now(self._gaps)[:seqs, :depth].contiguous()

    def accepted(self, seqs: int, depth: int) -> Tensor:
        counts = self._now(self._table)[:seqs]
        self._step += 1
        return counts.clamp(max=depth)

    def _now(self, table: Tensor) -> Tensor:
        return table.index_select(0, self._step.clamp(max=TABLE_ROWS - 1))[0]


def impose(engine: Engine, acceptance: Acceptance) -> SyntheticSampler | SyntheticSlots:
    """Imposes outcomes on all steps of an engine, whoever runs them, once the result is started with them."""
    if proposer := engine.drafting.proposer:
        drafter = proposer.drafter
        drafter.propose = spread(drafter.propose, engine.sampler.vocab_size)  # type: ignore[assignment, method-assign]
    if isinstance(engine.steps, DeviceSteps):
        return SyntheticSlots(engine.steps.slots, acceptance)
    return SyntheticSampler.install(engine)


@dataclass(frozen=True, slots=True)
class Overruled:
    """The sampled ids with accepted drafts in their place. Reading them waits for the device, as reading the samples
    does."""

    ids: Tensor  # int64 [rows], on the device
    given: list[tuple[int, Sequence[int], int]]  # (first row, drafts, number of accepted drafts) of each request
    vocab_size: int

    def tolist(self) -> list[int]:
        said = self.ids.tolist()
        for first, drafts, count in self.given:
            said[first : first + min(count, len(drafts))] = drafts[:count]
            if count < len(drafts) and said[first + count] == drafts[count]:
                said[first + count] = (drafts[count] + 1) % self.vocab_size
        return said


def spans(rows: Sequence[SampleRow]) -> list[tuple[int, int]]:
    """Return (first row, row after the last) of each request; none for a prompt chunk that is not its last."""
    firsts = [i for i, row in enumerate(rows) if not row.ahead]
    return list(pairwise([*firsts, len(rows)]))
