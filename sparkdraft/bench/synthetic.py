"""A given acceptance of drafts: a drafter with random weights agrees with no target, but drafted speed needs a figure.

Each draft is accepted with one probability if the drafts before it were (a truncated geometric distribution), chosen so
that the mean length is the one asked for. How many drafts of each step are accepted is drawn once, as a table of steps
and streams. All real work is still done: the sampler samples, and then its result is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.lanes import Lanes
from sparkdraft.engine.sampler import Sampled, Sampler, SampleRow

Table = NDArray[np.int32]
TABLE_ROWS = 4096  # most steps of one pass, where the device reads the table
HALVINGS = 60  # of [0, 1]: beyond float64's resolution


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The random process. A length counts the accepted drafts and the id that the target adds."""

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

    def steps(self, tokens: int) -> int:
        """Steps that write at least this many tokens, on average."""
        return -int(-tokens // self.length)

    def table(self, steps: int, streams: int, seed: int = 0) -> Table:
        """Accepted drafts, int32 [steps, streams], whose mean is close to the one asked for, however few they are.

        Forty independent draws of a length of 6.5 are off by 12 % in one run of three. So each of steps * streams equal
        slices of the distribution is drawn from once, and each stream has one slice of every 'streams' neighbours: its
        sum is never off by more than 'depth'.
        """
        dice = np.random.default_rng(seed)
        coarse = dice.permuted(np.tile(np.arange(steps), (streams, 1)), axis=1)  # [streams, steps]
        fine = dice.permuted(np.tile(np.arange(streams), (steps, 1)), axis=1)  # [slices, streams]
        fine_of = np.take_along_axis(fine.T, coarse, axis=1)  # [streams, steps]
        chance = (coarse + (fine_of + dice.random(coarse.shape)) / streams).T / steps  # [steps, streams], in [0, 1)
        at_least = self.p ** np.arange(1, self.depth + 1)  # the probability of 1, 2, ... accepted
        return cast(Table, (chance[:, :, None] < at_least).sum(2, dtype=np.int32))

    def describe(self) -> str:
        return (
            f"each of {self.depth} drafts accepted with p = {self.p:.4f} where reached, "
            f"mean length {self.length:g} (truncated geometric, drawn in equal slices)"
        )


class SyntheticSampler(Sampler):
    """Samples normally, then accepts of each request's drafts as many as the table says; without a table, none.

    The rows of a request are consecutive, and the last one has all of its drafts:

        row    first          first + 1          ...  first + accepted      first + accepted + 1  ...
        says   drafts[0]      drafts[1]          ...  the target's own id   (never looked at)
    """

    @staticmethod
    def install(engine: Engine) -> SyntheticSampler:
        """Replace the engine's sampler by one."""
        old = engine.sampler
        new = engine.sampler = SyntheticSampler(old.vocab_size, old.eos_ids, old.device, old.ops)
        new.stop()
        return new

    def start(self, table: Table) -> None:
        """Use a table from the next step on; each step takes one row."""
        self._rows, self.num_applied = iter(table.tolist()), 0

    def stop(self) -> None:
        self._rows, self.num_applied = iter(()), 0

    def __call__(self, logits: Tensor, rows: list[SampleRow]) -> Sampled:
        sampled = super().__call__(logits, rows)
        groups = [(first, rows[after - 1].ahead) for first, after in spans(rows)]
        counts = next(self._rows, None) or [0] * len(groups)
        self.num_applied += 1
        given = [(first, drafts, count) for (first, drafts), count in zip(groups, counts, strict=True)]
        return Sampled(cast(Tensor, Overruled(sampled.ids, given, self.vocab_size)), sampled.logprobs)


class SyntheticLanes:
    """The same table for overlapped steps: the device reads how many drafts are accepted, step by step."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes, self._step = lanes, torch.zeros(1, dtype=torch.int64, device=lanes.device)
        self._table = torch.zeros(TABLE_ROWS, lanes.plan.max_seqs, dtype=torch.int32, device=lanes.device)
        lanes.accept = self

    @property
    def num_applied(self) -> int:
        return int(self._step.item())

    def start(self, table: Table) -> None:
        assert len(table) <= TABLE_ROWS, len(table)
        self.stop()
        self._table[: len(table), : table.shape[1]] = torch.from_numpy(table).to(self._table.device)

    def stop(self) -> None:
        self._table.zero_()
        self._step.zero_()

    def __call__(self, samples: Tensor) -> Tensor:
        counts = self._table.index_select(0, self._step.clamp(max=TABLE_ROWS - 1))[0, : len(samples)]
        self._step += 1
        return counts.clamp(max=samples.shape[1] - 1)


@dataclass(frozen=True, slots=True)
class Overruled:
    """Replaces the sampled ids. Reading it waits for the device exactly as reading them does."""

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
    """(first row, row after the last) of each request; none for a prompt chunk that is not its last."""
    firsts = [i for i, row in enumerate(rows) if not row.ahead]
    return list(pairwise([*firsts, len(rows)]))
