"""Rows of batches in which nobody could draft with profit are not shown to the drafter, and drafts look past them.

All of the drafter's cache begins as NaN: a draft that looks at a row which was never shown has NaN for its logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparkdraft import LLM, SamplingParams
from sparkdraft.engine import proposer
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.sampler import Sure
from tests.drafters.tiny_drafter import body, random_tensors, write_drafter, zlab
from tests.models.tiny import write_tiny

SIZE = 16  # positions per block of the cache
LONG, SHORT = list(range(5, 45)), list(range(60, 100))
OUTPUT = 70


@pytest.fixture
def llm(tmp_path: Path, untimed: None) -> LLM:
    """Alone a request gains by any draft; two at a time lose by every draft."""
    target = write_tiny(tmp_path / "target", "qwen3")
    drafter = write_drafter(tmp_path / "drafter", zlab(body()), random_tensors(body()))
    llm = LLM(str(target), drafter=str(drafter), dtype="float32", threads=1, ngram=False, kv_tokens=16 * SIZE)
    budget = llm.engine.drafting.budget
    assert budget
    for depth in (0, 1, 3, 7) * 2:
        for num, each in ((1, 0.001), (2, 4.0)):
            drafting = num * bool(depth)
            for context in (32, 300):
                budget.measured(num * (1 + depth), num, context, 1.0 + each * depth, 0.0001, drafting, depth)
    budget._may_pay.clear()  # the answers of the start, when no cost was known
    with torch.inference_mode():
        for cache in (*drafter_kv(llm).k, *drafter_kv(llm).v):
            cache.fill_(float("nan"))
    return llm


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The logits of every draft, as they are made."""
    seen: list[torch.Tensor] = []
    pick = proposer.pick_sure

    def watched(ops: Any, logits: torch.Tensor, *others: Any) -> Sure:
        seen.append(logits.clone())
        return pick(ops, logits, *others)

    monkeypatch.setattr(proposer, "pick_sure", watched)
    return seen


def drafter_kv(llm: LLM):  # type: ignore[no-untyped-def]
    return llm.engine.drafting.proposer.drafter.kv  # type: ignore[union-attr]


def greedy(max_tokens: int, num_draft: int | None = None) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, num_draft=num_draft, ignore_eos=True)


def finish(engine: Engine) -> dict[str, list[int]]:
    texts: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            texts.setdefault(output.request_id, []).extend(output.ids)
    return texts


def num_drafted(llm: LLM) -> int:
    return sum(llm.engine.drafting.so_far().steps.values())


def test_a_batch_that_can_not_gain_shows_the_drafter_nothing(llm: LLM) -> None:
    engine = llm.engine
    engine.add(LONG, greedy(OUTPUT))
    engine.add(SHORT, greedy(OUTPUT))
    for _ in range(20):
        engine.step()
    assert num_drafted(llm) == 0
    assert all(k.isnan().all() for k in drafter_kv(llm).k)


def test_a_request_that_was_passed_over_drafts_from_the_next_block_on(llm: LLM, logits: list[torch.Tensor]) -> None:
    engine = llm.engine
    engine.add(LONG, greedy(OUTPUT), "long")
    engine.add(SHORT, greedy(12), "short")
    request = engine._by_id["long"][0]
    while "short" in engine._by_id:
        engine.step()
    assert request.num_computed % SIZE, "the block under way has rows that were passed over"
    while request.num_computed % SIZE:
        assert not logits
        engine.step()
    engine.step()
    assert len(logits) == 1
    finish(engine)
    assert all(torch.isfinite(x).all() for x in logits)
    assert list(request.output_ids) == llm.generate([LONG], greedy(OUTPUT, 0))[0].completions[0].ids


def test_a_later_request_looks_past_blocks_that_it_found_in_the_prefix_cache(
    llm: LLM, logits: list[torch.Tensor]
) -> None:
    engine = llm.engine
    engine.add(LONG, greedy(20))
    engine.add(SHORT, greedy(20))
    texts = finish(engine)
    assert not logits
    turn = LONG + next(iter(texts.values())) + [7, 8, 9]
    (result,) = llm.generate([turn], greedy(30))
    assert result.completions[0].num_cached == 3 * SIZE
    assert logits and all(torch.isfinite(x).all() for x in logits)


def test_a_block_is_whole_again_when_other_rows_are_written_to_it(llm: LLM, logits: list[torch.Tensor]) -> None:
    """The pool has 16 blocks, the first two requests use 8 of them, the third 15."""
    engine, block = llm.engine, llm.engine.drafting.proposer
    assert block
    engine.add(LONG, greedy(20))
    engine.add(SHORT, greedy(20))
    finish(engine)
    assert block._gaps.sum() == 8
    llm.generate([list(range(100, 250))], greedy(80))
    assert block._gaps.sum() <= 1
    assert all(torch.isfinite(x).all() for x in logits)


def test_who_asks_for_drafts_gets_them_in_any_batch(llm: LLM, logits: list[torch.Tensor]) -> None:
    plain = [r.completions[0].ids for r in llm.generate([LONG, SHORT], greedy(OUTPUT, 0))]
    drafted = [r.completions[0].ids for r in llm.generate([LONG, SHORT], [greedy(OUTPUT, 3), greedy(OUTPUT, 0)])]
    assert drafted == plain and logits and all(torch.isfinite(x).all() for x in logits)


def test_rows_beside_a_prompt_are_shown_where_a_request_decodes_alone(llm: LLM, logits: list[torch.Tensor]) -> None:
    """Depths are chosen for the requests that decode: one, which may draft. The newcomer is passed over, since two
    would decode."""
    engine, block = llm.engine, llm.engine.drafting.proposer
    assert block
    engine.add(LONG, greedy(OUTPUT), "long")
    for _ in range(4):
        engine.step()
    engine.add(SHORT, greedy(1), "short")
    engine.step()
    own = engine._by_id["long"][0].blocks
    assert not block._gaps[own].any() and block._gaps.any()
    finish(engine)
    assert all(torch.isfinite(x).all() for x in logits)
