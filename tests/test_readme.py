"""The README is run: its commands, its Python, and its tree must be true."""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sparkdraft.cli.main import parser
from tests.cli.said import in_process
from tests.patience import PATIENT

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.S)
COMMANDS = [
    line.split("#")[0].strip() for _, text in BLOCKS for line in text.splitlines() if line.startswith("sparkdraft ")
]
# A hub model is out of reach of a test; training and serving are run by tests/train and tests/server.
ELSEWHERE = (
    *("sparkdraft train", "sparkdraft serve", "sparkdraft bench serve"),
    *("sparkdraft check --url", "sparkdraft recipe run", "sparkdraft cluster up"),
)
LONG = ("sparkdraft bench", "sparkdraft doctor", "sparkdraft check", "sparkdraft demo")  # commands that take seconds
OFFLINE = [c for c in COMMANDS if "Qwen/" not in c and not c.startswith(ELSEWHERE)]


def test_the_first_line_and_the_first_commands() -> None:
    assert README.startswith("# Sparkdraft: ")
    first = [line.split("#")[0].strip() for line in BLOCKS[0][1].strip().splitlines()]
    assert first == ["make serve", "make demo", "make test", "make test-long", "make check-speed"]
    targets = (ROOT / "Makefile").read_text()
    assert all(f"\n{command.split()[1]}:" in targets for command in first)
    assert (ROOT / ".ci/run").read_text().endswith("stage test\nstage test-long\n")


@pytest.mark.parametrize("command", [c for c in OFFLINE if not c.startswith(LONG)])
def test_commands_run(command: str, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"/quit\n")))
    result = in_process(*shlex.split(command)[1:])
    assert result.returncode == 0, result.stderr.decode()


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in OFFLINE if c.startswith(LONG)])
def test_long_commands_run(command: str, smollm2_path: Path) -> None:
    args = [sys.executable, "-m", "sparkdraft.cli.main", *shlex.split(command)[1:]]
    result = subprocess.run(args, input=b"/quit\n", capture_output=True, timeout=PATIENT)
    fine = (0, 1) if "doctor" in command else (0,)  # what it would change about this machine is no fault of ours
    assert result.returncode in fine, result.stderr.decode()


def test_hub_commands_are_at_least_well_formed() -> None:
    for command in COMMANDS:
        parser().parse_args(shlex.split(command)[1:])


def test_the_python_runs(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = [text for kind, text in BLOCKS if kind == "python"]
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert len(capsys.readouterr().out.split()) > 20


def test_the_tree_names_what_exists() -> None:
    (tree,) = [text for _, text in BLOCKS if text.startswith("sparkdraft/\n")]
    for line in tree.splitlines():
        name = line.split()[0]
        assert (ROOT / name if not line.startswith(" ") else ROOT / "sparkdraft" / name).exists(), name
    inside = {p.name for p in (ROOT / "sparkdraft").iterdir() if p.is_dir() and not p.name.startswith("__")}
    assert inside == {
        line.split()[0].rstrip("/") for line in tree.splitlines() if line.startswith("  ") and "/" in line.split()[0]
    }


PAGES = [ROOT / "README.md", ROOT / "tests" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Files exist, and so do the headings that a link names."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, heading = target.partition("#")
        if "://" in path:
            continue
        file = page.parent / path if path else page
        assert file.exists(), target
        headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE) if heading else []
        named = [re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings]
        assert not heading or heading in named, target
