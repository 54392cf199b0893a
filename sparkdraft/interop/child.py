"""Runs another server as a child process: signals are passed on, and no process of it outlives this one.

The child leads a session of its own, so that Ctrl-C in a terminal reaches it once, through us. This process becomes the
parent of whatever the child leaves behind (PR_SET_CHILD_SUBREAPER), which is how helpers that changed their session are
found and ended too. If this process is killed, the kernel ends the child (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

from sparkdraft.cluster.node.processes import become_reaper, ends_with_parent
from sparkdraft.core import UserError

VERSION_SECONDS = 120  # vLLM imports torch before it says its version


def url_of(host: str, port: int) -> str:
    """Where a server that listens on this address is asked from this machine."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def free_port() -> int:
    """A port on which nothing listens on this machine now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def find_program(name: str) -> str:
    """Where the program is. Raises UserError with one sentence if it is not installed."""
    path = shutil.which(name)
    if path is None:
        raise UserError(
            f"`{name}` is not on the PATH: install it (`pip install {name}`), or print the command for another machine "
            f"with `sparkdraft export {name}`"
        )
    return path


def version_of(program: str) -> str:
    """The version that a program says it has."""
    try:
        result = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=VERSION_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"`{program} --version` did not answer ({type(error).__name__}): is it whole?") from None
    words = result.stdout.split()
    if result.returncode or not words:
        last = (result.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UserError(f"`{program} --version` failed: {last}")
    return words[-1]


class Child:
    """One run of a program. Started from the main thread, which must live as long as the child."""

    def __init__(self, words: Sequence[str], environ: Mapping[str, str]) -> None:
        become_reaper()
        self._process = subprocess.Popen(
            words, env=dict(environ), start_new_session=True, preexec_fn=ends_with_parent()
        )

    @property
    def status(self) -> int | None:
        """None while it runs, else as a shell says it: 128 and the signal's number for one that a signal ended."""
        status = self._process.poll()
        return status if status is None or status >= 0 else 128 - status

    def tell(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
