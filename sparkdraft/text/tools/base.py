"""Shared parts of tool-call formats: a request's functions in a regular form, and the base of a format (`ToolFormat`).

A format says how calls are read and forced, and whether the chat template or we tell the model about its tools. A
schema that the grammar compiler refuses is replaced by "any object", so a call is constrained less but never refused.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

from sparkdraft.core import GrammarSpec, UserError
from sparkdraft.text.events import Parser

MOST_LETTERS = 48 * 1024  # of a grammar: the compiler refuses longer ones
ANY_OBJECT: dict[str, Any] = {"type": "object"}
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# JSON as json.dumps writes it, as models were trained. Unlimited white space would trap small models.
STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?", "lenient": True}
MOST_CALLS = 16  # a small model under a grammar that allows more calls does not stop by itself

Tools = Sequence[dict[str, Any]]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Function:
    name: str
    description: str
    schema: dict[str, Any]  # schema of the arguments, always an object's

    def property(self, key: str) -> Any:
        """The schema of one argument; None if it is unknown."""
        properties = self.schema.get("properties")
        if isinstance(properties, dict) and key in properties:
            return self.resolve(properties[key])
        return self.resolve(self.schema.get("additionalProperties"))

    def resolve(self, schema: Any) -> Any:
        """Resolve a `$ref` at the top of a schema, if it points into this function's schema."""
        for _ in range(8):
            if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
                break
            schema = self._at(reference)
        return schema

    def _at(self, reference: str) -> Any:
        found: Any = self.schema
        for part in reference.removeprefix("#").split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or part not in found:
                return None
            found = found[part]
        return found if reference.startswith("#") else None

    def whole(self, schema: Any) -> dict[str, Any]:
        """Make a part of the schema a schema of its own, with the definitions that it may refer to."""
        part = dict(schema) if isinstance(schema, dict) else {}
        for key in ("$defs", "definitions"):
            if key in self.schema and key not in part:
                part[key] = self.schema[key]
        return part


def functions(tools: Iterable[Any]) -> list[Function]:
    """The functions among a client's tools, each name once."""
    found: dict[str, Function] = {}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(name := function.get("name"), str) and name:
            description = function.get("description")
            text = description if isinstance(description, str) else ""
            found.setdefault(name, Function(name, text, _arguments(function.get("parameters"))))
    return list(found.values())


def _arguments(schema: Any) -> dict[str, Any]:
    if not schema:
        return NO_ARGUMENTS
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        return ANY_OBJECT
    schema = {"type": "object"} | schema
    if isinstance(schema.get("properties"), dict) and not {"allOf", "anyOf", "oneOf", "$ref"} & set(schema):
        # Models that may invent arguments do so.
        schema.setdefault("additionalProperties", False)
    return schema


def json_rule(schema: dict[str, Any], fallback: dict[str, Any] | None = None) -> str:
    """Write a schema as Lark of llguidance; the fallback (default: any object) if it does not compile."""
    try:
        text = json.dumps({**schema, "x-guidance": STYLE})
    except (TypeError, ValueError, RecursionError):
        text = ""
    if not _compiles(text):
        text = json.dumps({**(ANY_OBJECT if fallback is None else fallback), "x-guidance": STYLE})
    return "%json " + text


@lru_cache(maxsize=256)
def _compiles(schema: str) -> bool:
    from llguidance import LLMatcher

    from sparkdraft.text.grammar import MAX_SECONDS, on_a_deep_stack  # the compiler recurses along references

    if not schema or len(schema) > MOST_LETTERS:
        return False
    grammar = f"start: %json {schema}\n"
    try:
        return not on_a_deep_stack(lambda: LLMatcher.validate_grammar_with_warnings(grammar), MAX_SECONDS)[0]
    except UserError:  # this says nothing about the schema: others still compile
        raise
    except Exception:
        return False


class ToolFormat(ABC):
    name: ClassVar[str]
    keep_special: ClassVar[bool] = False  # whether the parser needs to see special tokens
    separator: ClassVar[str] = ""  # Lark for what is between two calls
    parallel: ClassVar[bool] = True  # whether a required call may be several by default
    may_be_empty: ClassVar[bool] = False  # whether a call without arguments may end the text

    @abstractmethod
    def parser(self, tools: Tools) -> Parser: ...

    def constraint(
        self, tools: Tools, only: str | None, parallel: bool, thinking: str = "", answer: str = ""
    ) -> GrammarSpec | None:
        """The grammar of forced calls; None if no function fits.

        only: exactly one call of this function. parallel: allow several calls. thinking: Lark with a rule `thinking`
        for what may come before. answer: Lark for what may come instead, and on further lines the rules that it needs.
        """
        chosen = [function for function in functions(tools) if only in (None, function.name)]
        if not chosen:
            return None
        others = f" ({self.separator} call){{0,{MOST_CALLS - 1}}}" if parallel and only is None else ""
        text = self._grammar(chosen, others, thinking, answer)
        if len(text) > MOST_LETTERS:
            text = self._grammar([replace(each, schema=ANY_OBJECT) for each in chosen], others, thinking, answer)
        return GrammarSpec("lark", text)

    def _grammar(self, chosen: list[Function], others: str, thinking: str, answer: str) -> str:
        instead, _, more = answer.partition("\n")
        calls = f"call{others}"
        rules = [
            f"start: {'thinking ' if thinking else ''}{f'({calls} | {instead})' if answer else calls}",
            more,
            "call: " + " | ".join(f"call_{i}" for i in range(len(chosen))),
            *(self.call_rules(f"call_{i}", function) for i, function in enumerate(chosen)),
            self.common_rules(),
        ]
        return "\n".join(filter(None, [*rules, thinking])).rstrip() + "\n"

    @abstractmethod
    def call_rules(self, rule: str, function: Function) -> str:
        """Lark rules for one call of this function, which begin with the rule named `rule`."""

    def common_rules(self) -> str:
        return ""

    def instructions(self, tools: Tools, required: bool = False, only: str | None = None) -> str | None:
        """Text for the system prompt; None if the chat template describes the tools. required, only: there must be a
        call, of this function."""
        return None

    def history(self, messages: Messages) -> list[dict[str, Any]]:
        """Convert earlier messages for the chat template: clients send arguments as text, templates need objects."""
        return [with_objects(message) for message in messages]


def choices_of(schema: Any) -> list[Any] | None:
    """The values that a schema lists; None if it lists none."""
    if not isinstance(schema, dict):
        return None
    found = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return found if isinstance(found, list) else None


def lark(text: str) -> str:
    return json.dumps(text)


def calls_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list | tuple) else []


def function_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """The function of a call in a message, with its arguments as an object; those of a call that broke off become text
    under a key, because templates fail on anything else."""
    function = call.get("function", call)
    function = dict(function) if isinstance(function, Mapping) else {}
    arguments = value = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            value = None
    function["arguments"] = value if isinstance(value, dict) else {"arguments": arguments}
    return function


def with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    if not (calls := calls_of(message)):
        return dict(message)
    return {**message, "tool_calls": [{**call, "function": function_of(call)} for call in calls]}


def content_text(content: Any) -> str:
    """A message's content as text: a string, or the text parts of a list."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)
