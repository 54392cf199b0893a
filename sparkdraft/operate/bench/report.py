"""`bench report`: start-up, speed by class, streams and context, plain and drafted, and KV formats, as pages to post.

Every figure stands beside its ceiling: the bytes that a step must read over the memory bandwidth measured on the same
machine (offline.py). What the time did not suffice for is listed.
"""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

import sparkdraft
from sparkdraft import __version__
from sparkdraft.core import AUTO
from sparkdraft.operate.bench.accept import ALL
from sparkdraft.operate.bench.depth import Cell, DepthBench
from sparkdraft.operate.bench.formats import Memory
from sparkdraft.operate.bench.offline import Bench, Load, Speed
from sparkdraft.plan.hardware import Hardware, available_memory
from sparkdraft.util.plot import Line, Panel, svg

Prompts = dict[str, list[list[int]]]  # class -> ids of its prompts


class Budget:
    """The time that may be spent. Work that has begun is finished, so a kind of work begins only if it fits at its last
    duration."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._longest: dict[str, float] = {}
        self.left_out: list[str] = []

    @property
    def remaining(self) -> float:
        return self._end - time.monotonic()

    def allows(self, kind: str, what: str) -> bool:
        """what: listed in the report if the time does not suffice."""
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
    """Tokens per second of all streams together, and the ceiling that the memory's bandwidth sets."""

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
    """Return what a reader needs to repeat the measurement."""
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
    """The commit of the running source tree, with a mark if files have changed since."""
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
    """Measure one class at one number of streams: plain, then as the engine drafts."""
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


# ---- HTML that needs no other file, and Markdown with its charts beside it

STYLE = """body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0}td,th{border:1px solid #ccc;padding:.25em .6em;text-align:right}
td:first-child,th:first-child{text-align:left}code{background:#f4f4f4;padding:.1em .3em}svg{max-width:100%}"""
CEILING = (
    "The ceiling is what the memory's measured bandwidth allows: a step must read the weights and the keys and values "
    "of every stream once, and with drafts those of the drafter. In brackets is the share of it that was reached."
)


class Table(NamedTuple):
    title: str
    note: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables(report: Report) -> list[Table]:
    return [table for table in (_start(report), _speeds(report), _kv(report.kv)) if table.rows]


def markdown(report: Report, chart: str = "") -> str:
    """chart: the name of a file with the charts."""
    lines = [f"# {_title(report)}", ""]
    lines += [f"- {name}: {'`' + text + '`' if name == 'command' else text}" for name, text in _facts(report)]
    for title, note, heads, rows in tables(report):
        lines += ["", f"## {title}", "", note, "", _line(heads), _line(["---"] + ["---:"] * (len(heads) - 1))]
        lines += [_line(row) for row in rows]
    lines += ["", f"![charts]({chart})"] if chart else []
    return "\n".join([*lines, *_listed("Not measured", report.left_out), *_listed("Notes", report.notes), ""])


def html(report: Report) -> str:
    parts = [f"<h1>{escape(_title(report))}</h1><table>"]
    parts += [f"<tr><th>{escape(name)}</th><td>{_value(name, text)}</td></tr>" for name, text in _facts(report)]
    parts.append("</table>")
    for title, note, heads, rows in tables(report):
        parts.append(f"<h2>{escape(title)}</h2><p>{escape(note)}</p><table><tr>{_cells('th', heads)}</tr>")
        parts += [f"<tr>{_cells('td', row)}</tr>" for row in rows]
        parts.append("</table>")
    charts = panels(report)
    parts += [svg(charts)] if charts else []
    for title, lines in (("Not measured", report.left_out), ("Notes", report.notes)):
        if lines:
            parts.append(f"<h2>{title}</h2><ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>")
    head = f"<meta charset='utf-8'><title>{escape(_title(report))}</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def panels(report: Report) -> list[Panel]:
    made = []
    for context in dict.fromkeys(row.context for row in report.speeds):
        rows = [row for row in report.speeds if row.context == context]
        lines = []
        for kind in dict.fromkeys(row.kind for row in rows):
            mine = [row for row in rows if row.kind == kind]
            lines.append(Line(kind, [(r.streams, (r.drafted or r.plain).tok_s) for r in mine]))
            if mine[0].drafted:
                lines.append(Line(kind, [(r.streams, r.plain.tok_s) for r in mine], dashed=True))
        first = [row for row in rows if row.kind == rows[0].kind]
        lines.append(Line("ceiling, plain", [(r.streams, r.plain.ceiling) for r in first], thick=True))
        title, label = f"decode speed, {context} tokens before the prompt", "streams at once (dashed: without drafts)"
        made.append(Panel(title, lines, label, "tokens per second", y_from_zero=True, x_doubling=True))
    formats = [row for row in report.kv if len(row.speeds) > 1]
    if formats:
        lines = [Line(row.name, [(s.context, s.decode_tok_s) for s in row.speeds]) for row in formats]
        made.append(Panel("KV formats, one stream", lines, "tokens of context", "tokens per second", y_from_zero=True))
    return made


# ---- the parts


def _title(report: Report) -> str:
    return f"{report.environment['model']} on {report.environment['machine'].split(',')[0]}"


def _facts(report: Report) -> list[tuple[str, str]]:
    return [(name, text) for name, text in report.environment.items() if text]


def _start(report: Report) -> Table:
    start, heads = report.start, ("", "measured", "ceiling (reached)", "peak memory")
    note = "From the command to the first token, everything included. Its ceiling is reading the weights once."
    rows = []
    if start:
        ceiling = f"{start.floor_seconds:.2f} s ({start.share:.0%})"
        rows = [("first token", f"{start.seconds:.2f} s", ceiling, f"{start.peak_mb} MB")]
    return Table("Start-up", note, heads, rows)


def _speeds(report: Report) -> Table:
    heads = ["class", "context", "streams", "plain tok/s", "ceiling"]
    drafts = any(row.drafted for row in report.speeds)
    heads += ["drafted tok/s", "ceiling", "times plain", "tokens per step", "same text"] if drafts else []
    note = f"Decoding, all streams together. {CEILING}"
    return Table("Speed by class", note, heads, [_speed_row(row, drafts) for row in report.speeds])


def _speed_row(row: SpeedRow, drafts: bool) -> list[str]:
    cells = [row.kind, str(row.context), str(row.streams), *_with_ceiling(row.plain)]
    if drafts and row.drafted and row.ratio:
        cells += [
            *_with_ceiling(row.drafted),
            f"{row.ratio:.2f}",
            f"{row.length:.2f}",
            f"{row.same_text} of {row.prompts}",
        ]
    return cells


def _with_ceiling(rate: Rate) -> tuple[str, str]:
    return f"{rate.tok_s:.1f}", f"{rate.ceiling:.1f} ({rate.share:.0%})"


def _kv(rows: Sequence[KvRow]) -> Table:
    shown = next((row.speeds for row in rows if row.speeds), [])
    heads = ["format", "bytes per token", "tokens that fit", "of exact"]
    heads += [each for s in shown for each in (f"tok/s at {s.context}", "ceiling")]
    note = (
        "How keys and values are kept, one stream without drafts. kNvM: TurboQuant, N bits per number of a key, M of a "
    )
    return Table("KV formats", note + f"value. {CEILING}", heads, [_kv_row(row, len(shown)) for row in rows])


def _kv_row(row: KvRow, loads: int) -> list[str]:
    if row.problem:
        return [row.name, f"does not run here: {row.problem}", *[""] * (2 + 2 * loads)]
    memory = row.memory
    cells = [row.name, *["-"] * 3]
    if memory:
        cells[1:] = str(memory.bytes_per_token), str(memory.tokens_that_fit), f"{memory.of_exact:.2f}"
    for speed in row.speeds:
        cells += _with_ceiling(Rate(speed.decode_tok_s, speed.decode_tok_s / speed.share))
    return cells + ["-"] * (4 + 2 * loads - len(cells))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _listed(title: str, lines: Sequence[str]) -> list[str]:
    return ["", f"## {title}", "", *(f"- {line}" for line in lines)] if lines else []


def _cells(kind: str, cells: Sequence[str]) -> str:
    return "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in cells)


def _value(name: str, text: str) -> str:
    return f"<code>{escape(text)}</code>" if name == "command" else escape(text)
