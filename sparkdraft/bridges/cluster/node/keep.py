"""Runs one command and ends it, with all that it has started, when nobody is heard of any more.

Standard input: a line of JSON that says what to run, then anything, as a sign that the other side lives. Its end, or
`silence` seconds without a sign, ends the command. Standard output: the command's lines, and events, which are lines of
JSON after the byte 0x1e. A thread of its own writes them, so that a reader who hangs does not stop the timer.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from .log import Log
from .processes import become_reaper, descendants, end_all, end_known, ends_with_parent, identity, runs
from .watch import watch

EVENT = b"\x1e"
BEAT = 0.5  # seconds between two signs of life, and between two looks at who is below
MOST_WAITING = 10_000  # lines for a reader who does not read; later ones are in the log alone
NO_PROGRAM = 127


class Speaker:
    """Writes to standard output in a thread."""

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
    """Returns the command's exit status, negative for a signal's."""
    spec = json.loads(sys.stdin.buffer.readline() or b"{}")
    if not spec:
        return 1  # nobody is there
    told: list[int] = []
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, lambda number, frame: told.append(number))
    become_reaper()
    run.mkdir(parents=True, exist_ok=True)
    speaker = Speaker()
    end_recorded(run)
    try:
        child = _start(spec)
    except OSError as error:
        speaker.event("ended", status=NO_PROGRAM, why=f"{spec['words'][0]} cannot be started: {error.strerror}")
        speaker.close()
        return NO_PROGRAM
    speaker.event("started", pid=child.pid)
    pump = threading.Thread(target=_pump, args=(child, Log(run / "log"), speaker), daemon=True)
    pump.start()
    if spec.get("watch"):
        running = lambda: child.poll() is None  # noqa: E731
        threading.Thread(target=watch, args=(spec["watch"], speaker.event, running), daemon=True).start()
    why = _wait(child, spec["silence"], told, run, speaker)
    _end(child, spec["drain"] if why else 0.0)
    pump.join(2.0)
    (run / "processes.json").unlink(missing_ok=True)
    speaker.event("ended", status=child.returncode, why=why)
    speaker.close()
    return int(child.returncode)


def end_recorded(run: Path, even_kept: bool = True) -> list[int]:
    """End what an earlier one has written down and that still runs; returns the numbers of processes. even_kept: also
    where that one runs itself."""
    path = run / "processes.json"
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    if not even_kept and known and runs(known[0]):
        return []
    ended = end_known(known)
    path.unlink(missing_ok=True)
    return ended


def _start(spec: dict[str, Any]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        spec["words"],
        env={**os.environ, **spec["environ"]},
        cwd=spec.get("folder") or Path.home(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=ends_with_parent(),
    )


def _wait(child: subprocess.Popen[bytes], silence: float, told: list[int], run: Path, speaker: Speaker) -> str:
    """Until the child ends (returns "") or has to (returns why)."""
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
    with suppress(OSError):  # a full disk: what runs is ended without it
        new.write_text(json.dumps([each for each in known if each]))
        os.replace(new, run / "processes.json")


def _end(child: subprocess.Popen[bytes], drain: float) -> None:
    """Tell it to end, wait, and kill it and everything below this process."""
    if child.poll() is None:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(drain)
        if child.poll() is None:
            child.kill()
            child.wait()
    end_all()


def _pump(child: subprocess.Popen[bytes], log: Log, speaker: Speaker) -> None:
    assert child.stdout
    for line in child.stdout:
        line = line if line.endswith(b"\n") else line + b"\n"
        if problem := log.write(line):
            speaker.event("note", text=problem)
        speaker.line(line.lstrip(EVENT))
    log.close()
