"""The device that the engine would use, and the CPU's cores: what torch and the system say of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sparkdraft.operate.doctor.finding import Finding, Status
from sparkdraft.operate.doctor.memory import GpuMemory
from sparkdraft.plan import hardware
from sparkdraft.util.cores import usable_cores

PART = "CPU"
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


@dataclass(frozen=True, slots=True)
class Cuda:
    """The GPU that the engine would use, as torch tells of it."""

    name: str
    capability: tuple[int, int]
    sms: int
    memory: GpuMemory
    peak: float  # bytes per second, by the memory's clock and width; 0: not told
    uuid: str = ""  # as nvidia-smi names it


def read_cuda() -> Cuda | None:
    import torch

    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    clock, width = getattr(found, "memory_clock_rate", 0), getattr(found, "memory_bus_width", 0)  # kHz, bits
    memory = GpuMemory(total, free, bool(found.is_integrated))
    capability = (found.major, found.minor)
    peak = 2e3 * clock * width / 8
    return Cuda(found.name, capability, found.multi_processor_count, memory, peak, f"GPU-{found.uuid}")


@dataclass(frozen=True, slots=True)
class Cores:
    name: str
    usable: int
    quota: float  # cores' worth of time that the control group gives; 0: no limit
    governor: str = ""  # of the clock; "": not told


def read_cores() -> Cores:
    quota = 0.0
    try:
        share, period = CPU_MAX.read_text().split()
        quota = int(share) / int(period)
    except (OSError, ValueError):  # no control group, or "max"
        pass
    governor = GOVERNOR.read_text().strip() if GOVERNOR.is_file() else ""
    return Cores(hardware.cpu().name, usable_cores(), quota, governor)


def judge_cores(cores: Cores, device: str) -> list[Finding]:
    found = [Finding(PART, "cores", f"{cores.usable} usable, {cores.name}")]
    on_cpu = device == "cpu"
    if cores.quota and cores.quota < cores.usable - 0.01:
        value = f"the control group gives the time of {cores.quota:g} cores, and {cores.usable} threads would start"
        advice = f"pass --threads {max(int(cores.quota), 1)}, or raise the limit (docker --cpus): threads wait in turn"
        found.append(Finding(PART, "time", value, Status.CHANGE if on_cpu else Status.NOTE, advice))
    if cores.governor == "powersave" and on_cpu:
        advice = "`sudo cpupower frequency-set -g performance` lets it run at its full clock"
        found.append(Finding(PART, "clock", "the governor is powersave", Status.NOTE, advice))
    return found


def judge_load(disturbance: str) -> list[Finding]:
    """disturbance: of everything that the doctor has measured (OtherPrograms.disturbance)."""
    advice = "the machine is busy and every speed in this report is too low; look again when it is idle"
    return [Finding(PART, "load", disturbance, Status.NOTE, advice)] if disturbance else []
