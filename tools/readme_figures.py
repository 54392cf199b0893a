"""Draws the README's bars (docs/bars.svg) and writes its table of figures, both from docs/numbers/readme.json.

    python tools/readme_figures.py           writes both
    python tools/readme_figures.py --check   status 1 if one of them is not what it would write

Each entry of the file is one group of bars: machine, work, date, command, and speeds by name. The first speed is ours.
"""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA, PICTURE, README = ROOT / "docs/numbers/readme.json", ROOT / "docs/bars.svg", ROOT / "README.md"
BEGIN, END = "<!-- figures: tools/readme_figures.py -->", "<!-- end of figures -->"
COLOURS = {"drafted": "#0969da", "plain": "#54aeff"}  # ours; other engines are grey
NAMES, LONGEST, BAR, GAP, TITLE = 210, 420, 18, 6, 40  # pixels


def picture(groups: list[dict[str, Any]]) -> str:
    parts, y = [], 8
    for group in groups:
        title = f"{group['work']}, {group['machine']}, tok/s"
        parts.append(f'<text x="8" y="{y + 18}" font-weight="bold">{escape(title)}</text>')
        parts.append(f'<text x="8" y="{y + 34}" fill="#57606a" font-size="11">{escape(group["weights"])}</text>')
        y += TITLE + 2
        most = max(group["tok_s"].values())
        for name, value in group["tok_s"].items():
            colour = next((c for word, c in COLOURS.items() if name.startswith(f"Sparkdraft, {word}")), "#afb8c1")
            width = LONGEST * value / most
            parts.append(f'<text x="{NAMES - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>')
            parts.append(f'<rect x="{NAMES}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>')
            parts.append(f'<text x="{NAMES + width + 6:.1f}" y="{y + 13}">{value:,}</text>')
            y += BAR + GAP
        y += 14
    width = NAMES + LONGEST + 80
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" font-family="sans-serif" '
        f'font-size="12" fill="#1f2328"><rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def table(groups: list[dict[str, Any]]) -> str:
    lines = ["| machine | work | tok/s |", "|---|---|---|"]
    for group in groups:
        speeds = ", ".join(f"{name} {value:,}" for name, value in group["tok_s"].items())
        lines.append(f"| {group['machine']} | {group['work']} ({group['weights']}) | {speeds} |")
    return "\n".join(lines)


def with_table(readme: str, groups: list[dict[str, Any]]) -> str:
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table(groups)}\n\n{END}{rest.split(END)[1]}"


def main(arguments: list[str]) -> int:
    groups = json.loads(DATA.read_text())
    readme = README.read_text()
    wanted = {PICTURE: picture(groups), README: with_table(readme, groups)}
    if "--check" in arguments:
        stale = [path.name for path, text in wanted.items() if not path.exists() or path.read_text() != text]
        print(f"out of date: {', '.join(stale)}; run python tools/readme_figures.py" if stale else "up to date")
        return int(bool(stale))
    for path, text in wanted.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
