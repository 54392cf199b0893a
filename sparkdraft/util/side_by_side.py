"""Draws texts next to each other as an animated SVG in which every run of letters appears when it was written.

A browser plays the picture in a loop, slowed down by a factor that the picture states. A program that plays no
animations shows the finished texts. Coloured runs hold several tokens that one step wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

COLUMNS = 54  # letters per line
LETTER, LINE = 7.0, 17  # pixels of a letter and of a line
PANEL = int(COLUMNS * LETTER) + 24
TOP = 62  # where the texts begin
REST = 3.0  # seconds that the finished texts stay before the loop begins again
PLAIN, DRAFTED = "#57606a", "#0969da"


@dataclass(frozen=True, slots=True)
class Run:
    """The text that one step wrote."""

    seconds: float  # since the first step of its text
    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Writing:
    title: str
    note: str
    runs: list[Run]


def side_by_side(writings: Sequence[Writing], seconds: float = 8.0) -> str:
    """The SVG. seconds: how long the slowest text takes to appear."""
    longest = max((writing.runs[-1].seconds for writing in writings if writing.runs), default=0.0) or 1.0
    slower = max(seconds / longest, 1.0)
    panels = [list(_placed(writing.runs)) for writing in writings]
    lines = max((line for panel in panels for line, _, _, _ in panel), default=0) + 1
    width, height = PANEL * len(writings), TOP + lines * LINE + 12
    body = [_clock(longest * slower)]
    for i, (writing, placed) in enumerate(zip(writings, panels, strict=True)):
        body.append(f'<g transform="translate({i * PANEL + 12} 0)">')
        body.append(f'<text y="24" font-weight="bold" font-size="14">{escape(writing.title)}</text>')
        body.append(f'<text y="44" fill="{PLAIN}">{escape(writing.note)}</text>')
        body += [_letters(line, column, text, run, run.seconds * slower) for line, column, text, run in placed]
        body.append("</g>")
    body.append(
        f'<text x="{width - 12}" y="44" text-anchor="end" fill="{PLAIN}">shown {slower:.0f} times slower</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        'font-family="ui-monospace, monospace" font-size="11.5" style="white-space:pre">'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(body)}</svg>\n'
    )


def _clock(seconds: float) -> str:
    """The animation whose beginnings all others count from."""
    return (
        f'<rect width="0" height="0"><animate id="loop" attributeName="x" from="0" to="0" '
        f'begin="0s;loop.end" dur="{seconds + REST:.2f}s"/></rect>'
    )


def _letters(line: int, column: int, text: str, run: Run, delay: float) -> str:
    place = f'x="{column * LETTER:.1f}" y="{TOP + (line + 1) * LINE}" textLength="{len(text) * LETTER:.1f}"'
    colour = DRAFTED if run.tokens > 1 else "#1f2328"
    hidden = f'<set attributeName="visibility" to="hidden" begin="loop.begin" end="loop.begin+{delay:.3f}s"/>'
    return f'<text {place} fill="{colour}">{escape(text)}{hidden if delay else ""}</text>'


def _placed(runs: Sequence[Run]) -> Iterator[tuple[int, int, str, Run]]:
    """(line, column, letters, run): each run in parts that lie on one line, without the spaces around them."""
    text = "".join(run.text for run in runs)
    places, begin = list(_places(text)), 0
    for run in runs:
        end = begin + len(run.text)
        for line, letters in groupby(range(begin, end), key=lambda i: places[i][0]):
            first, *rest = letters
            part = text[first : first + len(rest) + 1]
            if part.strip():
                yield line, places[first][1] + len(part) - len(part.lstrip()), part.strip(), run
        begin = end


def _places(text: str) -> Iterator[tuple[int, int]]:
    """The line and column of each letter, with lines broken between words where they are full."""
    line = 0
    for paragraph in text.splitlines(keepends=True):
        while len(paragraph.rstrip()) > COLUMNS:
            cut = paragraph.rfind(" ", 1, COLUMNS + 1) + 1 or COLUMNS
            yield from ((line, column) for column in range(cut))
            line, paragraph = line + 1, paragraph[cut:]
        yield from ((line, column) for column in range(len(paragraph)))
        line += 1
