"""`sparkdraft check` of a model: its table, its JSON and its exit status. Of a server:
tests/operate/canary/test_remote.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparkdraft.cli.main import main
from sparkdraft.engine.host_steps import HostSteps


def test_a_sound_model_is_status_0(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--model", str(tiny), "--device", "cpu", "--json", "--verbose"]) == 0
    out, err = capsys.readouterr()
    *table, count, report = out.splitlines()
    assert len(table) == 7 and "passed   sampler is honest" in table[1], out
    assert "skipped  tool call is read" in out and "This model has no chat template" in out
    assert "0 failed" in count and json.loads(report)["ok"] is True
    assert "decode steps: replayed" in err


def test_a_model_with_a_fault_is_status_1(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = HostSteps._sample_rows
    monkeypatch.setattr(
        HostSteps, "_sample_rows", lambda steps, batch: [row._replace(grammar=None) for row in honest(steps, batch)]
    )
    assert main(["check", "--model", str(tiny), "--device", "cpu", "--json"]) == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["ok"] is False
    assert [finding["probe"] for finding in report["findings"] if finding["status"] == "failed"] == ["grammar holds"]
