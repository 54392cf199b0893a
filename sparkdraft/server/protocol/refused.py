"""Fields of other servers that constrain the output and that this server does not support: naming one is an error.

Most unknown fields are ignored, because clients send many. Ignoring one of these would return text that breaks what the
client relies on.
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
SCHEMAS = ("guided_json", "json_schema")  # here {} is a constraint: any JSON


def check_refused(body: Any, more: Mapping[str, str]) -> None:
    """body: as it came. A value that constrains nothing is treated as left out. more: further fields that this endpoint
    refuses."""
    if not isinstance(body, Mapping):
        return
    for name, instead in (INSTEAD | dict(more)).items():
        if _binds(name, body.get(name)):
            raise ApiError(400, f"{name} is not supported here, and the output would not keep to it; {instead}.", name)


def _binds(name: str, value: Any) -> bool:
    """Whether a value constrains the output. Clients send values that do not, as their defaults."""
    if value == {}:
        return name in SCHEMAS
    return value not in (None, "", []) and (name, value) != ("response_format", {"type": "text"})
