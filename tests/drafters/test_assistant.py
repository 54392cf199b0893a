"""Gemma 4's assistant computes what transformers' does, pass by pass, inside the running engine.

Pages of sliding layers, prefixes, preemption and several requests are all in play: a key that is read from a wrong
place, or is not held any more, shows in the logits.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkdraft import LLM, SamplingParams
from sparkdraft.drafters import assistant
from sparkdraft.drafters import assistant as assistant_config
from sparkdraft.drafters.assistant import AssistantConfig
from sparkdraft.drafters.base import DrafterCaps
from sparkdraft.engine.engine import Engine
from sparkdraft.models.registry import read_config
from sparkdraft.weights.checkpoint import open_checkpoint
from tests.drafters.tiny_assistant import write_assistant
from tests.drafters.watched_drafts import SOURCES, Watch, difference, expected
from tests.models.tiny import TinyOf

PROMPTS = [[(31 * k + 7 * i * i + i) % 250 + 3 for i in range(5 + 17 * k)] for k in (0, 2, 3)]  # window 8, blocks of 16
CLOSE = 1e-4


@pytest.fixture(scope="session")
def target(tiny_of: TinyOf) -> Path:
    return tiny_of("gemma4")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_assistant(tmp_path_factory.mktemp("assistant"))


@pytest.fixture(autouse=True)
def no_steps_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """They measure costs, from which depths are chosen: here depths are fixed, and they would take most of the time."""
    monkeypatch.setattr(Engine, "warm_up", lambda engine: None)


def load(target: Path, drafter: Path, **options: Any) -> LLM:
    defaults = {"dtype": "float32", "ngram": False, "threads": 1, "max_seqs": 4, "kv_tokens": 1024}
    return LLM(str(target), drafter=str(drafter), **(defaults | options))


def params(depth: int, temperature: float = 0.0, tokens: int = 12) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, num_draft=depth, ignore_eos=True, temperature=temperature, seed=3)


def worst(watch: Watch, drafter: Path, target: Path, cached: bool = False, position: int = 0, every: int = 3) -> float:
    chosen = watch.drafts[::every]
    assert len(chosen) >= 3
    return max(difference(draft, expected(draft, drafter, target, cached, position)) for draft in chosen)


def test_every_pass_equals_transformers(target: Path, drafter: Path) -> None:
    llm = load(target, drafter)
    watch = Watch(llm)
    llm.generate(PROMPTS, [params(3), params(3, temperature=0.9), params(2)])
    assert max(len(draft.fed) for draft in watch.drafts) == 3 and any(len(d.ids) > 60 for d in watch.drafts)
    assert worst(watch, drafter, target) < CLOSE


@pytest.mark.slow
def test_a_found_prefix_and_a_preempted_request_change_nothing(target: Path, drafter: Path) -> None:
    llm = load(target, drafter, kv_tokens=160, max_model_len=112, max_seqs=2)
    watch = Watch(llm)
    prompts = [[3 + (i * 7 + k) % 200 for i in range(20)] for k in range(2)]
    llm.generate(prompts, [params(3, tokens=64)] * 2)
    assert llm.engine.scheduler.num_preempted > 0, "the test must exercise preemption"
    assert worst(watch, drafter, target, every=12) < CLOSE
    watch.drafts.clear()
    found = llm.generate([prompts[0] + [5] * 20], params(3))
    assert found[0].completions[0].num_cached == 16
    assert worst(watch, drafter, target) < CLOSE


@pytest.mark.parametrize(
    "options",
    [
        {"kv": "fp8"},
        {"kv": "turboquant", "tq_mode": "hybrid", "tq_ring_capacity": 16},
        pytest.param({"kv": "turboquant", "tq_mode": "full_tq"}, marks=pytest.mark.slow),
        pytest.param({"kv": "turboquant", "tq_mode": "capture_only"}, marks=pytest.mark.slow),
    ],
    ids=["fp8", "turboquant", "all-coded", "captured"],
)
def test_keys_and_values_are_read_in_the_format_they_are_kept_in(
    target: Path, drafter: Path, options: dict[str, Any]
) -> None:
    llm = load(target, drafter, **options)
    watch = Watch(llm)
    llm.generate(PROMPTS[1:], params(2, tokens=10))
    exactly = options.get("tq_mode") == "capture_only"  # such a cache is read exactly
    assert worst(watch, drafter, target, cached=not exactly) < CLOSE
    assert (worst(watch, drafter, target) < 1e-3) == exactly, "the test must see how K/V are kept"


# ---- mistakes are seen


def test_another_position_is_seen(target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of vLLM and SGLang, for instance, which rotate to the position of the row before the anchor."""
    monkeypatch.setattr(assistant, "POSITION", 0)
    llm = load(target, drafter)
    watch = Watch(llm)
    llm.generate(PROMPTS[1:2], params(1))
    assert worst(watch, drafter, target) > 100 * CLOSE
    assert worst(watch, drafter, target, position=-1) < CLOSE


@pytest.mark.parametrize("beyond", [-1, 0, 2])
def test_another_window_is_seen(target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch, beyond: int) -> None:
    monkeypatch.setattr(assistant_config, "WINDOW_BEYOND", beyond)
    llm = load(target, drafter)
    watch = Watch(llm)
    llm.generate(PROMPTS[1:2], params(1))
    assert worst(watch, drafter, target) > 10 * CLOSE


@pytest.mark.parametrize("reads_back", [2, 1, 0])
def test_pages_that_only_the_drafter_reads_must_be_held(
    target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch, reads_back: int
) -> None:
    """A target lets a page go when its next row does not read it; the assistant looks back two positions further."""

    own = AssistantConfig.caps

    def caps(draft: AssistantConfig, names: Collection[str] = ()) -> DrafterCaps:
        return replace(own(draft), reads_back=reads_back)

    monkeypatch.setattr(AssistantConfig, "caps", caps)
    llm = load(target, drafter)
    (held,), group = llm.engine.scheduler.groups.parts, llm.engine.runner.kv.windows[8]
    release = held.pages.release

    def let_go(block: int) -> None:
        """The next owner of the page may write to it at once."""
        release(block)
        for cache in (*group.kv.k, *group.kv.v):
            cache[int(group.page_of[block])] = 1e4

    held.pages.release = let_go
    watch = Watch(llm)
    llm.generate([PROMPTS[1][:38]], params(1, tokens=22))
    watch.drafts = [draft for draft in watch.drafts if 54 < len(draft.ids) < 60]  # a block ends at 48, less a window
    difference = worst(watch, drafter, target, every=1)
    assert difference < CLOSE if reads_back == 2 else difference > 10 * CLOSE


def test_it_reads_the_last_layer_of_each_type(target: Path, drafter: Path) -> None:
    config = read_config(open_checkpoint(str(target)).config)
    draft = AssistantConfig.read(open_checkpoint(str(drafter)).config)
    sliding, full = SOURCES.values()
    assert draft.source_layers(config) == (sliding, sliding, full)


def test_nothing_of_a_draft_is_written(target: Path, drafter: Path) -> None:
    """Neither to the target's cache, whose bits stay as they are, nor to one of its own."""
    llm = load(target, drafter)
    watch = Watch(llm)
    caches = [part.inner if hasattr(part, "inner") else part for part in llm.engine.runner.kv.layers]
    unwatched, changed = watch.drafter.propose, []

    def propose(*args: Any) -> torch.Tensor:
        before = [(part.k.nan_to_num_().clone(), part.v.nan_to_num_().clone()) for part in caches]
        found = unwatched(*args)
        pairs = zip(before, caches, strict=True)
        changed.append(any(not torch.equal(k, p.k) or not torch.equal(v, p.v) for (k, v), p in pairs))
        return found

    watch.drafter.propose = propose  # type: ignore[method-assign]
    llm.generate(PROMPTS[:2], params(3))
    assert len(changed) > 5 and not any(changed)
    assert watch.drafter.caps.kv == () and watch.drafter.reach(7) == 0
