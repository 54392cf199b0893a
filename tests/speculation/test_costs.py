"""The cost table: what steps teach, and what is believed of steps that never ran."""

from __future__ import annotations

import numpy as np
import pytest

from sparkdraft.models.common.sizes import model_sizes
from sparkdraft.speculation.costs import (
    GRID,
    ROW,
    CostTable,
    Curve,
    bucket_of,
    expected_tokens,
    first_shape,
    never_falling,
)
from tests.operate.forecast.described import DESCRIBED

LINE = 1.0 + ROW * np.arange(len(GRID))


def test_a_curve_survives_accidents_and_follows_the_machine() -> None:
    curve = Curve(LINE)
    curve.learn(4, 100.0)  # the first step compiled something
    for _ in range(10):
        curve.learn(4, 1.0)
        curve.learn(1, 0.8)
    assert curve.at(4) == pytest.approx(1.0)
    curve.learn(4, 50.0)
    assert curve.mean[GRID.index(4)] < 1.1
    curve.learn(4, 0.1)  # the step before was read late
    assert curve.mean[GRID.index(4)] > 0.95
    ratio = curve.mean[0] / curve.mean[3]
    for _ in range(60):
        curve.learn(4, 1.4)  # a slower machine: a step of one token, not visited, is believed slower too
    assert curve.mean[3] == pytest.approx(1.4, rel=0.02) and curve.mean[0] / curve.mean[3] == pytest.approx(
        ratio, rel=0.15
    )


def test_a_step_between_two_points_corrects_both() -> None:
    curve = Curve(np.ones(len(GRID)))
    for tokens, seconds in ((16, 10.0), (20, 14.0)) * 8:
        curve.learn(tokens, seconds)
    assert curve.at([16, 18, 20]) == pytest.approx([10.0, 12.0, 14.0])
    for _ in range(60):
        curve.learn(18, 15.0)
    assert curve.at(18) == pytest.approx(15.0, rel=0.02) and curve.at(20) > curve.at(16) > 10.5


def test_past_the_last_point_it_rises_as_steeply_as_before_it() -> None:
    curve = Curve(first_shape(1, lambda rows: 1.0))
    for tokens in (1, 2, 4, 8, 16):
        curve.learn(tokens, 5.0 + 0.5 * tokens)
    assert curve.at([6, 32, 64]) == pytest.approx([8.0, 21.0, 37.0], rel=0.03)
    flat = Curve(first_shape(1, lambda rows: 1.0))
    for tokens in (1, 2, 4, 8, 16):
        flat.learn(tokens, 5.0)
    assert flat.at(256) == pytest.approx(5.0, rel=0.01)


def test_a_curve_never_falls() -> None:
    curve = Curve(LINE)
    for tokens, seconds in ((1, 5.0), (2, 4.0), (4, 7.0), (8, 6.0)):
        curve.learn(tokens, seconds)
    values = curve.values()
    assert (np.diff(values) >= 0).all()
    assert never_falling([1, 3, 2, 4], [1, 1, 3, 1]) == [1, 2.25, 2.25, 4]


def test_an_unknown_batch_costs_what_its_tokens_do() -> None:
    table = CostTable()
    for tokens in (1, 2, 4, 8, 16) * 3:
        table.learn(
            (0, 0), tokens, 5.0 + 0.5 * tokens, 0.0 if tokens == 1 else 1.0, int(tokens > 1), tokens - 1, tokens == 1
        )
    assert table.plain((2, 0), 4) == pytest.approx(7.0) and not table.knows_plain((2, 0))
    table.learn((2, 0), 4, 14.0, 0.0, is_plain=True)  # a batch of four is twice as dear
    assert table.at((2, 0)).verify.at([4, 8]) == pytest.approx([14.0, 18.0])
    assert table.drafting((2, 0), 1, 7, 14.0) == pytest.approx(1.0, rel=0.01)
    table.learn((2, 0), 4, 14.0, 0.0, is_plain=True)
    assert table.knows_plain((2, 0)) and table.knows_plain((0, 0))


@pytest.mark.parametrize("chain", [False, True])
def test_drafting_costs_a_pass_or_one_for_each_draft(chain: bool) -> None:
    table = CostTable(chain=chain)
    assert table.drafting((0, 0), 1, 3, 5.0) == pytest.approx(0.5), "assumed before any was timed"
    for requests in (1, 4):
        for depth in (1, 3, 7):
            seconds = depth * (1 + 0.1 * requests) if chain else 1 + 0.1 * requests * (1 + depth)
            table.learn((2, 0), 9, 5.0, seconds, requests, depth)
    expected = [3 * 1.2, 7 * 1.4] if chain else [1 + 0.1 * 8, 1 + 0.1 * 32]
    assert table.drafting((2, 0), [2, 4], [3, 7], 5.0) == pytest.approx(expected, rel=0.05)


def test_what_runs_before_the_target_is_a_part_of_plain_steps() -> None:
    table = CostTable()
    for _ in range(20):
        table.learn((0, 0), 1, 5.0, 0.3, is_plain=True)
    assert table.plain((0, 0), 1) == pytest.approx(5.3)


def test_experts_are_dear_where_few_tokens_reach_few_of_them() -> None:
    """Drafts of one stream read more experts; those of 64 streams read what is read in any case."""
    read = model_sizes(DESCRIBED["qwen3-30b-a3b"]).read
    one, many, dense = first_shape(1, read), first_shape(64, read), first_shape(1, lambda rows: 1.0)
    four, at_64, at_256 = (GRID.index(n) for n in (4, 64, 256))
    assert (one[four] - dense[four]) / dense[four] > 0.5
    assert many[at_256] / many[at_64] < 1.1 * dense[at_256] / dense[at_64] and (np.diff(one) > 0).all()


def test_arithmetic() -> None:
    assert expected_tokens([0.5, 0.5]) == [1.0, 1.5, 1.75]
    assert [bucket_of(n, 1)[0] for n in (1, 2, 3, 4, 5, 8)] == [0, 1, 2, 2, 3, 3]
    assert [bucket_of(1, c)[1] for c in (0, 256, 257, 1024, 1025, 4096, 4097)] == [0, 0, 1, 1, 2, 2, 3]
    assert sorted(set(GRID)) == GRID and GRID[:16] == list(range(1, 17)) and GRID[-1] == 16384
