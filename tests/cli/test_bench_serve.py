"""`bench serve` against a small scripted server with known delays and counts: the figures must come out as scripted.

Three dialects are spoken: ours, vLLM's (which refuses what it does not know and counts drafts at /metrics) and a bare
one. The arithmetic is checked exactly on made-up samples, the clocks loosely, as the machine may be busy.
"""

from __future__ import annotations

import asyncio
import builtins
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from sparkdraft.cli.main import main
from sparkdraft.core import UserError
from sparkdraft.operate.bench.serve import (
    Cell,
    Drafting,
    Load,
    Result,
    Sample,
    Settings,
    markdown,
    read_counters,
    read_prompts,
    read_speculation,
    server_root,
    summary,
)
from tests.cli.said import said
from tests.fakes.web import serving

CLASSES = ["qa", "code", "json", "maths", "long-code", "dialogue", "prose", "random"]
FIRST, STEP = 0.06, 0.02  # seconds to the first token, and from step to step
STEPS = (3, 5) * 5  # tokens of each drafted step: 2 and 4 of 7 drafts accepted
TOKENS = 1 + sum(STEPS)
FACTS = {
    "num_spec_steps": 10,
    "num_accepted_draft_tokens": 30,
    "num_draft_tokens": 70,
    "acceptance_histogram": [0, 0, 5, 0, 5, 0, 0, 0],
}


class Script:
    def __init__(self) -> None:
        self.dialect = "ours"  # or "vllm", "bare"
        self.bodies: list[dict[str, Any]] = []
        self.running = self.most = self.drafted = 0
        self.breaks: Callable[[dict[str, Any]], str] = lambda body: ""  # "refuse", "error" or "cut"

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "scripted"}]})

    async def metrics(self, request: Request) -> Response:
        if self.dialect != "vllm":
            return JSONResponse({}, 404)
        steps = self.drafted
        lines = ["# TYPE vllm:spec_decode_num_drafts counter", 'vllm:num_requests_running{engine="0"} 0.0']
        counts = {"num_drafts": steps, "num_draft_tokens": 7 * steps, "num_accepted_tokens": 3 * steps}
        lines += [f'vllm:spec_decode_{name}_total{{engine="0"}} {count:.1f}' for name, count in counts.items()]
        for place, count in enumerate((steps, steps, steps // 2, steps // 2, 0, 0, 0)):
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines.append(f'{name}{{engine="0",position="{place}"}} {count:.1f}')
        return PlainTextResponse("\n".join(lines))

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        unknown = {"vllm": ["return_speculation"], "bare": ["return_speculation", "stream_options"]}
        for name in unknown.get(self.dialect, []):
            if name in body:
                return JSONResponse({"error": {"message": f"unknown field {name}"}}, 400)
        if self.breaks(body) == "refuse":
            return JSONResponse({"error": {"message": "the queue is full"}}, 429)
        return StreamingResponse(self.stream(body), media_type="text/event-stream")

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            async for event in self.events(body):
                yield f"data: {json.dumps(event)}\n\n"
        finally:
            self.running -= 1
        yield "data: [DONE]\n\n"

    async def events(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        drafting, left = body.get("speculation") != "off", min(TOKENS, body["max_tokens"])
        yield {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
        total, steps = left, [1, *(STEPS if drafting else [1] * (TOKENS - 1))]
        for i, size in enumerate(steps):
            if left <= 0:
                break
            await asyncio.sleep(STEP if i else FIRST)
            yield {"choices": [{"delta": {"content": "ab" * min(size, left)}, "finish_reason": None}]}
            left -= size
            if i == 2 and self.breaks(body) == "cut":
                return
            if i == 2 and self.breaks(body) == "error":
                yield {"error": {"message": "the engine died"}}
                return
        self.drafted += 10 if drafting and total == TOKENS else 0
        yield {"choices": [{"delta": {}, "finish_reason": "stop"}]}
        last: dict[str, Any] = {"choices": [], "usage": {"completion_tokens": total}}
        if body.get("return_speculation"):
            last["metrics"] = {"speculative_decoding": FACTS if drafting and total == TOKENS else None}
        if "stream_options" in body:
            yield last

    def app(self) -> Starlette:
        routes = [Route("/v1/models", self.models), Route("/metrics", self.metrics)]
        return Starlette(routes=[*routes, Route("/v1/chat/completions", self.chat, methods=["POST"])])


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def url(script: Script) -> Iterator[str]:
    with serving(script.app()) as address:
        yield address


def bench(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[dict[str, Any], str]:
    status = main(["bench", "serve", *args])
    out, err = capsys.readouterr()
    assert status == 0, err
    return json.loads(out.splitlines()[-1]), out


def no_less(milliseconds: float, scripted: float) -> bool:
    """At least what the script sleeps: a busy machine only adds to it."""
    return milliseconds >= 0.9e3 * scripted


@pytest.mark.slow
def test_the_figures_are_those_of_the_script(
    url: str, script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "folder"
    args = ("--concurrency", "1,2", "--classes", "code,qa", "--requests", "2", "--output-len", "64")
    report, printed = bench(capsys, "--url", url + "/v1/", *args, "--out", str(out))
    assert report["model"] == "scripted" and report["tokens_from"] == "usage"
    assert report["acceptance_from"] == "responses" and report["can_switch"] is True
    places = [(row["class"], row["streams"]) for row in report["rows"]]
    assert places == [("code", 1), ("code", 2), ("qa", 1), ("qa", 2), ("all", 1), ("all", 2)]
    for row in report["rows"]:
        count = 4 if row["class"] == "all" else 2
        assert row["requests"] == row["compared"] == count and row["tokens"] == count * TOKENS and row["errors"] == 0
        assert no_less(row["ttft_ms"]["p50"], FIRST)
        assert row["tpot_ms"]["p50"] > 0 and row["plain"]["tpot_ms"]["p50"] > 0
        assert row["tok_s"] == pytest.approx(row["tokens"] / row["seconds"])
        assert row["speedup"] == pytest.approx(row["tok_s"] / row["plain"]["tok_s"])
        assert row["acceptance_length"] == 4 and row["per_position"] == [1, 1, 0.5, 0.5, 0, 0, 0]
        assert row["draft_acceptance_rate"] == pytest.approx(3 / 7) and row["drafting_steps"] == 10 * count
        assert row["same_text"] == count and row["plain"]["acceptance_length"] is None
    assert script.most == 2
    written = {path.name for path in out.iterdir()}
    assert written == {"serve.json", "serve.md"}
    assert json.loads((out / "serve.json").read_text()) == report
    assert (out / "serve.md").read_text().strip() in printed and "| code | 1 |" in printed


def test_the_same_prompts_run_plainly_and_drafted(url: str, script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    bench(capsys, "--url", url, "--concurrency", "2", "--classes", "prose", "--requests", "3", "--temperature", "0.5")
    full = [body for body in script.bodies if body["max_tokens"] == 256]
    plain = [body for body in full if body.pop("speculation", None) == "off"]
    assert len(plain) == 3 and len(full) == 6 and full[:3] == plain  # plain first
    assert sorted(map(str, full[3:])) == sorted(map(str, plain))
    assert {(body["seed"], body["temperature"]) for body in plain} == {(0, 0.5), (1, 0.5), (2, 0.5)}
    warm = [body["messages"] for body in script.bodies if body["max_tokens"] == 8]
    assert len(warm) == 6 and all(body["messages"] in warm for body in full)


def test_a_server_that_knows_less_counts_at_its_metrics(
    url: str, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    script.dialect = "vllm"
    report, out = bench(capsys, "--url", url, "--concurrency", "2", "--classes", "maths", "--requests", "3")
    (row,) = report["rows"]
    assert report["acceptance_from"] == "metrics" and report["can_switch"] is False and "plain" not in row
    assert row["acceptance_length"] == 4 and row["drafting_steps"] == 30
    assert row["per_position"] == [1, 1, 0.5, 0.5, 0, 0, 0] and "speedup" not in out.splitlines()[2]
    refused = [body for body in script.bodies if "return_speculation" in body]
    assert len(refused) == 1 and not any("speculation" in body for body in script.bodies)


def test_a_bare_server_is_counted_by_pieces_and_that_is_said(
    url: str, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    script.dialect = "bare"
    report, out = bench(capsys, "--url", url, "--concurrency", "1", "--classes", "json", "--requests", "1")
    (row,) = report["rows"]
    assert report["tokens_from"] == "chunks" and report["acceptance_from"] is None
    assert row["tokens"] == 1 + len(STEPS) and row["acceptance_length"] is None
    assert "counted by pieces of the stream" in out and "says nothing about drafts" in out


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("refuse", "status 429: the queue is full"),
        ("error", "the engine died"),
        ("cut", "the connection ended before the answer did"),
    ],
)
def test_errors_are_counted_and_leave_the_rest_alone(
    how: str, words: str, url: str, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    script.dialect = "vllm"
    bad = read_prompts(["qa"])["qa"][1]
    script.breaks = lambda body: how if body["messages"] == bad and body["max_tokens"] > 8 else ""
    report, _ = bench(capsys, "--url", url, "--concurrency", "2", "--classes", "qa", "--requests", "3")
    (row,) = report["rows"]
    assert (row["requests"], row["errors"], row["first_error"]) == (3, 1, words)
    assert row["tokens"] == 2 * TOKENS and no_less(row["ttft_ms"]["p50"], FIRST)


def test_a_server_that_fails_every_time_is_one_sentence(
    url: str, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    script.breaks = lambda body: "refuse"
    assert main(["bench", "serve", "--url", url]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "the queue is full" in err and len(said(err)) == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--url", "localhost:8000"], "--url is 'localhost:8000'"),
        (["--url", "http://me:secret@host"], "give the key with --api-key"),
        (["--concurrency", "1,0"], "--concurrency is '1,0'"),
        (["--concurrency", "2000"], "at most 1024 streams"),
        (["--classes", "code,poetry"], "no class 'poetry'; --classes takes any of qa, code"),
        (["--output-len", "4"], "--output-len is 4"),
        (["--requests", "-1"], "--requests is -1"),
        (["--requests", "3", "--concurrency", "1,4"], "--requests is 3, too few for 4 streams at once"),
        (["--temperature", "9"], "--temperature is 9"),
        (["--out", __file__], "which cannot be written to"),
    ],
)
def test_flags_are_checked_before_anything_is_sent(
    args: list[str], words: str, url: str, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", "--url", url, *args]) == 1
    out, err = capsys.readouterr()
    assert out == "" and words in err and len(said(err)) == 1 and not script.bodies
    assert "secret" not in err


def test_an_unreachable_server_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert main(["bench", "serve", "--url", f"http://127.0.0.1:{port}"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "cannot be reached" in err and len(said(err)) == 1


# ---- the arithmetic, exactly


def sample(began: float, first: float, last: float, tokens: int, text: str = "x") -> Sample:
    return Sample(began, first, last, tokens, tokens, False, text, ended=True)


def test_percentiles_and_sums() -> None:
    samples = [sample(0, 0.1 * k, 0.1 * k + 1, 11) for k in range(1, 6)] + [Sample(error="lost")]
    row = Load(samples, 2.0, Drafting(10, 40, 25, [10, 8, 7])).as_dict()
    assert (row["requests"], row["errors"], row["first_error"], row["tokens"]) == (6, 1, "lost", 55)
    assert row["tok_s"] == 27.5 and row["tpot_ms"]["p50"] == pytest.approx(100) == row["tpot_ms"]["p95"]
    assert row["ttft_ms"] == {"p50": pytest.approx(300), "p95": pytest.approx(480)}
    assert row["tok_s_per_request"]["p50"] == pytest.approx(11 / 1.3)
    assert row["acceptance_length"] == 3.5 and row["per_position"] == [1.0, 0.8, 0.7]


def test_nothing_answered_gives_no_figures_and_no_crash() -> None:
    row = Load([Sample(error="lost")], 1.0).as_dict()
    assert [row[name] for name in ("tok_s", "ttft_ms", "tpot_ms", "acceptance_length")] == [None] * 4
    result = Result(Settings("http://host"), "m", cells=[Cell("qa", 1, Load([Sample(error="lost")], 1.0))])
    assert "| qa | 1 | - | - | - | - | 1 |" in markdown(summary(result))


def test_a_single_token_has_no_time_per_token() -> None:
    assert Load([sample(0, 1, 1, 1)], 1.0).as_dict()["tpot_ms"] is None


def test_all_is_the_sum_of_the_classes() -> None:
    def cell(name: str, seconds: float) -> Cell:
        load = Load([sample(0, 0.5, 1, 10)], seconds, Drafting(2, 8, 4, [2, 2]))
        return Cell(name, 4, load, Load([sample(0, 0.5, 2, 10, "y")], 2 * seconds))

    result = Result(Settings("http://host", streams=(4,)), "m", source="responses", can_switch=True)
    result.cells += [cell("qa", 1.0), cell("code", 3.0)]
    total = result.with_totals()[-1].as_dict()
    assert (total["class"], total["tokens"], total["tok_s"], total["speedup"]) == ("all", 20, 5.0, 2.0)
    assert (total["acceptance_length"], total["same_text"], total["compared"]) == (3.0, 0, 2)


def test_the_histogram_and_the_counters_mean_the_same() -> None:
    from_response = read_speculation(FACTS)
    assert from_response.by_position == [10, 10, 5, 5, 0, 0, 0] and from_response.length == 4
    text = 'sparkdraft_spec_decode_num_drafts 3\nvllm:spec_decode_num_drafts_total{model="a b"} 4.0 1700\n'
    text += 'x_spec_decode_num_drafts 9\nvllm:spec_decode_num_accepted_tokens_per_pos{position="1"} 2\n'
    assert read_counters(text) == Drafting(7, 0, 0, [0, 2])
    assert read_counters("# HELP vllm:spec_decode_num_drafts none\nvllm:other 1\n") is None


def test_addresses() -> None:
    for given in ("http://host:1/v1", "http://host:1/", "http://host:1"):
        assert server_root(given) == "http://host:1"
    assert server_root("https://host/llm/v1/") == "https://host/llm"
    with pytest.raises(UserError):
        server_root("ftp://host")


def test_the_prompts() -> None:
    prompts = read_prompts()
    assert list(prompts) == CLASSES and min(map(len, prompts.values())) >= 8
    every = [json.dumps(each) for name in CLASSES for each in prompts[name]]
    assert len(set(every)) == len(every)
    assert all(each[-1]["role"] == "user" for name in CLASSES for each in prompts[name])
    assert all(len(each) == 3 for each in prompts["dialogue"]) and list(read_prompts(["json"])) == ["json"]


def test_a_key_is_never_shown(url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKDRAFT_API_KEY", "very-secret")
    _, out = bench(capsys, "--url", url, "--concurrency", "1", "--classes", "qa", "--requests", "1")
    assert "very-secret" not in out and "very-secret" not in repr(Settings(url, "very-secret"))


def test_no_torch_is_loaded(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = builtins.__import__

    def guarded(name: str, *args: Any, **kwargs: Any) -> Any:
        assert name.split(".")[0] != "torch", "bench serve must not load torch"
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", guarded)
    bench(capsys, "--url", url, "--concurrency", "1", "--classes", "qa", "--requests", "1")
