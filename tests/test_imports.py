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
NO_TORCH = [
    "backend",
    "core",
    "config",
    "plan",
    "cache.blocks",
    "cache.holdings",
    "cache.prefix",
    "cache.recent_rows",
    "cache.pages",
    "cache.state_slots",
    *(f"doctor.{part}" for part in ("examine", "report", "software", "hardware", "gpu", "memory", "cache_files")),
    "engine.scheduler",
    "models.config",
    "models.keys",
    "models.layers",
    "models.registry",  # and with it every architecture: reading a config.json needs no torch
    "cli.cluster",
    "cli.cluster_findings",
    "cli.cluster_plan",
    "cli.cluster_up",
    "cli.doctor",
    "cli.main",
    "cli.plan",
    "cli.plan_report",
    "canary",
    "cluster",
    "bench.named_shapes",
    "interop",
    "spec.assistant_config",
    "spec.best_depths",
    "spec.confidence",
    "spec.cut",
    "spec.depth",
    "spec.pairs",
    "spec.stats",
    "spec.ngram",
    "spec.caps",
    "spec.choice",
    "spec.dflash_caps",
    "spec.draft_configs",
    "spec.dflash_config",
    "spec.mtp_config",
    "spec.packaged",
    "text.events",
    "text.grammar",
    "text.reasoning",
    "text.tools",
    "server.app",
    "server.config",
    "server.engine_client",
    "server.engine_process",
    "server.messages",
    "server.run",
    "bench.serve",
    "cli.serve",
    "plot",
    "train.settings",
    "train.memory",
    "train.corpus",
    "tune.knobs",
    "tune.profile",
    "tune.search",
    "cli.tune",
]
ENGINE_PARTS = ("engine", "llm", "plan", "models", "cache", "spec", "weights", "kernels")
ALLOWED = {"server.engine_process": "sparkdraft.engine.backend"}  # the one place where the server names a backend
FORBIDDEN = {
    "core": ["sparkdraft"],
    "backend": [f"sparkdraft.{part}" for part in ENGINE_PARTS],
    "kernels": [
        *(
            f"sparkdraft.{part}"
            for part in ("engine", "models", "cache", "text", "plan", "spec", "server", "cli", "llm")
        ),
        *(f"sparkdraft.weights.{part}" for part in ("checkpoint", "gguf", "loader", "safetensors")),
    ],
    "models": ["sparkdraft.engine", "sparkdraft.spec", "sparkdraft.text"],
    "spec": ["sparkdraft.engine", "sparkdraft.text", "sparkdraft.cli"],
    "cache": [
        "sparkdraft.engine",
        "sparkdraft.text",
        *(f"sparkdraft.models.{part}" for part in ("blocks", "config", "registry", "rope")),  # but not "layers"
    ],
    "weights": ["sparkdraft.engine", "sparkdraft.models", "sparkdraft.cache"],
    "text": ["sparkdraft.engine", "sparkdraft.models", "sparkdraft.cache", "sparkdraft.kernels"],
    "server": [f"sparkdraft.{part}" for part in (*ENGINE_PARTS, "cli", "bench", "train")],
    "interop": [f"sparkdraft.{part}" for part in ("engine", "llm", "cache", "kernels", "cli", "bench", "train")],
    "cluster": [f"sparkdraft.{part}" for part in ("engine", "llm", "cache", "kernels", "cli", "bench", "train")],
    "engine": ["sparkdraft.cli", "sparkdraft.bench", "sparkdraft.llm", "sparkdraft.train", "sparkdraft.server"],
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


def test_files_and_functions_stay_small() -> None:
    for name, path in modules().items():
        text = path.read_text()
        assert text.count("\n") <= 400 or within(name, "kernels"), f"{name} is past 400 lines: is there a seam?"
        for function, size in source(path).functions.items():
            assert size <= 60 or within(name, "kernels"), f"{name}.{function} has {size} lines"
