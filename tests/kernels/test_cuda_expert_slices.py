"""Experts whose warps share 'in' among each other (sweep.py, SLICES): as exact as others, and rows as independent.

On a GPU, or small shapes under TRITON_INTERPRET=1. The last part compiles launches for sm_90 and sm_121.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")

from sparkdraft.kernels import cuda, reference
from sparkdraft.kernels.cuda.linear import few_tokens
from sparkdraft.kernels.cuda.moe import experts
from sparkdraft.kernels.cuda.runtime.gpu import Gpu, gpu_of
from sparkdraft.kernels.ops import Norm, Normed
from sparkdraft.operate.tune import tiles
from sparkdraft.weights.linear import ExpertLinear
from tests.kernels.ahead_of_time import GPUS, captured_launches
from tests.kernels.test_cuda_experts import EPS, Problem, check_experts, check_rows_alone, random_routing
from tests.kernels.test_cuda_planes import (
    CLAMPED,
    EXPERTS,
    ExpertsWithoutMemory,
    check_compiled,
    coded_experts_step,
    floats_of,
    random_experts,
)
from tests.kernels.triton_device import DEVICE, DTYPES, INTERPRET, assert_close, compiled, gpu, randn

pytestmark = pytest.mark.usefixtures("poisoned_empty")


@contextmanager
def sliced(
    gate_up: ExpertLinear, down: ExpertLinear, top_k: int, slices: int, target: Gpu | None = None
) -> Iterator[None]:  # fmt: skip
    """The experts have such tiles for few rows while this is entered; FEW_DOWN takes its slices from ROW_DOWN."""
    choices, target = triton.next_power_of_2(top_k), target or gpu_of(torch.device(DEVICE))
    with ExitStack() as stack:
        for kernel, each, lines in ((experts.FEW_GATE_UP, gate_up, 16), (experts.ROW_DOWN, down, 8)):
            assert each.tiles is not None
            shape = (each.tiles.shape[0] // each.count, each.tiles.shape[1], choices)
            tile = [lines, few_tokens.step_of(each.tiles) or 32, slices, 3, 1, slices]
            stack.enter_context(tiles.using(target, kernel, each.tiles.format, shape, tile))
        yield


@gpu
@pytest.mark.parametrize("rows, top_k, slices", [(1, 2, 4), (1, 3, 2), (5, 3, 4), (16, 2, 2)])
def test_floats(rows: int, top_k: int, slices: int) -> None:
    """Pairs one by one, with choices that are a power of two and others, and in blocks."""
    problem = Problem.of(16, 136, 72, DTYPES[1], True, CLAMPED)
    with sliced(problem.gate_up, problem.down, top_k, slices):
        check_experts(rows, top_k, problem, DTYPES[1])


@gpu
@pytest.mark.parametrize("rows", [1, 5] + [16] * (not INTERPRET))
@pytest.mark.parametrize("name", ["mxfp4"] + ["nvfp4", "int4 in groups of 32"] * (not INTERPRET))
def test_codes(name: str, rows: int) -> None:
    dtype, hidden, inter = DTYPES[0], 160, 96
    gate_up = random_experts(name, 16, 2 * inter, hidden, dtype, bias=True)
    down = random_experts(name, 16, hidden, inter, dtype, bias=True)
    x, norm = randn(rows, hidden, dtype=dtype), Norm(torch.rand(hidden, device=DEVICE) + 0.5, EPS)
    chosen = random_routing(rows, 16, 3)
    exact = reference.norm_experts(Normed(x.float(), norm), chosen, floats_of(gate_up), floats_of(down), CLAMPED)
    with sliced(gate_up, down, 3, 4):
        assert_close(cuda.norm_experts(Normed(x, norm), chosen, gate_up, down, CLAMPED), exact, dtype)


@gpu
@pytest.mark.parametrize("name", ["", "mxfp4"])
def test_a_row_depends_on_itself_alone(name: str) -> None:
    """Alone it is taken one by one, in company in a block."""
    assert experts.one_by_one(1, 2, 8) and not experts.one_by_one(2, 2, 8)
    dtype = DTYPES[1] if not name else DTYPES[0]
    problem = Problem.of(8, 160, 96, dtype, True)
    if name:
        coded = [random_experts(name, 8, *size, dtype, True) for size in ((192, 160), (160, 96))]
        problem = Problem(*coded, problem.norm, Norm(problem.then.gain.to(dtype), EPS), CLAMPED)
    with sliced(problem.gate_up, problem.down, 2, 4):
        check_rows_alone(problem, 2, dtype, [(0, 1), (9, 10), (3, 5)])


@gpu
def test_a_row_of_floats_is_added_up_in_the_same_columns() -> None:
    """So wide that sums in another order would show; the table has a tile for blocks that adds up otherwise."""
    problem, here = Problem.of(8, 1024, 256, DTYPES[1]), gpu_of(torch.device(DEVICE))
    other = [16, 64, 4, 3, 1, 4]
    with (
        sliced(problem.gate_up, problem.down, 2, 4),
        tiles.using(here, experts.FEW_DOWN, "16bit", (1024, 256, 2), other),
    ):
        check_rows_alone(problem, 2, DTYPES[1], [(0, 1), (2, 3)])


def test_blocks_add_up_in_the_slices_of_single_rows() -> None:
    """Whatever their own tile says: else a row would have other bits in company."""
    hopper, shape, key = GPUS[90], (2880, 2880), (2880, 2880, 4)
    find = partial(experts.find_tile, format_="16bit", x_bytes=2, gpu=hopper, step=0)
    assert find(experts.FEW_DOWN, key).slices == 1
    with tiles.using(hopper, experts.ROW_DOWN, "16bit", key, [8, 64, 4, 3, 1, 4]):
        assert find(experts.FEW_DOWN, key) == few_tokens.Tile(16, 64, 4, 4, 1, 4)
        tried = tiles.expert_tiles(experts.FEW_DOWN, key, "16bit", hopper)
        assert {(tile[1], tile[5]) for tile in tried} == {(64, 4)}
        assert tiles.runs(experts.FEW_DOWN, tried[0], tried) and not tiles.runs(experts.FEW_DOWN, [64, 64, 4, 6], tried)
        with tiles.using(hopper, experts.FEW_DOWN, "16bit", key, [32, 64, 4, 5, 1, 4]):
            assert find(experts.FEW_DOWN, key).block_n == 32
        with tiles.using(hopper, experts.FEW_DOWN, "16bit", key, [32, 128, 4, 5, 1, 4]):
            assert find(experts.FEW_DOWN, key).block_k == 64, "slices of other columns would add up otherwise"
        assert experts._launch(experts.DOWN, shape, 16, 8, "16bit", 16, 2, hopper).tile.slices == 1
    with tiles.using(hopper, experts.FEW_DOWN, "16bit", key, [32, 64, 4, 5, 1, 4]):
        assert find(experts.FEW_DOWN, key).slices == 1


@compiled
@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_compile(name: str, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # tensors without memory want the real torch.empty
    form, count, top_k, hidden, inter, bias = EXPERTS[name]
    gate_up = ExpertsWithoutMemory(form, count, 2 * inter, hidden, bias)
    down = ExpertsWithoutMemory(form, count, hidden, inter, bias)
    with sliced(gate_up, down, top_k, 4, GPUS[capability]):
        for rows in (1, 16):
            launches = captured_launches(monkeypatch, capability, partial(coded_experts_step, name, rows))
            matmuls = [launch for launch in launches if "LEVELS" in launch.options]
            assert len(matmuls) == 2 and all(launch.options["SLICES"] == 4 for launch in matmuls)
            for launch in matmuls:
                assert check_compiled(capability, launch, few=True).startswith("mma.sync")
