"""The input items of a Responses request, as the messages of a chat.

Reasoning, text and calls that follow each other are one assistant message, as they were one text when the model wrote
them: so the prompt of a turn begins with the prompt of the turn before. Tools are in response_tools.py.
"""

from __future__ import annotations

import base64
import binascii
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import Field

from sparkdraft.server.protocol.chat import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    NOUNS,
    CalledFunction,
    ChatMessage,
    ToolCallIn,
    as_json,
)
from sparkdraft.server.protocol.conversation import INSTRUCTS
from sparkdraft.server.protocol.response_tools import SEARCH, Find, Given, Toolbox, validated, wrapped
from sparkdraft.server.protocol.sampling import Fields
from sparkdraft.server.protocol.shapes import Json, dumps
from sparkdraft.server.protocol.validation import ApiError, shown

TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
REFERENCE, MORE_TOOLS = "item_reference", "additional_tools"
SEARCH_OUTPUT = "tool_search_output"
# Calls of hosted tools in a conversation that another server began: what they found is not in the item.
LEFT_OUT = ("web_search_call", "image_generation_call", "mcp_list_tools")
MAX_DEPTH = 200
BETWEEN = "\n\n"  # two texts that become one
PREFIXES = {  # of the ids of items, by type
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
}
Called = Annotated[str, Field(min_length=1, max_length=128)]


class ItemPart(Fields):
    type: str
    text: str | None = None
    refusal: str | None = None


Content = str | Annotated[list[ItemPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class Message(Fields):
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class ReasoningItem(Fields):
    content: Annotated[list[ItemPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    encrypted_content: str | None = None


class FunctionCall(Fields):
    call_id: str
    name: Called
    namespace: str | None = None
    arguments: str


class CustomCall(Fields):
    call_id: str
    name: Called
    namespace: str | None = None
    input: str


class SearchCall(Fields):
    call_id: str | None = None  # null where OpenAI's servers searched
    arguments: Any = None


class CallOutput(Fields):
    call_id: str
    output: Content


class MoreTools(Fields):
    call_id: str | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)]


def new_id(kind: str) -> str:
    return f"{PREFIXES.get(kind, 'item')}_{uuid4().hex}"


def kind_of(item: Json) -> Any:
    """The type of an item; those of messages and references may be left out."""
    return item.get("type") or ("message" if "role" in item else REFERENCE if "id" in item else None)


def resolved(items: Sequence[Json], find: Find) -> list[Json]:
    """Put stored items in place of references to them. Each may be named once: a reference is small, an item is not."""
    names = Counter(str(item.get("id")) for item in items if kind_of(item) == REFERENCE)
    if twice := next((name for name, count in names.items() if count > 1), None):
        raise ApiError(400, f"input refers to the item {shown(twice)} more than once; name it once.", "input")
    return [_found(item, f"input[{i}]", find) if kind_of(item) == REFERENCE else item for i, item in enumerate(items)]


def _found(item: Json, place: str, find: Find) -> Json:
    name = item.get("id")
    found = find(name) if isinstance(name, str) else None
    if found is None:
        sentence = f"{place} refers to the item {shown(name)}, which is not stored here; send the item itself."
        raise ApiError(400, sentence, f"{place}.id")
    return found


def tools_in(before: Sequence[Json], items: Sequence[Json]) -> list[Given]:
    """The tools that items add to those of the request. Those of items before the first that is said are shown with
    the request's own. before: the items of the responses that this one continues."""
    found: list[Given] = []
    begun = False
    for i, item in enumerate([*before, *items], -len(before)):
        if kind_of(item) in (MORE_TOOLS, SEARCH_OUTPUT):
            tools = validated(MoreTools, item, f"input[{i}]").tools
            found += [Given(f"input[{i}].tools[{j}]", tool, begun) for j, tool in enumerate(tools)]
        begun |= kind_of(item) != MORE_TOOLS and item.get("role") not in INSTRUCTS
    return found


def for_storing(items: Iterable[Json]) -> list[Json]:
    """The items with ids, and messages in their long form, as the list of input items shows them."""
    return [_whole(item) for item in items]


def _whole(item: Json) -> Json:
    kind = kind_of(item)
    name = item.get("id")
    whole = item | {"id": name if isinstance(name, str) and name else new_id(kind), "type": kind}
    if kind == "message" and isinstance(item.get("content"), str):
        is_own = item.get("role") == "assistant"
        part = {"type": "output_text", "text": item["content"], "annotations": []} if is_own else None
        whole["content"] = [part or {"type": "input_text", "text": item["content"]}]
    if kind == "message":
        whole.setdefault("status", "completed")
    return whole


def check_plain(value: Any, name: str) -> None:
    """Refuse what cannot be sent back or stored: numbers that JSON does not have, and deep nesting."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (child for each in level for child in (each.values() if isinstance(each, dict) else each))
        level = [child for child in inner if isinstance(child, dict | list)]
        if not level:
            break
    else:
        sentence = f"{name} has more than {MAX_DEPTH} objects and lists within each other, the limit; flatten it."
        raise ApiError(400, sentence, name)
    try:
        dumps(value)
    except ValueError:
        raise ApiError(400, f"{name} has NaN or an infinite number, which JSON does not have.", name) from None


# ---- reasoning that the client carries


def encoded(reasoning: str) -> str:
    """The text as `encrypted_content`. This is an encoding and not a secret: the text itself is in the item too."""
    return base64.b64encode(reasoning.encode("utf-8", "replace")).decode("ascii")


def decoded(content: str | None) -> str:
    """The text of our own `encrypted_content`; "" for another server's, which only that server can read."""
    try:
        return base64.b64decode(content or "", validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        return ""


# ---- messages


@dataclass(slots=True)
class Turn:
    """What the assistant wrote until another spoke."""

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[ToolCallIn] = field(default_factory=list)

    def message(self, place: str) -> ChatMessage:
        if len(self.calls) > MAX_TOOLS:
            sentence = f"{len(self.calls)} calls follow each other up to {place}, and {MAX_TOOLS} is the limit."
            raise ApiError(400, sentence, "input")
        return ChatMessage(
            role="assistant",
            content=BETWEEN.join(filter(None, self.content)) or None,
            reasoning_content=BETWEEN.join(filter(None, self.reasoning)) or None,
            tool_calls=self.calls or None,
        )


class Conversation:
    """Turns items into messages, in their order."""

    def __init__(self, toolbox: Toolbox) -> None:
        self.toolbox = toolbox
        self.messages: list[ChatMessage] = []
        self._described: set[str] = set()  # names of tools
        self._turn: Turn | None = None

    def add(self, item: Json, place: str) -> None:
        match kind := kind_of(item):
            case "message":
                self._message(validated(Message, item, place), place)
            case "reasoning":
                self._open.reasoning.append(_thought(validated(ReasoningItem, item, place), place))
            case "function_call":
                call = validated(FunctionCall, item, place)
                self._call(call, call.arguments or "{}")
            case "custom_tool_call":
                custom = validated(CustomCall, item, place)
                self._call(custom, wrapped(custom.input))
            case "function_call_output" | "custom_tool_call_output":
                output = validated(CallOutput, item, place)
                text = _text(output.output, f"{place}.output")
                self._say(ChatMessage(role="tool", tool_call_id=output.call_id, content=text), place)
            case "tool_search_call":
                self._search(validated(SearchCall, item, place))
            case "tool_search_output":
                found = validated(MoreTools, item, place)
                text = self.toolbox.described(found.tools, f"{place}.tools", self._described)
                self._say(ChatMessage(role="tool", tool_call_id=found.call_id, content=text), place)
            case "additional_tools":
                self._more_tools(validated(MoreTools, item, place), place)
            case _ if kind not in LEFT_OUT:
                raise _unreadable(kind, place)

    def end(self, place: str = "the end") -> list[ChatMessage]:
        """The messages, once all items were added."""
        if self._turn:
            self.messages.append(self._turn.message(place))
            self._turn = None
        if len(self.messages) > MAX_MESSAGES:
            sentence = f"input is {len(self.messages):,} messages, and {MAX_MESSAGES:,} is the limit; send fewer."
            raise ApiError(400, sentence, "input")
        return self.messages

    def _message(self, message: Message, place: str) -> None:
        text = _text(message.content, f"{place}.content")
        if message.role == "assistant":
            self._open.content.append(text)
        else:
            self._say(ChatMessage(role=message.role, content=text), place)

    def _say(self, message: ChatMessage, place: str) -> None:
        self.end(place).append(message)

    def _more_tools(self, more: MoreTools, place: str) -> None:
        """Tools that the beginning of the prompt does not show are described here."""
        if self._turn or any(message.role not in INSTRUCTS for message in self.messages):
            text = self.toolbox.described(more.tools, f"{place}.tools", self._described)
            self._say(ChatMessage(role="developer", content=f"More tools: {text}"), place)

    @property
    def _open(self) -> Turn:
        self._turn = self._turn or Turn()
        return self._turn

    def _search(self, call: SearchCall) -> None:
        arguments = call.arguments if isinstance(call.arguments, str) else as_json(call.arguments or {}, "input")
        self._open.calls.append(ToolCallIn(id=call.call_id, function=CalledFunction(name=SEARCH, arguments=arguments)))

    def _call(self, call: FunctionCall | CustomCall, arguments: str) -> None:
        tool = self.toolbox.named(call.name, call.namespace)
        function = CalledFunction(name=tool.name if tool else call.name, arguments=arguments)
        self._open.calls.append(ToolCallIn(id=call.call_id, function=function))


def _thought(item: ReasoningItem, place: str) -> str:
    return _text(item.content or [], f"{place}.content") or decoded(item.encrypted_content)


def _text(content: str | list[ItemPart], place: str) -> str:
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.type not in TEXTS:
            kind = next((noun for word, noun in NOUNS.items() if word in part.type), "no text")
            raise ApiError(
                400,
                f"{place}[{i}] is {kind} (type {shown(part.type)}), and this server reads text only: "
                "remove the part, or send its content as text.",
                f"{place}[{i}]",
            )
        if part.text is None and part.refusal is None:
            raise ApiError(400, f"{place}[{i}] has no text; send one.", f"{place}[{i}].text")
    return "".join(part.text or part.refusal or "" for part in content)


def _unreadable(kind: Any, place: str) -> ApiError:
    what = f"{place}.type is {shown(kind)}" if kind is not None else f"{place} has no type"
    kinds = f"{', '.join(PREFIXES)} and {REFERENCE}"
    return ApiError(400, f"{what}, which this server cannot read; the types are {kinds}.", f"{place}.type")
