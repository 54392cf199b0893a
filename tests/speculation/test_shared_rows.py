"""Batches whose tokens share what they read: the more tokens a step has, the less each of them costs.

The machine is a GPU with a mixture of experts. A step reads the experts that its tokens reach, so that the first drafts
of a batch are dear and those beside many others nearly free.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import mean

import numpy as np
import pytest

from sparkdraft.operate.bench.synthetic import BASE, SLOPE, Acceptance
from tests.speculation.machines import DEPTHS, MACHINES, MAX_DEPTH, budget, measure
from tests.speculation.varied import VariedAcceptance

STEPS = 120
EXPERTS = MACHINES["experts"]


def auto(process: Acceptance, num: int, seed: int) -> float:
    """Tokens a second with the depths and the drafts that the budget chooses."""
    made, rng, outcomes = budget(EXPERTS, [1, num], gaps=True), random.Random(seed), process.outcomes(STEPS, num, seed)
    slots, tokens, time = [made.open(0) for _ in range(num)], 0, 0.0
    for step in range(STEPS):
        depths = np.array(made.choose(slots, 100))
        kept, drafting = np.zeros(num, int), np.flatnonzero(depths)
        if len(drafting):
            made_here = np.arange(MAX_DEPTH) < depths[drafting, None]
            gaps = np.where(made_here, outcomes.gaps[step, drafting].astype(float), np.nan)
            kept[drafting] = made.admit([slots[i] for i in drafting], gaps, num)
        accepted = np.minimum(outcomes.accepted[step], kept)
        time += EXPERTS.step(num, int(kept.sum()), len(drafting), int(depths.max()))
        measure(made, EXPERTS, rng, num, int(kept.sum()), len(drafting), int(depths.max()))
        made.record(slots, kept.tolist(), accepted.tolist())
        tokens += num + int(accepted.sum())
    return tokens / time


def given(process: Acceptance, num: int, keep: Callable[[np.ndarray], np.ndarray]) -> float:
    """Tokens a second if each block of 15 drafts keeps what 'keep' says of its drafts' survivals."""
    outcomes, tokens, time = process.outcomes(STEPS, num, 0), 0, 0.0
    survival = (1 / (1 + np.exp(-(SLOPE * outcomes.gaps + BASE)))).cumprod(2)
    for step in range(STEPS):
        kept = keep(survival[step])
        tokens += num + int(np.minimum(kept, outcomes.accepted[step]).sum())
        time += EXPERTS.step(num, int(kept.sum()), num, MAX_DEPTH)
    return tokens / time


@pytest.mark.parametrize(("length", "num"), [(2.0, 8), (3.0, 4), (3.0, 8), (5.9, 4), (5.9, 8)])
def test_blocks_that_vary_are_cut_nearly_as_well_as_if_all_were_known(length: float, num: int) -> None:
    process = VariedAcceptance(length, MAX_DEPTH)
    found = mean(auto(process, num, seed) for seed in range(4))
    limits = (0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0)
    best = max(given(process, num, lambda each, limit=limit: (each > limit).sum(1)) for limit in limits)  # type: ignore[misc]
    assert found > 0.89 * best, "which knows the best border beforehand"


@pytest.mark.parametrize("num", [4, 8])
def test_blocks_that_are_alike_are_drafted_as_deep_as_is_best(num: int) -> None:
    process = Acceptance(5.9, MAX_DEPTH)
    found = mean(auto(process, num, seed) for seed in (0, 1))
    assert found > 0.97 * max(given(process, num, lambda _, depth=depth: np.full(num, depth)) for depth in DEPTHS[1:])  # type: ignore[misc]
