"""Pages of a report that can be posted: HTML that needs no other file, and Markdown with its charts beside it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from sparkdraft.operate.bench.report import KvRow, Rate, Report, SpeedRow
from sparkdraft.util.plot import Line, Panel, svg

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
    cells = [row.kind, str(row.context), str(row.streams), *_rate(row.plain)]
    if drafts and row.drafted and row.ratio:
        cells += [*_rate(row.drafted), f"{row.ratio:.2f}", f"{row.length:.2f}", f"{row.same_text} of {row.prompts}"]
    return cells


def _rate(rate: Rate) -> tuple[str, str]:
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
        cells += _rate(Rate(speed.decode_tok_s, speed.decode_tok_s / speed.share))
    return cells + ["-"] * (4 + 2 * loads - len(cells))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _listed(title: str, lines: Sequence[str]) -> list[str]:
    return ["", f"## {title}", "", *(f"- {line}" for line in lines)] if lines else []


def _cells(kind: str, cells: Sequence[str]) -> str:
    return "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in cells)


def _value(name: str, text: str) -> str:
    return f"<code>{escape(text)}</code>" if name == "command" else escape(text)
