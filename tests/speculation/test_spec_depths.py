"""--spec-depths: only the named depths are chosen, and every depth that a request names can still run."""

from __future__ import annotations

import pytest

from sparkdraft.config import EngineConfig
from sparkdraft.core import Request, SamplingParams, UserError
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.load import open_model
from tests.fakes import FakeBlock, fake_engine

ROOM = {"num_blocks": 800, "block_size": 4, "max_step_tokens": 64}


def chosen(engine: Engine, **params: int) -> tuple[set[int], list[int]]:
    """The depths of all steps of one request, and its text."""
    seen, before, ids = set[int](), engine.drafting.depths, list[int]()

    def depths(requests: list[Request]) -> dict[Request, int]:
        found = before(requests)
        seen.update(found.values())
        return found

    engine.drafting.depths = depths  # type: ignore[method-assign]
    engine.add([1, 2, 3], SamplingParams(120, ignore_eos=True, **params))
    while engine.has_work:
        for piece in engine.step():
            ids += piece.ids
    return seen, ids


def test_only_the_named_depths_are_chosen() -> None:
    (every, text), (few, same) = (chosen(fake_engine(FakeBlock(0.9), depths=d, **ROOM)) for d in (None, [0, 2, 5]))
    assert few <= {0, 2, 5} and few & {2, 5} and every - {0, 2, 5}, (every, few)
    assert text == same


def test_a_request_may_name_another_depth() -> None:
    engine = fake_engine(FakeBlock(0.9), depths=[0, 2, 5], **ROOM)
    assert engine.drafting.choices == [0, 2, 5, engine.drafting.max_depth]
    assert engine.drafting.max_depth in chosen(engine, num_draft=engine.drafting.max_depth)[0]


@pytest.mark.parametrize("asked", [{"spec": "16"}, {"spec_depths": "0,3,16"}, {"spec": "16", "drafter": "none"}])
def test_depths_that_cannot_run_are_refused_before_weights_are_read(asked: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"is 16; .* 15: ask for fewer, or leave it out"):
        open_model(EngineConfig(model="smollm2", **asked))


def test_depths_that_cannot_run_are_refused() -> None:
    with pytest.raises(UserError, match="spec_depths is 99; this drafter allows"):
        fake_engine(FakeBlock(0.9), depths=[0, 99], **ROOM)
    assert fake_engine(None, depths=[0, 99], **ROOM).drafting.choices == [0], "without drafts there is no limit"
    for wrong in ("3", "0", "1,3", "0,3,3", "0,7,3", "0,x", ""):
        with pytest.raises(UserError, match="growing numbers of drafts with 0 first"):
            EngineConfig(spec_depths=wrong)
    assert EngineConfig(spec_depths="0,2,5").depths == [0, 2, 5] and EngineConfig().depths is None
