"""gpt-oss' thoughts are the messages of its analysis channel, so the parser of its messages finds them.

tools/harmony.py reads channels and calls; without tools it is the same parser. This file has only what a grammar needs:
an analysis message before the answer, and the final channel's header.
"""

from __future__ import annotations

from sparkdraft.text.events import Parser
from sparkdraft.text.reasoning.base import ReasoningFormat
from sparkdraft.text.tools.harmony import CHANNEL, MESSAGE, START, HarmonyParser


class HarmonyAnalysis(ReasoningFormat):
    name = "harmony"
    keep_special = True
    opening, closing = f"{CHANNEL}analysis{MESSAGE}", "<|end|>"
    before_answer = f'{CHANNEL} "final" {MESSAGE} '

    def __call__(self, prompt: str | None = None, calls: bool = False) -> Parser:
        return HarmonyParser([])

    def grammar(self, prompt: str | None = None) -> str:
        analysis = f'{CHANNEL} "analysis" {MESSAGE} THOUGHT <|end|> {START} "assistant"'
        return f"thinking: ({analysis})?\nTHOUGHT: /(?s:.*)/"
