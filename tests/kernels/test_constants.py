"""Tensors that are made once and kept are made outside of captures, and nobody keeps one in another way."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparkdraft.weights import constants
from sparkdraft.weights.constants import device_constant

PACKAGE = Path(__file__).parent.parent.parent / "sparkdraft"
PARTS = ("kernels", "models", "weights", "spec", "engine", "cache")  # what a step may run
CACHES = {"cache", "lru_cache", "cached_property"}


# The decorator


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bool]]:
    """Whether the current stream is captured; a stream aside is not."""
    state = {"captured": False}

    @contextmanager
    def aside() -> Iterator[None]:
        before, state["captured"] = state["captured"], False
        yield
        state["captured"] = before

    monkeypatch.setattr(constants, "is_captured", lambda: state["captured"])
    monkeypatch.setattr(constants, "_aside", aside)
    yield state


def test_a_constant_is_made_once_for_each_argument() -> None:
    made: list[int] = []

    @device_constant
    def numbers(count: int) -> Tensor:
        """Numbers."""
        made.append(count)
        return torch.arange(count)

    assert numbers(3) is numbers(3) and numbers(4) is not numbers(3)
    assert made == [3, 4] and (numbers.__name__, numbers.__doc__) == ("numbers", "Numbers.")


@pytest.mark.parametrize("first", [False, True])
def test_a_constant_is_filled_and_kept_whether_a_capture_asks_for_it_first_or_not(
    first: bool, stream: dict[str, bool]
) -> None:
    """What is launched in a capture fills nothing."""

    @device_constant
    def sevens(count: int) -> Tensor:
        return torch.full((count,), -1 if stream["captured"] else 7)

    stream["captured"] = first
    kept = sevens(2)
    assert kept.tolist() == [7, 7] and stream["captured"] == first
    stream["captured"] = not first
    assert sevens(2) is kept


def test_a_constant_that_cannot_be_made_is_not_kept(stream: dict[str, bool]) -> None:
    fails = [True, False]

    @device_constant
    def one() -> Tensor:
        if fails.pop(0):
            raise RuntimeError("no memory")
        return torch.ones(1)

    with pytest.raises(RuntimeError, match="no memory"):
        one()
    assert one().tolist() == [1]


def test_nothing_is_captured_without_a_gpu() -> None:
    if not torch.cuda.is_available():
        assert not constants.is_captured()


# No tensor is kept by another cache


def names(node: ast.AST | None) -> set[str]:
    """All names within an annotation, in quotes too."""
    if node is None:
        return set()
    found = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    found |= {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            found |= set(re.findall(r"\w+", part.value))
    return found


def holders(trees: list[ast.Module]) -> set[str]:
    """Tensor, and the classes with a field that is one or holds one, declared or set in __init__."""
    fields: dict[str, set[str]] = {}
    for node in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        own = fields.setdefault(node.name, set())
        for part in ast.walk(node):
            if isinstance(part, ast.AnnAssign):
                own |= names(part.annotation)
            elif isinstance(part, ast.FunctionDef) and part.name == "__init__":
                own |= {name for each in ast.walk(part) if isinstance(each, ast.Call) for name in names(each.func)}
                own |= {name for each in part.args.args for name in names(each.annotation)}
    found = {"Tensor"}
    makers = {"Tensor", "tensor", "zeros", "ones", "empty", "full", "arange"}
    while more := {name for name, own in fields.items() if name not in found and own & (found | makers)}:
        found |= more
    return found


def kept_tensors(trees: list[ast.Module]) -> list[str]:
    """Functions that functools keeps the results of, where these are tensors or hold some."""
    held, wrong = holders(trees), []
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef) and any(names(each) & CACHES for each in node.decorator_list):
            makes = any(
                isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "torch"
                for line in node.body
                for part in ast.walk(line)
                if not names(node.returns) & {"bool", "int", "float", "str", "Gpu"}
            )
            if node.returns is None or names(node.returns) & held or makes:
                wrong.append(node.name)
        elif isinstance(node, ast.Call) and not isinstance(node.func, ast.Attribute) and names(node.func) & CACHES:
            wrong += [part.id for part in node.args if isinstance(part, ast.Name)]  # kept = cache(function)
    return wrong


def test_tensors_that_are_made_once_are_device_constants() -> None:
    paths = [path for part in PARTS for path in sorted((PACKAGE / part).rglob("*.py"))]
    trees = [ast.parse(path.read_text()) for path in paths if path.name != "constants.py"]
    wrong = kept_tensors(trees)
    assert not wrong, f"{wrong}: a capture may be the first to ask for it; take weights/constants.py's device_constant"


@pytest.mark.parametrize(
    "text, is_wrong",
    [
        ("@lru_cache\ndef f(x: int) -> Tensor: ...", True),
        ("@functools.cache\ndef f(x: int) -> 'torch.Tensor | None': ...", True),
        ("@lru_cache(maxsize=4)\ndef f(x: int) -> dict[str, tuple[Tensor, ...]]: ...", True),
        ("@cache\ndef f(x): ...", True),
        ("@cache\ndef f(x: int) -> object:\n    return torch.ones(x)", True),
        ("class A:\n    @cached_property\n    def f(self) -> Tensor: ...", True),
        ("class A(NamedTuple):\n    x: Tensor\nclass B:\n    a: A\n@cache\ndef f(x: int) -> B: ...", True),
        ("class A:\n    def __init__(self): self.x = torch.zeros(3)\n@cache\ndef f(x: int) -> A: ...", True),
        ("g = cache(f)", True),
        ("@lru_cache\ndef f(x: int) -> tuple[int, ...]: ...", False),
        ("class A(NamedTuple):\n    x: int\n@cache\ndef f(x: int) -> A: ...", False),
        ("@device_constant\ndef f(x: int) -> Tensor: ...", False),
        ("def f(x: int) -> Tensor: ...", False),
    ],
)
def test_a_kept_tensor_is_found(text: str, is_wrong: bool) -> None:
    assert bool(kept_tensors([ast.parse(text)])) == is_wrong
