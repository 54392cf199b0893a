"""Requests of drawn lengths (`bench serve` and `bench offline` with --prompt-len 64:512): what is drawn, what a
scripted server and an engine get, and the figures that come of it. The arithmetic is checked on made-up records."""

from __future__ import annotations

import asyncio
import builtins
import json
import math
import time
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sparkdraft.cli.main import main
from sparkdraft.core import FinishReason, SamplingParams, StepOutput, UserError
from sparkdraft.engine.engine import Engine
from sparkdraft.models.common.config import uniform_config
from sparkdraft.operate.bench import in_process, random_model, streaming
from sparkdraft.operate.bench.streaming import Answer, Chunks, read
from sparkdraft.operate.bench.traffic import IDS, Lengths, Planned, Record, Traffic, describe, figures, read_limits
from tests.cli.said import said
from tests.fakes.web import serving

DRAWN = ("--prompt-len", "3:9", "--output-len", "2:6")
PIECE = json.dumps({"choices": [{"text": "é\u2028"}]}, ensure_ascii=False)  # a line's end that is none in a stream
TRAFFIC = Traffic(Lengths(3, 9), Lengths(2, 6))


# ---- what is drawn


def test_lengths_and_ids_are_drawn_from_their_ranges_by_the_seed() -> None:
    planned = TRAFFIC.plan(64)
    assert len(planned) == 512 and len(TRAFFIC.plan(1)) == 16 and len(Traffic(*both(), requests=5).plan(64)) == 5
    assert {len(each.prompt) for each in planned} == {*range(3, 10)}
    assert {each.output_len for each in planned} == {*range(2, 7)}
    assert all(IDS[0] <= token < IDS[1] for each in planned for token in each.prompt)
    assert all(0 <= token < 300 for each in TRAFFIC.plan(64, vocab_size=300) for token in each.prompt)
    assert shapes(TRAFFIC.plan(4)) == shapes(planned)[:32] and {each.at for each in planned} == {0.0}
    assert shapes(Traffic(*both(), seed=1).plan(64)) != shapes(planned) != shapes(TRAFFIC.plan(64, warm=True))[:512]
    assert len(TRAFFIC.plan(3, warm=True)) == 6 and len(TRAFFIC.plan(999, warm=True)) == 128
    assert TRAFFIC.plan(64)[0].prompt != planned[0].prompt, "a prefix cache would know the prompts of an earlier run"


def shapes(planned: list[Planned]) -> list[tuple[int, int]]:
    return [(len(each.prompt), each.output_len) for each in planned]


def both() -> tuple[Lengths, Lengths]:
    return TRAFFIC.prompt_len, TRAFFIC.output_len


def test_arrivals_are_a_poisson_process() -> None:
    planned = Traffic(*both(), requests=4000, rate=20.0).plan(1)
    gaps = [after.at - before.at for before, after in pairwise(planned)]
    mean = sum(gaps) / len(gaps)
    assert planned[0].at == 0 and mean == pytest.approx(1 / 20, rel=0.1)
    assert math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) == pytest.approx(mean, rel=0.1)
    alike = Traffic(*both(), requests=4000).plan(1)
    assert shapes(planned) == shapes(alike), "the rate changes no request"


def test_ranges_and_limits_are_read() -> None:
    assert Lengths.read("--x", "64:512") == Lengths(64, 512) and str(Lengths.read("--x", "128")) == "128"
    assert read_limits(["ttft:150", "tpot:20.5"]) == {"ttft": 150, "tpot": 20.5}
    for wrong in ("9:3", "0:4", "a", ":3", "3:", "-1", "3:4:5"):
        with pytest.raises(UserError, match="--x is"):
            Lengths.read("--x", wrong)
    for wrong in ("ttft", "ttft:x", "itl:3", "tpot:0", "tpot:nan"):
        with pytest.raises(UserError, match="--goodput has"):
            read_limits([wrong])


# ---- the figures


def record(began: float, first: float, tokens: int, step: float) -> Record:
    pieces = [began + first + i * step for i in range(tokens)]
    return Record(began, pieces, pieces[-1] + 0.001, tokens)


def test_figures() -> None:
    records = [record(0, 0.1, 11, 0.02), record(0, 0.2, 11, 0.04), record(1, 0.3, 1, 0), Record(0, error="lost")]
    row = figures(records, 2.0, 3, {"ttft": 150, "tpot": 30})
    assert (row["requests"], row["errors"], row["first_error"], row["tokens"]) == (4, 1, "lost", 23)
    assert (row["tok_s"], row["requests_s"]) == (11.5, 1.5)
    assert row["ttft_ms"] == {"p50": pytest.approx(200), "p90": pytest.approx(280), "p99": pytest.approx(298)}
    assert row["itl_ms"]["p50"] == pytest.approx(30) and row["itl_ms"]["p99"] == pytest.approx(40)
    assert row["tpot_ms"]["p50"] == pytest.approx(30) and row["e2el_ms"]["p50"] == pytest.approx(301)
    assert row["goodput_s"] == 0.5 and row["good_share"] == 0.25
    assert figures(records, 2.0, 3, {})["goodput_s"] is None
    assert figures(records, 2.0, 3, {"e2el": 310})["goodput_s"] == 1.0
    nothing = figures([Record(0, error="lost")], 1.0, 1, {"ttft": 1})
    assert nothing["ttft_ms"] is None and nothing["goodput_s"] == 0


def test_what_was_asked_is_said() -> None:
    said = describe(Traffic(*both(), rate=2, sampling={"top_p": 0.9}, limits={"ttft": 150}))
    assert "Prompts of 3:9 random ids" in said and "2 a second (Poisson)" in said and "top_p 0.9" in said
    assert "limits: ttft 150 ms" in said and "greedy" in describe(TRAFFIC)


@settings(deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=5), st.lists(st.integers(0, 300), max_size=6))
def test_a_chunked_body_is_decoded_in_any_pieces(chunks: list[bytes], cuts: list[int]) -> None:
    data = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    decoder, found = Chunks(), b""
    for low, high in pairwise(edges):
        assert not decoder.ended or low == len(data)
        found += decoder.feed(data[low:high])
    assert decoder.ended and found == b"".join(chunks)


def test_an_answer_that_is_no_stream_is_an_error() -> None:
    for body in (b"data: {\n\n", b"data: 3\n\n", b'data: {"choices": 3}\n\n'):
        assert "no stream of completions" in read(Answer(Record(0), 200, [(1.0, body)])).error


# ---- against a scripted server


class Script:
    """Writes as many tokens as a request asks for, two characters each."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.clients: set[Any] = set()
        self.running = self.most = 0
        self.breaks: dict[int, str] = {}  # by the number of the request

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "scripted"}]})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        how = self.breaks.get(len(self.bodies), self.breaks.get(-1, ""))
        self.bodies.append(body)
        self.clients.add(request.client)
        if how == "refuse":
            return JSONResponse({"error": {"message": "the queue is full"}}, 429)
        headers = {"connection": "close"} if how == "close" else None
        return StreamingResponse(self.stream(body, how), media_type="text/event-stream", headers=headers)

    async def stream(self, body: dict[str, Any], how: str) -> AsyncIterator[str]:
        self.running += 1
        self.most = max(self.most, self.running)
        for i in range(body["max_tokens"]):
            await asyncio.sleep(0.005)
            yield f"data: {PIECE}\n\n"
            if i == 0 and how == "error":
                yield f"data: {json.dumps({'error': {'message': 'the engine died'}})}\n\n"
                self.running -= 1
                return
            if i == 0 and how == "cut":
                self.running -= 1
                return
        self.running -= 1
        yield f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': body['max_tokens']}})}\n\n"
        yield "data: [DONE]\n\n"

    def app(self) -> Starlette:
        routes = [Route("/v1/models", self.models), Route("/v1/completions", self.complete, methods=["POST"])]
        return Starlette(routes=routes)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def url(script: Script) -> Iterator[str]:
    with serving(script.app()) as address:
        yield address


def bench(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[dict[str, Any], str]:
    status = main(["bench", *args])
    out, err = capsys.readouterr()
    assert status == 0, err
    return json.loads(out.splitlines()[-1]), out


def test_a_closed_loop(url: str, script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    sampling = ("--temperature", "0.6", "--top-p", "0.95", "--top-k", "20", "--presence-penalty", "1.5")
    flags = ("--concurrency", "1,3", "--requests", "6", *sampling, "--goodput", "ttft:60000")
    report, out = bench(capsys, "serve", "--url", url, *DRAWN, *flags)
    assert (report["bench"], report["model"]) == ("serve", "scripted")
    assert report["traffic"]["prompt_len"] == "3:9" and report["traffic"]["rate"] is None
    assert "| 3 | 6 |" in out and script.most == 3 and len(script.clients) <= 1 + 1 + 3, "connections are kept"
    planned, warm = Traffic(*both(), requests=6).plan(3), [*TRAFFIC.plan(1, warm=True), *TRAFFIC.plan(3, warm=True)]
    asked = [*warm[:2], *planned, *warm[2:], *planned]
    sent = [(len(body["prompt"]), body["max_tokens"]) for body in script.bodies]
    assert sorted(sent) == sorted(shapes(asked)) and len({str(body["prompt"]) for body in script.bodies}) == len(sent)
    for body in script.bodies:
        assert (body["temperature"], body["top_p"], body["top_k"], body["presence_penalty"]) == (0.6, 0.95, 20, 1.5)
        assert body["ignore_eos"] and body["stream_options"] == {"include_usage": True} and "seed" not in body
    for row in report["rows"]:
        assert row["tokens"] == sum(each.output_len for each in planned) and row["errors"] == 0
        assert row["ttft_ms"]["p50"] >= 4 and row["itl_ms"]["p50"] > 0
        assert row["good_share"] == 1 and row["goodput_s"] == row["requests_s"]


def test_arrivals_at_a_rate_wait_for_nobody(
    url: str, script: Script, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--prompt-len", "4", "--output-len", "20", "--request-rate", "1000", "--requests", "8")
    report, out = bench(capsys, "serve", "--url", url, *flags, "--out", str(tmp_path))
    (row,) = report["rows"]
    assert row["streams"] == row["requests"] == 8 and script.most == 8 and report["traffic"]["rate"] == 1000
    assert json.loads((tmp_path / "serve.json").read_text()) == report
    assert (tmp_path / "serve.md").read_text().strip() in out


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("refuse", "status 429: the queue is full"),
        ("error", "the engine died"),
        ("cut", "the connection ended before the answer did"),
    ],
)
def test_errors_are_counted(how: str, words: str, url: str, script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    script.breaks[4] = how  # two of the warm-up come before
    report, _ = bench(capsys, "serve", "--url", url, *DRAWN, "--concurrency", "1", "--requests", "4")
    (row,) = report["rows"]
    planned = Traffic(*both(), requests=4).plan(1)
    assert (row["errors"], row["first_error"]) == (1, words)
    assert row["tokens"] == sum(each.output_len for i, each in enumerate(planned) if i != 2)


def test_a_server_that_closes_connections_is_not_at_fault(
    url: str, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    script.breaks[-1] = "close"
    report, _ = bench(capsys, "serve", "--url", url, *DRAWN, "--concurrency", "1", "--requests", "10")
    assert report["rows"][0]["errors"] == 0 and len(script.clients) >= 10


def test_a_request_on_a_connection_that_the_server_has_just_closed_is_sent_again() -> None:
    async def run() -> list[Record]:
        async def serve_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            usage = json.dumps({"choices": [{"text": "x"}], "usage": {"completion_tokens": 2}})
            body = f"data: {usage}\n\ndata: [DONE]\n\n".encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            await asyncio.sleep(0.02)  # the next request is on its way by now
            writer.close()

        server = await asyncio.start_server(serve_once, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        target = streaming.Target(f"http://127.0.0.1:{port}", "", "m", {})
        records, _ = await streaming.run(target, TRAFFIC.plan(1)[:5], 1, lambda: None)
        server.close()
        return records

    assert [record.error for record in asyncio.run(run())] == [""] * 5


class SlowSteps:
    """An engine whose step takes a tenth of a second and ends every request."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def add(self, prompt: list[int], params: SamplingParams) -> str:
        self.ids.append(f"r{len(self.ids)}")
        return self.ids[-1]

    def step(self) -> list[StepOutput]:
        time.sleep(0.1)
        ended, self.ids = self.ids, []
        return [StepOutput(id, 0, [1], "", FinishReason.LENGTH) for id in ended]


def test_a_request_that_arrives_during_a_step_has_waited_for_it() -> None:
    planned = [Planned(at, [5], 2) for at in (0.0, 0.03, 0.06)]
    engine: Any = SlowSteps()
    records, _ = in_process.run(engine, planned, 8, {}, lambda: None)
    assert [record.first for record in records] == [pytest.approx(t, abs=0.05) for t in (0.1, 0.17, 0.14)]
    engine = SlowSteps()
    records, _ = in_process.run(engine, planned, 1, {}, lambda: None)
    assert [record.first for record in records] == [pytest.approx(0.1, abs=0.05)] * 3, (
        "it is sent when there is a place"
    )


def test_a_server_that_fails_every_time_is_one_sentence(
    url: str, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    script.breaks[-1] = "refuse"
    assert main(["bench", "serve", "--url", url, *DRAWN]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "the queue is full" in err and len(said(err)) == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["serve", *DRAWN, "--classes", "code"], "give one of the two"),
        (["serve", "--prompt-len", "9:3"], "--prompt-len is '9:3'"),
        (["serve", "--prompt-len", "3", "--output-len", "1:3"], "--output-len is '1:3'; give a number from 2"),
        (["serve", "--output-len", "3:9"], "--output-len is '3:9'; give one number"),
        (["serve", *DRAWN, "--request-rate", "0"], "--request-rate is 0"),
        (["serve", *DRAWN, "--goodput", "ttft"], "--goodput has 'ttft'"),
        (["serve", *DRAWN, "--top-p", "2"], "top_p is 2"),
        (["serve", *DRAWN, "--requests", "2", "--concurrency", "4"], "too few for 4 streams"),
        (["serve", "--request-rate", "3"], "--request-rate is for requests of drawn lengths"),
        (["serve", "--goodput", "ttft:3"], "--goodput is for requests of drawn lengths"),
        (["offline", "--seed", "3"], "--seed is for requests of drawn lengths"),
        (["offline", "--requests", "3"], "--requests is for requests of drawn lengths"),
        (["offline", "--output-len", "3:9"], "--output-len is '3:9'; give one number"),
        (["offline", *DRAWN, "--synthetic-acceptance", "3"], "--synthetic-acceptance is for requests of one length"),
    ],
)
def test_flags_are_checked_before_anything_runs(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *args]) == 1
    out, err = capsys.readouterr()
    assert out == "" and words in err and len(said(err)) == 1


def test_no_torch_is_loaded(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = builtins.__import__

    def guarded(name: str, *args: Any, **kwargs: Any) -> Any:
        assert name.split(".")[0] != "torch", "bench serve must not load torch"
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", guarded)
    bench(capsys, "serve", "--url", url, *DRAWN, "--concurrency", "1", "--requests", "1")


# ---- in the engine's process


@pytest.mark.parametrize("rate", [(), ("--request-rate", "200")])
def test_the_engine_runs_the_same_requests(
    rate: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toy = uniform_config("qwen3", 2, 32, 64, 2, 1, 16, IDS[1], 1024, tie_embeddings=True, qk_norm=True)
    monkeypatch.setitem(random_model.SHAPES, "toy", toy)
    added: list[tuple[int, int]] = []
    real = Engine.add

    def add(engine: Engine, prompt_ids: list[int], params: Any, *more: Any) -> str:
        if params.temperature == 0.5:  # others warm the engine up
            added.append((len(prompt_ids), params.max_tokens))
            assert params.ignore_eos and params.seed is None
        return real(engine, prompt_ids, params, *more)

    monkeypatch.setattr(Engine, "add", add)
    flags = ("--shape", "toy", "--dtype", "float32", "--threads", "1", "--kv-tokens", "512", "--temperature", "0.5")
    report, out = bench(capsys, "offline", *flags, *DRAWN, "--concurrency", "2", "--requests", "6", *rate)
    planned = Traffic(*both(), requests=6).plan(2)
    assert added[4:] == shapes(planned), "after four of the warm-up"
    (row,) = report["rows"]
    assert (row["streams"], row["requests"], row["errors"]) == (2, 6, 0)
    assert row["tokens"] == sum(each.output_len for each in planned)
    assert report["traffic"]["sampling"] == {"temperature": 0.5} and "in this process" in out
