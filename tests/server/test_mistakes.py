"""What clients send wrongly is told in one plain sentence: broken JSON, wrong fields, names, and too much text."""

from __future__ import annotations

import itertools
import re
from typing import Any, get_args

import httpx
import pytest
from pydantic import BaseModel, ValidationError
from pydantic_core.core_schema import ErrorType

from sparkdraft.server.protocol.chat import ChatRequest
from sparkdraft.server.protocol.completions import CompletionRequest, DetokenizeRequest, TokenizeRequest
from sparkdraft.server.protocol.validation import ALLOWED, ApiError, from_validation, shown
from tests.server.conftest import Live

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "x"}]


def message_of(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    return str(response.json()["error"]["message"])


def sent(server: Live, raw: bytes) -> httpx.Response:
    return server.http.post(CHAT, content=raw, headers={"Content-Type": "application/json"})


# ---- bodies that cannot be read


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"messages": }', 'at line 1, column 14, where "}" stands: Expecting value.'),
        (b'{"n": 1,\n}', 'at line 2, column 1, where "}" stands: Expecting property name'),
        (b'{"n" 1}', "Expecting ':' delimiter."),
        (b'{"n": 1 "m": 2}', "Expecting ',' delimiter."),
        (b'{"n": 1', "where the body ends: Expecting ',' delimiter."),
        (b"{} {}", "Extra data."),
        (b'{"user": "x', "Unterminated string."),
        (b'{"user": "a\nb"}', "Invalid control character."),
        (b'{"user": "\\x"}', "Invalid \\escape"),
        (b'{"user": "\\u12"}', "Invalid \\uXXXX escape."),
        (b"\xe9", "not valid UTF-8 at byte 0"),
        (b"[" * 100_000, "nested too deeply"),
        (b"1" * 9999, "a number of more than 4300 digits"),
    ],
)
def test_a_body_that_is_no_json(echo: Live, raw: bytes, words: str) -> None:
    response = sent(echo, raw)
    assert words in message_of(response) and response.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("raw", [b"[]", b"null", b"3", b'"x"', b""])
def test_a_body_that_is_no_object(echo: Live, raw: bytes) -> None:
    assert message_of(sent(echo, raw)).startswith("The body must be a JSON object")
    assert "Content-Type: application/json" in message_of(echo.http.post(CHAT, content=b"{}"))


# ---- fields


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"messages": 5}, "messages is 5; it must be a list."),
        ({"messages": [5]}, "messages[0] is 5; it must be an object."),
        ({"temperature": "hot"}, 'temperature is "hot"; it must be a number.'),
        ({"max_tokens": 1.5}, "max_tokens is 1.5; it must be a whole number."),
        ({"max_tokens": 2**31}, "max_tokens is 2147483648; it must be at most 2147483647."),
        ({"stream": "maybe"}, 'stream is "maybe"; it must be true or false.'),
        ({"stop": ["x"] * 17}, "stop is a list of 17 elements; it must be a string or a list of at most 16 elements."),
        (
            {"stop": "x" * 300},
            "stop is a string of 300 characters; it must be a string of at most 256 characters or a list.",
        ),
        ({"stop": {}}, "stop is an object; it must be a string or a list."),
        ({"stop": ""}, 'stop is ""; it must be a string that is not empty or a list.'),
        ({"tool_choice": {}}, "tool_choice.type is missing; send it."),
        ({"tool_choice": "x"}, "tool_choice is \"x\"; it must be 'none', 'auto', 'required' or an object."),
        ({"speculation": {}}, "speculation is an object; it must be 'auto', 'off' or a whole number."),
        ({"messages": []}, "messages is an empty list; it must be a list that is not empty."),
        ({"messages": [{"role": "user", "content": {}}]}, "messages[0].content is an object; it must be a string or a"),
        (
            {"logit_bias": {str(i): 1 for i in range(1025)}},
            "logit_bias is an object; it must be an object of at most 1024 entries.",
        ),
        ({"seed": [1, 2]}, "seed is a list of 2 elements; it must be a whole number."),
        ({"response_format": {"type": "yaml"}}, "it must be 'text', 'json_object' or 'json_schema'."),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "it must be 1 to 128 letters, digits or characters of _.:-.",
        ),
    ],
)
def test_a_field_that_is_not_what_it_must_be(echo: Live, fields: dict[str, Any], sentence: str) -> None:
    message = message_of(echo.post(CHAT, **({"messages": MESSAGES} | fields)))
    assert sentence in message and "nput should" not in message, message


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest])
def test_no_sentence_has_an_internal_name(kind: type[BaseModel]) -> None:
    """Values of many kinds in every field: a sentence names the path of the body, and nothing of the checks' own."""
    usual: dict[str, Any] = {"messages": MESSAGES, "prompt": "x", "tokens": [1]}
    values: list[Any] = [
        5,
        -1,
        1.5,
        2**70,
        True,
        "x",
        "",
        [],
        {},
        [1],
        ["x"],
        [None],
        [[]],
        [{}],
        {"x": {}},
        {"1": "x"},
    ]
    values += [
        {"type": "function", "function": {}},
        [{"role": "user", "content": [{"type": 5}]}],
        float("nan"),
        [2**40],
    ]
    values += [[{"role": "user", "content": {}}], [{"role": "assistant", "tool_calls": [{"id": 3}]}], ["x"] * 17]
    for field, value in itertools.product(kind.model_fields, values):
        body = usual | {field: value}
        try:
            kind.model_validate(body)
        except ValidationError as error:
            told = from_validation([{**each, "loc": ("body", *each["loc"])} for each in error.errors()], body)
            path = rf"{field}(\[\d+\]|\.[a-z_1]+)*"
            form = rf"{path} (is .+; it must be [^;]+|has the key .+; it must be [^;]+|is missing; send it)\."
            assert re.fullmatch(form, told.message), told.message
            assert not re.search(r"nput should|constrained|literal|list\[|[a-z][A-MO-Z]|\b1 elements", told.message)
        except ApiError as error:
            assert error.message.startswith(field), error.message


def test_the_table_names_types_that_pydantic_has() -> None:
    assert ALLOWED.keys() <= set(get_args(ErrorType))


def test_a_mistake_that_is_not_in_the_table() -> None:
    error = {"type": "url_scheme", "loc": ("body", "image"), "msg": "URL scheme should be 'x'", "input": "y", "ctx": {}}
    sentence = from_validation([error], {"image": "y"}).message
    assert sentence == 'image is "y"; it must be of the form that /openapi.json gives.'


@pytest.mark.parametrize("value", [10**4000, "x" * 10**6, [0] * 10**6, {"a": "x" * 10**6}, float("nan"), None, True])
def test_no_value_comes_back_whole(value: Any) -> None:
    assert len(shown(value)) < 60


# ---- names and sizes


def test_an_empty_name_is_no_model(echo: Live) -> None:
    for response in (echo.http.get("/v1/models/"), echo.chat(model=""), echo.post("/tokenize", model="", prompt="x")):
        assert "The model '' is not served here" in message_of(response, 404)
        assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("size", [600, 200_000])
def test_an_overflow_is_known_to_litellm(echo: Live, size: int) -> None:
    """LiteLLM 1.108 raises ContextWindowExceededError, on which its users' fallbacks depend, where a message holds this
    phrase in any case (litellm_core_utils/exception_mapping_utils.py); OpenAI's own clients look at the code."""
    for response in (echo.chat("x" * size), echo.post(COMPLETIONS, prompt="x" * size)):
        message = message_of(response)
        assert "this model's maximum context length is" in message.lower()
        assert re.search(
            r"is 512 tokens, including the answer; the \w+ has \d{3,6} (tokens|characters): shorten it\.$", message
        )
        assert response.json()["error"]["code"] == "context_length_exceeded"
