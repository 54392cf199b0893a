"""/v1/responses: the request body, and how it becomes a chat request.

Input items are in response_items.py, tools in response_tools.py, the answer and its events in response_answer.py. What
the fields of a Responses request ask for is checked by the chat request; its errors get this API's field names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError

from sparkdraft.server.protocol.chat import ChatMessage, ChatRequest, JsonSchema, ResponseFormat
from sparkdraft.server.protocol.conversation import in_order
from sparkdraft.server.protocol.response_items import Conversation
from sparkdraft.server.protocol.response_tools import Toolbox, ToolChoice
from sparkdraft.server.protocol.sampling import Fields, MaxTokens, SamplingFields
from sparkdraft.server.protocol.shapes import Json
from sparkdraft.server.protocol.validation import COMPLETIONS_ONLY, ApiError, from_validation

MAX_ITEMS = 10_000
MAX_LISTED = 1000  # tools and namespaces, hosted ones included
ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"  # values of include
# Fields of a chat request, as this API calls them.
CHAT_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
INSTEAD = {
    "background": "leave it out and stream the answer",
    "conversation": "send the items as input, or previous_response_id",
    "prompt": "send instructions and input",
    "moderation": "leave it out; this server moderates nothing",
    "messages": "send them as input",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "response_format": "use text.format",
    "reasoning_effort": "use reasoning.effort",
    "logprobs": "use top_logprobs",
    "prompt_logprobs": "use /v1/completions",
    **dict.fromkeys(("functions", "function_call"), "use tools and tool_choice"),
}
OWN = ("max_tokens", "n", "prompt_logprobs", "stream", "stream_options")  # sampling fields that a chat does not inherit


class FormatConfig(Fields):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(Fields):
    format: FormatConfig | None = None
    verbosity: str | None = None  # accepted because agents send it; the model is not told


class ReasoningConfig(Fields):
    effort: str | None = None
    summary: str | None = None  # accepted because agents send it; nothing here writes summaries


class ResponsesRequest(SamplingFields):
    refused: ClassVar[Mapping[str, str]] = {**COMPLETIONS_ONLY, **INSTEAD}
    names: ClassVar[Mapping[str, str]] = {
        **SamplingFields.names,
        "max_tokens": "max_output_tokens",
        "logprobs": "top_logprobs",
    }

    input: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = Field(None, description="of a stored response, which this one continues")
    store: bool | None = Field(None, description="false: the response cannot be retrieved or continued by its id")
    max_output_tokens: MaxTokens | None = Field(None, description="-1: up to the end of the context")
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_LISTED, fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = Field(None, description="effort is used as far as the model has levels")
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="accepted; a conversation that does not fit is refused and not shortened"
    )
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    max_tool_calls: int | None = None  # of hosted tools, of which there are none
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="what else the chat template may look at")

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def tokens_field(self) -> str:
        return "max_output_tokens"

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives per token; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.top_logprobs or self.includes(LOGPROBS) else None

    @property
    def items(self) -> list[Json]:
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input or []

    def includes(self, what: str) -> bool:
        return what in (self.include or ())

    def check(self) -> None:
        self.check_sampling(logprobs=self.wanted_logprobs)
        if self.n not in (None, 1):
            raise ApiError(400, f"n is {self.n}; a response is one text: leave it out.", "n")
        if self.top_logprobs is not None and self.top_logprobs < 0:
            raise ApiError(400, f"top_logprobs is {self.top_logprobs}; it must be at least 0.", "top_logprobs")
        if self.input is None and self.previous_response_id is None:
            raise ApiError(400, "input is missing; send it.", "input")
        form = self.text.format if self.text else None
        if form and form.type == "json_schema" and form.schema_ is None:
            sentence = "text.format is json_schema and has no schema; send the schema."
            raise ApiError(400, sentence, "text.format.schema")

    def chat(self, before: Sequence[Json], items: Sequence[Json], toolbox: Toolbox, choice: ToolChoice) -> ChatRequest:
        """The same as a chat request. before: the items of the responses that this one continues."""
        messages = in_order(self._messages(before, items, toolbox))
        if not messages:
            raise ApiError(400, "input has no message; send at least one.", "input")
        shared = {name: getattr(self, name) for name in SamplingFields.model_fields if name not in OWN}
        with chat_names():
            chat = ChatRequest(
                **{name: value for name, value in shared.items() if value is not None},
                messages=messages,
                max_completion_tokens=self.max_output_tokens,
                logprobs=self.wanted_logprobs is not None or None,
                top_logprobs=self.wanted_logprobs,
                response_format=self._format(),
                tools=toolbox.tools or None,
                tool_choice=None if choice == "auto" else choice,
                parallel_tool_calls=self.parallel_tool_calls,
                chat_template_kwargs=self.chat_template_kwargs,
                reasoning_effort=self.reasoning.effort if self.reasoning else None,
            )
            chat.deferred_tools = toolbox.late
            chat.effort_is_hint = True  # agents send one to every model
            chat.check()
        return chat

    def _messages(self, before: Sequence[Json], items: Sequence[Json], toolbox: Toolbox) -> list[ChatMessage]:
        conversation = Conversation(toolbox)
        for item in before:
            conversation.add(item, "previous_response_id")
        for i, item in enumerate(items):
            conversation.add(item, f"input[{i}]")
        first = [ChatMessage(role="system", content=self.instructions)] if self.instructions else []
        return first + conversation.end()

    def _format(self) -> ResponseFormat | None:
        form = self.text.format if self.text else None
        if form is None:
            return None
        schema = JsonSchema(name=form.name, schema=form.schema_, strict=form.strict)  # type: ignore[call-arg]
        return ResponseFormat(type=form.type, json_schema=schema if form.type == "json_schema" else None)

    def response_fields(self) -> Json:
        """The fields of the response that repeat the request."""
        form = self.text.format.model_dump(by_alias=True, exclude_none=True) if self.text and self.text.format else None
        verbosity, thinks = self.text and self.text.verbosity, self.reasoning or ReasoningConfig()
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": thinks.effort, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": self.store is not False,
            "temperature": self.temperature,
            "text": {"format": form or {"type": "text"}, "verbosity": verbosity or "medium"},
            "tool_choice": self.tool_choice or "auto",
            "tools": self.tools or [],
            "top_logprobs": self.wanted_logprobs or 0,
            "top_p": self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }


@contextmanager
def chat_names() -> Iterator[None]:
    """Raise the errors of a chat request with the names that its fields have here."""
    try:
        yield
    except ValidationError as error:
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise renamed(from_validation(found, {})) from None
    except ApiError as error:
        raise renamed(error) from None


def renamed(error: ApiError) -> ApiError:
    head = re.match(r"\w*", error.param or "")
    name = head.group() if head else ""
    if name not in CHAT_NAMES:
        return error
    message = re.sub(rf"\b{name}\b", CHAT_NAMES[name], error.message)
    param = CHAT_NAMES[name] + (error.param or "")[len(name) :]
    return ApiError(error.status, message, param, error.code, error.headers)
