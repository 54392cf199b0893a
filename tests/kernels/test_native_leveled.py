"""Quantised matrices of every form on the CPU kernels: the integers of the file, against the definition in torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparkdraft.kernels import native
from sparkdraft.kernels.native import leveled
from sparkdraft.kernels.native.packed import PackedLinear, PackedParts
from sparkdraft.weights.quant.stored import LEVELS, Coded, GroupQuant, as_float
from tests.kernels.integers import group_linear, split_outliers

pytestmark = pytest.mark.skipif(native.unavailable_reason() is not None, reason="no C++ compiler")

E4M3 = torch.float8_e4m3fn


def coded(
    levels: str, out: int, width: int, group: int, scale: str = "half", offset: bool = False, rows: bool = False
) -> Coded:
    bits = LEVELS[levels].bits
    codes = torch.randint(0, 256, (out, width * bits // 8), dtype=torch.uint8)
    if levels == "e4m3":
        codes[(codes & 127) == 127] = 0
    shape = (out, width // group)
    kinds = {
        "half": lambda: (torch.rand(shape) * 0.02).half(),
        "bfloat16": lambda: (torch.rand(shape) * 0.02 + 1e-3).bfloat16(),
        "float": lambda: torch.rand(shape) * 0.02,
        "e4m3": lambda: (torch.rand(shape) * 100 + 1).to(E4M3),
        "exponents": lambda: torch.randint(110, 124, shape, dtype=torch.uint8),
        "none": lambda: None,
    }
    return Coded(
        levels,
        codes,
        group,
        kinds[scale](),
        torch.randn(shape) * 0.1 if offset else None,
        torch.rand(out) * 1e-3 + 1e-4 if rows else None,
    )


def expected(x: Tensor, matrix: Tensor) -> Tensor:
    """Each row rounded to int8 in groups of 32, except for its outliers, times the exact weights."""
    groups, outliers = split_outliers(x.unflatten(1, (-1, 32)))
    peak = groups.abs().amax(-1, keepdim=True)
    steps = torch.where(peak > 0, 127 / peak, 0.0)
    rounded = torch.round(groups * steps) * (peak / 127) + outliers
    return (rounded.flatten(1).double() @ matrix.double().t()).float()


FORMS = {
    "int4 with zero points": ("int4", 64, "half", True, False),
    "Q4_K": ("int4", 32, "float", True, False),
    "Q5_K": ("int8", 32, "float", True, False),
    "Q6_K": ("int8", 16, "float", False, False),
    "IQ4_NL": ("iq4_nl", 32, "half", False, False),
    "IQ4_XS": ("iq4_nl", 32, "float", False, False),
    "NVFP4": ("e2m1", 16, "e4m3", False, True),
    "MXFP4": ("e2m1", 32, "exponents", False, False),
    "e2m1 with an offset": ("e2m1", 32, "half", True, True),
    "int8 by row": ("int8", 192, "none", False, True),
    "int8 in groups of 96 with floats": ("int8", 96, "float", False, False),
    "int4 in groups of 48": ("int4", 48, "bfloat16", False, True),
}


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 19, 70])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_what_it_means(form: str, rows: int) -> None:
    torch.manual_seed(0)
    levels, group, scale, offset, by_row = FORMS[form]
    matrix = coded(levels, 22, 192, group, scale, offset, by_row)
    bias, x = torch.randn(22), torch.randn(rows, 192)
    x[::2, 40], x[::3, 23] = 20.0, -15.0  # outliers, in both halves of a group
    kept = native.keep_matrix([matrix], bias, as_float)
    assert isinstance(kept, leveled.LeveledLinear) and not kept.rounded
    meant = expected(x, matrix.dequantize()) + bias
    scale_of = float(meant.abs().mean())
    torch.testing.assert_close(kept.linear(x), meant, rtol=1e-5, atol=2e-6 * scale_of * 192**0.5)
    residual = torch.randn(rows, 22)
    kept.add_to(added := residual.clone(), x)
    torch.testing.assert_close(added, residual + kept.linear(x))
    assert torch.equal(kept.linear(x), torch.cat([kept.linear(row.unsqueeze(0)) for row in x])), "a row is its own"


@pytest.mark.parametrize("levels", ["int4", "int8"])
@pytest.mark.parametrize("scale", ["half", "bfloat16"])
def test_what_fits_the_fast_form_has_its_bits(levels: str, scale: str) -> None:
    """INT4 in symmetric groups, whatever their size: the integers of the file, bit for bit."""
    matrix = coded(levels, 22, 256, 128, scale)
    kept, group = native.keep_matrix([matrix], None, as_float), leveled.as_group_quant(matrix)
    assert isinstance(kept, PackedLinear) and group is not None and not kept.rounded
    assert torch.equal(group.dequantize(), matrix.dequantize()) and group.bits == matrix.bits
    x = torch.randn(3, 256)
    assert torch.equal(kept.linear(x), PackedLinear.pack([group]).linear(x))
    torch.testing.assert_close(
        kept.linear(x), group_linear(x, group.q, group.scale, group.offset), rtol=2e-5, atol=2e-5
    )


def test_what_halves_cannot_hold_is_not_made_of_them() -> None:
    for scale in (torch.rand(4, 2) * 0.01, torch.full((4, 2), 1e-9), torch.full((4, 2), 1e6)):
        assert leveled.as_group_quant(Coded("int4", torch.zeros(4, 32, dtype=torch.uint8), 32, scale)) is None
    codes, half = torch.zeros(4, 32, dtype=torch.uint8), torch.ones(4, 2).half()
    assert leveled.as_group_quant(Coded("int4", codes, 32, half, torch.full((4, 2), 1 / 3))) is None
    assert leveled.as_group_quant(Coded("int4", codes, 32, half, torch.full((4, 2), 0.5))) is not None


def test_what_has_no_integers_is_rounded_and_says_so() -> None:
    torch.manual_seed(0)
    matrix, x = coded("e4m3", 8, 64, 64, "none", rows=True), torch.randn(2, 64)
    kept = native.keep_matrix([matrix], None, as_float)
    assert kept.rounded == "the CPU kernels multiply integers, and e4m3 are floats"
    meant = x @ matrix.dequantize().t()
    assert float((kept.linear(x) - meant).abs().max()) < 0.03 * float(meant.abs().max())
    odd = coded("int4", 8, 96, 24)
    assert native.keep_matrix([odd], None, as_float).rounded.endswith("and 24 is no multiple of it")


def test_parts_of_one_matrix() -> None:
    """Parts that agree in levels share one matrix, each with its own scales; others stand side by side."""
    torch.manual_seed(0)
    x = torch.randn(5, 96)
    alike = [coded("e2m1", 6, 96, 16, "e4m3", rows=True), coded("e2m1", 5, 96, 32, "exponents")]
    kept = native.keep_matrix(alike, None, as_float)
    assert isinstance(kept, leveled.LeveledLinear)
    meant = expected(x, torch.cat([part.dequantize() for part in alike]))
    torch.testing.assert_close(kept.linear(x), meant, rtol=1e-4, atol=1e-5)
    mixed = [alike[0], GroupQuant.from_float(torch.randn(4, 96)), coded("int4", 7, 96, 32), coded("e4m3", 3, 96, 96)]
    bias = torch.randn(20)
    both = native.keep_matrix(mixed, bias, as_float)
    assert isinstance(both, PackedParts) and both.rounded
    alone = [native.keep_matrix([part], None, as_float).linear(x) for part in mixed]
    torch.testing.assert_close(both.linear(x), torch.cat(alone, 1) + bias)


def test_experts_keep_their_forms() -> None:
    torch.manual_seed(0)
    experts = [[coded("e2m1", 4, 64, 16, "e4m3", rows=True), coded("e2m1", 4, 64, 32, "exponents")] for _ in range(3)]
    kept = native.keep_experts(experts, None, as_float)
    assert not kept.rounded
    x = torch.randn(2, 64)
    for number, parts in enumerate(experts):
        meant = expected(x, torch.cat([part.dequantize() for part in parts]))
        torch.testing.assert_close(kept.expert(number).linear(x), meant, rtol=1e-4, atol=1e-5)
    experts[1][0] = coded("int4", 4, 64, 32)
    mixed = native.keep_experts(experts, None, as_float)
    assert mixed.rounded == "gate and up of an expert are in different forms"
    assert torch.equal(mixed.expert(0).linear(x), kept.expert(0).linear(x)), "only that expert is rounded"


def test_tables_of_quantised_rows() -> None:
    exact = coded("int4", 8, 64, 32)
    table = native.keep_table(exact, as_float)
    ids = torch.tensor([3, 0], dtype=torch.int32)
    assert torch.equal(native.embed(ids, table), exact.dequantize()[ids.long()])
    near = coded("e2m1", 8, 64, 32)
    rows = native.embed(ids, native.keep_table(near, as_float))
    torch.testing.assert_close(rows, near.dequantize()[ids.long()], rtol=0, atol=0.01)
