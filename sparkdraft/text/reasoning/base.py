"""A reasoning format: a parser for one answer, and the Lark rule of the thoughts that may come before it.

Called with the prompt it makes the parser. The end of the prompt shows whether the template has opened the thoughts
(the answer begins within them) or closed them (no reasoning this time).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from sparkdraft.text.events import Parser


class ReasoningFormat(ABC):
    name: ClassVar[str]
    keep_special: ClassVar[bool] = False  # whether the parser needs to see special tokens
    opening: ClassVar[str]
    closing: ClassVar[str]
    before_answer: ClassVar[str] = ""  # Lark for what stands between the thoughts and the answer

    def __init__(self, template: str = "") -> None:
        self._template = template

    @abstractmethod
    def __call__(self, prompt: str | None = None, calls: bool = False) -> Parser:
        """The parser of the answer to a rendered prompt. calls: the model was given tools, so the beginning of a call
        ends thoughts that it did not close; without tools it is a quotation."""

    def is_open(self, prompt: str | None) -> bool:
        """Whether the answer begins within the thoughts. Without the prompt, judged by the end of the template."""
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
