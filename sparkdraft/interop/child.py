"""Runs another server as a child process: signals are passed on, and no process of it outlives this one.

The child leads a session of its own, so that Ctrl-C in a terminal reaches it once, through us. This process becomes the
parent of whatever the child leaves behind (PR_SET_CHILD_SUBREAPER), which is how helpers that changed their session are
found and ended too. If this process is killed, the kernel ends the child (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

import httpx

from sparkdraft.cluster.node.processes import become_reaper, end_all, ends_with_parent
from sparkdraft.core import UserError

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
POLL = 0.05
VERSION_SECONDS = 120  # vLLM imports torch before it says its version
GRACE = 30.0  # seconds beyond the drain before a child that was told to end is killed


def url_of(host: str, port: int) -> str:
    """Where a server that listens on this address is asked from this machine."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


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


def run_child(
    words: Sequence[str], environ: Mapping[str, str], drain: float, say: Callable[[str], None], url: str
) -> int:
    """Run a server until it ends, or until a signal has ended it; returns the exit status, 0 after a signal that was
    passed on. drain: seconds that it may take to end. url: where its /health is asked."""
    become_reaper()
    told = Told()
    previous = {each: signal.signal(each, told.note) for each in PASSED_ON}
    try:
        child = subprocess.Popen(words, env=dict(environ), start_new_session=True, preexec_fn=ends_with_parent())
        threading.Thread(target=_say_ready, args=(child, url, say), daemon=True).start()
        status = _wait(child, told, drain, say)
    finally:
        end_all()
        for each, handler in previous.items():
            signal.signal(each, handler)
    if told.signals:
        return 0
    return status if status >= 0 else 128 - status


class Told:
    """The signals that this process has got, in order."""

    def __init__(self) -> None:
        self.signals: list[int] = []

    def note(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)


def _wait(child: subprocess.Popen[bytes], told: Told, drain: float, say: Callable[[str], None]) -> int:
    """Pass the first signal on, with which those count that came before it was passed on; a later one, or the end of
    its time, kills the child."""
    passed, deadline, is_killed = 0, float("inf"), False
    while (status := child.poll()) is None:
        if told.signals and not passed:
            passed, deadline = len(told.signals), time.monotonic() + drain + GRACE
            child.send_signal(told.signals[0])
        again = len(told.signals) > passed
        if not is_killed and (again or time.monotonic() > deadline):
            say("killed: " + ("a second signal came" if again else f"it did not end in {drain + GRACE:.0f} s"))
            child.kill()
            is_killed = True
        time.sleep(POLL)
    return int(status)


def _say_ready(child: subprocess.Popen[bytes], url: str, say: Callable[[str], None]) -> None:
    """Say once when /health answers; until then a server loads. It is on this machine, so no proxy is asked."""
    start = time.monotonic()
    while child.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == httpx.codes.OK:
                say(f"ready after {time.monotonic() - start:.1f} s: {url}/v1")
                return
        except httpx.InvalidURL as error:
            return say(f"note: whether it is ready is not asked: {url} is no address ({error})")
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
