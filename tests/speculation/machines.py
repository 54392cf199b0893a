"""Machines on which a draft budget is simulated: seconds of a step, and requests whose drafts are right by chance."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sparkdraft.speculation.budget import Batch, Budget
from sparkdraft.speculation.costs import GRID, Curve
from sparkdraft.speculation.survival import Kind

MAX_DEPTH = 15
DEPTHS = [0, 1, 3, 7, 15]  # those that the engine chooses from
START = 0.69
Chances = Sequence[float]


@dataclass(frozen=True)
class Machine:
    """Seconds of the drafter's pass for so many requests to a depth, and of verifying so many tokens."""

    draft: Callable[[int, int], float]
    verify: Callable[[float], float]
    for_all: bool = False  # the pass is one of all requests, as on a GPU

    def step(self, num: int, drafts: float, drafting: int = 0, depth: int = 0) -> float:
        before = self.draft(num if self.for_all else drafting, depth) if drafting else 0.0
        return before + self.verify(num + drafts)

    def best(self, chances: Chances, num: int = 1, depths: Sequence[int] = DEPTHS) -> tuple[float, int]:
        """Tokens a second of the best fixed depth, and the depth."""
        rates = []
        for depth in depths:
            tokens = num * float(1 + np.cumprod(chances[:depth]).sum())
            rates.append((tokens / self.step(num, num * depth, num * bool(depth), depth), depth))
        return max(rates)


def line(points: Sequence[float], values: Sequence[float], scale: float = 1e-3) -> Callable[[float], float]:
    """Milliseconds through these points, and on as steeply as between the last two."""
    steep = (values[-1] - values[-2]) / (points[-1] - points[-2])

    def seconds(x: float) -> float:
        return scale * (float(np.interp(x, points, values)) + max(x - points[-1], 0.0) * steep)

    return seconds


_arm = line([2, 4, 8, 16], [2.2, 2.5, 4.2, 8.5])
MACHINES = {
    # two cores, and the figures of docs/numbers for two Arm cores
    "cpu": Machine(lambda n, d: (1.0 + 0.2 * n) / 1e3, lambda t: (4.4 + 0.6 * t) / 1e3),
    "arm": Machine(lambda n, d: _arm(n * (1 + d)), line([1, 2, 4, 8, 16], [4.9, 5.8, 8.7, 15.2, 28.6])),
    # a dense model of 8 billion weights, and the embedded one
    "8b": Machine(lambda n, d: 0.5e-3, line([1, 16, 64, 256, 512], [4.3, 4.4, 4.9, 8.0, 13.0]), for_all=True),
    "embedded": Machine(lambda n, d: 0.15e-3, line([1, 16, 64, 256], [0.67, 0.69, 0.95, 2.6]), for_all=True),
    # of 128 experts a token reaches 8
    "experts": Machine(lambda n, d: 0.9e-3, lambda t: 2.8e-3 + 12.5e-3 * (1 - (1 - 8 / 128) ** t), for_all=True),
}


def flat(chance: float) -> list[float]:
    return [chance] * MAX_DEPTH


def budget(
    machine: Machine, nums: Sequence[int] = (1,), gaps: bool = False, depths: Sequence[int] = DEPTHS, seed: int = 0
) -> Budget:
    """As after start-up: every depth measured three times, in batches of these sizes, with noise."""
    kinds = [Kind(START, False, True, gaps), Kind(START, True, True, gaps)]
    made, rng = Budget(MAX_DEPTH, kinds, depths, drafts_for_all=machine.for_all), random.Random(seed)
    for num in nums:
        for depth in [d for d in DEPTHS for _ in range(3)]:
            measure(made, machine, rng, num, num * depth, num * bool(depth), depth)
    return made


def measure(
    made: Budget, machine: Machine, rng: random.Random, num: int, drafts: int, drafting: int, depth: int
) -> None:
    ran = num if machine.for_all and drafting else drafting
    draft = machine.draft(ran, depth) if ran else 0.0
    made.measured(
        num + drafts,
        num,
        100,
        machine.verify(num + drafts) * rng.gauss(1, 0.03),
        draft * rng.gauss(1, 0.03),
        ran,
        depth,
    )


def accept(rng: random.Random, chances: Chances, depth: int) -> int:
    accepted = 0
    while accepted < depth and rng.random() < chances[accepted]:
        accepted += 1
    return accepted


@dataclass(frozen=True)
class Step:
    before: float  # seconds since the first step began
    seconds: float
    written: int  # tokens of all requests before it
    depths: list[int]
    accepted: list[int]

    @property
    def tokens(self) -> int:
        return len(self.depths) + sum(self.accepted)


def run(
    made: Budget,
    machine: Machine,
    texts: Sequence[Callable[[int], Chances]],
    seconds: float = 0.0,
    tokens: int = 0,
    seed: int = 0,
    opened: Sequence[int] = (),
    late: bool = False,
) -> list[Step]:
    """Requests side by side. Each text gives the acceptance at a number of tokens written of it. It ends after so many
    seconds, or when each request has written so many tokens. late: a step is recorded after the next was chosen, as on
    a GPU."""
    rng, slots = random.Random(seed), list(opened) or [made.open(0) for _ in texts]
    written, now, steps, unread = [0] * len(texts), 0.0, list[Step](), list[tuple[list[int], list[int]]]()
    while now < seconds or min(written) < tokens:
        depths = made.choose(slots, 100)
        chances = [text(count) for text, count in zip(texts, written, strict=True)]
        accepted = [accept(rng, each, depth) for each, depth in zip(chances, depths, strict=True)]
        drafting = sum(depth > 0 for depth in depths)
        took = machine.step(len(slots), sum(depths), drafting, max(depths))
        steps.append(Step(now, took, sum(written), depths, accepted))
        measure(made, machine, rng, len(slots), sum(depths), drafting, max(depths))
        unread.append((depths, accepted))
        if len(unread) > late:
            made.record(slots, *unread.pop(0))
        written, now = [w + 1 + a for w, a in zip(written, accepted, strict=True)], now + took
    return steps


def rate(steps: Sequence[Step]) -> float:
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


def price(made: Budget, tokens: float, depth: int = MAX_DEPTH) -> None:
    """Every request drafts so deep from now on, and a draft costs so many tokens to verify."""
    batch = made.batch = Batch(made.costs, (0, 0), 1, 0)
    batch.rate, batch.verify = 1.0, Curve(tokens * np.array(GRID, float))
    made.choose = lambda slots, *context: [depth] * len(slots)  # type: ignore[method-assign]
    made.measured = lambda *args: None  # type: ignore[method-assign]
