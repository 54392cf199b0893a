"""Writes the table of flags into docs/api.md, from the fields of EngineConfig and ServerConfig and their help texts.

    python tools/flag_table.py

tests/server/test_config.py compares the docs with `table`, so a field that is added or changed without this fails.
"""

from __future__ import annotations

import re
from pathlib import Path

from sparkdraft.server.config import CONTAINER_NAMES, FIELDS

DOCS = Path(__file__).parent.parent / "docs/api.md"
HEADER = "| flag | default | meaning | container's name |\n|---|---|---|---|\n"


def table() -> str:
    containers = {field: f"`{name}`" for name, field in CONTAINER_NAMES.items()}
    rows = []
    for name, field in FIELDS.items():
        default = field.default if not isinstance(field.default, bool) else "on" if field.default else "off"
        cells = (f"`--{name.replace('_', '-')}`", default, field.metadata["help"], containers.get(name, ""))
        rows.append(f"| {' | '.join(map(str, cells))} |\n")
    return HEADER + "".join(rows)


def main() -> None:
    text = DOCS.read_text(encoding="utf-8")
    found = re.search(re.escape(HEADER) + r"(\|.*\n)*", text)
    assert found, f"{DOCS} has no table that begins with: {HEADER}"
    DOCS.write_text(text[: found.start()] + table() + text[found.end() :], encoding="utf-8")


if __name__ == "__main__":
    main()
