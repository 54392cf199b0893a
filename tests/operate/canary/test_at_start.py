"""The canary at the start of a server: what failed is named everywhere, and goes on without."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkdraft.backend import DRAFTING, PREFIX_CACHE, Backend, Report
from sparkdraft.cache.formats.turboquant import CodedLayerKV
from sparkdraft.config import EngineConfig
from sparkdraft.engine.backend import load_backend
from sparkdraft.engine.engine import Engine
from sparkdraft.operate.canary.findings import CODED_CACHE, FAILED, GRAMMARS, PASSED, TOOLS, Failed, Finding, summary
from sparkdraft.operate.canary.probes import Asker, codes_are_within_bounds
from sparkdraft.operate.canary.run import Canary, named
from sparkdraft.server.engine_client import EngineClient
from tests.drafters.tiny_drafter import body, random_tensors, write_drafter, zlab
from tests.models.tiny import write_tiny
from tests.server.conftest import TEMPLATE, FakeClient, live

PLANTED = (sys.executable, str(Path(__file__).with_name("planted.py")))
ASKED = {"messages": [{"role": "user", "content": "1 2 3 1 2 3 1 2 3 1 2"}], "max_tokens": 8, "temperature": 0}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny(tmp_path_factory.mktemp("canary"), "llama")
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "</s>"}))
    return path


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dimensions = body()
    return write_drafter(tmp_path_factory.mktemp("drafter"), zlab(dimensions), random_tensors(dimensions))


def test_what_is_wrong_is_off_by_name_and_the_rest_goes_on(
    folder: Path, drafter: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "faults").write_text("drafts, grammar")
    engine = EngineConfig(model=str(folder), drafter=str(drafter), device="cpu", max_seqs=2)
    with live(EngineClient(engine, command=PLANTED, canary="hermes"), engine=engine, warms_up=False) as server:
        health = server.http.get("/health")
        assert health.status_code == 200 and health.json()["status"] == "degraded"
        failed = {finding["part"]: finding["probe"] for finding in health.json()["canary"]}
        assert set(failed) == {DRAFTING, GRAMMARS, TOOLS}, "a forced call is held by a grammar too"
        metrics = server.http.get("/metrics").text
        assert 'sparkdraft_part_disabled{part="drafting"} 1' in metrics
        assert 'sparkdraft_canary_probe_passed{probe="drafted text is plain text"} 0' in metrics
        assert 'sparkdraft_canary_probe_passed{probe="prefix hit is as cold"} 1' in metrics
        notes = server.http.get("/v1/status").json()["fallbacks"]
        assert any(note["name"] == "drafting is off" and "plain text says" in note["reason"] for note in notes), notes
        answer = server.post("/v1/chat/completions", **ASKED, speculation=3, return_speculation=True)
        assert answer.json()["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
        for part in (DRAFTING, PREFIX_CACHE):  # as the watchdog would: what the canary switched off stays off
            server.service.client._loop.call_soon_threadsafe(server.service.client.switch, part, part == DRAFTING)
        for _ in range(2):
            answer = server.post("/v1/chat/completions", **ASKED, speculation=3, return_speculation=True).json()
        assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        refused = server.post("/v1/chat/completions", **ASKED, response_format={"type": "json_object"})
        assert refused.status_code == 500 and "tructured output is off" in refused.json()["error"]["message"]
    assert "CANARY FAILED: drafted text is plain text" in capfd.readouterr().err


# ---- the coded cache


@pytest.fixture
def coded_options(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr("sparkdraft.engine.backend.warm_up", lambda *engine: None)  # slow, and nobody waits here
    monkeypatch.setattr(Engine, "warm_up", lambda engine: None)
    return {"model": str(folder), "device": "cpu", "kv": "turboquant", "max_seqs": 1, "kv_tokens": 512}


Write = Callable[[CodedLayerKV, torch.Tensor, Any, torch.Tensor], None]
honest: Write = CodedLayerKV.write


def late(layer: CodedLayerKV, qkv: torch.Tensor, rope_args: Any, slots: torch.Tensor) -> None:
    """Rows lie one position late."""
    honest(layer, qkv, rope_args, torch.where(slots % 16 == 15, slots, slots + 1))


def off(layer: CodedLayerKV, qkv: torch.Tensor, rope_args: Any, slots: torch.Tensor) -> None:
    """A quarter of the codes have a wrong bit."""
    honest(layer, qkv, rope_args, slots)
    layer.store.records[..., : layer.store.records.shape[-1] // 4] ^= 0x11


def test_a_coded_cache_is_held_to_its_bound(coded_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    backend = load_backend(coded_options, lambda *stage: None)
    free = backend.engine.pool.num_free
    errors = backend.coding_errors()
    assert len(errors) == 6, "keys and values of three layers"
    assert all(0.5 * each.limit < each.error <= each.limit for each in errors), errors
    assert backend.engine.pool.num_free == free
    monkeypatch.setattr(CodedLayerKV, "write", off)
    with pytest.raises(Failed, match=r"is the limit; . of 6 are beyond theirs"):
        codes_are_within_bounds(Asker(backend))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["gemma3", "gemma4", "gpt_oss", "qwen3_next"])
def test_layers_with_windows_sinks_and_states_are_measured_too(
    coded_options: dict[str, Any], variant: str, tmp_path: Path
) -> None:
    backend = load_backend(coded_options | {"model": str(write_tiny(tmp_path / "m", variant))}, lambda *stage: None)
    errors = backend.coding_errors()
    assert errors and all(0.5 * each.limit < each.error <= each.limit for each in errors), errors


@pytest.mark.slow
def test_a_coded_cache_beyond_its_bound_is_replaced_by_an_exact_one(
    coded_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CodedLayerKV, "write", late)
    loads = []

    def load(options: dict[str, Any], report: Report) -> Backend:
        loads.append(options)
        return load_backend(options, report)

    canary = Canary(load, coded_options | {"tq_key_bits": 3}, lambda *stage: None, "auto")
    backend = canary.load()
    assert [options["kv"] for options in loads] == ["turboquant", "exact"], "named, else a profile's kv would be used"
    assert [finding.part for finding in canary.broken] == [CODED_CACHE]
    info = canary.info(backend)
    assert info.plan_facts["kv"] == "exact" and backend.coding_errors() == []
    assert any(note["name"].startswith("coded KV cache is off") for note in info.fallbacks), info.fallbacks
    assert "CANARY FAILED: coded cache within its bound" in capsys.readouterr().err


def test_codes_that_fail_again_are_told_again(coded_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Finding("coded cache within its bound", FAILED, "far off", CODED_CACHE)
    monkeypatch.setattr("sparkdraft.operate.canary.run.run_probes", lambda *_: [failing])
    canary = Canary(load_backend, coded_options, lambda *stage: None, "auto")
    canary.load()
    assert [named(finding) for finding in canary.broken] == [named(failing), "answers may be wrong"]


# ---- the API


def test_tools_that_are_not_read_are_refused_and_health_says_why() -> None:
    client = FakeClient(lambda prompt, params: prompt)
    found = [Finding("tool call is read", FAILED, "it is not", TOOLS).as_dict()]
    assert client.info
    client.info = replace(client.info, canary=found)
    with live(client) as server:
        assert server.http.get("/health").json() == {"status": "degraded", "canary": found}
        refused = server.post("/v1/chat/completions", **ASKED, tools=[TOOL])
        assert refused.status_code == 500 and "Tool calls are off" in refused.json()["error"]["message"]
        assert server.post("/v1/chat/completions", **ASKED, tools=[TOOL], tool_choice="none").status_code == 200
    assert summary(found) == "1 failed in 0.0 s; FAILED: tool call is read"


def test_a_server_without_failures_says_ok() -> None:
    client = FakeClient(lambda prompt, params: prompt)
    assert client.info
    client.info = replace(client.info, canary=[Finding("grammar holds", PASSED, "it does").as_dict()])
    with live(client) as server:
        assert server.http.get("/health").json() == {"status": "ok"}
        assert server.post("/v1/chat/completions", **ASKED, tools=[TOOL]).status_code == 200
