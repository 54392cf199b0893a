"""No request, however large, slow or odd, keeps the API from others: sizes before work, work outside the event loop.

Nothing here is timed: a tokenizer that blocks until the test lets it go shows what still moves meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from sparkdraft.core import SamplingParams, UserError
from sparkdraft.server import guards
from sparkdraft.server.config import ServerConfig
from sparkdraft.server.engine_client import EngineClient
from sparkdraft.server.guards import Gate, accepted_hosts
from sparkdraft.server.protocol.shapes import finite
from sparkdraft.server.protocol.validation import ApiError
from sparkdraft.server.service import TEXT_THREADS
from sparkdraft.text import template as templates
from sparkdraft.text.control import ChatText
from sparkdraft.text.tokenizer import Tokenizer
from tests.models.tiny import byte_tokenizer
from tests.patience import PATIENT
from tests.server.conftest import FakeClient, Live, live

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def small() -> Iterator[Live]:
    with live(FakeClient(lambda prompt, params: "ok"), max_body=4000, max_queue=0) as running:
        yield running


def post(server: Live, path: str, raw: bytes) -> Any:
    answer = server.http.post(path, content=raw, headers=JSON)
    return answer.status_code, answer.json()


def connect(server: Live) -> socket.socket:
    return socket.create_connection((server.http.base_url.host, server.http.base_url.port or 0), 30)


# ---- the event loop goes on


class Slow:
    """A tokenizer that does not return before it is let go."""

    def __init__(self, right: Tokenizer) -> None:
        self.right, self.go, self.inside = right, threading.Event(), threading.Semaphore(0)
        self.texts: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.right, name)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        self.texts.append(text)
        self.inside.release()
        assert self.go.wait(PATIENT)
        return self.right.encode(text, add_special)

    def encode_chat(self, chat: ChatText) -> list[int]:
        return self.encode(chat.text, add_special=False)

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        self.inside.release()
        assert self.go.wait(PATIENT)
        return self.right.decode(ids, skip_special)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x"}]}),
        (COMPLETIONS, {"prompt": "x"}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [5, 6]}),
    ],
)
def test_others_are_answered_while_a_text_is_tokenised(path: str, body: dict[str, Any]) -> None:
    with live(FakeClient(lambda prompt, params: "ok")) as server:
        text = server.service.text
        assert text is not None
        slow = Slow(text.tokenizer)
        text.tokenizer = slow  # type: ignore[assignment]
        answers: list[int] = []
        asking = threading.Thread(target=lambda: answers.append(server.post(path, **body).status_code))
        asking.start()
        assert slow.inside.acquire(timeout=PATIENT)
        for _ in range(20):
            assert server.http.get("/health").status_code == 200
        assert not answers, "the slow request was answered before it was let go"
        slow.go.set()
        asking.join()
        assert answers == [200]


def test_few_texts_are_tokenised_at_once() -> None:
    with live(FakeClient(lambda prompt, params: "ok")) as server:
        text = server.service.text
        assert text is not None
        slow = Slow(text.tokenizer)
        text.tokenizer = slow  # type: ignore[assignment]
        answers: list[int] = []
        ask = lambda: answers.append(server.post("/tokenize", prompt="x").status_code)  # noqa: E731
        threads = [threading.Thread(target=ask) for _ in range(TEXT_THREADS + 3)]
        for thread in threads:
            thread.start()
        for _ in range(TEXT_THREADS):
            assert slow.inside.acquire(timeout=PATIENT)
        server.wait_for(lambda: server.service.gate.num_inside == TEXT_THREADS + 3)
        assert len(slow.texts) == TEXT_THREADS
        slow.go.set()
        for thread in threads:
            thread.join()
        assert answers == [200] * (TEXT_THREADS + 3)


LOOPS = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"


def test_others_are_answered_while_a_chat_template_loops() -> None:
    template = "{% if messages[0].content == 'loop' %}" + LOOPS + "{% endif %}{{ messages[0].content }}"
    with live(FakeClient(lambda prompt, params: "ok", template=template)) as server:
        answers: list[Any] = []
        ask = lambda: answers.append(server.chat("loop"))  # noqa: E731
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(templates, "SECONDS", 1000.0)
            threads = [threading.Thread(target=ask) for _ in range(TEXT_THREADS + 2)]
            for thread in threads:
                thread.start()
            server.wait_for(lambda: server.service.gate.num_inside == len(threads))
            assert server.post(COMPLETIONS, prompt="x").status_code == 200
            assert server.http.get("/health").status_code == 200
            assert not answers, "no chat can be answered yet"
            while any(thread.is_alive() for thread in threads):
                if templates._worker:
                    templates._worker.process.kill()
                threads[0].join(0.01)
        assert {answer.status_code for answer in answers} == {400}
        assert "ends the process that it runs in (signal 9)" in answers[0].json()["error"]["message"]
        assert server.chat("Hi").status_code == 200


def test_a_chat_template_that_loops_on_every_chat_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "SECONDS", 0.1)
    with live(FakeClient(lambda prompt, params: "ok", template=LOOPS)) as server:
        monkeypatch.setattr(templates, "SECONDS", 1000.0)  # it does not run again
        answer = server.chat("Hi")
        assert answer.status_code == 400
        assert "takes more than 0.1 s of CPU time for a greeting: correct it" in answer.json()["error"]["message"]
        assert server.post(COMPLETIONS, prompt="x").status_code == 200


@pytest.mark.parametrize("is_chat", [False, True])
def test_encoding_lets_other_threads_run(is_chat: bool) -> None:
    """Python threads take turns only where one of them lets go of the interpreter's lock, so this one goes on before
    the encoding has ended only if the library let go of it. A busy machine may not give it a core so soon, once."""
    tokenizer, text = Tokenizer(byte_tokenizer()), "ab" * 500_000

    def goes_on() -> bool:
        began, ended = threading.Event(), []

        def encode() -> None:
            began.set()
            ended.append(tokenizer.encode_chat(ChatText(text, (0,))) if is_chat else tokenizer.encode(text))

        thread = threading.Thread(target=encode)
        thread.start()
        began.wait()
        is_first = not ended
        thread.join()
        return is_first

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        assert any(goes_on() for _ in range(20))
    finally:
        sys.setswitchinterval(usual)


# ---- texts that cannot fit


def test_a_text_that_can_not_fit_is_not_tokenised() -> None:
    with live(FakeClient(lambda prompt, params: "ok")) as server:
        text = server.service.text
        assert text is not None
        slow = Slow(text.tokenizer)
        text.tokenizer = slow  # type: ignore[assignment]
        slow.control = None  # nor does anything look for control tokens in it  # type: ignore[attr-defined]
        longest = max(map(len, byte_tokenizer().get_vocab()))
        parts = [{"type": "text", "text": text} for text in ("<" * 256 * longest, "<")]
        half = {"role": "user", "content": parts}
        for path, body in (
            (COMPLETIONS, {"prompt": "x" * (512 * longest + 1)}),
            (CHAT, {"messages": [{"role": "user", "content": "x" * (512 * longest + 1)}]}),
            (CHAT, {"messages": [half, half]}),
            ("/tokenize", {"messages": [half, half]}),
            ("/tokenize", {"prompt": "x" * (512 * longest + 1)}),
        ):
            error = server.post(path, **body).json()["error"]
            assert error["code"] == "context_length_exceeded" and "characters" in error["message"]
        assert slow.texts == []


def test_of_a_long_text_only_the_opening_is_tokenised() -> None:
    client = FakeClient(lambda prompt, params: "ok")
    assert client.info is not None
    client.raw.add_tokens(["x" * 100])  # now a text of 100 characters a token may fit
    client.info = replace(client.info, tokenizer=client.raw.to_str())
    with live(client) as server:
        text = server.service.text
        assert text is not None
        slow = Slow(text.tokenizer)
        slow.go.set()
        text.tokenizer = slow  # type: ignore[assignment]
        error = server.post(COMPLETIONS, prompt="y" * 40_000).json()["error"]
        assert error["code"] == "context_length_exceeded" and "more than 1024 tokens" in error["message"]
        assert [len(seen) for seen in slow.texts] == [512 * 8]
        assert server.post(COMPLETIONS, prompt="x" * 40_000).status_code == 200  # 400 tokens
        assert [len(seen) for seen in slow.texts] == [512 * 8, 512 * 8, 40_000]


def test_more_ids_than_the_context_holds_are_not_decoded(small: Live) -> None:
    error = small.post("/detokenize", tokens=[5] * 513).json()["error"]
    assert error["param"] == "tokens" and "513 tokens" in error["message"]


# ---- bodies


def test_a_body_that_declares_too_much_is_refused_before_it_is_sent(small: Live) -> None:
    with connect(small) as raw:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        raw.sendall(head.encode() + b"Content-Length: 4001\r\n\r\n")
        assert b" 413 " in raw.recv(4000)


def test_an_endless_body_in_chunks_is_refused_as_soon_as_it_is_too_large(small: Live) -> None:
    """The client never ends its body, and still gets the answer."""
    with connect(small) as raw:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        raw.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(5):
            raw.sendall(b"3e8\r\n" + b" " * 1000 + b"\r\n")
        answer = raw.recv(4000)
        while b"}}" not in answer:
            answer += raw.recv(4000)
        assert b" 413 " in answer and b"4,000 bytes" in answer


@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_it_all_first_can_read_the_answer(small: Live, chunked: bool) -> None:
    """8,000 times the limit, and the connection is not reset: the rest is read and dropped."""
    pieces = [b" " * 1_000_000] * 32
    content: Any = iter(pieces) if chunked else b"".join(pieces)
    answer = small.http.post(CHAT, content=content, headers=JSON)
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"
    assert answer.headers["connection"] == "close" and small.chat().status_code == 200


def test_a_wrong_key_is_told_although_the_body_is_long() -> None:
    with live(FakeClient(lambda prompt, params: "ok"), api_key="right") as server:
        answer = server.http.post(CHAT, content=b" " * 30_000_000, headers={"Authorization": "Bearer wrong"})
        assert answer.status_code == 401


def test_bodies_of_too_many_values_are_not_parsed(echo: Live) -> None:
    for raw in (b"[" * 1_100_000, b'{"prompt": [' + b"[1]," * 600_000 + b"[1]]}", b"[" + b"1," * 1_100_000 + b"1]"):
        status, body = post(echo, COMPLETIONS, raw)
        assert status == 413 and "1,048,576 commas" in body["error"]["message"]
    assert post(echo, "/detokenize", b'{"tokens": [' + b"1," * 250_000 + b"1]}")[0] == 400


def test_256_prompts_of_2000_ids_are_read(echo: Live) -> None:
    """They do not fit into this model, and the refusal comes after they were read."""
    error = echo.post(COMPLETIONS, prompt=[[10] * 2000] * 256).json()["error"]
    assert error["code"] == "context_length_exceeded"


def test_of_many_mistakes_in_a_list_one_is_told(echo: Live) -> None:
    for path, raw in (
        (CHAT, b'{"messages": [{"role": "user", "content": [' + b"[]," * 100_000 + b"1]}]}"),
        (CHAT, b'{"messages": [' + b"[]," * 1999 + b"1]}"),
        (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "tools": [' + b"[]," * 100 + b"1]}"),
        (COMPLETIONS, b'{"prompt": [' + b'1,"x",' * 100_000 + b"1]}"),
    ):
        status, body = post(echo, path, raw)
        assert status == 400 and len(body["error"]["message"]) < 600


def test_a_body_that_stalls_is_given_up(small: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "BODY_SECONDS", 0.05)
    monkeypatch.setattr(guards, "LINGER_SECONDS", 0.05)
    with connect(small) as raw:
        raw.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nabc".encode())
        answer = b"".join(iter(lambda: raw.recv(4000), b""))  # to the end: it is closed
        assert b" 408 " in answer and b"The body stopped or is too slow: 3 bytes came" in answer


def test_a_body_that_drips_is_cut(small: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "BODY_SECONDS", 0.3)
    monkeypatch.setattr(guards, "LINGER_SECONDS", 0.05)
    with connect(small) as raw:
        raw.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3000\r\n\r\n".encode())
        raw.settimeout(0.02)
        answer, deadline = b"", time.monotonic() + 240
        while b"too slow" not in answer:  # a byte every 20 ms, so that no pause is long
            assert time.monotonic() < deadline
            raw.sendall(b"x")
            with suppress(TimeoutError):
                answer += raw.recv(4000)
        assert b" 408 " in answer


# ---- heads


GET, POST = "GET /health HTTP/1.1\r\nHost: localhost\r\n", f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n"
TWO_LENGTHS = "Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n"


@pytest.mark.parametrize(
    ("head", "status", "words"),
    [
        (GET.replace("1.1", "9.9"), 400, "HTTP/9.9 is not supported"),
        (GET + "a: b\r\n" * 5000, 431, "5,001 headers; send at most 100"),
        (POST + TWO_LENGTHS, 400, "both Transfer-Encoding and Content-Length"),
    ],
    ids=["version", "headers", "lengths"],
)
def test_heads_that_are_refused(small: Live, head: str, status: int, words: str) -> None:
    with connect(small) as raw:
        raw.sendall(f"{head}\r\n".encode())
        answer = b"".join(iter(lambda: raw.recv(4000), b"")).decode()  # to the end: it is closed
    assert answer.startswith(f"HTTP/1.1 {status} ") and words in answer and answer.count("HTTP/1.1 ") == 1


# ---- headers


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: local"])
def test_headers_that_never_end_close_the_connection(small: Live, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(guards, "HEADER_SECONDS", 0.05)
    with connect(small) as raw:
        raw.sendall(sent)
        assert raw.recv(100) == b""


def test_the_next_headers_of_a_connection_must_end_too(small: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    with connect(small) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while b"}" not in answer:
            answer += raw.recv(4000)
        monkeypatch.setattr(guards, "HEADER_SECONDS", 0.05)
        raw.sendall(b"GET /health HTTP/1.1\r\n")
        assert raw.recv(100) == b""


def test_an_answer_may_take_longer_than_its_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    with live(FakeClient(lambda prompt, params: "x" * 30, delay=0.02)) as server:
        server.chat()  # over a connection that is kept: a new one would have to send its headers in the time below
        monkeypatch.setattr(guards, "HEADER_SECONDS", 0.05)
        assert server.chat().json()["choices"][0]["message"]["content"] == "x" * 30


@pytest.mark.parametrize(
    ("host", "options", "status"),
    [
        ("localhost:8000", {}, 200),
        ("127.0.0.1", {}, 200),
        ("[::1]:9", {}, 200),
        ("LocalHost.", {}, 200),
        ("evil.example", {}, 403),
        ("localhost.evil.example:8000", {}, 403),
        ("192.168.0.7:8000", {}, 403),
        ("box.lan:8000", {"allowed_hosts": "box.lan, other.lan"}, 200),
        ("box.lan", {"allowed_hosts": "Box.LAN.:8000"}, 200),
        ("[fd00::7]:8000", {"allowed_hosts": "[fd00::7]:8000"}, 200),
        ("[fd00::7]:8000", {"allowed_hosts": "fd00::7"}, 200),
        ("evil.example", {"allowed_hosts": "box.lan"}, 403),
        ("evil.example", {"allowed_hosts": "*"}, 200),
        ("evil.example", {"host": "0.0.0.0", "allow_public": True}, 200),
        ("evil.example", {"host": "0.0.0.0", "allow_public": True, "allowed_hosts": "box.lan"}, 403),
    ],
)
def test_hosts(host: str, options: dict[str, Any], status: int) -> None:
    with live(FakeClient(lambda prompt, params: "ok"), **options) as server:
        for path in ("/", "/v1/models"):
            answer = server.http.get(path, headers={"Host": host})
            assert answer.status_code == status
        if status == 403:
            assert "--allowed-hosts" in answer.json()["error"]["message"]


def test_a_server_beyond_this_machine_accepts_all_names_by_default() -> None:
    assert accepted_hosts(ServerConfig(host="10.0.0.5", api_key="k")) is None
    assert accepted_hosts(ServerConfig()) == frozenset()


def test_a_pattern_of_names_is_refused_at_the_start() -> None:
    with pytest.raises(UserError, match=r"allowed_hosts has '\*\.lan'; it must be whole names, or '\*' alone"):
        ServerConfig(allowed_hosts="box.lan,*.lan")


# ---- numbers


def test_the_gate_counts_what_is_right(small: Live) -> None:
    """Four fit. A wrong n is never admitted; one larger than what is free is refused, unless it is alone."""
    gate = small.service.gate
    for n in (-1, 0, 65, 10**9, 2**70):
        for path, body in ((CHAT, {"messages": [{"role": "user", "content": "x"}]}), (COMPLETIONS, {"prompt": "x"})):
            with gate.enter(4):  # if it were let in, it would be told that the queue is full
                error = small.post(path, n=n, **body).json()["error"]
            assert error["param"] == "n" and error["message"] == f"n is {n}; it must be between 1 and 64."
    assert gate.num_inside == 0
    with gate.enter(3):
        assert small.chat(n=2).status_code == 429 and small.chat(n=1).status_code == 200
    assert small.chat(n=6).status_code == 200


def test_a_gate_with_room_for_none_lets_one_in() -> None:
    gate = Gate(0)
    with gate.enter(5), pytest.raises(ApiError), gate.enter(1):
        pass
    assert gate.num_inside == 0


def test_log_probabilities_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [finite(float(x)) for x in ("nan", "-inf", "inf", "-1e30", "-0.5")] == [-9999.0, -9999.0, 0.0, -9999.0, -0.5]

    def strict(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    client = FakeClient(lambda prompt, params: "ok")
    event = FakeClient._event

    def broken(*args: Any) -> Any:
        made = event(client, *args)
        for row in made.logprobs or []:
            row.top[:] = [(5, float("nan")), (6, float("inf"))]
            object.__setattr__(row, "logprob", float("nan"))
        return made

    monkeypatch.setattr(client, "_event", broken)
    with live(client) as server:
        for answer in (
            server.chat(logprobs=True, top_logprobs=2),
            server.post(COMPLETIONS, prompt="x", logprobs=2),
        ):
            assert answer.status_code == 200 and json.loads(answer.text, parse_constant=strict)


# ---- a server that cannot start says so


def test_a_refused_tokenizer_is_told() -> None:
    client = FakeClient(lambda prompt, params: "ok")
    assert client.info is not None
    client.info = replace(client.info, tokenizer="{}")
    with live(client, until_ready=False) as server:
        server.wait_for(lambda: server.service.state == "failed")
        body = server.http.get("/health").json()
        assert body["status"] == "failed" and "tokenizer" in body["error"]
        error = server.chat().json()["error"]
        assert error["code"] == "engine_failed" and "tokenizer" in error["message"]


def test_options_that_no_command_line_can_hold() -> None:
    async def run() -> EngineClient:
        client = EngineClient({"model": "x"}, command=("no\0command",))
        await client.start()
        while client.state == "starting":
            await asyncio.sleep(0.01)
        await client.stop()
        return client

    client = asyncio.run(asyncio.wait_for(run(), PATIENT))
    assert client.last_error is not None and "null byte" in client.last_error


def test_every_sampling_number_of_a_request_is_checked_before_its_prompt_is_read() -> None:
    with live(FakeClient(lambda prompt, params: "ok")) as server:
        text = server.service.text
        assert text is not None
        slow = Slow(text.tokenizer)
        text.tokenizer = slow  # type: ignore[assignment]
        for wrong in ({"top_k": 2**63}, {"temperature": 1e300}, {"repetition_penalty": 1e-300}, {"logprobs": 2**70}):
            answer = server.post(COMPLETIONS, prompt="x", **wrong)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == next(iter(wrong))
        assert slow.texts == []
        assert SamplingParams(seed=2**200).seed == 2**200
