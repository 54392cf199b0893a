"""The answer to a Responses request: output items, and the events of their stream.

Each run of reasoning, text, or one call is an item. A stream tells where an item and its parts begin, grow and end; the
response at its end has the same items with the same ids.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar
from uuid import uuid4

from sparkdraft.core import FinishReason, StepOutput
from sparkdraft.server.protocol.response_items import encoded, new_id
from sparkdraft.server.protocol.response_tools import CUSTOM, FUNCTION, SEARCH, InputReader, Offered, Toolbox
from sparkdraft.server.protocol.shapes import Answer, Chunk, Json, chat_logprobs, dumps
from sparkdraft.server.protocol.validation import MAX_MESSAGE, ApiError
from sparkdraft.server.protocol.written import Written, parsed
from sparkdraft.text.events import Content, Event, Reasoning, ToolArguments, ToolCall

IN_PROGRESS, COMPLETED, INCOMPLETE, FAILED = "in_progress", "completed", "incomplete", "failed"
TOO_LONG = "context_length_exceeded"
UNUSED = dict.fromkeys(  # fields of the response that clients look for and that nothing here fills
    (
        "access_programs",
        "conversation",
        "image",
        "moderation",
        "prompt",
        "prompt_cache_diagnostics",
        "prompt_cache_options",
        "prompt_cache_retention",
        "tool_usage",
    )
)
Named = tuple[str, Json]  # an event: its type and its fields


class Item(ABC):
    kind: ClassVar[str]

    def __init__(self, index: int) -> None:
        self.index, self.id = index, new_id(self.kind)  # index: among the output items
        self.text = ""
        self.status = IN_PROGRESS

    @abstractmethod
    def json(self) -> Json: ...

    @abstractmethod
    def grow(self, text: str) -> list[Named]: ...

    def begin(self) -> list[Named]:
        return [("response.output_item.added", {"output_index": self.index, "item": self.json()})]

    def end(self, cut: bool) -> list[Named]:
        """cut: a limit ended the text within this item."""
        self.status = INCOMPLETE if cut else COMPLETED
        return [*self.ending(), ("response.output_item.done", {"output_index": self.index, "item": self.json()})]

    @abstractmethod
    def ending(self) -> list[Named]:
        """The events before the last one of the item."""

    def event(self, kind: str, **fields: object) -> Named:
        return f"response.{kind}", {"item_id": self.id, "output_index": self.index, **fields}


class Texts(Item):
    """An item with one part of text."""

    delta: ClassVar[str]  # name of the events

    @abstractmethod
    def part(self) -> Json: ...

    def begin(self) -> list[Named]:
        return [*super().begin(), self.event("content_part.added", content_index=0, part=self.part())]

    def grow(self, text: str) -> list[Named]:
        self.text += text
        return [self.event(f"{self.delta}.delta", content_index=0, delta=text)]

    def ending(self) -> list[Named]:
        return [
            self.event(f"{self.delta}.done", content_index=0, text=self.text),
            self.event("content_part.done", content_index=0, part=self.part()),
        ]

    def parts(self) -> list[Json]:
        """The parts as the item has them; it has none when it begins."""
        return [self.part()] if self.text else []


class MessageItem(Texts):
    kind, delta = "message", "output_text"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.logprobs: list[Json] = []

    def part(self) -> Json:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self.logprobs)}

    def json(self) -> Json:
        said = {"role": "assistant", "content": self.parts()}
        return {"id": self.id, "type": self.kind, "status": self.status, **said}

    def say(self, text: str, logprobs: list[Json]) -> list[Named]:
        self.logprobs += logprobs
        return [(name, fields | {"logprobs": logprobs}) for name, fields in self.grow(text)]

    def ending(self) -> list[Named]:
        (name, fields), part = super().ending()
        return [(name, fields | {"logprobs": self.logprobs}), part]


class ReasoningItem(Texts):
    kind, delta = "reasoning", "reasoning_text"

    def __init__(self, index: int, encodes: bool) -> None:
        self.encodes = encodes  # the text is in encrypted_content too
        super().__init__(index)

    def part(self) -> Json:
        return {"type": "reasoning_text", "text": self.text}

    def json(self) -> Json:
        carried = encoded(self.text) if self.encodes and self.status != IN_PROGRESS else None
        thoughts = {"summary": [], "content": self.parts(), "encrypted_content": carried}
        return {"id": self.id, "type": self.kind, "status": self.status, **thoughts}


class CallItem(Item):
    kind = "function_call"

    def __init__(self, index: int, call_id: str, name: str, tool: Offered | None) -> None:
        super().__init__(index)
        self.called: Json = {"call_id": call_id, "name": tool.own if tool else name}
        if tool and tool.namespace:
            self.called["namespace"] = tool.namespace

    def json(self) -> Json:
        return {"id": self.id, "type": self.kind, "status": self.status, **self.called, "arguments": self.text}

    def grow(self, text: str) -> list[Named]:
        self.text += text
        return [self.event("function_call_arguments.delta", delta=text)]

    def ending(self) -> list[Named]:
        last = [] if self.text else self.grow("{}")  # clients parse the arguments
        return [*last, self.event("function_call_arguments.done", arguments=self.text, name=self.called["name"])]

    def end(self, cut: bool) -> list[Named]:
        """A call that was cut does not end: clients run a call when its item is done."""
        if cut:
            self.status = INCOMPLETE
            return []
        return super().end(cut)


class CustomCallItem(CallItem):
    kind = "custom_tool_call"

    def __init__(self, index: int, call_id: str, name: str, tool: Offered | None) -> None:
        super().__init__(index, call_id, name, tool)
        self._reader = InputReader()

    def json(self) -> Json:
        return {"id": self.id, "type": self.kind, "status": self.status, **self.called, "input": self.text}

    def end(self, cut: bool) -> list[Named]:
        """An input that broke off is cut too, whatever ended the text: half a command is a command."""
        return super().end(cut or self._reader.is_broken)

    def grow(self, text: str) -> list[Named]:
        return self._delta(self._reader.feed(text))

    def _delta(self, known: str) -> list[Named]:
        self.text += known
        return [self.event("custom_tool_call_input.delta", delta=known)] if known else []

    def ending(self) -> list[Named]:
        last = self._delta(self._reader.finish())
        return [*last, self.event("custom_tool_call_input.done", input=self.text)]


class SearchItem(CallItem):
    """A search for tools, which the client runs. Its arguments are an object, and come at once."""

    kind = "tool_search_call"

    def json(self) -> Json:
        called = {"call_id": self.called["call_id"], "execution": "client", "arguments": parsed(self.text) or {}}
        return {"id": self.id, "type": self.kind, "status": self.status, **called}

    def grow(self, text: str) -> list[Named]:
        self.text += text
        return []

    def ending(self) -> list[Named]:
        return []


CALLS: dict[str, type[CallItem]] = {FUNCTION: CallItem, CUSTOM: CustomCallItem, SEARCH: SearchItem}
Kind = TypeVar("Kind", bound=Item)


@dataclass(slots=True, kw_only=True)
class ResponsesAnswer(Answer):
    chunk_kind = "response"
    done = b""  # the last event says that it is the last

    text: Written
    toolbox: Toolbox
    fields: Json  # of the response, from the request
    encodes_reasoning: bool = False
    wants_logprobs: bool = False
    keep: Callable[[Json], None] | None = None  # called with the response when it is complete
    items: list[Item] = field(default_factory=list)
    num_events: int = 0
    num_reasoning: int = 0  # tokens
    _heads: dict[str, bytes] = field(default_factory=dict)  # of deltas, by the item's id
    _open: Item | None = None
    _opened: bytes = b"{}"  # the response of the opening
    _calls: dict[int, CallItem] = field(default_factory=dict)  # by the parser's number
    _tokens: int = 0  # of text that the parser still holds, as are the next
    _logprobs: list[Json] = field(default_factory=list)

    # ---- events

    def opening(self, num_prompt: int) -> list[Chunk]:
        self._opened = dumps(self._response(IN_PROGRESS))
        return [self._state("created"), self._state(IN_PROGRESS)]

    def ping(self, said: str) -> bytes:
        """An event, because clients that wait for events do not count comments. It has the response of the opening,
        which is encoded once."""
        number, self.num_events = self.num_events, self.num_events + 1
        name = f"response.{IN_PROGRESS}"
        begin = dumps({"type": name, "sequence_number": number})[:-1]
        return b'event: %b\ndata: %b,"response":%b}\n\n' % (name.encode(), begin, self._opened)

    def failure(self, error: ApiError) -> list[Chunk]:
        response = self._response(FAILED) | {"error": {"code": error_code(error), "message": _cut(error.message)}}
        return [self._event("response.failed", {"response": response})]

    def push(self, event: StepOutput, prompt_index: int = 0) -> list[Chunk]:
        self._tokens += len(event.ids)
        if event.logprobs and self.wants_logprobs:
            ended = event.finish is FinishReason.STOP and event.logprobs[-1].id in self.text.eos_ids
            self._logprobs += chat_logprobs(event.logprobs[:-1] if ended else event.logprobs, self.tokenizer)
        found = [named for each in self.text.push(event) for named in self._write(each)]
        if event.finish:
            found += self._close(self._is_cut)
        return [self._event(name, fields) for name, fields in found]

    def last_chunks(self) -> list[Chunk]:
        response = self.whole()
        return [self._event(f"response.{response['status']}", {"response": response})]

    def _state(self, name: str) -> bytes:
        return self._event(f"response.{name}", {"response": self._response(IN_PROGRESS)})

    def _event(self, name: str, fields: Json) -> bytes:
        number, self.num_events = self.num_events, self.num_events + 1
        if "delta" in fields:
            return self._delta(name, fields, number)
        body = dumps({"type": name, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (name.encode(), body)

    def _delta(self, name: str, fields: Json, number: int) -> bytes:
        """Nearly all events are deltas, so what those of an item have in common is encoded once."""
        head = self._heads.get(fields["item_id"])
        if head is None:
            common = dumps({"type": name} | {key: fields[key] for key in fields if key not in ("delta", "logprobs")})
            head = self._heads[fields["item_id"]] = b"event: %b\ndata: %b" % (name.encode(), common[:-1])
        rows = fields.get("logprobs")
        logprobs = b"" if rows is None else b',"logprobs":%b' % (dumps(rows) if rows else b"[]")
        return b'%b%b,"sequence_number":%d,"delta":%b}\n\n' % (head, logprobs, number, dumps(fields["delta"]))

    # ---- items

    def _write(self, event: Event) -> list[Named]:
        tokens, rows = self._tokens, self._logprobs
        self._tokens, self._logprobs = 0, []
        match event:
            case Content(text):
                before, message = self._at(MessageItem, MessageItem)
                return before + message.say(text, rows)
            case Reasoning(text):
                self.num_reasoning += tokens
                encodes = self.encodes_reasoning
                before, thoughts = self._at(ReasoningItem, lambda index: ReasoningItem(index, encodes))
                return before + thoughts.grow(text)
            case ToolCall(index, call_id, name):
                call = self._calls[index] = self._call(call_id, name)
                return self._close() + self._begin(call)
            case ToolArguments(index, text):
                called = self._calls[index]
                return called.grow(text) if called is self._open else []

    def _at(self, kind: type[Kind], make: Callable[[int], Kind]) -> tuple[list[Named], Kind]:
        """The open item if it is of this kind, else a new one."""
        if isinstance(self._open, kind):
            return [], self._open
        item = make(len(self.items))
        return self._close() + self._begin(item), item

    def _call(self, call_id: str, name: str) -> CallItem:
        tool, index = self.toolbox[name], len(self.items)
        return CALLS[tool.kind if tool else FUNCTION](index, call_id, name, tool)

    def _begin(self, item: Item) -> list[Named]:
        self._open = item
        self.items.append(item)
        return item.begin()

    def _close(self, cut: bool = False) -> list[Named]:
        item, self._open = self._open, None
        return item.end(cut) if item else []

    # ---- the response

    @property
    def _is_cut(self) -> bool:
        """Whether a limit ended the text, or a call broke off."""
        return self.text.outcome == FinishReason.LENGTH.value or any(i.status == INCOMPLETE for i in self.items)

    def whole(self) -> Json:
        response = self._response(INCOMPLETE if self._is_cut else COMPLETED)
        response["incomplete_details"] = {"reason": "max_output_tokens"} if self._is_cut else None
        response["completed_at"] = None if self._is_cut else int(time.time())
        response |= {"usage": self._usage(), **self.metrics()}
        if self.keep:
            self.keep(response)
        return response

    def _response(self, status: str) -> Json:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": [item.json() for item in self.items],
            "usage": None,
            **UNUSED,
            **self.fields,
        }

    def _usage(self) -> Json:
        tally = self.tally
        return {
            "input_tokens": tally.num_prompt,
            "input_tokens_details": {"cached_tokens": tally.num_cached, "cache_write_tokens": 0},
            "output_tokens": tally.num_output,
            "output_tokens_details": {"reasoning_tokens": min(self.num_reasoning, tally.num_output)},
            "total_tokens": tally.num_prompt + tally.num_output,
        }

    def all_ended(self) -> bool:
        return self.text.finish is not None

    def text_choice(self, index: int, name: str, text: str) -> Json:
        raise NotImplementedError("a response has no choices")


def new_response_id() -> str:
    return f"resp_{uuid4().hex}"


def error_code(error: ApiError) -> str:
    """OpenAI's word for what failed, by which clients decide whether to try again."""
    if error.code == TOO_LONG:
        return TOO_LONG
    if error.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if error.status >= 500 else "invalid_prompt"


def _cut(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + " ..."
