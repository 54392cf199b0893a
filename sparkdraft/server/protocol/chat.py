"""The request body of /v1/chat/completions: messages, tools and the format of the answer.

The models say what each field must look like. `ChatRequest.check` checks what depends on several fields (a named tool
that does not exist, log-probabilities that were not asked for). prompts.py applies the chat template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from sparkdraft.core import MAX_COUNT
from sparkdraft.server.limits import MAX_MESSAGES, MAX_PARTS, MAX_SCHEMA_BYTES, MAX_TOOLS
from sparkdraft.server.protocol.errors import ApiError
from sparkdraft.server.protocol.sampling import Fields, SamplingFields
from sparkdraft.server.protocol.validation import shown

TEXT_PARTS = ("text", "refusal")
NOUNS = {"image": "an image", "audio": "audio", "video": "a video", "file": "a file"}  # by a word of the part's type
Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]


class Part(Fields):
    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def shown(self) -> str:
        return self.text or self.refusal or ""


class CalledFunction(Fields):
    name: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    arguments: str | None = "{}"  # None: as left out


class ToolCallIn(Fields):
    id: str | None = None
    type: Literal["function"] | None = "function"
    function: CalledFunction


class ChatMessage(Fields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallIn], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class Function(Fields):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # shown to the model with the rest of the tool; it changes nothing else


class Tool(Fields):
    type: Literal["function"]
    function: Function


# Stop at the first mistake of a list: 100,000 sentences would take seconds to make, and only one is sent.
Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ChosenFunction(Fields):
    name: Name


class NamedChoice(Fields):
    type: Literal["function"]
    function: ChosenFunction


class JsonSchema(Fields):
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    # accepted because OpenAI's clients send it; answers follow the schema with and without it
    strict: bool | None = None


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(SamplingFields):
    names: ClassVar[Mapping[str, str]] = {**SamplingFields.names, "logprobs": "top_logprobs"}

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(None, description="how much the model thinks, as far as it has a choice")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="what else the chat template may look at")

    @property
    def wanted_tokens(self) -> int | None:
        """OpenAI's newer name wins where a request has both."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """How many alternatives per token; None: no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def choice(self) -> str:
        """'none', 'auto', 'required', or 'named' with the name in `chosen`."""
        if not self.tools:
            return "none"
        return "named" if isinstance(self.tool_choice, NamedChoice) else self.tool_choice or "auto"

    @property
    def chosen(self) -> str | None:
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedChoice) else None

    def tool_dicts(self) -> list[dict[str, Any]]:
        return [tool.model_dump(exclude_none=True) for tool in self.tools or []]

    def check(self) -> None:
        check_parts(self.messages)
        self.check_sampling(logprobs=self.wanted_logprobs)
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs; set logprobs to true.", param="top_logprobs")
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice asks for a call and there are no tools; send tools.", param="tool_choice")
        names = [tool.function.name for tool in self.tools or []]
        if self.chosen is not None and self.chosen not in names:
            raise ApiError(
                400, f"tool_choice names '{self.chosen}'; the tools are {', '.join(names[:8])}.", param="tool_choice"
            )
        if len(set(names)) < len(names):
            raise ApiError(400, "Two tools have the same name; give each its own.", param="tools")
        self._check_schemas()

    def _check_schemas(self) -> None:
        form = self.response_format
        if form and form.type == "json_schema" and not (form.json_schema and form.json_schema.schema_ is not None):
            raise ApiError(
                400,
                "response_format is json_schema and has no json_schema.schema; send the schema.",
                param="response_format",
            )
        schemas = {"tools": [t.function.parameters for t in self.tools or []]}
        if form and form.json_schema:
            schemas["response_format"] = [form.json_schema.schema_]
        for param, values in schemas.items():
            size = max((len(as_json(value, param)) for value in values if value), default=0)
            if size > MAX_SCHEMA_BYTES:
                raise ApiError(
                    400, f"A schema has {size:,} bytes and {MAX_SCHEMA_BYTES:,} is the limit; shorten it.", param=param
                )


def check_parts(messages: Sequence[ChatMessage]) -> None:
    """Raises ApiError for a part that is no text: images, audio and video are not read, whatever the model could do."""
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            place = f"messages[{i}].content[{j}]"
            if part.type not in TEXT_PARTS:
                kind = next((noun for word, noun in NOUNS.items() if word in part.type), "no text")
                raise ApiError(
                    400,
                    f"{place} is {kind} (type {shown(part.type)}), and this server reads text only: "
                    "remove the part, or send its content as text.",
                    place,
                )
            if part.type == "text" and part.text is None:
                raise ApiError(400, f"{place} is of type text and has no text; send one.", place)


def as_json(value: Any, param: str | None = None) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise ApiError(400, f"A schema is not plain JSON: {error}.", param) from None
    except RecursionError:
        raise ApiError(400, "A schema is nested too deeply to be read; flatten it, or refer to $defs.", param) from None
