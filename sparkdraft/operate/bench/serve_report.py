"""The results of `bench serve` for people: a markdown table, a JSON document and a page of charts.

The table can be pasted into an issue as it is; the lines above it say what was measured and how. Nothing is computed
here; the figures come from bench/serve.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparkdraft.operate.bench.serve import Result
from sparkdraft.util.plot import Line, Panel, svg

DRAFTS_FROM = {
    "responses": "Acceptance is taken from the responses.",
    "metrics": "Acceptance is taken from the server's /metrics, which counts all its clients together.",
    None: "The server says nothing about drafts.",
}
Row = dict[str, Any]


def summary(result: Result) -> dict[str, Any]:
    settings = result.settings
    return {
        "bench": "serve",
        "url": settings.url,
        "model": result.model,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "output_len": settings.output_len,
        "temperature": settings.temperature,
        "ignore_eos": settings.ignore_eos,
        "tokens_from": "chunks" if result.counted else "usage",
        "prompts_sent_before": True,
        "acceptance_from": result.source,
        "can_switch": result.can_switch,
        "rows": [cell.as_dict() for cell in result.with_totals()],
    }


def markdown(report: dict[str, Any]) -> str:
    """The table, below a description of what was measured and how."""
    switched = report["can_switch"]
    heads = ["class", "streams", "tok/s", *(["plain tok/s", "speedup"] if switched else [])]
    heads += ["each, p50", "TTFT ms p50 / p95", "TPOT ms p50 / p95"]
    heads += [] if report["acceptance_from"] is None else ["acceptance length", "1st / 2nd / 3rd"]
    heads += [*(["same text"] if switched else []), "errors"]
    lines = [f"**{report['model']}** at {report['url']}, {report['date'][:10]}. {_how(report)}", ""]
    lines += [_line(heads), _line(["---"] + ["---:"] * (len(heads) - 1))]
    return "\n".join(lines + [_line(_row(row, report)) for row in report["rows"]])


def _how(report: dict[str, Any]) -> str:
    end = ", past the model's own end" if report["ignore_eos"] else ""
    tokens = f"Up to {report['output_len']} tokens per answer{end}, temperature {report['temperature']:g}; "
    tokens += (
        "counted by the server" if report["tokens_from"] == "usage" else "counted by pieces of the stream, for want"
    )
    tokens += "" if report["tokens_from"] == "usage" else " of usage: a piece of several tokens counts as one"
    known = "Every prompt was sent once before, so a server that caches prompts knows it"
    return f"{tokens}. {known}. {DRAFTS_FROM[report['acceptance_from']]}"


def _row(row: Row, report: dict[str, Any]) -> list[str]:
    plain = row.get("plain")
    cells = [row["class"], str(row["streams"]), _number(row["tok_s"])]
    if report["can_switch"]:
        cells += [_number(plain["tok_s"] if plain else None), _number(row.get("speedup"), 2)]
    each = row["tok_s_per_request"]
    cells += [_number(each["p50"] if each else None), _pair(row["ttft_ms"], 0), _pair(row["tpot_ms"], 1)]
    if report["acceptance_from"] is not None:
        shares = " / ".join(f"{share:.0%}" for share in row["per_position"][:3])
        cells += [_number(row["acceptance_length"], 2), shares or "-"]
    if report["can_switch"]:
        cells += [f"{row['same_text']} of {row['compared']}" if plain else "-"]
    errors = row["errors"] + (plain["errors"] if plain else 0)
    return [*cells, str(errors)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _pair(values: dict[str, float] | None, digits: int) -> str:
    return f"{values['p50']:.{digits}f} / {values['p95']:.{digits}f}" if values else "-"


def write(report: dict[str, Any], folder: Path) -> list[Path]:
    """serve.json, serve.md and serve.svg; returns what was written."""
    texts = {
        "serve.json": json.dumps(report, indent=1) + "\n",
        "serve.md": markdown(report) + "\n",
        "serve.svg": svg(panels(report["rows"])),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def panels(rows: list[Row]) -> list[Panel]:
    """Speed and times over the number of streams, and acceptance by position if the server reports it."""
    found = [
        _by_streams(rows, "speed", "tokens per second, all streams together", lambda row: row["tok_s"]),
        _by_streams(rows, "time to the first token", "ms, p50", lambda row: _p50(row["ttft_ms"])),
        _by_streams(rows, "time per token after the first", "ms, p50", lambda row: _p50(row["tpot_ms"])),
    ]
    return found + ([_by_position(rows)] if any(row["per_position"] for row in rows) else [])


def _p50(values: dict[str, float] | None) -> float | None:
    return values["p50"] if values else None


def _by_streams(rows: list[Row], title: str, unit: str, value: Callable[[Row], float | None]) -> Panel:
    """One line per class, and a dashed one for its run without drafting."""
    lines = []
    for name in dict.fromkeys(row["class"] for row in rows):
        mine = [row for row in rows if row["class"] == name]
        lines.append(Line(name, _points((row["streams"], value(row)) for row in mine)))
        plain = _points((row["streams"], value(row["plain"])) for row in mine if row.get("plain"))
        lines += [Line(name, plain, dashed=True)] if plain else []
    x_label = "streams at once" + (" (dashed: without drafting)" if any(line.dashed for line in lines) else "")
    return Panel(title, lines, x_label, unit, y_from_zero=True, x_doubling=True)


def _points(found: Iterable[tuple[int, float | None]]) -> list[tuple[float, float]]:
    return sorted((streams, value) for streams, value in found if value is not None)


def _by_position(rows: list[Row]) -> Panel:
    """One line per class at the fewest streams: the share of drafting steps that accepted each position."""
    fewest = min(row["streams"] for row in rows)
    lines = [
        Line(row["class"], [(i + 1, share) for i, share in enumerate(row["per_position"])])
        for row in rows
        if row["streams"] == fewest and row["per_position"]
    ]
    x_label = f"position of the draft, at {fewest} {'stream' if fewest == 1 else 'streams'}"
    return Panel("drafts accepted", lines, x_label, "share of the drafting steps", y_percent=True)
