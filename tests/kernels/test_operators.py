"""The three modules of operators against each other: what the package calls has one signature in all of them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from sparkdraft.kernels import native, reference

PACKAGE = Path(__file__).parent.parent.parent / "sparkdraft"
CALL = re.compile(r"\bops\.([a-z]\w*)\(")
OF_ONE = {
    "best_gap",
    "draw",
    "facts",
    "largest_gap",
    "sample",
    "sample_sure",
    "set_threads",
}  # a module may have them, and is asked; `sample` draws too


def called() -> list[str]:
    return sorted({name for path in PACKAGE.rglob("*.py") for name in CALL.findall(path.read_text())} - OF_ONE)


def test_the_calls_are_found() -> None:
    assert {"embed", "rope_write", "paged_attention", "norm_linear", "add_linear", "norm_argmax"} <= set(called())


@pytest.mark.parametrize("name", called())
def test_one_signature(name: str) -> None:
    cuda = pytest.importorskip("sparkdraft.kernels.cuda", reason="triton is not installed", exc_type=ImportError)
    signatures = {m.NAME: str(inspect.signature(getattr(m, name))) for m in (reference, native, cuda)}
    assert len(set(signatures.values())) == 1, signatures
