"""The matmuls of few rows against float64: on a GPU, or small shapes under TRITON_INTERPRET=1.

Fresh outputs and scratch are poisoned, and a row alone must equal the same row in any batch to the bit. The last part
needs no GPU: it compiles the launches of every named shape for sm_90 and sm_121 and reads from the result the tensor
core instruction, shared memory and the order around the wait for the predecessor; speed is left to
tools/cuda_few_tokens.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

from sparkdraft.kernels import reference
from sparkdraft.kernels.cuda.linear import few_tokens
from sparkdraft.kernels.cuda.runtime import pdl
from sparkdraft.kernels.cuda.runtime.gpu import Gpu
from sparkdraft.kernels.cuda.runtime.tuned import measured
from sparkdraft.kernels.ops import GELU_TANH, Activation, Norm, Normed
from sparkdraft.weights.linear import WeightTiles
from tests.kernels.ahead_of_time import GPUS, Launch, captured_launches, compile_launch, empty
from tests.kernels.triton_device import DEVICE, DTYPES, INTERPRET, compiled, gpu, gpu_only, no_interpreter, randn

pytestmark = pytest.mark.usefixtures("poisoned_empty")

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


def exact_norm(normed: Normed) -> Tensor:
    x = normed.x.double()
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + normed.norm.eps) * normed.norm.gain.double()


def both_ways(x: Tensor, gain: Tensor) -> list[Normed]:
    """A stream that nobody has prepared, and one whose squares lie in parts, not a power of two of them."""
    norm = Norm(gain, EPS)
    squares = torch.stack([piece.float().square().sum(1) for piece in x.tensor_split(5, 1)], 1)
    return [Normed(x, norm), Normed(x, norm, x * gain, squares)]


def assert_close(got: Tensor, expected: Tensor, dtype: torch.dtype, factors: int = 1) -> None:
    """factors: how many rounded results were multiplied, each of which adds its own error."""
    assert got.dtype == dtype
    worst = (got.double() - expected).abs().max().item()
    scale = max(1.0, expected.abs().max().item())
    assert worst <= factors * TOLERANCE[dtype] * scale, f"off by {worst}, largest value {scale}"  # NaN fails too


ROWS = [1, 3, 8, 15, 16]
SHAPES = [(48, 128), (37, 200), (130, 77)]  # out, in: even and odd, strips of 16 and of 64
SHAPES += [(500, 576), (6144, 4096), (960, 576), (1000, 4100)] * (not INTERPRET)
CASES = [(rows, out, in_, DTYPES[(i + j) % 2]) for i, rows in enumerate(ROWS) for j, (out, in_) in enumerate(SHAPES)]
CASES += [(rows, *SHAPES[0], dtype) for rows in (5, 16) for dtype in DTYPES]
each_case = pytest.mark.parametrize("rows, out, in_, dtype", list(dict.fromkeys(CASES)))


@gpu
@each_case
def test_linear(rows: int, out: int, in_: int, dtype: torch.dtype) -> None:
    x, weight, bias = strided(rows, in_, dtype), randn(out, in_, dtype=dtype), randn(out, dtype=dtype)
    expected = x.double() @ weight.double().t()
    assert_close(few_tokens.linear(x, WeightTiles(weight)), expected, dtype)
    assert_close(few_tokens.linear(x, WeightTiles(weight, bias=bias)), expected + bias.double(), dtype)


@gpu
@each_case
def test_norm_linear(rows: int, out: int, in_: int, dtype: torch.dtype) -> None:
    x, weight, bias = strided(rows, in_, dtype), randn(out, in_, dtype=dtype), randn(out, dtype=dtype)
    x *= 7
    for normed in both_ways(x, randn(in_, dtype=dtype)):
        expected = exact_norm(normed) @ weight.double().t()
        assert_close(few_tokens.norm_linear(normed, WeightTiles(weight)), expected, dtype)
        wide = few_tokens.norm_linear(normed, WeightTiles(weight, bias=bias), dtype=torch.float32)
        assert wide.dtype == torch.float32
        assert_close(wide.to(dtype), expected + bias.double(), dtype)


@gpu
@each_case
def test_norm_gated(rows: int, out: int, in_: int, dtype: torch.dtype) -> None:
    inter = out // 2 + 1
    x, gain, weight = strided(rows, in_, dtype), randn(in_, dtype=dtype), randn(2 * inter, in_, dtype=dtype)
    weight /= in_**0.5
    weight[0] *= 100  # a gate whose exp overflows on its way to zero
    for normed in both_ways(x, gain):
        both = exact_norm(normed) @ weight.double().t()
        expected = torch.nn.functional.silu(both[:, :inter]) * both[:, inter:]
        assert_close(few_tokens.norm_gated(normed, WeightTiles(weight)), expected, dtype, factors=2)


@gpu
@pytest.mark.parametrize("activation", [GELU_TANH, Activation("clamped_swiglu", 1.5)], ids=lambda a: a.kind)
def test_other_gates_and_gains_of_another_type(activation: Activation) -> None:
    """A gain may be float32 beside 16 bit rows, as one is that its file stores less one."""
    for dtype in DTYPES:
        x, gain, weight = strided(5, 200, dtype), randn(200), randn(74, 200, dtype=dtype) / 14
        for normed in (
            Normed(x, Norm(gain, EPS)),
            Normed(x, Norm(gain, EPS), (x * gain).to(dtype), x.float().square()),
        ):
            both = exact_norm(normed) @ weight.double().t()
            expected = reference.gated(both.float(), activation).double()
            assert_close(few_tokens.norm_gated(normed, WeightTiles(weight), activation), expected, dtype, factors=2)


def check_prepared(normed: Normed) -> None:
    """What a norm needs of its stream: x * gain, rounded once, and the squares of x as it was rounded."""
    x, dtype = normed.x.double(), normed.x.dtype
    scaled, squares = few_tokens.prepare(normed)
    assert scaled.dtype == dtype and squares.dtype == torch.float32
    assert torch.equal(scaled, (x * normed.norm.gain.double()).to(dtype))
    torch.testing.assert_close(squares.double().sum(1), x.square().sum(1), rtol=1e-5, atol=0)


@gpu
@each_case
def test_prepare(rows: int, out: int, in_: int, dtype: torch.dtype) -> None:
    check_prepared(Normed(strided(rows, in_, dtype), Norm(randn(in_, dtype=dtype), EPS)))


@gpu
@each_case
def test_add_linear_and_what_it_leaves_for_the_norm(rows: int, out: int, in_: int, dtype: torch.dtype) -> None:
    x, weight, bias = strided(rows, in_, dtype), randn(out, in_, dtype=dtype), randn(out, dtype=dtype)
    then, reader = Norm(randn(out, dtype=dtype), EPS), randn(40, out, dtype=dtype)
    residual = strided(rows + 1, out, dtype)
    untouched = residual[rows].clone()
    for added in (None, bias):
        expected = residual[:rows].double() + x.double() @ weight.double().t()
        if added is not None:
            expected += added.double()
        normed = few_tokens.add_linear(residual[:rows], x, WeightTiles(weight, bias=added), then)
        assert_close(residual[:rows], expected, dtype)
        assert normed.x.data_ptr() == residual.data_ptr() and normed.norm is then
        assert normed.scaled is not None and normed.squares is not None, "its reader would prepare it again"
        check_prepared(normed)
        assert_close(
            few_tokens.norm_linear(normed, WeightTiles(reader)), exact_norm(normed) @ reader.double().t(), dtype
        )
    assert torch.equal(residual[rows], untouched), "wrote past the rows"


@gpu
@each_case
def test_norm_argmax_is_that_of_the_float32_logits(rows: int, out: int, in_: int, dtype: torch.dtype) -> None:
    x, gain, weight = strided(rows, in_, dtype), randn(in_, dtype=dtype), randn(out, in_, dtype=dtype)
    weight[out // 3 :: out // 3] = weight[0]  # ties between programs
    for normed in both_ways(x, gain):
        logits = few_tokens.norm_linear(normed, WeightTiles(weight), dtype=torch.float32)
        got = few_tokens.norm_argmax(normed, WeightTiles(weight))
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
    got = few_tokens.norm_argmax(Normed(x, Norm(gain, EPS)), WeightTiles(weight)).tolist()
    assert (got[0], got[2]) == (7, 7)
    assert got[1] not in (3, 7, 21, 35)
    assert got[4:] == [0, 0]


@dataclass(frozen=True)
class Problem:
    weight: WeightTiles  # [out, in]
    norm: Norm  # of x
    writer: Tensor  # [in, 64]: of an add_linear that makes x
    then: Norm  # of the residual
    residual: Tensor  # [16, out]

    @classmethod
    def of(cls, out: int, in_: int, dtype: torch.dtype, weight: WeightTiles | None = None) -> Problem:
        return cls(
            weight or WeightTiles(randn(out, in_, dtype=dtype) / in_**0.5),
            Norm(randn(in_, dtype=dtype), EPS),
            randn(in_, 64, dtype=dtype) / 8,
            Norm(randn(out, dtype=dtype), EPS),
            randn(16, out, dtype=dtype),
        )

    def run(self, kind: str, x: Tensor, at: slice, written: bool) -> Tensor:
        """written: a norm reads what add_linear has made of x, not x as it is."""
        if kind == "linear":
            return few_tokens.linear(x, self.weight)
        if kind == "add_linear":
            left = few_tokens.add_linear(self.residual[at].clone(), x, self.weight, self.then)
            return torch.cat([left.x.float(), left.scaled.float(), left.squares], 1)
        normed = Normed(x, self.norm)
        if written:
            normed = few_tokens.add_linear(x.clone(), x[:, :64], WeightTiles(self.writer), self.norm)
        if kind == "norm_gated":
            return few_tokens.norm_gated(normed, self.weight)
        if kind == "norm_argmax":
            return few_tokens.norm_argmax(normed, self.weight)
        return few_tokens.norm_linear(normed, self.weight, dtype=torch.float32 if kind == "logits" else None)


def has_norm(kind: str) -> bool:
    return kind not in ("linear", "add_linear")


def check_rows_alone(
    kind: str, out: int, in_: int, dtype: torch.dtype, alone: list[int], weight: WeightTiles | None = None
) -> None:
    """Rows of a batch of 16 against the same rows alone and in batches of other sizes, with other neighbours."""
    x, problem = randn(16, in_, dtype=dtype), Problem.of(out, in_, dtype, weight)
    for written in (False, True)[: 1 + has_norm(kind)]:
        name = f"{kind}{' after add_linear' * written}"
        whole = problem.run(kind, x, slice(0, 16), written)
        assert not whole.isnan().any()
        for row in alone:
            at = slice(row, row + 1)
            assert torch.equal(problem.run(kind, x[at], at, written), whole[at]), f"{name} of row {row} alone"
        for begin, end in ((0, 8), (5, 8), (3, 16), (1, 10)):
            at = slice(begin, end)
            assert torch.equal(problem.run(kind, x[at], at, written), whole[at]), f"{name} of rows {begin} to {end}"
        strange = x.clone()
        strange[:9] = float("nan")
        strange[10:] *= 1000
        at = slice(9, 10)
        beside = problem.run(kind, strange, slice(0, 16), written)
        assert torch.equal(beside[at], whole[at]), f"{name} beside strange rows"


KINDS = ["linear", "norm_linear", "norm_gated", "add_linear", "norm_argmax", "logits"]


@gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out, in_", [(48, 192), (130 if INTERPRET else 500, 77)])
def test_a_row_does_not_depend_on_its_neighbours(kind: str, out: int, in_: int) -> None:
    for dtype in DTYPES:
        check_rows_alone(kind, out, in_, dtype, [0, 11])


def check_padding(
    kind: str, out: int, in_: int, dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch,
    weight: WeightTiles | None = None,
) -> None:  # fmt: skip
    """The same rows padded to 8 and to 16."""
    x, problem, at = randn(rows, in_, dtype=dtype), Problem.of(out, in_, dtype, weight), slice(0, rows)
    for written in (False, True)[: 1 + has_norm(kind)]:
        found = []
        for eight in (True, False):
            monkeypatch.setattr(few_tokens, "EIGHT_ROWS", eight)
            found.append(problem.run(kind, x, at, written))
        assert not found[0].isnan().any() and torch.equal(*found), f"{kind}{' after add_linear' * written}"


@gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out, in_, rows", [(48, 192, 1), (130 if INTERPRET else 500, 77, 8)])
def test_a_row_does_not_depend_on_its_padding(
    kind: str, out: int, in_: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dtype in DTYPES:
        check_padding(kind, out, in_, dtype, rows, monkeypatch)


@gpu_only
@pytest.mark.parametrize("out, in_", NAMED)
def test_a_row_of_a_named_shape_does_not_depend_on_its_padding(
    out: int, in_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the switches stand: where 16 rows are a wgmma, both are 16 unless EIGHT_ROWS_OF_WGMMA is on."""
    for rows in (1, 5, 8):
        check_padding(NAMED[out, in_], out, in_, torch.bfloat16, rows, monkeypatch)


def test_rows_are_padded_to_what_their_instruction_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper, spark, padded = GPUS[90], GPUS[121], few_tokens.padded_tokens
    blackwell = Gpu(10, 0, 148)  # of a data centre: 16 columns are a tcgen05.mma, and 8 an mma.sync
    assert [padded(1, *tile, blackwell) for tile in ((64, 4), (128, 8), (64, 2), (32, 4))] == [16, 16, 8, 8]
    assert [padded(rows, 64, 2, hopper) for rows in (1, 8, 9, 16)] == [8, 8, 16, 16]
    assert (padded(1, 64, 4, hopper), padded(1, 32, 4, hopper), padded(1, 64, 4, spark)) == (16, 8, 8)
    monkeypatch.setattr(few_tokens, "EIGHT_ROWS_OF_WGMMA", True)
    assert padded(1, 64, 4, hopper) == 8
    monkeypatch.setattr(few_tokens, "EIGHT_ROWS", False)
    assert padded(1, 64, 4, hopper) == padded(1, 16, 4, spark) == 16


@gpu_only
@pytest.mark.parametrize("out, in_", NAMED)
def test_a_row_of_a_named_shape_does_not_depend_on_its_neighbours(out: int, in_: int) -> None:
    check_rows_alone(NAMED[out, in_], out, in_, torch.bfloat16, list(range(0, 16, 3)))
    if in_ * out < 2**28:
        for kind in set(KINDS) - {NAMED[out, in_]}:
            check_rows_alone(kind, out, in_, torch.bfloat16, [0, 15])


@gpu_only
@pytest.mark.parametrize("rows", [1, 7, 16])
def test_overlapped_launches_in_a_graph_equal_launches_one_by_one(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel of a chain reads what the one before has written: an early read would show."""
    monkeypatch.undo()  # capture wants the real torch.empty
    hidden, inter, vocabulary, dtype = 1024, 4096, 5000, torch.bfloat16
    layers = [
        (
            Norm(randn(hidden, dtype=dtype), EPS),
            WeightTiles(randn(hidden, hidden, dtype=dtype) / 32),
            WeightTiles(randn(2 * inter, hidden, dtype=dtype) / 32),
            WeightTiles(randn(hidden, inter, dtype=dtype) / 64),
        )
        for _ in range(12)
    ]
    start, head = randn(rows, hidden, dtype=dtype), WeightTiles(randn(vocabulary, hidden, dtype=dtype))

    def chain() -> tuple[Tensor, Tensor]:
        residual = start.clone()
        normed = Normed(residual, layers[-1][0])
        for norm, square, gate_up, down in layers:
            normed = few_tokens.add_linear(residual, few_tokens.norm_linear(normed, square), square, norm)
            normed = few_tokens.add_linear(residual, few_tokens.norm_gated(normed, gate_up), down, norm)
        return residual, few_tokens.norm_argmax(normed, head)

    monkeypatch.setattr(pdl, "ENABLED", False)
    expected = chain()
    assert not expected[0].isnan().any()
    monkeypatch.setattr(pdl, "ENABLED", True)
    assert all(map(torch.equal, chain(), expected))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(20):
        captured[0].fill_(float("nan"))
        captured[1].fill_(-1)
        graph.replay()
        assert all(map(torch.equal, captured, expected))


# Host choices


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_in_flight_fit_into_shared_memory(capability: int, itemsize: int) -> None:
    """As few_tokens estimates it; the compiles below measure it, but only where a compiler runs."""
    target = GPUS[capability]
    for out, in_ in [*NAMED, (128, 64), (5000, 5000), (200, 77)]:
        for lines in (1, 2):
            launch = few_tokens._launch((out, in_), f"{8 * itemsize}bit", 8 * itemsize, itemsize, lines, target)
            columns = launch.tile.block_n // lines
            assert (launch.programs - 1) * columns < out // lines <= launch.programs * columns
            buffer = (launch.tile.block_n + few_tokens.MOST_TOKENS) * launch.tile.block_k * itemsize
            assert 3 <= launch.stages <= launch.tile.stages, "two tiles in flight at least"
            beside = 1 + (launch.programs > target.sms)
            assert (launch.stages - 1) * buffer * beside <= target.shared, (out, in_, launch)


def test_choices_for_other_shapes_fill_the_gpu() -> None:
    tiles = measured(GPUS[90])["few_rows", "16bit"]
    assert set(NAMED) <= set(tiles)
    for out, in_ in NAMED:
        assert in_ % tiles[out, in_][1] == 0, "a named shape needs no masks"
    assert few_tokens._choose(4096, 4096, 2, 132).block_n == 64
    assert few_tokens._choose(3072, 4096, 2, 132).block_n == 32
    assert few_tokens._choose(576, 576, 2, 132).block_n == 16
    assert few_tokens._choose(24576, 4096, 4, 132).block_n == 32


@pytest.mark.parametrize("rows", [0, 17])
def test_too_few_and_too_many_rows_are_refused(rows: int) -> None:
    x, weight, norm = torch.zeros(rows, 64), torch.zeros(48, 64), Norm(torch.zeros(64), EPS)
    normed = Normed(x, norm, x, torch.zeros(rows, 1))
    for call in (
        lambda: few_tokens.linear(x, WeightTiles(weight)),
        lambda: few_tokens.norm_linear(normed, WeightTiles(weight)),
        lambda: few_tokens.norm_gated(normed, WeightTiles(weight)),
        lambda: few_tokens.norm_argmax(normed, WeightTiles(weight)),
        lambda: few_tokens.add_linear(torch.zeros(rows, 48), x, WeightTiles(weight), Norm(torch.zeros(48), EPS)),
    ):
        with pytest.raises(AssertionError, match=f"{rows} rows: these kernels take 1 to 16"):
            call()


BY_ROW = (few_tokens._prepare, few_tokens._pick)  # one program a row, and no weight


def few_tokens_step(kind: str, out: int, in_: int, dtype: torch.dtype, rows: int, written: bool) -> None:
    """One function of few_tokens.py, on tensors without memory."""
    problem = Problem(
        WeightTiles(empty(out, in_, dtype=dtype)), Norm(empty(in_, dtype=dtype), EPS), empty(in_, 64, dtype=dtype),
        Norm(empty(out, dtype=dtype), EPS), empty(16, out, dtype=dtype),
    )  # fmt: skip
    problem.run(kind, empty(16, in_, dtype=dtype)[:rows], slice(rows), written)


@no_interpreter
@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("written", [False, True])
def test_rows_choose_nothing_of_a_launch(
    kind: str, capability: int, written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for their padding; else the bits of a row could depend on how many lie beside it. Only kernels of one program
    a row count them."""
    cases = [(4096, 4096, torch.bfloat16), (4000, 1000, torch.float16), (576, 77, torch.float32)]
    for out, in_, dtype in cases:
        seen = []
        for rows in (1, 2, 8, 16):
            launches = captured_launches(
                monkeypatch, capability, partial(few_tokens_step, kind, out, in_, dtype, rows, written)
            )
            assert all(launch.grid == (rows,) for launch in launches if launch.kernel in BY_ROW)
            grids = [launch.grid for launch in launches if launch.kernel not in BY_ROW]
            padded = [launch.options.pop("ROWS") for launch in launches if launch.kernel not in BY_ROW]
            assert set(padded) <= ({8, 16} if rows <= 8 else {16}) and (8 in padded) <= (rows <= 8)
            seen.append((grids, [(launch.kernel, launch.options) for launch in launches]))
        assert all(each == seen[0] for each in seen), seen


# Ahead of time compiles: no GPU, but not under the interpreter, which replaces the compiler


def check_order(kernel: object, asm: dict[str, str]) -> None:
    """Nothing that another kernel writes is touched before the wait, and all paths wait; nobody is let in early."""
    ptx, ttir = asm["ptx"], asm["ttir"]
    assert ptx.count("griddepcontrol.wait") == 1 and "griddepcontrol.launch_dependents" not in ptx
    early = ptx[: ptx.index("griddepcontrol.wait")]
    assert not re.search(r"\bst\.global|cp\.async|\bbra\b|\bret;", early), early
    if kernel is few_tokens._prepare:  # its gain, a weight, is all that may be loaded ahead
        head, body = ttir[ttir.index("tt.func") : ttir.index("griddepcontrol.wait")].split("\n", 1)
        names = re.findall(r"%(\w+): ", head)
        assert set(names) & set(re.findall(r"%(\w+)", body)) == {names[kernel.arg_names.index("gain")]}, body
    else:
        assert "ld.global" not in early, early


def check_compiled(
    monkeypatch: pytest.MonkeyPatch, capability: int, kind: str, out: int, in_: int, dtype: torch.dtype
) -> None:
    target = GPUS[capability]
    launches: list[Launch] = []
    for written in (False, True)[: 1 + has_norm(kind)]:
        for rows in (1, 16):
            step = partial(few_tokens_step, kind, out, in_, dtype, rows, written)
            launches += captured_launches(monkeypatch, capability, step)
    instructions: dict[tuple[object, ...], set[str]] = {}
    for launch in launches:
        made, _ = compile_launch(capability, launch)
        ptx, shared = made.asm["ptx"], made.metadata.shared
        used = set(re.findall(r"wgmma\.mma_async\S+|mma\.sync\S+", ptx))
        size = {name: launch.options.get(name) for name in ("BLOCK_N", "BLOCK_K", "num_warps", "num_stages")}
        print(f"sm_{capability} {kind} {out} x {in_} {dtype} {made.metadata.name} {size}: {shared}, {used}")
        assert made.metadata.launch_pdl
        check_order(launch.kernel, made.asm)
        beside = 1 + (launch.grid[0] > target.sms)  # programs share an SM where there are more; 1 KB of each is taken
        assert beside * (shared + 1024) <= target.shared + 1024
        if launch.kernel in BY_ROW:
            continue
        assert all(p.do_not_specialize for p in launch.kernel.params if p.name == "rows"), "compiled for its rows"
        assert len(used) == (dtype.itemsize == 2), used
        wide = target.wgmma and launch.options["BLOCK_N"] >= 64 and launch.options["num_warps"] % 4 == 0
        assert all(name.startswith("wgmma") == wide for name in used), used
        seen = instructions.setdefault((launch.kernel, launch.grid, *size.values()), used)
        assert seen == used, "the rows of a batch of 1 and of 16 are multiplied by different instructions"


@compiled
@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("out, in_", NAMED)
def test_named_shapes_compile(out: int, in_: int, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_compiled(monkeypatch, capability, NAMED[out, in_], out, in_, torch.bfloat16)


@compiled
@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("kind", KINDS)
def test_other_shapes_and_types_compile(kind: str, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_compiled(monkeypatch, capability, kind, 4000, 1000, torch.float16)
    check_compiled(monkeypatch, capability, kind, 4096, 2048, torch.float32)
