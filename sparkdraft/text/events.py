"""Events of a model's text (content, reasoning, tool calls), and the base of the parsers that find them.

A parser is a generator that reads as if the whole text were there and pauses where the text ends so far. So any
division into pieces gives the same events. The formats are in reasoning.py and tools/.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The beginning of a call; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """A piece of a call's arguments. Joined, they are a JSON object, unfinished if the model broke off."""

    index: int
    text: str


Event = Content | Reasoning | ToolCall | ToolArguments
T = TypeVar("T")
Reading = Generator[None, None, T]  # yields where it needs more text


class Parser(Protocol):
    def feed(self, text: str) -> list[Event]: ...

    def finish(self, cut: bool = False) -> list[Event]:
        """End the text. cut: a limit ended it, not the model."""


def joined(events: Sequence[Event]) -> list[Event]:
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, ToolArguments) and isinstance(last, ToolArguments) and last.index == event.index:
            out[-1] = ToolArguments(event.index, last.text + event.text)
        elif isinstance(event, Content) and isinstance(last, Content):
            out[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + event.text)
        else:
            out.append(event)
    return out


class Reader(ABC):
    """The base of all parsers: each format defines `read` with the helpers below.

        text:   | read, can be read again | not read |  arrives ...
                0                         at         len

    Text that was given out or dropped is removed from the front. To read again, set `at` to 0.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.space = ""  # the white space before the tag, which `copy_until` does not give out
        self.ended = False  # no more text will come
        self.was_cut = False  # a limit ended the text
        self._events: list[Event] = []
        self._run = self.read()

    def feed(self, text: str) -> list[Event]:
        assert not self.ended, "feed after finish"
        self.text += text
        return self._advance() if text else []

    def finish(self, cut: bool = False) -> list[Event]:
        self.ended, self.was_cut = True, cut
        return self._advance()

    def _advance(self) -> list[Event]:
        next(self._run, None)
        events, self._events = joined(self._events), []
        return events

    @abstractmethod
    def read(self) -> Reading[None]:
        """Read the whole text."""

    def give(self, event: Event) -> None:
        """Give out an event; the text that was read so far cannot be read again."""
        if not isinstance(event, Content | Reasoning | ToolArguments) or event.text:
            self._events.append(event)
        self.cut()

    def cut(self) -> None:
        self.text, self.at = self.text[self.at :], 0

    def more(self) -> Reading[bool]:
        """False if no more text will come."""
        if self.ended:
            return False
        yield
        return True

    def peek(self) -> Reading[str]:
        """The next character, "" at the end."""
        while self.at >= len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.at]

    def skip(self, literal: str) -> Reading[bool]:
        """Read this literal if it comes next."""
        while not self.text.startswith(literal, self.at):
            if not literal.startswith(self.text[self.at :]) or not (yield from self.more()):
                return False
        self.at += len(literal)
        return True

    def skip_space(self, letters: str = " \t\r\n") -> Reading[None]:
        while (letter := (yield from self.peek())) and letter in letters:
            self.at += 1

    def find(self, tags: Sequence[str], limit: int = 0) -> Reading[tuple[int, str]]:
        """Find the first complete tag: (its start, the tag), or (end of text, "") if there is none within the limit."""
        longest, seen = max(map(len, tags)), self.at
        while (found := first_tag(self.text, tags, seen)) is None:
            seen = max(self.at, len(self.text) - longest + 1)
            if (limit and seen > self.at + limit) or not (yield from self.more()):
                return len(self.text), ""
        return found if not limit or found[0] <= self.at + limit else (len(self.text), "")

    def copy_until(self, tags: Sequence[str], event: Callable[[str], Event], hold_space: bool = True) -> Reading[str]:
        """Give out all text before the first of these tags, and read the tag; "" if there is none. White space right
        before the tag is kept in `space` instead."""
        while True:
            self.cut()
            found = first_tag(self.text, tags, 0)
            end = found[0] if found else len(self.text) - held(self.text, tags)
            ready = self.text[:end].rstrip() if hold_space else self.text[:end]
            self.at = len(ready)
            self.give(event(ready))
            if found:
                self.space = self.text[: end - len(ready)]
                self.at = len(self.space) + len(found[1])
                self.cut()
                return found[1]
            if not (yield from self.more()):
                self.at = len(self.text)
                self.give(event(self.text))
                return ""

    def copy_rest(self) -> Reading[None]:
        """Give out all text that is left as content."""
        while True:
            self.at = len(self.text)
            self.give(Content(self.text))
            if not (yield from self.more()):
                return


def first_tag(text: str, tags: Sequence[str], start: int) -> tuple[int, str] | None:
    """The tag that is complete first, the longest if several end there, with its start."""
    ends = [(at + len(tag), at, tag) for tag in tags if (at := text.find(tag, start)) >= 0]
    if not ends:
        return None
    _, begin, tag = min(ends)
    return begin, tag


def held(text: str, tags: Sequence[str]) -> int:
    """The length of the text's end that may still become a tag."""
    longest = max(map(len, tags)) - 1
    for size in range(min(longest, len(text)), 0, -1):
        end = text[-size:]
        if any(tag.startswith(end) for tag in tags):
            return size
    return 0


class _Chain:
    """Feeds the content of the first parser to the second."""

    def __init__(self, reasoning: Parser, tools: Parser) -> None:
        self._reasoning, self._tools = reasoning, tools

    def feed(self, text: str) -> list[Event]:
        return self._pass(self._reasoning.feed(text))

    def finish(self, cut: bool = False) -> list[Event]:
        return joined(self._pass(self._reasoning.finish(cut)) + self._tools.finish(cut))

    def _pass(self, events: list[Event]) -> list[Event]:
        out: list[Event] = []
        for event in events:
            out += self._tools.feed(event.text) if isinstance(event, Content) else [event]
        return out


class _Plain(Reader):
    def read(self) -> Reading[None]:
        yield from self.copy_rest()


class OnlyCalls:
    """Drops content where the text must be calls: it can only be markup of a call that was cut."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser

    def feed(self, text: str) -> list[Event]:
        return [event for event in self._parser.feed(text) if not isinstance(event, Content)]

    def finish(self, cut: bool = False) -> list[Event]:
        return [event for event in self._parser.finish(cut) if not isinstance(event, Content)]


def chain(reasoning: Parser | None, tools: Parser | None) -> Parser:
    """Combine both parsers; with neither, everything is content. Harmony's tool parser reads thoughts too."""
    if reasoning is None or getattr(tools, "reads_reasoning", False):
        return tools or _Plain()
    return reasoning if tools is None else _Chain(reasoning, tools)
