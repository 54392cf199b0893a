"""Ids to text as they come, one at a time, with the same text whatever the pace.

Each id adds bytes, and an incremental UTF-8 decoder gives out whole characters only, so half of one is never seen and
bytes that are no text become U+FFFD exactly as they would in one go. Which bytes an id stands for is tokenizer.py's
knowledge; looking for stop strings is stops.py's work.
"""

from __future__ import annotations

import codecs

from sparkdraft.text.tokenizer import Vocabulary


class Detokenizer:
    """'continues': the ids go on a text that was begun before, so no space is taken from the first of them."""

    def __init__(self, tokenizer: Vocabulary, skip_special: bool = True, continues: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._begun = continues
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The characters that this id completes, often one word, sometimes none."""
        skip = self._skip_special
        if self._begun:
            data = self._tokenizer.token_bytes(token, skip)
        else:
            # A skipped token is not the first of the text.
            self._begun = not (skip and self._tokenizer.is_special(token))
            data = self._tokenizer.first_bytes(token, skip)
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left: U+FFFD if the text ends within a character."""
        return self._decoder.decode(b"", final=True)
