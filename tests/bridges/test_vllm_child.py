"""`serve --engine vllm` over a fake `vllm` that is a real process: it is started with the exported command behind our
front, gets our signals, is started again, and nothing of it stays behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from sparkdraft.bridges.vllm.child import free_port, url_of
from sparkdraft.bridges.vllm.serve import Supervised
from tests.bridges.fake_vllm import write_fake
from tests.patience import PATIENT, wait_for

MODEL = ("--model", "Qwen/Qwen3-8B")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


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


CODE = """import asyncio, os, sys
from sparkdraft.bridges.vllm import serve
from sparkdraft.bridges.vllm.child import free_port
from sparkdraft.server.config import ServerConfig
from sparkdraft.server.metrics import Metrics
from sparkdraft.server.run import listen
serve.WATCH, serve.PAUSE, serve.UNWELL = 0.1, 0.1, 3
port, config = free_port(), ServerConfig(port={port}, api_key={key!r})
words = [{program!r}, "serve", "m", "--host", "127.0.0.1", "--port", str(port)]
say = lambda line: print(line, file=sys.stderr, flush=True)
more = dict(canary={canary}, drain=5.0, api_key={key!r})
run = serve.Supervised(words, os.environ, f"http://127.0.0.1:{{port}}", say, **more)
sys.exit(asyncio.run(serve.FrontServer(serve.create_front(config, run, Metrics()), run).run_on(listen(config))))
"""


def child(folder: Path, port: int, key: str = "", canary: bool = False) -> tuple[str, ...]:
    """The front and its child alone, without the command around them: it starts in half the time."""
    return ("-c", CODE.format(program=str(folder / "vllm"), port=port, key=key, canary=canary))


def test_it_runs_the_exported_command_and_a_signal_ends_all_of_it(tmp_path: Path) -> None:
    record, port = write_fake(tmp_path), free_port()
    command = ("-m", "sparkdraft.cli.main", "serve", "--engine", "vllm", "--port", str(port), *MODEL)
    with started(tmp_path, *command, SPARKDRAFT_API_KEY="hidden", EXTRA_ARGS="--seed 3") as (process, pids):
        wait_for(lambda: _is_ready(port))
        called = json.loads(record.read_text())
        assert called["args"][:2] == ["serve", "Qwen/Qwen3-8B"] and called["key"] == "hidden"
        assert called["args"][-2:] == ["--seed", "3"]
        assert "hidden" not in " ".join(called["args"])
        assert all(map(alive, pids))
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENT)
        assert process.returncode == 0 and (tmp_path / "called.json.signal").read_text() == "SIGTERM"
        assert not any(map(alive, pids)), "a process stayed behind"
        assert "with vLLM 0.32.0 on http://127.0.0.1" in errors and "hidden" not in errors and "Traceback" not in errors


def test_a_child_that_ignores_signals_is_killed_by_the_second(tmp_path: Path) -> None:
    write_fake(tmp_path, mode="stubborn")
    port = free_port()
    with started(tmp_path, *child(tmp_path, port)) as (process, pids):
        wait_for(lambda: _is_ready(port))
        process.send_signal(signal.SIGINT)
        wait_for((tmp_path / "called.json.signal").exists)
        assert process.poll() is None and alive(pids[0])
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENT)
        assert errors.count("killed: a second signal came") == 1 and not any(map(alive, pids))


def test_a_child_is_killed_once_and_drains_after_signals_that_come_together() -> None:
    class Child:
        """A child that takes 5 looks to end, and a signal or two before the first look."""

        looks, signals, kills = 0, list[int](), 0

        @property
        def status(self) -> int | None:
            self.looks += 1
            if self.looks == 3 and later:
                supervised.note_signal(signal.SIGINT)
            return 0 if self.looks > 5 else None

        def tell(self, number: int) -> None:
            self.signals = [*self.signals, number]

        def kill(self) -> None:
            self.kills += 1

    for later in (False, True):
        said, child = list[str](), Child()
        supervised = Supervised([], {}, "http://127.0.0.1:9", said.append, drain=5.0)
        supervised.note_signal(signal.SIGTERM)
        supervised.note_signal(signal.SIGHUP)
        assert asyncio.run(supervised._ended(child)) == 0  # type: ignore[arg-type]
        assert child.signals == [signal.SIGTERM] and child.kills == len(said) == int(later), said


def test_addresses_and_a_proxy_that_is_not_asked(tmp_path: Path) -> None:
    assert url_of("::1", 80) == url_of("::", 80) == "http://[::1]:80" and url_of("0.0.0.0", 8) == "http://127.0.0.1:8"
    write_fake(tmp_path)
    port, proxy = free_port(), "http://127.0.0.1:9"
    with started(tmp_path, *child(tmp_path, port), HTTP_PROXY=proxy, http_proxy=proxy, NO_PROXY=""):
        wait_for(lambda: _is_ready(port))


def test_the_front_hands_on_requests_and_streams(tmp_path: Path) -> None:
    record = write_fake(tmp_path)
    port, chat = free_port(), {"messages": [{"role": "user", "content": "?"}]}
    with started(tmp_path, *child(tmp_path, port, key="secret", canary=True)) as (process, _):
        wait_for(lambda: _is_ready(port))
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=PATIENT)
        assert client.get("/health").json()["status"] == "degraded"  # the fake answers nothing that a model would
        assert client.post("/v1/chat/completions", json=chat).status_code == 401
        client.headers["Authorization"] = "Bearer secret"
        answer = client.post("/v1/chat/completions?a=b%20c", json=chat)
        assert answer.json()["choices"][0]["message"]["content"] == "one two"
        assert client.get("/v1/models?a=b%20c").json()["path"] == "/v1/models?a=b%20c"
        with client.stream("POST", "/v1/chat/completions", json=chat | {"stream": True, "user": "waits"}) as response:
            assert response.headers["content-type"] == "text/event-stream"
            lines = (line for line in response.iter_lines() if line.startswith("data:"))
            assert "one " in next(lines)
            Path(f"{record}.read").touch()  # only then is the second piece said
            assert len(list(lines)) == 2
        text = client.get("/metrics").text
        assert 'sparkdraft_generation_tokens_total{engine="0"} 7.0' in text and "vllm:" not in text
        assert "python_info" not in text
        assert "sparkdraft_engine_ready 1" in text and 'canary_probe_passed{probe="stream flows"}' in text
        status = client.get("/v1/status").json()
        assert status["engine"]["name"] == "vllm" and len(status["canary"]) == 6
        assert client.post("/x", content=b"x" * (9 << 20)).status_code == 413
        assert client.get("/health", headers={"Host": "elsewhere.example"}).status_code == 403
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENT)


def test_a_model_whose_template_knows_no_tools_answers_calls_and_one_without_a_parser_is_no_fault(
    tmp_path: Path,
) -> None:
    """Without a parser vLLM refuses every request with tools, which once was a failure that no user could act on."""
    probe, model = "tool call is a call", tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "unheard_of"}))
    for template, status, said in (
        ("{{ messages[0].content }}", "passed", "a required call of get_weather"),
        ("{{ messages[0].content }}{{ tools }}", "skipped", "requires --tool-call-parser"),
    ):
        record, port = write_fake(tmp_path), free_port()
        record.unlink(missing_ok=True)
        (model / "chat_template.jinja").write_text(template)
        command = ("-m", "sparkdraft.cli.main", "serve", "--engine", "vllm", "--port", str(port), "--model", str(model))
        with started(tmp_path, *command) as (process, _):
            wait_for(lambda port=port: _is_ready(port))
            args = json.loads(record.read_text())["args"]
            assert ("--tool-call-parser" in args) == ("--enable-auto-tool-choice" in args) == (status == "passed")
            asked = httpx.get(f"http://127.0.0.1:{port}/v1/status", trust_env=False, timeout=PATIENT).json()["canary"]
            found = next(finding for finding in asked if finding["probe"] == probe)
            assert found["status"] == status and said in found["detail"], found
            health = httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False, timeout=PATIENT).json()
            assert probe not in health["canary"]  # the fake fails others
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENT)


def test_a_client_that_hangs_up_ends_its_request(tmp_path: Path) -> None:
    record = write_fake(tmp_path)
    port = free_port()
    with started(tmp_path, *child(tmp_path, port)):
        wait_for(lambda: _is_ready(port))
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"POST /slow HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2\r\n\r\n{}")
            wait_for(Path(f"{record}.asked").exists)
        gone = Path(f"{record}.gone")
        wait_for(gone.exists)
        gone.unlink()
        stream = {"stream": True, "user": "waits"}  # the second piece never comes
        with httpx.stream("POST", f"http://127.0.0.1:{port}/x", json=stream, trust_env=False, timeout=PATIENT) as asked:
            assert "one " in next(asked.iter_lines())
        wait_for(gone.exists)


def test_a_child_that_dies_or_is_unwell_is_started_again(tmp_path: Path) -> None:
    record = write_fake(tmp_path)
    port = free_port()
    with started(tmp_path, *child(tmp_path, port)) as (process, pids):
        wait_for(lambda: _is_ready(port))
        stream = {"stream": True, "user": "waits"}
        with httpx.stream("POST", f"http://127.0.0.1:{port}/x", json=stream, trust_env=False, timeout=PATIENT) as asked:
            lines = (line for line in asked.iter_lines() if line)
            assert "one " in next(lines)
            assert httpx.get(f"http://127.0.0.1:{port}/die", trust_env=False, timeout=PATIENT).status_code == 503
            assert '"code":"no_answer"' in next(lines) and not list(lines), "a stream says that it is not whole"
        wait_for(lambda: _restarts(port) == 1 and _is_ready(port))
        assert not any(map(alive, pids)), "what the first left behind is ended too"
        sick, second = Path(f"{record}.sick"), json.loads(record.read_text())["pids"]
        sick.touch()
        wait_for(lambda: not alive(second[0]))
        sick.unlink()
        wait_for(lambda: _restarts(port) == 2 and _is_ready(port))
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENT)
        assert "started again (restart 1), with exit status 9; it wrote nothing" in errors
        assert "/health has failed 3 times" in errors
        assert "(restart 2), with exit status 137: killed by SIGKILL, often for lack of memory; it wrote" in errors
        assert process.returncode == 0 and "Traceback" not in errors
        assert not any(map(alive, json.loads(record.read_text())["pids"]))


def test_if_we_are_killed_the_child_is_told_to_end(tmp_path: Path) -> None:
    write_fake(tmp_path)
    port = free_port()
    with started(tmp_path, *child(tmp_path, port)) as (process, pids):
        wait_for(lambda: _is_ready(port))
        process.kill()
        wait_for(lambda: not alive(pids[0]))


def test_a_child_that_fails_gives_its_status_and_leaves_no_helper(tmp_path: Path) -> None:
    write_fake(tmp_path, mode="fails")
    with started(tmp_path, *child(tmp_path, free_port())) as (process, pids):
        _, errors = process.communicate(timeout=PATIENT)
        assert process.returncode == 3 and errors.count("the fake fails") == 2 and errors.count("line 18\n") == 1
        last = "".join(f"  | line {i}\n" for i in range(19, 30)) + "  | the fake fails\n"
        assert f"vLLM ended before it was ready, with exit status 3; its last lines:\n{last}" in errors
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
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENT)
    assert result.returncode == 1 and "--attention-backend is for --engine vllm" in result.stderr


def _is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False, timeout=PATIENT).status_code == 200
    except httpx.HTTPError:
        return False


def _restarts(port: int) -> int:
    lines = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=PATIENT).text.splitlines()
    return int(next(float(line.split()[1]) for line in lines if line.startswith("sparkdraft_engine_restarts ")))


def _run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """With nothing but the folder on the PATH."""
    command = [sys.executable, "-m", "sparkdraft.cli.main", "serve", "--engine", "vllm", *flags]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENT, env={**os.environ, "PATH": str(folder)}
    )
