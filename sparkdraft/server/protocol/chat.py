"""The request body of /v1/chat/completions: messages, tools and the format of the answer.

The models say what each field must look like. `ChatRequest.check` checks what depends on several fields (a named tool
that does not exist, log-probabilities that were not asked for). prompts.py applies the chat template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from sparkdraft.server.limits import MAX_MESSAGES, MAX_PARTS, MAX_SCHEMA_BYTES, MAX_TOOLS
from sparkdraft.server.protocol.errors import ApiError
from sparkdraft.server.protocol.refused import COMPLETIONS_ONLY
from sparkdraft.server.protocol.sampling import Fields, MaxTokens, SamplingFields
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
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallIn], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None  # OpenAI's older form of tool_calls
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


class ChatFields(Fields):
    """What is asked of the prompt, in a chat and in /tokenize."""

    chat_template_kwargs: dict[str, Any] | None = Field(None, description="what else the chat template may look at")
    add_generation_prompt: bool | None = Field(None, description="false: the prompt ends after the last message")
    continue_final_message: bool | None = Field(None, description="the answer continues the last message")

    def check_opening(self, messages: Sequence[ChatMessage]) -> None:
        if not self.continue_final_message or not messages:
            return
        field, last = "continue_final_message", messages[-1]
        if self.add_generation_prompt:
            sentence = f"{field} continues the last message and add_generation_prompt begins a new one; set only one."
            raise ApiError(400, sentence, field)
        if last.tool_calls or last.function_call:
            raise ApiError(400, f"{field} needs a last message of text, and the last one has tool calls.", field)


class ChatRequest(ChatFields, SamplingFields):
    refused: ClassVar[Mapping[str, str]] = COMPLETIONS_ONLY
    names: ClassVar[Mapping[str, str]] = {**SamplingFields.names, "logprobs": "top_logprobs"}

    messages: Messages
    max_completion_tokens: MaxTokens | None = Field(None, description="-1: up to the end of the context")
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Function], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description="OpenAI's older form of tools; the answer then has function_call instead of tool_calls"
    )
    function_call: Literal["none", "auto"] | ChosenFunction | None = None
    reasoning_effort: str | None = Field(None, description="how much the model thinks, as far as it has a choice")
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_PARTS)] | None = Field(
        None, description="for chat templates that look at documents"
    )

    @model_validator(mode="after")
    def _functions_as_tools(self) -> Self:
        """From here on OpenAI's older form is its newer one; chat_answer.py writes the older one again."""
        if (self.functions or self.function_call) and (self.tools or self.tool_choice):
            old, new = ("functions", "tools") if self.functions else ("function_call", "tool_choice")
            raise ApiError(400, f"{old} is the older form of {new}; send only tools and tool_choice.", old)
        if self.functions:
            self.tools = [Tool(type="function", function=function) for function in self.functions]
            self.parallel_tool_calls = False
        if isinstance(self.function_call, ChosenFunction):
            self.tool_choice = NamedChoice(type="function", function=self.function_call)
        elif self.function_call:
            self.tool_choice = self.function_call
        return self

    @property
    def wanted_tokens(self) -> int | None:
        """OpenAI's newer name wins where a request has both."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

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
        self.check_opening(self.messages)
        is_old = bool(self.functions or self.function_call)
        tools, choice = ("functions", "function_call") if is_old else ("tools", "tool_choice")
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise ApiError(400, f"{choice} asks for a call and there are no {tools}; send {tools}.", choice)
        names = [tool.function.name for tool in self.tools or []]
        if self.chosen is not None and self.chosen not in names:
            raise ApiError(400, f"{choice} names '{self.chosen}'; the {tools} are {', '.join(names[:8])}.", choice)
        if len(set(names)) < len(names):
            raise ApiError(400, f"Two {tools} have the same name; give each its own.", tools)
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
