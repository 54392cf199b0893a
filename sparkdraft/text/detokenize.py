"""Turns ids into text as they come, one at a time, with the same result whatever the pace.

Each id adds bytes, and an incremental UTF-8 decoder returns whole characters only. So half a character is never shown,
and invalid bytes become U+FFFD exactly as they would in one go. tokenizer.py knows the bytes of an id, and stops.py
looks for stop strings.
"""

from __future__ import annotations

import codecs

from sparkdraft.text.tokenizer import Vocabulary


class Detokenizer:
    """continues: the ids continue an earlier text, so the first of them keeps its leading space."""

    def __init__(self, tokenizer: Vocabulary, skip_special: bool = True, continues: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._begun = continues
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The characters that this id completes: often one word, sometimes none."""
        skip = self._skip_special
        if self._begun:
            data = self._tokenizer.token_bytes(token, skip)
        else:
            # A skipped token is not the first of the text.
            self._begun = not (skip and self._tokenizer.is_special(token))
            data = self._tokenizer.first_bytes(token, skip)
        return self._decoder.decode(data)

    def finish(self) -> str:
        """The rest: U+FFFD if the text ends within a character."""
        return self._decoder.decode(b"", final=True)
