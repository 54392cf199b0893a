"""A log that never stops what is logged: it is cut when it grows, and a full disk ends the log alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 64 << 20  # then it is moved to .1, in place of the one before


class Log:
    def __init__(self, path: Path, most: int = MOST_BYTES) -> None:
        self.path, self.most, self.problem = path, most, ""
        self._file: BinaryIO | None = None

    def write(self, line: bytes) -> str:
        """Returns a sentence once, when it can no longer be written."""
        if self.problem:
            return ""
        try:
            if self._file is None:
                self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
            self._file.write(line)
            if self._file.tell() > self.most:
                self.close()
                os.replace(self.path, f"{self.path}.1")
        except OSError as error:
            self.problem = f"the log {self.path} is no longer written: {error.strerror}"
            self.close()
        return self.problem

    def close(self) -> None:
        if self._file:
            self._file.close()
        self._file = None
