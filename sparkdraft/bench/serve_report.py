"""What `bench serve` measured, for people: a markdown table, a JSON document and plots.

The table is made to be pasted into an issue as it is, with what was measured and how in the lines above it. Nothing is
worked out here; the figures are bench/serve's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sparkdraft.bench.serve import Result

NO_PLOTS = "matplotlib is not installed, so there will be no plots; `pip install matplotlib` adds them"
DRAFTS_FROM = {
    "responses": "Acceptance is what the responses say.",
    "metrics": "Acceptance is what the server's /metrics counted meanwhile, all its clients together.",
    None: "The server tells nothing of drafts.",
}
Row = dict[str, Any]


def can_plot() -> bool:
    return find_spec("matplotlib") is not None


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
    """The table, under what was measured and how."""
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
    tokens = f"Up to {report['output_len']} tokens an answer{end}, temperature {report['temperature']:g}; "
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
    """serve.json, serve.md and, where matplotlib is, the plots; returns what was written."""
    files = [folder / "serve.json", folder / "serve.md"]
    files[0].write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    files[1].write_text(markdown(report) + "\n", encoding="utf-8")
    return files + (_plots(report, folder) if can_plot() else [])


def _plots(report: dict[str, Any], folder: Path) -> list[Path]:
    rows = report["rows"]
    files = [
        _by_streams(rows, folder / "speed.png", "tokens a second, all streams together", lambda row: row["tok_s"]),
        _by_streams(rows, folder / "ttft.png", "ms to the first token, p50", lambda row: _p50(row["ttft_ms"])),
        _by_streams(rows, folder / "tpot.png", "ms for each token after it, p50", lambda row: _p50(row["tpot_ms"])),
    ]
    if any(row["per_position"] for row in rows):
        files.append(_by_position(rows, folder / "acceptance.png"))
    return files


def _p50(values: dict[str, float] | None) -> float | None:
    return values["p50"] if values else None


def _by_streams(rows: list[Row], path: Path, label: str, value: Callable[[Row], float | None]) -> Path:
    """One line a class over the number of streams, the plain run dashed in the same colour."""
    figure, axes = _axes()
    for i, name in enumerate(dict.fromkeys(row["class"] for row in rows)):
        mine = [row for row in rows if row["class"] == name]
        for key, style in (("", "-"), ("plain", "--")):
            points = [(row["streams"], value(row[key] if key else row)) for row in mine if not key or row.get(key)]
            points = sorted((n, found) for n, found in points if found is not None)
            if points:
                xs, ys = zip(*points, strict=True)
                axes.plot(xs, ys, f"o{style}", color=f"C{i}", label=name if not key else None, markersize=4)
    streams = sorted({row["streams"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(streams, [str(n) for n in streams])
    axes.set_xlabel(
        "streams at once" + (" (dashed: without drafting)" if any(row.get("plain") for row in rows) else "")
    )
    axes.set_ylim(bottom=0)
    return _save(figure, axes, path, label)


def _by_position(rows: list[Row], path: Path) -> Path:
    """One line a class at the fewest streams: the share of drafting steps that accepted each position."""
    figure, axes = _axes()
    fewest = min(row["streams"] for row in rows)
    for row in rows:
        if row["streams"] == fewest and row["per_position"]:
            axes.plot(
                range(1, len(row["per_position"]) + 1), row["per_position"], "o-", label=row["class"], markersize=4
            )
    axes.set_xlabel(f"position of the draft, at {fewest} {'stream' if fewest == 1 else 'streams'}")
    axes.set_ylim(0, 1)
    return _save(figure, axes, path, "share of the drafting steps that accepted it")


def _axes() -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # the figure alone: no window, no global state

    figure = Figure(figsize=(8, 5), layout="constrained")
    return figure, figure.add_subplot()


def _save(figure: Any, axes: Any, path: Path, label: str) -> Path:
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    return path
