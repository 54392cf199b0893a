"""The pages about other servers hold the tables that commands are read by."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_pages_have_the_tables_of_the_code() -> None:
    made = runpy.run_path(str(ROOT / "tools/flag_table.py"))["tables"]()
    assert {path.name for path, _, _ in made} == {"api.md", "plan.md", "from-vllm.md", "from-llama-cpp.md"}
    for path, _, table in made:
        assert table in path.read_text(encoding="utf-8"), f"{path.name}: run tools/flag_table.py"


def test_no_cell_breaks_a_table() -> None:
    for path, header, table in runpy.run_path(str(ROOT / "tools/flag_table.py"))["tables"]():
        bars = header.splitlines()[0].count("|")
        assert all(line.count("|") == bars for line in table.splitlines()), path.name
