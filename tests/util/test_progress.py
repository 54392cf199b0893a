"""Progress on standard error: a bar for a terminal, lines for a log, the innermost stage, nothing for what is short.

Nothing here looks at a clock: each test waits until what it asks for has been written.
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from rich.console import Console

from sparkdraft.util import progress as module
from sparkdraft.util.progress import Meter, progress, waiting
from tests.patience import PATIENT


class Stream(io.StringIO):
    """Standard error that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._news = threading.Condition()

    def write(self, text: str) -> int:
        with self._news:
            self._news.notify_all()
            return super().write(text)

    def wait_for(self, text: str, after: int = 0) -> None:
        with self._news:
            assert self._news.wait_for(lambda: text in self.getvalue()[after:], PATIENT), self.getvalue()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """A standard error that is not a terminal, and no time before progress is shown."""
    stream = Stream()
    monkeypatch.setattr(module, "errors", Console(file=stream))
    for name in ("PATIENCE", "FIRST_PAUSE", "LONGEST_PAUSE"):
        monkeypatch.setattr(module, name, 0.001)
    return stream


def test_a_log_shows_life(log: Stream) -> None:
    with progress("loading a model") as report:
        log.wait_for("loading a model: ")
        report(3, 7)
        log.wait_for("loading a model: 3 of 7, ")
        report.stage("warming up")
        log.wait_for("warming up: ")
    assert "\x1b" not in log.getvalue() and not module._open


def test_the_inner_stage_is_shown(log: Stream) -> None:
    with progress("loading"):
        log.wait_for("loading: ")
        with progress("fetching", unit="MB") as report:
            report(5, 90)
            log.wait_for("fetching: 5 of 90 MB, ")
        with pytest.raises(ValueError), progress("broken"):
            raise ValueError
        log.wait_for("loading: ", len(log.getvalue()))
    assert not module._open


def test_what_is_short_shows_nothing(log: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", PATIENT)
    with progress("loading") as report:
        report(1, 2)
    assert log.getvalue() == ""


def test_waiting_ends_with_the_first_piece(log: Stream) -> None:
    def pieces() -> Iterator[str]:
        log.wait_for("reading the prompt: ")
        yield "a"
        yield "b" if not module._open else "still shown"

    assert list(waiting(pieces(), "reading the prompt")) == ["a", "b"]
    assert list(waiting(iter(()), "nothing comes")) == []


def test_state() -> None:
    meter = Meter("fetching", "MB")
    assert re.fullmatch(r"\d+ s", meter.state())
    meter(2, 9)
    assert re.fullmatch(r"2 of 9 MB, \d+ s", meter.state())


DRAWN = """
import sys
from sparkdraft.util import progress as module
module.PATIENCE = module.REDRAW = 0.01
with module.progress("loading") as report:
    report(3, 7)
    sys.stdin.readline()
    with module.progress("fetching elsewhere", is_drawn=False):
        print("on standard output")
print("the end", file=sys.stderr)
"""


def test_a_terminal_gets_a_bar_that_leaves_nothing_behind() -> None:
    """The program has a terminal for standard error, and goes on once the bar has been seen there."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", DRAWN]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=theirs, env=environment
    ) as child:
        os.close(theirs)
        seen = b""
        while b"3 of 7" not in seen:
            seen += os.read(ours, 1000)
        out, _ = child.communicate(b"\n", timeout=PATIENT)
        while b"the end" not in seen:
            seen += os.read(ours, 1000)
    assert out == b"on standard output\n" and b"loading" in seen and b"fetching elsewhere" not in seen
    assert seen.rstrip().endswith(b"the end") and b"\x1b[2K" in seen, "the bar's line was erased"
