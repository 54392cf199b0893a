"""Gemma 4's thoughts: a channel between special tokens, with its name on the first line.

    <|channel>thought
    The user wants ...<channel|>The answer.

The line break after the name may be missing, and an empty channel means that there were no thoughts. Calls have marks
of their own and pass through as content.
"""

from __future__ import annotations

from sparkdraft.text.events import Content, Parser, Reader, Reading, Reasoning
from sparkdraft.text.reasoning.base import ReasoningFormat

OPEN, CLOSE, NAME = "<|channel>", "<channel|>", "thought"
CALL = "<|tool_call>"


class Gemma4ThoughtParser(Reader):
    def __init__(self, is_open: bool, calls: bool) -> None:
        self._open = is_open
        self._ends = (CLOSE, CALL) if calls else (CLOSE,)
        super().__init__()

    def read(self) -> Reading[None]:
        tag = OPEN if self._open else ""
        while True:
            tag = tag or (yield from self.copy_until((OPEN,), Content, hold_space=False))
            if not tag:
                return
            yield from self.skip(NAME)
            yield from self.skip_space()
            tag = yield from self.copy_until(self._ends, Reasoning)
            if tag == CALL:  # thoughts that were not closed end where a call begins
                self.give(Content(CALL))
            elif not tag:
                return
            tag = ""


class Gemma4Thoughts(ReasoningFormat):
    name = "gemma4"
    keep_special = True
    opening, closing = OPEN + NAME, CLOSE

    def __call__(self, prompt: str | None = None, calls: bool = False) -> Parser:
        return Gemma4ThoughtParser(self.is_open(prompt), calls)

    def grammar(self, prompt: str | None = None) -> str:
        if self.is_closed(prompt):
            return ""
        whole = f"THOUGHT {CLOSE}" if self.is_open(prompt) else f'({OPEN} "{NAME}\\n" THOUGHT {CLOSE})?'
        return f"thinking: {whole}\nTHOUGHT: /(?s:.*)/"
