"""The programs in examples/ run, each as a user would start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENT
from tests.server.test_serve import started

ROOT = Path(__file__).parent.parent
FILES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
CLIENTS = [name for name in FILES if "openai" in (ROOT / "examples" / name).read_text()]


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENT, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(FILES) - set(CLIENTS)))
def test_a_program_runs(name: str, smollm2_path: Path) -> None:
    assert len(run(name).split()) > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_runs_against_the_server(name: str, smollm2_path: Path) -> None:
    with started("--config", str(ROOT / "examples" / "serve.toml"), "--port", "0") as server:
        url = server.wait_for(r"chat +(http://127\.0\.0\.1:\d+)/").group(1)
        server.wait_for("ready after")
        assert run(name, f"{url}/v1").strip()


def test_the_page_lists_every_example() -> None:
    page = (ROOT / "examples" / "README.md").read_text()
    assert all(f"[{path.name}]" in page for path in (ROOT / "examples").iterdir() if path.name != "README.md")
