"""Measures the package: files, lines, functions and docstrings by room, and draws the rooms as floors.

python tools/measure_house.py                            a table of this checkout
python tools/measure_house.py --root OTHER               of another one
python tools/measure_house.py --picture docs/rooms.svg   also draws it
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
PACKAGE = "sparkdraft"
FRAGMENT = re.compile(r"(Of|That|Those|Whoever|Which|How|What|Whether)\b")
SMALL = 40  # lines of a file that may be a fragment
FLOOR, WIDTH = 44, 900  # pixels


def sources(root: Path, *endings: str) -> Iterator[Path]:
    return (path for path in sorted((root / PACKAGE).rglob("*")) if path.suffix in endings)


def room_of(path: Path, root: Path) -> str:
    first = path.relative_to(root / PACKAGE).parts[0]
    return first.removesuffix(".py")


def lines_of(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def measure(root: Path) -> list[tuple[str, str]]:
    python, native = list(sources(root, ".py")), list(sources(root, ".cpp", ".h"))
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in python]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    sizes = sorted((node.end_lineno or 0) - node.lineno + 1 for node in functions)
    typed = [f for f in functions if f.returns and all(a.annotation or a.arg in ("self", "cls") for a in f.args.args)]
    owners = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)]
    docs = [doc for node in owners if (doc := ast.get_docstring(node))]
    middle, most = statistics.median(sizes), sizes[len(sizes) * 95 // 100]
    return [
        ("Python files", f"{len(python)}"),
        ("lines of Python and C++", f"{sum(map(lines_of, [*python, *native])):,}"),
        (f"files under {SMALL} lines", f"{sum(0 < lines_of(path) < SMALL for path in python)}"),
        ("names of files that occur more than once", f"{_repeated(python)}"),
        (
            "functions: median, 95 %, longest",
            f"{middle:.0f}, {most}, {sizes[-1]}",
        ),
        ("functions with all types", f"{len(typed) / len(functions):.0%}"),
        ("docstrings that begin as a fragment", f"{sum(bool(FRAGMENT.match(doc)) for doc in docs)} of {len(docs)}"),
        ("imports that run back up", f"{len(upward(root))}"),
    ]


def _repeated(python: list[Path]) -> int:
    names = [path.name for path in python if path.name != "__init__.py"]
    return len({name for name in names if names.count(name) > 1})


def imports(root: Path) -> dict[str, set[str]]:
    """The rooms that each room imports."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sources(root, ".py"):
        room = room_of(path, root)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{PACKAGE}."):
                found[room].add(str(node.module).split(".")[1])
            elif isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
                found[room] |= {a.name for a in node.names if (root / PACKAGE / a.name).exists()}
        found[room].discard(room)
    return found


def rooms(root: Path) -> list[str]:
    """From the ground up: as few imports as possible look up from one to a later one."""
    below, order = imports(root), list[str]()
    left = {room for room in below if room != "__init__"}
    while left:
        room = min(left, key=lambda r: (len(below[r] & left - {r}), r))
        order.append(room)
        left.remove(room)
    return order


def upward(root: Path) -> list[tuple[str, str]]:
    level = {room: number for number, room in enumerate(rooms(root))}
    return [(a, b) for a, used in imports(root).items() for b in used if level.get(b, -1) > level.get(a, 99)]


def picture(root: Path) -> str:
    sizes, files = defaultdict[str, int](int), defaultdict[str, int](int)
    for path in sources(root, ".py", ".cpp", ".h"):
        sizes[room_of(path, root)] += lines_of(path)
        files[room_of(path, root)] += 1
    used, parts = imports(root), []
    floors = [room for room in reversed(rooms(root)) if (root / PACKAGE / room).is_dir()]
    for i, room in enumerate(floors):
        y, width = i * FLOOR + 8, 90 + 330 * sizes[room] / max(sizes.values())
        below = ", ".join(other for other in floors if other in used[room])
        parts.append(f'<rect x="8" y="{y}" width="{width:.0f}" height="34" rx="4" fill="#ddf4ff" stroke="#0969da"/>')
        parts.append(f'<text x="16" y="{y + 15}" font-weight="bold">{room}/</text>')
        parts.append(f'<text x="16" y="{y + 29}" fill="#57606a">{files[room]} files, {sizes[room]:,} lines</text>')
        parts.append(f'<text x="440" y="{y + 22}" fill="#57606a">{escape("imports " + below if below else "")}</text>')
    size = f'viewBox="0 0 {WIDTH} {len(floors) * FLOOR + 12}" width="{WIDTH}" font-family="sans-serif" font-size="11.5"'
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{ground}{"".join(parts)}</svg>\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=HERE, help="a checkout (default: this one)")
    parser.add_argument("--picture", type=Path, help="draw the rooms into this SVG file")
    args = parser.parse_args()
    for name, value in measure(args.root):
        print(f"{name:<42}{value}")
    if args.picture:
        args.picture.write_text(picture(args.root), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
