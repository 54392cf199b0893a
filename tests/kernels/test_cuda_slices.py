"""Tiles whose warps share 'in' among each other (sweep.py, SLICES): as exact as others, rows as independent, compiled.

On a GPU, or small shapes under TRITON_INTERPRET=1. The last part compiles launches for sm_90 and sm_121 and reads from
the result that each warp has a slice of its own.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from functools import partial

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")

from sparkdraft.kernels.cuda.linear import few_tokens
from sparkdraft.kernels.cuda.runtime.gpu import gpu_of
from sparkdraft.kernels.ops import Norm, Normed
from sparkdraft.operate.tune import tiles
from sparkdraft.weights.linear import WeightTiles
from tests.kernels.ahead_of_time import GPUS, LIMIT, captured_launches, compile_launch, empty, spilled_bytes
from tests.kernels.test_cuda_few_tokens import EPS, KINDS, Problem, assert_close, check_rows_alone, exact_norm
from tests.kernels.test_cuda_planes import kept, tiles_without_memory
from tests.kernels.triton_device import DEVICE, DTYPES, INTERPRET, compiled, gpu, randn
from tests.weights.formats_of_codes import FORMATS, fitting

pytestmark = pytest.mark.usefixtures("poisoned_empty")

SLICED = [(1, 2), (1, 4), (2, 4)]  # split, slices


def sliced(weight: WeightTiles, split: int, slices: int, lines: int = 16) -> AbstractContextManager[None]:
    """The matrix has such a tile while this is entered."""
    here, step = gpu_of(torch.device(DEVICE)), few_tokens.step_of(weight) or 32
    return tiles.using(here, few_tokens.KERNEL, weight.format, weight.shape, [lines, step, slices, 3, split, slices])


def weight_of(name: str, out: int, in_: int, dtype: torch.dtype) -> tuple[WeightTiles, torch.Tensor]:
    if name:
        matrix, exact = kept(name, out, in_)
        return matrix.tiles, exact
    floats = (randn(out, in_) / in_**0.5).to(dtype)
    return WeightTiles(floats), floats.double()


@gpu
@pytest.mark.parametrize("split, slices", SLICED)
@pytest.mark.parametrize("name", ["", "mxfp4", "int4 with offsets"] if INTERPRET else ["", *FORMATS])
def test_sums_are_exact_for_widths_that_slices_divide_and_others(name: str, split: int, slices: int) -> None:
    dtype = DTYPES[0]
    for out, in_ in ((40, 512), (37, 416)):
        if name and name not in fitting(in_):
            continue
        weight, exact = weight_of(name, out, in_, dtype)
        x = randn(5, in_, dtype=dtype)
        with sliced(weight, split, slices):
            found = few_tokens.linear(x, weight)
            assert_close(found, x.double() @ exact.t(), dtype)
            assert torch.equal(few_tokens.linear(x, weight), found) and not few_tokens.counters(x.device).any()


@gpu
@pytest.mark.parametrize("name", ["", "mxfp4"] if INTERPRET else ["", *FORMATS])
def test_gate_argmax_and_norm(name: str) -> None:
    dtype, inter, in_ = DTYPES[0], 13, 256
    normed = Normed(randn(5, in_, dtype=dtype), Norm(randn(in_, dtype=dtype), EPS))
    weight, exact = weight_of(name, 2 * inter, in_, dtype)
    both = exact_norm(normed) @ exact.t()
    with sliced(weight, 1, 4):
        assert_close(few_tokens.norm_linear(normed, weight), both, dtype)
        gate, up = both.chunk(2, 1)
        assert_close(few_tokens.norm_gated(normed, weight), torch.nn.functional.silu(gate) * up, dtype, factors=2)
        logits = few_tokens.norm_linear(normed, weight, torch.float32)
        assert few_tokens.norm_argmax(normed, weight).tolist() == logits.argmax(1).tolist()


@gpu
@pytest.mark.parametrize("name", ["", "mxfp4"] if INTERPRET else ["", *FORMATS])
@pytest.mark.parametrize("kind", KINDS[2:4] if INTERPRET else KINDS)
def test_a_row_depends_on_itself_alone(kind: str, name: str) -> None:
    out, in_, dtype = (20, 128, DTYPES[0]) if INTERPRET else (130, 512, DTYPES[0])
    weight, _ = weight_of(name, out, in_, dtype)
    with sliced(weight, 1, 4):
        check_rows_alone(kind, out, in_, dtype, [0, 11], weight)


@compiled
@pytest.mark.parametrize("kind", ["linear", "norm_gated"])
@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("name", ["", "int4", "mxfp4", "nvfp4", "fp8"])
def test_each_warp_has_a_slice(name: str, capability: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # tensors without memory want the real torch.empty
    out, in_ = 1024, 4096
    weight = tiles_without_memory(name, out, in_) if name else WeightTiles(empty(out, in_))
    tile = [16, few_tokens.step_of(weight) or 128, 4, 4, 1, 4]
    problem = Problem(weight, Norm(empty(in_), EPS), empty(in_, 64), Norm(empty(out), EPS), empty(16, out))
    with tiles.using(GPUS[capability], few_tokens.KERNEL, weight.format, weight.shape, tile):
        for rows in (1, 16):
            run = partial(problem.run, kind, empty(16, in_)[:rows], slice(rows), written=False)
            *_, launch = captured_launches(monkeypatch, capability, run)
            made, _ = compile_launch(capability, launch)
            assert "warpsPerCTA = [4, 1, 1]" in made.asm["ttgir"], "else warps would do the same work"
            assert "cp.async" in made.asm["ptx"], "tiles are fetched ahead"
            assert made.metadata.shared <= LIMIT[capability] and not spilled_bytes(made)
            assert len(set(re.findall(r"mma\.sync\S*", made.asm["ptx"]))) == 1
