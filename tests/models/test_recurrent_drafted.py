"""Recurrent layers beside DFlash and chain drafters, coded and rounded caches, and sliding windows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkdraft import LLM, SamplingParams
from sparkdraft.core import UserError
from sparkdraft.drafters.base import REGISTERED
from tests.drafters.tiny_chain import KIND, MAX_DEPTH, write_chain
from tests.drafters.tiny_drafter import body, random_tensors, speculators, write_drafter, zlab
from tests.fakes.steps import on_device
from tests.models.recurrent import Texts, all_is_free, complete, load, scripted, slots_of, texts
from tests.models.tiny import TinyOf, oracle, write_tiny

PROMPTS = [[(31 * k + 7 * i * i + i) % 250 + 3 for i in range(7 + 13 * k)] for k in range(4)]
PARAMS = [SamplingParams(24, temperature=0.8 * (k % 2), seed=k, ignore_eos=True) for k in range(4)]
GREEDY = SamplingParams(24, ignore_eos=True)


@pytest.fixture(scope="session")
def folder(tiny_of: TinyOf) -> Path:
    return tiny_of("qwen3_next")


@pytest.fixture(scope="module")
def expected(folder: Path) -> Texts:
    llm = load(folder, prefix_cache=False)
    return [texts(llm, [prompt], [params])[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def dflash(path: Path, target: Path, dialect: str) -> Path:
    config = json.loads((target / "config.json").read_text())
    config = config.get("text_config", config)
    shape = body("sf", window=16, hidden_size=config["hidden_size"], vocab_size=config["vocab_size"])
    drafter: dict[str, Any] = zlab(shape, num_target_layers=4) if dialect == "zlab" else speculators(shape)
    return write_drafter(path, drafter, random_tensors(shape))


DIALECTS = [
    ("zlab", True),
    pytest.param("zlab", False, marks=pytest.mark.slow),
    pytest.param("speculators", True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("dialect", "overlaps"), DIALECTS)
def test_dflash_changes_no_text(folder: Path, expected: Texts, tmp_path: Path, dialect: str, overlaps: bool) -> None:
    llm = load(folder, spec="5", drafter=str(dflash(tmp_path, folder, dialect)))
    llm = on_device(llm) if overlaps else llm
    assert texts(llm, PROMPTS, PARAMS) == expected and texts(llm, PROMPTS, PARAMS) == expected
    assert llm.engine.drafting.so_far().num_spec_steps > 20 and all_is_free(llm)
    assert slots_of(llm).num_saved


@pytest.fixture
def chains_are_known() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(REGISTERED, KIND.name, KIND)
        yield


@pytest.mark.usefixtures("chains_are_known")
@pytest.mark.parametrize("overlaps", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_chain_of_drafts_changes_no_text(tmp_path: Path, overlaps: bool) -> None:
    """The chain is as wide as its target, and fitted to what the target writes."""
    folder = write_tiny(tmp_path / "target", "qwen3_next", hidden_size=96)
    with torch.no_grad():
        prompts = torch.tensor(PROMPTS[2:3])
        written = oracle(folder).generate(prompts, min_new_tokens=24, max_new_tokens=24, do_sample=False)
    drafter = write_chain(tmp_path / "drafter", folder, written.tolist(), len(PROMPTS[2]) - 1)
    llm = load(folder, spec=str(MAX_DEPTH), drafter=str(drafter))
    llm = on_device(llm) if overlaps else llm
    assert texts(llm, PROMPTS[:3], GREEDY) == texts(load(folder), PROMPTS[:3], GREEDY)
    stats = llm.engine.drafting.so_far()
    assert stats.num_spec_steps > 10 and all_is_free(llm)


@pytest.mark.slow
def test_drafts_from_the_text_itself_change_no_text(folder: Path) -> None:
    two = SamplingParams(60, ignore_eos=True, logit_bias={40: 100.0, 41: 100.0})
    prompts = [[40 + (i * i * (k + 3) // 7) % 2 for i in range(60 + 9 * k)] for k in range(2)]
    drafted = load(folder, spec="4", ngram=True)
    assert texts(drafted, prompts, two) == texts(load(folder), prompts, two)
    assert drafted.engine.drafting.so_far().num_spec_steps > 2


HYBRID = {"kv": "turboquant", "tq_ring_capacity": 32}
CACHES = [
    pytest.param(HYBRID, id="turboquant"),
    pytest.param({"kv": "fp8", "dtype": "float32"}, id="fp8", marks=pytest.mark.slow),
    pytest.param({"kv": "turboquant", "tq_mode": "full_tq"}, id="all coded", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("cache", CACHES)
def test_other_caches_of_the_full_layers(folder: Path, cache: dict[str, Any]) -> None:
    """Rounded keys and values give another text; drafts and prefixes do not change that one."""
    prompts, params = PROMPTS[2:], SamplingParams(12, ignore_eos=True)
    written = texts(load(folder, prefix_cache=False, **cache), prompts, params)
    drafted = load(folder, spec="15", ngram=True, **cache)
    scripted(drafted, prompts, written, 5, lambda step: step % 6)
    assert texts(drafted, prompts, params) == written
    found = complete(drafted, prompts, params)
    assert [each.ids for each in found] == written and found[1].num_cached == 32 and all_is_free(drafted)


def test_a_model_whose_states_do_not_fit_is_told_how_many_would(folder: Path) -> None:
    with pytest.raises(UserError, match=r"states of 200000 requests take .*: ask for max_seqs \d+ or fewer"):
        load(folder, max_seqs=200_000, max_step_tokens=200_000)


def test_the_plan_counts_states(folder: Path) -> None:
    llm: LLM = load(folder)
    states = llm.engine.runner.kv.states  # type: ignore[attr-defined]
    parts = (states.state, states.keys, states.updates, states.decays, states.inputs)
    planned = llm.plan.states
    assert planned and planned.slots == 4 and planned.pages == 16 and planned.most_rows == 16
    assert planned.slots * planned.slot_bytes == sum(part.nbytes for part in parts)
    assert planned.pages * planned.page_bytes == states.saved_state.nbytes + states.saved_inputs.nbytes
    assert llm.plan.memory.states == planned.nbytes and "recurrent states of 4 requests" in llm.plan.describe()
    assert "recurrent states" in llm.plan.memory.table()
