"""Pages of other origins: what is allowed to those that are listed, that preflights need no key, and that nothing is
allowed unless somebody asked for it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from sparkdraft.core import UserError
from sparkdraft.server.config import ServerConfig
from tests.patience import PATIENT
from tests.server.conftest import FakeClient, Live, live

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hello"}]}
GOOD, OTHER, BAD = "https://a.example", "http://localhost:3000", "https://evil.example"
ALLOWED = "access-control-allow-origin"


@pytest.fixture(scope="module")
def listed() -> Iterator[Live]:
    client = FakeClient(lambda prompt, params: "ok")
    with live(client, api_key="sesame", cors_origins=f" {GOOD}:443, {OTHER.upper()}") as running:
        yield running


def preflight(server: Live, origin: str, **headers: str) -> httpx.Response:
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    asked |= {"Access-Control-Request-Headers": "authorization,content-type,x-stainless-os"}
    with httpx.Client(timeout=PATIENT) as anyone:  # a browser sends no key with it
        return anyone.options(server.url + CHAT, headers=asked | headers)


@pytest.mark.parametrize("origin", [GOOD, OTHER])
def test_a_preflight_needs_no_key(listed: Live, origin: str) -> None:
    answer = preflight(listed, origin)
    assert answer.status_code == 200 and answer.headers[ALLOWED] == origin
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in answer.headers, "cookies are not for this server"
    assert answer.headers["x-request-id"]


def test_a_page_of_the_internet_may_ask_for_a_private_address(listed: Live) -> None:
    answer = preflight(listed, GOOD, **{"Access-Control-Request-Private-Network": "true"})
    assert answer.status_code == 200 and answer.headers["access-control-allow-private-network"] == "true"


@pytest.mark.parametrize("origin", [BAD, "http://a.example", "https://a.example.evil.example", "null"])
def test_other_origins_are_refused(listed: Live, origin: str) -> None:
    answer = preflight(listed, origin)
    assert answer.status_code == 400 and ALLOWED not in answer.headers
    answer = listed.http.post(CHAT, json=BODY, headers={"Origin": origin})
    assert answer.status_code == 200 and ALLOWED not in answer.headers, "the browser keeps it from the page"


def test_answers_and_errors_can_be_read(listed: Live) -> None:
    wrong = {"Origin": GOOD, "Authorization": "Bearer wrong"}
    for headers, path, status in (
        ({"Origin": GOOD}, CHAT, 200),
        ({"Origin": GOOD}, "/v1/none", 404),
        (wrong, CHAT, 401),
    ):
        answer = listed.http.post(path, json=BODY, headers=headers)
        assert answer.status_code == status and answer.headers[ALLOWED] == GOOD
        assert "Origin" in answer.headers["vary"]
        exposed = answer.headers["access-control-expose-headers"].lower().replace(" ", "").split(",")
        assert {"x-request-id", "retry-after"} <= set(exposed)
    with listed.http.stream("POST", CHAT, json=BODY | {"stream": True}, headers={"Origin": OTHER}) as answer:
        assert answer.headers[ALLOWED] == OTHER and b"[DONE]" in answer.read()


def test_a_page_that_is_allowed_still_needs_the_key(listed: Live) -> None:
    with httpx.Client(timeout=PATIENT) as anyone:
        assert anyone.post(listed.url + CHAT, json=BODY, headers={"Origin": GOOD}).status_code == 401


def test_all_origins_if_that_is_spelled_out() -> None:
    with live(FakeClient(lambda prompt, params: "ok"), cors_origins="*") as server:
        assert preflight(server, BAD).headers[ALLOWED] == "*"
        assert server.http.post(CHAT, json=BODY, headers={"Origin": BAD}).headers[ALLOWED] == "*"


def test_nothing_is_allowed_by_default(echo: Live) -> None:
    answer = preflight(echo, GOOD)
    assert answer.status_code == 405 and ALLOWED not in answer.headers
    assert ALLOWED not in echo.http.post(CHAT, json=BODY, headers={"Origin": GOOD}).headers


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("a.example", "cors_origins has 'a.example'; it must be whole origins without a path"),
        ("https://a.example/", "without a path"),
        ("https://a.example/app", "without a path"),
        ("https://*.example", "'\\*' alone for every page"),
        ("https://a.example b", "without a path"),
        ("*,https://a.example", "'\\*' beside other origins"),
    ],
)
def test_origins_that_no_browser_sends(given: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        ServerConfig(cors_origins=given)


def test_origins_of_programs_that_are_pages() -> None:
    given = "tauri://localhost,vscode-webview://1a2b,http://[::1]:3000,http://x:80,http://y:443"
    assert ServerConfig(cors_origins=given).origins == [
        "tauri://localhost",
        "vscode-webview://1a2b",
        "http://[::1]:3000",
        "http://x",
        "http://y:443",
    ]
