"""tools/gpu_figures.py: its commands are ours and can be typed; a step that fails or hangs stops no other."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparkdraft.cli.main import parser
from sparkdraft.operate.bench.shapes import drafter_shape, shape

ROOT = Path(__file__).parents[2]
TOOL = SimpleNamespace(**runpy.run_path(str(ROOT / "tools/gpu_figures.py")))
NAMES = [step.name for step in TOOL.STEPS]


@pytest.mark.parametrize("name", NAMES)
def test_every_command_can_be_typed(name: str) -> None:
    (step,) = (step for step in TOOL.STEPS if step.name == name)
    first, *words = step.command.split()
    if first == "-m":
        assert all(Path(ROOT, word).is_dir() for word in words if word.startswith("tests/")), words
    elif first.startswith("tools/"):
        assert (ROOT / first).is_file()
    else:
        args = parser().parse_args([first, *words])
        if getattr(args, "shape", None):
            target = shape(args.shape)
            assert not args.drafter_shape or drafter_shape(args.drafter_shape, target)


def test_a_step_that_fails_or_hangs_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def step(name: str, code: str, limit: int = 60) -> object:
        return SimpleNamespace(name=name, limit=limit, command=name, arguments=lambda: [sys.executable, "-c", code])

    names = TOOL.main.__globals__
    monkeypatch.setitem(
        names, "STEPS",
        [step("bad", "raise SystemExit(3)"), step("slow", "import time; time.sleep(60)", 1), step("good", "print(7)")],
    )  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["gpu_figures.py", "--out", str(tmp_path)])
    assert TOOL.main() == 1
    said = capsys.readouterr().out
    assert "failed with 3" in said and "limit of 1 s" in said and said.endswith("without a result: bad, slow\n")
    assert (tmp_path / "good.txt").read_text() == "$ good\n7\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.part", "good.txt", "slow.part"]
    monkeypatch.setattr(sys, "argv", ["gpu_figures.py", "--out", str(tmp_path), "--only", "good"])
    assert TOOL.main() == 0 and capsys.readouterr().out == "all ran\n", "what is there is not run again"
