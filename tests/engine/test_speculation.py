"""Drafting over the fake model: whatever is drafted, from any source, the text is what the target alone would write."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from sparkdraft.core import AUTO, Batch, SamplingParams, StepOutput, UserError
from sparkdraft.engine.accept import committed
from sparkdraft.engine.engine import Engine
from sparkdraft.speculation.costs import GRID
from tests.fakes import FakeBlock, FakeRunner, fake_engine

LONG = {"num_blocks": 400, "block_size": 4, "max_step_tokens": 64}


def drain(engine: Engine) -> list[StepOutput]:
    pieces = []
    while engine.has_work:
        pieces += engine.step()
    return pieces


def text(pieces: list[StepOutput], name: str) -> list[int]:
    return [i for p in pieces if p.request_id == name for i in p.ids]


def test_accept_keeps_the_samples_up_to_the_first_that_differs() -> None:
    assert committed([], [7]) == [7]
    assert committed([1, 2, 3], [1, 2, 3, 4]) == [1, 2, 3, 4]
    assert committed([1, 2, 3], [1, 9, 3, 4]) == [1, 9]
    assert committed([1, 2, 3], [5, 2, 3, 4]) == [5]


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("spec", [None, 1, 4, 7])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafted_text_is_plain_text(chance: float, spec: int | None, temperature: float) -> None:
    params = {
        f"r{i}": SamplingParams(
            max_tokens=40,
            temperature=temperature,
            seed=i,
            top_p=0.9,
            repetition_penalty=1.1 if i % 2 else 1.0,
            frequency_penalty=0.5 if i % 3 == 0 else 0.0,
            min_tokens=5,
            stop_ids=[i],
        )
        for i in range(6)
    }
    plain, drafted = fake_engine(**LONG), fake_engine(FakeBlock(chance), ngram=True, spec=spec, **LONG)
    for engine in (plain, drafted):
        for name, p in params.items():
            engine.add([ord(name[1]), 2, 3], p, name)
    expected, got = drain(plain), drain(drafted)
    for name in params:
        assert text(got, name) == text(expected, name)
    assert drafted.pool.num_free == plain.pool.num_free


@pytest.mark.parametrize("chance", [0.3, 0.8])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_text_is_the_same_where_blocks_are_cut(chance: float, temperature: float) -> None:
    """The drafter is more sure of drafts that are right; dear rows make the engine cut its blocks."""
    plain = fake_engine(**LONG)
    drafted = fake_engine(FakeBlock(chance, gaps=(0.2, 6.0)), ngram=True, **LONG)
    timed, cost = drafted.drafting.timed, [4.9, 5.8, 7.2, 8.7, 10.4, 12.0, 13.6, 15.2]

    def slow(batch: Batch, draft: float, verify: float) -> None:
        drafts = max(w.num_draft for w in batch.work)
        timed(batch, 1e-3 if any(w.most_drafts for w in batch.work) else 1e-5, cost[drafts] / 1e3)

    drafted.drafting.timed = slow  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=150, temperature=temperature, seed=3, top_p=0.9, ignore_eos=True)
    for engine in (plain, drafted):
        for i in range(3):
            engine.add([i + 1, 2, 3], params, f"r{i}")
            if i == 0:
                engine.step()
    expected, got = drain(plain), drain(drafted)
    assert [text(got, f"r{i}") for i in range(3)] == [text(expected, f"r{i}") for i in range(3)]
    sizes = {n for source, n, _ in drafted.drafting.total.steps if source == "fake"}
    assert sizes - {1, 3, 7}, "no block was cut between the depths that are chosen from"


def test_a_depth_that_was_asked_for_is_not_cut() -> None:
    engine = fake_engine(FakeBlock(0.5, gaps=(-3.0, -2.0)), **LONG)
    engine.add([1], SamplingParams(max_tokens=60, num_draft=5, ignore_eos=True), "a")
    drain(engine)
    deep = Counter({n: steps for (_, n, _), steps in engine.drafting.total.steps.items()})
    assert deep[5] >= deep.total() - 2, "only the last steps, which end the text, may be shorter"


def test_cutting_leaves_fewer_rows_for_as_many_tokens() -> None:
    rows = {}
    for gaps in (None, (0.2, 6.0)):
        engine = fake_engine(FakeBlock(0.6, gaps=gaps), **LONG)
        timed = engine.drafting.timed
        engine.drafting.timed = lambda batch, draft, verify, timed=timed: timed(  # type: ignore[method-assign]
            batch, 1e-4, 5e-3 + 1e-3 * max(w.num_draft for w in batch.work)
        )
        engine.add([1], SamplingParams(max_tokens=600, ignore_eos=True), "a")
        drain(engine)
        runner = engine.runner
        assert isinstance(runner, FakeRunner)
        rows[gaps] = sum(runner.rows_run)
    assert rows[0.2, 6.0] < 0.85 * rows[None]


def test_logprobs_along_an_accepted_run() -> None:
    params = SamplingParams(max_tokens=20, logprobs=2)
    plain, drafted = fake_engine(**LONG), fake_engine(FakeBlock(0.8), spec=7, **LONG)
    for engine in (plain, drafted):
        engine.add([1, 2, 3], params, "a")
    expected = [t for p in drain(plain) for t in p.logprobs or []]
    got = [t for p in drain(drafted) for t in p.logprobs or []]
    assert [(t.id, t.top) for t in got] == [(t.id, t.top) for t in expected] and len(got) == 20


def test_always_right_reaches_the_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step costs the same at any depth; the time of the fakes themselves does not count."""
    engine = fake_engine(FakeBlock(1.0), **LONG)
    timed = engine.drafting.timed
    monkeypatch.setattr(engine.drafting, "timed", lambda batch, draft, verify: timed(batch, 1e-4, 5e-3))
    engine.add([1], SamplingParams(max_tokens=300, ignore_eos=True), "a")
    pieces = drain(engine)
    assert max(len(p.ids) for p in pieces) == 8
    last = pieces[-1].speculation
    assert last is not None and last["draft_acceptance_rate"] > 0.99


def test_a_fixed_depth_is_kept_and_counted() -> None:
    engine = fake_engine(FakeBlock(1.0), **LONG)
    engine.add([1], SamplingParams(max_tokens=31, num_draft=4, ignore_eos=True), "a")
    pieces = drain(engine)
    assert [len(p.ids) for p in pieces] == [1, *[5] * 6]
    stats = pieces[-1].speculation
    assert stats is not None
    assert stats["num_spec_steps"] == 6 and stats["num_accepted_draft_tokens"] == 24
    assert stats["acceptance_histogram"] == [0, 0, 0, 0, 6]


def test_a_request_may_ask_for_a_chosen_depth_where_the_engine_has_a_fixed_one() -> None:
    for asked, depths in ((None, {4}), (AUTO, {1, 3, 4, 7})):
        engine = fake_engine(FakeBlock(1.0), spec=4, **LONG)
        engine.add([1], SamplingParams(max_tokens=301, num_draft=asked, ignore_eos=True), "a")
        drain(engine)
        assert {drafted for _, drafted, _ in engine.drafting.total.steps} <= depths


def test_times_add_up_to_the_time_that_passed() -> None:
    engine = fake_engine(FakeBlock(1.0), **LONG)
    timed = engine.drafting.timed
    engine.drafting.timed = lambda batch, draft, verify: timed(batch, 1.0, 2.0)  # type: ignore[method-assign]
    for i in range(4):
        engine.add([i + 1], SamplingParams(max_tokens=21, num_draft=4, ignore_eos=True), str(i))
    drain(engine)
    assert engine.drafting.total.num_spec_steps == 16
    assert (engine.drafting.total.draft_seconds, engine.drafting.total.verify_seconds) == (4.0, 8.0)


def test_the_report_of_a_request_contains_its_last_step() -> None:
    engine = fake_engine(FakeBlock(1.0), spec=7, **LONG)
    engine.add([1, 2], SamplingParams(max_tokens=30, ignore_eos=True), "a")
    report, total = drain(engine)[-1].speculation, engine.drafting.total
    assert report and report["verify_ms"] == pytest.approx(total.verify_seconds * 1e3) and report["verify_ms"] > 0


def test_always_wrong_is_paused_and_costs_next_to_nothing() -> None:
    """Times as on two CPU cores: the steps of a whole request take at most 2 % longer than plain ones."""
    engine = fake_engine(FakeBlock(0.0), **LONG)
    budget, cost, steps = engine.drafting.budget, [4.9, 8.0, 9.6, 11.2, 13.3, 15.3, 17.4, 19.4], []
    assert budget
    for depth in (0, 1, 3, 7) * 3:
        budget.measured(1 + depth, 1, 10, cost[depth] / 1e3, 0.0, int(depth > 0), depth)

    def timed(batch: Batch, draft: float, verify: float) -> None:
        depth = batch.work[0].num_draft
        steps.append(cost[depth])
        budget.measured(1 + depth, 1, 10, cost[depth] / 1e3, 0.0, int(depth > 0), depth)

    engine.drafting.timed = timed  # type: ignore[method-assign]
    engine.add([1], SamplingParams(max_tokens=600, ignore_eos=True), "a")
    drain(engine)
    later = steps[100:]
    assert engine.drafting.total.num_spec_steps > 3 and sum(later) < 1.02 * cost[0] * len(later)


def test_running_requests_count_in_what_was_so_far() -> None:
    engine = fake_engine(FakeBlock(1.0), **LONG)
    engine.add([1], SamplingParams(max_tokens=31, num_draft=4, ignore_eos=True), "a")
    for _ in range(3):
        engine.step()
    assert engine.drafting.total.num_spec_steps == 0 and engine.drafting.so_far().num_spec_steps == 2
    drain(engine)
    assert engine.drafting.total.num_spec_steps == engine.drafting.so_far().num_spec_steps == 6


def test_drafts_stop_where_the_request_does() -> None:
    for max_tokens in range(1, 12):
        engine = fake_engine(FakeBlock(1.0), spec=7, **LONG)
        engine.add([1, 2], SamplingParams(max_tokens=max_tokens, ignore_eos=True), "a")
        assert len(text(drain(engine), "a")) == max_tokens
        assert isinstance(engine.runner, FakeRunner)
        assert sum(engine.runner.rows_run) <= 2 + max_tokens - 1  # no row past the last one wanted


def test_a_chosen_depth_is_one_that_was_tried_at_start() -> None:
    """Also where the request ends: other depths would be new shapes, which cost more than they bring."""
    for max_tokens in range(2, 30):
        engine = fake_engine(FakeBlock(1.0), **LONG)
        engine.add([1, 2], SamplingParams(max_tokens=max_tokens, ignore_eos=True), "a")
        steps = [p.speculation for p in drain(engine) if p.speculation]
        assert engine.drafting.choices == [0, 1, 3, 7]
        assert {d for _, d, _ in engine.drafting.total.steps} <= {1, 3, 7} and len(steps) == 1


def test_the_first_steps_of_a_shape_are_not_timed() -> None:
    """Such steps are launched plainly, then recorded, and would make the depth look several times as expensive."""
    engine = fake_engine(FakeBlock(0.0), **LONG)
    assert engine.drafting.budget
    engine.add([1], SamplingParams(max_tokens=20, num_draft=3, ignore_eos=True), "a")
    for counts in (False, False, False, True, True):  # the prompt's step, two of a new shape, then those that count
        engine.step()
        timed = engine.drafting.budget.costs.buckets.values()
        assert any(costs.verify.weight[GRID.index(4)] for costs in timed) == counts


def test_off_and_on_share_a_batch() -> None:
    engine = fake_engine(FakeBlock(1.0), **LONG)
    engine.add([1], SamplingParams(max_tokens=24, num_draft=0, ignore_eos=True), "off")
    engine.add([2], SamplingParams(max_tokens=24, num_draft=7, ignore_eos=True), "on")
    pieces = drain(engine)
    assert max(len(p.ids) for p in pieces if p.request_id == "off") == 1
    assert max(len(p.ids) for p in pieces if p.request_id == "on") == 8


def test_many_requests_preempted_and_aborted_are_each_as_alone() -> None:
    rng = random.Random(2)
    engine = fake_engine(FakeBlock(0.7), ngram=True, num_blocks=30, max_model_len=64, max_seqs=6, max_step_tokens=40)
    jobs = {
        f"r{i}": ([7] * rng.choice([0, 8]) + [rng.randrange(256) for _ in range(rng.randint(1, 20))],
                  SamplingParams(max_tokens=rng.randint(1, 30), temperature=rng.choice([0, 1]), seed=i))
        for i in range(40)
    }  # fmt: skip
    waiting, pieces, aborted, preempted = list(jobs), [], set(), 0
    schedule = engine.scheduler.schedule

    def counted(depths: object) -> object:
        nonlocal preempted
        batch = schedule(depths)  # type: ignore[arg-type]
        preempted += len(batch.preempted)
        return batch

    engine.scheduler.schedule = counted  # type: ignore[method-assign, assignment]
    while waiting or engine.has_work:
        for _ in range(rng.randint(0, 3)):
            if waiting:
                engine.add(*jobs[waiting[-1]], request_id=waiting.pop())
        if rng.random() < 0.05 and engine._by_id:
            aborted.add(name := rng.choice(list(engine._by_id)))
            engine.abort(name)
        pieces += engine.step()
    assert engine.pool.num_free == 30 and preempted and aborted
    assert not engine.drafting._requests
    for name, (prompt, params) in jobs.items():
        plain = fake_engine()
        plain.add(prompt, params, name)
        expected, got = text(drain(plain), name), text(pieces, name)
        assert got == (expected[: len(got)] if name in aborted else expected), name


def test_a_repeating_text_is_drafted_from_itself() -> None:
    engine = fake_engine(ngram=True, spec=7, **LONG)
    engine.add([5] * 12, SamplingParams(max_tokens=41, logit_bias={5: 100.0}), "a")
    pieces = drain(engine)
    assert text(pieces, "a") == [5] * 41 and [len(p.ids) for p in pieces] == [1, *[8] * 5]
    stats = pieces[-1].speculation
    assert stats is not None and stats["sources"]["ngram"] == [35, 35]


def test_a_fixed_depth_asks_nobody_where_nobody_drafts() -> None:
    """Without a model, a text that does not repeat itself has no drafts: its step is plain."""
    engine = fake_engine(ngram=True, spec=4, **LONG)
    engine.add([*range(1, 9)], SamplingParams(max_tokens=4, ignore_eos=True), "a")
    engine.step()
    assert engine.drafting.depths(engine.scheduler.decoding()) == {}


def test_the_text_drafts_first_and_the_model_otherwise() -> None:
    engine = fake_engine(FakeBlock(1.0), ngram=True, spec=7, **LONG)
    engine.add(list(range(60)), SamplingParams(max_tokens=60, ignore_eos=True), "a")
    engine.add([5] * 12, SamplingParams(max_tokens=40, logit_bias={5: 100.0}), "b")
    pieces = drain(engine)
    sources = {p.request_id: p.speculation["sources"] for p in pieces if p.speculation}
    assert "fake" in sources["a"] and "ngram" in sources["b"]


def test_a_depth_above_the_block_is_refused() -> None:
    with pytest.raises(UserError, match="num_draft is 9; this drafter allows 7"):
        fake_engine(FakeBlock(1.0), **LONG).add([1], SamplingParams(num_draft=9))
    with pytest.raises(UserError, match="there is no drafter"):
        fake_engine(**LONG).add([1], SamplingParams(num_draft=1))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.6},
        pytest.param({"temperature": 1.0, "presence_penalty": 1.5}, marks=pytest.mark.slow),
    ],
    ids=["plain", "top_p", "penalties"],
)
@pytest.mark.parametrize("count", [2000, pytest.param(10000, marks=pytest.mark.slow)])
def test_sampled_sequences_with_and_without_drafts_are_of_one_distribution(
    params: dict[str, float], count: int
) -> None:
    """Two samples of short sequences, each with seeds of its own, compared by a chi-square test of homogeneity."""
    counts = []
    wide = {**LONG, "max_seqs": 50, "max_step_tokens": 256}
    for engine, seed in ((fake_engine(**wide), 0), (fake_engine(FakeBlock(0.6), spec=3, **wide), 10**6)):
        seen: Counter[tuple[int, ...]] = Counter()
        bias = dict.fromkeys(range(3, 257), -100.0)  # three letters are left: 27 sequences
        for start in range(seed, seed + count, 50):  # the requests of one call have seeds that follow one another
            engine.add([9], SamplingParams(max_tokens=3, seed=start, n=50, logit_bias=bias, **params))
            written: dict[int, list[int]] = {}
            for piece in drain(engine):
                written.setdefault(piece.index, []).extend(piece.ids)
            seen.update(map(tuple, written.values()))
        assert seen.total() == count and all(len(each) == 3 for each in seen)
        counts.append(seen)
    keys = [k for k in set(counts[0]) | set(counts[1]) if counts[0][k] + counts[1][k] >= 10]
    chi = sum((counts[0][k] - counts[1][k]) ** 2 / (counts[0][k] + counts[1][k]) for k in keys)
    freedom = len(keys) - 1
    assert chi < freedom + 4 * (2 * freedom) ** 0.5, (chi, freedom)  # four standard deviations


@pytest.mark.parametrize("taken", range(1, 8))
def test_drafts_before_a_stop_are_counted_as_accepted_all_of_them(taken: int) -> None:
    """All seven drafts are right; the text ends with draft number 'taken' of the first step that drafts."""
    plain = fake_engine(**LONG)
    plain.add([1, 2, 3], SamplingParams(max_tokens=9), "plain")
    ids = text(drain(plain), "plain")
    assert len(set(ids)) == 9, "each id can be a stop of its own"
    engine = fake_engine(FakeBlock(1.0), spec=7, **LONG)
    engine.add([1, 2, 3], SamplingParams(max_tokens=40, stop_ids=[ids[taken]]), "a")
    pieces = drain(engine)
    assert text(pieces, "a") == ids[: 1 + taken]
    report = pieces[-1].speculation
    assert report is not None
    assert (report["num_draft_tokens"], report["num_accepted_draft_tokens"]) == (7, taken)
    assert sum(p.num_accepted for p in pieces) == engine.drafting.total.num_accepted_draft_tokens == taken
    assert engine.drafting.total.acceptance_histogram == [int(n == taken) for n in range(8)]
