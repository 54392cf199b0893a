"""Which part of a model's text is reasoning, in each family's own marks, and which marks a model uses.

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

__all__ = ["ReasoningFormat", "after_thinking", "chain", "reasoning_format"]


def reasoning_format(model_type: str, chat_template: str | None) -> ReasoningFormat | None:
    """The format of a model; None for a model that does not reason."""
    template = chat_template or ""
    if model_type == "gpt_oss" or ("<|channel|>" in template and "<|message|>" in template):
        return HarmonyAnalysis(template)
    if "<|channel>" in template:
        return Gemma4Thoughts(template)
    return Think(template) if "</think>" in template or "<think>" in template else None


def after_thinking(spec: GrammarSpec, form: ReasoningFormat | None, prompt: str) -> GrammarSpec:
    """The same grammar for the answer, with free thoughts before it. A Lark grammar is left as it is."""
    rules = form.answer_grammar(prompt) if form else ""
    if not rules or spec.kind == "lark":
        return spec
    is_regex = spec.kind == "regex"
    answer = "/" + re.sub(r"(?<!\\)/", r"\\/", spec.text) + "/" if is_regex else "%json " + json_source(spec)
    return GrammarSpec("lark", f"{rules}\nanswer: {answer}\n")
