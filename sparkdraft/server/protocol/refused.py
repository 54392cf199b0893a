"""Fields of other servers that bind the output and that this one does not have: naming one is an error.

Most unknown fields are ignored, because clients send a lot. To ignore one of these would answer with text that does not
keep what the client relies on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkdraft.server.protocol.errors import ApiError

SCHEMA = "use response_format with the type json_schema, in /v1/chat/completions"
CHOICE = f"{SCHEMA} and an enum of the choices"
TOOLS = "use tools with tool_choice, in /v1/chat/completions"
BIAS = "use logit_bias"
NONE = "there is nothing like it here, so leave it out"
INSTEAD = {
    # vLLM
    "guided_json": SCHEMA,
    "guided_choice": CHOICE,
    "guided_regex": f"{SCHEMA} and a string with a pattern",
    "guided_grammar": NONE,
    "structured_outputs": SCHEMA,
    "structural_tag": TOOLS,
    "allowed_token_ids": BIAS,
    "bad_words": BIAS,
    "logits_processors": BIAS,
    # llama.cpp
    "grammar": NONE,
    "json_schema": SCHEMA,
    # SGLang
    "regex": f"{SCHEMA} and a string with a pattern",
    "ebnf": NONE,
}
CHAT_ONLY = {"response_format": "use /v1/chat/completions"}
SCHEMAS = ("guided_json", "json_schema")  # here {} binds: to any JSON


def check_refused(body: Any, more: Mapping[str, str]) -> None:
    """'body' as it came; a value that binds nothing is the same as left out. 'more' are fields that this endpoint
    refuses too."""
    if not isinstance(body, Mapping):
        return
    for name, instead in (INSTEAD | dict(more)).items():
        if _binds(name, body.get(name)):
            raise ApiError(400, f"{name} is not supported here, and the output would not keep to it; {instead}.", name)


def _binds(name: str, value: Any) -> bool:
    """Clients send values that bind nothing, as their defaults."""
    if value == {}:
        return name in SCHEMAS
    return value not in (None, "", []) and (name, value) != ("response_format", {"type": "text"})
