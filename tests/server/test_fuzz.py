"""Bodies that nobody would write, made from the server's own OpenAPI document: never a 5xx, never a hang.

`make test` runs some hundred cases. With FUZZ_CASES=800, as `make test-long` sets it, up to 800 run in each test of the
routes that are used most, and a quarter of that for the others. 2,000 different bodies from the document are wanted;
`-s` shows how many there were. With a key set, every case with a wrong one gets 401, whatever else is wrong with it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkdraft.server.app import create_app
from sparkdraft.server.config import ServerConfig
from tests.patience import PATIENT
from tests.server.conftest import FakeClient, Live, live

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

FULL = "FUZZ_CASES" in os.environ
CASES = int(os.environ.get("FUZZ_CASES", "40"))  # at most in each test: a route without a body has one
WANTED = 2000  # bodies from the document in the full run
pytestmark = pytest.mark.fuzz
# The same cases in every run, so that a change is judged by its own faults; FUZZ_RANDOM=1 draws new ones.
SAME = "FUZZ_RANDOM" not in os.environ
CALM = settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=SAME)


@pytest.fixture(scope="module")
def target() -> Iterator[Live]:
    with live(FakeClient(lambda prompt, params: prompt[:40]), api_key="right") as running:
        yield running


# The document is the application's own and needs no server. Not by schemathesis' decorators, which want other versions
# of pytest than the current one.
DOCUMENT = create_app(ServerConfig(), FakeClient(lambda prompt, params: prompt)).openapi()  # type: ignore[arg-type]
MOST_USED = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
OPERATIONS = [(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods]


SENT: set[tuple[str, str]] = set()  # route and case of the document's requests that were answered with the right key
ANSWERS: Counter[int] = Counter()  # statuses, of all requests of this file


def seen(answer: Any, wrong_key: bool = False) -> int:
    """The status, counted."""
    status: int = answer.status_code
    assert status == 401 if wrong_key else status < 500, answer.text
    ANSWERS[status] += 1
    return status


def has_shape(path: str, body: Any) -> bool:
    """Whether an error has the form of its API: Anthropic's, Ollama's or OpenAI's."""
    error = body["error"]
    if path.startswith("/v1/messages"):
        return bool(body["type"] == "error" and error.keys() == {"type", "message"})
    if path.startswith("/api/"):
        return isinstance(error, str)
    return bool(error.keys() == {"message", "type", "param", "code"})


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_no_case_breaks_the_server(target: Live, path: str, method: str) -> None:
    operation = schemathesis.openapi.from_dict(DOCUMENT)[path][method.upper()]
    modes = schemathesis.GenerationMode
    wanted = [modes.POSITIVE, modes.NEGATIVE] if method == "post" else [modes.POSITIVE]

    @given(case=st.one_of([operation.as_strategy(generation_mode=mode) for mode in wanted]))
    @settings(CALM, max_examples=CASES if path in MOST_USED else CASES // 4)
    def run(case: Any) -> None:
        answer = case.call(base_url=target.url, headers={"Authorization": "Bearer right"}, timeout=PATIENT)
        if seen(answer) >= 400:
            assert has_shape(path, answer.json())
        wrong = case.call(base_url=target.url, headers={"Authorization": "Bearer wrong"}, timeout=PATIENT)
        seen(wrong, wrong_key=True)
        SENT.add((f"{method} {path}", repr((case.body, case.query, case.path_parameters))))

    run()


# Numbers that no field was meant for; json.dumps writes NaN and Infinity as literals, which the server reads.
ODD = st.integers(-(2**70), 2**70) | st.sampled_from([2**31, 2**63, -(2**63) - 1, 2**64, 2**70]) | st.floats()
JSON = st.recursive(
    st.none() | st.booleans() | ODD | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = ["messages", "prompt", "model", "stream", "n", "stop", "seed", "max_tokens", "temperature", "logit_bias"]
FIELDS += ["tools", "tool_choice", "response_format", "logprobs", "top_logprobs", "speculation", "stream_options"]
FIELDS += ["best_of", "top_k", "top_p", "min_p", "min_tokens", "max_completion_tokens", "stop_token_ids"]
FIELDS += ["repetition_penalty", "presence_penalty", "frequency_penalty"]
# Each beyond its limit.
TOO_MUCH = st.fixed_dictionaries(
    {},
    optional={
        "n": st.sampled_from([0, -1, 65, 10**9, 2**70]),
        "best_of": st.sampled_from([-1, 2, 65, 2**70]),
        "stop": st.sampled_from([["x"] * 17, ["x"] * 100_000, "x" * 257, "x" * 100_000, [""]]),
        "stop_token_ids": st.sampled_from([[1] * 65, [1] * 100_000, [2**31], [2**70], [-1]]),
        "logit_bias": st.sampled_from([{str(i): 0 for i in range(size)} for size in (1025, 50_000)])
        | st.dictionaries(st.sampled_from(["-1", str(2**70)]), ODD, min_size=1),
        "seed": st.sampled_from([2**63, -(2**63) - 1, 2**70]),
    },
).filter(bool)
MESSAGES = {"messages": [{"role": "user", "content": "x"}], "prompt": "x"}


@given(changes=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3))
@CALM
def test_right_requests_with_wrong_fields(target: Live, changes: dict[str, Any]) -> None:
    body = json.dumps(MESSAGES | changes).encode("utf-8", "surrogatepass")
    for path in ("/v1/chat/completions", "/v1/completions"):
        answer = target.http.post(path, content=body, headers={"Content-Type": "application/json"}, timeout=PATIENT)
        seen(answer)


@given(changes=TOO_MUCH, odd=st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=2))
@CALM
def test_what_is_beyond_a_limit_is_refused_in_a_sentence(target: Live, changes: Any, odd: Any) -> None:
    body = json.dumps(MESSAGES | odd | changes).encode()
    for path in ("/v1/chat/completions", "/v1/completions"):
        if path.endswith("chat/completions") and changes.keys() == {"best_of"}:
            continue  # a chat has no such field
        answer = target.http.post(path, content=body, headers={"Content-Type": "application/json"}, timeout=PATIENT)
        assert seen(answer) == 400 and answer.json()["error"]["message"].endswith((".", "...")), answer.text


@given(raw=st.binary(max_size=200))
@CALM
def test_bytes_that_are_no_json(target: Live, raw: bytes) -> None:
    answer: httpx.Response = target.http.post(
        "/v1/completions", content=raw, headers={"Content-Type": "application/json"}, timeout=PATIENT
    )
    seen(answer)


@pytest.mark.skipif(not FULL, reason="counts the full run: FUZZ_CASES=800")
def test_enough_cases_ran() -> None:
    cases = Counter(route for route, _ in SENT)
    bodies = sum(count for route, count in cases.items() if route.startswith("post"))
    print(f"\n{bodies} different bodies of {len(SENT)} different cases: {dict(cases)}")
    print(f"{ANSWERS.total()} requests, by status {dict(sorted(ANSWERS.items()))}")
    assert bodies >= WANTED
