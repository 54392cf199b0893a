"""A chat's answer: takes the engine's events, gives OpenAI's chunks, and the whole answer at the end.

There is one `ChatAnswer` per request, with its n choices. A stream sends the chunks that `push` returns; a blocking
answer drops them and takes `whole`, so both use one path. The parser finds calls and reasoning in the text
(text/events.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sparkdraft.core import REPETITION, FinishReason, TokenLogprob
from sparkdraft.server.messages import TokenEvent
from sparkdraft.server.protocol.shapes import (
    Json,
    Tally,
    TokenBytes,
    accepted_chars,
    chat_logprobs,
    prompt_logprobs,
    stop_reason,
)
from sparkdraft.text.events import Content, Event, Parser, Reasoning, ToolArguments, ToolCall, joined


@dataclass(slots=True)
class Choice:
    """One of the n texts so far."""

    parser: Parser
    begun: bool = False
    content: str = ""
    reasoning: str = ""
    calls: dict[int, Json] = field(default_factory=dict)
    logprobs: list[Json] = field(default_factory=list)
    finish: str | None = None
    stop_reason: str | None = None
    # Not sent yet, because the parser holds the text back:
    waiting_logprobs: list[Json] = field(default_factory=list)
    tokens: int = 0
    accepted: int = 0
    accepted_chars: int = 0


@dataclass(slots=True)
class ChatAnswer:
    id: str
    created: int
    model: str
    n: int
    tokenizer: TokenBytes
    eos_ids: frozenset[int]
    new_parser: Callable[[], Parser]
    wants_logprobs: bool = False
    parallel: bool = True  # False: only one call is asked for, and the first counts
    old_calls: bool = False  # OpenAI's older form: function_call instead of tool_calls
    may_be_empty: bool = False  # ToolFormat.may_be_empty
    prompt_logprobs: int | None = None  # how many alternatives beside each token of the prompt
    include_usage: bool = False  # this and the next two are about chunks
    usage_in_each: bool = False
    return_speculation: bool = False
    tally: Tally = field(default_factory=Tally)
    choices: dict[int, Choice] = field(default_factory=dict)
    prompt_rows: list[TokenLogprob | None] | None = None

    # ---- as it comes

    def push(self, event: TokenEvent, prompt_index: int = 0) -> list[Json]:
        """The chunks for this event; the last chunk of a choice has its finish reason."""
        choice = self.choices.get(event.index)
        if choice is None:
            choice = self.choices[event.index] = Choice(self.new_parser())
        self.prompt_rows = self.prompt_rows or event.prompt_logprobs
        self._count(choice, event)
        events = choice.parser.feed(event.text)
        is_cut = event.finish is FinishReason.LENGTH or event.stop_reason == REPETITION
        if event.finish:
            end = choice.parser.finish(is_cut)
            events = joined([*events, *end])  # several events at once become one delta
        chunks = []
        if not choice.begun:
            choice.begun = True
            chunks.append(self._chunk(event.index, {"role": "assistant", "content": ""}))
        deltas = [self._chunk(event.index, delta, choice) for delta in self._deltas(choice, events)]
        if self.may_be_empty and event.finish is FinishReason.STOP and event.ids and event.ids[-1] in self.eos_ids:
            missing = self._deltas(choice, _missing_arguments(choice))
            deltas += [self._chunk(event.index, delta, choice) for delta in missing]
        if deltas:
            chunks += deltas
            choice.accepted_chars = 0  # the remaining characters were markup, which is not shown
        if event.finish:
            choice.finish, choice.stop_reason = self._finish_reason(choice, event.finish, is_cut), event.stop_reason
            chunks.append(self._chunk(event.index, {}, choice, choice.finish))
        return chunks

    def last_chunks(self) -> list[Json]:
        """The chunks after all choices: the usage, if it was asked for."""
        if not self.include_usage:
            return []
        last = self._chunk(0, {}) | {"choices": [], "usage": self.tally.usage()}
        return [last | ({"metrics": self.tally.metrics()} if self.return_speculation else {})]

    def _count(self, choice: Choice, event: TokenEvent) -> None:
        choice.tokens += len(event.ids)
        choice.accepted += event.num_accepted
        if self.return_speculation:
            choice.accepted_chars += accepted_chars(event, self.tokenizer)
        if event.logprobs and self.wants_logprobs:
            rows = shown(event.logprobs, event, self.eos_ids)
            choice.waiting_logprobs += chat_logprobs(rows, self.tokenizer)

    def _deltas(self, choice: Choice, events: list[Event]) -> Iterator[Json]:
        for event in events:
            match event:
                case Content(text) if text:
                    choice.content += text
                    yield {"content": text}
                case Reasoning(text) if text:
                    choice.reasoning += text
                    yield {"reasoning_content": text}
                case ToolCall(index, call_id, name) if self.parallel or index == 0:
                    choice.calls[index] = _call(call_id, name)
                    yield self._call_delta({"index": index} | _call(call_id, name))
                case ToolArguments(index, text) if text and index in choice.calls:
                    choice.calls[index]["function"]["arguments"] += text
                    yield self._call_delta({"index": index, "function": {"arguments": text}})

    def _call_delta(self, call: Json) -> Json:
        return {"function_call": call["function"]} if self.old_calls else {"tool_calls": [call]}

    def _chunk(self, index: int, delta: Json, choice: Choice | None = None, finish: str | None = None) -> Json:
        """Make a chunk. With 'choice' it also carries what waits there."""
        body: Json = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        chunk = self._frame("chat.completion.chunk") | {"choices": [body]}
        if self.include_usage:
            chunk["usage"] = self.tally.usage() if self.usage_in_each else None
        if self.return_speculation:
            chunk |= _drafted(choice, delta)
        if choice:
            if finish:
                body |= stop_reason(choice.stop_reason)
            if choice.waiting_logprobs:
                body["logprobs"] = {"content": choice.waiting_logprobs, "refusal": None}
            choice.logprobs += choice.waiting_logprobs
            choice.waiting_logprobs, choice.tokens, choice.accepted = [], 0, 0
        is_last = finish and self.return_speculation and not self.include_usage and self._all_ended()
        return chunk | ({"metrics": self.tally.metrics()} if is_last else {})

    def _all_ended(self) -> bool:
        return sum(choice.finish is not None for choice in self.choices.values()) == self.n

    # ---- as one

    def whole(self) -> Json:
        answer = self._frame("chat.completion") | {
            "choices": [self._whole_choice(index, choice) for index, choice in sorted(self.choices.items())],
            "usage": self.tally.usage(),
        }
        if self.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(self.prompt_rows or [], self.prompt_logprobs, self.tokenizer)
        return answer | ({"metrics": self.tally.metrics()} if self.return_speculation else {})

    def _whole_choice(self, index: int, choice: Choice) -> Json:
        calls = [call for _, call in sorted(choice.calls.items())]
        message: Json = {"role": "assistant", "content": None if calls and not choice.content else choice.content}
        message["refusal"] = None
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if calls:
            message |= {"function_call": calls[0]["function"]} if self.old_calls else {"tool_calls": calls}
        logprobs = {"content": choice.logprobs, "refusal": None} if self.wants_logprobs else None
        whole = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish}
        return whole | stop_reason(choice.stop_reason)

    def _frame(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _finish_reason(self, choice: Choice, finish: FinishReason, is_cut: bool) -> str:
        """What follows the one call that was asked for, its closing tag included, is not given out, so it cannot be
        cut either."""
        if not choice.calls:
            return finish.value
        if is_cut and (self.parallel or not _is_object(choice.calls[0]["function"]["arguments"])):
            return FinishReason.LENGTH.value  # also of a call that repeats itself: no client may run it
        return "function_call" if self.old_calls else "tool_calls"


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _missing_arguments(choice: Choice) -> list[Event]:
    """The empty object for calls that the model has ended without arguments: clients parse them."""
    return [ToolArguments(index, "{}") for index, call in choice.calls.items() if not call["function"]["arguments"]]


def _drafted(choice: Choice | None, delta: Json) -> Json:
    """How much of a chunk was drafted; its text takes its share of the characters."""
    if choice is None:
        return {"tokens": 0, "accepted": 0, "accepted_chars": 0}
    size = len(delta.get("content") or delta.get("reasoning_content") or "")
    chars = min(size, choice.accepted_chars)
    choice.accepted_chars -= chars
    return {"tokens": choice.tokens, "accepted": choice.accepted, "accepted_chars": chars}


def _call(call_id: str, name: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}


def shown(rows: list[TokenLogprob], event: TokenEvent, eos_ids: frozenset[int]) -> list[TokenLogprob]:
    """The rows without that of the end-of-text token, which is not part of the text."""
    ended = event.finish is FinishReason.STOP and rows and rows[-1].id in eos_ids
    return rows[:-1] if ended else rows
