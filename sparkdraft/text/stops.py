"""Finds stop strings in text that arrives in pieces.

Text that could still be the beginning of a stop string is held back until that is decided. So text that was given out
never has to be taken back, and the result does not depend on how the text is divided. The engine handles stop ids; this
module knows text only.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """The stop that is complete first ends the text, the longest if several end there. It is known as soon as it is
    complete, so no token is computed in vain."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in dict.fromkeys(stops) if stop]
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._done = False

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is safe to give out, and whether a stop was found; after that, nothing comes."""
        if self._done:
            return "", True
        if not self._stops:
            return text, False
        self._held += text
        found = self._first()
        if found is None:
            return self._give(self._safe()), False
        self._done = True
        out = self._held[:found]
        self._held = ""
        return out, True

    def finish(self) -> str:
        """The text that was held back and turned out not to be a stop."""
        return self._give(len(self._held))

    def _give(self, count: int) -> str:
        out, self._held = self._held[:count], self._held[count:]
        return out

    def _first(self) -> int | None:
        """Where the stop that ends first begins."""
        ends = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        return min(ends)[1] if ends else None

    def _safe(self) -> int:
        """How much of the held text comes before the longest suffix that may begin a stop."""
        for start in range(max(0, len(self._held) - self._longest + 1), len(self._held)):
            suffix = self._held[start:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return start
        return len(self._held)
