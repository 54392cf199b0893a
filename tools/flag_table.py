"""Writes the tables of flags: into docs/api.md those of `serve`, from the fields of EngineConfig and ServerConfig and
their help texts; into docs/plan.md those of `plan`, from its parser; into docs/from-vllm.md and docs/from-llama-cpp.md
those of other servers, from sparkdraft/bridges.

    python tools/flag_table.py

tests/server/test_config.py, tests/cli/test_plan_command.py and tests/bridges/test_all_flags.py compare the docs with
the tables, so a flag that is added or changed without this fails.
"""

from __future__ import annotations

import re
from pathlib import Path

from sparkdraft.bridges.container_env import CONTAINER_NAMES, OTHERS
from sparkdraft.bridges.llama_cpp import LLAMA_CPP
from sparkdraft.bridges.tables import Server
from sparkdraft.bridges.vllm import broken
from sparkdraft.bridges.vllm.flags import VLLM
from sparkdraft.cli import plan
from sparkdraft.cli.parser import Parser
from sparkdraft.server.config import FIELDS

DOCS = Path(__file__).parent.parent / "docs"
HEADER = "| flag | default | meaning | container's name |\n|---|---|---|---|\n"
PLAN_HEADER = "| flag of `plan` | meaning |\n|---|---|\n"
VARIABLES_HEADER = "| variable | what it does here |\n|---|---|\n"
BROKEN_HEADER = "| pair | broken | why | instead | sources |\n|---|---|---|---|---|\n"


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


def flags_header(server: Server) -> str:
    return f"| flag of {server.name} | ours | remark |\n|---|---|---|\n"


def flags_of(server: Server) -> str:
    """What another server's flags are here; flags that have the same answer share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for flag in server.flags:
        rows.setdefault((flag.ours or "none", flag.remark), []).extend(f"`{name}`" for name in flag.names)
    lines = [f"| {', '.join(names)} | {ours} | {remark} |\n" for (ours, remark), names in rows.items()]
    return flags_header(server) + "".join(lines)


def variables_table() -> str:
    fields = {name: f"`--{field.replace('_', '-')}`" for name, field in CONTAINER_NAMES.items()}
    return VARIABLES_HEADER + "".join(f"| `{name}` | {text} |\n" for name, text in (fields | OTHERS).items())


def broken_table() -> str:
    rows = []
    for entry in broken.entries():
        span = f"from {entry.since}" if entry.since else ""
        span += f"{', ' if span else ''}before {entry.until}" if entry.until else ""
        kind = " (only noted)" if entry.level == broken.NOTE else ""
        cells = (entry.name + kind, span or "always", entry.why, entry.instead, ", ".join(entry.sources))
        rows.append(f"| {' | '.join(cells)} |\n")
    return BROKEN_HEADER + "".join(rows)


def tables() -> list[tuple[Path, str, str]]:
    """Each page, the first lines of a table in it, and that table."""
    return [
        (DOCS / "api.md", HEADER, table()),
        (DOCS / "plan.md", PLAN_HEADER, plan_table()),
        (DOCS / "from-vllm.md", flags_header(VLLM), flags_of(VLLM)),
        (DOCS / "from-vllm.md", VARIABLES_HEADER, variables_table()),
        (DOCS / "from-vllm.md", BROKEN_HEADER, broken_table()),
        (DOCS / "from-llama-cpp.md", flags_header(LLAMA_CPP), flags_of(LLAMA_CPP)),
    ]


def main() -> None:
    for path, header, made in tables():
        text = path.read_text(encoding="utf-8")
        found = re.search(re.escape(header) + r"(\|.*\n)*", text)
        assert found, f"{path} has no table that begins with: {header}"
        path.write_text(text[: found.start()] + made + text[found.end() :], encoding="utf-8")


if __name__ == "__main__":
    main()
