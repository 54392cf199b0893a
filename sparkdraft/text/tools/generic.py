"""Calls for a model whose template knows no tools: the system prompt describes them, and the format is hermes' tags.

    <tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>

Small models forget the tags, so where an answer could begin, a bare object with only a known name and arguments is a
call too. Earlier calls and results become plain messages, because the template cannot render them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sparkdraft.text.events import Parser, Reading
from sparkdraft.text.tools.base import Function, Messages, Tools, calls_of, content_text, function_of, functions
from sparkdraft.text.tools.calls import ARGUMENTS, call_of, is_half_object
from sparkdraft.text.tools.hermes import CLOSE, OPEN, Hermes, HermesParser


class GenericParser(HermesParser):
    def read(self) -> Reading[None]:
        while (yield from self._bare_call()):
            pass
        yield from super().read()

    def end_of_call(self) -> Reading[None]:
        yield from super().end_of_call()
        while (yield from self._bare_call()):
            pass

    def _bare_call(self) -> Reading[bool]:
        """Read a call without tags; stops as soon as the object cannot be a call."""
        yield from self.skip_space()
        start = self.at
        if not (yield from self.skip("{")) or not (yield from self._may_be_call()):
            self.at = 0
            return False
        self.at = start
        value = yield from self.whole_object()
        if self.was_cut and is_half_object(self.text[start:]):  # a call that was cut is no content
            self.at = len(self.text)
            self.cut()
            return False
        call = call_of(value)
        if value is None or call is None or call[0] not in self.functions or set(value) - {"name", *ARGUMENTS}:
            self.at = 0
            return False
        self.begin(call[0])
        self.write(json.dumps(call[1], ensure_ascii=False))
        yield from self.skip_space()
        self.cut()
        return True

    def _may_be_call(self) -> Reading[bool]:
        yield from self.skip_space()
        key = yield from self.string()
        yield from self.skip_space()
        if not (yield from self.skip(":")):
            return False
        yield from self.skip_space()
        return key in ARGUMENTS or (key == "name" and (yield from self.string()) in self.functions)


class Generic(Hermes):
    name = "generic"
    keep_special = False
    gap = ""
    parallel = False  # models without training in calls repeat theirs until they are stopped

    def parser(self, tools: Tools) -> Parser:
        return GenericParser(tools)

    def instructions(self, tools: Tools, required: bool = False, only: str | None = None) -> str | None:
        known = functions(tools)
        if not known:
            return None
        lines = "\n".join(map(_described, known))
        when = "If a function helps with the request, answer with only a call, else answer the request itself."
        if required or only:
            when = f"Answer with only a call{f' of {only}' if only else ''}."
        return (
            f"You can call these functions (name, purpose, JSON schema of the arguments):\n{lines}\n"
            f"A call is written like this:\n{_call_text(known[0].name, _example(known[0]))}\n"
            f"{when} Write one line like this for each call; results come back in <tool_response> tags."
        )

    def history(self, messages: Messages) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        for message in messages:
            if calls := calls_of(message):
                lines = [content_text(message.get("content"))]
                for call in calls:
                    function = function_of(call)
                    lines.append(_call_text(str(function.get("name", "")), function.get("arguments", {})))
                out.append({"role": "assistant", "content": "\n".join(line for line in lines if line)})
            elif message.get("role") in ("tool", "function"):
                _append_result(out, message)
            else:
                out.append(dict(message))
        return out


def _append_result(out: list[dict[str, Any]], message: Mapping[str, Any]) -> None:
    """Append a result. Results of several calls share one message: templates want alternating roles."""
    text = f"<tool_response>\n{content_text(message.get('content'))}\n</tool_response>"
    if out and out[-1].get("role") == "user" and str(out[-1].get("content")).endswith("</tool_response>"):
        out[-1]["content"] += "\n" + text
    else:
        out.append({"role": "user", "content": text})


def _described(function: Function) -> str:
    purpose = " ".join(function.description.split())
    return f"- {function.name}: {purpose + ' ' if purpose else ''}{json.dumps(function.schema, ensure_ascii=False)}"


def _call_text(name: str, arguments: Any) -> str:
    return f"{OPEN}{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}{CLOSE}"


def _example(function: Function) -> dict[str, Any]:
    """Example arguments, with dots for text: small models copy examples rather than read schemas."""
    properties = function.schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    required = function.schema.get("required")
    names = [key for key in properties if key in required] if isinstance(required, list) else list(properties)
    return {key: _example_value(function.property(key)) for key in names}


def _example_value(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return "..."
    choices = schema.get("enum")
    if isinstance(choices, list) and choices:
        return choices[0]
    kinds: dict[Any, Any] = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}, "null": None}
    kind = schema.get("type")
    return kinds.get(kind, "...") if isinstance(kind, str) else "..."
