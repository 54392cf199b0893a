"""MXFP4: every code, every scale, and the order of nibbles, against Python's own arithmetic and transformers'."""

from __future__ import annotations

import math

import pytest
import torch

from sparkdraft.weights.quant.fp4 import Mxfp4Experts
from sparkdraft.weights.quant.stated import NOTHING
from sparkdraft.weights.quant.stored import Coded, QuantisedExperts


def meant(code: int, scale: int) -> float:
    """By the definition of E2M1: sign, two bits of exponent with a bias of 1, one of mantissa."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = math.ldexp(1 + mantissa / 2, exponent - 1) if exponent else mantissa / 2
    return math.ldexp(-size if sign else size, scale - 127)


def every_code() -> Coded:
    """Rows of one group, with the codes 0 to 15 twice; every scale whose largest weight is finite in float32."""
    scales = torch.arange(1, 252, dtype=torch.uint8).unsqueeze(1)
    pairs = torch.tensor([2 * j % 16 | (2 * j + 1) % 16 << 4 for j in range(16)], dtype=torch.uint8)
    return Mxfp4Experts().read_matrix("x", (pairs.expand(len(scales), 1, 16).contiguous(), scales), NOTHING)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_is_exact(dtype: torch.dtype) -> None:
    matrix = every_code()
    assert matrix.shape == (251, 32)
    expected = [[meant(column % 16, int(scale)) for column in range(32)] for scale in matrix.scale]
    assert matrix.dequantize(dtype).double().tolist() == expected


def test_transformers_reads_the_same() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(3)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 10, 2), dtype=torch.uint8)
    read = Mxfp4Experts().read("x", blocks, scales)
    assert isinstance(read, QuantisedExperts) and read.shape == (3, 10, 64)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # which turns the matrices round
    assert torch.equal(read.dequantize(), theirs.transpose(1, 2))


def test_chosen_rows_stay_packed() -> None:
    matrix, order = every_code(), torch.tensor([5, 0, 5, 250])
    taken = matrix.take(order)
    assert isinstance(taken, Coded) and taken.codes.dtype == torch.uint8
    assert torch.equal(taken.dequantize(), matrix.dequantize()[order])
    assert torch.equal(QuantisedExperts([matrix, matrix]).take(order).dequantize()[1], taken.dequantize())


def test_only_uint8_blocks_are_a_matrix() -> None:
    kind, name = Mxfp4Experts(), "model.layers.0.mlp.experts.down_proj"
    assert kind.find(f"{name}_blocks", {f"{name}_blocks": "U8"}) == (name, (f"{name}_blocks", f"{name}_scales"))
    assert kind.find(f"{name}_blocks", {f"{name}_blocks": "BF16"}) is None
    assert kind.find(f"{name}_scales", {f"{name}_scales": "U8"}) is None
    assert kind.states({"quant_method": "mxfp4"}) and not kind.states({"quant_method": "fp8"})
