"""Runs another server as a child process, none of whose processes outlives this one.

The child leads its own session, so Ctrl-C in a terminal reaches it once, through us. This process adopts whatever the
child leaves behind (PR_SET_CHILD_SUBREAPER), also helpers in other sessions, and ends it. If this process is killed,
the kernel ends the child (PR_SET_PDEATHSIG). The child's output goes to our standard error, and its last lines are
kept.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

from sparkdraft.bridges.cluster.node.processes import become_reaper, ends_with_parent
from sparkdraft.core import UserError

VERSION_SECONDS = 120  # vLLM imports torch before it prints its version
LAST_LINES = 12  # of the child's output that are kept
LAST_SECONDS = 2.0  # for reading its last output; helpers may hold the pipe open longer


def url_of(host: str, port: int) -> str:
    """The URL under which this machine reaches a server that listens on this address."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def free_port() -> int:
    """Returns a port on which nothing listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def find_program(name: str) -> str:
    """Returns the program's path. Raises UserError if it is not installed."""
    path = shutil.which(name)
    if path is None:
        raise UserError(
            f"`{name}` is not on the PATH: install it (`pip install {name}`), or print the command for another machine "
            f"with `sparkdraft export {name}`"
        )
    return path


def version_of(program: str) -> str:
    """Asks a program for its version."""
    try:
        result = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=VERSION_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(
            f"`{program} --version` did not answer ({type(error).__name__}): is it installed completely?"
        ) from None
    words = result.stdout.split()
    if result.returncode or not words:
        last = (result.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UserError(f"`{program} --version` failed: {last}")
    return words[-1]


class Child:
    """One run of a program. Start it from the main thread, which must live as long as the child."""

    def __init__(self, words: Sequence[str], environ: Mapping[str, str]) -> None:
        become_reaper()
        self._process = subprocess.Popen(
            words, env=dict(environ), start_new_session=True, preexec_fn=ends_with_parent(),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._reader = threading.Thread(target=self._pass_on, daemon=True)
        self._reader.start()

    def _pass_on(self) -> None:
        assert self._process.stdout
        for raw in self._process.stdout:
            line = raw.decode("utf-8", errors="replace").rstrip()
            if line:
                self._lines.append(line)
            with suppress(OSError, ValueError):  # our standard error is closed
                print(line, file=sys.stderr, flush=True)

    def last_words(self) -> str:
        """Describes how it ended, with its last lines."""
        self._reader.join(LAST_SECONDS)
        lines = "".join(f"\n  | {line}" for line in self._lines)
        return f"{_in_words(self.status)}; " + (f"its last lines:{lines}" if lines else "it wrote nothing")

    @property
    def status(self) -> int | None:
        """None while it runs, else its exit status as in a shell: 128 plus the number of a signal that ended it."""
        status = self._process.poll()
        return status if status is None or status >= 0 else 128 - status

    def tell(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()


def _in_words(status: int | None) -> str:
    if status is None or status <= 128:
        return f"exit status {status}"
    name = signal.Signals(status - 128).name if status - 128 in set(signal.Signals) else str(status - 128)
    hint = ", often for lack of memory" if name == "SIGKILL" else ""
    return f"exit status {status}: killed by {name}{hint}"
