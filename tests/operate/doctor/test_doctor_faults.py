"""Each fault that can be planted is found, with the sentence a person needs: by the judges, from any machine's data."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from sparkdraft.core import Fact
from sparkdraft.operate.doctor import software
from sparkdraft.operate.doctor.engine import TUNE, judge_facts
from sparkdraft.operate.doctor.finding import Finding, Report, Status, without_paths
from sparkdraft.operate.doctor.machine import (
    Cores,
    GpuMemory,
    GpuState,
    Measured,
    Memory,
    count_others,
    judge_bandwidth,
    judge_cores,
    judge_disk,
    judge_gpu,
    judge_memory,
    read_gpus,
    state,
)
from sparkdraft.operate.doctor.software import Torch
from sparkdraft.operate.forecast.machine import describing

ROOT = Path(__file__).parents[3]
GIB = 2**30
SPARK, H200 = "NVIDIA GB10", "NVIDIA H200"


def the(findings: list[Finding], name: str) -> Finding:
    (found,) = (each for each in findings if each.name == name)
    return found


def fine(findings: list[Finding]) -> bool:
    return all(each.status == Status.FINE and not each.advice for each in findings)


# ---- torch and Triton

CUDA = Torch("2.13.0", "13.0", True, ("sm_90", "sm_120"))


def test_a_torch_that_is_tested_is_fine() -> None:
    assert fine(software.judge_torch(CUDA, 1, "580.126", (9, 0)))
    assert fine(software.judge_torch(CUDA, 1, "580.126", (12, 1))), "code of sm_120 runs on sm_121"
    assert fine(software.judge_torch(Torch("2.11.0+cpu"), 0))


@pytest.mark.parametrize(
    ("torch", "gpus", "capability", "name", "status", "words"),
    [
        (Torch("2.5.1+cpu"), 0, None, "torch", Status.CHANGE, "2.11 to 2.13 are tested: pip install 'torch>=2.11'"),
        (Torch("2.10.1"), 0, None, "torch", Status.CHANGE, "2.11 to 2.13 are tested"),
        (Torch("3.0.0"), 0, None, "torch", Status.NOTE, "should something fail, try 2.13"),
        (Torch(problem="libcudart.so.13: cannot open"), 1, None, "torch", Status.BROKEN, "install it again"),
        (Torch("2.13.0+cpu"), 1, None, "torch and the GPU", Status.CHANGE, "install a CUDA build"),
        (Torch("2.13.0", "13.0"), 1, None, "torch and the GPU", Status.CHANGE, "update the driver"),
        (CUDA, 1, (8, 6), "torch and the GPU", Status.BROKEN, "install a torch that was built for this GPU"),
    ],
)
def test_a_wrong_torch(
    torch: Torch, gpus: int, capability: tuple[int, int] | None, name: str, status: Status, words: str
) -> None:
    found = the(software.judge_torch(torch, gpus, "535.54", capability), name)
    assert found.status == status and words in found.advice


def test_a_hidden_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = the(software.judge_torch(Torch("2.13.0", "13.0"), 1), "torch and the GPU")
    assert "CUDA_VISIBLE_DEVICES is '': unset it" in found.advice


def test_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    version, problem = software.read_triton()
    assert not version and problem
    found = software.judge_triton(version, problem, "cuda")
    assert found.status == Status.BROKEN and "pip install triton" in found.advice
    assert software.judge_triton(version, problem, "cpu").status == Status.FINE
    old = software.judge_triton("3.4.0", "", "cuda")
    assert old.status == Status.NOTE and "--kv turboquant" in old.advice


def test_no_c_compiler_for_triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert fine(software.judge_c_compiler("cuda"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    (found,) = software.judge_c_compiler("cuda")
    assert found.status == Status.BROKEN and "apt install gcc" in found.advice


def test_no_cpp_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    (found,) = software.judge_native("cpu")
    assert found.status == Status.CHANGE and "apt install g++" in found.advice
    assert software.judge_native("cuda") == []


def test_variables_that_slow_all_down() -> None:
    found = software.judge_environment({"TRITON_INTERPRET": "1", "CUDA_LAUNCH_BLOCKING": "0", "HF_TOKEN": "x"}, "cuda")
    assert [(each.name, each.status, each.advice) for each in found] == [
        ("TRITON_INTERPRET", Status.CHANGE, "unset TRITON_INTERPRET")
    ]


# ---- the GPU

# as nvidia-smi prints the fields of operate/doctor/machine.py
HEALTHY = f"{H200}, 580.126, P0, 1980, 1980, 3201, 410.52, 700.00, 700.00, 45, 0x0000000000000000\n"
STUCK = f"{SPARK}, 580.95.05, P8, 611, 3003, [N/A], 29.80, [N/A], [N/A], 51, 0x0000000000000000\n"


def smi(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, status: int = 0) -> None:
    """A driver's own tool, of a machine that is not here."""
    script = folder / "nvidia-smi"
    others = "4711\\n4712\\n"
    script.write_text(
        f"#!/bin/sh\ncase $1 in *apps*) printf '{others}';; *) cat <<'END'\n{text}END\nexit {status};; esac\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_a_healthy_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, monkeypatch, HEALTHY)
    turns: list[int] = []
    (found,), problem = read_gpus(lambda: turns.append(1))
    assert not problem and found.sm_mhz == 1980 and found.watts == 410.52 and fine(judge_gpu(found))
    assert turns, "it works while it is asked"
    assert count_others(4711) == 1 and "one other process" in the(judge_gpu(found, 1), "others").value


def test_the_gpu_that_torch_uses_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text(f"""#!/bin/sh
case "$*" in *apps*"-i GPU-2") echo 7;; *apps*) echo 8; echo 9;; *"-i GPU-2") echo '{HEALTHY.strip()}';;
*) echo '{STUCK.strip()}'; echo '{HEALTHY.strip()}';; esac
""")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert len(read_gpus()[0]) == 2
    (own,), _ = read_gpus(gpu="GPU-2")
    assert own.sm_mhz == 1980 and count_others(1, "GPU-2") == 1


def test_a_gb10_that_is_stuck_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, monkeypatch, STUCK)
    (stuck,), _ = read_gpus()
    assert stuck.mem_mhz is None and stuck.limit_watts is None, "a GB10's driver does not tell"
    found = the(judge_gpu(stuck), "clocks")
    assert found.status == Status.CHANGE and "611 MHz of 3003" in found.value
    assert "stuck in a low-power state" in found.value and "pull the power supply's plug for a minute" in found.advice


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        ({"sm_mhz": 900.0, "held_back": 0x4}, "clocks", "held back by the power limit"),
        ({"sm_mhz": 900.0, "held_back": 0x60}, "clocks", "held back by heat, by the driver and heat, by the hardware"),
        ({"limit_watts": 450.0}, "power limit", "`sudo nvidia-smi -pl 700`"),
        ({"celsius": 90.0}, "temperature", "cooling"),
        ({"name": SPARK, "driver": "570.10"}, "driver", "update the driver to 580 or later"),
    ],
)
def test_what_slows_a_gpu_down_is_named(changes: dict[str, object], name: str, words: str) -> None:
    healthy = {"name": H200, "driver": "580.1", "pstate": "P0", "sm_mhz": 1900.0, "max_sm_mhz": 1980.0}
    limits = {"limit_watts": 700.0, "default_watts": 700.0, "celsius": 50.0}
    assert fine(judge_gpu(GpuState(**(healthy | limits))))  # type: ignore[arg-type]
    found = the(judge_gpu(GpuState(**(healthy | limits | changes))), name)  # type: ignore[arg-type]
    assert found.status == Status.CHANGE and words in found.advice


def test_a_tool_that_fails_or_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, monkeypatch, "NVIDIA-SMI has failed because it could not talk to the driver\n", 9)
    assert read_gpus() == ([], "nvidia-smi fails (NVIDIA-SMI has failed because it could not talk to the driver)")
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert read_gpus() == ([], "nvidia-smi is not installed") and count_others(1) == 0


# ---- bandwidth


def test_a_bandwidth_that_is_too_low() -> None:
    spark = describing(SPARK)
    assert spark and judge_bandwidth(Measured(230e9, 220e9), SPARK, spark).status == Status.FINE
    found = judge_bandwidth(Measured(112e9, 118e9), SPARK, spark)
    assert found.status == Status.CHANGE and "112.0 GB/s" in found.value and "gives 234" in found.value
    assert "low-power state" in found.advice and "plug" in found.advice
    busy = judge_bandwidth(Measured(112e9, 118e9), SPARK, spark, busy="other processes use the GPU")
    assert busy.status == Status.NOTE and busy.advice == "other processes use the GPU: look again when it is idle"


def test_a_gpu_that_no_file_describes_is_held_to_its_memorys_clock() -> None:
    assert describing("NVIDIA L40S") is None
    assert judge_bandwidth(Measured(700e9, 750e9), "NVIDIA L40S", None, 864e9).status == Status.FINE
    found = judge_bandwidth(Measured(200e9, 250e9), "NVIDIA L40S", None, 864e9)
    assert found.status == Status.CHANGE and "its memory is made for 864" in found.value


def test_a_cpu_that_reads_slowly() -> None:
    assert judge_bandwidth(Measured(20e9, 25e9), "a CPU", None).status == Status.FINE
    found = judge_bandwidth(Measured(1e9, 1.2e9), "a CPU", None)
    assert found.status == Status.CHANGE and "look with `top`" in found.advice


# ---- memory, disk and cores


def test_half_full_memory_of_a_unified_machine() -> None:
    full = Memory(120 * GIB, 52 * GIB)
    found = the(judge_memory(full, GpuMemory(120 * GIB, 9 * GIB, unified=True)), "unified memory")
    assert found.status == Status.CHANGE and "52.0 of 120.0 GiB are available" in found.value
    assert "CUDA reports 9.0 GiB free, without the page cache" in found.value
    assert "other programs hold 68.0 GiB" in found.advice and "60 s" in found.advice


def test_the_page_cache_is_no_fault() -> None:
    """CUDA reports little, the system much: most of it is files that were read."""
    assert fine(judge_memory(Memory(120 * GIB, 110 * GIB), GpuMemory(120 * GIB, 9 * GIB, unified=True)))


def test_half_full_memory_elsewhere() -> None:
    gpu = judge_memory(Memory(64 * GIB, 60 * GIB), GpuMemory(140 * GIB, 40 * GIB, unified=False))
    assert the(gpu, "system memory").status == Status.FINE
    assert the(gpu, "GPU memory").status == Status.CHANGE and "nvidia-smi" in the(gpu, "GPU memory").advice
    assert the(judge_memory(Memory(24 * GIB, 10 * GIB), None), "system memory").status == Status.NOTE
    assert the(judge_memory(Memory(24 * GIB, 1 * GIB), None), "system memory").status == Status.CHANGE
    swapped = judge_memory(Memory(24 * GIB, 4 * GIB, swap_used=6 * GIB, limit=12 * GIB), None)
    assert the(swapped, "swap").status == Status.CHANGE and "12.0 of 24.0" in the(swapped, "limit").value


def test_disk() -> None:
    assert judge_disk(100 * 10**9, True).status == Status.FINE
    assert judge_disk(10 * 10**9, True).status == Status.NOTE
    for found in (judge_disk(10**8, True), judge_disk(10**12, False)):
        assert found.status == Status.CHANGE and "SPARKDRAFT_CACHE" in found.advice


def test_a_control_group_that_gives_less_time_than_threads_take() -> None:
    assert fine(judge_cores(Cores("a CPU", 8, 0), "cpu"))
    found = the(judge_cores(Cores("a CPU", 8, 2.5), "cpu"), "time")
    assert found.status == Status.CHANGE and "--threads 2" in found.advice


# ---- the engine's facts, and the report


def test_guessed_tiles_say_how_to_measure_them() -> None:
    pytest.importorskip("triton")
    from sparkdraft.kernels.cuda.runtime.facts import tiles
    from sparkdraft.kernels.cuda.runtime.gpu import Gpu
    from sparkdraft.kernels.cuda.runtime.tuned import Key

    keys = [Key("few_rows", "16bit", (6144, 4096))]
    measured, guessed = (tiles("matrix tiles", keys, gpu) for gpu in (Gpu(9, 0, 132), Gpu(12, 1, 48)))
    assert measured and guessed
    assert fine(judge_facts([measured], {}))
    (found,) = judge_facts([guessed], {})
    assert found.status == Status.CHANGE and "was measured on sm_121" in found.value
    assert "sparkdraft tune" in found.advice
    (drafters,) = judge_facts([Fact("drafter's attention tiles", guessed.value, guessed.reason)], {})
    assert drafters.status == Status.CHANGE and "tools/cuda_kernels.py" in drafters.advice


def test_the_tools_that_it_names_have_the_flags_that_it_names() -> None:
    for command, flags in re.findall(r"tools/(\w+\.py)((?: --\w+)*)", " ".join(TUNE.values())):
        content = (ROOT / "tools" / command).read_text(encoding="utf-8")
        assert all(f'"{flag}"' in content for flag in flags.split()), command


def test_missing_recordings_say_why() -> None:
    (found,) = judge_facts([Fact("decode steps", "launched one operator at a time", "graphs is off")], {})
    assert found.status == Status.CHANGE and "leave --no-graphs out" in found.advice


def test_the_verdict_names_the_worst_first() -> None:
    fine_, change = Finding("a", "b", "c"), Finding("a", "disk", "full", Status.CHANGE, "free some")
    broken = Finding("a", "torch", "gone", Status.BROKEN, "install it")
    assert Report("m", [fine_], 1).verdict() == "fine: nothing to change" and Report("m", [fine_], 1).exit_status == 0
    assert Report("m", [fine_, change], 1).exit_status == 1
    worst = Report("m", [change, broken, change], 1)
    assert worst.exit_status == 2 and worst.todo() == ["torch: install it", "disk: free some"]


def test_the_docs_show_what_a_stuck_spark_reads() -> None:
    full = judge_memory(Memory(120 * GIB, 52 * GIB), GpuMemory(120 * GIB, 9 * GIB, unified=True))
    said = Report("m", [*judge_gpu(state(STUCK.strip().split(", "))), *full], 1).text().split("\n\n")
    docs = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert "\n\n".join(said[1:3]) in docs


def test_paths_of_a_user_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("SPARKDRAFT_CACHE", "/home/ada/.cache/sparkdraft")
    text = (
        "in '/home/ada/secret plan/m.gguf', /data/ada/model (see /home/ada/.cache/sparkdraft/native/a.so): /usr/bin/c++"
    )
    assert without_paths(text) == (
        "in '.../secret plan/m.gguf', .../model (see ~/.cache/sparkdraft/native/a.so): /usr/bin/c++"
    )
    assert without_paths("https://download.pytorch.org/whl/cu130 and/or 1/2") == (
        "https://download.pytorch.org/whl/cu130 and/or 1/2"
    )
    for text, said in (
        ("cannot open file:/home/ada/secret/x.bin", "cannot open file:.../x.bin"),
        ("a.so:/home/ada/lib -L/home/ada/secret/lib", "a.so:.../lib -L.../lib"),
        ("file:///data/ada/x and http://[::1]:8000/v1/models", "file://.../x and http://[::1]:8000/v1/models"),
        ("in /home/adam/x, /home/ada", "in .../x, ~"),
    ):
        assert without_paths(text) == said
    monkeypatch.setenv("HOME", "/home/Ada Lovelace")
    assert "Lovelace" not in without_paths("in /home/Ada Lovelace/models/x.bin")
    model = "/data/Ada L/My Models/m.gguf"
    assert without_paths(f"bench --model {model} /data/Ada L/My Models/b", model) == "bench --model .../m.gguf .../b"
