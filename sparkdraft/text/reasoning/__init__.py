"""Which part of a model's text is thinking, in each family's own marks, and which marks a chat template has.

A format makes the parser for one answer; the prompt shows it whether the template has opened the thoughts already. If
the answer must follow a grammar, the thoughts before it stay free, and the format says how.
"""

from __future__ import annotations

import re

from sparkdraft.core import GrammarSpec
from sparkdraft.text.events import chain
from sparkdraft.text.grammar import json_source
from sparkdraft.text.reasoning.base import ReasoningFormat
from sparkdraft.text.reasoning.gemma4 import Gemma4Thoughts
from sparkdraft.text.reasoning.harmony import HarmonyAnalysis
from sparkdraft.text.reasoning.think import Think

__all__ = ["FORMATS", "ReasoningFormat", "after_thinking", "answer_rule", "by_marks", "chain"]

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
    """The same grammar for the answer, with free thoughts before it. A Lark grammar is left as it is."""
    rules = form.answer_grammar(prompt) if form else ""
    if not rules or spec.kind == "lark":
        return spec
    return GrammarSpec("lark", f"{rules}\n{answer_rule(spec)}\n")


def answer_rule(spec: GrammarSpec) -> str:
    """Lark with a rule `answer`, of a grammar that is no Lark itself."""
    is_regex = spec.kind == "regex"
    answer = "/" + re.sub(r"(?<!\\)/", r"\\/", spec.text) + "/" if is_regex else "%json " + json_source(spec)
    return f"answer: {answer}"
