"""A table of another server's flags: what each one sets here, or why nothing does; and a command line read by it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from sparkdraft.core import UserError

VALUE, SWITCH, LIST = "value", "switch", "list"  # what follows a flag: one value, nothing, or all up to the next flag
ON, OFF = "true", "false"  # the value of a switch, and of its --no- form
THOUSANDS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True)
class Unread:
    """A flag that sets nothing here, or not all that it asks for, as it was given, and why; without a note, it asks for
    what is always done."""

    name: str  # the long one, where the table has it
    value: str
    words: tuple[str, ...]
    notes: tuple[str, ...]
    near: tuple[str, ...] = ()  # our fields that come near to it: where one is set by what beats it, it is void


@dataclass(slots=True)
class Found:
    """What a flag means here: our fields, and sentences for what is different or missing."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)  # their notes are among those above
    near: tuple[str, ...] = ()  # our fields that the flag is about, where they are not quite what it asks for


@dataclass(frozen=True, slots=True)
class Flag:
    names: tuple[str, ...]  # the first is the usual one; one with a star stands for many flags without a counterpart
    ours: str = ""  # in the docs: our flag, or what replaces it; empty: there is no counterpart
    remark: str = ""  # in the docs and in notes: what is different, or why nothing corresponds to it
    kind: str = VALUE
    read: Callable[[str], Found] | None = None  # None: the remark is all there is to say


@dataclass(frozen=True, slots=True)
class Server:
    """Another server: its name, its flags, and the prefix of variables that are its own."""

    name: str
    flags: tuple[Flag, ...]
    model: Callable[[str], Found]  # what the words mean that follow no flag
    prefix: str
    variables: tuple[tuple[str, str], ...] = ()  # variables that stand for flags
    host: str = ""  # the address that it listens on where no flag names one
    shorthands: Mapping[str, str] = field(default_factory=dict)  # flags that stand for a key of a JSON flag

    def find(self, name: str) -> Flag | None:
        exact = (flag for flag in self.flags if name in flag.names)
        alike = (flag for flag in self.flags if any("*" in each and fnmatchcase(name, each) for each in flag.names))
        return next(exact, None) or next(alike, None)


def without(*rows: tuple[str, str, str]) -> tuple[Flag, ...]:
    """Flags that nothing here corresponds to: their names, why, and what follows them."""
    return tuple(Flag(tuple(names.split()), "", remark, kind) for names, remark, kind in rows)


def field_of(name: str, convert: Callable[[str], Any] = str) -> Callable[[str], Found]:
    """A reader for a flag that sets one of our fields."""
    return lambda text: Found({name: convert(text)})


def flag_of(name: str, negated: bool = False) -> Callable[[str], Found]:
    """A reader for a switch that sets one of our fields."""
    return lambda text: Found({name: (text == ON) != negated})


def always(text: str) -> Found:
    """A reader for a flag that asks for what is always done."""
    return Found()


def first_key(text: str) -> Found:
    """A reader for keys that are separated by commas: one is used here."""
    first, _, rest = text.partition(",")
    return Found({"api_key": first}, ["--api-key: one key is used, the first"] if rest else [])


def whole(text: str) -> int:
    """A whole number, also with a letter as vLLM allows: 64k is 64,000 and 64K is 65,536. Auto and -1 are our 0."""
    if text.lower() == "auto" or text == "-1":
        return 0
    _check_known(text)
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", text)
    if not found:
        raise UserError(f"'{text}' is not a whole number")
    return int(float(found[1]) * THOUSANDS.get(found[2], 1))


def number(text: str) -> float:
    _check_known(text)
    try:
        return float(text)
    except ValueError:
        raise UserError(f"'{text}' is not a number") from None


def _check_known(text: str) -> None:
    if text.startswith("$"):
        raise UserError(f"{text} is a variable, and nothing here gives it a value: put the number in its place")


def json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"'{text}' is not valid JSON ({error})") from None
    if not isinstance(found, dict):
        raise UserError(f"'{text}' is not a JSON object")
    return found


def read_flags(server: Server, words: Sequence[str]) -> Found:
    """Our fields for a command line of another server, without the program's name."""
    result, words_without = Found(), list[str]()
    for name, value, given in _pieces(server, list(words)):
        flag = server.find(name)
        if not name and words_without:
            raise UserError(
                f"'{value}' follows no flag, and {words_without[0]} is the model already: leave one out, or put what "
                "belongs together into quotes"
            )
        if not name:
            words_without.append(value)
            piece = server.model(value)
        elif flag is None:
            piece = Found(notes=[f"{name}: not a flag of {server.name} that is known here{_shown(value)}"])
        else:
            piece = _meaning(flag, name, value)
        again = {*piece.values, *piece.near}  # of two flags about the same, the last one holds
        result.unread = [each for each in result.unread if not again.intersection(each.near)]
        if name and (piece.near or not piece.values):
            result.unread.append(Unread(_long(flag, name), value, given, tuple(piece.notes), piece.near))
        result.unread += piece.unread
        result.values |= piece.values
        result.notes += piece.notes
    return result


def _meaning(flag: Flag, name: str, value: str) -> Found:
    if flag.read is None:
        return Found(notes=[f"{name}: {flag.remark}"])
    if flag.read is always and value == OFF:
        return Found(notes=[f"--no-{name[2:]}: it is always on here"])
    try:
        return flag.read(value)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


def _long(flag: Flag | None, name: str) -> str:
    """The long name of a short one, which stands before it in the table."""
    if flag is None or name.startswith("--") or name not in flag.names:
        return name
    return next((each for each in reversed(flag.names[: flag.names.index(name)]) if each.startswith("--")), name)


def _shown(value: str) -> str:
    return f" (its value is {value})" if value not in (ON, OFF) else ""


def _pieces(server: Server, words: list[str]) -> Iterable[tuple[str, str, tuple[str, ...]]]:
    """Flags with their values and their words, in order; a word that belongs to no flag has the name "". The parts of a
    JSON value that are given one by one (--flag.key value) are put together, and come last."""
    parts: dict[str, dict[str, Any]] = {}
    while words:
        word = words.pop(0)
        if not _is_flag(word):
            yield "", word, (word,)
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if server.find(name) is None or name in server.shorthands:  # a few flags have a dot in their names
            name, _, key = server.shorthands.get(name, name).partition(".")
        else:
            key = ""
        flag = server.find(name)
        if flag is None and name.startswith("--no-") and server.find("--" + name[5:]):
            yield "--" + name[5:], OFF, (word,)
        elif key:
            value = value if equals or not words else words.pop(0)
            _put(parts.setdefault(name, {}), word.partition("=")[0], key.replace("-", "_").split("."), value)
        elif equals:
            yield name, value, (word,)
        else:
            after = list(words)
            value = _value(flag, words)
            yield name, value, (word, *after[: len(after) - len(words)])
    for name, value_of in parts.items():
        yield name, json.dumps(value_of), (name, json.dumps(value_of))


def _value(flag: Flag | None, words: list[str]) -> str:
    """Take what belongs to a flag from the words after it. A flag that is not known takes one word that is none."""
    if flag and flag.kind == SWITCH:
        return ON
    if flag and flag.kind == LIST:
        taken = []
        while words and not _is_flag(words[0]):
            taken.append(words.pop(0))
        return ",".join(taken)
    follows = words[0] if words else "nothing"
    if words and not _is_flag(follows):
        return words.pop(0)
    if flag is None or "*" in flag.names[0]:
        return ON
    raise UserError(f"{flag.names[0]} needs a value, and {follows} follows it")


def _is_flag(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not re.fullmatch(r"-\d+(\.\d+)?", word)


def _put(target: dict[str, Any], word: str, keys: list[str], value: str) -> None:
    for key in keys[:-1]:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise UserError(f"{word}: '{key}' has a value already, {target!r}, and can have no parts")
    try:
        target[keys[-1]] = json.loads(value)
    except ValueError:
        target[keys[-1]] = value
