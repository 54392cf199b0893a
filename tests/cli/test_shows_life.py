"""Every command that may take longer than two seconds says what it does meanwhile, and never on standard output.

Which stages there are is asked here; how they are shown is tests/util/test_progress.py's.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparkdraft.cli.main import main
from sparkdraft.models.common.config import uniform_config
from sparkdraft.operate.bench import random_model
from sparkdraft.operate.forecast import rates
from sparkdraft.util import progress
from tests.models.tiny import write_tiny

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
SMALL = (
    "--layers",
    "1",
    "--context",
    "64",
    "--block-rows",
    "32",
    "--longest",
    "64",
    "--block",
    "4",
    "--aux-layers",
    "0,1",
)


TOY = uniform_config("qwen3", 2, 32, 64, 2, 1, 32, 96, 1024, tie_embeddings=True, qk_norm=True)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(random_model.SHAPES, "toy", TOY)
    monkeypatch.setitem(rates.SIZE, "cpu", 1 << 20)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What commands have said that they do, in order; repeated stages once."""
    seen: list[str] = []

    class Recorded(progress.Meter):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "label" and value not in seen:
                seen.append(str(value))
            super().__setattr__(name, value)

    monkeypatch.setattr(progress, "Meter", Recorded)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    return seen


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("life")
    write_tiny(root / "target", "llama")
    (root / "target" / "chat_template.jinja").write_text(TEMPLATE)
    (root / "prompts.txt").write_text("tell\nwhy\nhow\n")
    return root


def ran(command: str, root: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The last line of what a command prints."""
    words = command.replace("TARGET", f"--model {root}/target").replace("ROOT", str(root)).split()
    assert main(words) == 0, capsys.readouterr().err
    return capsys.readouterr().out.splitlines()[-1]


def test_generate(root: Path, stages: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    line = ran("generate TARGET --dtype float32 --prompt hello --max-tokens 3 --json", root, capsys)
    target = f"{root}/target"
    assert stages == [f"opening {target}", f"loading {target}", f"warming up {target}", "reading 5 tokens of prompt"]
    assert json.loads(line)["num_output"] <= 3


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            "bench offline --shape toy --dtype float32 --threads 1 --concurrency 1 --prompt-len 16 --output-len 8",
            ["measuring this machine", "making toy", "1 streams, 16 tokens of prompt"],
        ),
        (
            "bench kv TARGET --dtype float32 --threads 1 --formats fp8 --tokens 16",
            ["exact: reading the texts", "fp8: reading the texts"],
        ),
    ],
)
def test_bench(
    command: str, expected: list[str], root: Path, stages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = ran(command, root, capsys)
    assert [stage for stage in stages if stage in expected] == expected, stages
    assert json.loads(line)["bench"] == command.split()[1]


def test_train(root: Path, stages: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    data = "train data TARGET --device cpu --out ROOT/corpus --prompts ROOT/prompts.txt --synthesise 2 --max-new 8"
    ran(data, root, capsys)
    assert stages == [f"loading {root}/target", "writing responses", "writing prompts"]
    stages.clear()
    ran(f"train fit TARGET --device cpu --data ROOT/corpus --out ROOT/run --steps 2 {' '.join(SMALL)}", root, capsys)
    ran("train export ROOT/run --out ROOT/drafter", root, capsys)
    assert stages == ["training", f"loading {root}/target", f"exporting {root}/run"]
    stages.clear()
    drafted = "TARGET --drafter ROOT/drafter --dtype float32 --per-class 1 --output-len 8"
    ran(f"train eval {drafted}", root, capsys)
    assert stages[-1] == "measuring acceptance"
    stages.clear()
    ran(f"bench accept {drafted}", root, capsys)
    assert stages[-1] == "measuring acceptance"
