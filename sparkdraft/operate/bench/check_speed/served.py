"""A server of our own in a process of its own, for lines that compare HTTP with an engine of this process."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from sparkdraft.core import UserError

COMMAND = (sys.executable, "-m", "sparkdraft.cli.main")
READY_SECONDS, END_SECONDS, POLL = 300.0, 60.0, 0.2
LAST_LINES = 5  # of the output of a process that failed


@contextmanager
def serving(*flags: str) -> Iterator[str]:
    """Run `sparkdraft serve` with these flags and yield its address once it is ready."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as said:
        command = [*COMMAND, "serve", "--no-profile", "--port", str(port), *flags]
        process = subprocess.Popen(command, stdout=said, stderr=said)
        try:
            if not _ready(url, process):
                said.seek(0)
                raise UserError(f"`sparkdraft serve` did not become ready: {last_lines(said.read().decode())}")
            yield url
        finally:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _ready(url: str, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + READY_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return True
        except httpx.HTTPError:
            pass  # it does not listen yet
        time.sleep(POLL)
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def last_lines(text: str) -> str:
    return " / ".join(text.strip().splitlines()[-LAST_LINES:]) or "it said nothing"
