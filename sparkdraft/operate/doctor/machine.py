"""The doctor's view of the machine: cores, GPU, memory, disk, bandwidth and the files of the cache folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkdraft.operate.doctor.finding import Finding, Status
from sparkdraft.operate.forecast.machine import Machine
from sparkdraft.plan import hardware
from sparkdraft.util.this_machine import HELD_BACK, REASONS, SECONDS, ask, held_back, usable_cores
from sparkdraft.weights.hub import cache_dir

CPU = "CPU"
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


@dataclass(frozen=True, slots=True)
class Cuda:
    """The GPU that the engine would use, as torch reports it."""

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
    found = [Finding(CPU, "cores", f"{cores.usable} usable, {cores.name}")]
    on_cpu = device == "cpu"
    if cores.quota and cores.quota < cores.usable - 0.01:
        value = f"the control group gives the time of {cores.quota:g} cores, and {cores.usable} threads would start"
        advice = f"pass --threads {max(int(cores.quota), 1)}, or raise the limit (docker --cpus): threads wait in turn"
        found.append(Finding(CPU, "time", value, Status.CHANGE if on_cpu else Status.NOTE, advice))
    if cores.governor == "powersave" and on_cpu:
        advice = "`sudo cpupower frequency-set -g performance` lets it run at its full clock"
        found.append(Finding(CPU, "clock", "the governor is powersave", Status.NOTE, advice))
    return found


def judge_load(disturbance: str) -> list[Finding]:
    """disturbance: of all measurements of the doctor (OtherPrograms.disturbance)."""
    advice = "the machine is busy and every speed in this report is too low; look again when it is idle"
    return [Finding(CPU, "load", disturbance, Status.NOTE, advice)] if disturbance else []


# ---- GPU: clocks, power and driver, which say something only while it works

GPU = "GPU"
FIELDS = (
    *("name", "driver_version", "pstate", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit"),
    *("power.default_limit", "temperature.gpu", REASONS),
)
# The numbers among them, as GpuState names them.
NUMBERS = ("sm_mhz", "max_sm_mhz", "mem_mhz", "watts", "limit_watts", "default_watts", "celsius")
LEAST_CLOCK = 0.6  # of the highest clock, under load
STUCK_MHZ = 900  # below it under load a GPU is in a low-power state
HOT_C = 87
NEW_DRIVER = {"GB10": 580}  # the first driver series that knows a GPU


@dataclass(frozen=True, slots=True)
class GpuState:
    """The state of a GPU. None: the driver does not tell, such as a GB10's memory clock."""

    name: str
    driver: str
    pstate: str
    sm_mhz: float | None = None
    max_sm_mhz: float | None = None
    mem_mhz: float | None = None
    watts: float | None = None
    limit_watts: float | None = None
    default_watts: float | None = None
    celsius: float | None = None
    held_back: int = 0  # bits of HELD_BACK

    @property
    def reasons(self) -> list[str]:
        return [text for bit, text in HELD_BACK.items() if self.held_back & bit]


def read_gpus(meanwhile: Callable[[], object] | None = None, gpu: str = "") -> tuple[list[GpuState], str]:
    """Return all GPUs of the driver, or the one with this UUID, or why nvidia-smi cannot be asked. meanwhile: work
    repeated on the GPU until the answer comes, because the clocks of an idle GPU say nothing."""
    rows, problem = ask(FIELDS, gpu, meanwhile) if meanwhile else ask(FIELDS, gpu)
    return [state(row) for row in rows], problem


def count_others(own: int, gpu: str = "") -> int:
    """Count the processes that use the GPU with this UUID, except 'own'; 0 if the driver does not tell."""
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader", *(["-i", gpu] if gpu else [])]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return len({line.strip() for line in told.splitlines() if line.strip().isdecimal()} - {str(own)})


def state(row: Sequence[str]) -> GpuState:
    """Parse FIELDS as nvidia-smi prints them."""
    name, driver, pstate, *numbers, reasons = row
    told = zip(NUMBERS, map(_number, numbers), strict=True)
    return GpuState(name, driver, pstate, **dict(told), held_back=held_back(reasons) or 0)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]", "[Not Supported]"
        return None


def judge_gpu(state: GpuState, others: int = 0) -> list[Finding]:
    """others: number of other processes that use the GPU."""
    found = [Finding(GPU, "GPU", f"{state.name}, driver {state.driver}"), *_driver(state), _clocks(state)]
    if state.limit_watts and state.default_watts and state.limit_watts < 0.98 * state.default_watts:
        value = f"{state.limit_watts:.0f} W, and {state.default_watts:.0f} W by default"
        advice = f"`sudo nvidia-smi -pl {state.default_watts:.0f}` lifts it, if nobody set it on purpose"
        found.append(Finding(GPU, "power limit", value, Status.CHANGE, advice))
    if state.celsius and state.celsius >= HOT_C:
        advice = "see to its cooling: clocks fall from here on"
        found.append(Finding(GPU, "temperature", f"{state.celsius:.0f} degrees C", Status.CHANGE, advice))
    if others:
        many = "one other process uses" if others == 1 else f"{others} other processes use"
        advice = "what is measured here is lower than the GPU could do: stop them and look again"
        found.append(Finding(GPU, "others", f"{many} the GPU", Status.NOTE, advice))
    return found


def _driver(state: GpuState) -> list[Finding]:
    series = int(state.driver.split(".")[0]) if state.driver.split(".")[0].isdecimal() else 0
    for part, least in NEW_DRIVER.items():
        if part in state.name and 0 < series < least:
            value = f"{state.driver}; a {part} needs {least} or later"
            return [Finding(GPU, "driver", value, Status.CHANGE, f"update the driver to {least} or later")]
    return []


def _clocks(state: GpuState) -> Finding:
    shown = [f"{state.sm_mhz:.0f} MHz" if state.sm_mhz else "the clock is not told"]
    shown += [f"of {state.max_sm_mhz:.0f}"] * bool(state.max_sm_mhz)
    value = " ".join(shown) + f" under load, {state.pstate}"
    value += f", {state.watts:.0f} W" if state.watts else ""
    value += f" of {state.limit_watts:.0f}" if state.watts and state.limit_watts else ""
    by = " and ".join(state.reasons)
    is_low = state.sm_mhz and state.max_sm_mhz and state.sm_mhz < LEAST_CLOCK * state.max_sm_mhz
    if not is_low:
        return Finding(GPU, "clocks", value + (f"; held back by {by}" if by else ""))
    if state.sm_mhz and state.sm_mhz < STUCK_MHZ and not by:
        return Finding(GPU, "clocks", f"{value}: stuck in a low-power state", Status.CHANGE, unstick(state.name))
    advice = f"held back by {by}: see to it" if by else "look at `nvidia-smi -q -d CLOCK,PERFORMANCE` while it works"
    return Finding(GPU, "clocks", value, Status.CHANGE, advice)


def unstick(name: str) -> str:
    """Say how to leave a low-power state that the driver does not name."""
    if "GB10" in name:
        return (
            "pull the power supply's plug for a minute, at the wall and at the machine: a USB-PD negotiation that "
            "failed leaves a GB10 at 500 to 850 MHz, and the clocks shown may be normal"
        )
    return "reboot; look at `nvidia-smi -q -d PERFORMANCE,POWER` while it works, and at the power cables"


# ---- memory and disk
#
# Where CPU and GPU share one memory, the system's number of free bytes counts, as in the engine's own plan
# (engine/machine.py). CUDA's leaves out the page cache, which is most of the memory after a large file has been read.

MEMORY = "memory and disk"
GIB, GB = 2**30, 10**9
LEAST_SHARE = 0.5  # of the memory should be available
LEAST_BYTES = 2 * GIB  # that should be available on any machine
LEAST_DISK = 1 * GB  # for compiled kernels, measured tiles and the embedded model
SOME_DISK = 20 * GB  # less does not hold one model of 8B parameters in 16 bits
LATE_S = 60  # seconds after which a killed server's memory is free again on a machine with one memory


@dataclass(frozen=True, slots=True)
class Memory:
    total: int  # bytes
    available: int  # without swapping; what the page cache would give is counted
    swap_used: int = 0
    limit: int = 0  # of the control group; 0: none


@dataclass(frozen=True, slots=True)
class GpuMemory:
    total: int
    driver_free: int  # as CUDA reports it
    unified: bool


def read_memory() -> Memory:
    found = hardware.meminfo()
    available = found.get("MemAvailable", 0)
    swap = found.get("SwapTotal", 0) - found.get("SwapFree", 0)
    return Memory(found.get("MemTotal", available), available, swap, _limit())


def _limit() -> int:
    try:
        return int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):  # no control group, or "max"
        return 0


def judge_memory(memory: Memory, gpu: GpuMemory | None) -> list[Finding]:
    found = []
    if gpu and gpu.unified:
        found.append(_unified(memory, gpu))
    else:
        found.append(_system(memory))
        if gpu:
            found.append(_own(gpu))
    if memory.swap_used > GIB:
        advice = "stop what fills the memory: weights that are swapped out are read from the disk in every step"
        value = f"{_gib(memory.swap_used)} GiB are swapped out"
        status = Status.CHANGE if memory.available < LEAST_SHARE * memory.total else Status.NOTE
        found.append(Finding(MEMORY, "swap", value, status, advice))
    if memory.limit and memory.limit < memory.total:
        value = f"the control group allows {_gib(memory.limit)} of {_gib(memory.total)} GiB"
        value += "; the GPU driver's memory is not held to it" if gpu and gpu.unified else ""
        found.append(Finding(MEMORY, "limit", value, Status.NOTE))
    return found


def _unified(memory: Memory, gpu: GpuMemory) -> Finding:
    available, total = _gib(memory.available), _gib(memory.total)
    value = (
        f"{available} of {total} GiB are available to CPU and GPU together (the system's number, which the engine "
        f"plans with; CUDA reports {_gib(gpu.driver_free)} GiB free, without the page cache)"
    )
    if memory.available >= LEAST_SHARE * memory.total:
        return Finding(MEMORY, "unified memory", value)
    advice = (
        f"other programs hold {_gib(memory.total - memory.available)} GiB: stop other servers and desktops (a killed "
        f"server's memory comes back after up to {LATE_S} s), then look again with `free -g`"
    )
    return Finding(MEMORY, "unified memory", value, Status.CHANGE, advice)


def _system(memory: Memory) -> Finding:
    value = f"{_gib(memory.available)} of {_gib(memory.total)} GiB are available"
    if memory.available < LEAST_BYTES:
        advice = "stop other programs: the engine plans with what is available, and this holds the smallest model only"
        return Finding(MEMORY, "system memory", value, Status.CHANGE, advice)
    if memory.available < LEAST_SHARE * memory.total:
        advice = "less than half of the memory is available: other programs hold the rest, and the K/V cache is smaller"
        return Finding(MEMORY, "system memory", value, Status.NOTE, advice)
    return Finding(MEMORY, "system memory", value)


def _own(gpu: GpuMemory) -> Finding:
    value = f"{_gib(gpu.driver_free)} of {_gib(gpu.total)} GiB of the GPU are free"
    if gpu.driver_free >= LEAST_SHARE * gpu.total:
        return Finding(MEMORY, "GPU memory", value)
    advice = "other processes hold GPU memory: `nvidia-smi` lists them; stop those that are not needed"
    return Finding(MEMORY, "GPU memory", value, Status.CHANGE, advice)


# ---- disk


def read_disk() -> tuple[int, bool]:
    """Return the free bytes of the cache folder's disk, and whether the folder is writable. Creates nothing."""
    folder = cache_dir()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(there).free, os.access(there, os.W_OK | os.X_OK) and there.is_dir()


def judge_disk(free: int, writable: bool) -> Finding:
    value = f"{free / GB:.0f} GB are free for {cache_dir()}"
    if not writable:
        advice = "set SPARKDRAFT_CACHE to a folder that can be written to: kernels are compiled anew at every start"
        return Finding(MEMORY, "disk", f"{cache_dir()} cannot be written to", Status.CHANGE, advice)
    if free < LEAST_DISK:
        advice = "free some, or set SPARKDRAFT_CACHE to a folder on another disk: compiled kernels could not be kept"
        return Finding(MEMORY, "disk", value, Status.CHANGE, advice)
    if free < SOME_DISK:
        return Finding(MEMORY, "disk", value, Status.NOTE, "a model of 8B parameters in 16 bits takes 16 GB")
    return Finding(MEMORY, "disk", value)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"


# ---- memory bandwidth, which limits the speed of decoding


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes per second."""

    gemv: float  # a matrix times a vector
    copy: float  # the better of a copy and a sum

    @property
    def best(self) -> float:
        return max(self.gemv, self.copy)


LEAST_OF_PEAK = 0.6  # of what the memory's clock and width give, where no file describes a GPU
LEAST_CPU = 4e9  # bytes per second that any machine with memory of its own reads
LEAST_GEMV = 0.7  # of a copy: a matrix that is read slower is not read as it should be


def judge_bandwidth(measured: Measured, name: str, known: Machine | None, peak: float = 0.0, busy: str = "") -> Finding:
    """known: the file that describes the machine. peak: bandwidth by the memory's clock and width; 0: unknown. busy:
    why the measurement may be too low."""
    value = f"{measured.gemv / 1e9:.1f} GB/s by a matrix times a vector, {measured.copy / 1e9:.1f} by a copy"
    is_gpu = bool(known and known.hardware.device == "cuda") or bool(peak)
    if known and known.slow_below:
        least, expected = known.slow_below, f"{known.title} gives {known.rates.bandwidth / 1e9:.0f}"
    elif peak:
        least, expected = LEAST_OF_PEAK * peak, f"its memory is made for {peak / 1e9:.0f}"
    else:
        least, expected = LEAST_CPU, f"any machine gives more than {LEAST_CPU / 1e9:.0f}"
    value += f"; {expected}"
    part = GPU if is_gpu else CPU
    if measured.best >= least:
        return Finding(part, "memory bandwidth", value)
    if busy:
        advice = f"{busy}: look again when it is idle"
        return Finding(part, "memory bandwidth", value, Status.NOTE, advice, "measured now")
    slow = "stuck in a low-power state? " if is_gpu else ""
    advice = slow + (
        unstick(name) if is_gpu else "another program or the host takes the memory's time: look with `top`"
    )
    return Finding(part, "memory bandwidth", f"{value}: too slow", Status.CHANGE, advice, "measured now")
