"""Every backend offers the operators of `Ops`, with one signature."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

from sparkdraft.kernels import native, ops, reference

OPERATORS = [
    name
    for protocol in (ops.KeepsWeights, ops.Ops)
    for name, found in vars(protocol).items()
    if inspect.isfunction(found) and not name.startswith("_")
]


def parameters(function: object) -> dict[str, tuple[object, object]]:
    found = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return {p.name: (p.annotation, p.default) for p in found if p.name != "self"}


def test_the_operators_are_found() -> None:
    assert {"embed", "rope_write", "paged_attention", "norm_linear", "keep_matrix", "accept_drafts"} <= set(OPERATORS)


@pytest.mark.parametrize("name", OPERATORS)
def test_one_signature(name: str) -> None:
    cuda = pytest.importorskip("sparkdraft.kernels.cuda", reason="triton is not installed", exc_type=ImportError)
    wanted = parameters(getattr(ops.Ops, name))
    backends: list[ModuleType] = [reference, native, cuda]
    assert {m.NAME: parameters(getattr(m, name)) for m in backends} == {m.NAME: wanted for m in backends}


def test_the_table_names_every_operator_and_files_that_exist() -> None:
    folder = Path(ops.__file__).parent
    named, missing = set[str](), []
    for line in (folder / "README.md").read_text().splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            named.update(re.findall(r"`(\w+)`", cells[0]))
            for backend, cell in zip(("reference", "native", "cuda"), cells[1:], strict=True):
                missing += [f"{backend}/{file}" for file in re.findall(r"`(.+?)`", cell)]
    assert named == {*OPERATORS, "Graph", "compiler"}
    assert [each for each in missing if not (folder / each).exists()] == []
