"""What a step runs when blocks are scarce: drafts cost no request its blocks, and a full pool is not checked every
step."""

from __future__ import annotations

import pytest

from sparkdraft.core import SamplingParams, TokenLogprob
from tests.fakes import FakeBlock, fake_engine


def forever(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 200, "ignore_eos": True, **changes})  # type: ignore[arg-type]


def test_look_ahead_of_drafts_takes_no_block_that_another_request_needs() -> None:
    """Two requests of 4 blocks each in a pool of 8: there is no room for drafts, and no reason to preempt."""
    engine = fake_engine(FakeBlock(1.0), spec=7, num_blocks=8, max_seqs=2)
    for name in "ab":
        engine.add([ord(name)] * 4, forever(max_tokens=12), name)  # 16 positions at most
    while engine.has_work:
        engine.step()
    assert engine.scheduler.num_preempted == 0


@pytest.mark.parametrize("stagger", range(4))
@pytest.mark.parametrize("length", [9, 12, 15])
def test_look_ahead_of_an_earlier_step_is_given_back_before_anybody_is_preempted(stagger: int, length: int) -> None:
    """One request drafts and all its drafts are refused, the other does not draft: each can still have all its own
    blocks."""
    needed = 2 * -(-(4 + length) // 4)
    engine = fake_engine(FakeBlock(0.0), num_blocks=needed, max_seqs=2, max_model_len=32)
    engine.add([1] * 4, forever(max_tokens=length, num_draft=7), "drafts")
    for _ in range(stagger):
        engine.step()
    engine.add([2] * 4, forever(max_tokens=length, num_draft=0), "plain")
    while engine.has_work:
        engine.step()
    assert engine.scheduler.num_preempted == 0 and engine.pool.num_free == needed


def test_a_prompt_that_does_not_fit_is_not_begun_again_and_again() -> None:
    """It is admitted while there is room for its first chunk only; once preempted, it waits for freed blocks."""
    engine = fake_engine(num_blocks=64, max_seqs=2, max_step_tokens=32, prefix_cache=False)
    engine.add([1] * 100, forever(max_tokens=60), "stream")
    engine.step()
    engine.add([2] * 200, SamplingParams(max_tokens=1), "long")
    while engine.has_work:
        engine.step()
    rows = sum(rows for step in engine.runner.steps for name, rows in step if name == "long")  # type: ignore
    assert rows <= 2 * 200 and engine.scheduler.num_preempted <= 2


def test_prompt_log_probabilities_of_a_preempted_request_are_there_once() -> None:
    engine = fake_engine(num_blocks=64, max_seqs=2, max_step_tokens=32)
    engine.runner.prompt_logprobs = (
        lambda work, row, top: [  # type: ignore[attr-defined]
            TokenLogprob(i, 0.0, []) for i in work.request.prompt_ids[work.start + 1 : work.start + 1 + work.num_known]
        ]
    )
    engine.add([1] * 100, forever(max_tokens=60), "stream")
    engine.step()
    prompt = list(range(200))
    engine.add(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0), "long")
    pieces = []
    while engine.has_work:
        pieces += [piece for piece in engine.step() if piece.request_id == "long"]
    assert engine.scheduler.num_preempted > 0
    (scored,) = [piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs]
    assert [each.id if each else None for each in scored] == [None, *prompt[1:]]


def test_what_a_preempted_prompt_finds_of_itself_does_not_count_as_cached() -> None:
    engine = fake_engine(num_blocks=64, max_seqs=2, max_step_tokens=32)
    engine.add([1] * 100, forever(max_tokens=60), "stream")
    engine.step()
    engine.add(list(range(200)), SamplingParams(max_tokens=1), "long")
    pieces = []
    while engine.has_work:
        pieces += [piece for piece in engine.step() if piece.request_id == "long"]
    rows = sum(rows for step in engine.runner.steps for name, rows in step if name == "long")  # type: ignore
    assert engine.scheduler.num_preempted > 0
    assert 200 <= rows < 2 * 200 and pieces[-1].num_cached == 0


def test_drafts_still_use_blocks_that_are_free() -> None:
    engine = fake_engine(FakeBlock(1.0), spec=7, num_blocks=32, max_seqs=2)
    engine.add([1] * 4, forever(max_tokens=33), "a")
    while engine.has_work:
        engine.step()
    assert len(engine.runner.steps) == 1 + 4  # type: ignore[attr-defined]  # 8 tokens in each step after the prompt's


def test_drafts_leave_rows_to_a_newcomer() -> None:
    engine = fake_engine(FakeBlock(1.0), spec=7, num_blocks=64, max_seqs=2, max_step_tokens=8)
    engine.add([1] * 4, forever(max_tokens=60), "a")
    engine.step()
    engine.step()  # what it costs alone is known now
    engine.add([2] * 6, forever(max_tokens=2), "b")
    engine.step()
    assert {name for name, _ in engine.runner.steps[-1]} == {"a", "b"}  # type: ignore[attr-defined]


def test_the_head_of_the_queue_is_looked_up_again_only_when_blocks_have_been_freed() -> None:
    engine = fake_engine(num_blocks=16, max_seqs=4)
    prefix, lookups = engine.scheduler.prefix, []
    lookup = prefix.lookup_waiting
    prefix.lookup_waiting = lambda *asked: lookups.append(asked[2]) or lookup(*asked)  # type: ignore
    engine.add([1] * 30, forever(max_tokens=30), "a")
    for _ in range(20):
        engine.step()  # 13 of the 16 blocks are the first request's now
    engine.add([2] * 48, forever(max_tokens=4), "long")
    engine.add([3], forever(max_tokens=4), "short")
    for _ in range(8):
        engine.step()
    assert lookups == [30, 48], "one look for each, however many steps it waits"
    assert engine.scheduler.only_decoding, "nobody can come in"
    while engine.has_work:
        engine.step()
    assert lookups[2:] == [48, 1], "when the first had ended, the others came in"


def test_a_prompt_that_waits_for_its_turn_costs_a_step_nothing() -> None:
    """Another prompt takes all prompt rows of every step: the one behind it is neither looked up nor adopted."""
    engine = fake_engine(num_blocks=512, max_seqs=4, max_step_tokens=32, max_model_len=2048)
    retained: list[int] = []
    retain = engine.pool.retain
    engine.pool.retain = lambda block: retained.append(block) or retain(block)  # type: ignore
    prompt = [9] * 400
    engine.add(prompt, SamplingParams(max_tokens=1), "before")
    while engine.has_work:
        engine.step()
    engine.add([1] * 399, SamplingParams(max_tokens=1), "first")  # a shorter prompt does not leave rows to a longer one
    engine.add(prompt, SamplingParams(max_tokens=1), "cached")
    for _ in range(12):
        engine.step()
    assert not retained, "it has not been adopted yet"
    while engine.has_work:
        engine.step()
    assert len(retained) == 99, "and then once"


def test_equal_prompts_leave_a_prefix_behind_when_the_first_of_them_ends() -> None:
    engine = fake_engine(num_blocks=25, max_seqs=4, max_step_tokens=96)
    prompt = [*range(1, 33)]
    engine.add(prompt, SamplingParams(1, ignore_eos=True), "ends")
    engine.add(prompt, forever(max_tokens=60), "goes on")
    engine.step()
    engine.add([200 + i % 50 for i in range(64)], SamplingParams(1, ignore_eos=True), "other")  # takes its blocks
    for _ in range(4):
        engine.step()
    (request,) = engine.scheduler.running
    assert request.id == "goes on" and request.blocks[:8].tolist() == [*range(8, 16)]
    assert engine.scheduler.prefix.lookup([*prompt, 99]).blocks == [*range(8, 16)]


def test_a_refused_head_that_goes_away_does_not_keep_others_out() -> None:
    engine = fake_engine(num_blocks=16, max_seqs=4)
    engine.add([1] * 30, forever(max_tokens=30), "a")
    for _ in range(20):
        engine.step()
    engine.add([2] * 48, forever(max_tokens=4), "long")
    engine.add([3], forever(max_tokens=4), "short")
    engine.step()
    engine.abort("long")
    engine.step()
    assert {request.id for request in engine.scheduler.running} == {"a", "short"}


@pytest.mark.parametrize("decoding", [0, 1])
def test_a_short_prompt_does_not_wait_for_a_long_one(decoding: int) -> None:
    """Its first token comes with the next step, and the long prompt takes as many steps as both tokens together."""
    engine = fake_engine(num_blocks=512, max_seqs=4, max_step_tokens=64, max_model_len=1024)
    for _ in range(decoding):
        engine.add([3], forever(), "stream")
        engine.step()
        engine.step()
    engine.add([1] * 900, SamplingParams(max_tokens=1), "long")
    engine.step()
    engine.step()
    engine.add([2] * 5, SamplingParams(max_tokens=1), "short")
    steps = 1 + 2 * decoding  # beside a stream, one or two steps measure what it costs alone
    assert "short" in {output.request_id for _ in range(steps) for output in engine.step()}
    while "long" in engine._by_id:
        engine.step()
    sizes = [rows for step in engine.runner.steps for name, rows in step if name == "long"]  # type: ignore[attr-defined]
    assert sum(sizes) == 900 and (decoding or len(sizes) == -(-905 // 64))


def test_a_long_prompt_goes_on_while_short_ones_keep_coming() -> None:
    engine = fake_engine(num_blocks=512, max_seqs=4, max_step_tokens=64, max_model_len=1024)
    engine.add([1] * 640, SamplingParams(max_tokens=1), "long")
    steps = 0
    while "long" in engine._by_id:
        for number in range(3):
            engine.add([2] * 40, SamplingParams(max_tokens=1), f"{steps}-{number}")
        engine.step()
        steps += 1
    assert steps <= 20, "half of each step is its own"


def test_prompts_of_one_length_are_read_in_order() -> None:
    engine = fake_engine(num_blocks=512, max_seqs=4, max_step_tokens=64, max_model_len=1024)
    for name in "abc":
        engine.add([ord(name)] * 160, SamplingParams(max_tokens=1), name)
    ended = [output.request_id for _ in range(8) for output in engine.step()]
    assert ended == ["a", "b", "c"] and not engine.has_work
