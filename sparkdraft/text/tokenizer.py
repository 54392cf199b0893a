"""Text to ids and ids to bytes, over the `tokenizers` library.

Decoding uses a growing table of the exact bytes of each id; detokenize.py turns the bytes into characters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from sparkdraft.core import UserError
from sparkdraft.text.control import ChatText, ControlTokens
from sparkdraft.text.families import stop_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RawTokenizer

    from sparkdraft.weights.checkpoint import Checkpoint

BYTE_LEVEL, SENTENCEPIECE, METASPACE = "byte level", "sentencepiece", "metaspace"
SPACE = "▁"


def byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for the 256 bytes: printable bytes stand for themselves, the others begin at U+0100."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = byte_alphabet()


class Vocabulary(Protocol):
    """The part of a tokenizer that turns ids into text."""

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token: int, skip_special: bool = True) -> bytes: ...

    def first_bytes(self, token: int, skip_special: bool = True) -> bytes: ...

    def is_special(self, token: int) -> bool: ...


class Tokenizer:
    """`strips_space`: the first token of a text loses one leading space (SentencePiece adds one before encoding)."""

    def __init__(
        self,
        raw: RawTokenizer,
        special: dict[str, str] | None = None,
        config: dict[str, Any] | None = None,
        generation: dict[str, Any] | None = None,
    ) -> None:
        self.raw = raw
        raw.no_truncation()  # some tokenizer.json files truncate or pad, as in training
        raw.no_padding()
        self.special = special or {}
        self._table: dict[int, bytes] = {}  # filled on demand: a whole vocabulary takes 0.2 s
        self._kind, self.strips_space = _decoder_kind(raw)
        self.vocab_size = raw.get_vocab_size(with_added_tokens=True)
        added = raw.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.eos_ids = stop_ids(generation or {}, config or {}, self.special.get("eos_token"), raw.token_to_id)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Tokenizer:
        return cls(checkpoint.tokenizer_json(), checkpoint.special, checkpoint.config, checkpoint.generation)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Encode a plain prompt, in which spelled control tokens become control tokens (unlike in `encode_chat`)."""
        _check_unicode(text)
        # As a batch of one, because only then the library releases the GIL.
        return list(self.raw.encode_batch_fast([text], add_special_tokens=add_special)[0].ids)

    def encode_chat(self, chat: ChatText) -> list[int]:
        """Encode a chat, in which only the template's control tokens become control tokens."""
        if not chat.marks:
            return self.encode(chat.text, add_special=False)
        _check_unicode(chat.text)
        return self.control.encode(chat)

    @cached_property
    def control(self) -> ControlTokens:
        return ControlTokens(self.raw)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self.raw.decode(list(ids), skip_special_tokens=skip_special)

    def is_special(self, token: int) -> bool:
        return token in self.special_ids

    def token_bytes(self, token: int, skip_special: bool = True) -> bytes:
        """The bytes that an id adds to a text; b"" for an id out of range and for a skipped special id."""
        if skip_special and token in self.special_ids:
            return b""
        data = self._table.get(token)
        if data is None:
            data = self._table[token] = self._bytes_of(token)
        return data

    def first_bytes(self, token: int, skip_special: bool = True) -> bytes:
        """As `token_bytes`, for the first token of a text, which may lose the space that encoding put before it."""
        data = self.token_bytes(token, skip_special)
        if self.strips_space and self._kind == METASPACE:
            return data.replace(b" ", b"")  # this decoder drops every space in its first token
        return data[1:] if self.strips_space and data.startswith(b" ") else data

    def _bytes_of(self, index: int) -> bytes:
        token = self.raw.id_to_token(index) if 0 <= index < 2**32 else None
        if token is None:
            return b""
        return _byte_level_bytes(token) if self._kind == BYTE_LEVEL else _sentencepiece_bytes(token)


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"The text is not valid UTF-8 (character {error.start:,} is a lone surrogate): send valid Unicode text."
        ) from None


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([BYTE_OF[letter] for letter in token])
    except KeyError:  # not in the alphabet: an added token, plain text
        return token.encode("utf-8", "replace")


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(SPACE, " ").encode("utf-8", "replace")


def _decoder_kind(raw: RawTokenizer) -> tuple[str, bool]:
    """The kind of the decoder, and whether it removes a leading space."""
    if raw.decoder is None:
        raise UserError("The tokenizer has no decoder, so its ids cannot become text: fetch tokenizer.json again.")
    state = json.loads(raw.decoder.__getstate__())
    steps = state.get("decoders", [state])
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        return BYTE_LEVEL, False
    if kinds == ["Metaspace"]:
        return METASPACE, steps[0].get("prepend_scheme", "always") != "never"
    if {"Replace", "ByteFallback"} & set(kinds) and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return SENTENCEPIECE, any(step["type"] == "Strip" and step.get("start", 0) > 0 for step in steps)
    raise UserError(
        f"The tokenizer decodes by {' + '.join(kinds)}, and byte-level and SentencePiece decoders are read: "
        "use a model with one of those."
    )
