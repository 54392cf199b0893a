"""The machine as numbers. A GPU's are read from its driver in engine/machine.py; a CPU's are read here.

No torch, so that plans can be made and tested for other machines than this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sparkdraft.util.this_machine import usable_cores

MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Hardware:
    device: str  # "cpu" or "cuda"
    name: str
    cores: int  # CPU cores that this process may use
    free_bytes: int  # of the memory that weights and KV cache will use
    capability: tuple[int, int] = (0, 0)  # of a GPU


def available_memory() -> int | None:
    """Bytes available without swapping, including the page cache."""
    return meminfo().get("MemAvailable")


def free_memory() -> int:
    """Bytes that this process may still take, within its control group."""
    available = available_memory() or 8 << 30
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):  # no control group, or "max"
        return available
    return min(available, limit - used)


def cpu() -> Hardware:
    return Hardware("cpu", _cpu_name(), usable_cores(), free_memory())


def meminfo() -> dict[str, int]:
    """/proc/meminfo, in bytes by name; empty if it cannot be read."""
    found = {}
    try:
        for line in MEMINFO.read_text().splitlines():
            name, _, rest = line.partition(":")
            found[name] = int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return found


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "CPU part")):
                return line.split(":")[1].strip()
    except OSError:
        pass
    return "CPU"
