"""The budget on recorded blocks of the embedded drafter: fewer rows for as many tokens, and more tokens a second.

drafted_blocks.npz holds a block at every place of 26 greedy texts of the embedded model (tools/replay_cuts.py records
it): how sure the drafter was of each draft, and whether the target agreed. So a policy can be walked without a model.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from sparkdraft.speculation.budget import Budget
from sparkdraft.speculation.survival import Kind
from tests.speculation.machines import DEPTHS, MACHINES, MAX_DEPTH, START, Machine, line

DATA = np.load(Path(__file__).with_name("drafted_blocks.npz"))
GAPS, RIGHT = DATA["gaps"].astype(float), DATA["right"]
TEXTS = [np.flatnonzero(DATA["text"] == number).tolist() for number in np.unique(DATA["text"])]
EXPERTS = Machine(lambda n, d: 0.5e-3, line([1, 2, 4, 8, 16], [5.0, 6.8, 9.3, 12.7, 17.4]), True)
DENSE = Machine(lambda n, d: 0.6e-3, line([1, 2, 4, 8, 16], [5.0, 5.02, 5.06, 5.14, 5.3]), True)


def accepted(place: int, drafts: int) -> int:
    wrong = np.flatnonzero(~RIGHT[place, :drafts])
    return int(wrong[0]) if len(wrong) else drafts


def replay(machine: Machine, cut: bool, seed: int = 0) -> tuple[float, float, float]:
    """(speed over plain, rows per step, tokens per step), one text after the other."""
    made, rng = Budget(MAX_DEPTH, [Kind(START, False, True, cut)], DEPTHS, drafts_for_all=True), random.Random(seed)
    for depth in DEPTHS * 3:
        made.measured(1 + depth, 1, 100, machine.verify(1 + depth), machine.draft(1, depth), int(depth > 0), depth)
    time, steps, rows, tokens = 0.0, 0, 0, 0
    for places in TEXTS:
        slot, place = made.open(0), places[0]
        while place <= places[-1]:
            (depth,) = made.choose([slot], 100)
            kept = depth
            if depth and cut:
                gaps = np.full((1, MAX_DEPTH), np.nan)
                gaps[0, :depth] = GAPS[place, :depth]
                (kept,) = made.admit([slot], gaps, 1)
            parts = machine.draft(1, depth) if depth else 0.0, machine.verify(1 + kept)
            made.measured(
                1 + kept, 1, 100, parts[1] * rng.gauss(1, 0.03), parts[0] * rng.gauss(1, 0.03), int(depth > 0), depth
            )
            taken = accepted(place, kept)
            made.record([slot], [kept], [taken])
            time, steps, rows, tokens, place = (
                time + sum(parts),
                steps + 1,
                rows + 1 + kept,
                tokens + 1 + taken,
                place + 1 + taken,
            )
        made.close(slot)
    return tokens * machine.step(1, 0) / time, rows / steps, tokens / steps


def fixed(machine: Machine, depth: int) -> float:
    time = written = 0.0
    for places in TEXTS:
        place = places[0]
        while place <= places[-1]:
            taken = accepted(place, depth)
            time, written, place = (
                time + machine.step(1, depth, int(depth > 0), depth),
                written + 1 + taken,
                place + 1 + taken,
            )
    return written * machine.step(1, 0) / time


@pytest.mark.parametrize(
    ("machine", "gain", "least"), [(MACHINES["arm"], 1.05, 1.2), (EXPERTS, 1.12, 1.2), (DENSE, 1.0, 1.2)]
)
def test_cutting_gains(machine: Machine, gain: float, least: float) -> None:
    whole, cut = replay(machine, False)[0], replay(machine, True)[0]
    assert cut > gain * whole and cut > least
