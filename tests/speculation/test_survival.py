"""What requests show: counts by position, and chances from how sure the drafter is."""

from __future__ import annotations

import math
import random
from statistics import mean

import numpy as np
import pytest

from sparkdraft.speculation.survival import BLOCKS, Confidence, Kind, Survival, blend

DEPTH = 7
NONE = np.full((1, 2, DEPTH), np.nan)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def survival(gaps: bool = False) -> Survival:
    return Survival(DEPTH, [Kind(0.7, drawn, True, gaps) for drawn in (False, True)])


def learn(made: Survival, slot: int, drafted: int, accepted: int) -> None:
    made.learn(
        np.array([slot]), np.array([[drafted]]), np.array([[accepted]]), made.take_blocks(np.array([slot]))[None]
    )


# ---- the fit


@pytest.mark.parametrize("slope, base", [(0.8, -0.3), (0.3, -1.5), (1.5, 0.5), (0.1, 2.0)])
def test_the_fit_finds_the_chances_from_what_is_accepted(slope: float, base: float) -> None:
    fit, rng, zero = Confidence(DEPTH, [Kind(0.7, False, True, True)]), random.Random(0), np.zeros(1, int)
    for _ in range(1500):
        gaps = np.array([[rng.uniform(0, 8) for _ in range(DEPTH)]])
        accepted = 0
        while accepted < DEPTH and rng.random() < sigmoid(slope * gaps[0, accepted] + base):
            accepted += 1
        position = np.arange(DEPTH)[None]
        fit.learn(0, gaps, position < accepted, position <= accepted)
    wrong = [
        abs(fit.chances(zero, np.full((1, DEPTH), gap))[0, 0] - sigmoid(slope * gap + base)) for gap in (0.5, 2, 4, 7)
    ]
    assert max(wrong) < 0.12 and mean(wrong) < 0.06


def test_greedy_and_drawn_text_have_their_own_fit() -> None:
    made = survival(gaps=True)
    slot, gaps = np.array([made.open(1)]), np.full((1, DEPTH), 3.0)
    before = made.fits.chances(np.zeros(1, int), gaps).tolist()
    made.expect(slot, gaps)
    learn(made, int(slot[0]), 1, 0)
    assert made.fits.chances(np.zeros(1, int), gaps).tolist() == before and made.fits.own[1, 0] < 0
    assert not made.fits.own[1, 1:].any(), "drafts behind a refusal teach nothing"


def test_a_request_whose_drafts_keep_less_than_was_promised_is_believed_less() -> None:
    made = survival(gaps=True)
    slot, gaps = np.array([made.open(0)]), np.full((1, DEPTH), 5.0)
    for _ in range(4):
        made.expect(slot, gaps)
        learn(made, int(slot[0]), 3, 0)
    assert made.fair(slot) < 0.7 and made.fair(np.array([made.open(0)])) == 1.0


def test_the_last_blocks_are_judged_anew() -> None:
    """A request begins with the blocks of others of its kind; drafts that were not made do as well as usual."""
    made = survival(gaps=True)
    slot = np.array([made.open(0)])
    for number in range(BLOCKS + 3):
        made.expect(slot, np.array([[number % 8 / 4] * 3 + [np.nan] * 4]))
        learn(made, int(slot[0]), 3, number % 3)
    expected = made.expected(slot)[0][0]
    assert expected.shape == (BLOCKS, DEPTH) and len(set(expected[:, 0].round(6))) == 8
    assert (np.diff(expected, axis=1) < 0).all()
    stranger = made.expected(np.array([made.open(0)]))[0][0]
    assert len(set(stranger[:, 0].round(6))) == 8


# ---- counts


def test_what_stands_behind_a_refusal_is_unknown() -> None:
    made = survival()
    slot = made.open(0)
    learn(made, slot, 4, 2)
    counts = made._own.counts[slot]
    assert counts[0].tolist() == [1, 1, 0, 0, 0, 0, 0] and counts[1].tolist() == [1, 1, 1, 0, 0, 0, 0]


def test_drafts_that_were_cut_count_with_their_chance() -> None:
    made = survival(gaps=True)
    slot = made.open(0)
    chances = made.expect(np.array([slot]), np.array([[8.0, -3.0, 8.0, *[np.nan] * 4]]))[0]
    learn(made, slot, 1, 1)
    taken, tried = made._own.counts[slot]
    assert tried[:3] == pytest.approx([1, 1, chances[1] / chances[0]])
    assert taken[:3] == pytest.approx([1, chances[1] / chances[0], chances[2] / chances[0]])


def test_steps_learnt_together_are_those_learnt_one_by_one() -> None:
    """But for the chances they are compared with, which are those of the last choice."""
    one, many, rng = survival(), survival(), random.Random(1)
    slots = [[made.open(0) for _ in range(3)] for made in (one, many)]
    drafted = np.array([[3, 7, 0], [3, 7, 0], [3, 7, 1]])
    accepted = np.array([[rng.randint(0, d) for d in row] for row in drafted.tolist()])
    none = np.full((3, 3, 2, DEPTH), np.nan)
    for step in range(3):
        one.learn(np.array(slots[0]), drafted[step][None], accepted[step][None], none[:1])
    many.learn(np.array(slots[1]), drafted, accepted, none)
    for a, b in zip(one._own[1:5], many._own[1:5], strict=True):
        np.testing.assert_allclose(a, b)


def test_untried_positions_expect_what_those_before_them_show() -> None:
    counts = np.array([9.0, 9.0, 0.0, 0.0])
    better = blend(counts, counts, np.full(4, 0.7), np.array(6.0))
    worse = blend(0 * counts, counts, np.full(4, 0.7), np.array(6.0))
    assert better[0] > 0.85 and better[2] > 0.8 and (worse < 0.7).all() and worse[2] < 0.4


def test_others_of_a_kind_teach_a_new_request() -> None:
    made = survival()
    for _ in range(6):
        slot = made.open(0)
        for _ in range(10):
            learn(made, slot, 3, 0)
            made.chances(np.array([slot]))
        made.close(slot)
    greedy, drawn = made.open(0), made.open(1)
    assert made.chances(np.array([greedy]))[0, 0] < 0.3 and made.chances(np.array([drawn]))[0, 0] == pytest.approx(0.7)


def test_text_that_changes_is_forgotten() -> None:
    made = survival()
    slot = np.array([made.open(0)])
    for _ in range(30):
        made.chances(slot)
        learn(made, int(slot[0]), 3, 3)
    before = made.tried(slot)[0]
    for _ in range(8):
        made.chances(slot)
        learn(made, int(slot[0]), 3, 0)
    assert made.tried(slot)[0] < before / 2 and made.chances(slot)[0, 0] < 0.4


@pytest.mark.parametrize("beside", [0, 63])
def test_open_requests_that_never_draft_keep_nobody_from_forgetting(beside: int) -> None:
    made = survival()
    for _ in range(beside):
        made.open(0)
    for accepted, number in ((3, 8), (0, 4)):
        for _ in range(number):
            slot = made.open(0)
            for _ in range(10):
                learn(made, slot, 3, accepted)
            made.close(slot)
    assert made.chances(np.array([made.open(0)]))[0, 0] < 0.45


def test_requests_that_end_together_do_not_make_each_other_forgotten() -> None:
    made = survival()
    slots = [made.open(0) for _ in range(16)]
    for _ in range(10):
        for slot in slots:
            learn(made, slot, 3, 0)
    for slot in slots:
        made.close(slot)
    assert made.chances(np.array([made.open(0)]))[0, 0] < 0.1
