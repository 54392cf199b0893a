"""`sparkdraft launch`: what a program is given, against a real server and a program that says what it got."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sparkdraft.cli.launch import PROGRAMS, Server
from sparkdraft.cli.main import main
from tests.server.conftest import FakeClient, live

SAYS = """#!/usr/bin/env python3
import json, os, sys
print(json.dumps({"words": sys.argv[1:], "variables": dict(os.environ)}))
sys.exit(3)
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in PROGRAMS:
        (tmp_path / name).write_text(SAYS)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_gets_address_model_and_context(
    program: str, programs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with live(FakeClient(lambda prompt, params: "hi"), served_name="tiny") as server:
        status = main(["launch", program, "--url", f"{server.url}/v1/", "--", "-p", "say hi", "--model-like"])
    said = capfd.readouterr()
    got = json.loads(said.out)
    assert status == 3, "the program's own status"
    assert got["words"][-3:] == ["-p", "say hi", "--model-like"]
    everything = json.dumps(got["words"]) + json.dumps(
        {k: v for k, v in got["variables"].items() if k not in os.environ}
    )
    assert server.url in everything and "tiny" in everything
    if program not in ("copilot", "qwen"):  # which have no setting for it
        assert "512" in everything, "the context of the server"
    assert "7,000 to 18,000" in said.err, "so small a context is said"


def test_codex_settings_are_toml() -> None:
    import tomllib

    start = PROGRAMS["codex"].start(Server("http://127.0.0.1:8000", "secret", 'a "model"', 65536))
    settings = [word for before, word in zip(start.words, start.words[1:], strict=False) if before == "-c"]
    read = tomllib.loads("\n".join(settings))
    provider = read["model_providers"]["sparkdraft"]
    assert provider["wire_api"] == "responses" and provider["base_url"] == "http://127.0.0.1:8000/v1"
    assert read["model_context_window"] == 65536 and "secret" not in json.dumps(start.words), "keys show in `ps`"
    assert start.variables[provider["env_key"]] == "secret"


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["launch", "claude"]) == 1
    assert "npm install -g @anthropic-ai/claude-code" in capfd.readouterr().err


def test_mistakes_are_one_sentence(programs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "claude", "--url", "http://127.0.0.1:9"]) == 1
    assert "sparkdraft serve" in capfd.readouterr().err
    with live(FakeClient(lambda prompt, params: "hi"), api_key="right") as server:
        assert main(["launch", "claude", "--url", server.url]) == 1
    assert "SPARKDRAFT_API_KEY" in capfd.readouterr().err
    assert main(["launch", "claude", "stray"]) == 1
    assert "after --" in capfd.readouterr().err


def test_print_shows_the_command(programs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with live(FakeClient(lambda prompt, params: "hi")) as server:
        assert main(["launch", "claude", "--print", "--url", server.url]) == 0
    said = capfd.readouterr().out
    assert f"ANTHROPIC_BASE_URL={server.url}" in said and "CLAUDE_CODE_MAX_CONTEXT_TOKENS=512" in said
