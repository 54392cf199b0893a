"""The depth controller against a simulated engine: what it loses to the best fixed depth, to plain decoding, to change.

Times are of two machines: one like the CPU, where every draft row costs, one like a GPU, where drafting at all costs
and rows hardly do. Run as a script it prints what the tests bound: python -m tests.speculation.test_depth
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean, median

import pytest
from sparkdraft.speculation.depth import DepthController, DepthState, bucket_of

from sparkdraft.models.common.sizes import model_sizes
from sparkdraft.operate.bench.shapes import SHAPES
from sparkdraft.speculation.costs import (
    StepCosts,
    conditional_acceptance,
    expected_tokens,
    for_batch,
    interpolate,
    never_falling,
    start_curve,
)
from tests.fakes.counting import lines_run
from tests.operate.forecast.described import DESCRIBED

MAX_DEPTH = 15
DEPTHS = [0, 1, 3, 7, 15]  # those that the engine chooses from
Cost = Callable[[int], float]
# Conditional acceptance by position of the drafters trained for the embedded model: 3 layers, repetitions cut; and
# 5 layers, as generated (with repetitions only that one was recorded).
L3 = [0.690, 0.670, 0.690, 0.713, 0.766, 0.778, 0.767, 0.760, 0.767, 0.674, 0.760, 0.745, 0.809, 0.878, 0.884]
L5_LOOPS = [0.741, 0.732, 0.758, 0.793, 0.830, 0.835, 0.848, 0.834, 0.829, 0.767, 0.833, 0.828, 0.842, 0.847, 0.830]


def cpu(depth: int) -> float:
    return interpolate(DEPTHS, [4.9, 8.0, 11.2, 19.4, 37.1], depth) / 1e3


def gpu(depth: int) -> float:
    return (5.6 + 0.02 * depth if depth else 5.0) / 1e3


COSTS: dict[str, Cost] = {"cpu": cpu, "gpu": gpu}


def flat(chance: float) -> list[float]:
    return [chance] * MAX_DEPTH


TEXTS = {f"p {chance}": flat(chance) for chance in (0.02, 0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.98)} | {
    "L3": L3,
    "L5, loops": L5_LOOPS,
    "falling": [max(0.9 - 0.06 * position, 0.05) for position in range(MAX_DEPTH)],
    "rising": [0.5, *[0.95] * 14],
}


@dataclass(frozen=True)
class Step:
    """One request's part of a step: tokens written before it, and what happened."""

    before: int
    drafted: int
    accepted: int
    paused: bool
    seconds: float


def accept(rng: random.Random, chances: Sequence[float], depth: int) -> int:
    accepted = 0
    while accepted < depth and rng.random() < chances[accepted]:
        accepted += 1
    return accepted


def controller(cost: Cost, rng: random.Random, num: int = 1, depths: Sequence[int] = DEPTHS) -> DepthController:
    """As after start-up: five depths measured, three times each, with noise."""
    made = DepthController(MAX_DEPTH, depths=depths)
    for depth in DEPTHS:
        for _ in range(3):
            made.measured(depth, num, 100, cost(depth) * rng.gauss(1, 0.03))
    return made


def simulate(cost: Cost, text: Callable[[int], Sequence[float]], num_tokens: int, seed: int) -> list[Step]:
    """One request alone; text gives the acceptance at a number of tokens written."""
    rng = random.Random(seed)
    depths = controller(cost, rng)
    state, written, steps = depths.open(), 0, []
    while written < num_tokens:
        (depth,) = depths.choose([state], [100])
        accepted, seconds = accept(rng, text(written), depth), cost(depth) * rng.gauss(1, 0.03)
        steps.append(Step(written, depth, accepted, state.paused is not None, seconds))
        depths.measured(depth, 1, 100, seconds)
        depths.record(state, depth, accepted)
        written += 1 + accepted
    return steps


def rate(steps: Sequence[Step]) -> float:
    return sum(1 + step.accepted for step in steps) / sum(step.seconds for step in steps)


def best_rate(cost: Cost, chances: Sequence[float]) -> float:
    return max(tokens / cost(depth) for depth, tokens in enumerate(expected_tokens(chances)))


def share_of_best(cost: Cost, chances: Sequence[float], seeds: range, skip: int = 0) -> list[float]:
    """Speed over that of the best fixed depth, the depth known beforehand; tokens before 'skip' left out."""
    runs = [simulate(cost, lambda _: chances, 2000, seed) for seed in seeds]
    return [rate([s for s in steps if s.before >= skip]) / best_rate(cost, chances) for steps in runs]


def tokens_to_recover(cost: Cost, before: float, after: float, seed: int) -> int:
    """From the change of the text to the first step that drafts because it pays, not to probe."""
    change = 300 + random.Random(-seed).randrange(200)
    steps = simulate(cost, lambda written: flat(before if written < change else after), change + 500, seed)
    return next((s.before for s in steps if s.before >= change and s.drafted and not s.paused), change + 500) - change


# ---- one request


@pytest.mark.parametrize("machine", COSTS)
@pytest.mark.parametrize("text", TEXTS)
def test_steady_text_runs_near_its_best_depth(machine: str, text: str) -> None:
    assert mean(share_of_best(COSTS[machine], TEXTS[text], range(12))) > 0.95


@pytest.mark.parametrize("machine", COSTS)
@pytest.mark.parametrize("chance", [0.0, 0.02, 0.1])
def test_text_that_defeats_drafting_costs_less_than_two_percent(machine: str, chance: float) -> None:
    # Times without their noise, which is no loss of ours; first with the tokens it learns from, then without.
    cost = COSTS[machine]
    for seed in range(6):
        steps = simulate(cost, lambda _: flat(chance), 2000, seed)
        for part in (steps, [s for s in steps if s.before >= 100]):
            plain = sum(1 + s.accepted for s in part) * cost(0)
            assert plain / sum(cost(s.drafted) for s in part) > 0.98


@pytest.mark.parametrize("machine", COSTS)
@pytest.mark.parametrize("before, after", [(0.05, 0.9), (0.02, 0.8)])
def test_drafting_comes_back_within_fifty_tokens(machine: str, before: float, after: float) -> None:
    """On average, and within a hundred nine times in ten: an acceptance may be late by bad luck, without a bound."""
    waits = sorted(tokens_to_recover(COSTS[machine], before, after, seed) for seed in range(60))
    assert mean(waits) < 50 and waits[53] < 100


@pytest.mark.parametrize("machine, most", [("cpu", 10), ("gpu", 40)])
def test_a_fall_is_noticed(machine: str, most: int) -> None:
    """A wasted draft costs 2 plain steps on the CPU, 0.15 on the GPU: there it may take longer."""
    wasted = []
    for seed in range(20):
        steps = simulate(COSTS[machine], lambda written: flat(0.9 if written < 400 else 0.02), 700, seed)
        after = [s for s in steps if s.before >= 400]
        wasted.append(next(i for i, s in enumerate(after) if s.paused))
    assert mean(wasted) < most


def test_costs_not_measured_at_start_up_are_learnt() -> None:
    """Depth 5 is far cheaper than its neighbours suggest: it is found out when it is tried."""

    def odd(depth: int) -> float:
        return cpu(depth) if depth != 5 else 0.0125

    rng = random.Random(0)
    depths = controller(cpu, rng, depths=range(MAX_DEPTH + 1))
    guess = depths.costs[bucket_of(1, 100)].curve()[5]
    assert guess == pytest.approx(cpu(5), rel=0.06)
    for _ in range(20):
        depths.measured(5, 1, 100, odd(5) * rng.gauss(1, 0.03))
    curve = depths.costs[bucket_of(1, 100)].curve()
    assert curve[5] == pytest.approx(0.0125, rel=0.04) and curve == sorted(curve)


def test_a_ceiling_never_seen_is_reached() -> None:
    """At depth 1 and always right, nothing is known of position 2: it must be tried, and so on to the end."""
    rng = random.Random(0)
    depths, state = controller(gpu, rng), DepthState([0.0] * MAX_DEPTH, [0.0] * MAX_DEPTH)
    for _ in range(5):
        depths.record(state, 1, 1)
    for _ in range(10):
        (depth,) = depths.choose([state], [100])
        depths.record(state, depth, depth)
    assert depth == MAX_DEPTH


def test_what_stands_behind_a_refusal_is_unknown() -> None:
    depths = DepthController(4)
    state = depths.open()
    depths.record(state, 4, 2)
    assert (state.taken, state.tried) == ([1, 1, 0, 0], [1, 1, 1, 0])
    depths.record(state, 2, 2)
    assert state.tried[2] < 1 and state.tried[3] == 0


# ---- batches, contexts, requests after one another


@pytest.mark.parametrize("machine", COSTS)
def test_an_easy_and_a_hard_request_each_get_their_own_depth(machine: str) -> None:
    """The cost of a step of two requests: the plain step, the fixed cost of drafting, and the rows of each."""
    cost, rng = COSTS[machine], random.Random(1)
    fixed = cost(1) - (cost(3) - cost(1)) / 2

    def step(drafts: Sequence[int]) -> float:
        return fixed + sum(cost(d) - fixed for d in drafts if d) / 2 if any(drafts) else cost(0)

    depths = controller(cost, rng, num=2)
    states, chances, drafted = [depths.open(), depths.open()], [flat(0.9), flat(0.02)], ([], [])
    expected, tokens, seconds = [expected_tokens(each) for each in chances], 0.0, 0.0
    for number in range(400):
        chosen = depths.choose(states, [100, 200])
        depths.measured(max(chosen), 2, 200, step(chosen) * rng.gauss(1, 0.03))
        for i, depth in enumerate(chosen):
            depths.record(states[i], depth, accept(rng, chances[i], depth))
            drafted[i].append(depth)
        if number >= 100:
            tokens, seconds = tokens + expected[0][chosen[0]] + expected[1][chosen[1]], seconds + step(chosen)
    easy, hard = (mean(d[100:]) for d in drafted)
    assert easy > (2.5 if machine == "cpu" else 13) and hard < (0.1 if machine == "cpu" else 4)  # a GPU's rows are free
    best = max((expected[0][a] + expected[1][b]) / step([a, b]) for a in DEPTHS for b in DEPTHS)
    assert tokens / seconds > 0.94 * best, "7 drafts of the easy one are 3 % better than 3, which costs are known to"


def test_paused_requests_probe_together_within_the_budget() -> None:
    rng, num = random.Random(2), 8
    depths = controller(gpu, rng, num)
    states = [depths.open() for _ in range(num)]
    seconds = []
    for _ in range(1000):
        chosen = depths.choose(states, [100] * num)
        seconds.append(gpu(max(chosen)))
        depths.measured(max(chosen), num, 100, seconds[-1] * rng.gauss(1, 0.03))
        for state, depth in zip(states, chosen, strict=True):
            depths.record(state, depth, accept(rng, flat(0.02), depth))
    assert sum(seconds[100:]) < 1.02 * 900 * gpu(0)


def test_a_context_that_makes_drafts_dear_is_decoded_plainly() -> None:
    depths, state = DepthController(MAX_DEPTH), DepthState([0.0] * MAX_DEPTH, [0.0] * MAX_DEPTH)
    for depth in (0, 1, 3, 7, 15) * 2:
        depths.measured(depth, 1, 256, gpu(depth))
        depths.measured(depth, 1, 65536, gpu(depth) * (3 if depth else 1))
    assert depths.choose([state], [200])[0] > 8
    assert depths.choose([state], [60000]) == [0]
    assert depths.choose([state], [200])[0] > 8, "paused in one bucket is not paused in another"
    for context in (900, 5000):  # plain steps are seen first; drafts are then thought to cost as in the nearest
        assert depths.choose([state], [context]) == [0] and not depths.knows_plain(1, context)
        for _ in range(2):
            depths.measured(0, 1, context, gpu(0))
    assert depths.choose([state], [900])[0] > 8 and depths.choose([state], [5000]) == [0]


def test_a_batch_that_makes_drafts_dear_is_found_out() -> None:
    """Alone a request gains by drafting; four of them, which were never measured, lose by it."""
    num, plain, rows = 4, 11.7e-3, [0.0, *(9e-3 + 5.5e-3 * d for d in range(1, MAX_DEPTH + 1))]
    rng = random.Random(5)
    depths = controller(cpu, rng)
    spent, tokens = [], []
    for _ in range(6):  # six rounds of four requests
        states = [depths.open() for _ in range(num)]
        for _ in range(60):
            chosen = depths.choose(states, [100] * num)
            seconds = plain + sum(rows[d] for d in chosen) / num + (2e-3 if any(chosen) else 0.0)
            accepted = [accept(rng, flat(0.75), d) for d in chosen]
            depths.measured(max(chosen), num, 100, seconds * rng.gauss(1, 0.03))
            for state, depth, count in zip(states, chosen, accepted, strict=True):
                depths.record(state, depth, count)
            spent.append(seconds)
            tokens.append(num + sum(accepted))
        for state in states:
            depths.close(state)
    speed = sum(tokens[60:]) / sum(spent[60:])
    assert speed > 0.95 * num / plain, "short requests, each of which probes, at a fifth of the speed lost by drafting"


@pytest.mark.parametrize("machine", COSTS)
def test_a_larger_batch_is_thought_to_cost_what_its_rows_do(machine: str) -> None:
    """No drafted step was timed with four: eight rows are expensive on the CPU, so they are not tried; on a GPU they
    are."""
    depths = controller(COSTS[machine], random.Random(6))
    for _ in range(3):
        depths.measured(0, 4, 100, 2.2 * cpu(0) if machine == "cpu" else 1.02 * gpu(0))
    chosen = depths.choose([depths.open() for _ in range(4)], [100] * 4)
    assert any(chosen) == (machine == "gpu") and depths.choose([depths.open()], [100]) != [0]


def test_a_batch_in_which_no_acceptance_pays_is_not_probed() -> None:
    """16 streams on two cores: a step of one draft each takes 2.3 times a plain one and brings 2 tokens at most."""
    depths = controller(cpu, random.Random(0))
    for _ in range(3):
        depths.measured(0, 16, 100, 0.066)
        depths.measured(1, 16, 100, 0.154)
    states = [depths.open() for _ in range(16)]
    for _ in range(2000):
        assert depths.choose(states, [100] * 16) == [0] * 16
        for state in states:
            depths.record(state, 0, 0)
    assert depths.choose(states[:1], [100]) != [0], "the last one drafts when the others have ended"


def test_others_in_the_step_make_rows_dearer() -> None:
    """One request of four may draft; alone it would, beside three others its rows cost more than they bring."""
    depths, state = DepthController(MAX_DEPTH), DepthState([0.0] * MAX_DEPTH, [0.0] * MAX_DEPTH)
    for depth in (0, 1, 3, 7, 15) * 3:
        depths.measured(depth, 1, 100, (5.0 + 1.5 * depth) / 1e3)
        depths.measured(depth, 4, 100, (12.0 + 22.0 * depth) / 1e3)
    assert depths.choose([state], [100])[0] > 0
    assert depths.choose([depths.open()], [100], others=3) == [0]


def test_a_new_request_begins_where_the_others_ended() -> None:
    rng = random.Random(3)
    depths = controller(cpu, rng)
    for _ in range(5):
        state = depths.open()
        for _ in range(20):
            depths.record(state, 3, accept(rng, flat(0.1), 3))
        depths.close(state)
    assert depths.prior[0] < 0.3 and depths.choose([depths.open()], [100]) == [0]
    before = depths.prior
    depths.close(depths.open())
    assert depths.prior == before, "a request that never drafted says nothing"


# ---- the parts


def test_nothing_to_decide_costs_nothing() -> None:
    assert DepthController(MAX_DEPTH).choose([], []) == []


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b"])
@pytest.mark.parametrize("depths", [DEPTHS, list(range(MAX_DEPTH + 1))])
def test_a_mixture_of_experts_begins_with_few_drafts(name: str, depths: list[int]) -> None:
    """At the acceptance that engines begin with; where more is accepted, a little deeper."""
    usual, better = (
        DepthController(MAX_DEPTH, chance, depths, model_sizes(DESCRIBED[name]).read) for chance in (0.69, 0.8)
    )
    first = usual.choose([usual.open()], [100])[0]
    assert 2 <= first <= 6 and first <= better.choose([better.open()], [100])[0] <= 7


@pytest.mark.parametrize("num", [1, 4, 16])
def test_a_dense_model_begins_as_if_rows_cost_little(num: int) -> None:
    """The curve of dense models is this one exactly, and with it all that follows."""
    read = model_sizes(SHAPES["qwen3-8b"]).read
    assert start_curve(MAX_DEPTH, num, read) == [1.0] + [1.1 + 0.03 * depth for depth in range(1, MAX_DEPTH + 1)]
    dense, plain = (DepthController(MAX_DEPTH, 0.69, DEPTHS, *reads) for reads in ((read,), ()))
    chosen = [made.choose([made.open() for _ in range(num)], [100] * num) for made in (dense, plain)]
    assert chosen[0] == chosen[1] and chosen[0][0] >= 7


def test_experts_are_dear_where_few_tokens_reach_few_of_them() -> None:
    """Drafts of one stream read more experts; those of 64 streams read what is read in any case."""
    read = model_sizes(DESCRIBED["qwen3-30b-a3b"]).read
    one, many, dense = (start_curve(MAX_DEPTH, *each) for each in ((1, read), (64, read), (1, lambda rows: 1.0)))
    assert one[3] / dense[3] > 1.5 and many[3] / dense[3] < 1.05
    assert never_falling(one, [1.0] * len(one)) == one
    assert one[15] - 1 > 0.8 * (read(16**0.7) / read(1) - 1)


def test_measured_costs_take_over_from_the_start_of_a_mixture_of_experts() -> None:
    made, rng = DepthController(MAX_DEPTH, 0.9, DEPTHS, model_sizes(DESCRIBED["qwen3-30b-a3b"]).read), random.Random(4)
    for depth in DEPTHS * 3:
        made.measured(depth, 1, 100, gpu(depth) * rng.gauss(1, 0.01))  # rows cost nothing here, whatever was described
    assert made.choose([made.open()], [100]) == [15]


def test_unmeasured_machines_try_both() -> None:
    """Without start-up measurements it drafts first, and finds out about plain steps by itself."""
    rng, depths = random.Random(4), DepthController(MAX_DEPTH)
    state, chosen = depths.open(), []
    for _ in range(300):
        (depth,) = depths.choose([state], [100])
        depths.measured(depth, 1, 100, cpu(depth))
        depths.record(state, depth, accept(rng, flat(0.05), depth))
        chosen.append(depth)
    assert chosen[0] > 0 and mean(chosen[50:]) < 0.1


def test_step_costs_survive_accidents_and_follow_the_machine() -> None:
    costs = StepCosts([1.0] + [1.1 + 0.03 * d for d in range(1, 16)])
    costs.learn(3, 100.0)  # the first step compiled something
    for _ in range(10):
        costs.learn(3, 1.0)
        costs.learn(0, 0.8)
    assert costs.curve()[3] == pytest.approx(1.0)
    costs.learn(3, 50.0)
    assert costs.seconds[3] < 1.1
    ratio = costs.seconds[0] / costs.seconds[3]
    for _ in range(60):
        costs.learn(3, 1.4)  # a slower machine: depth 0, not visited, is believed slower too
    assert costs.seconds[3] == pytest.approx(1.4, rel=0.02)
    assert costs.seconds[0] / costs.seconds[3] == pytest.approx(ratio, rel=0.15)


def test_arithmetic() -> None:
    assert expected_tokens([0.5, 0.5]) == [1.0, 1.5, 1.75]
    assert never_falling([1, 3, 2, 4], [1, 1, 3, 1]) == [1, 2.25, 2.25, 4]
    assert interpolate([0, 4], [0.0, 8.0], 1) == 2.0 and interpolate([2], [5.0], 9) == 5.0
    assert [bucket_of(n, 1)[0] for n in (1, 2, 3, 4, 5, 8)] == [0, 1, 2, 2, 3, 3]
    assert [bucket_of(1, c)[1] for c in (0, 256, 257, 1024, 1025, 4096, 4097)] == [0, 0, 1, 1, 2, 2, 3]
    assert for_batch([4.0, 6.0, 7.0, 8.0], 1) == [4.0, 6.0, 7.0, 8.0]
    assert for_batch([4.0, 6.0, 7.0, 8.0], 2) == [
        5.0,
        8.0,
        10.0,
        12.0,
    ]  # rows: 2 (no drafts), 4, 6, 8
    untried = conditional_acceptance([9, 0, 0], [9, 0, 0], [0.7] * 3, 1.0)
    assert untried[0] > untried[1] > untried[2] > 0.7  # from the nearest tried position, shrunk to the prior


def lines_to_choose(chances: Sequence[float], num: int = 1, cost: Cost = gpu) -> float:
    """Lines of Python that a choice runs: the median of 300 steps."""
    rng = random.Random(0)
    depths, taken = controller(cost, rng, num), []
    states = [depths.open() for _ in range(num)]
    for _ in range(300):
        chosen: list[int] = []
        taken.append(lines_run(lambda to=chosen: to.extend(depths.choose(states, [100] * num))))
        depths.measured(max(chosen), num, 100, cost(max(chosen)))
        for state, depth in zip(states, chosen, strict=True):
            depths.record(state, depth, accept(rng, chances, depth))
    return median(taken)


def test_choosing_is_quick() -> None:
    """Twice what it takes now: a line takes some 0.3 us."""
    assert lines_to_choose(L3) < 400 and lines_to_choose(flat(0.02)) < 25


def test_choosing_for_many_is_quick() -> None:
    """Twice what it takes now, with one price for a draft and with three."""
    saturating: Cost = lambda depth: (5.0 + 8.0 * (1 - 0.8**depth)) / 1e3  # noqa: E731
    assert lines_to_choose(L3, 16) < 6500 and lines_to_choose(L3, 16, saturating) < 8500


def main() -> None:
    for machine, cost in COSTS.items():
        for text, chances in TEXTS.items():
            best = max(range(MAX_DEPTH + 1), key=lambda d: expected_tokens(chances)[d] / cost(d))
            whole, later = (share_of_best(cost, chances, range(20), skip) for skip in (0, 100))
            print(
                f"{machine} {text:<10} best depth {best:2} share {mean(whole):.3f} (worst {min(whole):.3f}), ", end=""
            )
            print(f"after 100 tokens {mean(later):.3f} (worst {min(later):.3f})")
        for before, after in ((0.05, 0.9), (0.02, 0.8), (0.05, 0.7)):
            recover = list(map(partial(tokens_to_recover, cost, before, after), range(200)))
            print(f"{machine} {before} -> {after}: back after {mean(recover):.1f} tokens, at most {max(recover)}")
    print(f"choose: {lines_to_choose(L3)} lines drafting, {lines_to_choose(flat(0.02))} lines paused")


if __name__ == "__main__":
    main()
