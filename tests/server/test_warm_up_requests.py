"""Ready means ready: what a server runs before its first user, that no user pays for it, and that none sees it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from sparkdraft.server import app
from sparkdraft.server.engine_client import EngineError
from sparkdraft.text import template as templates
from tests.models.tiny import write_tiny
from tests.patience import PATIENT
from tests.server.conftest import TEMPLATE, FakeClient, live
from tests.server.test_serve import started

OPENING = (
    "You are a machine that answers in a few words.\n"  # with what follows it three blocks of the byte tokenizer's ids
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny(tmp_path_factory.mktemp("opening"), "llama")
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": OPENING + TEMPLATE, "eos_token": "</s>"}))
    return path


def ask(http: httpx.Client, number: int) -> dict[str, Any]:
    """The usage of a request that has the length of others but its own text."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": f"{number:02} is my number"}], "stream": True}
    body |= {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}
    usage: dict[str, Any] = json.loads(http.post("/v1/chat/completions", json=body).text.split("data: ")[-2])["usage"]
    return usage


def test_the_first_request_finds_the_templates_opening_computed_and_nothing_counted(folder: Path) -> None:
    with started("--model", str(folder), "--device", "cpu") as server:
        url = server.wait_for(r"chat +(http://127\.0\.0\.1:\d+)/").group(1)
        server.wait_for("ready after")
        with httpx.Client(base_url=url, timeout=PATIENT) as http:
            status = http.get("/v1/status").json()
            usages = [ask(http, number) for number in range(3)]
            metrics = http.get("/metrics").text
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [48] * 3
    assert status["engine"]["tokens_generated"] == status["engine"]["steps"] == 0
    assert status["engine"]["finished"] == {} and status["speculative_decoding"]["num_spec_steps"] == 0
    assert "sparkdraft_generation_tokens_total 24\n" in metrics


def test_the_first_request_finds_the_template_compiled() -> None:
    own = TEMPLATE + "{# a template that no other test has compiled #}"
    with live(FakeClient(lambda prompt, params: "{}", template=own)) as running:
        worker, misses = templates._worker, templates.about.cache_info().misses
        assert worker and running.chat().status_code == 200
        assert templates._worker is worker and templates.about.cache_info().misses == misses


def test_nothing_is_ready_before_the_warm_up_requests_are_over() -> None:
    client = FakeClient(lambda prompt, params: "{}")
    client.go_on.clear()
    with live(client, until_ready=False, warms_up=True, api_key="right") as running:
        running.wait_for(lambda: bool(client.seen))
        health = running.http.get("/health")
        assert health.status_code == 503 and health.json()["stage"] == "warm-up requests"
        assert running.chat().json()["error"]["code"] == "not_ready"
        client.go_on.set()
        running.wait_for(lambda: running.service.ready)
        assert len(client.seen) == len(app.WARM_UP_REQUESTS) and client.aborted == []
        assert {params.grammar and params.grammar.kind for params in client.seen} == {None, "json_object"}


def test_an_engine_that_dies_in_its_warm_up_requests_has_not_started() -> None:
    client, took = FakeClient(lambda prompt, params: "{}"), []
    client.start_took = lambda: took.append(client.info) or 0.0  # type: ignore[method-assign,func-returns-value]
    client.go_on.clear()
    with live(client, until_ready=False, warms_up=True) as running:
        running.wait_for(lambda: bool(client.seen))
        client.state = "restarting"
        client.go_on.set()
        running.wait_for(lambda: running.service.gate.num_inside == 0)
        assert client.info is not None
        client.info = second = replace(client.info, created=2)
        client.state = "ready"
        running.wait_for(lambda: running.service.ready)
    assert took == [second]


@pytest.mark.parametrize(
    "client",
    [
        FakeClient(lambda prompt, params: EngineError("it cannot", True)),
        FakeClient(lambda prompt, params: "ok", template=None),
        FakeClient(lambda prompt, params: "ok" * 100, delay=0.5),
    ],
    ids=["errors", "no template", "slow"],
)
def test_warm_up_requests_that_go_wrong_stop_nobody(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "WARM_UP_SECONDS", 0.5)
    with live(client, warms_up=True) as running:
        assert running.http.get("/health").status_code == 200
        running.wait_for(lambda: running.service.gate.num_inside == 0)
