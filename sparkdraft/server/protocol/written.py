"""One text as its parser reads it: content, reasoning and calls. The answers of every chat protocol are made of these.

A protocol passes the engine's outputs to `Written.push`, writes the events that come back in its own form, and reads
the whole text and why it ended from the record afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sparkdraft.core import REPETITION, FinishReason, StepOutput
from sparkdraft.text.events import Content, Event, Parser, Reasoning, ToolArguments, ToolCall, joined

TOOL_CALLS = "tool_calls"


@dataclass(slots=True)
class Call:
    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Written:
    parser: Parser
    eos_ids: frozenset[int]
    parallel: bool = True  # False: only the first call counts
    may_be_empty: bool = False  # ToolFormat.may_be_empty
    content: str = ""
    reasoning: str = ""
    calls: dict[int, Call] = field(default_factory=dict)
    finish: FinishReason | None = None
    stop_reason: str | None = None
    is_cut: bool = False  # a limit or the rule for repetition ended it

    def push(self, output: StepOutput) -> list[Event]:
        """The events of what was added; several at once are joined. Calls that do not count are left out."""
        events = self.parser.feed(output.text)
        if output.finish:
            self.finish, self.stop_reason = output.finish, output.stop_reason
            self.is_cut = output.finish is FinishReason.LENGTH or output.stop_reason == REPETITION
            events = joined([*events, *self.parser.finish(self.is_cut)])
        kept = [event for event in events if self._counts(event)]
        if self.may_be_empty and output.finish is FinishReason.STOP and output.ids and output.ids[-1] in self.eos_ids:
            kept += [event for event in self._missing_arguments() if self._counts(event)]
        return kept

    @property
    def outcome(self) -> str:
        """Why it ended: a finish reason, or "tool_calls". If only one call was asked for, text after it is not shown,
        so an answer cut there is complete."""
        assert self.finish
        if not self.calls:
            return self.finish.value
        if self.is_cut and (self.parallel or not _is_object(self.calls[0].arguments)):
            return FinishReason.LENGTH.value  # also for a call that repeats itself: no client may run it
        return TOOL_CALLS

    def _counts(self, event: Event) -> bool:
        """Adds an event to the whole text. Returns whether there is anything to show of it."""
        match event:
            case Content(text) if text:
                self.content += text
            case Reasoning(text) if text:
                self.reasoning += text
            case ToolCall(index, call_id, name) if self.parallel or index == 0:
                self.calls[index] = Call(call_id, name)
            case ToolArguments(index, text) if text and index in self.calls:
                self.calls[index].arguments += text
            case _:
                return False
        return True

    def _missing_arguments(self) -> Iterator[Event]:
        """Empty objects for calls without arguments: clients parse the arguments."""
        return (ToolArguments(index, "{}") for index, call in list(self.calls.items()) if not call.arguments)


def parsed(arguments: str) -> Any:
    """The arguments of a call as JSON; None where the call was cut."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return None


def _is_object(arguments: str) -> bool:
    return isinstance(parsed(arguments), dict)
