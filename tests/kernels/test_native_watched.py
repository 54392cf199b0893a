"""Whole engines with the CPU's kernels: which run in which layer, and that a compiled step makes the same calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkdraft import LLM
from sparkdraft.kernels import native, reference
from tests.kernels.watching import ENDS, Watch, run_watched
from tests.models.tiny import TinyOf


@pytest.fixture(scope="session")
def tiny(tiny_of: TinyOf) -> Path:
    return tiny_of("qwen3_moe")


def names(watch: Watch, layer: int) -> list[str]:
    return [kernel for kernel, _ in watch.of(layer)]


def test_native_kernels_are_seen_by_layer(tiny: Path) -> None:
    """The second layer is dense, the others have experts."""
    llm = LLM(str(tiny), device="cpu", dtype="quantised", spec="off")
    prompt, row = run_watched(llm.engine)
    for number in range(len(llm.model_config.layers)):
        ran = names(row, number)
        assert ran.count("paged_attention") == 1 and ran.count("kv_write") == 1
        assert ("experts" in ran and "route" in ran) == (number != 1) and ("gated" in ran) == (number == 1)
    assert names(row, ENDS)[0] == "embed" and names(row, ENDS)[-1] == "linear"
    assert names(prompt, 0) == names(row, 0), "native kernels are the same for a prompt"
    recorded = llm.engine.runner.graphs
    assert recorded, "graphs are back"
    (shape,) = [shape for shape in recorded._kept if shape.rows == 1]
    assert recorded.graph(shape).kernels == [each.kernel for each in row.ran], "what is replayed is what was seen"


def test_an_operator_that_is_left_to_torch_is_seen(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "gated", reference.gated)
    _, row = run_watched(LLM(str(tiny), device="cpu", dtype="quantised", spec="off").engine)
    assert any(name.startswith("torch.") for name in names(row, 1))
    assert not any(name.startswith("torch.") for name in names(row, 0)), "experts have an activation of their own"
