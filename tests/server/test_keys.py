"""Keys: the two headers that carry one, named keys from a file with their limits, and a file that changes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from sparkdraft.core import UserError
from sparkdraft.server import keys
from sparkdraft.server.keys import Keys
from tests.patience import PATIENT, wait_for
from tests.server.conftest import FakeClient, Live, live
from tests.server.test_api import error_of

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hello"}]}
ALICE, BOB = "sk-alice-1234", "sk-bob-5678"
FILE = f"""
[keys.alice]
key = "{ALICE}"
max_concurrent = 1

[keys.bob]
sha256 = "{hashlib.sha256(BOB.encode()).hexdigest()}"
requests_per_minute = 2
"""


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "LOOK", 0.0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(tmp_path / "keys.toml", FILE)


def written(path: Path, text: str) -> Path:
    """As an editor does it: a new file in place of the old one."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").chmod(0o600)
    path.with_suffix(".new").rename(path)
    return path


class Clients:
    def __init__(self, server: Live) -> None:
        self.server, self.http = server, httpx.Client(base_url=server.url, timeout=PATIENT)

    def status(self, key: str, path: str = "/v1/models") -> int:
        return self.http.get(path, headers={"x-api-key": key}).status_code

    def chat(self, key: str, **body: Any) -> httpx.Response:
        return self.http.post(CHAT, json=BODY | body, headers={"Authorization": f"Bearer {key}"})


@pytest.fixture
def fake() -> FakeClient:
    return FakeClient(lambda prompt, params: "ok")


@pytest.fixture
def clients(fake: FakeClient, file: Path) -> Iterator[Clients]:
    with live(fake, api_key="master", api_keys_file=str(file)) as server:
        found = Clients(server)
        with found.http:
            yield found


# ---- headers


def test_both_headers_carry_a_key(clients: Clients) -> None:
    def status(**headers: str) -> int:
        return clients.http.get("/v1/models", headers=headers).status_code

    for key in ("master", ALICE, BOB):
        assert status(**{"x-api-key": key}) == status(Authorization=f"Bearer {key}") == 200
        assert status(Authorization=key) == status(**{"x-api-key": f"Bearer {key}"}) == 401
    assert status(**{"x-api-key": ""}) == status(Authorization="Bearer") == 401
    for wrong in ("wrong", ALICE[:-1], ALICE + "x", "alice", hashlib.sha256(ALICE.encode()).hexdigest()):
        assert status(**{"x-api-key": wrong}) == status(Authorization=f"Bearer {wrong}") == 401
    # programs that speak to several servers send what they have in both
    assert status(**{"x-api-key": ALICE, "Authorization": "Bearer placeholder"}) == 200
    assert status(**{"x-api-key": "placeholder", "Authorization": f"Bearer {ALICE}"}) == 200
    refused = error_of(clients.http.get("/v1/models"), 401)
    assert "'x-api-key: <key>'" in refused["message"] and "No API key was sent" in refused["message"]
    assert clients.http.get("/health").status_code == 200
    assert clients.http.get("/health", headers={"x-api-key": "wrong"}).status_code == 401


def test_the_clients_of_both_vendors_are_let_in(clients: Clients) -> None:
    anthropic = pytest.importorskip("anthropic")
    url = clients.server.url
    assert openai.OpenAI(base_url=f"{url}/v1", api_key=ALICE).models.list().data[0].id == "smollm2"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
    assert "smollm2" in anthropic.Anthropic(base_url=url, api_key=BOB).get("/v1/models", cast_to=str)
    with pytest.raises(anthropic.AuthenticationError) as refused:
        anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0).get("/v1/models", cast_to=str)
    assert refused.value.request_id and refused.value.request_id.startswith("req_")


def test_the_log_has_the_name_and_never_the_key(clients: Clients, caplog: pytest.LogCaptureFixture) -> None:
    for key in (ALICE, BOB, "master", "wrong-key"):
        clients.chat(key)
    wait_for(lambda: caplog.text.count("request id=") == 4)
    names = sorted(re.findall(r" key=(\S+) status=200 ", caplog.text))
    assert names == ["--api-key", "alice", "bob"] and caplog.text.count(" key=") == 3
    assert not any(key in caplog.text for key in (ALICE, BOB, "master", "wrong-key"))


# ---- limits


def test_a_key_runs_as_many_requests_at_once_as_it_may(clients: Clients, fake: FakeClient) -> None:
    fake.go_on.clear()
    threads = [threading.Thread(target=clients.chat, args=(ALICE,), kwargs={"stream": True})]
    threads[0].start()
    wait_for(lambda: fake.seen)
    refused = clients.chat(ALICE)
    assert error_of(refused, 429)["code"] == "rate_limit_exceeded" and refused.headers["retry-after"] == "1"
    assert error_of(refused, 429)["message"] == (
        "The key 'alice' may run 1 request at once, and 1 run; wait for one to end, or raise its max_concurrent in the "
        "keys file."
    )
    assert clients.status(ALICE) == 200, "what a client only reads is not counted"
    threads += [threading.Thread(target=clients.chat, args=(key,)) for key in (BOB, "master")]
    for thread in threads[1:]:
        thread.start()
    wait_for(lambda: len(fake.seen) == 3)
    fake.go_on.set()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_with_its_answer_may_send_the_next_request(clients: Clients, stream: bool) -> None:
    statuses = {clients.chat(ALICE, stream=stream).status_code for _ in range(50)}
    assert statuses == {200}


def test_requests_that_fail_or_hang_up_give_their_place_back(clients: Clients, fake: FakeClient) -> None:
    assert [clients.chat(ALICE, n=0).status_code for _ in range(3)] == [400] * 3
    fake.go_on.clear()
    body = json.dumps(BODY).encode()
    address = (clients.http.base_url.host, clients.http.base_url.port or 0)
    with socket.create_connection(address) as raw:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nx-api-key: {ALICE}\r\n"
        raw.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        wait_for(lambda: fake.seen)
        assert clients.chat(ALICE).status_code == 429
    wait_for(lambda: fake.aborted)
    fake.go_on.set()
    wait_for(lambda: clients.chat(ALICE).status_code == 200)


def test_a_key_sends_as_many_requests_a_minute_as_it_may(clients: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [clients.chat(BOB).status_code for _ in range(3)] == [200, 200, 429]
    refused = clients.chat(BOB)
    said = error_of(refused, 429)["message"]
    assert said.startswith("The key 'bob' may send 2 requests per minute, and it has; retry in ")
    assert 50 <= int(refused.headers["retry-after"]) <= 60 and "requests_per_minute in the keys file" in said
    assert clients.chat(ALICE).status_code == clients.chat("master").status_code == 200
    monkeypatch.setattr(keys, "MINUTE", 0.0)
    assert clients.chat(BOB).status_code == 200, "a minute later"


def test_what_is_refused_is_not_counted(tmp_path: Path) -> None:
    (key,) = keys.parsed(b'[keys.x]\nkey = "k"\nrequests_per_minute = 2', "f")
    own = Keys(file=str(written(tmp_path / "k", '[keys.x]\nkey = "k"\nrequests_per_minute = 2')))
    own.enter(key)
    own.enter(key)
    for _ in range(5):
        with pytest.raises(Exception, match="2 requests per minute"):
            own.enter(key)
    assert len(own._use["x"].began) == 2


# ---- a file that changes


def test_keys_are_added_and_removed_without_a_restart(
    clients: Clients, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert clients.status(ALICE) == 200 and clients.status("new") == 401
    written(file, '[keys.carol]\nkey = "new"\n')
    assert clients.status("new") == 200 and clients.status(ALICE) == clients.status(BOB) == 401
    assert clients.status("master") == 200
    assert f"the keys file {file} was read again; its keys: carol" in caplog.text
    written(file, "[keys]\n")
    assert clients.status("new") == 401, "without keys, but whole: nobody of it is let in"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[keys.alice", "is not valid TOML"),
        ("", "must have the table 'keys' and nothing else"),
        ('[keys.alice]\nkey = "a"\n[keys.bob]\nkey = "a"', "gives 'alice' and 'bob' the same key"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_broken_file_changes_nothing_and_is_told_once(
    clients: Clients, file: Path, caplog: pytest.LogCaptureFixture, text: str | None, words: str
) -> None:
    if text is None:
        file.unlink()
    else:
        written(file, text)
    for _ in range(3):
        assert clients.status(ALICE) == clients.status(BOB) == 200
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert words in record.getMessage() and "the keys that were read before stay in use" in record.getMessage()
    written(file, '[keys.carol]\nkey = "new"\n')
    assert clients.status("new") == 200 and clients.status(ALICE) == 401


def test_the_file_is_looked_at_once_a_second(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, now, real = [], [100.0], os.stat
    monkeypatch.setattr(keys, "LOOK", 1.0)
    found = Keys(file=str(file), clock=lambda: now[0])
    monkeypatch.setattr(keys.os, "stat", lambda path: looks.append(path) or real(path))
    for _ in range(100):
        assert found.find(ALICE.encode())
    assert not looks
    now[0] += 1.0
    for _ in range(100):
        found.find(ALICE.encode())
    assert len(looks) == 1


def test_a_limit_survives_a_file_that_is_read_again(clients: Clients, file: Path) -> None:
    assert [clients.chat(BOB).status_code for _ in range(2)] == [200, 200]
    written(file, FILE + "\n# more\n")
    assert clients.chat(BOB).status_code == 429
    written(file, FILE.replace("requests_per_minute = 2", "requests_per_minute = 3"))
    assert [clients.chat(BOB).status_code for _ in range(2)] == [200, 429]


# ---- its form


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", "must have the table 'keys' and nothing else"),
        ('[keys.a]\nkey = "k"\n[other]', "must have the table 'keys' and nothing else"),
        ("[keys]\n", "has no keys; add one"),
        ('[keys]\na = "k"', r"has no table for 'a'; write \[keys.a\]"),
        ("[keys.a]", "must have either key or sha256 for 'a'"),
        (f'[keys.a]\nkey = "k"\nsha256 = "{"0" * 64}"', "must have either key or sha256 for 'a'"),
        ('[keys.a]\nsha256 = "secret"', "sha256 for 'a' that is not 64 hexadecimal digits"),
        ('[keys.a]\nkey = "secret\u00e9"', "a key for 'a' that no header can carry"),
        ('[keys.a]\nkey = " secret"', "a key for 'a' that no header can carry"),
        ('[keys.a]\nkey = ""', "a key for 'a' that no header can carry"),
        ('[keys.a]\nkey = "secret\\n"', "a key for 'a' that no header can carry"),
        ("[keys.a]\nkey = 5", "a key for 'a' that no header can carry"),
        ('[keys.a]\nkey = "k"\nmax_concurent = 1', "unknown field 'max_concurent' in 'a'; did you mean max_concurrent"),
        ('[keys.a]\nkey = "k"\nmax_concurrent = 0', "a max_concurrent for 'a' that is no whole number of at least 1"),
        ('[keys.a]\nkey = "k"\nmax_concurrent = true', "a max_concurrent for 'a'"),
        ('[keys.a]\nkey = "k"\nrequests_per_minute = 1.5', "a requests_per_minute for 'a'"),
        ('[keys."a b"]\nkey = "k"', "has the name 'a b'; it must be 1 to 64 letters"),
        ('[keys.--api-key]\nkey = "k"', "has the name '--api-key'"),
    ],
)
def test_a_wrong_file_is_one_sentence_without_a_key(tmp_path: Path, text: str, words: str) -> None:
    path = written(tmp_path / "keys.toml", text)
    with pytest.raises(UserError, match=words) as caught:
        Keys(file=str(path))
    assert str(path) in str(caught.value) and "secret" not in str(caught.value) and "\n" not in str(caught.value)


def test_the_command_ends_with_one_sentence_at_a_wrong_file(tmp_path: Path, tiny_folder: Path) -> None:
    path = written(tmp_path / "keys.toml", "[keys.alice]")
    command = [sys.executable, "-m", "sparkdraft.cli.main", "serve", "--port", "0", "--model", str(tiny_folder)]
    # all that --host 0.0.0.0 asks for is a key, and the file has keys
    command += ["--device", "cpu", "--host", "0.0.0.0", "--api-keys-file", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENT)
    last = result.stderr.splitlines()[-1]
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert last == f"sparkdraft: the keys file {path} must have either key or sha256 for 'alice'"


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)])
def test_a_file_that_others_can_open_is_warned_of(
    file: Path, caplog: pytest.LogCaptureFixture, mode: int, warns: bool
) -> None:
    file.chmod(mode)
    Keys(file=str(file))
    assert (f"is open to other users (mode {mode:03o}); chmod 600 it" in caplog.text) == warns


def test_every_key_is_compared_whatever_was_sent(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By digests, so that neither a key's length nor its place in the file shows in the time."""
    compared: list[tuple[bytes, bytes]] = []
    real = keys.hmac.compare_digest
    monkeypatch.setattr(keys.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    found = Keys("master", str(file))
    for given in (b"master", ALICE.encode(), b"", b"x" * 5000):
        compared.clear()
        found.find(given)
        assert len(compared) == 3 and all(len(each) == 32 for pair in compared for each in pair)


def test_only_a_file_is_enough_and_the_server_gets_ready_with_it(file: Path, fake: FakeClient) -> None:
    with live(fake, warms_up=True, host="0.0.0.0", api_keys_file=str(file)) as server, httpx.Client() as anyone:
        assert len(fake.seen) == 3, "warm-up requests need no key"
        local = server.url.replace("0.0.0.0", "127.0.0.1")
        assert anyone.post(local + CHAT, json=BODY).status_code == 401
        assert anyone.post(local + CHAT, json=BODY, headers={"x-api-key": ALICE}, timeout=PATIENT).status_code == 200


def test_the_file_of_the_documentation_is_one() -> None:
    page = (Path(__file__).parents[2] / "docs/operations.md").read_text(encoding="utf-8")
    alice, server = keys.parsed(page.split("```toml\n")[1].split("```")[0].encode(), "docs")
    assert (alice.name, alice.max_concurrent, alice.requests_per_minute) == ("alice", 4, 60)
    assert server.name == "build-server" and len(server.digest) == 32
