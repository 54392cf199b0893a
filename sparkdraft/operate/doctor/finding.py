"""One thing that the doctor looked at: what it found, how it knows, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Status(IntEnum):
    """The larger, the worse."""

    FINE = 0
    NOTE = 1  # worth knowing; nothing to do, or nothing that must be done
    CHANGE = 2  # slower or less than this machine could be
    BROKEN = 3  # the engine cannot run

    @property
    def word(self) -> str:
        return {0: "ok", 1: "note", 2: "change", 3: "broken"}[self.value]


@dataclass(frozen=True, slots=True)
class Finding:
    part: str  # the heading it stands under
    name: str
    value: str  # what was found
    status: Status = Status.FINE
    advice: str = ""  # what to do
    proof: str = ""  # what ran, and showed it
