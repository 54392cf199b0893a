"""Chooses the parsers of a model's thoughts and calls and the switch of its thinking, each with a reason.

Order of precedence: the user's flag, the model's family (families.py), the marks and variables of its chat template.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparkdraft.core import Fact, UserError
from sparkdraft.text import reasoning, tools
from sparkdraft.text.chat import variables_of
from sparkdraft.text.families import AUTO, NONE, family_of
from sparkdraft.text.reasoning import ReasoningFormat
from sparkdraft.text.tools import ToolFormat

EFFORT = "reasoning_effort"  # of OpenAI's API, and the variable of templates that know efforts
SWITCHES = ("enable_thinking", "thinking")  # variables by which templates turn thinking on and off
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")  # OpenAI's
NO_THOUGHTS = ("none", "minimal")


@dataclass(frozen=True, slots=True)
class Thinking:
    happens: bool  # whether the model thinks at all
    switch: str = ""  # the template's variable that turns it on and off
    default: bool | None = None  # of the switch; None: the template's
    has_efforts: bool = False  # the template reads reasoning_effort itself
    efforts: tuple[str, ...] = ()  # the values that it knows; (): unknown

    def variables(self, effort: str | None) -> dict[str, Any]:
        """The template's variables for a requested effort. Raises UserError if the model cannot do it."""
        usual = {self.switch: self.default} if self.switch and self.default is not None else {}
        if effort is None:
            return usual
        if self.has_efforts:
            if self.efforts and effort not in self.efforts:
                raise _refused(effort, f"this model has {', '.join(self.efforts)}: send one of these, or leave it out")
            return usual | {EFFORT: effort}
        if effort not in EFFORTS:
            raise _refused(effort, f"it must be one of {', '.join(EFFORTS)}")
        if self.switch:
            return {self.switch: effort != "none"}
        if self.happens and effort == "none":
            raise _refused(effort, "this model's thinking has no switch: leave it out")
        if not self.happens and effort not in NO_THOUGHTS:
            raise _refused(effort, "this model does not think: leave it out, or send none")
        return {}

    def fact(self) -> Fact:
        if self.has_efforts:
            known = f" ({', '.join(self.efforts)})" if self.efforts else ""
            return Fact("thinking", f"as much as {EFFORT} asks for{known}")
        if self.switch:
            unasked = {True: "on", False: "off", None: "as the chat template has it"}[self.default]
            return Fact("thinking", f"{unasked} unless {self.switch} or {EFFORT} says otherwise; all efforts are alike")
        return Fact("thinking", "as the model likes, there is no switch" if self.happens else "none")


@dataclass(frozen=True, slots=True)
class ChatStyle:
    reasoning: ReasoningFormat | None  # None: all text is the answer
    tools: ToolFormat
    thinking: Thinking
    facts: tuple[Fact, ...]  # what was chosen, and why


def chat_style(
    model_type: str, template: str | None, reasoning_parser: str = AUTO, tool_parser: str = AUTO
) -> ChatStyle:
    """Choose the style. The parsers are names of families.py, or "auto"; "none" leaves thoughts in the answer."""
    family, text, always = family_of(model_type), template or "", f"all {model_type} models write so"
    thoughts, why = reasoning.by_marks(text)
    if reasoning_parser != AUTO:
        thoughts, why = _thoughts(reasoning_parser, text), "asked for by reasoning_parser"
    elif family.reasoning != AUTO:
        thoughts, why = _thoughts(family.reasoning, text), always
    calls, reason = tools.by_marks(text)
    if tool_parser != AUTO:
        calls, reason = tools.FORMATS[tool_parser], "asked for by tool_parser"
    elif family.tools != AUTO:
        calls, reason = tools.FORMATS[family.tools], always
    known = variables_of(template)
    thinking = Thinking(
        happens=thoughts is not None,
        switch=next((name for name in SWITCHES if name in known), ""),
        default=family.thinks,
        has_efforts=EFFORT in known,
        efforts=family.efforts,
    )
    named = Fact("reasoning parser", thoughts.name if thoughts else NONE, why)
    return ChatStyle(thoughts, calls, thinking, (named, Fact("tool parser", calls.name, reason), thinking.fact()))


def _thoughts(name: str, template: str) -> ReasoningFormat | None:
    return None if name == NONE else reasoning.FORMATS[name](template)


def _refused(effort: str, why: str) -> UserError:
    return UserError(f"{EFFORT} is '{effort}'; {why}")
