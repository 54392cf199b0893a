"""Two drafters that race: both are in the plan, the text is plain text whoever drafts, and the faster one stays."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkdraft import LLM, SamplingParams
from sparkdraft.config import EngineConfig
from sparkdraft.core import AUTO, UserError
from sparkdraft.drafters.mtp_config import MAX_DEPTH
from sparkdraft.drafters.race import Racers, together
from sparkdraft.drafters.race_score import RaceScore
from sparkdraft.engine.backend import EngineBackend
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.load import Loaded, open_model
from sparkdraft.engine.overlap import OverlappedSteps
from sparkdraft.kernels import native
from sparkdraft.server.metrics import Metrics
from tests.drafters.tiny_drafter import body, random_tensors, write_drafter, zlab
from tests.drafters.tiny_mtp import fit_head, write_target
from tests.models.recurrent import all_is_free, load, texts
from tests.models.tiny import write_tiny

LENGTH, OUTPUT, BLOCK = 23, 24, 8
PROMPTS = [[(31 * k + 7 * i * i + i) % 250 + 3 for i in range(LENGTH)] for k in range(6)]
GREEDY = SamplingParams(OUTPUT, ignore_eos=True)
needs_compiler = pytest.mark.skipif(native.unavailable_reason() is not None, reason=str(native.unavailable_reason()))


# ---- the score


def test_turns_are_short_and_the_faster_one_stays() -> None:
    score, seen = RaceScore(["dflash", "mtp"], turn=3, enough=10), []
    assert "under way, 0 of 10" in score.describe() and score.as_dict()["winner"] is None
    while not score.winner:
        seen.append(score.drafts)
        tokens, seconds = (3, 0.01) if score.drafts == "mtp" else (5, 0.02)
        assert score.add(score.drafts, tokens, seconds) == bool(score.winner)
        assert not score.add(score.drafts, 99, 0.0), "a step whose time is not known does not count"
    assert seen == [*["dflash"] * 3, *["mtp"] * 3] * 3 + ["dflash"] * 3 + ["mtp"]
    assert score.winner == score.drafts == "mtp" and not score.add("dflash", 1000, 0.01)
    assert score.describe() == "mtp won: dflash 250.0 tok/s, mtp 300.0 tok/s, over 10 steps each or more"
    assert score.as_dict()["drafters"]["mtp"] == {"steps": 10, "tokens": 30, "tok_s": 300.0}
    score.reset()
    assert score.winner == "mtp", "what is decided stays"


def test_what_was_not_a_users_does_not_count() -> None:
    score = RaceScore(["a", "b"])
    score.add("a", 3, 0.1)
    score.reset()
    assert score.as_dict()["drafters"]["a"]["steps"] == 0


# ---- the race


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target with a fitted MTP head, and a random DFlash drafter for it, which is seldom right."""
    if reason := native.unavailable_reason():
        pytest.skip(reason)
    folder, head = write_target(tmp_path_factory.mktemp("target"), "qwen3_next")
    plain = load(folder, max_seqs=6, prefix_cache=False)
    written = [prompt + text for prompt, text in zip(PROMPTS, texts(plain, PROMPTS, GREEDY), strict=True)]
    fit_head(folder, head, written, LENGTH - 1)
    model = plain.model_config
    shape = body(hidden_size=model.hidden_size, vocab_size=model.vocab_size)
    config = zlab(shape, BLOCK, num_target_layers=len(model.layers))
    return folder, write_drafter(tmp_path_factory.mktemp("drafter") / "dflash", config, random_tensors(shape))


def racing(pair: tuple[Path, Path], overlaps: bool = False, **options: Any) -> LLM:
    folder, drafter = pair
    llm = load(folder, **{"drafter": f"race:{drafter}", "spec": "auto", "max_seqs": 6, **options})
    drafting = llm.engine.drafting
    assert drafting.race
    drafting.race.score.turn, drafting.race.score.enough = 2, 12
    if overlaps:
        llm.engine.overlap = OverlappedSteps(
            llm.engine.runner, drafting.proposer, torch.device("cpu"), drafting.choices, cuts=True
        )
    return llm


@needs_compiler
@pytest.mark.parametrize("overlaps", [False, True], ids=["host", "device"])
def test_the_text_is_plain_text_whoever_drafts(
    pair: tuple[Path, Path], overlaps: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plain = load(pair[0], max_seqs=6, prefix_cache=False)
    params = [replace(GREEDY, temperature=0.6 * (i % 2), seed=i, num_draft=(AUTO, 3, 7)[i % 3]) for i in range(6)]
    expected = texts(plain, PROMPTS, [replace(each, num_draft=0) for each in params])
    llm = racing(pair, overlaps)
    drafting = llm.engine.drafting
    race, drafter = drafting.race, llm.engine.drafting.proposer.drafter  # type: ignore[union-attr]
    assert race and isinstance(drafter, Racers) and drafter.names == ["dflash", "mtp"]
    assert set(drafting.controllers) == {"dflash", "mtp"} and drafting.max_depth == BLOCK - 1
    with caplog.at_level(logging.WARNING):
        while not race.score.winner:
            assert texts(llm, PROMPTS, params) == expected
    sources = drafting.so_far().sources
    assert set(sources) == {"dflash", "mtp"} and sources["mtp"][1] > 10, "both drafted, and some of it was right"
    assert drafter.decided and drafter.names[drafter.active] == race.score.winner
    (said,) = (r.message for r in caplog.records if "race of drafters" in r.message)
    assert f"{race.score.winner} won" in said
    assert texts(llm, PROMPTS, params) == expected and all_is_free(llm)
    assert all(race.score.drafts == race.score.winner for _ in range(9))


@needs_compiler
def test_depths_are_those_of_the_one_that_drafts(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """MTP goes to 6 drafts, this block to 7, whatever a request names."""
    llm, seen = racing(pair, spec="7"), list[tuple[str, int]]()
    drafting = llm.engine.drafting
    assert drafting.choices == [0, 1, 2, 3, 4, 5, 6, 7] and drafting.race
    depths = drafting.depths

    def watched(requests: Any) -> Any:
        found = depths(requests)
        seen.extend((drafting.model, depth) for depth in found.values())
        return found

    monkeypatch.setattr(drafting, "depths", watched)
    llm.generate(PROMPTS[:2], SamplingParams(40, ignore_eos=True))
    assert max(depth for name, depth in seen if name == "dflash") == 7
    assert max(depth for name, depth in seen if name == "mtp") == MAX_DEPTH


@needs_compiler
def test_both_are_in_the_plan(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "warm_up", lambda self: None)  # which only measures
    options = {"kv_tokens": 1024, "max_seqs": 2}
    alone = [load(pair[0], drafter=name, spec="auto", **options) for name in ("none", "mtp", str(pair[1]))]
    both = racing(pair, **options)
    without, mtp, dflash = (llm.plan.memory for llm in alone)
    memory = both.plan.memory
    assert abs(memory.weights - (mtp.weights + dflash.weights - without.weights)) <= 1, "sums are rounded to bytes"
    assert memory.kv == mtp.kv + dflash.kv - without.kv
    drafters = [llm.engine.drafting.proposer.drafter.caps for llm in alone[1:]]  # type: ignore[union-attr]
    caps = together(drafters)
    assert caps.chain and caps.max_depth == BLOCK - 1 and len(caps.taps) == 3 and len(caps.kv) == 3
    assert caps.num_in_target == drafters[0].num_in_target > 0 and caps.in_target


@needs_compiler
def test_the_state_of_a_race_is_shown(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "warm_up", lambda self: None)
    llm = racing(pair)
    race = llm.engine.drafting.race
    assert race
    (fact,) = (fact for fact in llm.facts() if fact.name == "race of drafters")
    assert fact.value == "under way, 0 of 12 steps each"
    backend = EngineBackend(Loaded(llm.checkpoint, llm.model_config, llm.tokenizer, llm.engine), "tiny")
    assert backend.info.drafter == {"name": "race", "max_depth": BLOCK - 1}
    race.score.enough = 1
    for name, tokens in (("dflash", 2), ("mtp", 3)):
        race.count(name, tokens, 0.5)
    found, metrics = backend.status().race, Metrics()
    assert found and found["winner"] == "mtp" and found["drafters"]["dflash"]["tok_s"] == 4.0
    metrics.race(found)
    shown = metrics.render()
    assert 'drafter_race_tokens_per_second{drafter="mtp"} 6' in shown
    assert 'drafter_race_won{drafter="mtp"} 1' in shown and 'won{drafter="dflash"}' not in shown


# ---- what cannot race


def test_a_race_needs_two(tmp_path: Path) -> None:
    lonely = write_tiny(tmp_path / "lonely", "qwen3")
    with pytest.raises(UserError, match=r"two kinds of drafters.*none is there"):
        open_model(EngineConfig(model=str(lonely), drafter="race", device="cpu"))
    with pytest.raises(UserError, match="only dflash is there"):
        open_model(EngineConfig(model="smollm2", drafter="race", device="cpu"))
