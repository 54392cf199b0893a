"""The tools of a request in a regular form: a name, a description and a schema that compiles.

Clients send schemas of every kind. A schema that the grammar compiler does not take is replaced by "any object", so a
call is constrained less but never refused. Each format's own file turns a schema into its syntax.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from sparkdraft.core import UserError

MOST_LETTERS = 48 * 1024  # length of a grammar: the compiler refuses longer ones
ANY_OBJECT: dict[str, Any] = {"type": "object"}
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# JSON as json.dumps writes it, which models were taught. Unlimited white space would trap small models.
STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?", "lenient": True}


@dataclass(frozen=True)
class Function:
    name: str
    description: str
    schema: dict[str, Any]  # schema of the arguments, always an object's

    def property(self, key: str) -> Any:
        """The schema of one argument; None if it is not known."""
        properties = self.schema.get("properties")
        if isinstance(properties, dict) and key in properties:
            return self.resolve(properties[key])
        return self.resolve(self.schema.get("additionalProperties"))

    def resolve(self, schema: Any) -> Any:
        """A schema with the reference at its top resolved, if its target is within this schema."""
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
        """A part of the schema as a schema of its own, with the definitions that it may refer to."""
        part = dict(schema) if isinstance(schema, dict) else {}
        for key in ("$defs", "definitions"):
            if key in self.schema and key not in part:
                part[key] = self.schema[key]
        return part

    def loosened(self) -> Function:
        return replace(self, schema=ANY_OBJECT)


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
        # A function takes the arguments it names; a model that may invent others will.
        schema.setdefault("additionalProperties", False)
    return schema


def json_rule(schema: dict[str, Any], fallback: dict[str, Any] | None = None) -> str:
    """A schema for a Lark grammar of llguidance; the fallback (any object) if it does not compile."""
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
