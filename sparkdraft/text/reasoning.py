"""Reasoning formats: the marks by which each family tells thoughts from the answer.

A format makes the parser of one answer, and the Lark rules that leave the thoughts before a constrained answer free.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import ClassVar

from sparkdraft.core import GrammarSpec
from sparkdraft.text.events import Content, Parser, Reader, Reading, Reasoning
from sparkdraft.text.grammar import json_source
from sparkdraft.text.tools.harmony import CHANNEL, MESSAGE, START, HarmonyParser


class ReasoningFormat(ABC):
    """One way to write thoughts. The end of the rendered prompt shows whether the template has already opened them, or
    closed them (no reasoning this time)."""

    name: ClassVar[str]
    keep_special: ClassVar[bool] = False  # whether the parser needs to see special tokens
    opening: ClassVar[str]
    closing: ClassVar[str]
    before_answer: ClassVar[str] = ""  # Lark for what stands between the thoughts and the answer

    def __init__(self, template: str = "") -> None:
        self._template = template

    @abstractmethod
    def __call__(self, prompt: str | None = None, calls: bool = False) -> Parser:
        """Make the parser of the answer. calls: the model has tools, so the beginning of a call ends open thoughts."""

    def is_open(self, prompt: str | None) -> bool:
        """True if the answer begins within the thoughts. Without a prompt, judged by the end of the template."""
        if prompt is not None:
            return prompt.rstrip().endswith(self.opening)
        _, _, end = self._template.rpartition("add_generation_prompt")
        return end.rfind(self.opening) > end.rfind(self.closing)

    def is_closed(self, prompt: str | None) -> bool:
        return prompt is not None and prompt.rstrip().endswith(self.closing)

    @abstractmethod
    def grammar(self, prompt: str | None = None) -> str:
        """Lark with a rule `thinking` for what comes before calls; "" if nothing does."""

    def answer_grammar(self, prompt: str | None = None) -> str:
        """Lark with a rule `start`: thoughts, then a rule `answer`, which the caller must add."""
        thinking = self.grammar(prompt)
        return f"start: thinking {self.before_answer}answer\n{thinking}" if thinking else ""


THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
# Qwen3.5 sometimes does not close its thoughts before a call, so with tools the beginning of a call ends them.
THINK_CALLS = ("<tool_call>\n<function=", '<tool_call>\n{"name": ')


class ThinkParser(Reader):
    def __init__(self, is_open: bool, calls: bool) -> None:
        self._open = is_open
        self._ends = (THINK_CLOSE, *THINK_CALLS) if calls else (THINK_CLOSE,)
        super().__init__()

    def read(self) -> Reading[None]:
        yield from self.skip_space()
        if (yield from self.skip(THINK_OPEN)) or self._open:
            yield from self.skip_space()
            tag = yield from self.copy_until(self._ends, Reasoning)
            if tag in THINK_CALLS:
                self.give(Content(tag))
            elif tag:
                yield from self.skip_space()
                self.cut()
        else:
            self.at = 0
        yield from self.copy_rest()


class Think(ReasoningFormat):
    """Thoughts in tags, as Qwen3, DeepSeek-R1 and many others write them.

        <think>
        The user wants ...
        </think>

        The answer.

    Only the beginning of an answer can be thoughts. White space around the tags is dropped.
    """

    name = "think"
    opening, closing = THINK_OPEN, THINK_CLOSE

    def __call__(self, prompt: str | None = None, calls: bool = False) -> Parser:
        return ThinkParser(self.is_open(prompt), calls)

    def grammar(self, prompt: str | None = None) -> str:
        if self.is_closed(prompt):
            return ""
        whole = "thought SPACE?" if self.is_open(prompt) else f'("{THINK_OPEN}" thought SPACE?)?'
        return f'thinking: {whole}\nthought[suffix="{THINK_CLOSE}"]: /(?s:.*)/\nSPACE: /[ \\n]{{1,4}}/'


GEMMA4_OPEN, GEMMA4_CLOSE, GEMMA4_NAME = "<|channel>", "<channel|>", "thought"
GEMMA4_CALL = "<|tool_call>"


class Gemma4ThoughtParser(Reader):
    def __init__(self, is_open: bool, calls: bool) -> None:
        self._open = is_open
        self._ends = (GEMMA4_CLOSE, GEMMA4_CALL) if calls else (GEMMA4_CLOSE,)
        super().__init__()

    def read(self) -> Reading[None]:
        tag = GEMMA4_OPEN if self._open else ""
        while True:
            tag = tag or (yield from self.copy_until((GEMMA4_OPEN,), Content, hold_space=False))
            if not tag:
                return
            yield from self.skip(GEMMA4_NAME)
            yield from self.skip_space()
            tag = yield from self.copy_until(self._ends, Reasoning)
            if tag == GEMMA4_CALL:  # thoughts that were not closed end where a call begins
                self.give(Content(GEMMA4_CALL))
            elif not tag:
                return
            tag = ""


class Gemma4Thoughts(ReasoningFormat):
    """Gemma 4's thoughts: a channel between special tokens, with its name on the first line.

        <|channel>thought
        The user wants ...<channel|>The answer.

    The line break after the name may be missing, and an empty channel means no thoughts. Calls pass through as content.
    """

    name = "gemma4"
    keep_special = True
    opening, closing = GEMMA4_OPEN + GEMMA4_NAME, GEMMA4_CLOSE

    def __call__(self, prompt: str | None = None, calls: bool = False) -> Parser:
        return Gemma4ThoughtParser(self.is_open(prompt), calls)

    def grammar(self, prompt: str | None = None) -> str:
        if self.is_closed(prompt):
            return ""
        whole = (
            f"THOUGHT {GEMMA4_CLOSE}"
            if self.is_open(prompt)
            else f'({GEMMA4_OPEN} "{GEMMA4_NAME}\\n" THOUGHT {GEMMA4_CLOSE})?'
        )
        return f"thinking: {whole}\nTHOUGHT: /(?s:.*)/"


class HarmonyAnalysis(ReasoningFormat):
    """gpt-oss's thoughts: the messages of its analysis channel, which the parser in text/tools/harmony.py reads."""

    name = "harmony"
    keep_special = True
    opening, closing = f"{CHANNEL}analysis{MESSAGE}", "<|end|>"
    before_answer = f'{CHANNEL} "final" {MESSAGE} '

    def __call__(self, prompt: str | None = None, calls: bool = False) -> Parser:
        return HarmonyParser([])

    def grammar(self, prompt: str | None = None) -> str:
        analysis = f'{CHANNEL} "analysis" {MESSAGE} THOUGHT <|end|> {START} "assistant"'
        return f"thinking: ({analysis})?\nTHOUGHT: /(?s:.*)/"


FORMATS: dict[str, type[ReasoningFormat]] = {form.name: form for form in (Think, Gemma4Thoughts, HarmonyAnalysis)}
# What the template must contain, the most telling first.
MARKS: list[tuple[type[ReasoningFormat], tuple[str, ...]]] = [
    (HarmonyAnalysis, ("<|channel|>", "<|message|>")),
    (Gemma4Thoughts, ("<|channel>",)),
    (Think, ("<think>",)),
    (Think, ("</think>",)),
]


def by_marks(template: str) -> tuple[ReasoningFormat | None, str]:
    """The format whose marks a template has, None where it has none, and why."""
    for form, marks in MARKS:
        if all(mark in template for mark in marks):
            return form(template), f"the chat template has {' and '.join(marks)}"
    return None, "the chat template has no marks of thoughts"


def after_thinking(spec: GrammarSpec, form: ReasoningFormat | None, prompt: str) -> GrammarSpec:
    """The same grammar with free thoughts before the answer. A Lark grammar is left as it is."""
    rules = form.answer_grammar(prompt) if form else ""
    if not rules or spec.kind == "lark":
        return spec
    return GrammarSpec("lark", f"{rules}\n{answer_rule(spec)}\n")


def answer_rule(spec: GrammarSpec) -> str:
    """Lark with a rule `answer`, of a grammar that is no Lark itself."""
    is_regex = spec.kind == "regex"
    answer = "/" + re.sub(r"(?<!\\)/", r"\\/", spec.text) + "/" if is_regex else "%json " + json_source(spec)
    return f"answer: {answer}"
