"""Error sentences for a body: invalid JSON, and fields that are not what they must be.

Pydantic finds the mistakes and gives each a type; the table says what is allowed instead. A sentence names the field by
its path, the value given, and what it must be. errors.py makes the body of the answer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from sparkdraft.server.protocol.errors import ApiError

MAX_SHOWN = 40  # characters of a value that are shown
MAX_ERRORS = 16  # of pydantic's errors, this many are looked at

# The beginnings of the standard library's messages about broken JSON, and their meaning.
JSON_MISTAKES = {
    "Expecting value": "a value is missing",
    "Expecting property name": "a field's name in double quotes is missing",
    "Expecting ':'": "the colon after a field's name is missing",
    "Expecting ','": "a comma or a closing bracket is missing",
    "Extra data": "the JSON has ended and more text follows",
    "Illegal trailing comma": "there is a comma before a closing bracket",
    "Unterminated string": "a string begins that has no closing quote",
    "Invalid control character": "a string has a control character that must be escaped, such as a line break",
    "Invalid \\escape": "a backslash does not begin an escape of JSON",
    "Invalid \\uXXXX": "\\u is not followed by four hexadecimal digits",
}
# Pydantic's types of errors -> what the field must be, with numbers from the error's context.
ALLOWED = {
    "string_type": "a string",
    "string_unicode": "valid Unicode text",
    "string_too_short": "a string that is not empty",  # no field needs more than one character
    "string_too_long": "a string of at most {max_length} characters",
    "string_pattern_mismatch": "1 to 128 letters, digits or characters of _.:-",  # the names of tools
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number with fewer digits",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
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
    """One sentence from pydantic's errors. For a union it reports every branch; the branch that got furthest was
    meant."""
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
    what = next((ours for start, ours in JSON_MISTAKES.items() if mistake.startswith(start)), "it cannot be read")
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    rest = text[position : position + MAX_SHOWN // 2]
    stands = f"{json.dumps(rest, ensure_ascii=False)} stands" if rest else "the body ends"
    sentence = f"The body is not valid JSON: at line {line}, column {column}, where {stands}, {what}."
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
    """'messages[0].role': the part of an error's location that is in the body; the rest names branches of a union."""
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
