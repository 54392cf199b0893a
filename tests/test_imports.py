"""What may import what: the boundaries between parts, checked against the import statements."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parent.parent / "sparkdraft"
HEAVY = {"torch", "triton", "transformers"}
# The rooms, from the ground up. A module imports its own room and those before it.
ROOMS = (
    "core",
    "util",
    "backend",
    "weights",
    "kernels",
    "text",
    "models",
    "cache",
    "drafters",
    "speculation",
    "config",
    "plan",
    "engine",
    "llm",
    "operate",
    "train",
    "server",
    "bridges",
    "cli",
)
KNOWN_UPWARD: dict[str, set[str]] = {
    "server.healthcheck": {"bridges.container_env"},  # a program of its own: python -m sparkdraft.server.healthcheck
}
NO_TORCH = [
    "backend",
    "core",
    "config",
    "util",
    "plan",
    "cache.blocks",
    "cache.formats",
    "cache.groups",
    "cache.pages",
    "cache.prefix",
    "cache.states",
    "cache.windows",
    *(f"operate.doctor.{part}" for part in ("examine", "finding", "machine", "software")),
    "engine.scheduler",
    "engine.profile",
    "models.common.config",
    "models.common.keys",
    "models.common.layers",
    "models.common.sizes",
    # every architecture: reading a config.json needs no torch
    *(f"models.{path.stem}" for path in (PACKAGE / "models").glob("*.py") if path.stem != "__init__"),
    "cli.cluster",
    "cli.exchange",
    "cli.models",
    "cli.doctor",
    "cli.main",
    "cli.plan",
    "cli.plan_report",
    "operate.canary",
    "operate.forecast.advice",
    "operate.forecast.forecast",
    "operate.forecast.machine",
    "operate.forecast.roofline",
    "bridges",
    "operate.bench.shapes",
    "drafters",
    "speculation",
    "text",
    "weights.checkpoint",
    "weights.hub",
    "weights.plane_layout",
    "weights.quant.stated",
    "server.app",
    "server.config",
    "server.engine_client",
    "server.engine_process",
    "server.messages",
    "server.run",
    "operate.bench.serve",
    "cli.serve",
    "train.settings",
    "train.memory",
    "train.corpus",
    "operate.bench.check_speed.check",
    "operate.bench.ratios",
    "operate.tune.search",
    "cli.tune",
]
ENGINE_PARTS = ("engine", "llm", "plan", "models", "cache", "drafters", "speculation", "weights", "kernels")
ALLOWED = {"server.engine_process": "sparkdraft.engine.backend"}  # the one place where the server names a backend
FORBIDDEN = {
    "core": ["sparkdraft"],
    "backend": [f"sparkdraft.{part}" for part in ENGINE_PARTS],
    "kernels": [f"sparkdraft.weights.{part}" for part in ("checkpoint", "gguf", "loader", "safetensors")],
    "models": ["sparkdraft.text"],
    "cache": [
        "sparkdraft.text",
        *(f"sparkdraft.models.{part}" for part in ("common.blocks", "registry", "common.rope")),
    ],
    "drafters": ["sparkdraft.text"],
    "text": ["sparkdraft.kernels"],
    "server": [f"sparkdraft.{part}" for part in (*ENGINE_PARTS, "train", "operate.bench", "operate.doctor")],
    "bridges": [f"sparkdraft.{part}" for part in ("engine", "llm", "cache", "kernels", "train", "operate.bench")],
}


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(p for p in parts if p != "__init__")
        found[name] = path
    return found


class Source(NamedTuple):
    """What the tests ask about a file, which is parsed once for all of them."""

    at_load: set[str]  # modules that it imports when it is loaded
    anywhere: set[str]  # and those inside functions and for type checkers
    needs: list[tuple[str, str]]  # what it takes from parts of the package, (module, name), but for type checkers
    functions: dict[str, int]  # the number of lines of each; the longest of those with one name


@cache
def source(path: Path) -> Source:
    found = Source(set(), set(), [], {})
    for top in ast.parse(path.read_text()).body:
        found.at_load.update(imported(top))
        for node in (top, *statements(top)):
            found.anywhere.update(imported(node))
            if isinstance(node, ast.FunctionDef):
                size = (node.end_lineno or 0) - node.lineno + 1
                found.functions[node.name] = max(size, found.functions.get(node.name, 0))
            elif isinstance(node, ast.ImportFrom) and within(node.module or "", "sparkdraft"):
                taken = [] if is_for_type_checkers(top) else node.names
                found.needs.extend((str(node.module)[11:], alias.name) for alias in taken)
    return found


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Every statement inside a statement. Expressions, most of a tree, hold none and are left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield child
            yield from statements(child)


def imported(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module:
        return {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return set()


def within(name: str, folder: str) -> bool:
    return name == folder or name.startswith(folder + ".")


def reachable(start: str) -> set[str]:
    """Everything that loading a module loads with it."""
    known, seen, todo = modules(), set(), [start]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in known:
            for each in source(known[name]).at_load:
                seen.add(each) if not within(each, "sparkdraft") else todo.append(each[11:])
    return seen


def test_the_pure_modules_load_no_torch() -> None:
    for folder in NO_TORCH:
        for name in modules():
            if within(name, folder):
                loaded = {m.split(".")[0] for m in reachable(name)}
                assert not loaded & HEAVY, f"{name} loads {loaded & HEAVY}"


def test_borders() -> None:
    for name, path in modules().items():
        for folder, banned in FORBIDDEN.items():
            if within(name, folder):
                used = {i for i in source(path).anywhere if not within(i, ALLOWED.get(name, "nothing"))}
                wrong = [i for i in used if any(within(i, b) for b in banned)]
                assert not wrong, f"{name} must not know {wrong}"


def test_no_arrow_runs_back_up() -> None:
    """A room imports those below it only, not even for type checkers: the whole reads from the top down."""
    level = {room: number for number, room in enumerate(ROOMS)}
    for name, path in modules().items():
        if not name:
            continue  # the package's face hands names on
        room, known = name.split(".")[0], KNOWN_UPWARD.get(name, set())
        used = {each[11:] for each in source(path).anywhere if within(each, "sparkdraft")} - {"", "__version__"}
        above = {each for each in used if each.split(".")[0] in level and level[each.split(".")[0]] > level[room]}
        wrong = {each for each in above if not any(within(each, allowed) for allowed in known)}
        assert not wrong, f"{name} imports {sorted(wrong)}, which stand above {room}"


def test_no_two_modules_need_each_other() -> None:
    """Not even inside a function. What a type checker alone reads does not count."""
    known, needs = modules(), dict[str, set[str]]()
    for name, path in known.items():
        places = source(path).needs
        whole = [f"{module}.{part}".strip(".") for module, part in places]
        needs[name] = {part if part in known else module for part, (module, _) in zip(whole, places, strict=True)} - {
            name
        }
    TopologicalSorter(needs).prepare()  # raises CycleError, which names them


def is_for_type_checkers(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_transformers_is_never_imported_and_no_pickle_is_opened() -> None:
    for name, path in modules().items():
        used = source(path).anywhere
        assert not any(within(u, "transformers") or within(u, "pickle") for u in used), name
        assert "torch.load(" not in path.read_text(), name
