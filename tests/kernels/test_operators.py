"""Every backend offers the operators of `Ops`, with one signature."""

from __future__ import annotations

import inspect
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
