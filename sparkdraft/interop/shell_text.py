"""A shell's text, cut into commands and words: quotes, comments, operators, and variables that the text itself sets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

from sparkdraft.core import UserError

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)
# $NAME, ${NAME}, ${NAME:-default}, ${NAME:?message}
REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:?[-?])([^}]*))?\})")
ESCAPED = re.compile(r'\\(["\\$`])')  # within quotes
# Comments, what ends a command (with the number of a stream that is redirected), and pieces of words
PIECE = r"""'[^']*'|"(?:[^"\\]|\\.)*"|\\.|\$\([^()]*\)|\$\{[^}]*\}|\$\w+|[^\s'"\\();<>|&]"""
LEXEME = re.compile(rf"(?P<skip>[^\S\n]+|\#[^\n]*)|(?P<end>\d*[();<>|&]+|\n)|(?P<word>(?:{PIECE})+)", re.S)
SETTERS = ("export", "declare", "local", "readonly")
SHOWN = 80  # characters of what follows a command, in a note


def commands(text: str) -> Iterator[tuple[list[str], str]]:
    """The words of each command, without their quotes; and what stands behind it, for a note. A variable has the value
    that an earlier line gave it, or the default that stands beside it; others stay as they are written."""
    text = text.replace("\\\r\n", " ").replace("\\\n", " ")
    values: dict[str, str] = {}
    words: list[str] = []
    place = 0
    while place < len(text):
        found = LEXEME.match(text, place)
        if found is None:
            raise UserError(f"the command cannot be read: No closing quotation after {text[place : place + 20]}")
        place = found.end()
        if found["word"]:
            words += _expanded(found["word"], values)
        elif found["end"] and words:
            yield words, shortened(text[found.start() :])
            values |= _assigned(words)
            words = []
    if words:
        yield words, ""


def _expanded(word: str, values: Mapping[str, str]) -> list[str]:
    """One word, or several where a variable stands alone, without quotes."""
    whole = REFERENCE.fullmatch(word)
    text = re.sub(PIECE, lambda piece: _unquoted(piece[0], values), word, flags=re.S)
    return split_words(text, "a variable") if whole and text != word and not REFERENCE.search(text) else [text]


def _unquoted(piece: str, values: Mapping[str, str]) -> str:
    if piece[0] == '"':
        parts = ESCAPED.split(piece[1:-1])  # every second one is an escaped character
        return "".join(part if i % 2 else filled(part, values) for i, part in enumerate(parts))
    if piece[0] == "$":
        return filled(piece, values)
    return piece[1:-1] if piece[0] == "'" else piece[1:] if piece[0] == "\\" else piece


def _assigned(words: list[str]) -> dict[str, str]:
    """The variables of a command that does nothing but set them, where their values are known."""
    found = [ASSIGNMENT.fullmatch(word) for word in words if word not in SETTERS]
    pairs = {each[1]: each[2] for each in found if each}
    return {name: value for name, value in pairs.items() if not set("$`") & set(value)} if all(found) else {}


def filled(text: str, values: Mapping[str, str]) -> str:
    """References to variables: their value, else the default that they name, else a plain reference."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        default = found[4] if found[3] in ("-", ":-") else f"${name}"
        return values.get(name) or default

    return REFERENCE.sub(value, text)


def split_words(text: str, what: str) -> list[str]:
    """Words that no shell sees, only a splitter of words. Raises UserError. what: where they stand."""
    try:
        return shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise UserError(f"{what} cannot be read: {error} in {shortened(text)}") from None


def shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."
