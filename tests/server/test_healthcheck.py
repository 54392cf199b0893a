"""The container's health check: it asks where the same variables let the server listen."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sparkdraft.bridges.container_env import merge_with_container
from sparkdraft.server.healthcheck import check, url_of
from tests.patience import PATIENT
from tests.server.conftest import FakeClient, live


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({}, "http://127.0.0.1:8000/health"),
        ({"SPARKDRAFT_HOST": "0.0.0.0", "VLLM_API_KEY": "k"}, "http://127.0.0.1:8000/health"),
        ({"SPARKDRAFT_HOST": "::", "VLLM_API_KEY": "k", "SPARKDRAFT_PORT": "9"}, "http://[::1]:9/health"),
        ({"EXTRA_ARGS": "--port 9000"}, "http://127.0.0.1:9000/health"),
    ],
)
def test_it_asks_where_the_server_listens(environ: dict[str, str], url: str) -> None:
    assert url_of(merge_with_container({}, None, environ)) == url


def test_it_tells_the_truth(tmp_path: Path) -> None:
    client = FakeClient(lambda prompt, params: "x")
    with live(client, api_key="k") as running:
        port = running.url.rpartition(":")[2]
        environ = {"SPARKDRAFT_PORT": port, "http_proxy": "http://127.0.0.1:1"}
        assert check(environ) == ""
        client.state = "starting"
        assert f"http://127.0.0.1:{port}/health answers 503" in check(environ)
        client.state = "ready"
        (tmp_path / "server.toml").write_text(f"port = {port}\n")
        assert check({"SPARKDRAFT_CONFIG": str(tmp_path / "server.toml")}) == ""
        command = [sys.executable, "-m", "sparkdraft.server.healthcheck"]
        assert subprocess.run(command, env=os.environ | environ, timeout=PATIENT).returncode == 0


def test_a_key_that_is_a_flag_of_serve_is_not_missed() -> None:
    assert "does not answer" in check({"SPARKDRAFT_HOST": "0.0.0.0", "SPARKDRAFT_PORT": "1"})


def test_nobody_answers_and_a_wrong_variable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        environ = {"SPARKDRAFT_PORT": str(taken.getsockname()[1])}
        assert "does not answer" in check(environ)
        command = [sys.executable, "-m", "sparkdraft.server.healthcheck"]
        result = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, timeout=PATIENT)
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1
    assert "did you mean SPARKDRAFT_PORT?" in check({"SPARKDRAFT_PROT": "1"})
