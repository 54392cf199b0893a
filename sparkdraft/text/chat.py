"""Turns chat messages into the text that a model was trained on, by the Jinja template that comes with it.

Templates are untrusted programs, so they run in Jinja's immutable sandbox, with exactly the settings and helpers that
Hugging Face gives them. `render` is the template alone. `prompt_text` also notes which control tokens the template
wrote (control.py), and `Tokenizer.encode_chat` turns the result into ids without adding special tokens, because the
template has written them. The checkpoint knows which template a model has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sparkdraft.core import UserError
from sparkdraft.text.control import ChatText, ControlTokens, clean

# methods of strings
SEARCHES = ("split", "rsplit", "startswith", "endswith", "find", "rfind", "index", "count", "replace")


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks what the model wrote, for training; here its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        # In its own scope, as in Hugging Face, where it is a call block.
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [jinja2.nodes.Scope(body)]


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models saw it. Jinja's own filter escapes <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@lru_cache(maxsize=16)
def looked_for(template: str | None) -> frozenset[str]:
    """The constants that a template looks for in its texts: what it compares with, and where it splits. Constants that
    it only writes, as most templates write <|im_end|>, are not among them."""
    try:
        tree = _environment().parse(template or "")
    except (jinja2.TemplateError, RecursionError):
        return frozenset()  # rendering will report what is wrong
    found: list[Node] = []
    for comparison in tree.find_all(jinja2.nodes.Compare):
        found += [comparison.expr, *(operand.expr for operand in comparison.ops)]
    for call in tree.find_all(jinja2.nodes.Call):
        if isinstance(call.node, jinja2.nodes.Getattr) and call.node.attr in SEARCHES:
            found += call.args[:1]
    return frozenset(
        node.value for node in found if isinstance(node, jinja2.nodes.Const) and isinstance(node.value, str)
    )


@lru_cache(maxsize=16)
def variables_of(template: str | None) -> frozenset[str]:
    """The variables that a template looks at: messages, tools, enable_thinking and the like."""
    try:
        return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(template or "")))
    except (jinja2.TemplateError, RecursionError):
        return frozenset()  # rendering says what is wrong


@lru_cache(maxsize=16)
def fault_of(template: str | None) -> str:
    """Why no chat at all can be rendered by a template, with its line; "" if it is valid Jinja."""
    try:
        _compile(template or "")
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno} of the chat template is wrong ({error.message or error})"
    except RecursionError:
        return "the chat template is nested too deeply"
    except SyntaxError as error:  # of the Python that Jinja makes of it
        return f"the chat template is wrong ({error.msg})"
    return ""


def render(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """variables: what else the template may read, such as bos_token or enable_thinking."""
    if not template:
        raise UserError(
            "This model has no chat template: use a chat model, or have it continue a plain prompt (`sparkdraft "
            "generate` without --chat, or /v1/completions)."
        )
    if fault := fault_of(template):
        raise UserError(f"{fault[0].upper()}{fault[1:]}: correct it, or send a plain prompt (/v1/completions).")
    values = {
        "messages": list(messages),
        "tools": list(tools) if tools is not None else None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        return _compile(template).render(values | variables)
    except jinja2.TemplateError as error:
        raise UserError(f"The chat template does not take these messages: {error.message or error}.") from error
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
        # Errors of plain Python within the template: a missing role, a number where text should be.
        raise UserError(f"The chat template does not take these messages ({error}): check their form.") from error


def prompt_text(
    control: ControlTokens,
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    special: Mapping[str, Any],
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> ChatText:
    """A chat as the model reads it. special: the model's own tokens (bos_token and so on). Messages, tools and
    variables are the user's: what they spell never becomes a control token, unless the template itself looks for that
    token and it is not in 'special'."""
    spared = looked_for(template) - {token for token in special.values() if isinstance(token, str)}
    try:
        messages, tools, given = (control.mark(value, spared) for value in (messages, tools, variables or {}))
    except RecursionError:
        raise UserError("The messages or tools are nested too deeply to be read; flatten them.") from None
    try:
        return control.read(render(template, messages, add_generation_prompt, tools, **(dict(special) | given)))
    except UserError as error:
        raise UserError(clean(str(error))) from error
