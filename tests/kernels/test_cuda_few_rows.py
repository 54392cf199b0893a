"""The matmuls of few rows against float64: on a GPU, or small shapes under TRITON_INTERPRET=1.

Fresh outputs and scratch are poisoned, and a row alone must equal the same row in any batch to the bit. The last part
needs no GPU: it compiles the launches of every named shape for sm_90 and sm_121 and reads from the result what a
row's bits hang on (tensor core instruction, order of the sum of squares), shared memory and the order around the wait
for the predecessor; speed is left to bench/cuda_few_rows.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

from sparkdraft.kernels.cuda import few_rows, pdl  # noqa: E402
from sparkdraft.kernels.cuda.few_rows import Gpu  # noqa: E402
from tests.kernels.triton_device import (  # noqa: E402
    DEVICE,
    DTYPES,
    INTERPRET,
    gpu,
    gpu_only,
    no_interpreter,
    poisoned_empty,
    randn,
)

__all__ = ["poisoned_empty"]  # a fixture that every test here takes

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of the largest value
EPS = 1e-5
NAMED = {  # shapes of Qwen3-8B, its DFlash drafter and SmolLM2-135M: (out, in) -> what runs on it
    (6144, 4096): "norm_linear",
    (4096, 4096): "add_linear",
    (24576, 4096): "norm_gated",
    (4096, 12288): "add_linear",
    (151936, 4096): "norm_argmax",
    (4096, 20480): "linear",
    (10240, 4096): "norm_linear",
    (960, 576): "norm_linear",
    (576, 576): "add_linear",
    (3072, 576): "norm_gated",
    (576, 1536): "add_linear",
    (49152, 576): "norm_argmax",
}


def strided(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows that are apart in memory, with NaN between them."""
    whole = torch.full((rows, width + 8), float("nan"), device=DEVICE, dtype=dtype)
    whole[:, :width] = randn(rows, width, dtype=dtype)
    return whole[:, :width]


def exact_norm(x: Tensor, gain: Tensor) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + EPS) * gain.double()


def assert_close(got: Tensor, expected: Tensor, dtype: torch.dtype, factors: int = 1) -> None:
    """factors: how many rounded results were multiplied, each of which adds its own error."""
    assert got.dtype == dtype
    worst = (got.double() - expected).abs().max().item()
    scale = max(1.0, expected.abs().max().item())
    assert worst <= factors * TOLERANCE[dtype] * scale, f"off by {worst}, largest value {scale}"  # NaN fails too


ROWS = [1, 3, 16, 17, 33, 64]
SHAPES = [(48, 128), (500, 576), (37, 200), (130, 77)]  # out, in: even and odd, strips of 16 and of 64
SHAPES += [(6144, 4096), (960, 576), (1000, 4100)] * (not INTERPRET)
CASES = [(rows, out, in_, DTYPES[(i + j) % 2]) for i, rows in enumerate(ROWS) for j, (out, in_) in enumerate(SHAPES)]
CASES += [(rows, *SHAPES[0], dtype) for rows in (5, 64) for dtype in DTYPES]
each_case = pytest.mark.parametrize("rows, out, in_, dtype", CASES)


@gpu
@each_case
def test_linear(rows: int, out: int, in_: int, dtype: torch.dtype) -> None:
    x, weight, bias = strided(rows, in_, dtype), randn(out, in_, dtype=dtype), randn(out, dtype=dtype)
    expected = x.double() @ weight.double().t()
    assert_close(few_rows.linear(x, weight), expected, dtype)
    assert_close(few_rows.linear(x, weight, bias), expected + bias.double(), dtype)


@gpu
@each_case
def test_norm_linear(rows: int, out: int, in_: int, dtype: torch.dtype) -> None:
    x, weight, bias = strided(rows, in_, dtype), randn(out, in_, dtype=dtype), randn(out, dtype=dtype)
    x *= 7
    gain = randn(in_, dtype=dtype)
    expected = exact_norm(x, gain) @ weight.double().t()
    assert_close(few_rows.norm_linear(x, gain, EPS, weight), expected, dtype)
    wide = few_rows.norm_linear(x, gain, EPS, weight, bias, dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert_close(wide.to(dtype), expected + bias.double(), dtype)


@gpu
@each_case
def test_norm_gated(rows: int, out: int, in_: int, dtype: torch.dtype) -> None:
    inter = out // 2 + 1
    x, gain, weight = strided(rows, in_, dtype), randn(in_, dtype=dtype), randn(2 * inter, in_, dtype=dtype)
    weight /= in_**0.5
    weight[0] *= 100  # a gate whose exp overflows on its way to zero
    both = exact_norm(x, gain) @ weight.double().t()
    expected = torch.nn.functional.silu(both[:, :inter]) * both[:, inter:]
    assert_close(few_rows.norm_gated(x, gain, EPS, weight), expected, dtype, factors=2)


@gpu
@each_case
def test_add_linear(rows: int, out: int, in_: int, dtype: torch.dtype) -> None:
    x, weight, bias = strided(rows, in_, dtype), randn(out, in_, dtype=dtype), randn(out, dtype=dtype)
    residual = strided(rows + 1, out, dtype)
    untouched = residual[rows].clone()
    expected = residual[:rows].double() + x.double() @ weight.double().t()
    few_rows.add_linear(residual[:rows], x, weight)
    assert_close(residual[:rows], expected, dtype)
    expected = residual[:rows].double() + x.double() @ weight.double().t() + bias.double()
    few_rows.add_linear(residual[:rows], x, weight, bias)
    assert_close(residual[:rows], expected, dtype)
    assert torch.equal(residual[rows], untouched), "wrote past the rows"


@gpu
@each_case
def test_norm_argmax_is_that_of_the_float32_logits(rows: int, out: int, in_: int, dtype: torch.dtype) -> None:
    x, gain, weight = strided(rows, in_, dtype), randn(in_, dtype=dtype), randn(out, in_, dtype=dtype)
    weight[out // 3 :: out // 3] = weight[0]  # ties between programs
    logits = few_rows.norm_linear(x, gain, EPS, weight, dtype=torch.float32)
    got = few_rows.norm_argmax(x, gain, EPS, weight)
    assert got.dtype == torch.int64
    assert got.tolist() == logits.cpu().numpy().argmax(1).tolist()  # numpy's takes the lowest of equals


@gpu
@pytest.mark.parametrize("out", [40, 500])
def test_argmax_ties_and_nan(out: int) -> None:
    dtype = DTYPES[0]
    x, weight = randn(6, 64, dtype=dtype), randn(out, 64, dtype=dtype) / 100
    gain = randn(64).abs().add(0.5).to(dtype)
    weight[[7, 21, 35]] = gain  # equal, and by far the largest for a row that looks like its gain
    x[:3] = gain
    weight[3] = float("nan")
    x[1] = -x[1]
    x[4] = float("nan")
    x[5] = 0  # all logits are equal
    got = few_rows.norm_argmax(x, gain, EPS, weight).tolist()
    assert (got[0], got[2]) == (7, 7)
    assert got[1] not in (3, 7, 21, 35)
    assert got[4:] == [0, 0]


@gpu
def test_no_rows() -> None:
    x, gain, weight = randn(0, 64), randn(64), randn(48, 64)
    assert few_rows.linear(x, weight).shape == few_rows.norm_linear(x, gain, EPS, weight).shape == (0, 48)
    assert few_rows.norm_gated(x, gain, EPS, weight).shape == (0, 24)
    assert few_rows.norm_argmax(x, gain, EPS, weight).shape == (0,)
    few_rows.add_linear(randn(0, 48), x, weight)


@dataclass(frozen=True)
class Problem:
    weight: Tensor
    gain: Tensor
    residual: Tensor  # [64, out]

    def run(self, kind: str, x: Tensor, at: slice) -> Tensor:
        if kind == "norm_gated":
            return few_rows.norm_gated(x, self.gain, EPS, self.weight)
        if kind == "norm_linear":
            return few_rows.norm_linear(x, self.gain, EPS, self.weight)
        if kind == "linear":
            return few_rows.linear(x, self.weight)
        if kind == "norm_argmax":
            return few_rows.norm_argmax(x, self.gain, EPS, self.weight)
        if kind == "logits":
            return few_rows.norm_linear(x, self.gain, EPS, self.weight, dtype=torch.float32)
        residual = self.residual[at].clone()
        few_rows.add_linear(residual, x, self.weight)
        return residual


def check_rows_alone(kind: str, out: int, in_: int, dtype: torch.dtype, alone: list[int]) -> None:
    """Rows of a batch of 64 against the same rows alone and in batches of other sizes, with other neighbours."""
    x = randn(64, in_, dtype=dtype)
    weight = randn(out, in_, dtype=dtype) / in_**0.5
    problem = Problem(weight, randn(in_, dtype=dtype), randn(64, out, dtype=dtype))
    whole = problem.run(kind, x, slice(0, 64))
    assert not whole.isnan().any()
    for row in alone:
        at = slice(row, row + 1)
        assert torch.equal(problem.run(kind, x[at], at), whole[at]), f"{kind} of row {row} alone"
    for begin, end in ((0, 16), (5, 8), (30, 61), (10, 27)):
        at = slice(begin, end)
        assert torch.equal(problem.run(kind, x[at], at), whole[at]), f"{kind} of rows {begin} to {end}"
    strange = x.clone()
    strange[:20] = float("nan")
    strange[21:] *= 1000
    at = slice(20, 21)
    assert torch.equal(problem.run(kind, strange, slice(0, 64))[at], whole[at]), f"{kind} beside strange rows"


KINDS = ["linear", "norm_linear", "norm_gated", "add_linear", "norm_argmax", "logits"]


@gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out, in_", [(48, 192), (500, 77)])
def test_a_row_does_not_depend_on_its_neighbours(kind: str, out: int, in_: int) -> None:
    for dtype in DTYPES:
        check_rows_alone(kind, out, in_, dtype, [0, 40])


@gpu_only
@pytest.mark.parametrize("out, in_", NAMED)
def test_a_row_of_a_named_shape_does_not_depend_on_its_neighbours(out: int, in_: int) -> None:
    check_rows_alone(NAMED[out, in_], out, in_, torch.bfloat16, list(range(0, 64, 7)))
    if in_ * out < 2**28:
        for kind in set(KINDS) - {NAMED[out, in_]}:
            check_rows_alone(kind, out, in_, torch.bfloat16, [0, 63])


@gpu_only
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_overlapped_launches_in_a_graph_equal_launches_one_by_one(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel of a chain reads what the one before has written: an early read would show."""
    monkeypatch.undo()  # capture wants the real torch.empty
    hidden, inter, dtype = 1024, 4096, torch.bfloat16
    layers = [
        (
            torch.randn(hidden, device="cuda").to(dtype),
            torch.randn(hidden, hidden, device="cuda").to(dtype) / 32,
            torch.randn(2 * inter, hidden, device="cuda").to(dtype) / 32,
            torch.randn(hidden, inter, device="cuda").to(dtype) / 64,
        )
        for _ in range(12)
    ]
    start = torch.randn(rows, hidden, device="cuda").to(dtype)

    def chain() -> Tensor:
        residual = start.clone()
        for gain, square, gate_up, down in layers:
            few_rows.add_linear(residual, few_rows.norm_linear(residual, gain, EPS, square), square)
            few_rows.add_linear(residual, few_rows.norm_gated(residual, gain, EPS, gate_up), down)
        return residual

    monkeypatch.setattr(pdl, "ENABLED", False)
    expected = chain()
    monkeypatch.setattr(pdl, "ENABLED", True)
    assert torch.equal(chain(), expected)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(20):
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, expected)


# Host choices

H200, SPARK = Gpu(132, 227 << 10, True), Gpu(48, 99 << 10, False)
GPUS = {90: H200, 121: SPARK}


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_rows_choose_nothing_but_the_row_tile_and_the_stages(capability: int, itemsize: int) -> None:
    for out, in_ in [*NAMED, (128, 64), (5000, 5000), (200, 77)]:
        for norm in (False, True):
            launches = [few_rows._launch(rows, out, in_, itemsize, norm, 1, GPUS[capability]) for rows in range(1, 65)]
            assert len({(launch.tile, launch.programs, launch.pieces) for launch in launches}) == 1
            assert [launch.rows for launch in launches] == [16] * 16 + [32] * 16 + [64] * 32


def test_choices_for_other_shapes_fill_the_gpu() -> None:
    assert set(few_rows.TUNED) == set(NAMED)
    for (_, in_), tile in (few_rows.TUNED | few_rows.SMALL_TUNED).items():
        assert in_ % tile.block_k == 0, "a named shape needs no masks"
    assert few_rows._choose(4096, 4096, 2, 132).block_n == 32
    assert few_rows._choose(24576, 4096, 2, 132).block_n == 64
    assert few_rows._choose(576, 576, 2, 132).block_n == 16


def test_too_many_rows_are_refused() -> None:
    x = torch.zeros(65, 64)
    with pytest.raises(AssertionError, match="1 to 64"):
        few_rows.linear(x, torch.zeros(48, 64))


# Ahead of time compiles: no GPU, but not under the interpreter, which replaces the compiler

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}


def captured_launch(
    monkeypatch: pytest.MonkeyPatch, capability: int, kind: str, out: int, in_: int, rows: int, dtype: torch.dtype
) -> list[tuple[object, tuple[object, ...], dict[str, object]]]:
    """What a function would launch on that GPU, on tensors without memory: kernels, arguments and options."""
    found: list[tuple[object, tuple[object, ...], dict[str, object]]] = []
    monkeypatch.undo()  # tensors without memory want the real torch.empty
    with monkeypatch.context() as patch:
        patch.setattr(few_rows, "_run", lambda kernel, grid, *a, **options: found.append((kernel, a, options)))
        patch.setattr(few_rows, "_gpu", lambda device: GPUS[capability])
        patch.setattr(pdl, "active", lambda device: True)
        tensors = [torch.zeros(size, dtype=dtype, device="meta") for size in ((out, in_), (in_,), (64, out), (64, in_))]
        Problem(*tensors[:3]).run(kind, tensors[3][:rows], slice(rows))
    return found


def compile_launch(capability: int, kernel: object, arguments: tuple, options: dict[str, object]) -> object:
    """Compile as the launch would: pointers, and integers that are, count as divisible by 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    values = dict(zip(names, arguments, strict=False)) | {n: v for n, v in options.items() if n in names}
    fixed = {p.name for p in kernel.params if p.is_constexpr or values[p.name] is None}
    signature, hints = {}, {}
    for place, (name, param) in enumerate(zip(names, kernel.params, strict=True)):
        value = values[name]
        aligned = isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)
        if isinstance(value, Tensor):
            signature[name] = "*" + TYPES[value.dtype]
        else:
            signature[name] = "constexpr" if name in fixed else "fp32" if isinstance(value, float) else "i32"
        if aligned and name not in fixed and not param.do_not_specialize:
            hints[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, {name: values[name] for name in fixed}, hints)
    rest = {n: v for n, v in options.items() if n not in names}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=rest)


def instructions(ptx: str) -> set[str]:
    """The tensor core instructions, without the number of rows that wgmma's name holds."""
    found = set(re.findall(r"wgmma\.mma_async\S+|mma\.sync\S+", ptx))
    return {re.sub(r"m64n\d+", "m64n", name) for name in found}


def sum_layout(ttgir: str) -> str:
    """How the sum of squares is spread over threads along 'in': that is the order in which it is added up."""
    name = re.search(r'"tt\.reduce".*?axis = 1.*?\}\) : \(tensor<\w+, #(\w+)>', ttgir, re.S)
    assert name, "no sum over 'in'"
    layout = re.search(rf"^#{name[1]} = (.*)", ttgir, re.M)
    assert layout, name[1]
    parts = re.findall(r"(sizePerThread|threadsPerWarp|warpsPerCTA) = \[\d+, (\d+)\]", layout[1])
    assert len(parts) == 3, layout[1]
    return str(parts)


def check_compiled(
    monkeypatch: pytest.MonkeyPatch, capability: int, kind: str, out: int, in_: int, dtype: torch.dtype
) -> None:
    used, sums = set(), set()
    for rows in few_rows.ROW_TILES:
        launches = captured_launch(monkeypatch, capability, kind, out, in_, rows, dtype)
        compiled = [compile_launch(capability, *launch) for launch in launches]  # of an argmax, the pick as well
        ptx, ttgir = compiled[0].asm["ptx"], compiled[0].asm["ttgir"]
        size = {name: launches[0][2][name] for name in ("ROWS", "BLOCK_N", "BLOCK_K", "num_stages")}
        shared = [each.metadata.shared for each in compiled]
        print(f"sm_{capability} {kind} {out} x {in_} {TYPES[dtype]} {size}: {shared} bytes, {instructions(ptx)}")
        assert max(shared) <= GPUS[capability].shared
        used.add(frozenset(instructions(ptx)))
        if kind.startswith("norm") or kind == "logits":
            sums.add(sum_layout(ttgir))
        for each in compiled:
            assert each.metadata.launch_pdl
            check_order(each.asm["ptx"])
    assert len(used) == 1, f"rows change the instruction: {used}"
    assert len(next(iter(used))) == (dtype.itemsize == 2), used
    assert len(sums) <= 1, f"rows change the order of the sum of squares: {sums}"


def check_order(ptx: str) -> None:
    """Nothing that another kernel writes is read before the wait, and all paths wait."""
    lets, waits = ptx.index("griddepcontrol.launch_dependents"), ptx.index("griddepcontrol.wait")
    assert ptx.count("griddepcontrol.wait") == 1 and lets < waits
    early = ptx[:waits]
    assert not re.search(r"ld\.global|cp\.async\.c[ag]|st\.global|\bbra\b|\bret;", early), early
    assert "cp.async.bulk.prefetch.L2" not in ptx[waits:]


@no_interpreter
@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("out, in_", NAMED)
def test_named_shapes_compile_alike_for_all_rows(
    out: int, in_: int, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_compiled(monkeypatch, capability, NAMED[out, in_], out, in_, torch.bfloat16)


@no_interpreter
@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("kind", KINDS)
def test_other_shapes_and_types_compile_alike_for_all_rows(
    kind: str, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_compiled(monkeypatch, capability, kind, 4000, 1000, torch.float16)
    check_compiled(monkeypatch, capability, kind, 4096, 2048, torch.float32)
