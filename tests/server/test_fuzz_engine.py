"""The bodies of test_fuzz.py against the real engine: no grammar, no sampler and no prompt of one request ends it.

Behind the API is a tiny random model, and for fewer cases the embedded one with its drafter. `FUZZ_CASES` scales
both. Answers are kept short, so that the time goes into different requests.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.patience import PATIENT
from tests.server.conftest import Live
from tests.server.test_fuzz import CALM, CASES, DOCUMENT, FIELDS, JSON, MESSAGES, ODD, TOO_MUCH, schemathesis

pytestmark = pytest.mark.fuzz
PATHS = ("/v1/chat/completions", "/v1/completions")
SOME = settings(CALM, max_examples=max(CASES // 2, 20))
FEW = settings(CALM, max_examples=max(CASES // 4, 10))
MOST_TOKENS = 6
OURS = ('"type":"server_error"', '"type":"service_unavailable"')  # as the event of a stream that has begun


@contextmanager
def unharmed(server: Live) -> Iterator[None]:
    """The engine process is the same one afterwards, idle, and answers."""
    client = server.service.client
    before = (client.pid, client.restarts)
    yield
    assert (client.pid, client.restarts) == before and server.service.ready
    assert server.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200
    server.wait_for(lambda: server.service.gate.num_inside == 0)


ANSWERS: Counter[int] = Counter()  # statuses


def send(server: Live, path: str, body: Any) -> None:
    if isinstance(body, dict):
        asked = body.get("max_tokens")
        short = isinstance(asked, int) and asked <= MOST_TOKENS  # wrong ones stay as they are
        body = body | ({} if short else {"max_tokens": MOST_TOKENS})
        body = {name: value for name, value in body.items() if name != "max_completion_tokens"}
    data = json.dumps(body).encode("utf-8", "surrogatepass")
    headers = {"Content-Type": "application/json"}
    answer: httpx.Response = server.http.post(path, content=data, headers=headers, timeout=PATIENT)
    assert answer.status_code < 500 and not any(mark in answer.text for mark in OURS), (body, answer.text)
    ANSWERS[answer.status_code] += 1
    if answer.status_code >= 400:
        assert answer.json()["error"]["message"]


# ---- bodies

SHAPES = ["object", "array", "string", "integer", "number", "boolean", "null", "frog"]
LEAVES = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(SHAPES) | st.lists(st.sampled_from(SHAPES), max_size=3),
        "enum": st.lists(JSON, max_size=3),
        "const": JSON,
        "pattern": st.sampled_from(["^[a-z]+$", "(", "a{1,999}", "(?=x)y", "\\d+", ".*.*.*x", "(a|b)*c"]) | st.text(),
        "format": st.sampled_from(["date", "uuid", "email", "date-time", "nothing"]),
        "minLength": st.integers(-1, 2**40),
        "maxLength": st.integers(-1, 2**40),
        "minimum": st.integers() | st.floats(),
        "maximum": st.integers() | st.floats(),
        "multipleOf": st.integers(-2, 9) | st.floats(),
        "minItems": st.integers(-1, 10**6),
        "maxItems": st.integers(-1, 10**6),
        "uniqueItems": st.booleans(),
        "required": st.lists(st.sampled_from("abc") | JSON, max_size=3),
        "$ref": st.sampled_from(["#", "#/$defs/a", "#/$defs/none", "https://example.com", "#/properties/a/items"]),
        "x-guidance": st.dictionaries(st.sampled_from(["lenient", "whitespace_pattern", "item_separator"]), JSON),
    },
)


def _around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named, several = st.dictionaries(st.sampled_from("abc") | st.text(max_size=4), inner, max_size=3), st.lists(inner)
    parts = {"properties": named, "$defs": named, "items": inner, "additionalProperties": inner, "not": inner}
    parts |= dict.fromkeys(("anyOf", "allOf", "oneOf", "prefixItems"), several)
    grown = st.fixed_dictionaries({}, optional=parts)
    return st.tuples(LEAVES, grown).map(lambda both: both[0] | both[1])


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


GOOD = st.recursive(
    st.sampled_from([{"type": name} for name in SHAPES[2:-1]] + [{"enum": ["x", 1]}, {"pattern": "^[a-c]+$"}, {}]),
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abc"), inner).map(lambda fields: {"type": "object", "properties": fields}),
        inner.map(lambda item: {"type": "array", "items": item, "minItems": 2}),
        st.lists(inner, min_size=1, max_size=3).map(lambda several: {"anyOf": several}),
    ),
    max_leaves=6,
)
SCHEMAS = GOOD | st.recursive(LEAVES, _around, max_leaves=8) | st.integers(1, 300).map(_deep)
TOOL = st.builds(lambda name, schema: {"type": "function", "function": {"name": name, "parameters": schema}},
                 st.sampled_from(["f", "g", "a.b:c-d"]), SCHEMAS)  # fmt: skip
# Most fields are right, since one wrong one is enough to keep a request from the engine.
SAMPLING = {
    "n": st.integers(1, 4),
    "temperature": st.sampled_from([0, 0.01, 0.7, 2, 1e-30, 100]),
    "top_p": st.floats(1e-30, 1),
    "top_k": st.integers(-1, 2**31 - 1),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.01, 100),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(st.integers(0, 319).map(str), st.floats(-100, 100), max_size=4),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": st.text(min_size=1, max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 319), max_size=3),
    "min_tokens": st.integers(0, 2),
    "ignore_eos": st.booleans(),
    "speculation": st.sampled_from(["auto", "off", 0, 1, 3, 7]),
    "return_speculation": st.booleans(),
    "stream": st.booleans(),
    "max_tokens": st.integers(2, MOST_TOKENS),
}
NUMBERS = st.integers(-3, 400) | st.floats(-3, 3) | ODD
WRONG = st.one_of(
    st.just({}),
    st.just({}),
    st.dictionaries(st.sampled_from(sorted(SAMPLING)), NUMBERS | JSON, max_size=1),
    st.sampled_from([{"logit_bias": {"320": 1}}, {"stop_token_ids": [99999]}, {"speculation": 16}, {"n": 65}]),
    TOO_MUCH,
)
FORMATS = st.one_of(
    st.just({"type": "json_object"}),
    SCHEMAS.map(lambda schema: {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}),
)
CHATS = st.fixed_dictionaries(
    {"messages": st.just(MESSAGES["messages"])},
    optional=SAMPLING
    | {
        "response_format": FORMATS,
        "tools": st.lists(TOOL, min_size=1, max_size=3, unique_by=lambda tool: tool["function"]["name"]),
        "parallel_tool_calls": st.booleans(),
        "logprobs": st.booleans(),
    },
)
HELD = st.builds(lambda body, form: body | {"response_format": form}, CHATS, FORMATS)
CALLS = st.builds(lambda body, tool: body | {"tools": [tool], "tool_choice": "required"}, CHATS, TOOL)
PROMPTS = st.text(max_size=30) | st.lists(st.integers(-1, 321), max_size=9) | st.lists(st.text(max_size=9), max_size=3)
TEXTS = st.fixed_dictionaries(
    {"prompt": PROMPTS}, optional=SAMPLING | {"logprobs": st.integers(0, 20), "echo": st.booleans()}
)
CHANGES = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3)


BODIES = [
    pytest.param(PATHS[0], CHATS, id="chats"),
    pytest.param(PATHS[0], HELD, id="held"),
    pytest.param(PATHS[0], CALLS, id="calls"),
    pytest.param(PATHS[1], TEXTS, id="texts"),
]


# ---- the tiny model


@pytest.mark.parametrize("path", PATHS)
def test_no_case_of_the_document_breaks_the_engine(tiny_server: Live, path: str) -> None:
    operation, modes = schemathesis.openapi.from_dict(DOCUMENT)[path]["POST"], schemathesis.GenerationMode

    @given(case=st.one_of([operation.as_strategy(generation_mode=mode) for mode in (modes.POSITIVE, modes.NEGATIVE)]))
    @SOME
    def run(case: Any) -> None:
        if isinstance(case.body, dict | list | str | int | float | None):
            send(tiny_server, path, case.body)

    with unharmed(tiny_server):
        run()


@pytest.mark.parametrize(("path", "bodies"), BODIES)
def test_no_grammar_and_no_sampling_breaks_the_engine(tiny_server: Live, path: str, bodies: Any) -> None:
    @given(body=bodies, wrong=WRONG)
    @CALM
    def run(body: Any, wrong: Any) -> None:
        send(tiny_server, path, body | wrong)

    with unharmed(tiny_server):
        run()


def test_no_wrong_field_breaks_the_engine(tiny_server: Live) -> None:
    @given(changes=CHANGES, path=st.sampled_from(PATHS))
    @CALM
    def run(changes: dict[str, Any], path: str) -> None:
        send(tiny_server, path, MESSAGES | changes)

    with unharmed(tiny_server):
        run()


# ---- the embedded one, which drafts


@pytest.mark.slow
@pytest.mark.parametrize(("path", "bodies"), [BODIES[1], BODIES[3]])
def test_no_case_breaks_an_engine_that_drafts(smollm2: Live, path: str, bodies: Any) -> None:
    @given(body=bodies, wrong=WRONG)
    @FEW
    def run(body: Any, wrong: Any) -> None:
        body.pop("tools", None)  # thousands of tokens of a prompt, which the tiny model has read already
        send(smollm2, path, body | wrong)

    with unharmed(smollm2):
        run()


def test_a_good_part_of_them_reached_the_engine() -> None:
    print(f"\n{ANSWERS.total()} requests, by status {dict(sorted(ANSWERS.items()))}")
    assert ANSWERS[200] > ANSWERS.total() / 4
