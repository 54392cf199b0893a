"""A drafter that is shown the beginning and the end of a context: what lies between is never read, by host or device.

Rows that must not be read are made NaN: a draft that looks at one has NaN for its logits.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkdraft import LLM, SamplingParams
from sparkdraft.core import UserError
from sparkdraft.drafters.base import SeenContext
from sparkdraft.drafters.dflash import DFlash, DFlashConfig
from tests.drafters.tiny_drafter import body, random_tensors, write_drafter, zlab
from tests.fakes.steps import on_device

SIZE, FIRST, LAST, PROMPT = 16, 5, 40, 180
KEYS = {"draft_sink_size": FIRST, "draft_window_size": LAST}
PROMPTS = torch.randint(3, 259, (2, PROMPT), generator=torch.Generator().manual_seed(8)).tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("pair")
    drafter = write_drafter(root / "drafter", zlab(body(), inner=KEYS), random_tensors(body()))
    return str(tiny_qwen3), str(drafter)


def make(folders: tuple[str, str], **options: Any) -> LLM:
    target, drafter = folders
    return LLM(target, drafter=drafter, dtype="float32", threads=1, ngram=False, block_size=SIZE, **options)


def drafter_of(llm: LLM) -> DFlash:
    proposer = llm.engine.drafting.proposer
    assert proposer and isinstance(proposer.drafter, DFlash)
    return proposer.drafter


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("first", [0, 1, 16, 17])
def test_what_is_left_out(first: int, size: int) -> None:
    sees = SeenContext(first, 40)
    for position in range(200):
        left_out = range(sees.kept(size) * size, (sees.kept(size) + sees.left_out(position, size)) * size)
        hidden = set(range(position)) & set(left_out)
        assert not hidden & set(range(min(first, position))) and not hidden & set(range(position - 40, position))
        assert position + 1 - len(left_out) <= sees.most(size) and len(hidden) == len(left_out)
        assert len(hidden) > position - first - 40 - 2 * size, "and not more than two blocks too few"


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("harm", ["none", "first", "last"])
def test_rows_between_are_never_read(folders: tuple[str, str], overlapped: bool, harm: str) -> None:
    llm = make(folders)
    assert llm.engine.plan.block_size == SIZE
    on_device(llm) if overlapped else None
    drafter, logits = drafter_of(llm), list[torch.Tensor]()
    whole = drafter.logits
    drafter.logits = lambda block: logits.append(whole(block)) or logits[-1]  # type: ignore[method-assign, func-returns-value]
    drafter.likeliest = lambda block: drafter.logits(block).argmax(-1)  # type: ignore[method-assign]
    engine, params = llm.engine, SamplingParams(40, num_draft=7, ignore_eos=True)
    engine.add(PROMPTS[0], params)
    engine.step()
    request = engine.scheduler.running[0]
    left_out = SeenContext(FIRST, LAST).left_out(PROMPT, SIZE)
    assert left_out == 7
    blocks = list(request.blocks)
    poisoned = {"none": blocks[1 : 1 + left_out], "first": blocks[:1], "last": blocks[1 + left_out : 2 + left_out]}[
        harm
    ]
    with torch.inference_mode():
        for cache in (*drafter.kv.k, *drafter.kv.v):
            cache[poisoned] = float("nan")
    logits.clear()
    engine.step()
    if overlapped:
        engine.step()
    assert logits and bool(torch.stack([each.isnan().any() for each in logits]).any()) == (harm != "none")
    while engine.has_work:
        engine.step()


def test_host_and_device_draft_the_same_and_the_text_is_plain(folders: tuple[str, str]) -> None:
    host, device, plain = make(folders), on_device(make(folders)), make(folders)
    params = SamplingParams(60, num_draft=7, ignore_eos=True)
    drafted: dict[int, list[list[int]]] = {}
    for llm in (host, device):
        propose = drafter_of(llm).propose

        def watched(*args: Any, propose: Any = propose, mine: int = id(llm)) -> torch.Tensor:
            ids: torch.Tensor = propose(*args)
            drafted.setdefault(mine, []).append(ids.flatten().tolist())
            return ids

        drafter_of(llm).propose = watched  # type: ignore[method-assign]
    ours, theirs = ([r.completions[0].ids for r in llm.generate(PROMPTS[:1], params)] for llm in (host, device))
    off = [r.completions[0].ids for r in plain.generate(PROMPTS[:1], replace(params, num_draft=0))]
    assert ours == theirs == off
    mine, other = drafted[id(host)], drafted[id(device)]
    assert len(mine) > 20 and mine[:-8] == other[: len(mine) - 8], "near the end the host drafts no more than it needs"


def test_short_contexts_are_seen_whole(folders: tuple[str, str], tmp_path: Path) -> None:
    target, drafter = folders
    every = write_drafter(tmp_path / "every", zlab(body()), random_tensors(body()))
    texts = []
    for folder in (drafter, str(every)):
        llm = make((target, folder))
        result = llm.generate([PROMPTS[0][:20]], SamplingParams(20, num_draft=7, ignore_eos=True))[0].completions[0]
        texts.append((result.ids, result.speculation["acceptance_histogram"] if result.speculation else None))
    assert texts[0] == texts[1] and texts[0][1]


def test_a_config_that_makes_no_sense_is_refused() -> None:
    assert DFlashConfig.read(zlab(body(), inner=KEYS)).sees == SeenContext(FIRST, LAST)
    assert DFlashConfig.read(zlab(body(), inner={"draft_sink_size": 4})).sees is None
    for bad in ({"draft_window_size": -1}, {"draft_window_size": "x"}, {"draft_window_size": 4, "draft_sink_size": -1}):
        with pytest.raises(UserError, match=[*bad][-1]):
            DFlashConfig.read(zlab(body(), inner=bad))
