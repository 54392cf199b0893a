"""Runs one command and ends it, with all that it started, when the supervisor's heartbeat stops.

Standard input: a line of JSON with the command, then any bytes as heartbeats. The end of input, or `silence` seconds
without a byte, ends the command. Standard output: the command's lines, and events as lines of JSON after the byte 0x1e.
A separate thread writes them, so a reader that hangs does not stop the timer.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from .processes import RECORD, become_reaper, descendants, end_all, end_recorded, ends_with_parent, identity

EVENT = b"\x1e"
BEAT = 0.5  # seconds between heartbeats, and between scans for child processes
MOST_WAITING = 10_000  # lines queued for a slow reader; later ones are lost
NO_PROGRAM = 127
COUNTERS = re.compile(rb"^vllm:(?:generation_tokens|prompt_tokens)_total(?:\{[^}]*\})? ([0-9.e+]+)$", re.M)
READY_POLL = 0.5
BUSY = (408, 429)  # overloaded: the same as no answer
# without a proxy: the server is on this machine
OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class Speaker:
    """Writes to standard output from a thread."""

    def __init__(self) -> None:
        self._lines: queue.Queue[bytes | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def line(self, text: bytes) -> None:
        with suppress(queue.Full):
            self._lines.put_nowait(text)

    def event(self, name: str, **more: Any) -> None:
        self.line(EVENT + json.dumps({"event": name, **more}).encode() + b"\n")

    def close(self) -> None:
        with suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(2.0)

    def _write(self) -> None:
        with suppress(OSError):
            while (line := self._lines.get()) is not None:
                while line:
                    line = line[os.write(1, line) :]


def keep(run: Path) -> int:
    """Returns the command's exit status, negative for a signal."""
    spec = json.loads(sys.stdin.buffer.readline() or b"{}")
    if not spec:
        return 1  # the input ended at once
    told: list[int] = []
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, lambda number, frame: told.append(number))
    become_reaper()
    run.mkdir(parents=True, exist_ok=True)
    speaker = Speaker()
    end_recorded(run, even_kept=True)
    try:
        child = _start(spec)
    except OSError as error:
        speaker.event("ended", status=NO_PROGRAM, why=f"{spec['words'][0]} cannot be started: {error.strerror}")
        speaker.close()
        return NO_PROGRAM
    speaker.event("started", pid=child.pid)
    pump = threading.Thread(target=_pump, args=(child, speaker), daemon=True)
    pump.start()
    if spec.get("watch"):
        running = lambda: child.poll() is None  # noqa: E731
        threading.Thread(target=watch, args=(spec["watch"], speaker.event, running), daemon=True).start()
    why = _wait(child, spec["silence"], told, run, speaker)
    _end(child, spec["drain"] if why else 0.0)
    pump.join(2.0)
    (run / RECORD).unlink(missing_ok=True)
    speaker.event("ended", status=child.returncode, why=why)
    speaker.close()
    return int(child.returncode)


def _start(spec: dict[str, Any]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        spec["words"],
        env={**os.environ, **spec["environ"]},
        cwd=Path.home(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=ends_with_parent(),
    )


def _wait(child: subprocess.Popen[bytes], silence: float, told: list[int], run: Path, speaker: Speaker) -> str:
    """Waits until the child ends (returns "") or must end (returns why)."""
    heard = time.monotonic()
    recorded: list[list[int]] = []
    while child.poll() is None:
        if select.select([0], [], [], BEAT)[0]:
            if not os.read(0, 4096):
                return "its supervisor has closed the connection"
            heard = time.monotonic()
            time.sleep(BEAT / 10)
        if time.monotonic() - heard > silence:
            return f"nothing was heard of its supervisor for {silence:g} s"
        if told:
            return f"signal {signal.Signals(told[0]).name} came"
        now = [identity(os.getpid()), *map(identity, descendants(os.getpid()))]
        if now != recorded:
            recorded = now
            _record(run, now)
        speaker.event("beat")
    return ""


def _record(run: Path, known: list[list[int]]) -> None:
    new = run / "processes.new"
    with suppress(OSError):  # a full disk: this record is only for `end`
        new.write_text(json.dumps([each for each in known if each]))
        os.replace(new, run / RECORD)


def _end(child: subprocess.Popen[bytes], drain: float) -> None:
    """Terminates the child, waits, then kills it and everything else below this process."""
    if child.poll() is None:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(drain)
        if child.poll() is None:
            child.kill()
            child.wait()
    end_all()


def _pump(child: subprocess.Popen[bytes], speaker: Speaker) -> None:
    assert child.stdout
    for line in child.stdout:
        speaker.line(line.removesuffix(b"\n").lstrip(EVENT) + b"\n")


def watch(spec: dict[str, Any], say: Callable[..., None], running: Callable[[], bool]) -> None:
    """Reports whether a server still makes tokens: its counters move, or it answers a request for one token.
    (/health stays fine while a rank hangs in an all-reduce.) Says `ready` once, then `token` whenever it works. A
    request that is refused counts as an answer, because it says nothing of the ranks."""
    while running() and _ask(f"{spec['url']}/health", spec["patience"])[0] != 200:
        time.sleep(READY_POLL)
    if not running():
        return
    say("ready")
    last = -1.0
    while running():
        count = tokens_made(spec)
        if count is not None and count > last >= 0:
            say("token")
        else:
            status = ask_token(spec)
            if status == 200 or (400 <= status < 500 and status not in BUSY):
                say("token")
                count = tokens_made(spec)
        last = last if count is None else count
        time.sleep(spec["every"])


def tokens_made(spec: dict[str, Any]) -> float | None:
    """Tokens read and written since the start; None if that cannot be read."""
    found = COUNTERS.findall(_ask(f"{spec['url']}/metrics", spec["patience"])[1])
    return sum(map(float, found)) if found else None


def ask_token(spec: dict[str, Any]) -> int:
    """Returns the status of a request for one token; 0: no answer in time."""
    body = json.dumps({"model": spec["model"], "prompt": "1", "max_tokens": 1, "temperature": 0}).encode()
    headers = {"Content-Type": "application/json"}
    if spec["key"]:
        headers["Authorization"] = f"Bearer {spec['key']}"
    return _ask(urllib.request.Request(f"{spec['url']}/v1/completions", body, headers), spec["patience"])[0]


def _ask(request: str | urllib.request.Request, seconds: float) -> tuple[int, bytes]:
    """Returns the status and the body of an answer; status 0: none in time."""
    try:
        with OPEN(request, timeout=seconds) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, b""
    except (OSError, ValueError, http.client.HTTPException):
        return 0, b""
