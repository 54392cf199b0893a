"""`sparkdraft doctor` as typed: a healthy machine, faults planted in the real one, the exit status, and what it keeps
to itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkdraft import LLM
from sparkdraft.cli.main import main
from sparkdraft.config import EngineConfig
from sparkdraft.engine import profile
from sparkdraft.engine.load import open_model
from sparkdraft.engine.profile import Profile
from sparkdraft.kernels import native, reference
from sparkdraft.operate.doctor import examine, machine, software
from sparkdraft.operate.doctor.engine import run_counted
from sparkdraft.operate.doctor.machine import GPU, LEAST_CPU, Measured
from sparkdraft.operate.forecast import rates
from sparkdraft.plan import hardware as plan_hardware
from sparkdraft.util.this_machine import OtherPrograms, usable_cores
from tests.drafters.tiny_mtp import write_target
from tests.kernels.triton_device import gpu_only
from tests.models.tiny import write_tiny
from tests.patience import PATIENT

ROOT = Path(__file__).parent.parent.parent
WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
from sparkdraft.operate.forecast import rates
from sparkdraft import LLM
from sparkdraft.cli.main import main
rates.SIZE["cpu"] = 16 << 20
sys.exit(main(sys.argv[1:]))
"""
MEMORY = "MemTotal: {total} kB\nMemFree: 100 kB\nMemAvailable: {available} kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test is about how busy this machine is: its bandwidth is measured, and told as no less than enough."""
    measure = examine._measure

    def measured(device: str, threads: int) -> Measured:
        found = measure(device, threads)
        return Measured(max(found.gemv, LEAST_CPU), max(found.copy, LEAST_CPU))

    monkeypatch.setattr(examine, "_measure", measured)
    monkeypatch.setattr(OtherPrograms, "taken", 0.0)
    monkeypatch.setitem(rates.SIZE, "cpu", 16 << 20)


def looked(tiny: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    status = main(["doctor", "--model", str(tiny), "--device", "cpu", "--json", *flags])
    return status, json.loads(capsys.readouterr().out)


def finding(report: dict[str, Any], name: str) -> dict[str, str]:
    (found,) = (each for each in report["findings"] if each["name"] == name)
    return dict(found)


def test_a_healthy_machine_says_so(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(tiny), "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "fine: nothing to change" in text.splitlines()[-1]
    for words in (
        "torch: ",
        "C++ compiler: ",
        "memory bandwidth: ",
        "system memory: ",
        "disk: ",
        "runs on: cpu, quant",
    ):
        assert words in text
    assert re.search(r"decode steps: replayed.*\n +proof: 11 of 12 steps replayed a graph", text)


@pytest.mark.slow
def test_the_embedded_model_is_examined_in_seconds(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["status"] in ("ok", "note") and report["verdict"] == "fine: nothing to change"
    assert "drafts after a random text" in finding(report, "blocks of drafts")["proof"]
    docs = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    shown = re.search(r"```\nsparkdraft doctor\n```\n\n```\n(.*?)```", docs, re.S)
    names = set(re.findall(r"^  (?:ok|note|change|broken) +([^:]+):", shown[1], re.M)) if shown else set()
    assert names - {"load"} == {each["name"] for each in report["findings"]} - {"load"}, "docs/doctor.md"


def test_a_profile_and_a_drafter_that_are_used_are_no_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile of one's own, and a head in the model's file: both are as they should be."""
    monkeypatch.setattr(profile, "folder", lambda: tmp_path / "profiles")
    model, _ = write_target(tmp_path / "model", "qwen3_next", shared_expert_intermediate_size=64)
    subject = open_model(EngineConfig(model=str(model), device="cpu")).subject
    Profile(subject, {"max_seqs": 4}, "2026-11-18").write(subject.path)
    status, report = looked(model, capsys)
    assert status == 0, report["to_change"]
    assert finding(report, f"profile {subject.path.name} from 2026-11-18")["status"] == "note"
    assert finding(report, "drafting with the MTP head in the model's own file")["status"] == "note"


def test_a_wrong_torch(tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    status, report = looked(tiny, capsys)
    assert status == 1 and report["to_change"] == ["torch: 2.11 to 2.13 are tested: pip install 'torch>=2.11'"]


def test_missing_recordings(tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    status, report = looked(tiny, capsys, "--no-graphs")
    assert status == 1 and "leave --no-graphs out" in finding(report, "decode steps")["advice"]
    monkeypatch.setattr(native, "gated", reference.gated)
    status, report = looked(tiny, capsys)
    found = finding(report, "decode steps are launched one operator at a time")
    assert status == 1 and found["value"] == "a step calls 'float', which is not one of the CPU kernels"


def test_a_low_bandwidth(tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "_measure", lambda *_: Measured(1.1e9, 1.3e9))
    status, report = looked(tiny, capsys)
    found = finding(report, "memory bandwidth")
    assert status == 1 and "1.1 GB/s by a matrix times a vector" in found["value"] and "top" in found["advice"]
    assert "load" not in {each["name"] for each in report["findings"]}
    monkeypatch.setattr(OtherPrograms, "taken", 0.5 * usable_cores())
    status, report = looked(tiny, capsys)
    assert status == 0 and "look again when it is idle" in finding(report, "memory bandwidth")["advice"]
    assert finding(report, "load")["value"].startswith("other programs took 50 % of the ")
    assert "every speed in this report is too low" in finding(report, "load")["advice"]


@pytest.mark.parametrize(("gib", "expected", "words"), [(11, 0, "less than half"), (1, 1, "stop other programs")])
def test_memory_that_others_hold(
    gib: int,
    expected: int,
    words: str,
    tiny: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = tmp_path / "meminfo"
    told.write_text(MEMORY.format(total=24 << 20, available=gib << 20))
    monkeypatch.setattr(plan_hardware, "MEMINFO", told)
    status, report = looked(tiny, capsys)
    found = finding(report, "system memory")
    assert status == expected and f"{gib}.0 of 24.0 GiB" in found["value"] and words in found["advice"]
    if gib < 2:
        assert finding(report, "memory bandwidth")["value"].startswith("not measured")


def test_no_compiler_and_no_triton(tiny: Path, tmp_path: Path) -> None:
    """In a process of its own: neither can be taken away from one that has loaded them."""
    command = [sys.executable, "-c", WITHOUT_TRITON, "doctor", "--model", str(tiny), "--device", "cpu", "--json"]
    env = {key: value for key, value in os.environ.items() if key != "CXX"} | {"PATH": str(tmp_path)}
    env |= {"SPARKDRAFT_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENT, env=env)
    report = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    assert "apt install g++" in finding(report, "C++ compiler")["advice"]
    assert "not installed; a CPU does without" in finding(report, "Triton")["value"]
    assert finding(report, "runs on")["value"].startswith("cpu, float32 weights, reference kernels")
    assert any("no C++ compiler found" in each["value"] for each in report["findings"] if each["part"] == "engine")


def test_a_gpu_without_triton_is_broken_and_starts_nothing(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is a DGX Spark's, half full and slow, but for its GPU: what is measured is planted."""
    spark = machine.Cuda("NVIDIA GB10", (12, 1), 48, machine.GpuMemory(120 << 30, 9 << 30, True), 0.0)
    monkeypatch.setattr(machine, "read_cuda", lambda: spark)
    monkeypatch.setattr(examine, "_measure", lambda *_: Measured(110e9, 112e9))
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(machine, "read_memory", lambda: examine_memory(120, 50))
    monkeypatch.setattr(software, "read_torch", lambda: software.Torch("2.13.0", "13.0", True, ("sm_120",)))
    status = main(["doctor", "--model", str(tiny), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert status == 2 and report["verdict"].startswith("broken: one thing must be mended")
    assert [text.split(":")[0] for text in report["to_change"]] == ["Triton", "memory bandwidth", "unified memory"]
    assert "plug" in finding(report, "memory bandwidth")["advice"]
    assert finding(report, "memory bandwidth")["part"] == GPU
    assert not any(each["part"] == "engine" for each in report["findings"])


def examine_memory(total: int, available: int) -> Any:
    from sparkdraft.operate.doctor.machine import Memory

    return Memory(total << 30, available << 30)


def test_a_model_that_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", "no-such-model", "--device", "cpu"]) == 2
    last = capsys.readouterr().out.splitlines()
    assert any("broken  model: it cannot run here: Unknown model 'no-such-model'" in line for line in last)


def test_nothing_private_is_told(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "SPARKDRAFT_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, f"sk-{name}")
    for text in (looked(tiny, capsys)[1], looked(tiny / "missing", capsys)[1]):
        shown = json.dumps(text)
        assert "sk-" not in shown and str(tiny.parent) not in shown
    assert finding(looked(tiny, capsys)[1], "runs on") and looked(tiny, capsys)[1]["model"] == "tiny-model"


def test_counted_steps(tiny: Path) -> None:
    recorded, off = (
        run_counted(LLM(str(tiny), device="cpu", dtype="quantised", spec="off", graphs=graphs).engine)
        for graphs in (True, False)
    )
    assert recorded.replayed == recorded.steps - 1 and recorded.kernels > 10, "all but the prompt's"
    assert off.replayed == 0 and off.steps == recorded.steps and len(off.seconds) == off.steps


@gpu_only
def test_the_whole_command_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(write_tiny(tmp_path / "tiny", "llama")), "--device", "cuda", "--json"]) <= 1
    report = json.loads(capsys.readouterr().out)
    names = {each["name"]: each for each in report["findings"]}
    assert {"GPU", "clocks", "memory bandwidth", "matrix tiles", "attention tiles", "kernel launches"} <= names.keys()
    assert "launched ahead" in names["overlapped steps"]["proof"] and "replayed" in names["decode steps"]["proof"]
