"""What `bench report` measures: start-up, speed by class, streams and context, plain and drafted, and KV formats.

Every figure has a ceiling beside it: the bytes that a step must read over the memory bandwidth measured on the same
machine (operate/bench/offline.py). The measuring itself is that of the other benchmarks. What the time was not
enough for is listed, never left out in silence. report_page.py makes pages of it, cli/bench_report.py loads models.
"""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import sparkdraft
from sparkdraft import __version__
from sparkdraft.core import AUTO
from sparkdraft.operate.bench.accept import ALL
from sparkdraft.operate.bench.decode import Speed
from sparkdraft.operate.bench.depth import Cell, DepthBench
from sparkdraft.operate.bench.kv import Memory
from sparkdraft.operate.bench.offline import Bench, Load
from sparkdraft.plan.hardware import Hardware, available_memory

Prompts = dict[str, list[list[int]]]  # class -> ids of its prompts


class Budget:
    """Time that may be spent. What is begun is finished, so a kind of work is begun if it fits as it took before."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._longest: dict[str, float] = {}
        self.left_out: list[str] = []

    @property
    def remaining(self) -> float:
        return self._end - time.monotonic()

    def allows(self, kind: str, what: str) -> bool:
        """what: is listed if the time is not enough."""
        fits = self.remaining > self._longest.get(kind, 0.0)
        if not fits:
            self.left_out.append(f"{what}: the time ran out (--minutes)")
        return fits

    @contextmanager
    def spent_on(self, kind: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self._longest[kind] = max(self._longest.get(kind, 0.0), time.monotonic() - begin)


@dataclass(frozen=True, slots=True)
class Start:
    seconds: float  # from the command to the first token
    peak_mb: int
    floor_seconds: float  # reading the weights once

    @property
    def share(self) -> float:
        return self.floor_seconds / self.seconds


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second of all streams together, and what the memory's bandwidth allows for such steps."""

    tok_s: float
    ceiling: float

    @property
    def share(self) -> float:
        return self.tok_s / self.ceiling


@dataclass(frozen=True, slots=True)
class SpeedRow:
    kind: str  # class of prompts
    context: int  # tokens before each prompt
    streams: int
    plain: Rate
    drafted: Rate | None  # None: nothing drafts
    length: float  # tokens per drafted step and stream
    same_text: int
    prompts: int

    @property
    def ratio(self) -> float | None:
        return self.drafted.tok_s / self.plain.tok_s if self.drafted else None


@dataclass(frozen=True, slots=True)
class KvRow:
    name: str
    memory: Memory | None = None
    speeds: list[Speed] = field(default_factory=list)
    problem: str = ""  # why it does not run here


@dataclass(slots=True)
class Report:
    environment: dict[str, str]
    start: Start | None = None
    speeds: list[SpeedRow] = field(default_factory=list)
    kv: list[KvRow] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what ran differently from what was asked

    def as_dict(self) -> dict[str, Any]:
        return {"bench": "report"} | _rounded(asdict(self))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


# ---- where it was measured


def environment(hardware: Hardware, command: str) -> dict[str, str]:
    """Whatever a reader needs to measure the same again."""
    memory = available_memory()
    found = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{hardware.name}, {hardware.cores} usable cores, {platform.machine()}, {platform.system()}",
        "memory": f"{memory / 2**30:.1f} GiB available" if memory else "unknown",
        "sparkdraft": f"{__version__}, commit {commit()}",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, Triton {_package('triton')}",
        "command": command,
    }
    if hardware.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        found["GPU"] = f"{hardware.name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, CUDA {torch.version.cuda}"
    return found


def commit() -> str:
    """Of the source tree that runs, with a mark if files have changed since."""
    folder = Path(sparkdraft.__file__).parent
    try:
        asked = [
            subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True)
            for words in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--", str(folder.parent)))
        ]
    except (OSError, subprocess.SubprocessError):
        return "unknown (not a git checkout)"
    return asked[0].stdout.strip() + (" with changes" if asked[1].stdout.strip() else "")


def _package(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


# ---- speed


def speed_row(
    bench: Bench, depths: DepthBench, kind: str, ids: list[list[int]], context: int, streams: int
) -> SpeedRow:
    """One class at one number of streams: plain, then as the engine drafts."""
    asked = [0, AUTO] if bench.engine.drafting.max_depth else [0]
    cells = {
        cell.depth: cell
        for cell in depths.sweep({kind: ids}, [streams], asked, lambda done, total: None)
        if cell.kind != ALL
    }
    load = Load(streams, round(sum(map(len, ids)) / len(ids)), depths.output_len)
    plain, auto = cells[0], cells.get(AUTO)
    drafted = _rate(bench, load, auto) if auto else None
    length, alike = (auto.length, auto.same_text) if auto else (1.0, plain.prompts)
    return SpeedRow(kind, context, streams, _rate(bench, load, plain), drafted, length, alike, plain.prompts)


def _rate(bench: Bench, load: Load, cell: Cell) -> Rate:
    drafted = cell.drafter_steps / max(cell.steps * cell.streams, 1)
    depth = cell.drafter_drafts / max(cell.drafter_steps, 1)
    floor = sum(bench.floor_bytes(load, drafted, cell.rows - 1, depth).values()) / bench.ceilings.bandwidth
    return Rate(cell.tok_s, load.streams * cell.length / floor)
