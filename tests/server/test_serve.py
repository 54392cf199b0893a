"""`sparkdraft serve` as people start and stop it: what it prints, how it drains, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.patience import PATIENT, wait_for
from tests.server.conftest import FakeClient, Live, live

CHAT = "/v1/chat/completions"


class Started:
    def __init__(self, *flags: str, verbs: tuple[str, ...] = ("serve",), **environ: str) -> None:
        command = [sys.executable, "-m", "sparkdraft.cli.main", *verbs, "--port", "0", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environ})
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    def quiet(self) -> None:
        """It has ended, and said nothing that looks like a bug."""
        self._reader.join(PATIENT)
        assert not any("Traceback" in line or "ERROR" in line for line in self.lines), self.lines

    def wait_for(self, pattern: str) -> re.Match[str]:
        return wait_for(lambda: re.search(pattern, "\n".join(self.lines)), lambda: f"no {pattern} in {self.lines}")


@contextmanager
def started(*flags: str, **environ: str) -> Iterator[Started]:
    server = Started(*flags, **environ)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait()


def test_it_says_where_it_is_answers_and_drains(tiny_folder: Path) -> None:
    flags = ("--model", str(tiny_folder), "--device", "cpu", "--drain-seconds", "600")
    with started(*flags, SPARKDRAFT_SERVED_NAME="mine") as server:
        url = server.wait_for(r"chat +(http://127\.0\.0\.1:\d+)/").group(1)
        assert httpx.get(url + "/health", timeout=PATIENT).status_code in (200, 503)
        server.wait_for(r"ready after .* s: cpu")
        server.wait_for("sampling: temperature 1, unless a request sets its own")
        body = {"model": "mine", "messages": [{"role": "user", "content": "x"}], "stream": True, "ignore_eos": True}
        with httpx.stream("POST", url + CHAT, json=body | {"n": 16, "max_tokens": 400}, timeout=PATIENT) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert not any("error" in chunk for chunk in rest)
        assert sum(chunk["choices"][0]["finish_reason"] == "length" for chunk in rest) == 16
        assert server.process.wait(PATIENT) == 0


def test_no_piece_of_a_stream_waits_for_the_one_before_to_be_acknowledged(echo: Live) -> None:
    with echo.http.stream("POST", CHAT, json={"messages": [{"role": "user", "content": "x"}], "stream": True}):
        sockets = [c.transport.get_extra_info("socket") for c in list(echo.server.server_state.connections)]
        assert sockets and all(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for s in sockets)


def test_a_model_that_can_not_be_served_ends_it() -> None:
    with started("--model", "missing.gguf") as server:
        assert server.process.wait(PATIENT) == 1
        server.wait_for("sparkdraft: .*missing.gguf")
        assert not any("Traceback" in line or "API" in line for line in server.lines), "no address is announced"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--shape", "qwen3-8x"], "shape 'qwen3-8x' is not known: did you mean"),
        (["--shape", "tiny", "--drafter-shape", "dflash"], "drafter shape 'dflash' is not known"),
        (["--drafter-shape", "dflash-5x"], "--drafter-shape goes with --shape"),
        (["--shape", "tiny", "--model", "smollm2"], "--shape and --model are both given"),
        (["--shape", "tiny", "--drafter", "ngram"], "drafter is 'ngram', and a shape with random weights has none"),
    ],
)
def test_what_does_not_go_with_a_shape_is_told_at_once(flags: list[str], words: str) -> None:
    with started(*flags) as server:
        assert server.process.wait(PATIENT) == 1
        server.wait_for(f"sparkdraft: .*{words}")


def test_a_port_that_is_taken_is_told_at_once() -> None:
    with live(FakeClient(lambda prompt, params: "ok")) as running:
        port = str(running.http.base_url.port)
        with started("--port", port) as server:
            assert server.process.wait(PATIENT) == 1
            server.wait_for(f"cannot listen on 127.0.0.1 port {port}")


def test_while_it_drains_the_new_is_refused_and_the_old_is_finished() -> None:
    client = FakeClient(lambda prompt, params: "x" * 30)
    with live(client) as running:
        server = running.server
        server._loop = server.servers[0].get_loop()
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        client.go_on.clear()
        events: list[dict[str, Any]] = []
        stream = threading.Thread(target=lambda: events.extend(running.events(CHAT, **body)))
        stream.start()
        running.wait_for(lambda: running.service.gate.num_inside == 1)
        server.handle_exit(signal.SIGTERM, None)
        assert running.http.post(CHAT, json=body).json()["error"]["code"] == "draining"
        client.go_on.set()
        stream.join()
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
        running.wait_for(lambda: server.should_exit)


def test_what_outlasts_the_drain_gets_an_error() -> None:
    client = FakeClient(lambda prompt, params: "x" * 3000, delay=0.05)
    with live(client, drain_seconds=0.2) as running:
        server = running.server
        server._loop = server.servers[0].get_loop()
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        with running.http.stream("POST", CHAT, json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.handle_exit(signal.SIGTERM, None)
            last = [line for line in lines if line][-2:]
        assert "shutting down" in last[0] and last[1] == "data: [DONE]"
        running.wait_for(lambda: server.should_exit)


@pytest.mark.parametrize("second", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_second_signal_does_not_wait(tiny_folder: Path, second: signal.Signals) -> None:
    with started("--model", str(tiny_folder), "--device", "cpu", "--max-seqs", "1", "--drain-seconds", "600") as server:
        url = server.wait_for(r"chat +(http://127\.0\.0\.1:\d+)/").group(1)
        server.wait_for("ready after")
        body = {"prompt": ["x"] * 200, "max_tokens": 400, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=PATIENT) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("draining")
            server.process.send_signal(second)
            with suppress(httpx.RemoteProtocolError):
                assert sum('"finish_reason":"length"' in line for line in lines) < 200, "it has waited for all answers"
            assert server.process.wait(PATIENT) == 0
        server.quiet()


# ---- signals while it starts

HOOKED = """
import os, signal, sys
import sparkdraft.server.app, sparkdraft.server.engine_client, sparkdraft.server.run
owner, name = {owner}, "{name}"
real = getattr(owner, name)
def hooked(*args, **more):
    os.kill(os.getpid(), signal.{sig})
    return real(*args, **more)
setattr(owner, name, hooked)
from sparkdraft.cli.main import main
sys.exit(main(["serve", "--port", "0", "--model", {model!r}, "--device", "cpu"]))
"""


@pytest.mark.parametrize(
    ("owner", "name", "sig"),
    [
        ("sparkdraft.server.run", "listen", "SIGTERM"),
        ("sparkdraft.server.run", "listen", "SIGINT"),
        ("sparkdraft.server.run.Server", "run_on", "SIGTERM"),
        ("sparkdraft.server.run.Server", "run_on", "SIGINT"),
        ("sparkdraft.server.engine_client.EngineClient", "start", "SIGTERM"),
        ("sparkdraft.server.engine_client.subprocess", "Popen", "SIGTERM"),
        ("sparkdraft.server.engine_client", "Connection", "SIGINT"),
    ],
)
def test_a_signal_at_any_step_before_loading_ends_it_quietly(
    tiny_folder: Path, owner: str, name: str, sig: str
) -> None:
    code = HOOKED.format(owner=owner, name=name, sig=sig, model=str(tiny_folder))
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, timeout=PATIENT)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "rror" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("stage", "times"),
    [
        ("process", 1),
        ("opening", 2),
        ("weights|warm-up", 1),
        pytest.param("warm-up requests|ready after", 2, marks=pytest.mark.slow),
    ],  # some may be too short to see
)
def test_a_signal_while_it_loads_ends_it_quietly(tiny_folder: Path, stage: str, times: int) -> None:
    with started("--model", str(tiny_folder), "--device", "cpu") as server:
        server.wait_for(stage)
        for _ in range(times):
            server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENT) == 0
        server.quiet()


# ---- a new start of the engine


@pytest.mark.slow
def test_a_restart_counts_from_its_own_begin(tiny_folder: Path) -> None:
    with started("--model", str(tiny_folder), "--device", "cpu") as server:
        url = server.wait_for(r"chat +(http://127\.0\.0\.1:\d+)/").group(1)
        server.wait_for("ready after")
        (engine,) = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        begin = time.monotonic()
        os.kill(int(engine), signal.SIGKILL)
        server.wait_for("restarting: .*SIGKILL")
        answer = httpx.get(url + "/health", timeout=PATIENT)
        told = server.wait_for(r"(?s)restarting: .*ready after ([\d.]+) s").group(1)
        assert float(told) <= time.monotonic() - begin + 0.05  # it is rounded
        if answer.status_code != 200:  # the new engine may be ready before this is asked
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
