"""Calls as JSON in tags, as Hermes, Qwen2.5 and Qwen3 write them.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

White space around calls is not content; a tag without a call is, unless the text ends within the call. Some models
write several objects within one pair of tags: each is a call.
"""

from __future__ import annotations

from typing import ClassVar

from sparkdraft.text.events import Content, Parser, Reading
from sparkdraft.text.tools.base import Function, ToolFormat, Tools, json_rule, lark
from sparkdraft.text.tools.calls import CallReader, is_half_object

OPEN, CLOSE = "<tool_call>", "</tool_call>"
SURPLUS = " \t\r\n}"  # between calls; a surplus brace is not content either


class HermesParser(CallReader):
    opens: ClassVar[tuple[str, ...]] = (OPEN,)

    def read(self) -> Reading[None]:
        while True:
            # The closing tag of a call that broke off still belongs to it.
            tags = self.opens if self.complete else (*self.opens, CLOSE)
            tag = yield from self.copy_until(tags, Content)
            if not tag:
                return
            before = self.space + tag
            if tag == CLOSE:
                self.complete = True
            elif not (yield from self.call(tag)):
                self.at = 0
                if self.was_cut and self.is_cut(tag):
                    return
                self.give(Content(before))
            elif self.complete:
                yield from self.end_of_call()

    def call(self, tag: str) -> Reading[bool]:
        """Read what follows an opening tag; False, with nothing given out, if it is not a call."""
        yield from self.skip_space()
        found = (yield from self.peek()) == "{" and (yield from self.json_call())
        while found and self.complete and (yield from self._further_call()):
            pass
        return found

    def is_cut(self, tag: str) -> bool:
        """True if the text ended within a call before its name was complete; it is then neither a call nor content."""
        text = self.text.lstrip()
        return not text or (text[0] == "{" and is_half_object(text))

    def _further_call(self) -> Reading[bool]:
        """Read another call within the same tags."""
        yield from self.skip_space(SURPLUS)
        self.cut()
        if (yield from self.peek()) == "{" and (yield from self.json_call()):
            return True
        self.at = len(self.text) if self.was_cut and is_half_object(self.text) else 0
        self.cut()
        return False

    def end_of_call(self) -> Reading[None]:
        yield from self.skip_space(SURPLUS)
        if not (yield from self.skip(CLOSE)) and self.was_cut and CLOSE.startswith(self.text[self.at :]):
            self.at = len(self.text)  # half a closing tag
        yield from self.skip_space()
        self.cut()


class Hermes(ToolFormat):
    name = "hermes"
    keep_special = True  # the tags are special tokens in some of these models
    separator = '"\\n"'
    gap: ClassVar[str] = "\n"  # between a tag and the call

    def parser(self, tools: Tools) -> Parser:
        return HermesParser(tools)

    def call_rules(self, rule: str, function: Function) -> str:
        head = lark(f'{OPEN}{self.gap}{{"name": {lark(function.name)}, "arguments": ')
        tail = lark("}" + self.gap + CLOSE)
        return f"{rule}: {head} {rule}_arguments {tail}\n{rule}_arguments: {json_rule(function.schema)}"
