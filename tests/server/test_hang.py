"""An engine process that stops is reported, waited for and at last restarted; one in a long step is left alone.

The process is the real one around an echo (echo_backend.py) and is stopped by real signals. Pings are sent ten times as
often as they claim, so that seconds of silence pass in tenths.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from sparkdraft.server import engine_client, stream
from sparkdraft.server.engine_client import EngineClient, RestartPolicy
from tests.server.conftest import Live, live
from tests.server.echo_backend import HELD

COMMAND = (sys.executable, str(Path(__file__).with_name("echo_backend.py")))
TEXT = "hello world"


@pytest.fixture(scope="module")
def go_on(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("echo") / "go on"


@pytest.fixture(scope="module")
def shared(go_on: Path) -> Iterator[Live]:
    client = EngineClient({"model": "echo", "go_on": str(go_on)}, RestartPolicy(first=0.1), COMMAND)
    with live(client, served_name="echo", warms_up=False) as running:
        yield running


@pytest.fixture
def server(shared: Live, go_on: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    """Without limits, and nothing lets a held step go on."""
    go_on.unlink(missing_ok=True)
    shared.wait_for(lambda: shared.service.ready)
    monkeypatch.setattr(engine_client, "BEAT", engine_client.BEAT / 10)
    monkeypatch.setattr(stream, "PING", 0.05)
    monkeypatch.setattr(shared.service.client, "restart", replace(shared.service.client.restart, hang=0, step=0))
    yield shared
    go_on.touch()


@contextmanager
def held_stream(server: Live) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun and whose next step does not end."""
    body = {"prompt": TEXT, "seed": HELD, "max_tokens": 50, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = (line for line in response.iter_lines() if line)
        assert [next(lines)[:5] for _ in range(2)] == ["data:", "data:"]
        yield lines


def signalled(server: Live, sent: signal.Signals) -> None:
    pid = server.service.client.pid
    assert pid is not None
    os.kill(pid, sent)


def written(lines: Iterator[str]) -> str:
    """The rest of a stream's text; it must end as streams do."""
    data = [line for line in lines if not line.startswith(":")]
    assert data[-1] == "data: [DONE]"
    return "".join(choice["text"] for line in data[:-1] for choice in json.loads(line[6:])["choices"])


def health(server: Live) -> tuple[int, Any]:
    answer = server.http.get("/health")
    return answer.status_code, answer.json()


def test_a_stopped_process_is_reported_and_goes_on_where_it_was(server: Live, go_on: Path) -> None:
    assert engine_client.SILENT + 2 * engine_client.BEAT <= 3, "within three seconds"
    with held_stream(server) as lines:
        signalled(server, signal.SIGSTOP)
        server.wait_for(lambda: health(server)[0] == 503)
        status, said = health(server)
        assert (status, said["status"]) == (503, "unresponsive") and "no sign of life for" in said["error"]
        assert "sparkdraft_engine_ready 0" in server.http.get("/metrics").text.splitlines()
        whole = server.http.get("/v1/status").json()
        assert whole["status"] == "unresponsive" and whole["silent_s"] > engine_client.SILENT
        refused = server.post("/v1/completions", prompt="x")
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["code"] == "engine_unresponsive"
        assert "The engine does not answer" in refused.json()["error"]["message"]
        assert "the engine does not answer" in next(line for line in lines if "does not" in line or line[0] != ":")
        signalled(server, signal.SIGCONT)
        server.wait_for(lambda: health(server) == (200, {"status": "ok"}))
        go_on.touch()
        assert written(lines) == TEXT[2:]
    assert "sparkdraft_engine_ready 1" in server.http.get("/metrics").text.splitlines()
    assert server.service.client.restarts == 0


def test_a_long_step_is_no_hang(server: Live, go_on: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "SILENT", 100.0)  # ten seconds, for a machine that is busy
    with held_stream(server) as lines:
        server.wait_for(lambda: server.service.client.pulse.step_for > 5)
        assert health(server) == (200, {"status": "ok"})
        assert server.service.client.pulse.silent_for < 100
        assert next(lines) == ": waiting for the next token"
        go_on.touch()
        assert written(lines) == TEXT[2:]
    server.wait_for(lambda: server.service.client.pulse.step_for == 0)


@pytest.mark.parametrize(
    ("limit", "reason"), [("hang", "gave no sign of life for 4 s"), ("step", "a step of the engine lasted 4 s")]
)
def test_after_the_limit_the_engine_is_killed_and_started_again(server: Live, limit: str, reason: str) -> None:
    client = server.service.client
    restarts, pid = client.restarts, client.pid
    with held_stream(server) as lines:
        client.restart = replace(client.restart, **{limit: 4.0})
        if limit == "hang":
            signalled(server, signal.SIGSTOP)
        data = [line for line in lines if not line.startswith(":")]
    error = json.loads(data[0][6:])["error"]
    assert reason in error["message"] and "is being restarted" in error["message"] and data[1] == "data: [DONE]"
    client.restart = replace(client.restart, hang=0, step=0)
    server.wait_for(lambda: client.restarts == restarts + 1 and server.service.ready)
    assert client.pid != pid and health(server) == (200, {"status": "ok"})
    answer: httpx.Response = server.post("/v1/completions", prompt="on")
    assert answer.json()["choices"][0]["text"] == "on"
