"""Puts a conversation into the one order in which a prefix of it stays a prefix: what agents send differs between turns
in ways that mean nothing, and templates refuse some of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from sparkdraft.server.protocol.chat import ChatMessage

INSTRUCTS = ("system", "developer")


def in_order(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Leading system and developer messages become one. Later ones become the user's, where they stand: moving them to
    the front would change the beginning of the prompt, and strict templates refuse them where they are. Results of
    calls follow the order of the calls."""
    leading = list(takewhile(lambda message: message.role in INSTRUCTS, messages))
    found = [_merged(leading)] if leading else []
    for message in messages[len(leading) :]:
        found.append(message.model_copy(update={"role": "user"}) if message.role in INSTRUCTS else message)
    return _results_in_order(found)


def text_of(message: ChatMessage) -> str:
    if isinstance(message.content, list):
        return "".join(part.shown for part in message.content)
    return message.content or ""


def _merged(leading: Sequence[ChatMessage]) -> ChatMessage:
    return ChatMessage(role="system", content="\n\n".join(filter(None, map(text_of, leading))))


def _results_in_order(messages: list[ChatMessage]) -> list[ChatMessage]:
    order: dict[str, int] = {}
    found: list[ChatMessage] = []
    results: list[ChatMessage] = []
    for message in messages:
        if message.role == "tool":
            results.append(message)
            continue
        found += sorted(results, key=lambda result: order.get(result.tool_call_id or "", len(order)))
        results = []
        if message.tool_calls:
            order = {call.id: i for i, call in enumerate(message.tool_calls) if call.id}
        found.append(message)
    return found + sorted(results, key=lambda result: order.get(result.tool_call_id or "", len(order)))
