"""Tool-call formats, one file each; `by_marks` chooses the format by the marks in a chat template.

A template without marks that are read gets the generic format, so every model can call tools.
"""

from __future__ import annotations

from sparkdraft.text.tools.base import ToolFormat
from sparkdraft.text.tools.gemma4 import Gemma4
from sparkdraft.text.tools.generic import Generic
from sparkdraft.text.tools.harmony import Harmony
from sparkdraft.text.tools.hermes import Hermes
from sparkdraft.text.tools.qwen3_xml import Qwen3Xml

__all__ = ["FORMATS", "ToolFormat", "by_marks"]

FORMATS: dict[str, ToolFormat] = {form.name: form for form in (Hermes(), Qwen3Xml(), Gemma4(), Harmony(), Generic())}
OTHERS = ("<arg_key>", "<tool_sep>")  # GLM's and Hunyuan's: hermes' tag around another syntax
# What the template must contain, the most telling first.
MARKS: list[tuple[str, tuple[str, ...]]] = [
    (Harmony.name, ("<|channel|>", "<|message|>", "tools")),
    (Gemma4.name, ("<|tool_call>", "<tool_call|>")),
    (Qwen3Xml.name, ("<function=", "<parameter=", "tools")),
    (Hermes.name, ("<tool_call>", "arguments", "tools")),
]


def by_marks(template: str) -> tuple[ToolFormat, str]:
    """The format whose marks a template has, and why."""
    if other := next((mark for mark in OTHERS if mark in template), None):
        return FORMATS[Generic.name], f"calls as the chat template shows them, with {other}, are not read"
    for name, marks in MARKS:
        if all(mark in template for mark in marks):
            return FORMATS[name], f"the chat template has {' and '.join(marks)}"
    return FORMATS[Generic.name], "the chat template shows no calls that are read"
