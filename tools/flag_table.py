"""Writes the tables of flags: into docs/api.md those of `serve`, from the fields of EngineConfig and ServerConfig and
their help texts, and into docs/plan.md those of `plan`, from its parser.

    python tools/flag_table.py

tests/server/test_config.py and tests/cli/test_plan_command.py compare the docs with the tables, so a flag that is added
or changed without this fails.
"""

from __future__ import annotations

import re
from pathlib import Path

from sparkdraft.cli import plan
from sparkdraft.cli.parser import Parser
from sparkdraft.server.config import CONTAINER_NAMES, FIELDS

DOCS = Path(__file__).parent.parent / "docs"
HEADER = "| flag | default | meaning | container's name |\n|---|---|---|---|\n"
PLAN_HEADER = "| flag of `plan` | meaning |\n|---|---|\n"


def table() -> str:
    containers = {field: f"`{name}`" for name, field in CONTAINER_NAMES.items()}
    rows = []
    for name, field in FIELDS.items():
        default = field.default if not isinstance(field.default, bool) else "on" if field.default else "off"
        cells = (f"`--{name.replace('_', '-')}`", default, field.metadata["help"], containers.get(name, ""))
        rows.append(f"| {' | '.join(map(str, cells))} |\n")
    return HEADER + "".join(rows)


def plan_table() -> str:
    parser = Parser(prog="sparkdraft plan", add_help=False)
    plan.configure(parser)
    actions = parser._actions
    return PLAN_HEADER + "".join(f"| `{each.option_strings[0]}` | {each.help} |\n" for each in actions)


def main() -> None:
    for path, header, made in ((DOCS / "api.md", HEADER, table()), (DOCS / "plan.md", PLAN_HEADER, plan_table())):
        text = path.read_text(encoding="utf-8")
        found = re.search(re.escape(header) + r"(\|.*\n)*", text)
        assert found, f"{path} has no table that begins with: {header}"
        path.write_text(text[: found.start()] + made + text[found.end() :], encoding="utf-8")


if __name__ == "__main__":
    main()
