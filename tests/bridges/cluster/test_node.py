"""What runs on the machines: the keeper with its timer, the log, the watch, and one measurement of an all-reduce."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from sparkdraft.bridges.cluster.hosts import NODE
from sparkdraft.bridges.cluster.node import processes
from sparkdraft.bridges.cluster.node.keep import COUNTERS, watch
from sparkdraft.bridges.cluster.ranks import Log
from tests.patience import PATIENT, wait_for

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(os.getpid(), helper.pid, flush=True)
time.sleep(600)
"""


def test_it_needs_nothing_but_python() -> None:
    """It is copied to machines where this package is not."""
    for path in NODE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            else:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                top = name.partition(".")[0]
                assert top in sys.stdlib_module_names, path


def keeper(home: Path, silence: float, drain: float = 0.3, words: Any = None) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "node", "keep", "run"],
        cwd=NODE.parent,
        env={**os.environ, "HOME": str(home)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin
    spec = {"words": words or [sys.executable, "-c", STUBBORN], "environ": {}, "drain": drain, "silence": silence}
    process.stdin.write(json.dumps(spec).encode() + b"\n")
    process.stdin.flush()
    return process


@contextmanager
def alive(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Signs of life, while this lasts."""
    stop, stdin = threading.Event(), process.stdin
    assert stdin

    def beat() -> None:
        while not stop.wait(0.1):
            stdin.write(b".")
            stdin.flush()

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        yield
    finally:
        stop.set()
        beating.join()


def pids_of(process: subprocess.Popen[bytes]) -> list[int]:
    assert process.stdout
    with alive(process):
        line = next(line for line in process.stdout if not line.startswith(b"\x1e"))
    return [int(word) for word in line.split()]


def ended(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert process.stdout
    events = [json.loads(line[1:]) for line in process.stdout if line.startswith(b"\x1e")]
    assert process.wait(PATIENT) is not None
    return dict(events[-1])


def test_the_timer_ends_a_command_that_ignores_signals_and_its_helper(tmp_path: Path) -> None:
    process = keeper(tmp_path, silence=2.0)
    pids = pids_of(process)
    assert ended(process) == {
        "event": "ended",
        "status": -9,
        "why": "nothing was heard of its supervisor for 2 s",
    }
    assert not any(processes.identity(pid) for pid in pids)


def test_a_closed_connection_ends_it_and_a_sign_of_life_keeps_it(tmp_path: Path) -> None:
    process = keeper(tmp_path, silence=3.0)
    pids = pids_of(process)
    assert process.stdin
    with alive(process):
        time.sleep(4.0)
        assert all(processes.identity(pid) for pid in pids), "4 s with signs of life are no silence"
    recorded = json.loads((tmp_path / "run" / "processes.json").read_text())
    assert {process.pid, *pids} <= {each[0] for each in recorded}
    process.stdin.close()
    assert ended(process)["why"] == "its supervisor has closed the connection"
    assert not any(processes.identity(pid) for pid in pids) and not (tmp_path / "run" / "processes.json").exists()


def test_what_a_killed_keeper_leaves_is_ended_by_number_and_time_of_start(tmp_path: Path) -> None:
    process = keeper(tmp_path, silence=60.0)
    pids = pids_of(process)
    path = tmp_path / "run" / "processes.json"
    wait_for(lambda: path.exists() and len(json.loads(path.read_text())) >= 3)
    process.kill()
    process.wait()
    assert all(processes.identity(pid) for pid in pids)
    known = json.loads(path.read_text())
    bystander = subprocess.Popen(["sleep", "60"])
    path.write_text(json.dumps([*known, [bystander.pid, 1]]))  # a number that was used again
    kept = json.loads(path.read_text())
    path.write_text(json.dumps([processes.identity(os.getpid()), *kept[1:]]))
    processes.end_recorded(tmp_path / "run")
    assert all(processes.identity(pid) for pid in pids), "another keeper runs"
    path.write_text(json.dumps(kept))
    processes.end_recorded(tmp_path / "run")
    assert not any(processes.identity(pid) for pid in pids) and bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    process = keeper(tmp_path, silence=5.0, words=["/no/such/program"])
    assert ended(process)["why"] == "/no/such/program cannot be started: No such file or directory"
    assert process.returncode == 127


def test_a_log_is_cut_and_survives_a_full_disk(tmp_path: Path) -> None:
    log = Log(tmp_path / "log", most=20)
    assert [log.write(b"0123456789\n") for _ in range(3)] == ["", "", ""]
    assert (tmp_path / "log").read_bytes() == b"0123456789\n" and (tmp_path / "log.1").stat().st_size == 22
    full = Log(Path("/dev/full"))
    assert full.write(b"x") == "the log /dev/full is no longer written: No space left on device"
    assert full.write(b"x") == ""


def test_the_counters_of_vllm() -> None:
    told = (
        b'# HELP vllm:generation_tokens_total x\nvllm:generation_tokens_total{engine="0",model_name="m"} 12.0\n'
        b'vllm:prompt_tokens_total{engine="0",model_name="m"} 1.5e+03\nvllm:prompt_tokens_created{engine="0"} 7\n'
    )
    assert [float(each) for each in COUNTERS.findall(told)] == [12.0, 1500.0]


def test_one_refusal_does_not_end_the_watch() -> None:
    """A request for a token may be refused once, or because too many wait; after that a server can still hang."""
    answers = [400, 429, 200]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def do_POST(self) -> None:
            self.send_response(answers.pop(0))
            self.end_headers()

        def log_message(self, *rest: Any) -> None:
            pass

    said: list[str] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        spec = {
            "url": f"http://127.0.0.1:{server.server_port}",
            "model": "m",
            "every": 0.01,
            "patience": 5.0,
            "key": "",
        }
        watch(spec, lambda name, **more: said.append(name), lambda: bool(answers))
        server.shutdown()
    assert said == ["ready", "token", "token"]
