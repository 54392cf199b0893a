"""/v1/chat/completions: the request body with messages and tools, and the answer as OpenAI's chunks or as a whole.

`ChatRequest.check` checks what depends on several fields. prompts.py applies the chat template. `ChatAnswer` takes the
engine's events; its parser finds calls and reasoning in the text (text/events.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, PrivateAttr, StringConstraints, Tag, model_validator

from sparkdraft.core import FinishReason, StepOutput, TokenLogprob
from sparkdraft.server.protocol.constraints import MAX_SCHEMA_BYTES as MAX_SCHEMA_BYTES
from sparkdraft.server.protocol.constraints import ConstrainedFields, check_schema
from sparkdraft.server.protocol.constraints import JsonSchema as JsonSchema
from sparkdraft.server.protocol.constraints import ResponseFormat as ResponseFormat
from sparkdraft.server.protocol.constraints import as_json as as_json
from sparkdraft.server.protocol.sampling import Fields, MaxTokens, SamplingFields
from sparkdraft.server.protocol.shapes import (
    Answer,
    Chunk,
    Json,
    accepted_chars,
    chat_logprobs,
    prompt_logprobs,
    stop_reason,
)
from sparkdraft.server.protocol.validation import COMPLETIONS_ONLY, ApiError, shown
from sparkdraft.server.protocol.written import TOOL_CALLS, Written
from sparkdraft.text.events import Content, Event, Reasoning, ToolArguments, ToolCall

MAX_MESSAGES = 2000
MAX_PARTS = 2000  # per message content
MAX_TOOLS = 128  # as OpenAI's
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
    arguments: str | None = "{}"  # None: the default


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


class AllowedTools(Fields):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedChoice(Fields):
    """Some of the tools may be called, while the prompt shows all of them, so that it begins as before."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _form_of_choice(choice: Any) -> str:
    """The form that is meant, by its type, so that a mistake is reported in its words."""
    kind = choice.get("type") if isinstance(choice, Mapping) else getattr(choice, "type", None)
    return "allowed" if kind == "allowed_tools" else "named"


ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[
        Annotated[NamedChoice, Tag("named")] | Annotated[AllowedChoice, Tag("allowed")], Discriminator(_form_of_choice)
    ]
)


class ChatFields(Fields):
    """Fields about the prompt, in a chat and in /tokenize."""

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


class ChatRequest(ChatFields, ConstrainedFields):
    refused: ClassVar[Mapping[str, str]] = COMPLETIONS_ONLY
    names: ClassVar[Mapping[str, str]] = {**SamplingFields.names, "logprobs": "top_logprobs"}

    messages: Messages
    max_completion_tokens: MaxTokens | None = Field(None, description="-1: up to the end of the context")
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Function], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description="OpenAI's older form of tools; the answer then has function_call instead of tool_calls"
    )
    function_call: Literal["none", "auto"] | ChosenFunction | None = None
    reasoning_effort: str | None = Field(None, description="how much the model thinks, as far as it has a choice")
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_PARTS)] | None = Field(
        None, description="for chat templates that look at documents"
    )

    # Set by the code of other protocols and not part of a body, see the properties of these names.
    _deferred_tools: frozenset[str] = PrivateAttr(frozenset())
    _effort_is_hint: bool = PrivateAttr(False)

    @property
    def deferred_tools(self) -> frozenset[str]:
        """Names of tools that the prompt does not show. They can be called: the parser and grammars know them."""
        return self._deferred_tools

    @deferred_tools.setter
    def deferred_tools(self, names: Iterable[str]) -> None:
        self._deferred_tools = frozenset(names)

    @property
    def effort_is_hint(self) -> bool:
        """True if the model takes the nearest effort that it knows, or none, instead of refusing the request."""
        return self._effort_is_hint

    @effort_is_hint.setter
    def effort_is_hint(self, value: bool) -> None:
        self._effort_is_hint = value

    @model_validator(mode="after")
    def _functions_as_tools(self) -> Self:
        """Turn OpenAI's older form into its newer one; `ChatAnswer` writes the older one again."""
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
        """Alternatives per token; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def choice(self) -> str:
        """'none', 'auto', 'required', or 'named' with the name in `chosen`. `allowed` may leave some tools out."""
        if not self.tools:
            return "none"
        if isinstance(self.tool_choice, AllowedChoice):
            return self.tool_choice.allowed_tools.mode
        return "named" if isinstance(self.tool_choice, NamedChoice) else self.tool_choice or "auto"

    @property
    def chosen(self) -> str | None:
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedChoice) else None

    @property
    def allowed(self) -> frozenset[str] | None:
        """Names of the tools that may be called; None: all of them."""
        if not isinstance(self.tool_choice, AllowedChoice):
            return None
        return frozenset(tool.function.name for tool in self.tool_choice.allowed_tools.tools)

    def tool_dicts(self) -> list[dict[str, Any]]:
        return [tool.model_dump(exclude_none=True) for tool in self.tools or []]

    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools that the prompt shows."""
        shown = [tool for tool in self.tools or [] if tool.function.name not in self.deferred_tools]
        return [tool.model_dump(exclude_none=True) for tool in shown]

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
        chosen = {self.chosen} if self.chosen is not None else self.allowed or set()
        if unknown := sorted(chosen - set(names)):
            raise ApiError(400, f"{choice} names '{unknown[0]}'; the {tools} are {', '.join(names[:8])}.", choice)
        if len(set(names)) < len(names):
            raise ApiError(400, f"Two {tools} have the same name; give each its own.", tools)
        for tool in self.tools or []:
            if tool.function.parameters:
                check_schema(tool.function.parameters, "tools")
        self.check_constraint()
        field = self.constraint_field
        if field not in (None, "response_format") and self.choice in ("required", "named"):
            raise ApiError(400, f"{field} constrains the text and {choice} asks for a call; send only one.", field)


def check_parts(messages: Sequence[ChatMessage]) -> None:
    """Refuse parts other than text, whatever the model could read."""
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


@dataclass(slots=True)
class Choice:
    """One of the n texts so far."""

    text: Written
    begun: bool = False
    logprobs: list[Json] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    finish: str | None = None
    # Not sent yet, because the parser holds back the text:
    waiting_logprobs: list[Json] = field(default_factory=list)
    waiting_ids: list[int] = field(default_factory=list)
    tokens: int = 0
    accepted: int = 0
    accepted_chars: int = 0


@dataclass(slots=True, kw_only=True)
class ChatAnswer(Answer):
    chunk_kind = "chat.completion.chunk"

    eos_ids: frozenset[int]
    new_text: Callable[[], Written]
    wants_logprobs: bool = False
    old_calls: bool = False  # OpenAI's older form: function_call instead of tool_calls
    prompt_ids: list[int] = field(default_factory=list)  # for return_token_ids
    choices: dict[int, Choice] = field(default_factory=dict)
    prompt_rows: list[TokenLogprob | None] | None = None

    # ---- chunks

    def push(self, event: StepOutput, prompt_index: int = 0) -> list[Chunk]:
        choice = self.choices.get(event.index)
        if choice is None:
            choice = self.choices[event.index] = Choice(self.new_text())
        self.prompt_rows = self.prompt_rows or event.prompt_logprobs
        self._count(choice, event)
        events = choice.text.push(event)
        chunks: list[Chunk] = []
        if not choice.begun:
            choice.begun = True
            is_first = len(self.choices) == 1
            first = self._chunk(event.index, {"role": "assistant", "content": ""})
            chunks.append(first | (self._prompt_token_ids() if is_first else {}))
        deltas = [self._delta_chunk(event.index, self._delta(each), choice) for each in events]
        if deltas:
            chunks += deltas
            choice.accepted_chars = 0  # the rest were markup, which is not shown
        if event.finish:
            choice.finish = self._finish_reason(choice)
            chunks.append(self._chunk(event.index, {}, choice, choice.finish))
        return chunks

    def last_chunks(self) -> list[Chunk]:
        drafted = _drafted(None, {}) if self.return_speculation else {}
        return [chunk | drafted for chunk in self.usage_chunks()]

    def _prompt_token_ids(self) -> Json:
        return {"prompt_token_ids": self.prompt_ids} if self.return_token_ids else {}

    def _count(self, choice: Choice, event: StepOutput) -> None:
        if self.return_token_ids:
            choice.ids += event.ids
            choice.waiting_ids += event.ids
        choice.tokens += len(event.ids)
        choice.accepted += event.num_accepted
        if self.return_speculation:
            choice.accepted_chars += accepted_chars(event, self.tokenizer)
        if event.logprobs and self.wants_logprobs:
            rows = _without_end(event.logprobs, event, self.eos_ids)
            choice.waiting_logprobs += chat_logprobs(rows, self.tokenizer)

    def _delta(self, event: Event) -> Json:
        match event:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text}
            case ToolCall(index, call_id, name):
                return self._call_delta({"index": index} | _call(call_id, name))
            case ToolArguments(index, text):
                return self._call_delta({"index": index, "function": {"arguments": text}})

    def _call_delta(self, call: Json) -> Json:
        return {"function_call": call["function"]} if self.old_calls else {"tool_calls": [call]}

    def _delta_chunk(self, index: int, delta: Json, choice: Choice) -> Chunk:
        ((name, value),) = delta.items()
        if isinstance(value, str) and self.text_is_all and not choice.waiting_logprobs:
            return self.text_chunk(index, name, value)
        return self._chunk(index, delta, choice)

    def text_choice(self, index: int, name: str, text: str) -> Json:
        return {"index": index, "delta": {name: text}, "logprobs": None, "finish_reason": None}

    def _chunk(self, index: int, delta: Json, choice: Choice | None = None, finish: str | None = None) -> Json:
        """A chunk with what waits in 'choice'."""
        body: Json = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        if self.return_token_ids:
            body["token_ids"] = choice.waiting_ids if choice else []
        drafted = _drafted(choice, delta) if self.return_speculation else {}
        if choice:
            if finish:
                body |= stop_reason(choice.text.stop_reason)
            if choice.waiting_logprobs:
                body["logprobs"] = {"content": choice.waiting_logprobs, "refusal": None}
            choice.logprobs += choice.waiting_logprobs
            choice.waiting_logprobs, choice.waiting_ids, choice.tokens, choice.accepted = [], [], 0, 0
        return self.chunk(body, drafted, is_last=finish is not None)

    def all_ended(self) -> bool:
        return sum(choice.finish is not None for choice in self.choices.values()) == self.n

    # ---- the whole answer

    def whole(self) -> Json:
        choices = [self._whole_choice(index, choice) for index, choice in sorted(self.choices.items())]
        answer = self.frame("chat.completion", choices) | self._prompt_token_ids() | {"usage": self.tally.usage()}
        if self.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(self.prompt_rows or [], self.prompt_logprobs, self.tokenizer)
        return answer | self.metrics()

    def _whole_choice(self, index: int, choice: Choice) -> Json:
        text = choice.text
        calls = [_call(call.id, call.name, call.arguments) for _, call in sorted(text.calls.items())]
        message: Json = {"role": "assistant", "content": None if calls and not text.content else text.content}
        message["refusal"] = None
        if text.reasoning:
            message["reasoning_content"] = text.reasoning
        if calls:
            message |= {"function_call": calls[0]["function"]} if self.old_calls else {"tool_calls": calls}
        logprobs = {"content": choice.logprobs, "refusal": None} if self.wants_logprobs else None
        whole = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish}
        if self.return_token_ids:
            whole["token_ids"] = choice.ids
        return whole | stop_reason(text.stop_reason)

    def _finish_reason(self, choice: Choice) -> str:
        is_old = self.old_calls and choice.text.outcome == TOOL_CALLS
        return "function_call" if is_old else choice.text.outcome


def _drafted(choice: Choice | None, delta: Json) -> Json:
    """The numbers of tokens and characters of a chunk that were drafted."""
    if choice is None:
        return {"tokens": 0, "accepted": 0, "accepted_chars": 0}
    size = len(delta.get("content") or delta.get("reasoning_content") or "")
    chars = min(size, choice.accepted_chars)
    choice.accepted_chars -= chars
    return {"tokens": choice.tokens, "accepted": choice.accepted, "accepted_chars": chars}


def _call(call_id: str, name: str, arguments: str = "") -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _without_end(rows: list[TokenLogprob], event: StepOutput, eos_ids: frozenset[int]) -> list[TokenLogprob]:
    ended = event.finish is FinishReason.STOP and rows and rows[-1].id in eos_ids
    return rows[:-1] if ended else rows
