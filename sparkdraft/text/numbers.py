"""Bounds the numbers of JSON under a grammar: JSON itself lets a number have any number of digits, and small models at
temperature 0 write digits until they are stopped.

An integer part has at most 18 digits, so every integer fits into 64 bits; a fraction has at most 17, and an exponent
2, so every number is finite as a double. The grammar compiler has no option for this, so tokens whose digits would
exceed a bound are removed from the mask that it computed. They stay where nothing else may follow: a schema's own
`minimum`, `const` or `multipleOf` can ask for a longer number. Strings are never bounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from sparkdraft.text.tokenizer import Vocabulary

INTEGER_DIGITS, FRACTION_DIGITS, EXPONENT_DIGITS = 18, 17, 2
SPELLINGS = frozenset('0123456789"<')  # how a token begins whose bytes begin with a digit or a quote ("<0x31>")
TAIL = 64  # bytes of text that are looked at: more than the longest number
DIGITS, NUMBER = b"0123456789", b"0123456789+-.eE"
BEFORE_NUMBER = b" \n\t\r,:["  # within a string other characters may precede digits too

Mask = NDArray[np.uint8]


class NumberBounds:
    """What a vocabulary's tokens begin with. Shared by all grammars of a model."""

    def __init__(self, tokenizer: Vocabulary, vocab: Mapping[str, int], vocab_size: int) -> None:
        """vocab: the tokens as the tokenizer's file spells them."""
        self._tokenizer = tokenizer
        self._leading = np.zeros(vocab_size, np.uint8)  # digits that each token begins with
        quotes = np.zeros(vocab_size, bool)
        for name, token in vocab.items():
            if name[:1] not in SPELLINGS or not 0 <= token < vocab_size:
                continue
            data = tokenizer.token_bytes(token)
            if data[:1].isdigit():
                self._leading[token] = min(len(data) - len(data.lstrip(DIGITS)), 255)
            elif data[:1] == b'"':
                quotes[token] = True
        self._quotes = np.packbits(quotes, bitorder="little")
        self._longest = int(self._leading.max(initial=0))
        self._kept: dict[int, Mask] = {}  # by room: the tokens that begin with no more digits

    def tail(self, tail: bytes, ids: Sequence[int]) -> bytes:
        """The end of the text after these ids, of which 'tail' was the end before."""
        return (tail + b"".join(map(self._tokenizer.token_bytes, ids)))[-TAIL:]

    def apply(self, mask: Mask, tail: bytes) -> None:
        """Remove the tokens that would exceed a bound after a text with this end."""
        room = _room(tail)
        if room is None or room >= self._longest or (mask & self._quotes).any():  # a quote is possible: in a string
            return
        bounded = mask & self._at_most(max(room, 0))
        if bounded.any():
            mask[:] = bounded

    def _at_most(self, room: int) -> Mask:
        if room not in self._kept:
            self._kept[room] = np.packbits(self._leading <= room, bitorder="little")
        return self._kept[room]


def _room(tail: bytes) -> int | None:
    """How many more digits the number at the end of a text may have; None if no number is there."""
    before = tail.rstrip(DIGITS)
    count = len(tail) - len(before)
    start = tail.rstrip(NUMBER)
    if start == tail or (start and start[-1] not in BEFORE_NUMBER):
        return None
    if before.endswith((b"e", b"E", b"e+", b"e-", b"E+", b"E-")):
        return EXPONENT_DIGITS - count
    return (FRACTION_DIGITS if before.endswith(b".") else INTEGER_DIGITS) - count
