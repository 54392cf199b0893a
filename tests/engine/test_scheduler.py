"""What a step runs when blocks are scarce: drafts cost nobody anything, and a full pool is not looked at every step."""

from __future__ import annotations

from sparkdraft.core import SamplingParams
from tests.fakes import FakeBlock, fake_engine


def forever(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 200, "ignore_eos": True, **changes})  # type: ignore[arg-type]


def test_look_ahead_of_drafts_takes_no_block_that_another_request_needs() -> None:
    """Two requests of 4 blocks each in a pool of 8: there is no room for drafts, and none for throwing anybody out."""
    engine = fake_engine(FakeBlock(1.0), spec=7, num_blocks=8, max_seqs=2)
    for name in "ab":
        engine.add([ord(name)] * 4, forever(max_tokens=12), name)  # 16 positions at most
    while engine.has_work:
        engine.step()
    assert engine.scheduler.num_preempted == 0


def test_drafts_still_use_blocks_that_are_free() -> None:
    engine = fake_engine(FakeBlock(1.0), spec=7, num_blocks=32, max_seqs=2)
    engine.add([1] * 4, forever(max_tokens=33), "a")
    while engine.has_work:
        engine.step()
    assert len(engine.runner.steps) == 1 + 4  # type: ignore[attr-defined]  # 8 tokens in each step after the prompt's


def test_drafts_leave_rows_to_a_newcomer() -> None:
    engine = fake_engine(FakeBlock(1.0), spec=7, num_blocks=64, max_seqs=2, max_rows=8)
    engine.add([1] * 4, forever(max_tokens=60), "a")
    engine.step()
    engine.add([2] * 6, forever(max_tokens=2), "b")
    engine.step()
    assert {name for name, _ in engine.runner.steps[-1]} == {"a", "b"}  # type: ignore[attr-defined]


def test_the_head_of_the_queue_is_looked_up_again_only_when_blocks_have_been_freed() -> None:
    engine = fake_engine(num_blocks=16, max_seqs=4)
    prefix, lookups = engine.scheduler.prefix, []
    lookup = prefix.lookup
    prefix.lookup = lambda ids: lookups.append(len(ids)) or lookup(ids)  # type: ignore
    engine.add([1] * 30, forever(max_tokens=30), "a")
    for _ in range(20):
        engine.step()  # 13 of the 16 blocks are the first request's now
    engine.add([2] * 48, forever(max_tokens=4), "long")
    engine.add([3], forever(max_tokens=4), "short")
    for _ in range(8):
        engine.step()
    assert lookups == [30, 48], "one look for each, however many steps it waits"
    assert engine.scheduler.only_decoding, "steps may overlap while nobody can come in"
    while engine.has_work:
        engine.step()
    assert lookups[2:] == [48, 1], "when the first had ended, the others came in"


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
