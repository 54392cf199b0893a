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
QUOTED = r"""'[^']*'|"(?:[^"\\]|\\.)*\""""
PIECE = rf"""{QUOTED}|\\.|`[^`]*`|\$\([^()]*\)|\$\{{[^}}]*\}}|\$\w+|[^\s'"`\\();<>|&]"""
LEXEME = re.compile(rf"(?P<skip>[^\S\n]+|\#[^\n]*)|(?P<end>\d*[();<>|&]+|\n)|(?P<word>(?:{PIECE})+)", re.S)
# A line that goes on; quotes and comments are matched to be left out: a comment ends with its line, whatever it ends in
GOES_ON = re.compile(rf"{QUOTED}|\\\r?\n|\\.|(?<![^\s;&|()])\#[^\n]*", re.S)
SETTERS = ("export", "declare", "local", "readonly")
OPENS, CLOSES = ("if", "for", "while", "until", "case"), ("fi", "done", "esac")  # what may not run, or more than once
TESTS = ("[", "[[", "test")
SHOWN = 80  # characters of what follows a command, in a note


def commands(text: str) -> Iterator[tuple[list[str], str]]:
    """The words of each command, without their quotes; and what stands behind it, for a note. A variable has the value
    that an earlier line gave it, or the default that stands beside it; others stay as they are written, and so do those
    that are set where it is not known whether that runs."""
    text = GOES_ON.sub(lambda found: found[0] if found[0][0] == "#" else _joined(found[0]), text)
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


def _joined(text: str) -> str:
    return re.sub(r"\\\r?\n", " ", text)


def _expanded(word: str, values: Mapping[str, str]) -> list[str]:
    """One word, or several or none where a variable stands alone, without quotes. A shell cuts a variable's value by
    its spaces alone: quotes in it are a part of it."""
    text = re.sub(PIECE, lambda piece: _unquoted(piece[0], values), word, flags=re.S)
    found = REFERENCE.fullmatch(word)
    if not found or text == word or REFERENCE.search(text):
        return [text]
    return text.split() if values.get(found[1] or found[2]) == text else split_words(text, "a variable")


def _unquoted(piece: str, values: Mapping[str, str]) -> str:
    if piece[0] == '"':
        parts = ESCAPED.split(piece[1:-1])  # every second one is an escaped character
        return "".join(part if i % 2 else filled(part, values) for i, part in enumerate(parts))
    if piece[0] == "$":
        return filled(piece, values)
    return piece[1:-1] if piece[0] == "'" else piece[1:] if piece[0] == "\\" else piece


def _assigned(words: list[str], whole: bool) -> dict[str, str | None]:
    """The variables that a command sets; None: their values are not known. whole: if it does nothing else."""
    found = [ASSIGNMENT.fullmatch(word) for word in words if word not in SETTERS]
    if whole and not all(found):
        return {}
    return {each[1]: None if set("$`") & set(each[2]) else each[2] for each in found if each}


def filled(text: str, values: Mapping[str, str]) -> str:
    """References to variables: their value, else the default that they name, else a plain reference."""

    def value(found: re.Match[str]) -> str:
        name, sign = found[1] or found[2], found[3] or ""
        if name in values and (values[name] or not sign.startswith(":")):
            return values[name]
        return found[4] if sign.endswith("-") else f"${name}" if found[1] else f"${{{name}}}"

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
