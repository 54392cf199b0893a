"""Shared parts of tool-call parsers: `CallReader` begins a call and streams its arguments, and `JsonScanner` finds the
end of a JSON object in text that arrives in pieces.

A call begins only when it is certain to be one; text that turns out not to be a call is content.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Sequence
from typing import Any

from sparkdraft.text.events import Reader, Reading, ToolArguments, ToolCall
from sparkdraft.text.tools.base import functions

ARGUMENTS = ("arguments", "parameters")  # Llama's models write the second
MAX_DEPTH = 64
VALUE, FIRST_ITEM, FIRST_KEY, KEY, COLON, AFTER, STRING, ESCAPE, HEX, WORD = range(10)
PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # characters of a JSON string that need no escape
WORD_LETTERS = re.compile(r"[-+.\w]+", re.ASCII)
LITERAL = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
PYTHON = {"True": "true", "False": "false", "None": "null"}
SPACE = " \t\r\n"


def quoted(text: str) -> str:
    """Write a JSON string. Lone surrogates, which UTF-8 cannot encode, are escaped."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(text)
    return json.dumps(text, ensure_ascii=False)


def read_json(text: str) -> Any:
    """Parse JSON. Raises ValueError also for numbers that cannot be written again, such as 1e999."""
    return json.loads(text, strict=False, parse_float=_finite, parse_constant=_finite)


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is not a number in JSON")
    return value


def literal(word: str) -> str | None:
    """A number, true, false or null as JSON writes it; None for any other word."""
    word = PYTHON.get(word, word)
    return word if LITERAL.fullmatch(word) else None


class JsonScanner:
    """An automaton with a stack of its own. It repairs raw line breaks in strings, backslashes that escape nothing, and
    Python's True, False and None. inside: begin within an object, after one of its members."""

    def __init__(self, inside: bool = False) -> None:
        self.done = False
        self.broken = False
        self._stack = ["{"] if inside else []
        self._state = AFTER if inside else VALUE
        self._is_key = False
        self._word = ""  # a number or name that may continue, or the letters of an escape: not given out yet

    def push(self, text: str, start: int = 0) -> tuple[int, str]:
        """Scan text; returns how far the object reaches in it, and its repaired text. A character or word that cannot
        belong to the object sets `broken`."""
        at, out = start, []
        while at < len(text) and not self.done and not self.broken:
            if self._state == STRING and (run := PLAIN.match(text, at)):
                out.append(run.group())
                at = run.end()
            elif self._state == WORD and (run := WORD_LETTERS.match(text, at)):
                self._word += run.group()
                at = run.end()
            elif self._state == WORD:
                word = literal(self._word)
                out.append(self._word if word is None else word)
                self._word, self._state, self.broken = "", AFTER, word is None
            elif (piece := self._step(text[at])) is None:
                self.broken = True
            else:
                out.append(piece)
                at += 1
        return at, "".join(out)

    def rest(self) -> str:
        """The text that was not given out when the text ended early."""
        return ("\\" if self._state in (ESCAPE, HEX) else "") + self._word

    def _step(self, letter: str) -> str | None:
        """Take one character and return its text; None if it is not allowed here."""
        if self._state == STRING:
            return self._in_string(letter)
        if self._state == ESCAPE:
            return self._escape(letter)
        if self._state == HEX:
            return self._hex(letter)
        if letter in SPACE:
            return letter if self._stack else None
        if self._state == COLON:
            self._state = VALUE
            return letter if letter == ":" else None
        if letter in "]}":
            return self._close(letter)
        if self._state == AFTER:
            self._state = KEY if self._stack[-1] == "{" else VALUE
            return letter if letter == "," else None
        if self._state in (KEY, FIRST_KEY):
            self._state, self._is_key = STRING, True
            return letter if letter == '"' else None
        return self._open(letter)

    def _open(self, letter: str) -> str | None:
        if not self._stack and letter != "{":
            return None
        if letter in "{[":
            self._stack.append(letter)
            self._state = FIRST_KEY if letter == "{" else FIRST_ITEM
            return letter if len(self._stack) <= MAX_DEPTH else None
        if letter == '"':
            self._state, self._is_key = STRING, False
            return letter
        if WORD_LETTERS.match(letter):
            self._state, self._word = WORD, letter
            return ""
        return None

    def _close(self, letter: str) -> str | None:
        empty = FIRST_KEY if letter == "}" else FIRST_ITEM
        if not self._stack or self._stack[-1] != ("{" if letter == "}" else "[") or self._state not in (AFTER, empty):
            return None
        self._stack.pop()
        self._state, self.done = AFTER, not self._stack
        return letter

    def _in_string(self, letter: str) -> str:
        if letter == '"':
            self._state = COLON if self._is_key else AFTER
            return letter
        if letter == "\\":
            self._state = ESCAPE
            return ""
        return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(letter, f"\\u{ord(letter):04x}")

    def _escape(self, letter: str) -> str:
        if letter == "u":
            self._state, self._word = HEX, "u"
            return ""
        self._state = STRING
        if letter == "'":
            return letter
        if letter in '"\\/bfnrt':
            return "\\" + letter
        return "\\\\" + (letter if letter >= " " else self._in_string(letter))

    def _hex(self, letter: str) -> str:
        if letter in "0123456789abcdefABCDEF":
            self._word += letter
            if len(self._word) < 5:
                return ""
            word, self._word, self._state = self._word, "", STRING
            return "\\" + word
        word, self._word, self._state = self._word, "", STRING
        return "\\\\" + word + self._in_string_or_plain(letter)

    def _in_string_or_plain(self, letter: str) -> str:
        return self._in_string(letter) if letter in '"\\' or letter < " " else letter


class CallReader(Reader):
    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        self.functions = {function.name: function for function in functions(tools)}
        self.index = -1  # number of the current call
        self.complete = True  # whether its arguments are complete
        super().__init__()

    def begin(self, name: str) -> None:
        self.index += 1
        self.give(ToolCall(self.index, "call_" + secrets.token_hex(12), name))

    def write(self, text: str) -> None:
        """Give out a piece of the current call's arguments."""
        self.give(ToolArguments(self.index, text))

    def stream_object(self) -> Reading[bool]:
        """Stream the next JSON object as the arguments; False if it breaks off."""
        scanner = JsonScanner()
        while True:
            self.at, piece = scanner.push(self.text, self.at)
            self.write(piece)
            if scanner.done:
                return True
            if scanner.broken:
                return False
            if not (yield from self.more()):
                self.write(scanner.rest())
                return False

    def whole_object(self, inside: bool = False) -> Reading[dict[str, Any] | None]:
        """Read the next JSON object, without giving anything out."""
        scanner, out = JsonScanner(inside), ""
        while not scanner.done:
            self.at, piece = scanner.push(self.text, self.at)
            out += piece
            if scanner.broken or (not scanner.done and not (yield from self.more())):
                return None
        try:
            return {} if inside else dict(read_json(out))
        except ValueError:
            return None

    def string(self) -> Reading[str | None]:
        if not (yield from self.skip('"')):
            return None
        start, escaped = self.at, False
        while escaped or (yield from self.peek()) != '"':
            if not (letter := (yield from self.peek())):
                return None
            escaped = letter == "\\" and not escaped
            self.at += 1
        self.at += 1
        try:
            return str(json.loads('"' + self.text[start : self.at], strict=False))
        except ValueError:
            return None

    def head(self) -> Reading[str | None]:
        """Read `{"name": "x", "arguments": ` up to the brace of the arguments, and return x; None: any other form."""
        if not (yield from self.skip("{")) or not (yield from self._key(("name",))):
            return None
        name = yield from self.string()
        yield from self.skip_space()
        if not name or not (yield from self.skip(",")) or not (yield from self._key(ARGUMENTS)):
            return None
        return name if (yield from self.peek()) == "{" else None

    def _key(self, names: Sequence[str]) -> Reading[bool]:
        yield from self.skip_space()
        if (yield from self.string()) not in names:
            return False
        yield from self.skip_space()
        if not (yield from self.skip(":")):
            return False
        yield from self.skip_space()
        return True

    def json_call(self) -> Reading[bool]:
        """Read a call written as one JSON object; False, with nothing read, if there is none. The arguments stream
        where the keys are in the usual order."""
        start = self.at
        name = yield from self.head()
        if name is None:
            self.at = start
            call = call_of((yield from self.whole_object()))
            if call is not None:
                self.begin(call[0])
                self.complete = True
                self.write(json.dumps(call[1], ensure_ascii=False))
            return call is not None
        self.begin(name)
        self.complete = yield from self.stream_object()
        if self.complete:
            yield from self._rest_of_object()
        return True

    def _rest_of_object(self) -> Reading[None]:
        """Skip other members after the arguments; a missing closing brace is accepted."""
        yield from self.skip_space()
        ended = yield from self.skip("}")
        if not ended and (yield from self.peek()) == "," and (yield from self.whole_object(inside=True)) is None:
            self.at = 0
        self.cut()


def is_half_object(text: str) -> bool:
    """True if a text is a JSON object that is not complete yet."""
    scanner = JsonScanner()
    scanner.push(text)
    return bool(text) and not scanner.done and not scanner.broken


def call_of(value: dict[str, Any] | None) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments of an object that is a call. Some models write the arguments as a string of JSON."""
    if value is None or not isinstance(name := value.get("name"), str) or not name:
        return None
    arguments: Any = next((value[key] for key in ARGUMENTS if key in value), {})
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments or "{}")
        except (ValueError, RecursionError):
            return None
    if arguments is None:  # of a function without parameters
        arguments = {}
    return (name, arguments) if isinstance(arguments, dict) else None
