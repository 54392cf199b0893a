"""Calls in Gemma 4's own notation, whose marks are special tokens.

    <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3,units:[<|"|>C<|"|>]}<tool_call|>

Keys are bare, strings are between <|"|> marks, and the rest looks like JSON; it is streamed as JSON. Strings without
their opening marks, and with plain quotes, are read too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from sparkdraft.text.events import Content, Event, Parser, Reading, ToolArguments
from sparkdraft.text.tools.base import (
    Function,
    Messages,
    ToolFormat,
    Tools,
    calls_of,
    choices_of,
    content_text,
    function_of,
    lark,
    with_objects,
)
from sparkdraft.text.tools.calls import MAX_DEPTH, CallReader, literal, quoted

OPEN, CLOSE, QUOTE, RESPONSE = "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>"
SIMPLE = {"string": "string", "integer": "INTEGER", "number": "NUMBER", "boolean": "boolean", "null": '"null"'}
BAD_KEY = re.compile(r"[:,{}\[\]<>\"'\s]")  # keys have no quotes, so these cannot be in them
HALF_HEAD = re.compile(r"\s*(?:c|ca|cal|call|call:[^{<\n]*)?")  # of a call that the end of the text cut
KEY_BEFORE = re.compile(r"[,{\[]\s*([^,:{}\[\]]+:)?\s*$")  # the mark after this opens the next string


class _Broken(Exception):
    """The text does not continue as a call; what was not given out yet is content."""


class Gemma4Parser(CallReader):
    def read(self) -> Reading[None]:
        while True:
            tags = (OPEN,) if self.complete else (OPEN, CLOSE)
            tag = yield from self.copy_until(tags, Content)
            if not tag:
                return
            before = self.space + tag
            if tag == CLOSE:
                self.complete = True
            elif not (yield from self._call()):
                self.at = 0
                if self.was_cut and HALF_HEAD.fullmatch(self.text):
                    return
                self.give(Content(before))

    def _call(self) -> Reading[bool]:
        yield from self.skip_space()
        if not (yield from self.skip("call:")):
            return False
        end, mark = yield from self.find(("{", "<", "\n"))
        name = self.text[self.at : end].strip()
        if mark != "{" or not name:
            return False
        self.at = end
        self.begin(name)
        self.complete = False
        try:
            yield from self._value(0)
        except _Broken:
            self.at = len(self.text) if self.ended else 0
            self.write(self.text[: self.at])  # it was cut off: the rest stays with its call
            return True
        self.complete = True
        yield from self.skip_space(" \t\r\n}")
        for mark in (CLOSE, RESPONSE):
            yield from self.skip(mark)
            yield from self.skip_space()
        if self.was_cut and any(mark.startswith(self.text[self.at :]) for mark in (CLOSE, RESPONSE)):
            self.at = len(self.text)  # half a mark
        self.cut()
        return True

    def _value(self, depth: int) -> Reading[None]:
        letter = yield from self.peek()
        if depth > MAX_DEPTH:
            raise _Broken
        if letter in ("{", "["):
            yield from self._members(letter, depth)
        elif letter == "<" and (yield from self.skip(QUOTE)):
            self.write('"')
            mark = yield from self.copy_until((QUOTE, CLOSE), self._letters, hold_space=False)
            if mark != QUOTE:
                raise _Broken
            self.write('"')
        elif letter in ("'", '"') and (text := (yield from self._plainly_quoted(letter))) is not None:
            self.write(quoted(text))
        else:
            self.at = 0
            yield from self._bare()

    def _letters(self, text: str) -> Event:
        return ToolArguments(self.index, quoted(text)[1:-1])

    def _members(self, opening: str, depth: int) -> Reading[None]:
        closing, first = {"{": "}", "[": "]"}[opening], True
        self.at += 1
        self.write(opening)
        while True:
            yield from self.skip_space()
            comma = not first and (yield from self.skip(","))
            yield from self.skip_space()
            if (yield from self.skip(closing)):
                return self.write(closing)
            if not first and not comma:
                raise _Broken
            key = (yield from self._name()) + ": " if opening == "{" else ""
            yield from self.skip_space()
            if not (yield from self.peek()):
                raise _Broken
            self.write(("" if first else ", ") + key)
            yield from self._value(depth + 1)
            first = False

    def _name(self) -> Reading[str]:
        mark = QUOTE if (yield from self.peek()) == "<" else '"'
        if (yield from self.skip(mark)):
            end, found = yield from self.find((mark, CLOSE))
            key, self.at = self.text[self.at : end], end + len(found)
            yield from self.skip_space()
        else:
            end, found = yield from self.find((":", ",", "}", "]", "<"))
            key, self.at = self.text[self.at : end].strip(), end
        if not found or not key or not (yield from self.skip(":")):
            raise _Broken
        return quoted(key)

    def _plainly_quoted(self, letter: str) -> Reading[str | None]:
        if letter == '"':
            return (yield from self.string())
        end, mark = yield from self.find(("',", "'}", "']", CLOSE))
        if mark in ("", CLOSE) or end == self.at:  # the last case: what looked like its beginning is an end
            return None
        text, self.at = self.text[self.at + 1 : end], end + 1
        return text

    def _bare(self) -> Reading[None]:
        """Read a number, true, false or null; else a string without its opening mark, or without both."""
        end, mark = yield from self.find((",", "}", "]", QUOTE, CLOSE))
        word = literal(self.text[self.at : end].strip())
        if mark in (",", "}", "]") and word is not None:
            self.at = end
            return self.write(word)
        far, mark = yield from self.find((QUOTE, CLOSE))
        if not mark:
            raise _Broken
        text = self.text[self.at : far]
        if mark == QUOTE and not KEY_BEFORE.search(text):
            self.at = far + len(QUOTE)
        else:
            text = self.text[self.at : end]
            self.at = end
        self.write(quoted(text.strip()))


class Gemma4(ToolFormat):
    name = "gemma4"
    keep_special = True

    def parser(self, tools: Tools) -> Parser:
        return Gemma4Parser(tools)

    def history(self, messages: Messages) -> list[dict[str, Any]]:
        """Put results into the turn that asked for them, because some versions of the template look only there."""
        out: list[dict[str, Any]] = []
        for message in messages:
            if message.get("role") == "tool" and out and calls_of(out[-1]):
                out[-1].setdefault("tool_responses", []).append(_response(message, out[-1]))
            else:
                out.append(with_objects(message))
        return out

    def call_rules(self, rule: str, function: Function) -> str:
        rules: list[str] = []
        arguments = _Rules(function, rule, rules).object(function.schema, 0)
        return "\n".join([f"{rule}: {OPEN} {lark('call:' + function.name)} {arguments} {CLOSE}", *rules])

    def common_rules(self) -> str:
        return "\n".join(
            [
                f"string: {QUOTE} TEXT {QUOTE}",
                "TEXT: /(?s:.*)/",
                "INTEGER: /-?(0|[1-9][0-9]{0,17})/",
                "NUMBER: /-?(0|[1-9][0-9]{0,17})(\\.[0-9]{1,17})?([eE][-+]?[0-9]{1,2})?/",
                'boolean: "true" | "false"',
                'any_value: string | NUMBER | boolean | "null" | any_object | any_list',
                'any_object: "{" (any_member ("," any_member)*)? "}"',
                'any_member: /[^:,{}\\[\\]<>"\'\\s]+/ ":" any_value',
                'any_list: "[" (any_value ("," any_value)*)? "]"',
            ]
        )


def _response(message: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    names = {call.get("id"): function_of(call).get("name") for call in calls_of(asked)}
    text = content_text(message.get("content"))
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    name = names.get(message.get("tool_call_id")) or message.get("name") or "unknown"
    return {"name": name, "response": value if isinstance(value, dict) else text}


class _Rules:
    """Turns a schema into Lark: the common kinds of values, and any value for rarer ones."""

    def __init__(self, function: Function, prefix: str, rules: list[str]) -> None:
        self._function, self._prefix, self._rules = function, prefix, rules
        self._names: dict[int, str] = {}

    def _named(self, body: str) -> str:
        name = f"{self._prefix}_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def value(self, schema: Any, depth: int) -> str:
        """A rule per part of the schema, whose name is known before its body, because a part may contain itself."""
        schema = self._function.resolve(schema)
        if not isinstance(schema, dict) or depth > MAX_DEPTH // 2:
            return "any_value"
        if id(schema) not in self._names:
            index = len(self._rules)
            name = self._names[id(schema)] = f"{self._prefix}_{index}"
            self._rules.append("")
            self._rules[index] = f"{name}: {self._body(schema, depth)}"
        return self._names[id(schema)]

    def _body(self, schema: dict[str, Any], depth: int) -> str:
        choices = choices_of(schema)
        if choices and all(isinstance(choice, str) and choice for choice in choices):
            return " | ".join(f"{QUOTE} {lark(choice)} {QUOTE}" for choice in choices)
        kinds, parts = schema.get("type"), schema.get("anyOf", schema.get("oneOf"))
        if kinds is None and isinstance(parts, list) and parts:
            return " | ".join(self.value(part, depth + 1) for part in parts)
        kinds = kinds if isinstance(kinds, list) and kinds else [kinds]
        return " | ".join(self._of_kind(kind, schema, depth) for kind in kinds)

    def _of_kind(self, kind: Any, schema: dict[str, Any], depth: int) -> str:
        if kind == "object":
            return self.object(schema, depth)
        if kind == "array":
            item = self.value(schema.get("items"), depth + 1)
            return f'"[" ({item} ("," {item})*)? "]"'
        return SIMPLE.get(kind, "any_value") if isinstance(kind, str) else "any_value"

    def object(self, schema: dict[str, Any], depth: int) -> str:
        """The required members in their order, then any of the others in theirs."""
        properties = schema.get("properties")
        if not isinstance(properties, dict) or any(BAD_KEY.search(key) or not key for key in properties):
            return "any_object"
        if not properties and schema.get("additionalProperties", True) is not False:
            return "any_object"
        required = schema.get("required")
        member = {k: self._named(f"{lark(k + ':')} {self.value(v, depth + 1)}") for k, v in properties.items()}
        first = [member[k] for k in properties if isinstance(required, list) and k in required]
        others = [rule for rule in member.values() if rule not in first]
        if first:
            body = ' "," '.join(first) + "".join(f' ("," {rule})?' for rule in others)
        else:
            rest, options = "", []
            for rule in reversed(others):
                options.append(f"{rule} {rest}".strip())
                rest = self._named(f'("," {rule})? {rest}'.strip())
            body = f"({' | '.join(options)})?" if options else ""
        return f'"{{" {body} "}}"'
