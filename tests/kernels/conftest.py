"""Poison for fresh tensors, for the tests of kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty gives NaN, or huge integers, so an element that a kernel forgets shows."""

    def poisoned(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: object = None) -> Tensor:
        return torch.full(shape, float("nan") if dtype.is_floating_point else 2**30, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "empty", poisoned)
