"""Thoughts in tags, as Qwen3, DeepSeek-R1 and many others write them.

    <think>
    The user wants ...
    </think>

    The answer.

Only the beginning of an answer can be thoughts: tags in later text are text. White space around the tags is dropped.
"""

from __future__ import annotations

from sparkdraft.text.events import Content, Parser, Reader, Reading, Reasoning
from sparkdraft.text.reasoning.base import ReasoningFormat

OPEN, CLOSE = "<think>", "</think>"
# Qwen3.5 sometimes does not close its thoughts before a call. With tools the beginning of a call therefore ends them.
CALLS = ("<tool_call>\n<function=", '<tool_call>\n{"name": ')


class ThinkParser(Reader):
    def __init__(self, is_open: bool, calls: bool) -> None:
        self._open = is_open
        self._ends = (CLOSE, *CALLS) if calls else (CLOSE,)
        super().__init__()

    def read(self) -> Reading[None]:
        yield from self.skip_space()
        if (yield from self.skip(OPEN)) or self._open:
            yield from self.skip_space()
            tag = yield from self.copy_until(self._ends, Reasoning)
            if tag in CALLS:
                self.give(Content(tag))
            elif tag:
                yield from self.skip_space()
                self.cut()
        else:
            self.at = 0
        while True:
            self.at = len(self.text)
            self.give(Content(self.text))
            if not (yield from self.more()):
                return


class Think(ReasoningFormat):
    name = "think"
    opening, closing = OPEN, CLOSE

    def __call__(self, prompt: str | None = None, calls: bool = False) -> Parser:
        return ThinkParser(self.is_open(prompt), calls)

    def grammar(self, prompt: str | None = None) -> str:
        if self.is_closed(prompt):
            return ""
        whole = "thought SPACE?" if self.is_open(prompt) else f'("{OPEN}" thought SPACE?)?'
        return f'thinking: {whole}\nthought[suffix="{CLOSE}"]: /(?s:.*)/\nSPACE: /[ \\n]{{1,4}}/'
