"""Batches whose rows share what they read: the more rows a step has, the less each of them costs.

The machine here is a GPU with a mixture of experts. A step reads the experts that its rows reach, so that the first
drafts of a batch are dear and those beside many others nearly free. A request that were charged its share of the
step would give up drafts that cost almost nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import mean

import numpy as np
import pytest
from sparkdraft.speculation.depth import DepthController

from sparkdraft.operate.bench.synthetic import BASE, SLOPE, Acceptance
from sparkdraft.speculation.costs import Price
from tests.speculation.varied import VariedAcceptance

DEPTHS = [0, 1, 3, 7, 15]
DRAFTING = 0.9e-3
STEPS = 120


def seconds(rows: int, drafts: bool = True) -> float:
    """Of 128 experts a row reaches 8, any of them: 6.0 ms for a row, 10.7 for 16, 15.1 for 64."""
    return 2.8e-3 + 12.5e-3 * (1 - (1 - 8 / 128) ** rows) + DRAFTING * drafts


def auto(process: Acceptance, num: int, seed: int) -> float:
    """Tokens a second with the depths and the cuts that the controller chooses."""
    depths, rng, outcomes = DepthController(15, depths=DEPTHS), random.Random(seed), process.outcomes(STEPS, num, seed)
    for depth in DEPTHS * 3:
        depths.measured(depth, num, 300, seconds(num * (1 + depth), depth > 0), depth, DRAFTING * (depth > 0))
    states, tokens, time = [depths.open() for _ in range(num)], 0, 0.0
    for step in range(STEPS):
        chosen, kept, accepted = depths.choose(states, [300] * num), [], []
        for i, (state, depth) in enumerate(zip(states, chosen, strict=True)):
            gaps = outcomes.gaps[step, i, :depth].tolist()
            kept.append(depths.cut(state, gaps, False) if depth else 0)
            accepted.append(min(int(outcomes.accepted[step, i]), kept[-1]))
        took = seconds(num + sum(kept), any(chosen)) * rng.gauss(1, 0.02)
        if any(chosen):
            depths.verifies(kept, num)
        depths.measured(max(kept), num, 300, took, max(chosen), DRAFTING * any(chosen))
        for state, verified, right in zip(states, kept, accepted, strict=True):
            depths.record(state, verified, right)
        tokens, time = tokens + num + sum(accepted), time + took
    return tokens / time


def given(process: Acceptance, num: int, seed: int, keep: Callable[[np.ndarray], int]) -> float:
    """Tokens a second if each block of 15 drafts keeps what 'keep' says of its drafts' survivals."""
    outcomes, tokens, time = process.outcomes(STEPS, num, seed), 0, 0.0
    survival = (1 / (1 + np.exp(-(SLOPE * outcomes.gaps + BASE)))).cumprod(2)
    for step in range(STEPS):
        kept = [keep(survival[step, i]) for i in range(num)]
        accepted = [min(k, int(n)) for k, n in zip(kept, outcomes.accepted[step], strict=True)]
        tokens, time = tokens + num + sum(accepted), time + seconds(num + sum(kept))
    return tokens / time


@pytest.mark.parametrize(("length", "num"), [(2.0, 8), (3.0, 4), (3.0, 8), (5.9, 4), (5.9, 8)])
def test_blocks_that_vary_are_cut_nearly_as_well_as_if_all_were_known(length: float, num: int) -> None:
    process = VariedAcceptance(length, 15)
    found = mean(auto(process, num, seed) for seed in (0, 1))
    limits = (0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0)
    best = max(given(process, num, 0, lambda each, limit=limit: int((each > limit).sum())) for limit in limits)  # type: ignore[misc]
    assert found > 0.945 * best, "an equal share of the step for each request gives 0.87 to 0.94"


@pytest.mark.parametrize("num", [4, 8])
def test_blocks_that_are_alike_are_drafted_as_deep_as_is_best(num: int) -> None:
    process = Acceptance(5.9, 15)
    found = mean(auto(process, num, seed) for seed in (0, 1))
    assert found > 0.97 * max(given(process, num, 0, lambda _, depth=depth: depth) for depth in DEPTHS[1:])  # type: ignore[misc]


# ---- the price


def test_drafts_are_cheaper_beside_many_others() -> None:
    price = Price.of([seconds(4 * (1 + depth), depth > 0) for depth in range(16)], 4, [0.0, *[DRAFTING] * 15])
    few, some, many = price.beside.values()
    assert list(price.beside) == [1, 3, 15] and few[15] > 1.4 * some[15] > 4 * many[15] > 0
    assert price.verifying(60) == pytest.approx(seconds(64) - seconds(4), rel=1e-6)
    assert few == sorted(few) and many[0] == 0.0
    # A request alone pays all of its rows.
    assert Price.of([5.0, 6.0, 7.0, 8.0], 1).beside == {0: [0.0, 1.0, 2.0, 3.0]}


def test_where_every_row_costs_the_same_there_is_one_price() -> None:
    price = Price.of([5.0 + 4 * 0.5 * depth for depth in range(16)], 4)
    assert list(price.beside) == [3] and price.beside[3] == pytest.approx([0.5 * own for own in range(16)])


def test_a_step_of_different_depths_teaches_what_its_rows_cost_together() -> None:
    depths = DepthController(15, depths=DEPTHS)
    for depth in DEPTHS * 3:
        depths.measured(depth, 4, 300, seconds(4 * (1 + depth), depth > 0), depth, DRAFTING * (depth > 0))
    states = [depths.open() for _ in range(4)]
    for _ in range(200):
        depths.choose(states, [300] * 4)
        depths.verifies([15, 15, 0, 0], 4)
        depths.measured(15, 4, 300, seconds(34), 15, DRAFTING)
    curve = depths.costs[2, 1].curve()
    assert curve[8] == pytest.approx(seconds(34), rel=0.04) and curve[15] == pytest.approx(seconds(64), rel=0.04)


def test_a_step_that_was_not_chosen_is_not_taken_for_one_that_was() -> None:
    """Requests that name their depth: all of them draft 15, and the last choice was a mixture up to 15."""
    depths = DepthController(15, depths=DEPTHS)
    for depth in DEPTHS * 3:
        depths.measured(depth, 4, 300, seconds(4 * (1 + depth), depth > 0), depth, DRAFTING * (depth > 0))
    depths.choose([depths.open() for _ in range(4)], [300] * 4)
    depths.verifies([15, 0, 0, 0], 4)
    before = depths.costs[2, 1].weight[4]
    for _ in range(20):
        depths.measured(15, 4, 300, seconds(64), 15, DRAFTING)
    assert depths.costs[2, 1].weight[4] <= before + 1 and depths.costs[2, 1].weight[15] > 20
