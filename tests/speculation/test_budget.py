"""The draft budget in simulated time: what it loses to plain decoding, to the best fixed depth, and to change."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise, product
from statistics import mean, median

import numpy as np
import pytest

from sparkdraft.models.common.sizes import model_sizes
from sparkdraft.speculation.budget import Batch, Budget
from sparkdraft.speculation.costs import GRID, Curve, Reads
from sparkdraft.speculation.survival import Floats, Ints, Kind
from tests.fakes.counting import calls_made
from tests.operate.forecast.described import DESCRIBED
from tests.speculation.machines import (
    DEPTHS,
    MACHINES,
    MAX_DEPTH,
    START,
    Machine,
    Step,
    accept,
    budget,
    flat,
    measure,
    rate,
    run,
)

# Conditional acceptance by position of a drafter trained for the embedded model (docs/numbers/drafting.md).
L3 = [0.690, 0.670, 0.690, 0.713, 0.766, 0.778, 0.767, 0.760, 0.767, 0.674, 0.760, 0.745, 0.809, 0.878, 0.884]
TEXTS = {f"p {chance}": flat(chance) for chance in (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)} | {
    "L3": L3,
    "falling": [max(0.9 - 0.06 * position, 0.05) for position in range(MAX_DEPTH)],
    "rising": [0.5, *[0.95] * 14],
}
ALWAYS_WRONG = [(name, num) for name in ("cpu", "arm", "8b", "embedded", "experts") for num in (1, 4, 16)]
ALWAYS_WRONG += [("8b", 64), ("embedded", 64)]


def plain_share(machine: Machine, num: int, steps: Sequence[Step]) -> float:
    """Speed over that of plain steps."""
    return rate(steps) * machine.step(num, 0) / num


def best_alike(machine: Machine, texts: Sequence[Sequence[float]]) -> float:
    """Tokens a second if all requests draft to the same depth, the best one."""
    num = len(texts)
    tokens = {depth: sum(1 + float(np.cumprod(text[:depth]).sum()) for text in texts) for depth in DEPTHS}
    return max(each / machine.step(num, num * d, num * bool(d), d) for d, each in tokens.items())


# ---- a drafter that is always wrong


@pytest.mark.parametrize(("name", "num"), ALWAYS_WRONG)
def test_a_drafter_that_is_always_wrong_costs_two_percent_from_the_first_second(name: str, num: int) -> None:
    machine = MACHINES[name]
    for seed, late in product(range(2 if num < 64 else 1), {False, machine.for_all}):
        made = budget(machine, sorted({1, num}), seed=seed)
        steps = run(made, machine, [lambda _: flat(0.0)] * num, 1.0, seed=seed, late=late)
        assert plain_share(machine, num, steps) > 0.98


@pytest.mark.parametrize("name", ["cpu", "8b"])
def test_requests_after_it_cost_one_percent(name: str) -> None:
    """Short ones, of which each is a stranger."""
    machine = MACHINES[name]
    made, steps = budget(machine), list[Step]()
    for seed in range(30):
        slot = made.open(0)
        steps += run(made, machine, [lambda _: flat(0.0)], tokens=24, seed=seed, opened=[slot])
        made.close(slot)
    assert plain_share(machine, 1, steps[240:]) > 0.987


@pytest.mark.parametrize("name", ["cpu", "arm"])
def test_a_drafter_that_is_sure_without_reason_is_found_out(name: str) -> None:
    machine = MACHINES[name]
    made, rng, now, written = budget(machine, gaps=True), random.Random(0), 0.0, 0
    slot = made.open(0)
    while now < 1.5:
        (depth,) = made.choose([slot], 100)
        gaps = np.full((1, MAX_DEPTH), np.nan)
        gaps[0, :depth] = 6.0
        kept = made.admit([slot], gaps, 1)[0] if depth else 0
        made.record([slot], [kept], [0])
        measure(made, machine, rng, 1, kept, int(depth > 0), depth)
        now, written = now + machine.step(1, kept, int(depth > 0), depth), written + 1
    assert written * machine.step(1, 0) / now > 0.98


# ---- one request


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("name", "least"), [("cpu", 0.88), ("arm", 0.9), ("8b", 0.96)])
def test_steady_text_runs_near_its_best_depth(name: str, least: float, text: str) -> None:
    """From its first token. Where drafting gains a tenth, a request that begins with bad luck is paused for a while."""
    machine, chances = MACHINES[name], TEXTS[text]
    shares = [
        rate(run(budget(machine, seed=seed), machine, [lambda _: chances], tokens=500, seed=seed))
        / machine.best(chances)[0]
        for seed in range(8)
    ]
    assert mean(shares) > least


@pytest.mark.parametrize("name", ["cpu", "8b"])
@pytest.mark.parametrize(("before", "after"), [(0.05, 0.9), (0.02, 0.8)])
def test_drafting_comes_back_within_fifty_tokens(name: str, before: float, after: float) -> None:
    """On average: the ledger pays for a probe every 30 tokens or so, and a probe may fail by chance."""
    waits = []
    for seed in range(12):
        change = 300 + random.Random(-seed).randrange(200)
        text = lambda count, change=change: flat(before if count < change else after)  # noqa: E731
        steps = run(budget(MACHINES[name], seed=seed), MACHINES[name], [text], tokens=change + 300, seed=seed)
        later = [step for step in steps if step.written >= change]
        four = (i for i in range(len(later)) if all(step.depths[0] for step in later[i : i + 4]))
        waits.append(later[next(four)].written - change)
    assert mean(waits) < 50


@pytest.mark.parametrize(("name", "most"), [("cpu", 14), ("8b", 40)])
def test_a_fall_is_noticed(name: str, most: int) -> None:
    """A wasted draft costs a plain step on the CPU, a tenth on the GPU: there it may take longer."""
    wasted = []
    for seed in range(6):
        text = lambda count: flat(0.9 if count < 400 else 0.02)  # noqa: E731
        steps = run(budget(MACHINES[name], seed=seed), MACHINES[name], [text], tokens=600, seed=seed)
        wasted.append([step.depths[0] > 0 for step in steps if step.written >= 400].index(False))
    assert mean(wasted) < most


def test_a_new_request_begins_where_the_others_ended() -> None:
    machine = MACHINES["cpu"]
    made = budget(machine)
    for seed in range(3):
        slot = made.open(0)
        run(made, machine, [lambda _: flat(0.05)], tokens=60, seed=seed, opened=[slot])
        made.close(slot)
    slot = made.open(0)
    assert made.choose([slot], 100)[0] <= 1, "a probe at most"
    assert made.survival.chances(np.array([made.open(1)]))[0, 0] == pytest.approx(START), "drawn text is another class"


# ---- batches


@pytest.mark.parametrize("name", ["cpu", "8b", "embedded", "experts"])
@pytest.mark.parametrize("num", [4, 16, pytest.param(64, marks=pytest.mark.slow)])
def test_mixed_batches_write_as_fast_as_the_best_common_depth(name: str, num: int) -> None:
    """Or faster: each request drafts as deep as its own text allows."""
    machine = MACHINES[name]
    for chances, least in (([0.7], 0.9), ([0.9, 0.1, 0.6, 0.3], 0.93), ([0.9, 0.05], 0.97)):
        texts = [flat(chances[i % len(chances)]) for i in range(num)]
        rates = [
            rate(run(budget(machine, [1, num], seed=seed), machine, [lambda _, text=text: text for text in texts], 1.0))  # type: ignore[misc]
            for seed in range(4 if num < 64 else 1)
        ]
        assert mean(rates) > least * best_alike(machine, texts)


def test_an_easy_request_drafts_beside_hard_ones() -> None:
    machine, texts = MACHINES["cpu"], [flat(0.95), *[flat(0.05)] * 3]
    steps = run(budget(machine, [1, 4]), machine, [lambda _, text=text: text for text in texts], tokens=150)  # type: ignore[misc]
    later = steps[len(steps) // 2 :]
    assert mean(s.depths[0] for s in later) > 5 and mean(max(s.depths[1:]) for s in later) < 0.3


def test_a_batch_in_which_no_acceptance_pays_is_not_probed() -> None:
    made = budget(MACHINES["cpu"])
    for _ in range(3):
        made.measured(16, 16, 100, 0.066, 0.0)
        made.measured(32, 16, 100, 0.154, 0.02, 16, 1)
    slots = [made.open(0) for _ in range(16)]
    for _ in range(500):
        assert made.choose(slots, 100) == [0] * 16
        made.record(slots, [0] * 16, [0] * 16)
    assert made.choose(slots[:1], 100) != [0], "the last one drafts when the others have ended"


def test_tokens_of_others_make_drafts_dearer_or_cheaper() -> None:
    made = Budget(MAX_DEPTH, [Kind(START, False, True, False)], DEPTHS)
    for _ in range(3):
        made.measured(1, 1, 100, 5e-3, 0.0)
        for depth in DEPTHS[1:]:  # a draft is free until 16 tokens are packed
            made.measured(1 + depth, 1, 100, 5e-3, 0.5e-3, 1, depth)
        for tokens, seconds in ((16, 5e-3), (20, 30e-3), (32, 60e-3)):
            made.measured(tokens, 1, 100, seconds, 0.5e-3, 1, 15)
    assert made.choose([made.open(0)], 100)[0] >= 7
    assert made.choose([made.open(0)], 100, extra=15)[0] <= 1


def test_a_context_that_makes_drafts_dear_is_decoded_plainly() -> None:
    made = Budget(MAX_DEPTH, [Kind(START, False, True, False)], DEPTHS)
    for depth in DEPTHS * 2:
        for context, times in ((256, 1.0), (65536, 4.0)):
            made.measured(1 + depth, 1, context, 5e-3 * (times if depth else 1), 0.5e-3 * bool(depth), depth > 0, depth)
    slot, made.balance = made.open(0), 0.0
    assert made.choose([slot], 200)[0] > 3 and made.choose([slot], 60000) == [0]
    assert made.choose([slot], 200)[0] > 3, "paused in one bucket is not paused in another"
    for context in (900, 5000):  # plain steps are seen first; drafts are then thought to cost as in the nearest
        assert made.choose([slot], context) == [0]
        for _ in range(2):
            made.measured(1, 1, context, 5e-3, 0.0)
    assert made.choose([slot], 900)[0] > 3


def test_drafts_from_the_text_cost_no_pass() -> None:
    """Beside a drafter whose pass does not pay, only the request that copies its own text drafts."""
    made = Budget(MAX_DEPTH, [Kind(0.8, False, False, False), Kind(0.3, False, True, False)], DEPTHS)
    for _ in range(3):
        made.measured(2, 2, 100, 5e-3, 0.0)
        for depth in DEPTHS[1:]:
            made.measured(2 + 2 * depth, 2, 100, 5e-3 + 0.1e-3 * depth, 4e-3, 2, depth)
    made.balance = 0.0  # no probe
    copied, drafted = made.choose([made.open(0), made.open(1)], 100)
    assert copied >= 7 and not drafted


# ---- before anything is measured, and accidents


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b"])
def test_a_mixture_of_experts_begins_with_few_drafts(name: str) -> None:
    """At the acceptance that engines begin with; a dense model begins as if tokens cost little."""
    sparse, dense = model_sizes(DESCRIBED[name]).read, lambda rows: 1.0
    first = []
    for reads in (sparse, dense):
        given: Reads = reads
        made = Budget(MAX_DEPTH, [Kind(START, False, True, False)], range(MAX_DEPTH + 1), given)
        first.append(made.choose([made.open(0)], 100)[0])
    assert 1 <= first[0] <= 6 < first[1]


def test_unmeasured_machines_try_both() -> None:
    machine, made, rng = MACHINES["cpu"], Budget(MAX_DEPTH, [Kind(START, False, True, False)], DEPTHS), random.Random(4)
    slot, chosen = made.open(0), []
    for _ in range(200):
        (depth,) = made.choose([slot], 100)
        measure(made, machine, rng, 1, depth, int(depth > 0), depth)
        made.record([slot], [depth], [accept(rng, flat(0.05), depth)])
        chosen.append(depth)
    assert chosen[0] > 0 and mean(chosen[50:]) < 0.15


@pytest.mark.parametrize("seed", range(6))
def test_any_course_of_a_batch_leaves_numbers(seed: int) -> None:
    """Random costs, gaps, depths and ends of requests: every choice stays within bounds."""
    rng = random.Random(seed)
    made = Budget(MAX_DEPTH, [Kind(0.7, drawn, True, True) for drawn in (False, True)], DEPTHS)
    slots: list[int] = []
    for _ in range(150):
        for slot in [slot for slot in slots if rng.random() < 0.03]:
            slots.remove(slot)
            made.close(slot)
        slots += [made.open(rng.randrange(2)) for _ in range(4 - len(slots))]
        chosen = made.choose(slots, rng.randrange(1, 3000), rng.randrange(3), rng.choice([0, 0, 500]))
        assert all(depth in DEPTHS for depth in chosen)
        cut = [i for i, depth in enumerate(chosen) if depth and rng.random() < 0.9]
        gaps = np.full((len(cut), MAX_DEPTH), np.nan)
        for row, i in zip(gaps, cut, strict=True):
            row[: chosen[i]] = [rng.uniform(-30, 20) for _ in range(chosen[i])]
        kept = list(chosen)
        if cut:
            for i, number in zip(cut, made.admit([slots[i] for i in cut], gaps, 8), strict=True):
                assert 0 <= number <= chosen[i]
                kept[i] = number
        draft, verify = rng.uniform(1e-5, 5e-3), rng.uniform(1e-3, 2e-2)
        made.measured(len(slots) + sum(kept), len(slots), 100, verify, draft, sum(map(bool, chosen)), max(chosen))
        made.record(slots, kept, [rng.randint(0, number) for number in kept])
        assert math.isfinite(made.balance) and np.isfinite(made.survival.expected(np.array(slots))[0]).all()


def test_nobody_is_nothing_to_decide() -> None:
    assert Budget(MAX_DEPTH, [Kind(START, False, True, False)]).choose([], 100) == []


# ---- the time of the host


def calls_to_choose(num: int, gaps: bool) -> tuple[float, int]:
    """Functions called by a choice: the median over steps, and by the most expensive one. It learns the last steps."""
    machine, rng = MACHINES["embedded"], random.Random(0)
    made, calls = budget(machine, sorted({1, num}), gaps), list[int]()
    slots = [made.open(0) for _ in range(num)]
    for _ in range(80):
        depths: list[int] = []
        calls.append(calls_made(lambda to=depths: to.extend(made.choose(slots, 100))))  # type: ignore[misc]
        kept = depths
        if gaps and any(depths):
            table = np.where(np.arange(MAX_DEPTH) < np.array(depths)[:, None], 3.0, np.nan)
            kept = made.admit(slots, table, num)
        made.record(slots, kept, [accept(rng, flat(0.8), depth) for depth in kept])
    return median(calls[20:]), max(calls[20:])


@pytest.mark.parametrize("gaps", [False, True])
def test_choosing_calls_as_many_functions_for_many_requests_as_for_one(gaps: bool) -> None:
    one, many = calls_to_choose(1, gaps), calls_to_choose(64, gaps)
    assert many[1] < 2 * one[1] and many[1] < 500
    assert one[0] <= 12, "a choice holds for some steps"


def test_where_nothing_is_drafted_hardly_anything_is_called() -> None:
    machine = MACHINES["cpu"]
    made = budget(machine, [1])
    slot = made.open(0)
    run(made, machine, [lambda _: flat(0.0)], tokens=300, opened=[slot])
    calls = [calls_made(lambda: (made.choose([slot], 100), made.record([slot], [0], [0]))) for _ in range(40)]
    assert median(calls) < 15


# ---- admission


@pytest.mark.parametrize("seed", range(8))
def test_the_drafts_that_are_admitted_are_worth_most(seed: int) -> None:
    """Against every number of drafts in the order of their survivals, whatever their cost; levels lose next to
    nothing."""
    rng = np.random.default_rng(seed)
    made = Budget(MAX_DEPTH, [Kind(0.7, False, True, True)], DEPTHS)
    slots = [made.open(0) for _ in range(6)]
    made.choose(slots, 100)
    made._rests.paused[:] = False
    steps = rng.random(91) * rng.choice([0.01, 0.2, 0.8])
    worth = np.concatenate(([0.0], steps.cumsum()))
    made._worth = lambda tokens, most: worth[: most + 1]  # type: ignore[method-assign]
    gaps = rng.normal(3, 3, (6, MAX_DEPTH))
    kept = made.admit(slots, gaps, 6)
    survival = made.survival.expect(np.array(slots), gaps)
    taken = sum(survival[i, :number].sum() for i, number in enumerate(kept)) - worth[sum(kept)]
    ordered = np.sort(survival.ravel())[::-1]
    best = max(0.0, *(ordered.cumsum() - worth[1:91]))
    assert taken > best - 0.03 * max(best, 1.0)


def test_in_steps_of_few_sizes_each_request_drafts_as_deep_as_its_text_is_worth() -> None:
    """One sure request does not make others draft, unless the step has room for them in any case."""
    chosen = {}
    for size in (16, 64):

        def runs(num: int, depth: Ints, tokens: Floats, size: int = size) -> Floats:
            return np.asarray(size * np.ceil(tokens / size))

        made = Budget(15, [Kind(0.1, False, False, False)], [0, 1, 3, 7, 15], runs=runs)
        slots = [made.open(0) for _ in range(16)]
        for tokens in (16, 32, 48, 64, 128, 256):
            for _ in range(20):
                made.measured(tokens, 16, 100, 1e-3 * (1 + (tokens - 16) / 144), 0.0)
        right = [15, *[0] * 12, 2, 2, 2]
        steps = list[list[int]]()
        for _ in range(60):
            steps.append(made.choose(slots, 100))
            made.record(slots, steps[-1], [min(pair) for pair in zip(steps[-1], right, strict=True)])
        chosen[size] = [median(depths) for depths in zip(*steps[20:40], strict=True)]
    assert chosen[16] == [15, *[0] * 12, 2, 2, 2], "what was accepted, and no more"
    assert all(mine >= beside for mine, beside in zip(chosen[64], chosen[16], strict=True))
    assert sum(chosen[64]) > 30, "the room of 64 tokens is used"


# ---- a choice that holds


def test_a_choice_holds_for_many_while_few_join_and_leave() -> None:
    machine = MACHINES["8b"]
    made = budget(machine, [1, 32])
    slots = [made.open(0) for _ in range(32)]
    run(made, machine, [lambda _: flat(0.9)] * 32, tokens=100, opened=slots)
    weighed = []
    best = made._best
    made._best = lambda *args: (weighed.append(made.clock), best(*args))[1]  # type: ignore[method-assign]
    begin = made.clock
    for _ in range(40):
        made.close(slots.pop(0))
        slots.append(made.open(0))
        depths = made.choose(slots, 100)
        assert depths[-1] > 0, "who joins drafts as the others do"
        made.record(slots, depths, depths)
    assert len(weighed) <= (made.clock - begin) / 2
    made.close(slots[0])
    assert made.choose([made.open(0)], 100)[0] > 0 and weighed[-1] == made.clock, "one alone is chosen for at once"


def test_after_a_long_hold_an_unknown_kind_of_batch_is_looked_at_again_at_once() -> None:
    machine = MACHINES["cpu"]
    made = budget(machine, [1])
    slot = made.open(0)
    run(made, machine, [lambda _: flat(0.0)], tokens=300, opened=[slot])
    while made._until - made.clock < 20:
        made.record([slot], made.choose([slot], 100), [0])
    made.close(slot)
    assert made.choose([made.open(0)], 50_000) == [0] and not made.holds(), "plain steps there are not known"


def test_drafts_pay_for_a_prompts_own_pass_if_they_gain_more_than_it_costs() -> None:
    """A plain step of 4 requests takes 4 ms with a prompt of 16 tokens as without; the prompt alone takes 4 ms too."""
    made = budget(MACHINES["8b"], [4])
    made.batch = batch = Batch(made.costs, (2, 0), 4, 0)
    batch.verify = Curve(np.maximum(GRID, 16.0) / 4e3)
    batch.num, batch.before, batch.seconds = 4, 0.0, 6e-3
    for tokens, pays in ((9, False), (11, True)):  # 4 ms for 4, so 10 ms must write more than 10
        batch.rate = tokens / batch.seconds
        assert made.pays_beside(12) == pays
    batch.rate = 11 / batch.seconds
    assert made.pays_beside(160), "beside so long a prompt a drafted pass is a small part"
    batch.rate = 4 / batch.seconds
    assert not made.pays_beside(12) and not made.pays_beside(160), "a step that does not draft gains nothing"


def test_a_plain_step_is_asked_for_where_all_draft() -> None:
    machine = MACHINES["embedded"]
    made = budget(machine, [1, 4])
    slots = [made.open(0) for _ in range(4)]
    plain = [made.clock for _ in range(600) if one_step(made, slots, 0.9) == [0] * 4][2:]
    assert plain and all(120 <= b - a <= 260 for a, b in pairwise(plain)), plain


def one_step(made: Budget, slots: list[int], chance: float) -> list[int]:
    depths = made.choose(slots, 100)
    rng = random.Random(made.clock)
    made.record(slots, depths, [accept(rng, flat(chance), depth) for depth in depths])
    return depths


def test_copies_may_pay_where_the_drafters_pass_does_not() -> None:
    """The answer is that of the batch that asks, not of another of its bucket."""
    machine, rng = MACHINES["arm"], random.Random(0)
    kinds = [Kind(START, False, False, False), Kind(START, False, True, False)]  # copied, and by the model
    made = Budget(MAX_DEPTH, kinds, DEPTHS)
    for num in (1, 3, 4, 8):
        for depth in [d for d in DEPTHS for _ in range(3)]:
            measure(made, machine, rng, num, num * depth, num * bool(depth), depth)
    assert made.could_pay(3, 100, copied=True) and made.could_pay(4, 100, copied=True)
    assert not made.could_pay(4, 100), "with a pass of the drafter even certain drafts lose"
    assert not made.could_pay(16, 100, copied=True), "many tokens are dear, wherever drafts come from"


def test_a_step_that_stays_plain_counts_and_ends_the_choice() -> None:
    made = budget(MACHINES["cpu"], [1])
    slot = made.open(0)
    made.choose([slot], 100)
    clock, balance = made.clock, made.balance
    made.stay_plain()
    assert made.clock == clock + 1 and made.balance > balance and not made.holds()
