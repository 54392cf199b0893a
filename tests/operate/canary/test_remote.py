"""`sparkdraft check --url` of a server that is sound, and of one with each fault that it is made to find."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sparkdraft.cli.main import main
from sparkdraft.operate.canary import remote
from tests.fakes.web import serving

COUNTED = "one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve"
CALL_TEXT = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'


class FakeServer:
    """An OpenAI-compatible server with one fault, or none."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.count = fault, 0
        self.now = 0.0  # a clock for whoever reads it, which this server alone moves
        routes = [Route("/v1/models", self.models), Route("/v1/chat/completions", self.chat, methods=["POST"])]
        self.app = Starlette(routes=routes)

    async def models(self, request: Request) -> Response:
        listed = [{"id": "big", "root": "org/big"}, {"id": "alias", "root": "org/big"}, {"id": "small", "root": "s"}]
        return JSONResponse({"data": listed})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.count += 1
        if body.get("tool_choice") == "required" and self.fault.startswith("no required"):
            return JSONResponse({"error": {"message": "tool_choice is not known"}}, 400)
        if body.get("tools") and self.fault in ("no tools", "tools crash"):
            return JSONResponse({"error": {"message": "tools need a parser"}}, 400 if self.fault == "no tools" else 500)
        if body.get("response_format") and self.fault in ("no schema", "schema crashes"):
            status = 400 if self.fault == "no schema" else 500
            return JSONResponse({"error": {"message": "response_format is not known"}}, status)
        if body.get("tool_choice") == "required" and self.fault == "required crashes":
            return JSONResponse({"error": {"message": "no grammar"}}, 500)
        return StreamingResponse(self.stream(body)) if body.get("stream") else JSONResponse(self.whole(body))

    # ---- what it says

    def message(self, body: dict[str, Any]) -> dict[str, Any]:
        """The content and the calls of an answer."""
        if self.fault.startswith("thinks"):
            return {"content": None, "reasoning_content": f"Hm {self.count}" if self.fault == "thinks anew" else "Hm "}
        if body.get("tools"):
            return self.calling(bool(body.get("stream")))
        if body.get("response_format"):
            return {"content": "Paris!" if self.fault == "schema" else '{"city": "Paris"}'}
        text = COUNTED[:: -1 if self.fault == "answers" and self.count % 3 == 0 else 1]
        return {"content": text}

    def calling(self, streamed: bool) -> dict[str, Any]:
        if self.fault in ("call as text", "no required, call as text") or (
            self.fault == "streamed call as text" and streamed
        ):
            return {"content": CALL_TEXT}
        if self.fault in ("no call", "no required, no call"):
            return {"content": "It is sunny."}
        arguments: Any = json.dumps({"city": "Paris"})
        arguments = {"arguments": arguments[:-3], "objects": {"city": "Paris"}}.get(self.fault, arguments)
        name = "other" if self.fault == "name" else "get_weather"
        call = {"id": "1", "index": 0, "type": "function", "function": {"name": name, "arguments": arguments}}
        return {"content": None, "tool_calls": [call]}

    def usage(self, body: dict[str, Any]) -> dict[str, int]:
        prompt = 5 + sum(len(message["content"].split()) for message in body["messages"])
        written = body["max_tokens"] if self.fault.startswith("thinks") else min(12, body["max_tokens"])
        if self.fault == "usage total":
            return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": written}
        if self.fault == "usage more than asked":
            written = body["max_tokens"] + 1
        if self.fault == "usage of one":
            written = 1
        if self.fault == "usage fixed":
            prompt = 7
        if self.fault == "usage differs in streams" and body.get("stream"):
            prompt += 3
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}

    def frame(self, **more: Any) -> dict[str, Any]:
        names = {"model": "small", "dated": "big-2026-11-18", "sized": "big-2026b"}
        frame: dict[str, Any] = {"model": names.get(self.fault, "big"), **more}
        if self.fault == "fingerprint":
            frame["system_fingerprint"] = f"system-{self.count % 2}"
        return frame

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.fault == "no message":
            return self.frame(choices=[None], usage=self.usage(body))
        finish = "length" if self.fault.startswith("thinks") else "stop"
        choice = {"message": self.message(body), "finish_reason": finish}
        usage = {} if self.fault == "no usage" else {"usage": self.usage(body)}
        return self.frame(choices=[choice], **usage)

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        message = self.message(body)
        parts = [{"content": word} for word in (message["content"] or "").split(" ")]
        if calls := message.get("tool_calls"):
            parts = [{"tool_calls": calls}]
        counted = not body.get("tools")
        if self.fault == "one piece" and counted:
            parts = [{"content": message["content"]}]
        if self.fault == "buffered":
            self.now += 60.0
            yield "".join(self.event(choices=[{"delta": part}]) for part in parts)
            parts = []
        for i, part in enumerate(parts):
            if i == 6 and counted and self.fault == "stall":
                await asyncio.sleep(2)
            if i == 6 and counted and self.fault == "hang":
                await asyncio.sleep(60)
            if i == 6 and counted and self.fault == "broken":
                raise RuntimeError("the connection is lost")
            if i == 6 and counted and self.fault == "error in a stream":
                yield 'data: {"error": {"message": "EngineDeadError", "code": 500}}\n\n'
                break
            yield self.event(choices=[{"delta": part}])
            await asyncio.sleep(0.002)
        if self.fault != "no finish":
            yield self.event(choices=[{"delta": {}, "finish_reason": "stop"}])
        if (body.get("stream_options") or {}).get("include_usage"):
            yield self.event(choices=[], usage=self.usage(body))
        if self.fault != "no end":
            yield "data: [DONE]\n\n"

    def event(self, **more: Any) -> str:
        return f"data: {json.dumps(self.frame(**more))}\n\n"


class Checked:
    """Runs the command against the fake server with a fault."""

    def __init__(self, server: FakeServer, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.server, self.url, self.capsys = server, url, capsys

    def __call__(self, fault: str, *flags: str) -> tuple[int, dict[str, dict[str, Any]], str]:
        """The exit status, the findings by probe, and what was printed."""
        self.server.fault, self.server.count = fault, 0
        status = main(["check", "--url", self.url, "--json", *flags])
        printed = self.capsys.readouterr().out
        report = json.loads(printed.splitlines()[-1])
        assert report["ok"] == (status == 0)
        return status, {finding["probe"]: finding for finding in report["findings"]}, printed


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeServer, str]]:
    server = FakeServer()
    with serving(server.app) as url:
        yield server, url


@pytest.fixture
def check(served: tuple[FakeServer, str], capsys: pytest.CaptureFixture[str]) -> Checked:
    return Checked(*served, capsys)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine stalls a sound stream."""
    monkeypatch.setattr(remote, "STALL", 60.0)


def test_a_sound_server_passes(check: Checked) -> None:
    status, found, printed = check("")
    assert status == 0 and {finding["status"] for finding in found.values()} == {"passed"}, printed
    assert "6 passed, 0 failed, 0 skipped" in printed


CALL, SAME, STREAM, USAGE = (
    "tool call is a call",
    "answers repeat at temperature 0",
    "stream flows",
    "usage adds up",
)
FAULTS = [
    ("model", "the model that was asked answers", "'big' was asked and 'small' answered"),
    ("sized", "the model that was asked answers", "'big' was asked and 'big-2026b' answered"),
    ("answers", SAME, "two answers part after 0 characters"),
    ("fingerprint", SAME, "answered by different systems"),
    ("call as text", CALL, "came back as text"),
    ("streamed call as text", CALL, "came back as text"),
    ("no required, call as text", CALL, "came back as text"),
    ("no call", CALL, "no call came although one was required"),
    ("tools crash", CALL, "status 500"),
    ("required crashes", CALL, "status 500"),
    ("name", CALL, "the call names 'other'"),
    ("arguments", CALL, "must be a JSON object"),
    ("objects", CALL, "must be a JSON object"),
    ("schema", "JSON schema holds", "is not JSON"),
    ("schema crashes", "JSON schema holds", "a request was not answered: status 500"),
    ("error in a stream", STREAM, "broke off after 6 chunks: the server sent an error: EngineDeadError"),
    ("stall", STREAM, "stalled for"),
    ("hang", STREAM, "nothing came for 2 s"),
    ("broken", STREAM, "broke off after 6 chunks"),
    ("one piece", STREAM, "came in one piece"),
    ("buffered", STREAM, "chunks came at once after"),
    ("no finish", STREAM, "without a finish_reason"),
    ("no end", STREAM, "without data: [DONE]"),
    ("usage total", USAGE, "in total"),
    ("usage more than asked", USAGE, "at most 48 were asked for"),
    ("usage of one", USAGE, "characters counts as 1 tokens"),
    ("usage fixed", USAGE, "count as 7, 7 and 7"),
    ("usage differs in streams", USAGE, "streamed"),
    ("no usage", USAGE, "does not have the three counts"),
]


@pytest.mark.parametrize(("fault", "probe", "said"), FAULTS, ids=[fault for fault, _, _ in FAULTS])
def test_each_fault_is_found(
    fault: str, probe: str, said: str, check: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "stall":
        monkeypatch.setattr(remote, "STALL", 0.3)
        monkeypatch.setattr(remote, "SLOWER", 2)
    if fault == "buffered":
        monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: check.server.now))
    status, found, printed = check(fault, *(["--timeout", "2"] if fault == "hang" else []))
    assert status == 1 and found[probe]["status"] == "failed" and said in found[probe]["detail"], printed
    others = {name for name, each in found.items() if name != probe and each["status"] == "failed"}
    assert not others or (fault, others) == ("answers", {USAGE}), printed


@pytest.mark.parametrize(
    ("fault", "probe", "said"),
    [
        ("no required, no call", CALL, "the model did not call: 'It is sunny.'"),
        ("no tools", CALL, "the server takes no tools: status 400"),
        ("no schema", "JSON schema holds", "the server takes no JSON schema: status 400"),
    ],
)
def test_what_a_server_does_not_offer_is_no_fault(fault: str, probe: str, said: str, check: Checked) -> None:
    status, found, printed = check(fault)
    assert status == 0 and found[probe]["status"] == "skipped" and said in found[probe]["detail"], printed


def test_a_model_that_thinks_past_the_limit_is_no_fault(check: Checked) -> None:
    status, found, printed = check("thinks")
    assert status == 0 and found[SAME]["status"] == "passed", printed
    for probe in (CALL, "JSON schema holds"):
        assert found[probe]["status"] == "skipped" and "thinks longer" in found[probe]["detail"], printed
    status, found, printed = check("thinks anew")
    assert status == 1 and "part after 3 characters" in found[SAME]["detail"], "thoughts are compared too"


def test_an_answer_that_cannot_be_read_is_a_fault_and_no_traceback(check: Checked) -> None:
    status, found, printed = check("no message")
    assert status == 1 and "an answer cannot be read" in found[SAME]["detail"], printed


def test_a_dated_version_of_the_model_is_no_other_model(check: Checked) -> None:
    status, found, printed = check("dated")
    detail = found["the model that was asked answers"]["detail"]
    assert status == 0 and "'big' answers as 'big-2026-11-18'" in detail, printed


def test_an_alias_of_the_model_is_no_other_model(check: Checked) -> None:
    status, found, printed = check("", "--model", "alias")
    assert status == 0 and "'alias' answers" in found["the model that was asked answers"]["detail"], printed


@pytest.mark.parametrize(
    ("url", "said"), [("http://127.0.0.1:9", "does not list its models"), ("localhost", "must be an address")]
)
def test_no_server_is_one_sentence(url: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--url", url]) == 1
    assert said in capsys.readouterr().err
