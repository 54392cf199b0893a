"""Renders chat messages with a model's Jinja chat template, in a child process with limits (template.py).

`prompt_text` also notes which control tokens the template wrote (control.py).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from sparkdraft.core import UserError
from sparkdraft.text import template as templates
from sparkdraft.text.control import ChatText, ControlTokens, clean
from sparkdraft.text.template import PastLimit

OPEN_END = f"end{secrets.token_hex(16)}"  # no request can contain it
_faults: dict[str, str] = {}  # templates that exceeded a limit in fault_of and never run again
GREETING = [{"role": "user", "content": "Hi"}]


def variables_of(template: str | None) -> frozenset[str]:
    """The variables that a template reads, such as messages, tools and enable_thinking."""
    return templates.about(template).variables if template else frozenset()


def fault_of(template: str | None, special: Mapping[str, Any] | None = None) -> str:
    """Why a template can render no chat at all, with the line of the error; "" if it can, or if there is none. If
    rendering a greeting does not end, `render` refuses the template from then on."""
    try:
        render(template, GREETING, **(special or {}))
    except PastLimit as error:
        _faults[template or ""] = f"the chat template {error.what} for a greeting"
    except UserError:
        pass  # wrong, or made for other messages
    return _fault(template or "")


def _fault(template: str) -> str:
    return _faults.get(template) or (templates.about(template).fault if template else "")


def render(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """Render a chat. variables: what else the template may read, such as bos_token or enable_thinking."""
    if not template:
        raise UserError(
            "This model has no chat template: use a chat model, or have it continue a plain prompt (`sparkdraft "
            "generate` without --chat, or /v1/completions)."
        )
    if fault := _fault(template):
        raise UserError(f"{fault[0].upper()}{fault[1:]}: correct it, or send a plain prompt (/v1/completions).")
    values = {
        "messages": list(messages),
        "tools": list(tools) if tools is not None else None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    return templates.render(template, values | variables)


def left_open(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mark the end of the last message, where `cut_open` cuts the prompt (continue_final_message)."""
    *before, last = map(dict, messages)
    return [*before, last | {"content": f"{last['content']}{OPEN_END} "}]


def cut_open(rendered: ChatText) -> ChatText:
    """Cut the prompt at the mark, so that the model continues the last message."""
    end = rendered.text.rfind(OPEN_END)
    if end < 0:
        raise UserError(
            "The chat template does not write the last message as it is, so that it cannot be continued "
            "(continue_final_message): leave it out."
        )
    text = rendered.text[:end]
    if not rendered.text.startswith(" ", end + len(OPEN_END)):
        text = text.rstrip()  # the template trims messages, and the mark kept it from doing so
    return ChatText(text, tuple(mark for mark in rendered.marks if mark <= len(text)))


def prompt_text(
    control: ControlTokens,
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    special: Mapping[str, Any],
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> ChatText:
    """Render a chat as the model reads it. special: the model's own tokens, such as bos_token.

    A control token that messages, tools or variables spell is text, unless the template itself looks for that token and
    it is not in `special`.
    """
    looked_for = templates.about(template).looked_for if template else frozenset()
    spared = looked_for - {token for token in special.values() if isinstance(token, str)}
    try:
        messages, tools, given = (control.mark(value, spared) for value in (messages, tools, variables or {}))
    except RecursionError:
        raise UserError("The messages or tools are nested too deeply to be read; flatten them.") from None
    try:
        return control.read(render(template, messages, add_generation_prompt, tools, **(dict(special) | given)))
    except PastLimit:
        raise
    except UserError as error:
        raise UserError(clean(str(error))) from error
