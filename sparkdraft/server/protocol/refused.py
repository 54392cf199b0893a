"""Fields of OpenAI and of other servers that would change the answer, and that this server does not support.

Most unknown fields are ignored, because clients send many that change nothing (`user`, `metadata`, `cache_prompt`).
Ignoring one of these would return something else than what was asked for, so naming one is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkdraft.server.protocol.errors import ApiError

SCHEMA = "use response_format with the type json_schema, in /v1/chat/completions"
PATTERN = f"{SCHEMA} and a string with a pattern"
TOOLS = "use tools with tool_choice, in /v1/chat/completions"
BIAS = "use logit_bias"
LEAVE = "leave it out"
SAMPLING = "leave it out; temperature, top_p, top_k, min_p and the penalties are supported"
ADAPTER = "serve a model that the adapter was merged into"
TEXT = "this server reads and writes text only, so leave it out"
INSTEAD = {
    # OpenAI
    "audio": TEXT,
    "modalities": TEXT,
    "verbosity": "ask for a short or a long answer in a message",
    "web_search_options": "use tools, and search yourself",
    # vLLM
    "guided_json": SCHEMA,
    "guided_choice": f"{SCHEMA} and an enum of the choices",
    "guided_regex": PATTERN,
    "guided_grammar": LEAVE,
    "structured_outputs": SCHEMA,
    "structural_tag": TOOLS,
    "allowed_token_ids": BIAS,
    "bad_words": BIAS,
    "logits_processors": BIAS,
    "use_beam_search": "use n and choose yourself",
    "include_stop_str_in_output": "append the stop string yourself",
    "include_reasoning": "leave it out and drop reasoning_content yourself",
    "return_token_ids": "use /tokenize",
    "return_tokens_as_token_ids": "use /tokenize",
    "prompt_embeds": "send text or token ids",
    "chat_template": "put the file into the model's folder as chat_template.jinja",
    "cache_salt": "start the server with --no-prefix-cache",
    "kv_transfer_params": LEAVE,
    "vllm_xargs": LEAVE,
    # llama.cpp
    "grammar": LEAVE,
    "json_schema": SCHEMA,
    "lora": ADAPTER,
    "n_predict": "use max_tokens",
    "n_probs": "use logprobs",
    "repeat_penalty": "use repetition_penalty",
    "samplers": SAMPLING,
    "mirostat": SAMPLING,
    "typical_p": SAMPLING,
    "tfs_z": SAMPLING,
    "top_n_sigma": SAMPLING,
    "dynatemp_range": SAMPLING,
    "dry_multiplier": SAMPLING,
    "xtc_probability": SAMPLING,
    # SGLang
    "regex": PATTERN,
    "ebnf": LEAVE,
    "lora_path": ADAPTER,
    "input_embeds": "send text or token ids",
    "separate_reasoning": "leave it out and put reasoning_content before the text yourself",
}
COMPLETIONS_ONLY = {
    "add_special_tokens": "use /v1/completions: the chat template writes the special tokens of a chat",
    "best_of": "use n and choose yourself",
    "echo": "use /v1/completions",
    "suffix": "write the text around the gap into a message",
}
CHAT_ONLY = dict.fromkeys(("response_format", "tools", "functions", "documents"), "use /v1/chat/completions")
# Values that change nothing, beside null, false, "", [] and {}. Clients send them as their defaults.
OFF: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "response_format": ({"type": "text"},),
    "n_predict": (-1,),
    "n_probs": (0,),
    "best_of": (1,),
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "top_n_sigma": (-1,),
    "repeat_penalty": (1,),
    "typical_p": (1,),
    "tfs_z": (1,),
}
SCHEMAS = ("guided_json", "json_schema")  # here {} is a constraint: any JSON
ON_BY_DEFAULT = ("include_reasoning", "separate_reasoning")  # here false is what changes the answer


def check_refused(body: Any, more: Mapping[str, str] | None = None) -> None:
    """body: as it came. more: further fields that this endpoint refuses."""
    if not isinstance(body, Mapping):
        return
    for name, instead in (INSTEAD | dict(more or {})).items():
        if name in body and _matters(name, body[name]):
            raise ApiError(400, f"{name} is not supported here; {instead}.", name)


def _matters(name: str, value: Any) -> bool:
    """Whether a value changes the answer."""
    if name in ON_BY_DEFAULT:
        return value is False
    if value == {}:
        return name in SCHEMAS
    return value is not None and value is not False and value not in ("", []) and value not in OFF.get(name, ())
