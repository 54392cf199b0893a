"""Turns ids into text as they arrive, and finds stop strings in it; the division into pieces never changes the result.

Each id adds bytes, and an incremental UTF-8 decoder returns whole characters only, so half a character is never shown,
and invalid bytes become U+FFFD exactly as they would in one go. Text that could be the beginning of a stop string is
held back until that is decided, so text that was given out never has to be taken back.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from sparkdraft.text.tokenizer import Vocabulary


class Detokenizer:
    """Ids to text. continues: the ids continue an earlier text, so the first of them keeps its leading space."""

    def __init__(self, tokenizer: Vocabulary, skip_special: bool = True, continues: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._begun = continues
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Return the characters that this id completes: often one word, sometimes none."""
        skip = self._skip_special
        if self._begun:
            data = self._tokenizer.token_bytes(token, skip)
        else:
            # A skipped token is not the first of the text.
            self._begun = not (skip and self._tokenizer.is_special(token))
            data = self._tokenizer.first_bytes(token, skip)
        return self._decoder.decode(data)

    def finish(self) -> str:
        """Return the rest: U+FFFD if the text ends within a character."""
        return self._decoder.decode(b"", final=True)


class StopFinder:
    """The stop that is complete first ends the text, the longest if several end there."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in dict.fromkeys(stops) if stop]
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._done = False

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that can be given out, and whether a stop was found; after a stop, all text is dropped."""
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
        """Return the text that was held back."""
        return self._give(len(self._held))

    def _give(self, count: int) -> str:
        out, self._held = self._held[:count], self._held[count:]
        return out

    def _first(self) -> int | None:
        """The start of the stop that ends first."""
        ends = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        return min(ends)[1] if ends else None

    def _safe(self) -> int:
        """The length of the held text before the longest suffix that may begin a stop."""
        for start in range(max(0, len(self._held) - self._longest + 1), len(self._held)):
            suffix = self._held[start:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return start
        return len(self._held)
