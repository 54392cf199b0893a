"""For tests of coded caches: a tiny model whose heads are as wide as GPU kernels want them, and where to run it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.tiny import TinyOf

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.fixture(scope="session")
def wide_tiny(tiny_of: TinyOf) -> Path:
    return tiny_of("qwen3", head_dim=64)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)
