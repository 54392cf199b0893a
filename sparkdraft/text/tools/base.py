"""A tool format: how calls are read, how they are forced, and whether the template or we tell the model about its
tools.

The grammar of a forced call has the same frame in every format (thoughts if there are any, then one call or several),
and a format fills in one call. text/grammar.py compiles and follows the grammar.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from sparkdraft.core import GrammarSpec
from sparkdraft.text.events import Parser
from sparkdraft.text.tools.schemas import MOST_LETTERS, Function, functions

MOST_CALLS = 16  # a small model under a grammar that allows more calls does not stop by itself

Tools = Sequence[dict[str, Any]]
Messages = Sequence[Mapping[str, Any]]


class ToolFormat(ABC):
    name: ClassVar[str]
    keep_special: ClassVar[bool] = False  # whether the parser needs to see special tokens
    separator: ClassVar[str] = ""  # Lark for what is between two calls
    parallel: ClassVar[bool] = True  # whether several calls are made where one is required and nothing else is asked
    may_be_empty: ClassVar[bool] = False  # whether a call after which the text ends at once is whole: without arguments

    @abstractmethod
    def parser(self, tools: Tools) -> Parser: ...

    def constraint(
        self, tools: Tools, only: str | None, parallel: bool, thinking: str = "", answer: str = ""
    ) -> GrammarSpec | None:
        """The grammar of calls: one call or more (just one if not 'parallel'), or exactly one of the function 'only'.
        thinking: Lark with a rule of that name for what may come before (ReasoningFormat.grammar). answer: Lark for
        what may be there instead of calls, and on further lines the rules that it needs. None if no function fits."""
        chosen = [function for function in functions(tools) if only in (None, function.name)]
        if not chosen:
            return None
        others = f" ({self.separator} call){{0,{MOST_CALLS - 1}}}" if parallel and only is None else ""
        text = self._grammar(chosen, others, thinking, answer)
        if len(text) > MOST_LETTERS:
            text = self._grammar([function.loosened() for function in chosen], others, thinking, answer)
        return GrammarSpec("lark", text)

    def _grammar(self, chosen: list[Function], others: str, thinking: str, answer: str) -> str:
        instead, _, more = answer.partition("\n")
        calls = f"call{others}"
        rules = [
            f"start: {'thinking ' if thinking else ''}{f'({calls} | {instead})' if answer else calls}",
            more,
            "call: " + " | ".join(f"call_{i}" for i in range(len(chosen))),
            *(self.call_rules(f"call_{i}", function) for i, function in enumerate(chosen)),
            self.common_rules(),
        ]
        return "\n".join(filter(None, [*rules, thinking])).rstrip() + "\n"

    @abstractmethod
    def call_rules(self, rule: str, function: Function) -> str:
        """Lark rules; 'rule' is a call of this function."""

    def common_rules(self) -> str:
        return ""

    def instructions(self, tools: Tools, required: bool = False, only: str | None = None) -> str | None:
        """Text for the system prompt; None if the chat template itself describes the tools. required: there must be a
        call; only: of this function."""
        return None

    def history(self, messages: Messages) -> list[dict[str, Any]]:
        """Earlier messages as the chat template wants them: clients send arguments as text, but templates need
        objects."""
        return [with_objects(message) for message in messages]


def lark(text: str) -> str:
    """A string in a Lark grammar."""
    return json.dumps(text)


def calls_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list | tuple) else []


def function_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """The function of a call in a message, with its arguments as an object. Clients send a call that broke off as half
    an object, which is shown to the model as text under a key: templates fail on anything else."""
    function = call.get("function", call)
    function = dict(function) if isinstance(function, Mapping) else {}
    arguments = value = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            value = None
    function["arguments"] = value if isinstance(value, dict) else {"arguments": arguments}
    return function


def with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    if not (calls := calls_of(message)):
        return dict(message)
    return {**message, "tool_calls": [{**call, "function": function_of(call)} for call in calls]}


def content_text(content: Any) -> str:
    """A message's content as text: a string, or the text parts of a list."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)
