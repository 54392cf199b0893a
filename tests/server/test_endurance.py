"""Long runs over HTTP with the embedded model: many clients of whom some hang up, and schemas nobody has seen before.

A short form of each runs in `make test`, the long one in `make test-long`. How fast it goes is left to
`make check-speed`.
"""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import pytest

from sparkdraft.config import EngineConfig
from sparkdraft.server.engine_client import EngineClient
from tests.patience import PATIENT
from tests.server.conftest import Live, live

PROMPT = "Tell me something about the sea, number {}."
CLIENTS = 16
TOKENS_EACH = 48
LEAVE_AFTER = 20  # tokens
ENGINE: dict[str, Any] = {"device": "cpu", "kv_tokens": 4096, "max_seqs": CLIENTS}
TOKENS = re.compile(rb'"tokens": ?(\d+)')


def rss(pid: int) -> int:
    """Kilobytes of memory that a process holds."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1])  # type: ignore[index]


@pytest.fixture(scope="module")
def small_cache() -> Iterator[Live]:
    """A cache that a first load fills: a larger one takes its memory little by little, as blocks are first used."""
    engine = EngineConfig(**ENGINE)
    with live(EngineClient(engine), engine=engine) as running:
        yield running


class Client(threading.Thread):
    """Asks one question after the other; every third client leaves in the middle of each answer.

    It takes its answers apart by hand: clients share the machine with the server, and a client library costs more than
    the server does.
    """

    def __init__(self, server: Live, number: int, questions: int) -> None:
        super().__init__(daemon=True)
        self.server, self.number, self.questions = server, number, questions
        self.leaves = number % 3 == 2
        self.answers = self.tokens = 0
        self.errors: list[str] = []

    def run(self) -> None:
        address = urlsplit(self.server.url).netloc
        for _ in range(self.questions):
            try:
                self.ask(HTTPConnection(address, timeout=PATIENT))
            except Exception as error:
                self.errors.append(repr(error))
                return

    def ask(self, http: HTTPConnection) -> None:
        question = PROMPT.format(self.number * 1000 + self.answers)
        body: dict[str, Any] = {"messages": [{"role": "user", "content": question}], "stream": True}
        body |= {
            "max_tokens": TOKENS_EACH,
            "temperature": 0,
            "ignore_eos": True,
            "return_speculation": True,
        }
        with closing(http):
            http.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
            response = http.getresponse()
            if response.status != 200:
                self.errors.append(f"status {response.status}: {response.read()[:200]!r}")
                return
            seen = 0
            while piece := response.read1():
                if b'"error"' in piece:
                    self.errors.append(piece.decode())
                seen += sum(map(int, TOKENS.findall(piece)))
                if self.leaves and seen > LEAVE_AFTER:
                    break
        self.answers += 1
        self.tokens += seen


def crowd(server: Live, questions: int) -> list[Client]:
    """All clients at once, until each has asked its questions."""
    clients = [Client(server, i, questions) for i in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(questions * PATIENT)
        assert not client.is_alive(), "a client hangs"
    return clients


@pytest.mark.slow
@pytest.mark.parametrize("questions", [60])
def test_sixteen_clients_of_whom_a_third_hang_up(small_cache: Live, questions: int) -> None:
    server = small_cache
    status = server.http.get("/v1/status").json()["engine"]
    crowd(server, max(questions // 3, 2))  # memory that a first load takes, and keeps
    pid = server.service.client.pid
    assert pid is not None
    before = rss(pid)
    clients = crowd(server, questions)
    assert [e for c in clients for e in c.errors] == []
    assert all(c.answers == questions for c in clients)

    def engine() -> dict[str, Any]:
        found: dict[str, Any] = server.http.get("/v1/status").json()["engine"]
        return found

    server.wait_for(lambda: engine()["running"] == 0 and engine()["kv_blocks_free"] == status["kv_blocks_total"])
    grown = rss(pid) / before - 1
    print(f"{sum(c.answers for c in clients)} answers, memory {grown:+.1%}")
    if questions >= 60:
        assert grown < 0.03, f"the engine's memory grew by {grown:.1%}"


def test_what_speed_is_compared_with(tiny_folder: Path) -> None:
    """Every token of every request is counted, and as many run at once as were asked for."""
    from sparkdraft import LLM, SamplingParams
    from sparkdraft.operate.bench.offline import throughput

    engine, lengths, at_once = LLM(str(tiny_folder), device="cpu").engine, [5, 30, 9, 17, 4, 12, 21], []

    def requests() -> Iterator[tuple[list[int], SamplingParams]]:
        for i, length in enumerate(lengths):
            at_once.append(len(engine.scheduler.running) + len(engine.scheduler.waiting))
            yield [i + 1] * 20, SamplingParams(max_tokens=length, ignore_eos=True, num_draft=0)

    found = throughput(engine, requests(), 3)
    assert (found.requests, found.tokens) == (len(lengths), sum(lengths)) and found.seconds > 0
    assert at_once == [0, 1, 2, 2, 2, 2, 2] and not engine.has_work


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    kind = rng.choice(["string", "integer", "number", "boolean", "enum", "array", "object"] if depth else ["integer"])
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(1, 12)}
    if kind in ("integer", "number"):
        low = rng.randint(-50, 50)
        return {"type": kind, "minimum": low, "maximum": low + rng.randint(1, 500)}
    if kind == "enum":
        return {"enum": rng.sample(["red", "green", 7, None, "a b", True, 2.5], rng.randint(1, 4))}
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth - 1), "minItems": 1, "maxItems": rng.randint(1, 3)}
    if kind == "object":
        names = rng.sample(["name", "age", "tags", "x", "city", "ok"], rng.randint(1, 3))
        fields = {name: random_schema(rng, depth - 1) for name in names}
        required = rng.sample(names, rng.randint(0, len(names)))
        return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}
    return {"type": "boolean"}


@pytest.mark.parametrize("count", [pytest.param(4, id="few"), pytest.param(50, id="fifty", marks=pytest.mark.slow)])
def test_random_schemas_always_parse_and_validate(smollm2: Live, count: int) -> None:
    rng = random.Random(count)
    for i in range(count):
        schema = {**random_schema(rng, 2), "title": f"thing {i}"}
        wrapped = {"type": "object", "properties": {"value": schema}, "required": ["value"]}
        wrapped["additionalProperties"] = False
        form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": wrapped}}
        answer = smollm2.chat(
            "Give me an example.", response_format=form, temperature=1, seed=i, max_tokens=400, speculation=5
        )
        assert answer.status_code == 200, (schema, answer.text)
        choice = answer.json()["choices"][0]
        assert choice["finish_reason"] == "stop", (schema, choice)
        jsonschema.validate(json.loads(choice["message"]["content"]), wrapped)
