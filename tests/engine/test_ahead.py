"""The engine and its scheduler while the device is a step ahead of what the host has read."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdraft.core import FinishReason, SamplingParams
from sparkdraft.engine.engine import Engine
from tests.fakes import hash_logits
from tests.fakes.ahead import ahead_engine


def alone(prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    while len(ids) < len(prompt) + count:
        ids.append(int(hash_logits(ids).argmax()))
    return ids[len(prompt) :]


def run(engine: Engine, jobs: dict[str, tuple[list[int], SamplingParams]], rng: random.Random) -> dict[str, list[int]]:
    """Adds the jobs at random times, and aborts some of them. Returns what each wrote."""
    waiting, written, aborted = list(jobs), {name: list[int]() for name in jobs}, set[str]()
    for _ in range(4000):
        if waiting and rng.random() < 0.4:
            name = waiting.pop(0)
            engine.add(*jobs[name], name)
        if rng.random() < 0.03 and len(waiting) < len(jobs):
            name = rng.choice([each for each in jobs if each not in waiting])
            engine.abort(name)
            aborted.add(name)
        for output in engine.step() if engine.has_work else ():
            written[output.request_id] += output.ids
            assert output.finish is not FinishReason.ABORT or output.request_id in aborted
        if not waiting and not engine.has_work:
            break
    assert not engine.has_work, "requests do not end"
    for name, (prompt, params) in jobs.items():
        text = alone(prompt, params.max_tokens)
        assert written[name] == (text[: len(written[name])] if name in aborted else text), name
    assert engine.pool.num_free == engine.pool.num_blocks and not engine.steps.num_unread
    return written


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), blocks=st.integers(14, 60), chance=st.sampled_from([0.0, 0.5, 1.0]))
def test_each_request_writes_what_it_writes_alone(seed: int, blocks: int, chance: float) -> None:
    """They join, leave, share prefixes, are aborted and preempted while steps are in the air."""
    rng = random.Random(seed)
    engine, _ = ahead_engine(chance, seed, rng.choice([0, 3, 7]), num_blocks=blocks, max_seqs=4, max_step_tokens=24)
    shared = [rng.randrange(250) for _ in range(14)]
    jobs = {}
    for i in range(10):
        prompt = shared[: rng.randint(0, 14)] + [rng.randrange(250) for _ in range(rng.randint(1, 16))]
        jobs[f"r{i}"] = prompt, SamplingParams(max_tokens=rng.randint(1, 20), ignore_eos=True)
    run(engine, jobs, rng)


def test_requests_join_and_leave_without_a_pause() -> None:
    """A launch follows every launch, whoever comes and goes, while there is work."""
    engine, steps = ahead_engine(spec=0, num_blocks=200, max_seqs=8, max_step_tokens=64)
    jobs = {f"r{i}": ([i, 2, 3, 4, 5], SamplingParams(max_tokens=6 + i, ignore_eos=True)) for i in range(24)}
    waiting, launched, reads = list(jobs), 0, 0
    while waiting or engine.has_work:
        while waiting and len(engine.scheduler.running) + len(engine.scheduler.waiting) < 8:
            name = waiting.pop(0)
            engine.add(*jobs[name], name)
        before = steps.num_unread
        engine.step()
        launched += steps.num_unread >= before and steps.num_unread > 0
        reads += 1
    assert steps.num_mixed > 8 and steps.most_running == 8
    assert reads - launched <= 3, "only the last requests wait for what they wrote"


def test_a_request_that_surely_ends_is_not_run_again() -> None:
    engine, steps = ahead_engine(spec=0)
    engine.add([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
    launches, launch = 0, steps.launch

    def counted(batch: object) -> None:
        nonlocal launches
        launches += 1
        launch(batch)  # type: ignore[arg-type]

    steps.launch = counted  # type: ignore[method-assign]
    while engine.has_work:
        engine.step()
    assert launches == 5


def test_a_context_that_may_be_full_waits_for_what_was_written() -> None:
    engine, _ = ahead_engine(1.0, spec=7, num_blocks=8, max_seqs=2, max_step_tokens=24, max_model_len=30)
    prompt = [7, 8, 9]
    engine.add(prompt, SamplingParams(max_tokens=100, ignore_eos=True), "x")
    ids = [token for _ in range(60) if engine.has_work for output in engine.step() for token in output.ids]
    assert ids == alone(prompt, 27)
