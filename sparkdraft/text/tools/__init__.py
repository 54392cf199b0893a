"""Tool calls in each family's own syntax, and which syntax a model uses.

The chat template decides: it shows the model its tools, so the marks in its text are the marks that the model was
taught. A template without tools, or with marks that no file here reads, gets the generic format, so every model can
call tools.
"""

from __future__ import annotations

from sparkdraft.text.tools.base import ToolFormat
from sparkdraft.text.tools.gemma4 import Gemma4
from sparkdraft.text.tools.generic import Generic
from sparkdraft.text.tools.harmony import Harmony
from sparkdraft.text.tools.hermes import Hermes
from sparkdraft.text.tools.qwen3_xml import Qwen3Xml

__all__ = ["ToolFormat", "tool_format"]

OTHERS = ("<arg_key>", "<tool_sep>")  # of GLM and Hunyuan: they use hermes' tag with other contents
# What the template must contain, the most specific first.
MARKS: list[tuple[ToolFormat, tuple[str, ...]]] = [
    (Harmony(), ("<|channel|>", "<|message|>", "tools")),
    (Gemma4(), ("<|tool_call>", "<tool_call|>")),
    (Qwen3Xml(), ("<function=", "<parameter=", "tools")),
    (Hermes(), ("<tool_call>", "arguments", "tools")),
]


def tool_format(model_type: str, chat_template: str | None) -> ToolFormat:
    template = chat_template or ""
    known = not any(mark in template for mark in OTHERS)
    for form, marks in MARKS:
        if known and all(mark in template for mark in marks):
            return form
    if model_type == "gpt_oss":
        return Harmony()  # it uses harmony whatever the template
    return Generic()
