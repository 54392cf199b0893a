"""Splits shell text into commands and words, with quotes, comments, operators and variables that the text sets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

from sparkdraft.core import UserError

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)
# $NAME, ${NAME}, ${NAME:-default}, ${NAME:?message}
REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:?[-?])([^}]*))?\})")
ESCAPED = re.compile(r'\\(["\\$`])')  # within quotes
# Comments, operators that end a command (with the number of a redirected stream), and pieces of words
QUOTED = r"""'[^']*'|"(?:[^"\\]|\\.)*\""""
PIECE = rf"""{QUOTED}|\\.|`[^`]*`|\$\([^()]*\)|\$\{{[^}}]*\}}|\$\w+|[^\s'"`\\();<>|&]"""
LEXEME = re.compile(rf"(?P<skip>[^\S\n]+|\#[^\n]*)|(?P<end>\d*[();<>|&]+|\n)|(?P<word>(?:{PIECE})+)", re.S)
# A continued line. Quotes and comments match too, to be skipped: a backslash at the end of a comment continues nothing.
GOES_ON = re.compile(rf"{QUOTED}|\\\r?\n|\\.|(?<![^\s;&|()])\#[^\n]*", re.S)
SETTERS = ("export", "declare", "local", "readonly")
# The code between these may run never, or more than once
OPENS, CLOSES = ("if", "for", "while", "until", "case"), ("fi", "done", "esac")
TESTS = ("[", "[[", "test")
SHOWN = 80  # characters of the rest of a command in a note


def commands(text: str) -> Iterator[tuple[list[str], str]]:
    """Yields the words of each command, unquoted, and the text after it, for a note. A variable gets the value from an
    earlier line, or the default given with it. Others stay as written, also those set in code that may not run."""
    text = GOES_ON.sub(lambda found: found[0] if found[0][0] == "#" else re.sub(r"\\\r?\n", " ", found[0]), text)
    values: dict[str, str] = {}
    words: list[str] = []
    place, depth, is_sure = 0, 0, True
    while place < len(text):
        found = LEXEME.match(text, place)
        if found is None:
            raise UserError(f"the command cannot be read: No closing quotation after {text[place : place + 20]}")
        place = found.end()
        if found["word"]:
            words += _expanded(found["word"], values)
        elif found["end"] and words:
            yield words, shortened(text[found.start() :])
            depth = max(depth + (words[0] in OPENS) - (words[0] in CLOSES), 0)
            for name, value in _assigned(words, whole=not depth).items():
                if value is None or depth or not is_sure:
                    values.pop(name, None)
                else:
                    values[name] = value
            is_sure = found["end"] != "||" and not (found["end"] == "&&" and words[0] in TESTS)
            words = []
    if words:
        yield words, ""


def _expanded(word: str, values: Mapping[str, str]) -> list[str]:
    """Expands a word: to several or none if it is an unquoted variable. A shell splits a variable's value at spaces
    only; quotes in it are literal."""
    text = re.sub(PIECE, lambda piece: _unquoted(piece[0], values), word, flags=re.S)
    found = REFERENCE.fullmatch(word)
    if not found or text == word or REFERENCE.search(text):
        return [text]
    return text.split() if values.get(found[1] or found[2]) == text else split_words(text, "a variable")


def _unquoted(piece: str, values: Mapping[str, str]) -> str:
    if piece[0] == '"':
        parts = ESCAPED.split(piece[1:-1])  # every second part is an escaped character
        return "".join(part if i % 2 else filled(part, values) for i, part in enumerate(parts))
    if piece[0] == "$":
        return filled(piece, values)
    return piece[1:-1] if piece[0] == "'" else piece[1:] if piece[0] == "\\" else piece


def _assigned(words: list[str], whole: bool) -> dict[str, str | None]:
    """Returns the variables that a command sets, None if the value is unknown. whole: only if it does nothing else."""
    found = [ASSIGNMENT.fullmatch(word) for word in words if word not in SETTERS]
    if whole and not all(found):
        return {}
    return {each[1]: None if set("$`") & set(each[2]) else each[2] for each in found if each}


def filled(text: str, values: Mapping[str, str]) -> str:
    """Replaces references to variables by their value or default; others become plain references."""

    def value(found: re.Match[str]) -> str:
        name, sign = found[1] or found[2], found[3] or ""
        if name in values and (values[name] or not sign.startswith(":")):
            return values[name]
        return found[4] if sign.endswith("-") else f"${name}" if found[1] else f"${{{name}}}"

    return REFERENCE.sub(value, text)


def split_words(text: str, what: str) -> list[str]:
    """Splits words that no shell expands. Raises UserError. what: where they come from."""
    try:
        return shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise UserError(f"{what} cannot be read: {error} in {shortened(text)}") from None


def shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."
