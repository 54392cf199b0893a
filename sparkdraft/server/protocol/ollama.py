"""Ollama's API: the bodies of /api/chat, /api/generate, /api/show and /api/pull, and answers as lines of JSON.

A chat or a prompt is translated into a `ChatRequest`, which checks it; routes/ollama.py sends it on its way. Sentences
about options name them as Ollama does.
"""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator

from sparkdraft.core import MAX_STOPS, FinishReason, StepOutput
from sparkdraft.server.protocol.chat import MAX_MESSAGES, MAX_TOOLS, ChatRequest, Function, as_json
from sparkdraft.server.protocol.conversation import in_order
from sparkdraft.server.protocol.sampling import ALL, INT64, Fields, MaxTokens, Stop
from sparkdraft.server.protocol.shapes import Answer, Chunk, Json, chat_logprobs, dumps, stop_reason
from sparkdraft.server.protocol.validation import ApiError, check_refused, from_validation
from sparkdraft.server.protocol.written import Call, Written, parsed
from sparkdraft.text.events import Content, Reasoning, ToolArguments, ToolCall
from sparkdraft.text.style import Thinking

FILL = -2  # as num_predict: as many tokens as fit, which is what -1 means here too
RANDOM = -1  # as seed: another one for every request
OPTIONS = {  # of sampling: Ollama's name -> ours
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
}
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "max": "high"}  # think -> reasoning_effort


def error_body(error: ApiError) -> Json:
    return {"error": error.body()["error"]["message"]}


# ---- requests


class CalledFunction(Fields):
    name: Annotated[str, Field(min_length=1, max_length=128)]
    arguments: dict[str, Any] | None = None


class CallIn(Fields):
    id: str | None = None
    function: CalledFunction


class Message(Fields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: Annotated[list[CallIn], Field(max_length=MAX_TOOLS)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def as_chat(self) -> Json:
        calls = [
            {
                "id": call.id,
                "function": {"name": call.function.name, "arguments": as_json(call.function.arguments or {})},
            }
            for call in self.tool_calls or []
        ]
        return {
            "role": self.role,
            "content": self.content or "",
            "name": self.tool_name,
            "reasoning_content": self.thinking,
            "tool_calls": calls or None,
            "tool_call_id": self.tool_call_id,
        }


class ToolIn(Fields):
    type: Literal["function"] | None = None
    function: Function


class Options(Fields):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = Field(None, description="-1: a random one")
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    num_predict: MaxTokens | None = Field(None, description="-1 and -2: up to the end of the context")
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: int | None = Field(None, description="-1: penalties have no window, as always here")
    penalize_newline: bool | None = None
    num_ctx: int | None = Field(None, description="accepted; the context is the server's")

    @model_validator(mode="before")
    @classmethod
    def _check_refused(cls, options: Any) -> Any:
        """Refuse samplers that are not supported. Options that only say how to use the hardware are ignored."""
        if isinstance(options, Mapping):
            check_refused({name: value for name, value in options.items() if name not in cls.model_fields})
        return options

    def check(self) -> None:
        if self.repeat_penalty in (None, 1) and not self.presence_penalty and not self.frequency_penalty:
            return
        if self.repeat_last_n not in (None, -1):
            sentence = f"options.repeat_last_n is {self.repeat_last_n}; penalties have no window here"
            raise ApiError(400, f"{sentence}: set it to -1, or leave it out.", "options")
        if self.penalize_newline is False:
            sentence = "options.penalize_newline is false; penalties apply to every token here: leave it out."
            raise ApiError(400, sentence, "options")

    def as_chat(self) -> Json:
        given = {ours: getattr(self, name) for name, ours in OPTIONS.items()}
        given["seed"] = None if self.seed == RANDOM else self.seed
        given["max_tokens"] = ALL if self.num_predict == FILL else self.num_predict
        return given


class ModelRequest(Fields):
    """The body of /api/show and /api/pull."""

    model: str | None = None
    name: str | None = Field(None, description="the older name of model")
    stream: bool | None = None


class WriteRequest(Fields):
    """Fields of both /api/chat and /api/generate."""

    model: str | None = None
    stream: bool | None = Field(None, description="true by default")
    format: Literal["", "json"] | dict[str, Any] | None = Field(None, description="json, or a JSON schema")
    options: Options | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    keep_alive: float | str | None = Field(None, description="accepted; the model stays loaded")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, description="only together with logprobs")

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """True if there is nothing to answer: clients load a model in this way."""

    @abstractmethod
    def as_chat(self, thinking: Thinking, name: str) -> ChatRequest:
        """The checked internal form. thinking, name: of the model."""

    def check(self) -> None:
        if self.options:
            self.options.check()

    def _as_chat(self, messages: Sequence[Json], thinking: Thinking, name: str, **more: Any) -> ChatRequest:
        body: Json = {"messages": messages, "stream": self.streams} | more
        body |= (self.options.as_chat() if self.options else {}) | think_fields(self.think, thinking, name)
        if self.logprobs:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.format == "json":
            body["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            body["response_format"] = {"type": "json_schema", "json_schema": {"schema": self.format}}
        try:
            chat = InnerRequest.model_validate(body)
        except ValidationError as error:  # a limit of the internal form
            found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
            raise from_validation(found, body) from None
        chat.messages = in_order(chat.messages)
        chat.check()
        return chat


class OllamaChatRequest(WriteRequest):
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[list[ToolIn], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None

    def check(self) -> None:
        WriteRequest.check(self)
        for i, message in enumerate(self.messages or []):
            if message.images:
                raise _no_images(f"messages[{i}].images")

    @property
    def is_empty(self) -> bool:
        return not self.messages

    def as_chat(self, thinking: Thinking, name: str) -> ChatRequest:
        messages = [message.as_chat() for message in self.messages or []]
        tools = [{"type": "function", "function": tool.function.model_dump()} for tool in self.tools or []]
        return self._as_chat(messages, thinking, name, tools=tools or None)


class OllamaGenerateRequest(WriteRequest):
    prompt: str | None = Field(None, description="empty: nothing is written, as where Ollama loads a model")
    system: str | None = None
    raw: bool | None = Field(None, description="true: without the chat template")
    template: str | None = None
    suffix: str | None = None
    context: list[Any] | None = None
    images: list[Any] | None = None

    def check(self) -> None:
        WriteRequest.check(self)
        if self.images:
            raise _no_images("images")
        if self.template:
            raise _unsupported("template", "leave it out, or write the whole prompt yourself and set raw to true")
        if self.suffix:
            raise _unsupported("suffix", "write the text around the gap into prompt")
        if self.context:
            raise _unsupported("context", "send the earlier messages to /api/chat")
        if self.raw and self.system:
            raise ApiError(400, "raw leaves out the chat template, which writes system; send only one.", "raw")
        if self.raw and self.think:
            raise ApiError(400, "raw leaves out the chat template, which turns thinking on; send only one.", "raw")

    @property
    def is_empty(self) -> bool:
        return not self.prompt

    def as_chat(self, thinking: Thinking, name: str) -> ChatRequest:
        roles = {"system": self.system, "user": self.prompt}
        return self._as_chat([{"role": role, "content": text} for role, text in roles.items() if text], thinking, name)


class InnerRequest(ChatRequest):
    """The internal form, with Ollama's names of options in its sentences."""

    names: ClassVar[Mapping[str, str]] = {
        **ChatRequest.names,
        **{ours: f"options.{name}" for name, ours in OPTIONS.items()},
    }

    @property
    def tokens_field(self) -> str:
        return "options.num_predict"


def think_fields(think: bool | str | None, thinking: Thinking, name: str) -> Json:
    """The fields of a ChatRequest that think sets. name: of the model."""
    if think is None:
        return {}
    if thinking.has_efforts and isinstance(think, str):
        return {"reasoning_effort": EFFORTS[think]}
    if thinking.switch:
        return {"chat_template_kwargs": {thinking.switch: bool(think)}}
    always = thinking.happens or thinking.has_efforts
    if think and not always:
        raise ApiError(400, f"{name!r} does not support thinking; leave think out, or set it to false.", "think")
    if not think and thinking.has_efforts and (not thinking.efforts or "none" in thinking.efforts):
        return {"reasoning_effort": "none"}
    if not think and always:
        levels = f", with the levels {', '.join(thinking.efforts)}" if thinking.efforts else ""
        raise ApiError(400, f"think is false, and this model always thinks{levels}; leave it out.", "think")
    return {}


def _no_images(place: str) -> ApiError:
    return ApiError(400, f"{place} is not empty, and this server reads text only; remove the images.", place)


def _unsupported(name: str, instead: str) -> ApiError:
    return ApiError(400, f"{name} is not supported here; {instead}.", name)


# ---- answers


def stamp(seconds: float | None = None) -> str:
    """A time since 1970, or now, as RFC 3339 in UTC."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return f"{moment.replace(tzinfo=None).isoformat(timespec='microseconds')}Z"


@dataclass(slots=True, kw_only=True)
class OllamaAnswer(Answer):
    """A stream is lines of JSON. Calls are sent whole, since their arguments are objects."""

    done: ClassVar[bytes] = b""
    media_type: ClassVar[bytes] = b"application/x-ndjson"

    text: Written
    eos_ids: frozenset[int]
    wants_logprobs: bool = False
    begin: float  # these four by the monotonic clock; when the request came
    submitted: float = field(default_factory=time.monotonic)
    first: float = 0.0  # when the first token came
    last: float = 0.0
    content: str = ""  # these three as sent so far
    thinking: str = ""
    calls: list[Json] = field(default_factory=list)
    open_call: int | None = None  # the index of a call whose arguments are being written
    logprobs: list[Json] = field(default_factory=list)
    waiting_logprobs: list[Json] = field(default_factory=list)  # of text that the parser holds back

    @staticmethod
    @abstractmethod
    def part(content: str = "", thinking: str = "", tool_calls: Sequence[Json] = ()) -> Json:
        """The fields of an answer, or of a line, that hold what was written."""

    @classmethod
    def loaded(cls, name: str) -> Json:
        """The answer to a request that writes nothing, with which clients load a model."""
        return {"model": name, "created_at": stamp(), **cls.part(), "done": True, "done_reason": "load"}

    # ---- lines

    def ping(self, said: str) -> bytes:
        """A line without text. Clients parse every line, so that none may be blank."""
        return self._line(self.part())

    def failure(self, error: ApiError) -> list[Chunk]:
        return [dumps(error_body(error)) + b"\n"]

    def push(self, event: StepOutput, prompt_index: int = 0) -> list[Chunk]:
        self.last = time.monotonic()
        self.first = self.first or self.last
        self._take_logprobs(event)
        parts: list[Json] = []
        for each in self.text.push(event):
            if not isinstance(each, ToolArguments):
                parts += self._ended_call()
            match each:
                case Content(text):
                    parts.append(self._written("content", text))
                case Reasoning(text):
                    parts.append(self._written("thinking", text))
                case ToolCall(index, _, _):
                    self.open_call = index
        if event.finish:
            parts += self._ended_call()
        return [self._line(part | self._told_logprobs()) for part in parts]

    def last_chunks(self) -> list[Chunk]:
        return [self._line(self.part() | self._told_logprobs() | self._ending(), is_last=True)]

    def _line(self, fields: Json, is_last: bool = False) -> bytes:
        return dumps(self._head() | fields | {"done": is_last}) + b"\n"

    def _head(self) -> Json:
        return {"model": self.model, "created_at": stamp()}

    def _written(self, name: str, text: str) -> Json:
        setattr(self, name, getattr(self, name) + text)
        return self.text_choice(0, name, text)

    def text_choice(self, index: int, name: str, text: str) -> Json:
        return self.part(text) if name == "content" else self.part(thinking=text)

    def _ended_call(self) -> list[Json]:
        """The part with the call that has just ended, if one has. A call that broke off is shown as text."""
        if self.open_call is None:
            return []
        index, self.open_call = self.open_call, None
        call = self.text.calls[index]
        arguments = _object(call)
        if arguments is None:
            return [self._written("content", f"{call.name} {call.arguments}")]
        whole = {"id": call.id, "function": {"index": len(self.calls), "name": call.name, "arguments": arguments}}
        self.calls.append(whole)
        return [self.part(tool_calls=[whole])]

    # ---- the end

    def whole(self) -> Json:
        logprobs = {"logprobs": self.logprobs + self.waiting_logprobs} if self.wants_logprobs else {}
        written = self.part(self.content, self.thinking, self.calls)
        return self._head() | written | logprobs | {"done": True} | self._ending()

    def all_ended(self) -> bool:
        return self.text.finish is not None

    def _ending(self) -> Json:
        """Why the text ended, counts, and times in nanoseconds: until the first token, and from there to the last."""
        why = FinishReason.LENGTH if self.text.outcome == FinishReason.LENGTH else FinishReason.STOP
        return {
            "done_reason": why.value,
            **stop_reason(self.text.stop_reason),
            "total_duration": _nanoseconds(self.begin, self.last),
            "load_duration": 0,  # the model is loaded before a request can come
            "prompt_eval_count": self.tally.num_prompt,
            "prompt_eval_duration": _nanoseconds(self.submitted, self.first),
            "eval_count": self.tally.num_output,
            "eval_duration": _nanoseconds(self.first, self.last),
        }

    # ---- log-probabilities

    def _take_logprobs(self, event: StepOutput) -> None:
        if not self.wants_logprobs or not event.logprobs:
            return
        ended = event.finish is FinishReason.STOP and event.logprobs[-1].id in self.eos_ids
        rows = event.logprobs[:-1] if ended else event.logprobs
        self.waiting_logprobs += chat_logprobs(rows, self.tokenizer)

    def _told_logprobs(self) -> Json:
        """The field with what waits, for the next line."""
        if not self.waiting_logprobs:
            return {}
        told, self.waiting_logprobs = self.waiting_logprobs, []
        self.logprobs += told
        return {"logprobs": told}


class OllamaChatAnswer(OllamaAnswer):
    @staticmethod
    def part(content: str = "", thinking: str = "", tool_calls: Sequence[Json] = ()) -> Json:
        message: Json = {"role": "assistant", "content": content}
        if thinking:
            message["thinking"] = thinking
        if tool_calls:
            message["tool_calls"] = list(tool_calls)
        return {"message": message}


class OllamaGenerateAnswer(OllamaAnswer):
    @staticmethod
    def part(content: str = "", thinking: str = "", tool_calls: Sequence[Json] = ()) -> Json:
        return {"response": content} | ({"thinking": thinking} if thinking else {})


def _nanoseconds(begin: float, end: float) -> int:
    """At least 1: clients divide by it."""
    return max(1, round((end - begin) * 1e9))


def _object(call: Call) -> Json | None:
    """The arguments of a call; None if they are no object that JSON can hold."""
    value = parsed(call.arguments)
    if not isinstance(value, dict):
        return None
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return value
