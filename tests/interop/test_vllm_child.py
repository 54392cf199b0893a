"""`serve --engine vllm` over a fake `vllm` that is a real process: it is started with the exported command, gets our
signals, and nothing of it stays behind."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx

from sparkdraft.interop.child import Told, _say_ready, _wait, url_of
from tests.interop.fake_vllm import write_fake

MODEL = ("--model", "Qwen/Qwen3-8B")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(what: Any, seconds: float = 30) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.05)
    raise AssertionError(f"{what} did not come true")


@contextmanager
def started(folder: Path, *command: str, **environ: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process that starts the fake, and the pids of the fake and its helper."""
    record = folder / "called.json"
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **environ}
    process = subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True, env=env)
    pids: list[int] = []
    try:
        wait_for(lambda: record.exists() or process.poll() is not None)
        assert record.exists(), process.stderr and process.stderr.read()
        pids = json.loads(record.read_text())["pids"]
        yield process, pids
    finally:
        process.kill()
        process.wait()
        for pid in pids:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def child(folder: Path, port: int) -> tuple[str, ...]:
    """The part that runs the child alone, without the command around it: it starts in half the time."""
    words = [str(folder / "vllm"), "serve", "m", "--host", "127.0.0.1", "--port", str(port)]
    say = "lambda line: print(line, file=sys.stderr, flush=True)"
    code = f"run_child({words!r}, os.environ, 5.0, {say}, 'http://127.0.0.1:{port}')"
    return ("-c", f"import os, sys\nfrom sparkdraft.interop.child import run_child\nsys.exit({code})")


def test_it_runs_the_exported_command_and_a_signal_ends_all_of_it(tmp_path: Path) -> None:
    record, port = write_fake(tmp_path), free_port()
    command = ("-m", "sparkdraft.cli.main", "serve", "--engine", "vllm", "--port", str(port), *MODEL)
    with started(tmp_path, *command, SPARKDRAFT_API_KEY="hidden", EXTRA_ARGS="--seed 3") as (process, pids):
        wait_for(lambda: _answers(port))
        called = json.loads(record.read_text())
        assert called["args"][:2] == ["serve", "Qwen/Qwen3-8B"] and called["key"] == "hidden"
        assert called["args"][-2:] == ["--seed", "3"]
        assert "hidden" not in " ".join(called["args"])
        assert all(map(alive, pids))
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0 and (tmp_path / "called.json.signal").read_text() == "SIGTERM"
        assert not any(map(alive, pids)), "a process stayed behind"
        assert "starts vLLM 0.32.0" in errors and "hidden" not in errors and "Traceback" not in errors


def test_a_child_that_ignores_signals_is_killed_by_the_second(tmp_path: Path) -> None:
    write_fake(tmp_path, mode="stubborn")
    port = free_port()
    with started(tmp_path, *child(tmp_path, port)) as (process, pids):
        wait_for(lambda: _answers(port))
        process.send_signal(signal.SIGINT)
        wait_for((tmp_path / "called.json.signal").exists)
        assert process.poll() is None and alive(pids[0])
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert errors.count("killed: a second signal came") == 1 and not any(map(alive, pids))


def test_a_child_is_killed_once_and_drains_after_signals_that_come_together() -> None:
    class Child:
        """A child that takes 5 looks to end, and a signal or two before the first look."""

        looks, signals, kills = 0, list[int](), 0

        def poll(self) -> int | None:
            self.looks += 1
            if self.looks == 3 and later:
                told.note(signal.SIGINT, None)
            return 0 if self.looks > 5 else None

        def send_signal(self, number: int) -> None:
            self.signals = [*self.signals, number]

        def kill(self) -> None:
            self.kills += 1

    for later in (False, True):
        told, child, said = Told(), Child(), list[str]()
        told.note(signal.SIGTERM, None)
        told.note(signal.SIGHUP, None)
        assert _wait(child, told, 5.0, said.append) == 0  # type: ignore[arg-type]
        assert child.signals == [signal.SIGTERM] and child.kills == len(said) == int(later), said


def test_readiness_is_asked_without_a_proxy_and_at_an_address_that_is_one(tmp_path: Path) -> None:
    assert url_of("::1", 80) == url_of("::", 80) == "http://[::1]:80" and url_of("0.0.0.0", 8) == "http://127.0.0.1:8"
    write_fake(tmp_path)
    port, proxy = free_port(), "http://127.0.0.1:9"
    with started(tmp_path, *child(tmp_path, port), HTTP_PROXY=proxy, http_proxy=proxy, NO_PROXY="") as (process, _):
        assert process.stderr is not None
        assert select.select([process.stderr], [], [], 15)[0], "it never said that it is ready"
        assert "ready after" in process.stderr.readline()
    said: list[str] = []
    running = SimpleNamespace(poll=lambda: None)
    _say_ready(running, "http://::1:80", said.append)  # type: ignore[arg-type]
    assert said and "http://::1:80 is no address" in said[0]


def test_if_we_are_killed_the_child_is_told_to_end(tmp_path: Path) -> None:
    write_fake(tmp_path)
    port = free_port()
    with started(tmp_path, *child(tmp_path, port)) as (process, pids):
        wait_for(lambda: _answers(port))
        process.kill()
        wait_for(lambda: not alive(pids[0]))


def test_a_child_that_fails_gives_its_status_and_leaves_no_helper(tmp_path: Path) -> None:
    write_fake(tmp_path, mode="fails")
    with started(tmp_path, *child(tmp_path, 1)) as (process, pids):
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 3 and "the fake fails" in errors
        assert not any(map(alive, pids))


def test_the_installed_version_decides_what_is_refused(tmp_path: Path) -> None:
    record = write_fake(tmp_path, version="0.20.2")
    result = _run(tmp_path, "--model", "Intel/Qwen3.5-35B-A3B-int4-AutoRound", "--no-prefix-cache")
    assert result.returncode == 1 and "vLLM 0.20.2" in result.stderr and "0.21 mends it" in result.stderr
    assert not record.exists() and len(result.stderr.splitlines()) == 1


def test_without_vllm_one_sentence_says_so(tmp_path: Path) -> None:
    tmp_path.mkdir(exist_ok=True)
    result = _run(tmp_path, *MODEL)
    assert result.returncode == 1 and result.stderr.startswith("sparkdraft: `vllm` is not on the PATH: install it")
    assert len(result.stderr.splitlines()) == 1


def test_flags_of_vllm_need_that_engine(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sparkdraft.cli.main", "serve", "--attention-backend", "TRITON_ATTN"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and "--attention-backend is for --engine vllm" in result.stderr


def _answers(port: int) -> bool:
    try:
        return bool(httpx.get(f"http://127.0.0.1:{port}/health").json()["served"] == str(port))
    except httpx.HTTPError:
        return False


def _run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """With nothing but the folder on the PATH."""
    command = [sys.executable, "-m", "sparkdraft.cli.main", "serve", "--engine", "vllm", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "PATH": str(folder)})
