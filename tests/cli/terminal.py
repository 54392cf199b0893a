"""A program at a terminal of its own, driven as a person does: wait for what it shows, then type."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from types import TracebackType

from tests.patience import PATIENT

READY = "\x1b[?2004h"  # the prompt asks for pasted text to be marked: from now on it reads keys
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\r")
CTRL_C, CTRL_D, UP, LEFT, ENTER, ALT_ENTER = "\x03", "\x04", "\x1b[A", "\x1b[D", "\r", "\x1b\r"


def paste(text: str) -> str:
    """As terminals send what is pasted, once they have been asked to mark it."""
    return f"\x1b[200~{text}\x1b[201~"


def own_terminal() -> None:
    """As a shell starts a program: ctrl-c at its terminal sends a signal to it."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    def __init__(self, command: Sequence[str], columns: int = 160, **environment: str) -> None:
        self._end, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        known = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **environment}
        files = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        self.process = subprocess.Popen(command, **files, env=os.environ | known, preexec_fn=own_terminal)
        os.close(theirs)
        self.raw = ""
        self._read_up_to = 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._end)

    def type(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def wait_for(self, text: str) -> str:
        """Everything that came since the last wait, up to this text and with it; control sequences taken out."""
        while (at := self.raw.find(text, self._read_up_to)) < 0:
            assert self._read(), f"ended without {text!r}: {self.raw!r}"
        new = self.raw[self._read_up_to : at + len(text)]
        self._read_up_to = at + len(text)
        return CONTROL.sub("", new)

    def wait_for_end(self) -> int:
        while self._read():
            pass
        return self.process.wait(PATIENT)

    def _read(self) -> bool:
        deadline = time.monotonic() + PATIENT
        while not select.select([self._end], [], [], 1.0)[0]:
            assert time.monotonic() < deadline, f"nothing came: {self.raw!r}"
        try:
            new = os.read(self._end, 1 << 16)
        except OSError:  # Linux's way to say that nobody is at the other end any more
            return False
        self.raw += new.decode(errors="replace")
        return bool(new)
