"""Is a tool call read as one? A call is forced by the grammar of the model's own format, and the parser must find it;
and where the chat template writes earlier calls, the parser must read what the template wrote."""

from __future__ import annotations

import json
from typing import Any

from sparkdraft.core import SamplingParams, UserError
from sparkdraft.operate.canary.asker import Asker
from sparkdraft.operate.canary.findings import Failed, Skipped
from sparkdraft.text import chat
from sparkdraft.text.control import ChatText
from sparkdraft.text.events import Content, Event, ToolArguments, ToolCall
from sparkdraft.text.families import AUTO
from sparkdraft.text.style import ChatStyle, chat_style

NAME, CITY = "get_weather", "Paris"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": [CITY, "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ASKED = {"role": "user", "content": f"What is the weather in {CITY}?"}
CALL = {"id": "call_1", "type": "function", "function": {"name": NAME, "arguments": {"city": CITY}}}


def call_is_read(asker: Asker, tool_parser: str = AUTO) -> str:
    """tool_parser: the one that the server was told to use. The call comes at once: thoughts are another parser's."""
    style = chat_style(asker.info.model_type, asker.info.chat_template, tool_parser=tool_parser)
    form, written = style.tools, _template_is_read(asker, style)
    grammar = form.constraint([TOOL], NAME, parallel=False)
    params = SamplingParams(max_tokens=96, grammar=grammar, keep_special=form.keep_special)
    answer = asker.ask(asker.tokenizer.encode_chat(_prompt(asker, style)), params)
    parser = form.parser([TOOL])
    events = [event for letter in answer.text for event in parser.feed(letter)] + parser.finish()
    arguments = read_call(events, answer.text)
    if arguments.get("city") not in (CITY, "Oslo"):
        raise Failed(f"a forced call has the arguments {arguments}, which its schema does not allow")
    return f"a forced call is read by the {form.name} parser{written}"


def read_call(events: list[Event], text: str) -> dict[str, Any]:
    """The arguments of the one call among these events."""
    calls = [event for event in events if isinstance(event, ToolCall)]
    rest = "".join(event.text for event in events if isinstance(event, Content)).strip()
    if len(calls) != 1 or calls[0].name != NAME or rest:
        names = ", ".join(call.name for call in calls) or "none"
        raise Failed(f"of the text {text!r} the parser reads the calls: {names}; content: {rest!r}")
    joined = "".join(event.text for event in events if isinstance(event, ToolArguments))
    try:
        value = json.loads(joined)
    except ValueError:
        raise Failed(f"the parser gives the arguments {joined!r}, which are not JSON") from None
    if not isinstance(value, dict):
        raise Failed(f"the parser gives the arguments {joined!r}, which are not an object")
    return value


def _template_is_read(asker: Asker, style: ChatStyle) -> str:
    """Whether the parser reads a call as the chat template writes it: what a template adds to a chat by a call."""
    form = style.tools
    messages = form.history([ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}])
    try:
        whole, before = _chat(asker, style, messages, False).text, _chat(asker, style, [ASKED], True).text
    except UserError:
        return ""  # a template that writes no such history
    written = whole.removeprefix(before)
    if NAME not in written or written == whole:
        return ""
    parser = form.parser([TOOL])
    events = [*parser.feed(written), *parser.finish()]
    if not any(isinstance(event, ToolCall) and event.name == NAME for event in events):
        raise Failed(
            f"the chat template writes a call as {written[:120]!r}, which the {form.name} parser does not read"
        )
    return ", and so is one that the chat template writes"


def _prompt(asker: Asker, style: ChatStyle) -> ChatText:
    """The chat that asks for a call, with the tools in the template, in a system prompt or in the user's message."""
    said, reason = style.tools.instructions([TOOL], only=NAME), ""
    chats: list[list[dict[str, Any]]] = [[ASKED]]
    if said:
        chats = [[{"role": "system", "content": said}, ASKED], [ASKED | {"content": f"{said}\n\n{ASKED['content']}"}]]
    for messages in chats:
        try:
            return _chat(asker, style, messages, True)
        except UserError as error:
            reason = str(error)
    raise Skipped(f"the chat template does not take the question: {reason}")


def _chat(asker: Asker, style: ChatStyle, messages: list[dict[str, Any]], opens: bool) -> ChatText:
    """opens: whether the assistant's turn begins at the end."""
    info, control = asker.info, asker.tokenizer.control
    tools = None if style.tools.instructions([TOOL], only=NAME) else [TOOL]
    usual = style.thinking.variables(None)
    return chat.prompt_text(control, info.chat_template, messages, info.special, opens, tools, usual)
