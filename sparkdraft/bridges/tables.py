"""Tables of other servers' flags, which say what each flag sets here or why it sets nothing, and their reader."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError

VALUE, SWITCH, LIST = "value", "switch", "list"  # after a flag: one value, nothing, or all words up to the next flag
BASE = "sampling base"  # what --sampling-defaults begins with
SAMPLING = "sampling "  # before the name of a value that --sampling-defaults takes
ON, OFF = "true", "false"  # the value of a switch, and of its --no- form
THOUSANDS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True)
class Unread:
    """A flag as given that sets nothing here, or less than it asks for. Without notes, it asks for what is always
    done."""

    name: str  # the long name, if the table has one
    value: str
    words: tuple[str, ...]
    notes: tuple[str, ...]
    near: tuple[str, ...] = ()  # our fields closest to it; where another source sets one of them, the flag is void


@dataclass(slots=True)
class Found:
    """Our fields for flags of another server, with notes on what differs or is missing."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)  # their notes are among those above
    near: tuple[str, ...] = ()  # fields the flag is about but does not set exactly


@dataclass(frozen=True, slots=True)
class Flag:
    names: tuple[str, ...]  # the usual one first; a name with * stands for many flags
    ours: str = ""  # in the docs: our flag, or what replaces it; empty: no counterpart
    remark: str = ""  # in the docs and in notes: what differs, or why there is no counterpart
    kind: str = VALUE
    read: Callable[[str], Found] | None = None  # None: the remark becomes a note


@dataclass(frozen=True, slots=True)
class Server:
    """Another server and its flags. prefix: of its own environment variables."""

    name: str
    flags: tuple[Flag, ...]
    model: Callable[[str], Found]  # reads words that follow no flag
    prefix: str
    variables: tuple[tuple[str, str], ...] = ()  # environment variables that stand for flags
    host: str = ""  # the address it listens on by default
    shorthands: Mapping[str, str] = field(default_factory=dict)  # flags that stand for one key of a JSON flag

    def find(self, name: str) -> Flag | None:
        exact = (flag for flag in self.flags if name in flag.names)
        alike = (flag for flag in self.flags if any("*" in each and fnmatchcase(name, each) for each in flag.names))
        return next(exact, None) or next(alike, None)


def without(path: Path) -> tuple[Flag, ...]:
    """Flags without a counterpart here, from a JSON file: names by what follows them, and why there is none."""
    groups = json.loads(path.read_text(encoding="utf-8"))
    return tuple(
        Flag(tuple(group[kind].split()), "", group["why"], kind)
        for group in groups
        for kind in (VALUE, SWITCH, LIST)
        if kind in group
    )


def field_of(name: str, convert: Callable[[str], Any] = str) -> Callable[[str], Found]:
    """Reads a flag that sets one of our fields."""
    return lambda text: Found({name: convert(text)})


def flag(names: str, ours: str, read: Callable[[str], Found], remark: str = "", kind: str = VALUE) -> Flag:
    """names: separated by spaces."""
    return Flag(tuple(names.split()), ours, remark, kind, read)


def same(names: str, name: str, convert: Callable[[str], Any] = str, remark: str = "", kind: str = VALUE) -> Flag:
    """A flag that sets one of our fields."""
    return flag(names, f"`--{name.replace('_', '-')}`", field_of(name, convert), remark, kind)


def is_on(text: str) -> bool:
    """Reads a switch."""
    return text == ON


def always(text: str) -> Found:
    """Reads a flag that asks for what is always done."""
    return Found()


def first_key(text: str) -> Found:
    """Reads keys separated by commas, of which only the first is used here."""
    first, _, rest = text.partition(",")
    return Found({"api_key": first}, ["--api-key: one key is used, the first"] if rest else [])


def whole(text: str) -> int:
    """Reads a whole number, with a letter as in vLLM: 64k is 64,000 and 64K is 65,536. auto and -1 become 0."""
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
        raise UserError(f"{text} is a variable without a value here: put the number in its place")


def json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"'{text}' is not valid JSON ({error})") from None
    if not isinstance(found, dict):
        raise UserError(f"'{text}' is not a JSON object")
    return found


def read_flags(server: Server, words: Sequence[str]) -> Found:
    """Reads a command line of another server. words: without the program's name."""
    result, words_without = Found(), list[str]()
    for name, value, given in _pieces(server, list(words)):
        flag = server.find(name)
        if not name and words_without:
            raise UserError(
                f"'{value}' follows no flag, and {words_without[0]} is the model already: leave one out, or quote what "
                "belongs together"
            )
        if not name:
            words_without.append(value)
            piece = server.model(value)
        elif flag is None:
            shown = "" if value in (ON, OFF) else f" (its value is {value})"
            piece = Found(notes=[f"{name}: not a known flag of {server.name}{shown}"])
        else:
            piece = _meaning(flag, name, value)
        again = {*piece.values, *piece.near}  # of two flags about the same field, the last one counts
        result.unread = [each for each in result.unread if not again.intersection(each.near)]
        if name and (piece.near or not piece.values):
            result.unread.append(Unread(_long(flag, name), value, given, tuple(piece.notes), piece.near))
        result.unread += piece.unread
        result.values |= piece.values
        result.notes += piece.notes
    return result


def finish_numbers(values: dict[str, Any], notes: list[str]) -> None:
    """Sets the fields that several flags make together."""
    if blocks := values.pop("blocks", 0):
        values["kv_tokens"] = blocks * values.get("block_size", EngineConfig.of().block_size)
    if context := values.pop("context", 0):
        slots = max(values.get("max_seqs", 0), 1)
        each = values.get("max_model_len") or context // slots
        values |= {"kv_tokens": context, "max_model_len": each}
        if slots > 1:
            notes.append(f"--ctx-size {context}: shared by {slots} slots there, so {each} tokens per request")
    if base := values.pop(BASE, ""):
        single = values.get("sampling_defaults")
        values["sampling_defaults"] = f"{base},{single}" if single and base != "model" else single or base
    if sampling := {name: values.pop(name) for name in list(values) if name.startswith(SAMPLING)}:
        values["sampling_defaults"] = ",".join(f"{name[len(SAMPLING) :]}={value:g}" for name, value in sampling.items())


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
    """The long name of a short one, which precedes it in the table."""
    if flag is None or name.startswith("--") or name not in flag.names:
        return name
    return next((each for each in reversed(flag.names[: flag.names.index(name)]) if each.startswith("--")), name)


def _pieces(server: Server, words: list[str]) -> Iterable[tuple[str, str, tuple[str, ...]]]:
    """Yields flags with their values and words, in order. A word that belongs to no flag has the name "". Keys of a
    JSON value that are given one by one (--flag.key value) are joined and come last."""
    parts: dict[str, dict[str, Any]] = {}
    while words:
        word = words.pop(0)
        if not _is_flag(word):
            yield "", word, (word,)
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        key = ""
        if server.find(name) is None or name in server.shorthands:  # a few flags have a dot in their name
            name, _, key = server.shorthands.get(name, name).partition(".")
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
            value = _value(flag, name, words)
            yield name, value, (word, *after[: len(after) - len(words)])
    for name, value_of in parts.items():
        yield name, json.dumps(value_of), (name, json.dumps(value_of))


def _value(flag: Flag | None, name: str, words: list[str]) -> str:
    """Takes what belongs to a flag from the words after it. An unknown flag, or one that only a pattern of the table
    matches, takes one word if it does not look like a flag."""
    if flag and flag.kind == SWITCH:
        return ON
    if flag and flag.kind == LIST:
        taken = []
        while words and not _is_flag(words[0]):
            taken.append(words.pop(0))
        return ",".join(taken)
    if words and not _is_flag(words[0]):
        return words.pop(0)
    if flag is None or name not in flag.names:
        return ON
    raise UserError(f"{name} needs a value, and {words[0] if words else 'nothing'} follows it")


def _is_flag(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not re.fullmatch(r"-\d+(\.\d+)?", word)


def _put(target: dict[str, Any], word: str, keys: list[str], value: str) -> None:
    for key in keys[:-1]:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise UserError(f"{word}: '{key}' already has the value {target!r} and cannot have keys")
    try:
        target[keys[-1]] = json.loads(value)
    except ValueError:
        target[keys[-1]] = value
