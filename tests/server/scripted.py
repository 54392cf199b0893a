"""A scripted model for coding agents: it calls tools by a script, and counts the cached tokens as a prefix cache would.

Its template is of ChatML's kind with tools in the system message, so that a prompt grows at its end from turn to turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sparkdraft.core import SamplingParams, StepOutput
from tests.server.conftest import FakeClient

BLOCK = 16  # tokens of a block in the prefix cache
CONTEXT = 1 << 18
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{{ messages[0].content + '\n\n' if messages[0].role == 'system' }}"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Answer with <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n'
    "{%- elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{%- elif not (m.role == 'system' and loop.first) %}<|im_start|>{{ m.role }}\n"
    "{%- if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{%- endif %}{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{%- endfor %}<|im_end|>\n{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)


class Scripted(FakeClient):
    """say(prompt, params) writes the answer. turns: per request, its prompt and the tokens that were cached."""

    def __init__(self, say: Callable[[str, SamplingParams], Any], template: str = TEMPLATE, size: int = 40) -> None:
        super().__init__(say, size=size, template=template)
        assert self.info
        self.info = replace(self.info, max_model_len=CONTEXT)
        self.turns: list[tuple[str, int]] = []
        self._known: list[list[int]] = []  # prompts so far

    def submit(self, id: str, prompt_ids: list[int], params: SamplingParams) -> Any:
        cached = max((_shared(known, prompt_ids) for known in self._known), default=0)
        self._cached = cached // BLOCK * BLOCK
        self._known.append(prompt_ids)
        self.turns.append((self.raw.decode(prompt_ids), self._cached))
        return super().submit(id, prompt_ids, params)

    def _event(self, *args: Any) -> StepOutput:
        return replace(super()._event(*args), num_cached=self._cached)


def _shared(known: list[int], ids: list[int]) -> int:
    """The length of the common prefix."""
    return next(
        (i for i, pair in enumerate(zip(known, ids, strict=False)) if pair[0] != pair[1]), min(len(known), len(ids))
    )
