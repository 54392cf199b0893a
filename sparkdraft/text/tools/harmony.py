"""gpt-oss's harmony format: the text is messages, whose headers name a channel and a recipient.

    <|channel|>analysis<|message|>The user wants ...<|end|><|start|>assistant
    <|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

The prompt ends with "<|start|>assistant", so the first header continues from there. A recipient makes a message a call,
in any channel. Analysis is reasoning, all else is content. A header that breaks off is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

from sparkdraft.core import GrammarSpec
from sparkdraft.text.events import Content, Event, Parser, Reading, Reasoning
from sparkdraft.text.tools.base import Function, Messages, ToolFormat, Tools, json_rule, lark
from sparkdraft.text.tools.calls import CallReader

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
LONGEST_HEADER = 512
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
WORD = r"<\|(?:start|channel|constrain)\|>|to=[^\s<]++|assistant|analysis|commentary|final|json|code"
HALF_HEADER = re.compile(rf"(?:\s*(?:{WORD}))*\s*\S*")  # its last word may be half
CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser(CallReader):
    reads_reasoning: ClassVar[bool] = True

    def read(self) -> Reading[None]:
        yield from self.skip_space()
        first = (yield from self.peek()) == "t" and (yield from self.skip("to="))
        self.at = 0
        tag = "" if first else (yield from self.copy_until((START, CHANNEL, *ENDS), Content, hold_space=False))
        while tag or first:
            first = False
            if tag in ENDS:
                tag = yield from self.copy_until((START, CHANNEL, *ENDS), Content, hold_space=False)
            else:
                tag = yield from self._message(tag)

    def _message(self, tag: str) -> Reading[str]:
        """Read one message whose header began with this tag; returns the tag that ends it, "" at the end of text."""
        end, mark = yield from self.find((MESSAGE, START, *ENDS), LONGEST_HEADER)
        if tag and not mark and self.ended and HALF_HEADER.fullmatch(self.text):
            self.at = len(self.text)
            self.cut()
            return ""
        if mark != MESSAGE:
            self.give(Content(tag))
            return (yield from self._copy(Content))
        header, self.at = tag + self.text[:end], end + len(MESSAGE)
        found, channel = RECIPIENT.search(header), CHANNEL_NAME.search(header)
        name = self._function(found.group(1)) if found else None
        if name is not None:
            yield from self.skip_space()
            letter = yield from self.peek()
            if letter in ("", "{") or (letter == "<" and (yield from self._at_mark())):
                return (yield from self._call(name, letter))
            self.at = 0
            self.give(Content(tag))
            return (yield from self._copy(Content))
        self.cut()
        return (yield from self._copy(Reasoning if channel and channel.group(1) == "analysis" else Content))

    def _function(self, recipient: str) -> str | None:
        if recipient.startswith("functions."):
            return recipient.removeprefix("functions.") or None
        return recipient if recipient in self.functions else None

    def _at_mark(self) -> Reading[bool]:
        """True if the message ends here, without text."""
        found = yield from self.skip("<|")
        self.at -= 2 if found else 0
        return found

    def _call(self, name: str, letter: str) -> Reading[str]:
        self.begin(name)
        if letter == "{":
            if (yield from self.stream_object()):
                yield from self.skip_space()
                self.cut()
        elif letter:
            self.write("{}")  # a message without a text has no arguments
        return (yield from self._copy(Content))

    def _copy(self, event: Callable[[str], Event]) -> Reading[str]:
        return (yield from self.copy_until((*ENDS, START, CHANNEL), event, hold_space=False))


class Harmony(ToolFormat):
    name = "harmony"
    keep_special = True
    may_be_empty = True

    def parser(self, tools: Tools) -> Parser:
        return HarmonyParser(tools)

    def constraint(
        self, tools: Tools, only: str | None, parallel: bool, thinking: str = "", answer: str = ""
    ) -> GrammarSpec | None:
        # For these models the end of a call is the end of the text, so there is one call at a time.
        return super().constraint(tools, only, False, thinking, answer)

    def history(self, messages: Messages) -> list[dict[str, Any]]:
        """Rename reasoning to `thinking`, which the template takes with a call only if there is no other content."""
        out = super().history(messages)
        for message in out:
            if message.get("reasoning_content") and not (message.get("tool_calls") and message.get("content")):
                message.setdefault("thinking", message["reasoning_content"])
        return out

    def call_rules(self, rule: str, function: Function) -> str:
        head = f'{CHANNEL} {lark(f"commentary to=functions.{function.name} ")} <|constrain|> "json" {MESSAGE}'
        return f"{rule}: {head} {rule}_arguments\n{rule}_arguments: {json_rule(function.schema)}"
