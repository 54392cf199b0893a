"""Memory, disk, and the time that a control group gives.

Where CPU and GPU share one memory, free memory is the system's number: CUDA's does not count the page cache, which is
most of the memory after a large file has been read. The engine plans with the same number (engine/machine.py).
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from sparkdraft.operate.doctor.finding import Finding, Status
from sparkdraft.plan import hardware
from sparkdraft.weights.hub import cache_dir

PART = "memory and disk"
GIB, GB = 2**30, 10**9
LEAST_SHARE = 0.5  # of the memory should be available
LEAST_BYTES = 2 * GIB  # that should be available on any machine
LEAST_DISK = 1 * GB  # for compiled kernels, recordings of tiles and the embedded model
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
        found.append(Finding(PART, "swap", value, status, advice))
    if memory.limit and memory.limit < memory.total:
        value = f"the control group allows {_gib(memory.limit)} of {_gib(memory.total)} GiB"
        value += "; the GPU driver's memory is not held to it" if gpu and gpu.unified else ""
        found.append(Finding(PART, "limit", value, Status.NOTE))
    return found


def _unified(memory: Memory, gpu: GpuMemory) -> Finding:
    """One memory for CPU and GPU."""
    available, total = _gib(memory.available), _gib(memory.total)
    value = (
        f"{available} of {total} GiB are available to CPU and GPU together (the system's number, which the engine "
        f"plans with; CUDA reports {_gib(gpu.driver_free)} GiB free, without the page cache)"
    )
    if memory.available >= LEAST_SHARE * memory.total:
        return Finding(PART, "unified memory", value)
    advice = (
        f"other programs hold {_gib(memory.total - memory.available)} GiB: stop other servers and desktops (a killed "
        f"server's memory comes back after up to {LATE_S} s), then look again with `free -g`"
    )
    return Finding(PART, "unified memory", value, Status.CHANGE, advice)


def _system(memory: Memory) -> Finding:
    value = f"{_gib(memory.available)} of {_gib(memory.total)} GiB are available"
    if memory.available < LEAST_BYTES:
        advice = "stop other programs: the engine plans with what is available, and this holds the smallest model only"
        return Finding(PART, "system memory", value, Status.CHANGE, advice)
    if memory.available < LEAST_SHARE * memory.total:
        advice = "less than half of the memory is available: other programs hold the rest, and the K/V cache is smaller"
        return Finding(PART, "system memory", value, Status.NOTE, advice)
    return Finding(PART, "system memory", value)


def _own(gpu: GpuMemory) -> Finding:
    value = f"{_gib(gpu.driver_free)} of {_gib(gpu.total)} GiB of the GPU are free"
    if gpu.driver_free >= LEAST_SHARE * gpu.total:
        return Finding(PART, "GPU memory", value)
    advice = "other processes hold GPU memory: `nvidia-smi` lists them; stop those that are not needed"
    return Finding(PART, "GPU memory", value, Status.CHANGE, advice)


# ---- disk


def read_disk() -> tuple[int, bool]:
    """Free bytes of the cache folder's disk, and whether the folder can be written to. Creates nothing."""
    folder = cache_dir()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(there).free, os.access(there, os.W_OK | os.X_OK) and there.is_dir()


def judge_disk(free: int, writable: bool) -> Finding:
    value = f"{free / GB:.0f} GB are free for {cache_dir()}"
    if not writable:
        advice = "set SPARKDRAFT_CACHE to a folder that can be written to: kernels are compiled anew at every start"
        return Finding(PART, "disk", f"{cache_dir()} cannot be written to", Status.CHANGE, advice)
    if free < LEAST_DISK:
        advice = "free some, or set SPARKDRAFT_CACHE to a folder on another disk: compiled kernels could not be kept"
        return Finding(PART, "disk", value, Status.CHANGE, advice)
    if free < SOME_DISK:
        return Finding(PART, "disk", value, Status.NOTE, "a model of 8B parameters in 16 bits takes 16 GB")
    return Finding(PART, "disk", value)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"
