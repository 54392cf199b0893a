"""Turns ids into text as they arrive, and finds stop strings in it; the division into pieces never changes the result.

Half a character is never shown, and text that could be the beginning of a stop string is held back until that is
decided.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from sparkdraft.text.events import first_tag, held
from sparkdraft.text.tokenizer import Vocabulary


class Detokenizer:
    """Ids to text. continues: the ids continue an earlier text, so the first of them keeps its leading space."""

    def __init__(self, tokenizer: Vocabulary, skip_special: bool = True, continues: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._begun = continues
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._within = False  # the text so far ends within a character

    def push(self, token: int) -> str:
        """Return the characters that this id completes: often one word, sometimes none."""
        skip = self._skip_special
        if self._begun:
            data = self._tokenizer.token_bytes(token, skip)
        else:
            # A skipped token is not the first of the text.
            self._begun = not (skip and self._tokenizer.is_special(token))
            data = self._tokenizer.first_bytes(token, skip)
        if not self._within and data.isascii():
            return data.decode("ascii")
        text = self._decoder.decode(data)
        self._within = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """Return the rest: U+FFFD if the text ends within a character."""
        return self._decoder.decode(b"", final=True)


class StopFinder:
    """The stop that is complete first ends the text, the longest if several end there."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in dict.fromkeys(stops) if stop]
        self._held = ""
        self._done = False

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that can be given out, and whether a stop was found; after a stop, all text is dropped."""
        if self._done:
            return "", True
        if not self._stops:
            return text, False
        self._held += text
        if found := first_tag(self._held, self._stops, 0):
            out, self._held, self._done = self._held[: found[0]], "", True
            return out, True
        return self._give(len(self._held) - held(self._held, self._stops)), False

    def finish(self) -> str:
        """Return the text that was held back."""
        return self._give(len(self._held))

    def _give(self, count: int) -> str:
        out, self._held = self._held[:count], self._held[count:]
        return out
