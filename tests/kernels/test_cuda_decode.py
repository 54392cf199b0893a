"""Weights that are not floats of x's own type, through the kernels for few rows: fp8 with a scale per output row.

Held to float64 products of the same codes, on a GPU or under TRITON_INTERPRET=1, and compiled for sm_90 and sm_121.
"""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

from sparkdraft.kernels.cuda import few_rows  # noqa: E402
from sparkdraft.kernels.cuda.decode import DECODINGS  # noqa: E402
from sparkdraft.kernels.norm import Norm, Normed  # noqa: E402
from sparkdraft.weights.linear import DenseLinear, WeightTiles  # noqa: E402
from tests.kernels.ahead_of_time import GPUS, captured_launches, compile_launch, empty  # noqa: E402
from tests.kernels.test_cuda_few_rows import (  # noqa: E402
    EPS,
    KINDS,
    NAMED,
    Problem,
    assert_close,
    check_prepared,
    check_rows_alone,
    exact_norm,
)
from tests.kernels.triton_device import DEVICE, DTYPES, compiled, gpu, poisoned_empty, randn  # noqa: E402

__all__ = ["poisoned_empty"]  # a fixture that every test here takes

SHAPES = [(48, 128), (37, 200), (130, 77)]  # out, in: even and odd


def fp8_tiles(out: int, in_: int, bias: Tensor | None = None) -> WeightTiles:
    """Rows of very different size, as a row's scale allows, with the largest and the smallest code among them."""
    codes = (randn(out, in_) * 40).to(torch.float8_e4m3fn)
    codes.view(torch.uint8)[0, :4] = torch.tensor([0x7E, 0xFE, 0x01, 0x81], device=DEVICE)  # 448, -448, 2**-9, -2**-9
    scale = torch.rand(out, device=DEVICE) * torch.logspace(-6, -1, out, device=DEVICE) / in_**0.5
    return WeightTiles(codes, "fp8", scale, bias)


def exact(tiles: WeightTiles) -> Tensor:
    assert tiles.row_scale is not None
    return tiles.codes.double() * tiles.row_scale.double().unsqueeze(1)


@gpu
@pytest.mark.parametrize("out, in_", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_with_a_scale_per_row(out: int, in_: int, dtype: torch.dtype) -> None:
    bias = randn(out, dtype=dtype)
    tiles = fp8_tiles(out, in_, bias)
    x, weight = randn(7, in_, dtype=dtype), exact(tiles)
    expected = x.double() @ weight.t() + bias.double()
    assert_close(few_rows.linear(x, tiles), expected, dtype)
    normed = Normed(x, Norm(randn(in_, dtype=dtype), EPS))
    expected = exact_norm(normed) @ weight.t() + bias.double()
    assert_close(few_rows.norm_linear(normed, tiles), expected, dtype)
    residual, then = randn(7, out, dtype=dtype), Norm(randn(out, dtype=dtype), EPS)
    expected = residual.double() + x.double() @ weight.t() + bias.double()
    left = few_rows.add_linear(residual, x, tiles, then)
    assert_close(residual, expected, dtype)
    check_prepared(left)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_gate_and_argmax(dtype: torch.dtype) -> None:
    inter, in_ = 37, 200
    normed = Normed(randn(5, in_, dtype=dtype), Norm(randn(in_, dtype=dtype), EPS))
    tiles = fp8_tiles(2 * inter, in_)
    both = exact_norm(normed) @ exact(tiles).t()
    expected = torch.nn.functional.silu(both[:, :inter]) * both[:, inter:]
    assert_close(few_rows.norm_gated(normed, tiles), expected, dtype, factors=2)
    logits = few_rows.norm_linear(normed, tiles, dtype=torch.float32)
    assert few_rows.norm_argmax(normed, tiles).tolist() == logits.argmax(1).tolist()


@gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_fp8_does_not_depend_on_its_neighbours(kind: str) -> None:
    for dtype in DTYPES:
        check_rows_alone(kind, 130, 192, dtype, [0, 11], fp8_tiles(130, 192))


def test_a_matrix_says_what_kernels_may_read_of_it() -> None:
    weight, bias = torch.zeros(48, 64, dtype=torch.bfloat16), torch.zeros(48, dtype=torch.bfloat16)
    tiles = DenseLinear(weight, bias).tiles
    assert tiles is not None and tiles.codes is weight and tiles.bias is bias
    assert (tiles.shape, tiles.format, tiles.decoding) == ((48, 64), "16bit", "plain")
    assert WeightTiles(weight.to(torch.float8_e4m3fn), "fp8").format == "fp8"
    assert {"plain", "fp8"} <= DECODINGS.keys()
    with pytest.raises(AssertionError):  # else codes would be multiplied as if they were floats of x's type
        few_rows.linear(torch.zeros(1, 64), tiles)


def fp8_step(kind: str, out: int, in_: int) -> None:
    """One function of few_rows.py on an fp8 matrix, on tensors without memory."""
    tiles = WeightTiles(empty(out, in_, dtype=torch.float8_e4m3fn), "fp8", empty(out, dtype=torch.float32))
    problem = Problem(tiles, Norm(empty(in_), EPS), empty(in_, 64), Norm(empty(out), EPS), empty(16, out))
    problem.run(kind, empty(16, in_), slice(16), written=False)


@compiled
@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("out, in_", NAMED)
def test_fp8_of_named_shapes_compiles(out: int, in_: int, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target = GPUS[capability]
    launches = captured_launches(monkeypatch, capability, partial(fp8_step, NAMED[out, in_], out, in_))
    matmuls = [launch for launch in launches if "DECODE" in launch.options]
    assert matmuls
    for launch in matmuls:
        made, signature = compile_launch(capability, launch)
        used = set(re.findall(r"wgmma\.mma_async\S+|mma\.sync\S+", made.asm["ptx"]))
        print(f"sm_{capability} {NAMED[out, in_]} {out} x {in_}: {made.metadata.shared} bytes, {used}")
        assert signature["weight"] == "*fp8e4nv" and len(used) == 1 and all("bf16" in name for name in used), used
        beside = 1 + (launch.grid[0] > target.sms)
        assert beside * (made.metadata.shared + 1024) <= target.shared + 1024
