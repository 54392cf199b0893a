"""The cut on recorded blocks of the embedded drafter: fewer rows for as many tokens, and more tokens a second.

drafted_blocks.npz holds a block at every place of 26 greedy texts of the embedded model (tools/replay_cuts.py records
it): how sure the drafter was of each draft, and whether the target agreed. So a policy can be walked without a model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from sparkdraft.speculation.cut import Confidence, best_cuts, survivals
from sparkdraft.speculation.depth import FIRST_FIT, DepthController

from sparkdraft.speculation.costs import interpolate

DATA = np.load(Path(__file__).with_name("drafted_blocks.npz"))
GAPS: list[list[float]] = DATA["gaps"].astype(float).tolist()
RIGHT: list[list[bool]] = DATA["right"].tolist()
TEXTS = [np.flatnonzero(DATA["text"] == number).tolist() for number in np.unique(DATA["text"])]
DEPTHS = [0, 1, 3, 7, 15]


def accepted(place: int, drafts: int) -> int:
    return next((k for k in range(drafts) if not RIGHT[place][k]), drafts)


def walk(policy: Callable[[int], int]) -> Iterator[tuple[int, int, int]]:
    """(place, drafts, accepted) of each step."""
    for places in TEXTS:
        place = places[0]
        while place <= places[-1]:
            drafts = policy(place)
            taken = accepted(place, drafts)
            yield place, drafts, taken
            place += 1 + taken


def per_step(steps: list[tuple[int, int, int]]) -> tuple[float, float]:
    return 1 + sum(s[1] for s in steps) / len(steps), 1 + sum(s[2] for s in steps) / len(steps)


def cut_at(price: float) -> tuple[float, float]:
    """(rows, tokens) per step, if a row costs so many tokens; the fit learns on the way."""
    fit, worth, steps = Confidence(15, *FIRST_FIT[False]), [price * k for k in range(16)], []
    for step in walk(lambda place: best_cuts(survivals(fit.chances(GAPS[place])), worth, [15])[0][1]):
        fit.learn(GAPS[step[0]], *step[1:])
        steps.append(step)
    return per_step(steps)


def test_a_cut_needs_two_thirds_of_the_rows_for_as_many_tokens() -> None:
    fixed = {depth: per_step(list(walk(lambda _, depth=depth: depth))) for depth in (3, 6, 7)}  # type: ignore[misc]
    assert fixed[6][1] < 3.27 and fixed[7][1] < 3.37, "6 drafts are too few for 3.3 tokens per step"
    rows, tokens = cut_at(0.2)
    assert tokens > 3.3 and rows < 4.65
    rows, tokens = cut_at(0.3)
    assert rows < fixed[3][0] and tokens > 1.12 * fixed[3][1]


def controlled(draft: Callable[[int], float], verify: Callable[[int], float], cut: bool) -> float:
    """Speed over plain of the real controller, one text after the other."""
    depths, rng = DepthController(15, 0.69, DEPTHS), random.Random(0)
    for depth in DEPTHS * 3:
        depths.measured(depth, 1, 100, draft(depth) + verify(depth), depth, draft(depth))
    time, written = 0.0, 0
    for places in TEXTS:
        state, place = depths.open(), places[0]
        while place <= places[-1]:
            (depth,) = depths.choose([state], [100])
            kept = depths.cut(state, GAPS[place][:depth], False) if depth and cut else depth
            if kept < depth:
                depths.verifies([kept], 1)
            parts = draft(depth) * rng.gauss(1, 0.03), verify(kept) * rng.gauss(1, 0.03)
            depths.measured(kept, 1, 100, sum(parts), depth, parts[0])
            taken = accepted(place, kept)
            depths.record(state, kept, taken)
            time, written, place = time + draft(depth) + verify(kept), written + 1 + taken, place + 1 + taken
        depths.close(state)
    return written * (draft(0) + verify(0)) / time


@pytest.mark.parametrize(
    "draft, verify, gain",
    [
        ([0.05, 2.2, 2.45, 4.2, 8.5], [4.85, 5.8, 8.75, 15.2, 28.6], 1.05),  # two Arm cores
        ([0.05, 0.5, 0.5, 0.5, 0.5], [5.0, 6.8, 9.3, 12.7, 17.4], 1.12),  # experts on a GPU
        ([0.05, 0.6, 0.6, 0.6, 0.6], [5.0, 5.02, 5.06, 5.14, 5.3], 1.0),  # a dense GPU
    ],
)
def test_the_controller_gains_by_cutting(draft: list[float], verify: list[float], gain: float) -> None:
    costs = [lambda k, points=points: interpolate(DEPTHS, points, k) / 1e3 for points in (draft, verify)]
    whole, cut = (controlled(costs[0], costs[1], each) for each in (False, True))
    assert cut > gain * whole and cut > 1.2
