"""The line in the log of each request, and the request's id: what is in them, and what must never be."""

from __future__ import annotations

import json
import re
import shlex
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from sparkdraft.core import UserError
from sparkdraft.server import request_log
from sparkdraft.server.config import ServerConfig
from sparkdraft.server.engine_client import EngineError
from tests.patience import PATIENT, wait_for
from tests.server.conftest import FakeClient, Live, live
from tests.server.test_serve import started

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "my secret question"}]
SAID = "a secret answer of some length"
LOGGER = "sparkdraft.server.request_log"


def saying(prompt: str, params: Any) -> str:
    return SAID


def as_fields(line: str) -> dict[str, str]:
    assert line.startswith("request ") and "\n" not in line
    return dict(word.split("=", 1) for word in shlex.split(line.removeprefix("request ")))


def written(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


def next_line(caplog: pytest.LogCaptureFixture, count: int = 1) -> dict[str, str]:
    """The fields of the last line, once there are so many; a line comes after the answer's last byte."""
    wait_for(lambda: len(written(caplog)) >= count, lambda: written(caplog))
    assert len(written(caplog)) == count
    return as_fields(written(caplog)[-1])


# ---- the line


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_has_one_line_with_its_counts_and_times(caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    with live(FakeClient(saying, delay=0.01)) as server:
        answer = server.post(CHAT, messages=USER, stream=stream)
        fields = next_line(caplog)
    num_prompt, num_output = len("user: my secret question\nassistant:"), len(SAID) + 1
    assert fields["id"] == answer.headers["x-request-id"]
    assert (fields["method"], fields["route"], fields["status"]) == ("POST", CHAT, "200")
    assert (fields["prompt_tokens"], fields["cached_tokens"]) == (str(num_prompt), "1")
    assert (fields["output_tokens"], fields["finish"]) == (str(num_output), "stop")
    assert (fields["drafted"], fields["accepted"]) == ("4", "2")
    assert 10 <= float(fields["first_token_ms"]) < 1000 * float(fields["seconds"])
    speed, most = float(fields["tokens_per_second"]), (num_output - 1) / 0.09  # nine pauses of 10 ms follow the first
    assert num_output / 2 / float(fields["seconds"]) < speed <= most
    assert "key" not in fields and "error" not in fields and "secret" not in " ".join(written(caplog))


def test_several_texts_are_counted_together(caplog: pytest.LogCaptureFixture) -> None:
    with live(FakeClient(saying)) as server:
        server.post(COMPLETIONS, prompt=["abc", "defg"], n=2)
        fields = next_line(caplog)
    assert (fields["prompt_tokens"], fields["output_tokens"]) == ("7", str(4 * (len(SAID) + 1)))
    assert (fields["drafted"], fields["accepted"], fields["cached_tokens"]) == ("16", "8", "2")


def test_a_line_costs_nothing_per_token(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stream of 3000 outputs nothing is put into words but once."""
    calls = []
    for name in ("fields_of", "as_text"):
        real = getattr(request_log, name)
        monkeypatch.setattr(request_log, name, lambda *given, real=real: calls.append(real) or real(*given))
    with live(FakeClient(lambda prompt, params: "x" * 3000, size=1)) as server:
        server.events(CHAT, messages=USER)
        next_line(caplog)
    assert len(calls) == 2


def test_other_routes_have_a_line_and_the_pages_of_machines_have_none(caplog: pytest.LogCaptureFixture) -> None:
    with live(FakeClient(saying)) as server:
        for path in ("/health", "/metrics", "/"):
            assert server.http.get(path).status_code == 200
        server.http.head("/health")
        assert server.post("/tokenize", prompt="secret").status_code == 200
        fields = next_line(caplog)
        assert (fields["route"], fields["status"]) == ("/tokenize", "200") and "prompt_tokens" not in fields
        server.http.get("/v1/models")
        assert next_line(caplog, 2)["route"] == "/v1/models"


def test_refused_requests_have_a_line_without_what_they_sent(caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient(saying)
    with live(client, api_key="sesame", max_queue=0) as server, httpx.Client(timeout=PATIENT) as anyone:
        server.post(CHAT, messages=USER, temperature="secret")
        fields = next_line(caplog)
        assert (fields["status"], fields["error"], fields["param"]) == ("400", "invalid_request_error", "temperature")
        assert (fields["finish"], fields["key"]) == ("error", "--api-key")
        wrong = {"Authorization": "Bearer secret"}
        assert anyone.post(server.url + CHAT, json={"messages": USER}, headers=wrong).status_code == 401
        fields = next_line(caplog, 2)
        assert (fields["status"], fields["error"]) == ("401", "invalid_api_key") and "key" not in fields
        client.go_on.clear()
        waiting = threading.Thread(target=lambda: server.chat(n=4))
        waiting.start()
        server.wait_for(lambda: server.service.gate.num_inside == 4)
        assert server.chat().status_code == 429
        fields = next_line(caplog, 3)
        assert (fields["status"], fields["error"]) == ("429", "queue_full")
        client.go_on.set()
        waiting.join()
        next_line(caplog, 4)
        server.http.post(CHAT, content=b'{"messages": "a secret', headers={"Content-Type": "application/json"})
        assert next_line(caplog, 5)["error"] == "invalid_json"
        server.http.get("/none/of/these?secret=1")
        assert next_line(caplog, 6)["status"] == "404"
    assert "secret" not in " ".join(written(caplog)) and "sesame" not in " ".join(written(caplog))


def test_a_path_can_not_write_a_line_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    with live(FakeClient(saying)) as server:
        server.http.get("/x%0Arequest%20id=1%20status=200%22" + "y" * 500)
        fields = next_line(caplog)
    assert fields["status"] == "404" and 'route="/x\\nrequest id=1 status=200\\"yy' in written(caplog)[0]
    assert len(written(caplog)[0]) < 400


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_has_a_line(caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    client = FakeClient(lambda prompt, params: "x" * 3000, delay=0.01)
    with live(client) as server:
        hang_up(server, json.dumps({"messages": USER, "stream": stream}).encode(), client, stream)
        fields = next_line(caplog)
    assert (fields["finish"], fields["status"]) == ("abort", "200" if stream else "499")
    assert fields["prompt_tokens"] == "35" and 0 <= int(fields["output_tokens"]) < 3000


def hang_up(server: Live, body: bytes, client: FakeClient, stream: bool) -> None:
    with socket.create_connection((server.http.base_url.host, server.http.base_url.port or 0)) as raw:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        raw.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        server.wait_for(lambda: client.seen)
        if stream:
            assert raw.recv(100).startswith(b"HTTP/1.1 200")


def test_an_error_within_a_stream_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Dying(FakeClient):
        async def _events(self, *args: Any) -> Any:
            async for events in super()._events(*args):
                if events[-1].finish:
                    raise EngineError("the engine stopped", True)
                yield events

    with live(Dying(saying)) as server:
        server.post(CHAT, messages=USER, stream=True)
        fields = next_line(caplog)
    assert (fields["status"], fields["finish"], fields["error"]) == ("200", "error", "engine_unavailable")
    assert int(fields["output_tokens"]) == len(SAID) - 3, "what came before the error"


def test_the_documentation_names_every_field(capfd: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/operations.md").read_text(encoding="utf-8")
    rows = [line for line in page.split("## Keys")[0].splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    with live(FakeClient(saying), request_log="json", log_prompts=9, api_key="k") as server:
        server.chat()
        server.chat(temperature=-1)
    found = {name for line in capfd.readouterr().err.splitlines() for name in json.loads(line)}
    assert found == documented | {"time", "event"}


# ---- its forms


def by_id(capfd: pytest.CaptureFixture[str], *first: str) -> list[dict[str, Any]]:
    """The lines, those of these ids first: a line may come after that of a request that was sent later."""
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    return sorted(lines, key=lambda line: first.index(line["id"]) if line["id"] in first else len(first))


def test_json_is_one_object_per_line_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    with live(FakeClient(saying), request_log="json") as server:
        answer = server.chat("\u2028 hello")
        server.http.get("/v1/models")
    first, second = by_id(capfd, answer.headers["x-request-id"])
    assert first["id"] == answer.headers["x-request-id"] and first["event"] == "request"
    assert (first["status"], first["output_tokens"], first["finish"]) == (200, len(SAID) + 1, "stop")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", first["time"])
    assert second["route"] == "/v1/models"


def test_off_is_silent_and_answers_have_their_ids(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with live(FakeClient(saying), request_log="off") as server:
        assert server.chat().headers["x-request-id"]
    assert not written(caplog) and not capfd.readouterr().err


def test_texts_are_logged_if_they_are_asked_for_and_cut(capfd: pytest.CaptureFixture[str]) -> None:
    with live(FakeClient(saying), request_log="json", log_prompts=12) as server:
        for number, (path, body) in enumerate(
            [
                (CHAT, {"messages": USER}),
                (COMPLETIONS, {"prompt": ["h\u20acllo", "no"], "n": 2}),
                (CHAT, {"messages": USER, "stream": True}),
            ],
            1,
        ):
            server.http.post(path, json=body, headers={"X-Request-Id": str(number)})
    first, second, third = by_id(capfd, "1", "2", "3")
    assert (first["prompt"], first["answer"]) == ("\nassistant:"[-12:].rjust(12, "n"), SAID[:12])
    assert (second["prompt"], second["answer"]) == ("h\u20acllo", SAID[:12]), "of the first prompt and its first text"
    assert third["answer"] == SAID[:12]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"request_log": "xml"}, "request_log is 'xml'; it must be one of off, text, json"),
        ({"log_prompts": -1}, "log_prompts is -1; it must be between 0"),
        ({"request_log": "off", "log_prompts": 5}, "request_log is off; set that to text or json"),
    ],
)
def test_wrong_settings(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        ServerConfig(**options)


def test_the_command_logs_requests_and_not_its_own(tiny_folder: Path) -> None:
    """On its standard error, once per request: neither uvicorn's lines nor those of warm-up requests are there."""
    with started("--model", str(tiny_folder), "--device", "cpu", "--no-canary") as server:
        url = server.wait_for(r"chat +(http://127\.0\.0\.1:\d+)/").group(1)
        server.wait_for("ready after")
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
        httpx.post(url + CHAT, json=body, headers={"X-Request-Id": "mine"}, timeout=PATIENT)
        server.wait_for(r"\d INFO request id=mine method=POST route=/v1/chat/completions status=200 .* finish=length")
        assert len([line for line in server.lines if "/v1/" in line and "API" not in line]) == 1, server.lines


# ---- ids


def test_an_id_of_the_client_is_echoed_and_a_wrong_one_is_not(echo: Live, caplog: pytest.LogCaptureFixture) -> None:
    for given in ("a", "trace-1:2.3_4", "x" * 128):
        answer = echo.http.get("/v1/models", headers={"X-Request-Id": given})
        assert answer.headers["x-request-id"] == answer.headers["request-id"] == given
    for given in ("", "x" * 129, "a b", 'a"b', "\u00e9"):
        answer = echo.http.get("/v1/models", headers={"X-Request-Id": given.encode()})
        assert re.fullmatch("req_[0-9a-f]{32}", answer.headers["x-request-id"])
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
    wait_for(lambda: len(written(caplog)) == 8)
    assert {"a", "trace-1:2.3_4"} < {as_fields(line)["id"] for line in written(caplog)}


def test_every_answer_has_an_id_of_its_own(tmp_path: Path) -> None:
    with live(FakeClient(saying), api_key="k", max_body=2000) as server, httpx.Client(timeout=PATIENT) as anyone:
        answers = [
            server.chat(),
            server.post(CHAT, messages=USER, stream=True),
            server.chat(n=0),
            server.chat("x" * 3000),
            server.http.get("/none"),
            server.http.get(CHAT),
            server.http.get("/health", headers={"Host": "elsewhere.example"}),
            server.http.get("/health"),
            server.http.get("/"),
            anyone.get(server.url + "/metrics"),
        ]
    assert [answer.status_code for answer in answers] == [200, 200, 400, 413, 404, 405, 403, 200, 200, 401]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == len(ids) and [answer.headers["request-id"] for answer in answers] == ids
    assert all(len(answer.headers.get_list("x-request-id")) == 1 for answer in answers)


def test_openais_client_finds_the_id(echo: Live) -> None:
    found = echo.openai.chat.completions.create(model="smollm2", messages=USER, extra_headers={"X-Request-Id": "mine"})  # type: ignore[arg-type]
    assert found._request_id == "mine"
