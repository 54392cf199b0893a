"""What the parsers of all tool formats share: beginning a call, streaming its arguments, reading JSON.

A call begins only when it is certain to be one. Until then its text is kept, and text that turns out not to be a call
is content. Each format knows its own marks around a call.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Sequence
from typing import Any

from sparkdraft.text.events import Reader, Reading, ToolArguments, ToolCall
from sparkdraft.text.tools.json_scanner import JsonScanner
from sparkdraft.text.tools.schemas import functions

ARGUMENTS = ("arguments", "parameters")  # Llama's models were taught the second


def quoted(text: str) -> str:
    """A JSON string. Lone surrogates, which no encoding takes, are escaped."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(text)
    return json.dumps(text, ensure_ascii=False)


def read_json(text: str) -> Any:
    """Raises ValueError too for numbers that could not be written again: 1e999, and integers of thousands of digits."""
    return json.loads(text, strict=False, parse_float=_finite, parse_constant=_finite)


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is not a number in JSON")
    return value


class CallReader(Reader):
    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        self.functions = {function.name: function for function in functions(tools)}
        self.index = -1  # number of the call that was begun last
        self.complete = True  # whether its arguments are complete
        super().__init__()

    def begin(self, name: str) -> None:
        self.index += 1
        self.give(ToolCall(self.index, "call_" + secrets.token_hex(12), name))

    def write(self, text: str) -> None:
        """Give out a piece of the arguments of the call that was begun last."""
        self.give(ToolArguments(self.index, text))

    def stream_object(self) -> Reading[bool]:
        """Give out the JSON object that comes next as the arguments; False if it breaks off."""
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
        """Read the JSON object that comes next, without giving anything out."""
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
        """Read the JSON string that comes next."""
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
        """Read `{"name": "x", "arguments": ` up to the brace of the arguments, and return x; None for any other
        form."""
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
        """Read a call written as one JSON object. Its arguments stream if its keys are in the usual order, and come at
        once otherwise. False if there is no call; then all of it is still unread."""
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
    """Whether a text is a JSON object that is not complete yet."""
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
