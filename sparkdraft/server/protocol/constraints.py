"""The fields of OpenAI, vLLM, SGLang and llama.cpp that constrain the text of an answer, as one grammar of the engine.

A request sends at most one of them. `ConstrainedFields.check_constraint` finds mistakes that need no grammar, and
`constraint` makes the grammar, in a thread: converting a long one takes a while. The engine compiles it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, StringConstraints

from sparkdraft.core import GrammarSpec, UserError
from sparkdraft.server.protocol.sampling import Fields, SamplingFields
from sparkdraft.server.protocol.validation import ApiError, as_sentence
from sparkdraft.text.gbnf import is_gbnf, lark_of

MAX_SCHEMA_BYTES = 64 << 10
MAX_CHOICES = 4096
UNSUPPORTED = {  # in structured_outputs, and what to do instead
    "structural_tag": "use tools with tool_choice",
    **dict.fromkeys(("whitespace_pattern", "disable_any_whitespace"), "write the JSON as a grammar, or leave it out"),
    "disable_additional_properties": "set additionalProperties to false in the schema",
}


def _none_if_off(value: Any) -> Any:
    """Clients send these where they constrain nothing."""
    return None if value is False or value in ("", []) else value


OFF = BeforeValidator(_none_if_off)
Text = Annotated[str, StringConstraints(min_length=1, max_length=MAX_SCHEMA_BYTES)]
Schema = dict[str, Any] | Text
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]


class JsonSchema(Fields):
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    # accepted because OpenAI's clients send it; answers follow the schema with and without it
    strict: bool | None = None


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema", description="llama.cpp's place for it")] = None

    @property
    def wanted_schema(self) -> dict[str, Any] | None:
        """The schema of the answer; None: any object, or with the type text any text."""
        nested = self.json_schema.schema_ if self.json_schema and self.type == "json_schema" else None
        return nested if nested is not None or self.type == "text" else self.schema_


class StructuredOutputs(Fields):
    """vLLM's: exactly one is set."""

    model_config = ConfigDict(extra="allow")  # to name what is not supported

    json_: Schema | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None


@dataclass(frozen=True, slots=True)
class Constraint:
    field: str  # of the request, for errors
    spec: GrammarSpec


class ConstrainedFields(SamplingFields):
    response_format: ResponseFormat | None = None

    # vLLM's, the newer and the older form
    structured_outputs: Annotated[StructuredOutputs | None, OFF] = None
    guided_json: Annotated[Schema | None, OFF] = None
    guided_regex: Annotated[Text | None, OFF] = None
    guided_choice: Annotated[Choices | None, OFF] = None
    guided_grammar: Annotated[Text | None, OFF] = Field(None, description="Lark or GBNF")

    # SGLang's and llama.cpp's
    json_schema: Annotated[Schema | None, OFF] = None
    regex: Annotated[Text | None, OFF] = None
    ebnf: Annotated[Text | None, OFF] = Field(None, description="GBNF")
    grammar: Annotated[Text | None, OFF] = Field(None, description="GBNF or Lark")

    def check_constraint(self) -> None:
        given = [field for field, _, _ in self._given()]
        if len(given) > 1:
            sentence = f"{given[0]} and {given[1]} both constrain the answer; send only one of them."
            raise ApiError(400, sentence, given[1])
        form = self.response_format
        if form and form.type == "json_schema" and form.wanted_schema is None:
            sentence = "response_format is json_schema and has no json_schema.schema; send the schema."
            raise ApiError(400, sentence, "response_format")
        for field, kind, value in self._given():
            if kind == "json_schema":
                check_schema(value, field)

    @property
    def constraint_field(self) -> str | None:
        """The field that constrains the answer; None: none does."""
        return next((field for field, _, _ in self._given()), None)

    def constraint(self) -> Constraint | None:
        """The grammar of the answer's text. Raises ApiError where it cannot be made."""
        for field, kind, value in self._given():
            try:
                return Constraint(field, _spec(kind, value, field))
            except UserError as error:
                raise ApiError(400, as_sentence(str(error)), field) from None
        return None

    def _given(self) -> list[tuple[str, str, Any]]:
        """Field, kind and value of every constraint of the request."""
        fields = {
            "guided_json": "json_schema",
            "guided_regex": "regex",
            "guided_choice": "choice",
            "guided_grammar": "grammar",
            "json_schema": "json_schema",
            "regex": "regex",
            "ebnf": "grammar",
            "grammar": "grammar",
        }
        found = [(field, kind, getattr(self, field)) for field, kind in fields.items()]
        if self.structured_outputs and (structured := _structured(self.structured_outputs)):
            found.append(("structured_outputs", *structured))
        if self.response_format and self.response_format.type != "text":
            schema = self.response_format.wanted_schema
            found.insert(0, ("response_format", "json_object" if schema is None else "json_schema", schema or {}))
        return [each for each in found if each[2] is not None]


def _structured(given: StructuredOutputs) -> tuple[str, Any] | None:
    """Kind and value; None if nothing is set."""
    others = {name: value for name, value in (given.model_extra or {}).items() if value}
    wrong = next((name for name in others if name in UNSUPPORTED), None)
    if wrong:
        sentence = f"structured_outputs.{wrong} is not supported here; {UNSUPPORTED[wrong]}."
        raise ApiError(400, sentence, "structured_outputs")
    kinds = {
        "json": ("json_schema", given.json_),
        "regex": ("regex", given.regex),
        "choice": ("choice", given.choice),
        "grammar": ("grammar", given.grammar),
        "json_object": ("json_object", {} if given.json_object else None),
    }
    found = [each for each in kinds.values() if each[1] is not None]
    if len(found) > 1 or (others and not found):
        count = str(len(found)) if found else "none"
        sentence = f"structured_outputs has {count} of {', '.join(kinds)}; set exactly one."
        raise ApiError(400, sentence, "structured_outputs")
    return found[0] if found else None


def _spec(kind: str, value: Any, field: str) -> GrammarSpec:
    if kind == "json_schema":
        return GrammarSpec("json_schema", value if isinstance(value, str) else as_json(value, field))
    if kind == "regex":
        # Lark has regexes between slashes.
        return GrammarSpec(
            "regex", re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], value, flags=re.S)
        )
    if kind == "choice":
        return GrammarSpec("lark", "start: " + " | ".join(map(json.dumps, value)) + "\n")
    if kind == "grammar":
        return GrammarSpec("lark", lark_of(value) if is_gbnf(value) else value)
    return GrammarSpec("json_object")


def check_schema(schema: Any, param: str) -> None:
    """Refuse a schema that is too large or no JSON."""
    size = len(schema) if isinstance(schema, str) else len(as_json(schema, param))
    if size > MAX_SCHEMA_BYTES:
        sentence = f"A schema has {size:,} bytes and {MAX_SCHEMA_BYTES:,} is the limit; shorten it."
        raise ApiError(400, sentence, param)


def as_json(value: Any, param: str | None = None) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise ApiError(400, f"A schema is not plain JSON: {error}.", param) from None
    except RecursionError:
        raise ApiError(400, "A schema is nested too deeply to be read; flatten it, or refer to $defs.", param) from None
