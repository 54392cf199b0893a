"""Errors as OpenAI's clients read them, and what is wrong with a body: JSON, values, fields that are not supported.

Pydantic finds wrong values and gives each mistake a type; the table says what is allowed instead. Most unknown fields
are ignored, because clients send many that change nothing (`user`, `metadata`, `cache_prompt`). Naming a field of
OpenAI or of another server that would change the answer is an error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

MAX_MESSAGE = 500  # characters: what a client sent is not sent back whole
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable"}


class ApiError(Exception):
    """One sentence for the client, and its status."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        message = self.message if len(self.message) <= MAX_MESSAGE else self.message[:MAX_MESSAGE] + " ..."
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


def as_sentence(text: str) -> str:
    """The text with a capital letter, unless it begins with the name of a field, and a full stop."""
    first = text.split(" ", 1)[0]
    return (text if "_" in first else text[:1].upper() + text[1:]).rstrip(".") + "."


def unavailable(message: str, code: str, retry_after: int) -> ApiError:
    return ApiError(503, message, code=code, headers={"Retry-After": str(retry_after)})


# ---- wrong values

MAX_SHOWN = 40  # characters of a value that are shown
MAX_ERRORS = 16  # of pydantic's errors, this many are looked at
# Pydantic's types of errors -> what the field must be, with numbers from the error's context.
ALLOWED = {
    "string_type": "a string",
    "string_unicode": "valid Unicode text",
    "string_too_short": "a string that is not empty",  # no field needs more than one character
    "string_too_long": "a string of at most {max_length} characters",
    "string_pattern_mismatch": "1 to 128 letters, digits or characters of _.:-",  # the names of tools
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    "int_parsing_size": "a whole number with fewer digits",
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    "finite_number": "a finite number",
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "list_type": "a list",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "an object"),
    "too_short": "a list that is not empty",  # no list needs more than one element
    "too_long": "a list of at most {max_length} elements",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
}
PROMPT = "a string, a list of strings, or a list of token ids"  # of /v1/completions
OTHERWISE = "of the form that /openapi.json gives"
NO_OBJECT = "The body must be a JSON object, sent with the header 'Content-Type: application/json'."


def from_validation(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """One sentence from pydantic's errors. Of the branches of a union, the one that got furthest was meant."""
    if errors[0]["type"] == "json_invalid":
        return broken_json(errors[0]["ctx"]["error"], errors[0]["loc"][-1], body)
    field = errors[0]["loc"][:2]
    found = [(_path(error, body), error) for error in errors[:MAX_ERRORS] if error["loc"][:2] == field]
    path = max((path for path, _ in found), key=lambda path: path.count(".") + path.count("["))
    here = [error for where, error in found if where == path]
    if not path:
        return ApiError(400, NO_OBJECT)
    return ApiError(400, _sentence(path, here), param=path)


def broken_json(mistake: str, position: int, text: str) -> ApiError:
    """mistake: the standard library's message. text: the body."""
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    rest = text[position : position + MAX_SHOWN // 2]
    stands = f"{json.dumps(rest, ensure_ascii=False)} stands" if rest else "the body ends"
    said = mistake.removesuffix(" starting at").removesuffix(" at")
    sentence = f"The body is not valid JSON at line {line}, column {column}, where {stands}: {said}."
    return ApiError(400, sentence, code="invalid_json")


def unreadable(cause: BaseException | None) -> ApiError:
    """A body that the JSON parser gave up on before it found a mistake in the JSON."""
    if isinstance(cause, UnicodeDecodeError):
        sentence = f"The body is not valid UTF-8 at byte {cause.start}; send JSON in UTF-8."
    elif isinstance(cause, RecursionError):
        sentence = "The body is nested too deeply to be read; flatten it."
    elif isinstance(cause, ValueError):
        sentence = f"The body has a number of more than {sys.get_int_max_str_digits()} digits; send a shorter one."
    else:
        sentence = "The body cannot be read as JSON; check what the client sends."
    return ApiError(400, sentence, code="invalid_json")


def _sentence(path: str, errors: Sequence[Mapping[str, Any]]) -> str:
    if errors[0]["type"] == "missing":
        return f"{path} is missing; send it."
    allowed = list(dict.fromkeys(map(_allowed, errors)))
    # 'a', 'b' or an object: an "or" between the literals of one branch becomes a comma
    must = " or ".join([*(each.replace(" or ", ", ") for each in allowed[:-1]), allowed[-1]])
    if errors[0]["loc"][-1] == "[key]":
        return f"{path} has the key {shown(errors[0]['input'])}; it must be {must}."
    return f"{path} is {shown(errors[0]['input'])}; it must be {must}."


def _allowed(error: Mapping[str, Any]) -> str:
    if error["loc"][-2:] == ("prompt", "text"):
        return PROMPT
    context = error.get("ctx", {})
    if error["type"] == "too_long" and context.get("field_type") == "Dictionary":
        return f"an object of at most {context['max_length']} entries"
    return ALLOWED.get(error["type"], OTHERWISE).format(**context)


def shown(value: Any) -> str:
    """A value in a form that the client recognises, however large it is."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)} element{'s' * (len(value) > 1)}" if value else "an empty list"
    if isinstance(value, str) and len(value) > MAX_SHOWN:
        return f"a string of {len(value)} characters"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + " ..."


def _path(error: Mapping[str, Any], body: Any) -> str:
    """The part of an error's location that is in the body, such as 'messages[0].role'."""
    path, loc = "", error["loc"]
    for i, part in enumerate(loc[1:]):
        last_is_missing = i == len(loc) - 2 and error["type"] == "missing"
        if part == "[key]":
            return path.rpartition(".")[0]
        if isinstance(body, dict) and (part in body or last_is_missing):
            path += f".{part}" if path else str(part)
            body = body.get(part)
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            path += f"[{part}]"
            body = body[part]
        # else: the name of a union's branch
    return path


TOOLS = "use tools with tool_choice, in /v1/chat/completions"
BIAS = "use logit_bias"
LEAVE = "leave it out"
SAMPLING = "leave it out; temperature, top_p, top_k, min_p and the penalties are supported"
ADAPTER = "serve a model that the adapter was merged into"
TEXT = "this server reads and writes text only, so leave it out"
INSTEAD = {  # fields of OpenAI, vLLM, llama.cpp and SGLang
    **dict.fromkeys(("audio", "modalities"), TEXT),
    "verbosity": "ask for a short or a long answer in a message",
    "web_search_options": "use tools, and search yourself",
    **dict.fromkeys(("guided_whitespace_pattern", "kv_transfer_params", "vllm_xargs"), LEAVE),
    "structural_tag": TOOLS,
    **dict.fromkeys(("allowed_token_ids", "bad_words", "logits_processors"), BIAS),
    "use_beam_search": "use n and choose yourself",
    "include_stop_str_in_output": "append the stop string yourself",
    "include_reasoning": "leave it out and drop reasoning_content yourself",
    "separate_reasoning": "leave it out and put reasoning_content before the text yourself",
    "return_tokens_as_token_ids": "use return_token_ids",
    **dict.fromkeys(("prompt_embeds", "input_embeds"), "send text or token ids"),
    "chat_template": "put the file into the model's folder as chat_template.jinja",
    "cache_salt": "start the server with --no-prefix-cache",
    **dict.fromkeys(("lora", "lora_path"), ADAPTER),
    "n_predict": "use max_tokens",
    "n_probs": "use logprobs",
    "repeat_penalty": "use repetition_penalty",
    **dict.fromkeys(("samplers", "mirostat", "typical_p", "tfs_z", "top_n_sigma", "dynatemp_range"), SAMPLING),
    **dict.fromkeys(("dry_multiplier", "xtc_probability"), SAMPLING),
}
COMPLETIONS_ONLY = {
    "add_special_tokens": "use /v1/completions: the chat template writes the special tokens of a chat",
    "best_of": "use n and choose yourself",
    "echo": "use /v1/completions",
    "suffix": "write the text around the gap into a message",
}
CHAT_ONLY = dict.fromkeys(("tools", "functions", "documents"), "use /v1/chat/completions")
# Values that change nothing, in addition to null, false, "", [] and {}. Clients send them as their defaults.
OFF: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "verbosity": ("medium",),
    **dict.fromkeys(("n_predict", "top_n_sigma"), (-1,)),
    **dict.fromkeys(("n_probs", "mirostat", "dynatemp_range", "dry_multiplier", "xtc_probability"), (0,)),
    **dict.fromkeys(("best_of", "repeat_penalty", "typical_p", "tfs_z"), (1,)),
}
ON_BY_DEFAULT = ("include_reasoning", "separate_reasoning")  # here false is what changes the answer


def check_refused(body: Any, more: Mapping[str, str] | None = None) -> None:
    """Refuse unsupported fields that would change the answer. more: further fields that this endpoint refuses."""
    if not isinstance(body, Mapping):
        return
    for name, instead in (INSTEAD | dict(more or {})).items():
        if name in body and _matters(name, body[name]):
            raise ApiError(400, f"{name} is not supported here; {instead}.", name)


def _matters(name: str, value: Any) -> bool:
    """True if a value changes the answer."""
    if name in ON_BY_DEFAULT:
        return value is False
    return value is not None and value is not False and value not in ("", [], {}) and value not in OFF.get(name, ())
