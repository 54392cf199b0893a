"""Control tokens belong to the chat template: a user's text that spells one stays text.

Before rendering, `mark` puts a secret word into every user string wherever it spells a control token, or could become
part of one together with the template's own characters. `read` removes the words from the rendered text and remembers
their positions. A control token with such a position inside it was not written by the template alone, and `encode`
gives it the ids of ordinary text.

The secret word consists of letters and digits, so templates may trim, join or JSON-encode it, and is drawn anew in each
process. Tokens that a template looks for in messages, such as </think>, are spared (chat.py): they stay control tokens.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

if TYPE_CHECKING:
    from tokenizers import Encoding

SECRET = f"secret{secrets.token_hex(16)}"


@dataclass(frozen=True, slots=True)
class ChatText:
    """A rendered chat. A control token in `text` is the template's unless one of `marks` is inside it."""

    text: str
    marks: tuple[int, ...] = ()  # positions between characters, ascending


class ControlTokens:
    """The special tokens of one tokenizer that are longer than one character."""

    def __init__(self, raw: RawTokenizer) -> None:
        self._raw = raw
        added = raw.get_added_tokens_decoder().items()
        self._ids = {token.content: index for index, token in added if token.special and len(token.content) > 1}
        longest_first = sorted(self._ids, key=len, reverse=True)  # the order in which the library prefers them
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._max_chars = max(map(len, self._ids), default=0)
        self._heads = frozenset(token[:cut] for token in self._ids for cut in range(1, len(token)))
        self._tails = frozenset(token[cut:] for token in self._ids for cut in range(1, len(token)))

    def mark(self, value: Any, spared: Collection[str] = ()) -> Any:
        """Mark the strings in messages, tools or anything made of lists and mappings, except for the spared tokens."""
        if isinstance(value, str):
            return self._mark_text(value, spared)
        if isinstance(value, Mapping):
            return {self.mark(key, spared): self.mark(item, spared) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item, spared) for item in value]
        return value

    def read(self, rendered: str) -> ChatText:
        """Remove the secret words from the rendered text and note their positions."""
        first, *rest = rendered.split(SECRET)
        marks, position = [], len(first)
        for piece in rest:
            marks.append(position)
            position += len(piece)
        return ChatText("".join([first, *rest]), tuple(marks))

    def _mark_text(self, text: str, spared: Collection[str]) -> str:
        is_spared = text.strip() in spared and text.strip() in self._ids
        edges = () if is_spared else self._edges(text)
        places = sorted({*self._whole(text, spared), *edges})
        borders = [0, *places, len(text)]
        return SECRET.join(text[a:b] for a, b in pairwise(borders)) if places else text

    def _whole(self, text: str, spared: Collection[str]) -> Iterator[int]:
        """Yield a position inside each control token that the text spells."""
        match = self._pattern.search(text)
        while match:
            if match[0] not in spared:
                yield match.start() + 1
            match = self._pattern.search(text, match.start() + 1)

    def _edges(self, text: str) -> Iterator[int]:
        """Yield positions where the text could form a control token together with what the template writes beside it.
        Templates trim the blanks around it."""
        start, core = len(text) - len(text.lstrip()), text.strip()
        sizes = range(1, min(self._max_chars, len(core) + 1))
        if any(core[:size] in self._tails for size in sizes) or self._is_middle(core):
            yield start
        for size in sizes:
            if core[-size:] in self._heads:
                yield start + len(core) - size + 1

    def _is_middle(self, core: str) -> bool:
        """True if the text is an inner part of a control token. Plain words, such as the role in <|user|>, are not."""
        inner = 0 < len(core) < self._max_chars and not core.replace("_", "").isalnum()
        return inner and any(core in token for token in self._ids)

    def encode(self, chat: ChatText) -> list[int]:
        """Encode so that only the template's control tokens become control tokens: they get the secret word before
        them, and a tokenizer that knows them only by this spelling encodes the text."""
        pieces, last = [], 0
        for token in self._by_template(chat):
            pieces += [chat.text[last : token.start()], SECRET, token[0]]
            last = token.end()
        text = "".join([*pieces, chat.text[last:]])
        # As a batch of one, because only then the library releases the GIL.
        return self._own_ids(self._guarded.encode_batch_fast([text], add_special_tokens=False)[0])

    def _by_template(self, chat: ChatText) -> Iterator[re.Match[str]]:
        match = self._pattern.search(chat.text)
        while match:
            following = bisect_right(chat.marks, match.start())
            is_marked = following < len(chat.marks) and chat.marks[following] < match.end()
            if not is_marked:
                yield match
            match = self._pattern.search(chat.text, match.start() + 1 if is_marked else match.end())

    @cached_property
    def _guarded(self) -> RawTokenizer:
        """The tokenizer with the secret word before each control token."""
        guarded = RawTokenizer(self._raw.model)
        if self._raw.normalizer is not None:
            guarded.normalizer = self._raw.normalizer
        if self._raw.pre_tokenizer is not None:
            guarded.pre_tokenizer = self._raw.pre_tokenizer
        for token in self._raw.get_added_tokens_decoder().values():
            is_control = token.content in self._ids
            guarded.add_tokens([_respelled(token, SECRET + token.content) if is_control else token])
        return guarded

    @cached_property
    def _renamed(self) -> dict[int, int]:
        """Ids of added tokens in the guarded tokenizer -> ids in the tokenizer itself."""
        own = {token.content: index for index, token in self._raw.get_added_tokens_decoder().items()}
        added = self._guarded.get_added_tokens_decoder().items()
        return {index: own[token.content.removeprefix(SECRET)] for index, token in added}

    def _own_ids(self, encoding: Encoding) -> list[int]:
        ids: list[int] = []
        control = {index: token for token, index in self._ids.items()}
        for index in encoding.ids:
            if index in self._renamed:
                ids.append(self._renamed[index])
            elif index in control:  # merges formed it from ordinary characters
                ids += [part.id for letter in control[index] for part in self._raw.model.tokenize(letter)]
            else:
                ids.append(index)
        return ids


def _respelled(token: AddedToken, content: str) -> AddedToken:
    return AddedToken(
        content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=True,
    )


def clean(text: str) -> str:
    """Remove the secret words from an error message of a template."""
    return text.replace(SECRET, "")
