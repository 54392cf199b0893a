"""Runs chat templates in a child process, with limits on time, memory and output (template_worker.py).

Each process has one such child, started on first use and again if a template has killed it; it ends with its parent.
Threads take turns.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from sparkdraft.core import UserError

SCRIPT = Path(__file__).parent / "template_worker.py"
SECONDS = 5.0  # of CPU time for one chat; 2,000 messages take about 0.1
HANGS = 60.0  # seconds without an answer, on the busiest machine
MAX_BYTES = 1 << 30  # memory of the child process
BYTES_PER_CHAR = 32  # more memory for each character that is sent to it
MAX_CHARS = 1 << 20  # length of a rendered chat
CHARS_PER_CHAR = 8  # more length for each character that it is made from
MAX_TEMPLATE = 1 << 20  # length of a template


class PastLimit(UserError):
    """A template takes too much time or memory, or writes too much. `what` continues "the chat template"."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"The chat template {what} for these messages, which is the limit: send fewer or shorter ones, or a plain "
            "prompt (/v1/completions)."
        )
        self.what = what


class Worker:
    def __init__(self) -> None:
        self.owner = os.getpid()  # a fork of this process must start a worker of its own
        self.socket, theirs = socket.socketpair()
        # -P: do not import from the script's folder
        command = [sys.executable, "-P", str(SCRIPT)]
        with theirs:
            # Its own session, because Ctrl-C is for the parent.
            self.process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=theirs.fileno(), start_new_session=True
            )
        self.socket.settimeout(HANGS)
        self.file = self.socket.makefile("rwb")

    def ask(self, task: bytes) -> bytes:
        """Send a task and return the answer; b"" if the process has ended."""
        try:
            self.file.write(task + b"\n")
            self.file.flush()
            return self.file.readline()
        except OSError:  # it has closed its end, or hangs
            self.process.kill()
            return b""
        except BaseException:  # Ctrl-C: the next task would read this answer
            self.process.kill()
            raise

    def end(self) -> int:
        """End the process; returns its status."""
        if self.owner != os.getpid():
            return 0
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            self.file.close()
        self.socket.close()
        return self.process.wait()


_lock = threading.Lock()
_worker: Worker | None = None


def _ask(task: dict[str, Any]) -> dict[str, Any]:
    """Run a task in the worker, again if something else has killed the worker. Raises PastLimit."""
    global _worker
    try:
        sent = json.dumps(task)
    except RecursionError:
        raise UserError("The messages or tools are nested too deeply to be read; flatten them.") from None
    except (TypeError, ValueError) as error:
        raise UserError(f"The messages, tools and template variables must be plain JSON values ({error}).") from None
    limits = {
        "seconds": SECONDS,
        "max_bytes": MAX_BYTES + BYTES_PER_CHAR * len(sent),
        "max_chars": MAX_CHARS + CHARS_PER_CHAR * len(sent),
    }
    line = f"{sent[:-1]}, {json.dumps(limits)[1:]}".encode()
    with _lock:
        for _ in range(2):
            if _worker is None or _worker.owner != os.getpid():
                _worker = Worker()
            if reply := _worker.ask(line):
                break
            status, _worker = _worker.end(), None
            if status == -signal.SIGPROF:
                raise PastLimit(f"takes more than {SECONDS:g} s of CPU time")
        else:
            ending = f"signal {-status}" if status < 0 else f"exit status {status}"
            raise PastLimit(f"ends the process that it runs in ({ending})")
    found: dict[str, Any] = json.loads(reply)
    if "limit" in found:
        raise PastLimit(found["limit"])
    return found


@atexit.register
def close() -> None:
    """End the worker, if there is one; the next use starts another."""
    global _worker
    with _lock:
        if _worker is not None:
            _worker.end()
        _worker = None


@dataclass(frozen=True, slots=True)
class About:
    variables: frozenset[str] = frozenset()  # messages, tools, enable_thinking and the like
    looked_for: frozenset[str] = frozenset()  # constants that it compares strings with
    fault: str = ""  # why it can render no chat, with the line of the error


@lru_cache(maxsize=16)
def about(template: str) -> About:
    if len(template) > MAX_TEMPLATE:
        return About(fault=f"the chat template has {len(template):,} characters and {MAX_TEMPLATE:,} is the limit")
    try:
        found = _ask({"do": "describe", "template": template})
    except PastLimit as error:
        return About(fault=f"the chat template {error.what} to be compiled")
    return About(frozenset(found["variables"]), frozenset(found["looked_for"]), found["fault"])


def render(template: str, values: Mapping[str, Any]) -> str:
    """Render. Raises PastLimit if the template takes too much, UserError if it refuses the messages."""
    found = _ask({"do": "render", "template": template, "values": dict(values)})
    if "refused" in found:
        raise UserError(f"The chat template does not take these messages{found['refused']}.")
    text: str = found["text"]
    return text
