"""The README and the guide are run: their commands and their Python work, and their tables say what the code does."""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sparkdraft.cli.main import parser
from sparkdraft.drafters.assistant import TYPE as ASSISTANT
from sparkdraft.drafters.mtp import HEADS
from sparkdraft.models.registry import model_types
from sparkdraft.weights.gguf import ARCHITECTURES as GGUF_ARCHITECTURES
from tests.cli.said import in_process
from tests.patience import PATIENT

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs" / "guide.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.S)
GUIDE_BLOCKS = re.findall(r"```(\w*)\n(.*?)```", GUIDE, re.S)
LINES = [line for _, text in (*BLOCKS, *GUIDE_BLOCKS) for line in text.splitlines()]
COMMANDS = list(dict.fromkeys(line.split("#")[0].strip() for line in LINES if line.startswith("sparkdraft ")))
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


def test_the_files_to_read_exist() -> None:
    reading = README.split("The code in an afternoon")[1].split("[The design]")[0]
    files = re.findall(r"`([\w/]+\.py)`", reading)
    assert len(files) > 10 and all((ROOT / "sparkdraft" / file).exists() for file in files)


def test_the_readme_is_short() -> None:
    assert len([word for word in README.split() if word[0].isalnum()]) < 800


def test_figures_are_those_of_the_numbers() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "tools/readme_figures.py"), "--check"], capture_output=True)
    assert done.returncode == 0, done.stdout.decode()


# The rows of "What runs", by the model types that each stands for.
ROWS = {
    "Llama, SmolLM2": {"llama"},
    "Mistral": {"mistral"},
    "Phi-3, Phi-4": {"phi3"},
    "Qwen2": {"qwen2"},
    "Qwen3": {"qwen3"},
    "Qwen3 MoE, Qwen3-Coder": {"qwen3_moe"},
    "Qwen3-Next, Qwen3-Coder-Next": {"qwen3_next"},
    "Qwen3.5, Qwen3.6": {"qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"},
    "gpt-oss": {"gpt_oss"},
    "Gemma 3": {"gemma3", "gemma3_text"},
    "Gemma 4": {"gemma4", "gemma4_text"},
}


def test_the_table_of_what_runs_is_the_code() -> None:
    header, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in README.split("## What runs")[1].split("\n\n")[1].splitlines()
    )
    assert {row[0] for row in rows} == set(ROWS)
    assert set().union(*ROWS.values()) == set(model_types())
    for row in rows:
        says = {name: cell == "yes" for name, cell in zip(header[1:], row[1:], strict=True)}
        types = ROWS[row[0]]
        assert says["own MTP head"] == any(each.removesuffix("_text") in HEADS for each in types), row[0]
        assert says["assistant"] == any(f"{each}_assistant" == ASSISTANT for each in types), row[0]
        assert says["GGUF"] == any(each in GGUF_ARCHITECTURES for each in types), row[0]
    assert all(f"`{name}`" in (ROOT / "docs/models.md").read_text() for name in model_types())


PAGES = [
    *ROOT.glob("*.md"),
    ROOT / "tests/README.md",
    ROOT / "examples/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


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
