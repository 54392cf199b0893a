"""What the watchdog reads of the machine: memory that the system can still give, and whether a GPU is held back.

Both are read from the system: where GPU and CPU share one memory, the driver's number of free bytes leaves out what the
page cache would give back. Nothing here is the engine's: a server that swaps may get no answer from its engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sparkdraft.util.nvidia_smi import HELD_BACK, POWER_LIMIT, REASONS, ask, held_back

GIB = 1 << 30
ENOUGH = 64 * GIB  # 6 % of it are somewhat less than 4 GiB


@dataclass(frozen=True, slots=True)
class Memory:
    available: float  # bytes that can be had without swapping
    total: float

    @property
    def level(self) -> float:
        """The share that is available, of the whole or of ENOUGH: a large machine with some GiB left lacks nothing."""
        return self.available / min(self.total, ENOUGH)

    @property
    def said(self) -> str:
        share = self.available / self.total
        return f"{share:.1%} of the memory is available ({self.available / GIB:.1f} GiB)"


def memory_left(root: Path = Path("/")) -> Memory | None:
    """Of the machine or of the control group: what has less left. None where the system does not say."""
    found = []
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        sizes = {name: int(rest.split()[0]) for name, rest in (line.split(":", 1) for line in lines if ":" in line)}
        found.append(Memory(1024 * sizes["MemAvailable"], 1024 * sizes["MemTotal"]))
    except (OSError, KeyError, ValueError, IndexError):
        pass
    try:
        group = root / "sys/fs/cgroup"
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        files = int(stat["inactive_file"]) + int(stat["active_file"])  # which the system would drop
        found.append(Memory(limit - (used - files), limit))
    except (OSError, KeyError, ValueError):
        pass  # no control group, or no limit ("max")
    return min((each for each in found if each.total), key=lambda each: each.level, default=None)


def throttling(gpu: str = "", program: str = "nvidia-smi") -> tuple[list[str], str]:
    """Why the GPU with this UUID is held back, by name; and why that could not be read, or ''. A power limit that is
    reached under full load is no reason. Takes some 50 ms: call it in a thread."""
    rows, problem = ask([REASONS], gpu, program=program)
    masks = [held_back(row[0]) for row in rows]
    if not problem and (not masks or None in masks):
        problem = f"nvidia-smi does not say: {rows[0][0] if rows else 'no GPU'}"
    found = [name for bit, name in HELD_BACK.items() if bit != POWER_LIMIT and any((mask or 0) & bit for mask in masks)]
    return ([], problem) if problem else (found, "")
