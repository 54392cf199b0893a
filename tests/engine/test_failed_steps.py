"""An exception within a step ends the requests of that step and nothing else: no block, page or drafted row is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sparkdraft import LLM, SamplingParams
from sparkdraft.engine.engine import Engine
from tests.cache.test_recent_rows import coded_engine
from tests.engine.test_engine import collect, drain, greedy
from tests.fakes import FakeBlock, fake_engine
from tests.fakes.steps import on_device

PROMPTS = {f"r{i}": [7] * 9 + [i, i + 1, i + 2] for i in range(7)}


class Bug(Exception):
    """The exception that ends a step in these tests."""


def breaks(engine: Engine, place: str, after: int) -> Callable[[], None]:
    """Make a part of the engine raise in its call number 'after' from now on; returns a function that repairs it."""
    owner: Any = engine
    *path, name = place.split(".")
    for part in path:
        owner = getattr(owner, part)
    right, left = getattr(owner, name), after

    def counted(*args: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise Bug(place)
        return right(*args, **named)

    setattr(owner, name, counted)
    return lambda: setattr(owner, name, right)


def step_until_it_breaks(engine: Engine) -> dict[tuple[str, int], list[int]]:
    """What was written before."""
    written: dict[tuple[str, int], list[int]] = {}
    with pytest.raises(Bug):
        for _ in range(50):
            collect(engine.step(), written)
    return written


PLACES = ["runner.run", "scheduler.schedule", "scheduler.commit", "scheduler._grow", "drafting.depths"]
PLACES += [
    "drafting.propose",
    "drafting.observe",
    "drafting.release",
    "_follow_up",
    "steps._sample_rows",
    "pool.allocate",
    "scheduler.groups.drop",
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("after", [0, 1, 5, 9])
def test_what_ran_is_gone_and_what_waits_is_written_as_alone(place: str, after: int) -> None:
    engine = fake_engine(FakeBlock(0.7), num_blocks=24, max_seqs=3, max_step_tokens=16)
    for name, prompt in PROMPTS.items():
        engine.add(prompt, SamplingParams(max_tokens=6, n=2, ignore_eos=True), name)
    mend = breaks(engine, place, after)
    written = step_until_it_breaks(engine)
    mend()
    before = {request.id for request in engine.scheduler.waiting}
    lost = engine.fail_batch()
    assert engine.pool.num_free == 24 and not engine.scheduler.running
    left = set(engine._by_id)
    assert left < set(PROMPTS) and left <= before, "nothing was given up, or something that did not wait was kept"
    ended = [name for name in PROMPTS if len(written.get((name, 0), ())) == len(written.get((name, 1), ())) == 6]
    assert sorted([*left, *lost, *ended]) == sorted(PROMPTS), "each request is kept, ended or told that it is lost"
    for key, ids in drain(engine).items():
        assert key[0] in left
        written.setdefault(key, []).extend(ids)
    for name in left:
        assert written[name, 0] == written[name, 1] == greedy(PROMPTS[name], 6)
    assert engine.pool.num_free == 24 and not engine._outputs and not engine._by_id
    assert engine.drafting.proposer.observed == {}  # type: ignore[union-attr]


def test_a_request_that_can_not_be_let_in_does_not_block_the_queue() -> None:
    engine = fake_engine()
    for name in ("bad", "good"):
        engine.add(PROMPTS["r1"], SamplingParams(max_tokens=4), name)
    mend = breaks(engine, "scheduler.prefix.lookup_waiting", 0)
    step_until_it_breaks(engine)
    assert engine.fail_batch() == ["bad"]
    mend()
    assert drain(engine)["good", 0] == greedy(PROMPTS["r1"], 4)


def test_no_prefix_of_a_failed_step_is_found_again() -> None:
    engine = fake_engine()
    engine.add(PROMPTS["r1"] * 3, SamplingParams(max_tokens=2), "first")
    drain(engine)
    engine.add(PROMPTS["r1"] * 3, SamplingParams(max_tokens=2), "broken")
    breaks(engine, "drafting.observe", 0)
    step_until_it_breaks(engine)
    engine.fail_batch()
    assert engine.scheduler.prefix.lookup(PROMPTS["r1"] * 3) == ([], [])


@pytest.mark.parametrize("after", range(4))
def test_pages_are_given_back_too(after: int) -> None:
    engine = coded_engine(spare=0, recent=8)
    groups = engine.scheduler.groups
    blocks_and_pages = (engine.pool.num_free, groups.num_free)
    for name, prompt in PROMPTS.items():
        engine.add(prompt, SamplingParams(max_tokens=6), name)
    mend = breaks(engine, "runner.run", after)
    step_until_it_breaks(engine)
    mend()
    engine.fail_batch()
    assert (engine.pool.num_free, groups.num_free) == blocks_and_pages
    for (name, _), ids in drain(engine).items():
        assert ids == greedy(PROMPTS[name], 6)


@pytest.mark.parametrize(
    "place",
    ["steps.slots.step", *(pytest.param(p, marks=pytest.mark.slow) for p in ("steps.read", "steps.catch_up"))],
)
def test_steps_in_the_air_are_abandoned(place: str) -> None:
    llm = on_device(LLM("smollm2", device="cpu", ngram=False, max_seqs=4, kv_tokens=2048, prefix_cache=False))
    params = SamplingParams(max_tokens=24, ignore_eos=True, num_draft=0)
    right = llm.generate(["The sea is", "1, 2, 3,"], params)
    free = llm.engine.pool.num_free
    for text in ("The sea is", "1, 2, 3,"):
        llm.engine.add(llm.encode(text), params)
    mend = breaks(llm.engine, place, 0 if place == "steps.catch_up" else 5)
    step_until_it_breaks(llm.engine)
    mend()
    llm.engine.fail_batch()
    assert llm.engine.pool.num_free == free == llm.engine.pool.num_blocks and not llm.engine.has_work
    assert llm.engine.steps.num_unread == 0
    again = llm.generate(["The sea is", "1, 2, 3,"], params)
    assert [result.text for result in again] == [result.text for result in right]
