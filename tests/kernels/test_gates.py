"""The gate of attention's result, and of a shared expert's: x * sigmoid(gate), in place, against float64."""

from __future__ import annotations

import pytest
import torch

from sparkdraft.kernels import native, reference
from sparkdraft.kernels.ops import Ops

NATIVE = pytest.param(native, marks=pytest.mark.skipif(native.unavailable_reason() is not None, reason="no compiler"))


@pytest.mark.parametrize("ops", [reference, NATIVE], ids=lambda ops: ops.NAME)
@pytest.mark.parametrize("width", [1, 48])
def test_rows_are_gated_in_place(ops: Ops, width: int) -> None:
    """One gate per number, or one per row; gates and rows are columns of wider tensors."""
    generator = torch.Generator().manual_seed(0)
    wide, gates = torch.randn(5, 64, generator=generator), 4 * torch.randn(5, 100, generator=generator)
    before, gate = wide.clone(), gates[:, 100 - width :]
    expected = before.double()
    expected[:, :48] *= torch.sigmoid(gate.double())
    ops.sigmoid_gate(wide[:, :48], gate)
    torch.testing.assert_close(wide.double(), expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(wide[:, 48:], before[:, 48:])
