"""Blocks cut by their own confidence: the fit, the rule, and the controller that drafts as deep as cut blocks pay."""

from __future__ import annotations

import math
import random
from statistics import mean

import pytest
from sparkdraft.speculation.cut import OWN, USUAL, Confidence, Profile, best_cuts, survivals
from sparkdraft.speculation.depth import DepthController, DepthState

from sparkdraft.speculation.costs import Price, StepCosts, interpolate

MAX_DEPTH = 15
DEPTHS = [0, 1, 3, 7, 15]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def drafting(depth: float) -> float:
    return interpolate(DEPTHS, [0.05, 2.2, 2.5, 4.2, 8.5], int(depth)) / 1e3


def verifying(drafts: int) -> float:
    return interpolate(DEPTHS, [4.85, 5.8, 8.7, 15.2, 28.6], drafts) / 1e3


def controller() -> DepthController:
    """As after start-up on two CPU cores."""
    made = DepthController(MAX_DEPTH, depths=DEPTHS)
    for depth in DEPTHS:
        for _ in range(3):
            made.measured(depth, 1, 100, drafting(depth) + verifying(depth), depth, drafting(depth))
    return made


def gaps_of(rng: random.Random, easy: float) -> list[float]:
    """A text in which some blocks are sure to their end, and others are not even of their first draft."""
    sure = rng.random() < easy
    return [max(rng.gauss(6.0 if sure else 0.8, 0.7), 0.0) for _ in range(MAX_DEPTH)]


def run(text: float, cut: bool, slope: float = 0.8, base: float = -0.5, num_tokens: int = 3000) -> tuple[float, float]:
    """(speed over plain steps, rows per step) of one request whose drafts are right as often as their gaps say."""
    depths, rng, state = controller(), random.Random(1), None
    state = depths.open()
    written, seconds, rows, steps = 0, 0.0, 0, 0
    while written < num_tokens:
        (depth,) = depths.choose([state], [100])
        gaps = gaps_of(rng, text)
        kept = depth
        if depth and cut:
            kept = depths.cut(state, gaps[:depth], False)
            depths.verifies([kept], 1)
        accepted = 0
        while accepted < kept and rng.random() < sigmoid(slope * gaps[accepted] + base):
            accepted += 1
        depths.measured(kept, 1, 100, drafting(depth) + verifying(kept), depth, drafting(depth))
        depths.record(state, kept, accepted)
        written, seconds = written + 1 + accepted, seconds + drafting(depth) + verifying(kept)
        rows, steps = rows + 1 + kept, steps + 1
    return written * (drafting(0) + verifying(0)) / seconds, rows / steps


# ---- the fit


@pytest.mark.parametrize("slope, base", [(0.8, -0.3), (0.3, -1.5), (1.5, 0.5), (0.1, 2.0)])
def test_the_fit_finds_the_chances_from_what_is_accepted(slope: float, base: float) -> None:
    fit, rng = Confidence(MAX_DEPTH, 0.78, -0.25), random.Random(0)
    for _ in range(1500):
        gaps = [rng.uniform(0, 8) for _ in range(7)]
        accepted = 0
        while accepted < 7 and rng.random() < sigmoid(slope * gaps[accepted] + base):
            accepted += 1
        fit.learn(gaps, 7, accepted)
    tried = [0.5, 2.0, 4.0, 7.0]
    wrong = [abs(fit.chances([gap])[0] - sigmoid(slope * gap + base)) for gap in tried]
    assert max(wrong) < 0.12 and mean(wrong) < 0.06


def test_a_position_may_differ_from_the_others() -> None:
    fit, rng = Confidence(4, 0.5, 0.0), random.Random(0)
    for _ in range(2000):
        first, second = rng.random() < 0.9, rng.random() < 0.4
        fit.learn([2.0, 2.0], 2, first + (first and second))
    assert fit.chances([2.0])[0] > 0.85 and fit.chances([2.0, 2.0])[1] < 0.5


def test_drafts_behind_a_refusal_teach_nothing() -> None:
    fit = Confidence(4, 0.5, 0.0)
    fit.learn([1.0, 5.0, 5.0], 3, 0)
    assert fit.own[1:] == [0.0] * 3 and fit.own[0] < 0


# ---- the rule


def test_a_block_is_cut_where_it_no_longer_pays() -> None:
    survival = survivals([0.9, 0.9, 0.5, 0.9, 0.1])
    assert survival == pytest.approx([0.9, 0.81, 0.405, 0.3645, 0.03645])
    free, dear = [0.0] * 6, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert best_cuts(survival, free, [0, 2, 5]) == [
        (1.0, 0),
        (pytest.approx(2.71), 2),
        (pytest.approx(1 + sum(survival)), 5),
    ]
    assert best_cuts(survival, dear, [5]) == [(1.0, 0)]
    # One row alone does not pay, three together do: a step of the cost that lies between them.
    assert best_cuts([0.5, 0.5, 0.5], [0.0, 0.8, 0.9, 1.0], [1, 3]) == [(1.0, 0), (2.5, 3)]


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_is_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    survival = survivals([rng.random() for _ in range(7)])
    worth = [0.0]
    for _ in range(7):
        worth.append(worth[-1] + rng.random() / 2)
    for depth, (tokens, kept) in zip([1, 3, 7], best_cuts(survival, worth, [1, 3, 7]), strict=True):
        values = [1 + sum(survival[:k]) - worth[k] for k in range(depth + 1)]
        assert values[kept] == pytest.approx(max(values)) and tokens == pytest.approx(values[kept] + worth[kept])


def test_a_profile_leans_on_all_requests_until_it_has_blocks_of_its_own() -> None:
    usual, own = Profile(2, USUAL), Profile(2, OWN)
    for _ in range(50):
        usual.add([(1.0, 0), (2.0, 1)])
    assert own.means(usual) == ([pytest.approx(1.0), pytest.approx(2.0)], [0.0, pytest.approx(1.0)])
    own.add([(1.0, 0), (4.0, 3)])
    assert 2.3 < own.means(usual)[0][1] < 2.7, "one block of its own against four of all"
    for _ in range(200):
        own.add([(1.0, 0), (4.0, 3)])
    tokens, kept = own.means(usual)
    assert tokens[1] == pytest.approx(4.0) and kept[1] == pytest.approx(3.0)


# ---- costs in two parts


def test_a_cut_step_teaches_the_cost_of_what_it_verified() -> None:
    costs = StepCosts([1.0 + 0.1 * d for d in range(8)])
    for depth, draft, verify in ((0, 0.1, 4.9), (3, 2.0, 9.0), (7, 4.0, 17.0)):
        costs.learn_part(depth, depth, draft, verify)
    for _ in range(20):
        costs.learn_part(3, 7, 4.0, 9.0)  # drafted to 7, verified 3
    assert costs.curve()[3] == pytest.approx(11.0) and costs.drafting_at(7) == pytest.approx(4.0)
    price = costs.price(1)
    assert price.verify[3] == pytest.approx(4.1) and price.verify[7] == pytest.approx(12.1)
    few, five, whole, none = price.own([7, 7, 7, 0], [3, 5, 7.0000001, 0.0], 0)
    assert few == pytest.approx(price.rows[7] - 8.0) and whole == pytest.approx(price.rows[7]) and none == price.rows[0]
    assert five == pytest.approx(sum(price.own([7, 7], [4, 6], 0)) / 2, rel=0.05)


def test_without_times_of_their_own_drafts_cost_what_their_rows_do() -> None:
    price = Price.of([5.0, 6.0, 7.0, 8.0], 1)
    assert price.verify == price.rows and price.own([3], [1], 0) == [price.rows[1]]


# ---- the controller


@pytest.mark.parametrize("easy, gain", [(0.3, 1.08), (0.5, 1.05), (0.7, 1.03)])
def test_a_cut_brings_more_tokens_a_second(easy: float, gain: float) -> None:
    (with_cut, _), (without, _) = run(easy, True), run(easy, False)
    assert with_cut > gain * without and with_cut > 1.0


@pytest.mark.parametrize("easy", [0.0, 0.05])
def test_text_that_defeats_drafting_is_still_parked(easy: float) -> None:
    assert run(easy, True)[0] > 0.975


def test_the_first_blocks_of_a_process_do_not_decide_alone() -> None:
    """Of a text that is easy but begins with two blocks of which the drafter is not sure."""
    depths = controller()
    state, unsure = depths.open(), [0.6] * MAX_DEPTH
    for accepted in (0, 1):
        (depth,) = depths.choose([state], [100])
        kept = depths.cut(state, unsure[:depth], False)
        depths.verifies([kept], 1)
        depths.record(state, kept, min(accepted, kept))
    assert depths.choose([state], [100])[0] > 0 and state.paused is None
    for _ in range(20):  # and then it stays so
        (depth,) = depths.choose([state], [100])
        if depth:
            depths.record(state, depths.cut(state, [-1.0] * depth, False), 0)
    assert state.paused is not None


def steps_after_change(seed: int, before: float, after: float) -> int:
    """Steps from where the drafter's gaps change their mean until the request changes sides: pauses, or drafts because
    it pays."""
    depths, rng, written, steps = controller(), random.Random(seed), 0, 0
    state, change = depths.open(), 300 + random.Random(-seed).randrange(100)
    while steps < 500:
        (depth,) = depths.choose([state], [100])
        changed = written >= change
        if changed and (state.paused is None) == (after > before):
            break
        gaps = [rng.gauss(after if changed else before, 0.8) for _ in range(MAX_DEPTH)]
        kept = depths.cut(state, gaps[:depth], False) if depth else 0
        if kept < depth:
            depths.verifies([kept], 1)
        accepted = 0
        while accepted < kept and rng.random() < sigmoid(0.78 * gaps[accepted] - 0.25):
            accepted += 1
        depths.measured(kept, 1, 100, drafting(depth) + verifying(kept), depth, drafting(depth))
        depths.record(state, kept, accepted)
        written, steps = written + 1 + accepted, steps + changed
    return steps


def test_a_fall_is_noticed() -> None:
    assert mean(steps_after_change(seed, 5.0, -0.5) for seed in range(10)) < 30


def test_drafting_comes_back() -> None:
    assert mean(steps_after_change(seed, -0.8, 5.0) for seed in range(20)) < 40


@pytest.mark.parametrize("easy", [0.5, 1.0])
def test_a_drafter_that_is_sure_without_reason_is_found_out(easy: float) -> None:
    """Its gaps are wide, and nothing is ever accepted: first the request's own record, then the fit say so."""
    assert run(easy, True, slope=0.0, base=-4.0)[0] > 0.97


def test_gaps_that_say_nothing_cost_little() -> None:
    """Every draft is right four times in five, whatever its gap."""
    (with_cut, _), (without, _) = run(0.5, True, slope=0.0, base=1.4), run(0.5, False, slope=0.0, base=1.4)
    assert with_cut > 0.97 * without


def test_drafts_that_were_cut_count_with_their_chance() -> None:
    depths = controller()
    state = depths.open()
    depths.choose([state], [100])
    kept = depths.cut(state, [8.0, -3.0, 8.0], False)
    assert kept == 1 and state.block
    chances = state.block.chances
    depths.record(state, 1, 1)
    assert state.block is None and state.tried[:3] == pytest.approx([1, 1, chances[1]])
    assert state.taken[:3] == pytest.approx([1, chances[1], chances[1] * chances[2]])


def test_a_block_that_is_cut_to_nothing_is_a_plain_step_that_parks_nothing() -> None:
    depths = controller()
    state = depths.open()
    depths.choose([state], [100])
    assert depths.cut(state, [-3.0, 0.0, 0.0], False) == 0
    depths.verifies([0], 1)
    depths.measured(0, 1, 100, drafting(3) + verifying(0), 3, drafting(3))
    depths.record(state, 0, 0)
    assert state.paused is None and state.waited == 0
    assert depths.costs[0, 0].curve()[0] == pytest.approx(drafting(0) + verifying(0), rel=0.01)


def test_blocks_that_are_always_kept_whole_are_priced_as_such() -> None:
    """Decayed means of one number are not exactly that number. Rows are cheap here, as on a GPU."""
    depths = DepthController(MAX_DEPTH, depths=DEPTHS)
    for depth in DEPTHS * 3:
        depths.measured(depth, 1, 100, 5.6 + 0.02 * depth if depth else 5.0, depth, 0.5 if depth else 0.01)
    state = depths.open()
    for _ in range(300):
        (depth,) = depths.choose([state], [100])
        kept = depths.cut(state, [8.0] * depth, False) if depth else 0
        depths.record(state, kept, kept)
    assert depth == kept == MAX_DEPTH


@pytest.mark.parametrize("seed", range(8))
def test_any_course_of_a_batch_leaves_numbers(seed: int) -> None:
    """Random costs, gaps (some of them no numbers), depths and ends of requests: every choice stays within bounds."""
    rng = random.Random(seed)
    depths, states = DepthController(MAX_DEPTH, depths=DEPTHS), []
    for _ in range(250):
        states = [s for s in states if rng.random() < 0.97] + [depths.open() for _ in range(4 - len(states))]
        chosen = depths.choose(states, [rng.randrange(1, 3000) for _ in states])
        assert all(depth in DEPTHS for depth in chosen)
        odd = rng.random() < 0.05
        gaps = [[math.nan if odd else rng.uniform(-30, 20) for _ in range(depth)] for depth in chosen]
        kept = [
            depths.cut(s, g, rng.random() < 0.5) if g and rng.random() < 0.9 else len(g)
            for s, g in zip(states, gaps, strict=True)
        ]
        assert all(0 <= k <= depth for k, depth in zip(kept, chosen, strict=True))
        if kept != chosen:
            depths.verifies(kept, len(states))
        draft, verify = rng.uniform(1e-5, 5e-3), rng.uniform(1e-3, 2e-2)
        depths.measured(max(kept), len(states), 100, draft + verify, max(chosen), draft)
        for state, k in zip(states, kept, strict=True):
            depths.record(state, k, rng.randint(0, k))
            assert all(map(math.isfinite, [*state.taken, *state.tried, state.promised, state.held]))
    for fit in depths.fits.values():
        assert all(0 < chance < 1 for chance in fit.chances([-8.0, 0.0, 8.0, math.nan]))


def test_a_probe_is_not_cut() -> None:
    depths = controller()
    state = depths.open()
    depths.choose([state], [100])
    state.paused = (0, 0)
    assert depths.cut(state, [0.0, 0.0, 0.0], False) == 3


def test_greedy_and_sampled_text_have_their_own_fit() -> None:
    depths = controller()
    state: DepthState = depths.open()
    depths.choose([state], [100])
    depths.cut(state, [3.0], True)
    before = depths.fits[False].chances([3.0])
    depths.record(state, 1, 0)
    assert depths.fits[False].chances([3.0]) == before and depths.fits[True].own[0] < 0
