"""Every posted command is imported by the command line, and the line that it prints starts a server: in a shell, with
the embedded model in the place of the one that is named there."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.bridges import commands
from tests.patience import PATIENT, wait_for

POSTED = sorted({name for names in commands.POSTED_IN.values() for name in names})
# In the place of what belongs to the other model or machine: its name and drafter, a context that is longer than that
# of the embedded model, FP8 weights (its own have four bits), where to listen.
OTHER_MODEL = "--model smollm2 --drafter auto --max-model-len 2048 --weights auto"
HERE = "--device cpu --host 127.0.0.1 --port 0"
KEY = "a-key"


def imported(text: str, folder: Path) -> tuple[str, str]:
    """The printed command, and the notes."""
    if text.lstrip().startswith("services:"):
        (folder / "compose.yaml").write_text(text)
        text = str(folder / "compose.yaml")
    command = [sys.executable, "-m", "sparkdraft.cli.main", "import", text]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENT)
    assert result.returncode == 0 and len(result.stdout.splitlines()) == 1, result.stderr
    return result.stdout.strip(), result.stderr


def listening(log: Path, process: subprocess.Popen[bytes]) -> str:
    """Its address, once it is ready."""
    wait_for(lambda: process.poll() is not None or "ready after" in log.read_text(), log.read_text)
    assert process.poll() is None, log.read_text()
    found = re.search(r"chat +(http://127\.0\.0\.1:\d+)/", log.read_text())
    assert found
    return found[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", POSTED)
def test_what_is_printed_serves(name: str, smollm2_path: Path, tmp_path: Path) -> None:
    line, notes = imported(getattr(commands, name), tmp_path)
    assert notes.count("note: ") >= 1, "each of them has something without a counterpart"
    (tmp_path / "sparkdraft").write_text(f'#!/bin/sh\nexec {sys.executable} -m sparkdraft.cli.main "$@"\n')
    (tmp_path / "sparkdraft").chmod(0o755)
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "VLLM_API_KEY": KEY}
    log = tmp_path / "log"
    cache = "--kv exact" if "--kv fp8" in line else ""  # a CPU has no cache of fp8, and says so
    shell = ["bash", "-c", f"exec env {line} {OTHER_MODEL} {cache} {HERE}"]
    with log.open("wb") as output:
        process = subprocess.Popen(shell, env=environ, stderr=output)
    try:
        url = listening(log, process)
        assert httpx.get(url + "/health", timeout=PATIENT).status_code == 200
        words = shlex.split(line)
        served = words[words.index("--served-name") + 1] if "--served-name" in words else "smollm2"
        body = {"model": served, "prompt": "The sea is", "max_tokens": 8}
        headers = {"Authorization": f"Bearer {KEY}"}
        answer = httpx.post(url + "/v1/completions", json=body, headers=headers, timeout=PATIENT)
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"], answer.text
        if headers:
            assert httpx.post(url + "/v1/completions", json=body, timeout=PATIENT).status_code == 401
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENT) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
