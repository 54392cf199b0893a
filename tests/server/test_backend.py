"""The engine process with a second backend (echo_backend.py): it knows a backend by its protocol and by nothing else.

The process around the echo is the real one, and so are the client and the HTTP server.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkdraft.server.engine_client import EngineClient, RestartPolicy
from tests.server.conftest import Live, live
from tests.server.echo_backend import BUG, LOST

COMMAND = (sys.executable, str(Path(__file__).with_name("echo_backend.py")))


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    client = EngineClient({"model": "echo"}, RestartPolicy(first=0.1), COMMAND)
    with live(client, served_name="echo") as running:
        yield running


def complete(server: Live, prompt: str | list[int], **more: Any) -> Any:
    return server.post("/v1/completions", prompt=prompt, **more)


def test_requests_are_written_by_the_second_backend(server: Live) -> None:
    answer = complete(server, "hello", n=2, max_tokens=4).json()
    assert [choice["text"] for choice in answer["choices"]] == ["hell", "hell"]
    assert answer["usage"]["prompt_tokens"] == 5 and answer["choices"][0]["finish_reason"] == "length"
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    for given, said in (({}, "hello"), ({"response_format": {"type": "json_object"}}, "{}")):
        answer = server.post("/v1/chat/completions", **chat, **given).json()
        assert answer["choices"][0]["message"]["content"] == said
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    for refused, said in (
        (complete(server, [0]), "holds the token id 0"),
        (server.post("/v1/chat/completions", **chat, response_format=schema), "knows no grammar of kind json_schema"),
    ):
        assert refused.status_code == 400 and said in refused.json()["error"]["message"]


def test_what_it_says_of_itself_reaches_status_and_metrics(server: Live) -> None:
    status = server.http.get("/v1/status").json()
    assert (status["model_type"], status["plan"], status["plan_facts"]) == ("echo", "an echo", {"max_seqs": 4})
    engine = status["engine"]
    assert (engine["kv_blocks_free"], engine["kv_blocks_total"], engine["preemptions"]) == (7, 8, 3)
    assert status["speculative_decoding"]["num_spec_steps"] == engine["steps"], "neither counts warm-up requests"
    assert "sparkdraft_kv_cache_usage_perc 0.125" in server.http.get("/metrics").text.splitlines()


def test_a_failed_step_is_500_and_a_lost_device_a_restart(server: Live) -> None:
    client = server.service.client
    pid = client.pid
    error = complete(server, "hello", seed=BUG)
    assert error.status_code == 500 and "ZeroDivisionError: the echo met a bug" in error.json()["error"]["message"]
    assert complete(server, "on").json()["choices"][0]["text"] == "on" and (client.pid, client.restarts) == (pid, 0)
    error = complete(server, "hello", seed=LOST)
    assert error.status_code == 503 and "LostDevice" in error.json()["error"]["message"]
    server.wait_for(lambda: client.restarts == 1 and server.service.ready)
    assert complete(server, "on").json()["choices"][0]["text"] == "on"


def test_an_engine_that_dies_under_the_canary_is_started_without_it() -> None:
    client = EngineClient({"model": "echo", "dies": True}, RestartPolicy(first=0.1), COMMAND, canary="auto")
    with live(client, served_name="echo") as running:
        assert client.restarts == 1 and complete(running, "hello").status_code == 200
        health = running.http.get("/health").json()
        assert health["status"] == "degraded" and "--no-canary" in health["canary"][0]["detail"]
        assert "SIGKILL" in health["canary"][0]["detail"]
        assert "the canary is off" in [note["name"] for note in running.http.get("/v1/status").json()["fallbacks"]]
