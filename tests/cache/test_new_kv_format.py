"""A KV format is one file: this one adds a format from outside and generates text with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sparkdraft.cache import formats
from sparkdraft.cache.formats.dense import DenseFormat, DenseLayer
from sparkdraft.core import SamplingParams, UserError
from sparkdraft.llm import LLM
from sparkdraft.operate.bench.formats import parse_kv_formats
from tests.models.tiny import write_tiny

PROMPT = list(range(3, 43))


class Half(DenseFormat):
    """Keys and values in float16, on a machine that computes in float32."""

    name = title = notation = in_windows = "toy"
    help = "toy (half the memory on a CPU)"
    share = 0.75

    def itemsize(self, exact: int) -> int:
        return 2

    def dtype(self, exact: torch.dtype) -> torch.dtype:
        return torch.float16


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    formats.register(Half())
    yield
    del formats._formats["toy"]


def test_it_generates_and_its_prefixes_are_found(tmp_path: Path) -> None:
    folder = str(write_tiny(tmp_path, "qwen3"))
    llm = LLM(folder, dtype="float32", device="cpu", spec="off", kv="toy", kv_tokens=256)
    (layer, *_), plan = llm.engine.runner.kv.layers, llm.plan
    assert isinstance(layer, DenseLayer) and layer.k.dtype == torch.float16 and plan.kv == "toy"
    exact = LLM(folder, dtype="float32", device="cpu", spec="off", kv_tokens=256)
    assert 2 * plan.memory.kv == exact.plan.memory.kv
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    first, again = (llm.generate([PROMPT], params)[0].completions[0] for _ in range(2))
    assert first.ids == again.ids and len(first.ids) == 12
    assert (first.num_cached, again.num_cached) == (0, 32), "whole blocks of the prompt are found again"


def test_everything_that_lists_formats_lists_it(tmp_path: Path) -> None:
    assert formats.kv_names() == ("exact", "toy", "fp8", "turboquant")
    assert [fmt.name for fmt in parse_kv_formats("toy,k4v3")] == ["exact", "toy", "k4v3"]
    with pytest.raises(UserError, match="one of exact, toy, fp8, turboquant"):
        LLM(str(write_tiny(tmp_path, "qwen3")), kv="tay")
    with pytest.raises(UserError, match="only turboquant reads it"):
        LLM(str(write_tiny(tmp_path, "qwen3")), kv="toy", tq_key_bits=3)
    with pytest.raises(UserError, match="already"):
        formats.register(Half())
