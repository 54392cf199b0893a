"""Anthropic's Messages API: the request body as a ChatRequest, the answer as content blocks and events, and errors.

`chat_request` translates a body so that each turn of a conversation begins with the prompt of the turn before;
prompts.py renders it. `MessagesAnswer` writes the parser's events as blocks. routes/anthropic.py has the routes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, StringConstraints, model_validator

from sparkdraft.core import MAX_COUNT, MAX_STOP_CHARS, MAX_STOPS, REPETITION, FinishReason, StepOutput
from sparkdraft.server.protocol.chat import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    CalledFunction,
    ChatMessage,
    ChatRequest,
    ChosenFunction,
    Function,
    JsonSchema,
    Name,
    NamedChoice,
    ResponseFormat,
    Tool,
    ToolCallIn,
)
from sparkdraft.server.protocol.conversation import in_order, text_of
from sparkdraft.server.protocol.sampling import Fields, Stop
from sparkdraft.server.protocol.shapes import Answer, Chunk, Json, dumps
from sparkdraft.server.protocol.validation import ApiError, shown
from sparkdraft.server.protocol.written import TOOL_CALLS, Call, Written, parsed
from sparkdraft.text.events import Content, Event, Reasoning, ToolArguments, ToolCall, first_tag

MOST_TOOLS = 2000  # in a body, deferred ones included
BILLING = "x-anthropic-billing-header:"  # begins a block that differs between sessions and says nothing to the model
BETWEEN = "\n\n"  # between the texts of two blocks
SIGNATURE = "c3BhcmtkcmFmdA"  # of every thinking block: clients expect one, and it is not checked when it comes back
STOP_IDS = 4 * MAX_STOP_CHARS  # the last ids that a stop sequence can be in: a character has up to four tokens
T = TypeVar("T")
# OpenAI's choice by Anthropic's name; "tool" names one
CHOICES: dict[str, Literal["none", "auto", "required"]] = {"auto": "auto", "any": "required", "none": "none"}

# ---- the request body

Id = Annotated[str, StringConstraints(min_length=1)]
CalledName = Annotated[str, StringConstraints(min_length=1, max_length=128)]


class Source(Fields):
    type: str
    data: str | None = None
    content: str | Blocks | None = None


class Block(Fields):
    """A content block of any type: each type has some of these fields."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: Id | None = None
    name: CalledName | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Id | None = None
    content: str | Blocks | None = None
    is_error: bool | None = None
    tool_name: str | None = None
    title: str | None = None
    context: str | None = None
    source: str | Source | None = None


Blocks = Annotated[list[Block], Field(max_length=MAX_PARTS, fail_fast=True)]
Source.model_rebuild()
Block.model_rebuild()
OMITTED = Block(type="text", text="[An image was left out: this server reads text only.]")  # of a tool's result


class Message(Fields):
    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class OfferedTool(Fields):
    type: str | None = None
    name: Name | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    defer_loading: bool | None = None


class ToolChoice(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Fields):
    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Fields):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Fields):
    """The body of /v1/messages/count_tokens: the fields about the prompt."""

    required: ClassVar[Sequence[str]] = ("messages",)

    model: str | None = Field(None, description="a name from /v1/models; left out: the model that is served")
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: str | Blocks | None = None
    tools: Annotated[list[OfferedTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = Field(None, description="left out: off, where the model's thinking has a switch")
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="the older place of output_config.format")

    @model_validator(mode="before")
    @classmethod
    def _check_required(cls, body: Any) -> Any:
        """Say what is missing in Anthropic's words."""
        missing = [name for name in cls.required if isinstance(body, Mapping) and body.get(name) is None]
        if missing:
            raise ApiError(400, f"{missing[0]}: Field required", missing[0])
        return body

    @property
    def thinks(self) -> bool:
        return self.thinking is not None and self.thinking.type != "disabled"

    @property
    def may_call(self) -> bool:
        has_tools = any(tool.input_schema is not None for tool in self.tools or ())
        return has_tools and (self.tool_choice is None or self.tool_choice.type != "none")


class MessagesRequest(CountTokensRequest):
    required: ClassVar[Sequence[str]] = ("messages", "max_tokens")

    max_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    stream: bool | None = None
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


# ---- translation


def chat_request(body: CountTokensRequest, switch: str, repetition_limit: int = 0) -> ChatRequest:
    """The internal form of a body. switch: the chat template's variable that turns thinking on and off; "": none.
    repetition_limit: the server's own. It holds here although every request names max_tokens, because agents ask for
    tens of thousands, which a model in a loop would write."""
    tools = _custom_tools(body.tools or ())
    reader = _Reader(tools)
    try:
        messages = reader.messages(body)
    except RecursionError:
        sentence = "messages has blocks that are nested too deeply to be read; flatten them."
        raise ApiError(400, sentence, "messages") from None
    deferred = {tool.name for tool in body.tools or () if tool.defer_loading and tool.name in tools}
    choice = body.tool_choice
    known = reader.loaded | {choice.name if choice else None}
    called = [tool for name, tool in tools.items() if name not in deferred or name in known]
    _check_size("tools", len(called), MAX_TOOLS, "tools that are not deferred")
    config = body.output_config or OutputConfig()
    chat = ChatRequest(
        messages=messages,
        tools=called or None,
        tool_choice=_choice(choice),
        parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
        reasoning_effort=config.effort,
        chat_template_kwargs={switch: body.thinks} if switch else None,
        response_format=_response_format(config.format or body.output_format),
        continue_final_message=_is_open(messages[-1]) or None,
        repetition_limit=repetition_limit,
        **_sampling(body),
    )
    chat.deferred_tools, chat.effort_is_hint = frozenset(filter(None, deferred)), True
    chat.check()
    return chat


def _sampling(body: CountTokensRequest) -> dict[str, Any]:
    if not isinstance(body, MessagesRequest):
        return {}
    same = {name: getattr(body, name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
    return same | {"stop": body.stop_sequences or None}


def _is_open(last: ChatMessage) -> bool:
    """True if the answer continues the last message."""
    return last.role == "assistant" and bool(last.content) and not last.tool_calls


def _response_format(form: OutputFormat | None) -> ResponseFormat | None:
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=form.schema_)) if form else None


def _choice(choice: ToolChoice | None) -> Literal["none", "auto", "required"] | NamedChoice | None:
    if choice is None:
        return None
    if choice.type != "tool":
        return CHOICES[choice.type]
    if choice.name is None:
        raise ApiError(400, "tool_choice.name: Field required", "tool_choice.name")
    return NamedChoice(type="function", function=ChosenFunction(name=choice.name))


def _custom_tools(offered: Sequence[OfferedTool]) -> dict[str, Tool]:
    """The tools that the client runs itself, by name. Anthropic's own tools, which have no schema, are left out."""
    tools: dict[str, Tool] = {}
    for i, tool in enumerate(offered):
        if tool.input_schema is None and tool.type not in (None, "custom"):
            continue
        for name in ("name", "input_schema"):
            if getattr(tool, name) is None:
                raise ApiError(400, f"tools[{i}].{name} is missing; send it.", f"tools[{i}].{name}")
        assert tool.name
        if tool.name in tools:
            raise ApiError(400, f"Two tools have the name '{tool.name}'; give each its own.", "tools")
        function = Function(name=tool.name, description=tool.description, parameters=tool.input_schema)
        tools[tool.name] = Tool(type="function", function=function)
    return tools


@dataclass(slots=True)
class _Reader:
    """Reads the messages of a body, and notes the deferred tools that were loaded in them."""

    tools: Mapping[str, Tool]
    loaded: set[str | None] = field(default_factory=set)

    def messages(self, body: CountTokensRequest) -> list[ChatMessage]:
        found = []
        if system := self._system(body.system or "", "system"):
            found.append(ChatMessage(role="system", content=system))
        for i, message in enumerate(body.messages):
            found += self._translated(message, f"messages[{i}].content")
        messages = _merged(in_order(found))
        _check_size("messages", len(messages), MAX_MESSAGES, "messages, of which each tool result is one")
        if not messages:
            raise ApiError(400, "messages has no content; send a message with a text.", "messages")
        return messages

    def _translated(self, message: Message, place: str) -> list[ChatMessage]:
        if message.role == "system":
            text = self._system(message.content, place)
            return [ChatMessage(role="system", content=text)] if text else []
        if isinstance(message.content, str):
            is_empty = message.role == "assistant" and not message.content
            return [] if is_empty else [ChatMessage(role=message.role, content=message.content)]
        read = self._assistant if message.role == "assistant" else self._user
        return read(message.content, place)

    def _system(self, content: str | list[Block], place: str) -> str:
        if isinstance(content, list):
            content = [block for block in content if not (block.text or "").startswith(BILLING)]
        return self._text(content, place)

    def _user(self, blocks: Sequence[Block], place: str) -> list[ChatMessage]:
        """Results come first, because they answer the calls of the message before."""
        results, texts = [], []
        for block, where in _places(blocks, place):
            if block.type == "tool_result":
                results.append(self._result(block, where))
            else:
                texts.append(self._shown(block, where))
        if text := _joined(texts):
            return [*results, ChatMessage(role="user", content=text)]
        return results or [ChatMessage(role="user", content="")]

    def _result(self, block: Block, place: str) -> ChatMessage:
        call_id = _needed(block.tool_use_id, f"{place}.tool_use_id")
        content = block.content or ""
        if not isinstance(content, str):  # refusing it would refuse every later turn too
            content = [OMITTED if each.type == "image" else each for each in content]
        text = self._text(content, f"{place}.content")
        if block.is_error and not text.lower().startswith("error"):
            text = f"Error: {text}"
        return ChatMessage(role="tool", tool_call_id=call_id, content=text)

    def _assistant(self, blocks: Sequence[Block], place: str) -> list[ChatMessage]:
        """The message of an assistant; none if it has no content, as a message that only opens the answer."""
        texts, thoughts, calls = [], [], []
        for block, where in _places(blocks, place):
            if block.type == "thinking":
                thoughts.append(_needed(block.thinking, f"{where}.thinking"))
            elif block.type == "tool_use":
                calls.append(_call(block, where))
            elif block.type != "redacted_thinking":
                texts.append(self._shown(block, where))
        _check_size(place, len(calls), MAX_TOOLS, "tool_use blocks")
        text, thinking = _joined(texts), _joined(thoughts)
        if not (text or thinking or calls):
            return []
        return [
            ChatMessage(role="assistant", content=text, reasoning_content=thinking or None, tool_calls=calls or None)
        ]

    def _text(self, content: str | Sequence[Block], place: str) -> str:
        """The text of a string or of blocks. A string reads like a list with one block."""
        if isinstance(content, str):
            return content
        return _joined(self._shown(block, where) for block, where in _places(content, place))

    def _shown(self, block: Block, place: str) -> str:
        """The text of a block; an error if it has none."""
        match block.type:
            case "text":
                return _needed(block.text, f"{place}.text")
            case "tool_reference":
                return self._reference(_needed(block.tool_name, f"{place}.tool_name"))
            case "document":
                return _joined([block.title or "", block.context or "", self._source(block.source, f"{place}.source")])
            case "search_result":
                source = block.source if isinstance(block.source, str) else ""
                return _joined([block.title or "", source, self._text(block.content or "", f"{place}.content")])
            case "image":
                sentence = "is an image, and this server reads text only: remove the block, or describe it in a text."
                raise ApiError(400, f"{place} {sentence}", place)
        sentence = f"is of type {shown(block.type)}, which is not read here: remove the block, or send it as text."
        raise ApiError(400, f"{place} {sentence}", place)

    def _source(self, source: str | Source | None, place: str) -> str:
        """The text of a document."""
        match source:
            case Source(type="text", data=str(text)):
                return text
            case Source(type="content", content=str() | list() as content):
                return self._text(content, f"{place}.content")
        kind = source.type if isinstance(source, Source) else None
        sentence = "must have the type text and its data, or the type content and its content"
        raise ApiError(400, f"{place} is of type {shown(kind)}, and this server reads text only: it {sentence}.", place)

    def _reference(self, name: str) -> str:
        """The definition of a tool, where a search for tools has found it: the beginning of the prompt stays the same.
        A tool that is no longer offered is only named, and so is one that was defined before: many references are
        small, and definitions may be large."""
        tool = None if name in self.loaded else self.tools.get(name)
        self.loaded.add(name)
        found = tool.model_dump(exclude_none=True) if tool else {"name": name}
        return _as_json(found, "tools", ensure_ascii=False).encode("utf-8", "replace").decode()


def _call(block: Block, place: str) -> ToolCallIn:
    arguments = _as_json(_needed(block.input, f"{place}.input"), f"{place}.input")
    function = CalledFunction(name=_needed(block.name, f"{place}.name"), arguments=arguments)
    return ToolCallIn(id=_needed(block.id, f"{place}.id"), function=function)


def _merged(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages with neighbours of the user as one: Anthropic's API allows them, and many templates do not."""
    found: list[ChatMessage] = []
    for message in messages:
        if found and message.role == found[-1].role == "user":
            text = _joined([text_of(found.pop()), text_of(message)])
            message = ChatMessage(role="user", content=text)
        found.append(message)
    return found


def _joined(texts: Iterable[str]) -> str:
    return BETWEEN.join(filter(None, texts))


def _places(blocks: Sequence[Block], place: str) -> Iterable[tuple[Block, str]]:
    return ((block, f"{place}[{i}]") for i, block in enumerate(blocks))


def _needed(value: T | None, place: str) -> T:
    if value is None:
        raise ApiError(400, f"{place} is missing; send it.", place)
    return value


def _check_size(place: str, size: int, most: int, noun: str) -> None:
    if size > most:
        raise ApiError(400, f"{place} has {size} {noun}, and {most} is the limit; send fewer.", place)


def _as_json(value: Any, place: str, ensure_ascii: bool = True) -> str:
    """ensure_ascii: escape other letters, and with them half a surrogate pair, which is no text."""
    try:
        return json.dumps(value, ensure_ascii=ensure_ascii)
    except RecursionError:
        raise ApiError(400, f"{place} is nested too deeply to be read; flatten it.", place) from None


# ---- the answer

DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "partial_json": "input_json_delta"}


@dataclass(slots=True)
class WrittenBlock:
    type: str  # text, thinking or tool_use
    text: list[str] = field(default_factory=list)  # of a tool_use: its arguments
    call: int = -1  # the number of a tool_use's call


@dataclass(slots=True, kw_only=True)
class MessagesAnswer(Answer):
    chunk_kind = "message"
    done = b""

    request_id: str
    written: Written
    eos_ids: frozenset[int]
    stops: Sequence[str]
    max_tokens: int  # of the request
    max_model_len: int
    keep_special: bool  # whether special tokens are part of the text
    blocks: list[WrittenBlock] = field(default_factory=list)
    is_open: bool = False  # whether the last block is
    last_ids: list[int] = field(default_factory=list)
    stop_sequence: str | None = None  # that ended the text

    # ---- events

    def opening(self, num_prompt: int) -> list[Chunk]:
        message = self._message([], None, _usage(num_prompt, 0, 0))
        return [_event({"type": "message_start", "message": message})]

    def ping(self, said: str) -> bytes:
        return _event({"type": "ping"})

    def failure(self, error: ApiError) -> list[Chunk]:
        return [_event(error_body(error, self.request_id))]

    def push(self, event: StepOutput, prompt_index: int = 0) -> list[Chunk]:
        if self.stops:
            self.last_ids += event.ids
            if len(self.last_ids) > 2 * STOP_IDS:
                del self.last_ids[:-STOP_IDS]
        chunks = [chunk for each in self.written.push(event) for chunk in self._chunks(each)]
        if event.finish is FinishReason.STOP and event.stop_reason != REPETITION:
            self.stop_sequence = self._found_stop()
        return chunks

    def _chunks(self, event: Event) -> list[Chunk]:
        match event:
            case Content(text):
                return self._text("text", "text", text)
            case Reasoning(text):
                return self._text("thinking", "thinking", text)
            case ToolCall(index):
                return self._begin(WrittenBlock("tool_use", call=index))
            case ToolArguments(index, text) if self.is_open and self.blocks[-1].call == index:
                return [self._delta("partial_json", text)]
        return []  # the "{}" of an earlier call without arguments: its block has ended, and has it by default

    def _text(self, kind: str, name: str, text: str) -> list[Chunk]:
        begun = [] if self.is_open and self.blocks[-1].type == kind else self._begin(WrittenBlock(kind))
        return [*begun, self._delta(name, text)]

    def _begin(self, block: WrittenBlock) -> list[Chunk]:
        """End the block before, and begin this one."""
        ended = self._end_block()
        self.blocks.append(block)
        self.is_open = True
        begun = {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": self._content(block)}
        return [*ended, _event(begun)]

    def _end_block(self) -> list[Chunk]:
        if not self.is_open:
            return []
        self.is_open, index = False, len(self.blocks) - 1
        signature = {"type": "signature_delta", "signature": SIGNATURE}
        ends: list[Json] = [{"type": "content_block_stop", "index": index}]
        if self.blocks[-1].type == "thinking":
            ends.insert(0, {"type": "content_block_delta", "index": index, "delta": signature})
        return [_event(each) for each in ends]

    def _delta(self, name: str, text: str) -> bytes:
        self.blocks[-1].text.append(text)
        return b"event: content_block_delta\n" + self.text_chunk(len(self.blocks) - 1, name, text)

    def text_choice(self, index: int, name: str, text: str) -> Json:
        return {"type": "content_block_delta", "index": index, "delta": {"type": DELTAS[name], name: text}}

    def chunk(self, choice: Json, drafted: Json, is_last: bool) -> Json:
        return choice

    def last_chunks(self) -> list[Chunk]:
        chunks = [] if self.blocks else self._begin(WrittenBlock("text"))
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self.stop_sequence}
        last = {"type": "message_delta", "delta": delta, "usage": self._usage()}
        return [*chunks, *self._end_block(), _event(last), _event({"type": "message_stop"})]

    def all_ended(self) -> bool:
        return self.written.finish is not None

    # ---- the whole message

    def whole(self) -> Json:
        blocks = self.blocks or [WrittenBlock("text")]  # many clients read the first block without a look
        return self._message([self._content(block) for block in blocks], self._stop_reason(), self._usage())

    def _message(self, content: list[Json], stop_reason: str | None, usage: Json) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": self.stop_sequence,
            "usage": usage,
        }

    def _content(self, block: WrittenBlock) -> Json:
        text = "".join(block.text)
        if block.type == "tool_use":
            call, arguments = self.written.calls[block.call], parsed(text)
            valid = arguments if isinstance(arguments, dict) else {}  # {}: it begins, or was cut
            return {"type": "tool_use", "id": call.id, "name": call.name, "input": valid}
        if block.type == "thinking":
            return {"type": "thinking", "thinking": text, "signature": SIGNATURE if text else ""}
        return {"type": "text", "text": text}

    def _usage(self) -> Json:
        return _usage(self.tally.num_prompt, self.tally.num_cached, self.tally.num_output)

    def _stop_reason(self) -> str:
        if self.stop_sequence is not None:
            return "stop_sequence"
        outcome = self.written.outcome
        if outcome == TOOL_CALLS:  # no client may run a call that broke off, for which the input is {}
            return "max_tokens" if any(map(_is_broken, self.written.calls.values())) else "tool_use"
        if outcome != FinishReason.LENGTH.value:
            return "end_turn"
        is_full = self.tally.num_prompt + self.tally.num_output >= self.max_model_len
        return "model_context_window_exceeded" if is_full and self.tally.num_output < self.max_tokens else "max_tokens"

    def _found_stop(self) -> str | None:
        """The stop sequence that ended the text. The engine cuts it off the text, but the ids have it; a text without
        an end-of-text id may also have been ended by a complete grammar."""
        if not self.stops or not self.last_ids or self.last_ids[-1] in self.eos_ids:
            return None
        data = b"".join(self.tokenizer.token_bytes(token, not self.keep_special) for token in self.last_ids)
        found = first_tag(data.decode("utf-8", "ignore"), self.stops, 0)
        return found[1] if found else None


def _is_broken(call: Call) -> bool:
    return bool(call.arguments.strip()) and not isinstance(parsed(call.arguments), dict)


def _event(body: Json) -> bytes:
    return b"event: " + body["type"].encode() + b"\ndata: " + dumps(body) + b"\n\n"


def _usage(num_prompt: int, num_cached: int, num_output: int) -> Json:
    """Anthropic counts cached tokens apart from the other tokens of the prompt."""
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_output,
    }


# ---- errors

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
TOO_LONG = re.compile(r" has (more than )?(\d+) (tokens|characters)")  # of prompts.py
CHARS_PER_TOKEN = 4  # about as many as in English text


def error_body(error: ApiError, request_id: str | None = None) -> Json:
    """request_id: as in the header request-id of the answer and in the log."""
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    said = {"type": kind, "message": error.body()["error"]["message"]}
    return {"type": "error", "error": said, "request_id": request_id}


def is_too_long(error: ApiError) -> bool:
    return error.code == "context_length_exceeded"


def num_tokens(error: ApiError) -> tuple[int, bool]:
    """The tokens of a prompt that does not fit, and whether they were counted: far too long prompts are not."""
    found = TOO_LONG.search(error.message)
    if found is None:
        return 0, False
    more, count, unit = found.groups()
    return (int(count), not more) if unit == "tokens" else (int(count) // CHARS_PER_TOKEN, False)


def too_long(error: ApiError, max_model_len: int) -> ApiError:
    """The error of a prompt that does not fit in Anthropic's words, which clients parse. One token is the answer's."""
    count, most = max(num_tokens(error)[0], max_model_len), max_model_len - 1
    return ApiError(400, f"prompt is too long: {count} tokens > {most} maximum", error.param, error.code)


# ---- GET /v1/models, for clients that send the header anthropic-version


def model_list(names: Sequence[str], created: int, max_model_len: int | None) -> Json:
    models = [model_card(name, created, max_model_len) for name in names]
    return {"data": models, "has_more": False, "first_id": names[0], "last_id": names[-1]}


def model_card(name: str, created: int, max_model_len: int | None) -> Json:
    """created: in seconds since 1970. max_model_len: None while the model is not known yet."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": max_model_len,
        "max_tokens": max_model_len,
    }
