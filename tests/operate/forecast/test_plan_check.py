"""tools/plan_check.py: losses are found again from speeds that they made, and a written machine can be read."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from sparkdraft.operate.forecast.machine import find_machine

TOOL = Path(__file__).parents[3] / "tools/plan_check.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_check", TOOL)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "plan_check", module)  # where dataclasses look their module up
        spec.loader.exec_module(module)
    return module


def test_losses_are_found_again(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tool, "ROUNDS", 12)
    machine = find_machine("h200")
    known = machine.losses().expected
    cases = [case for case in tool.LOADS["gpu"] if case.shape == "qwen3-8b"][:5]
    ones = [tool.Measured(case, 1.0, case.length if case.drafter else 1.0, 4.3e12) for case in cases]
    true = [replace(each, tok_s=tool.ratio(machine, each, known)) for each in ones]
    assert all(tool.ratio(machine, each, known) == pytest.approx(1) for each in true)
    wrong = replace(known, floats=0.7, layer=40e-6, draft=1e-3)
    fitted = tool.fit(machine, true, wrong)
    before, after = (max(abs(tool.ratio(machine, each, losses) - 1) for each in true) for losses in (wrong, fitted))
    assert after < 0.03 < before
    tool.write(machine, fitted, tmp_path / "mine.json")
    again = find_machine(str(tmp_path / "mine.json"))
    assert again.losses().expected.floats == pytest.approx(fitted.floats, rel=1e-3) and again.losses().is_measured


def test_commands_are_those_of_the_bench(tool: ModuleType) -> None:
    from sparkdraft.cli.main import parser

    for cases in tool.LOADS.values():
        for case in cases:
            parser().parse_args(case.command()[3:])


def test_a_cpu_that_was_measured_is_written_and_read(tool: ModuleType, tmp_path: Path) -> None:
    """Its losses are those of no file."""
    machine = find_machine("cpu")
    losses = replace(machine.losses().expected, coded=0.9, formats={"quantised": 0.9, "quantised4": 0.8})
    measured = replace(machine, engines={"sparkdraft": replace(machine.losses(), expected=losses)})
    tool.write(measured, losses, tmp_path / "mine.json")
    assert find_machine(str(tmp_path / "mine.json")).losses().expected == losses
