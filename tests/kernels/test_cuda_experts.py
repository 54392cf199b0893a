"""Routing and experts against the torch reference: on a GPU, or small shapes under TRITON_INTERPRET=1.

Fresh outputs and scratch are poisoned. A row alone must equal the same row in a batch of up to 16 to the bit, although
batches of different sizes take different kernels. The last part needs no GPU: it compiles the launches of published
models for sm_90 and sm_121; speed is left to tools/cuda_experts.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

from sparkdraft.kernels import cuda, reference
from sparkdraft.kernels.cuda.linear import few_tokens
from sparkdraft.kernels.cuda.moe import experts, routing
from sparkdraft.kernels.cuda.runtime import pdl, tuned
from sparkdraft.kernels.ops import GELU_TANH, SILU, Activation, Norm, Normed, Routing
from sparkdraft.weights.linear import DenseExperts, DenseLinear
from tests.kernels.ahead_of_time import GPUS, LIMIT, captured_launches, check_order, compile_launch, empty
from tests.kernels.triton_device import (
    DEVICE,
    DTYPES,
    INTERPRET,
    assert_close,
    compiled,
    gpu,
    gpu_only,
    integers,
    randn,
)

pytestmark = pytest.mark.usefixtures("poisoned_empty")

EPS = 1e-5
CLAMPED = Activation("clamped_swiglu", 1.5)  # so low that it clamps many


# Routing


def route_both(
    x: Tensor, router: DenseLinear, top_k: int, renormalise: bool, scale: Tensor | None = None
) -> tuple[Routing, Routing]:
    normed = Normed(x, Norm(torch.ones(x.shape[1], device=DEVICE), EPS))
    return tuple(ops.norm_route(normed, router, top_k, renormalise, scale) for ops in (cuda, reference))


@gpu
@pytest.mark.parametrize("rows", [1, 3, 16, 17])
@pytest.mark.parametrize("count, top_k", [(8, 1), (8, 8), (32, 4), (100, 5), (128, 8), (512, 10), (512, 16)])
def test_route(count: int, top_k: int, rows: int) -> None:
    x, router = randn(rows, 64), DenseLinear(randn(count, 64) / 4, randn(count))
    for renormalise, scale in ((True, None), (False, None), (True, torch.rand(count, device=DEVICE) + 0.5)):
        got, expected = route_both(x, router, top_k, renormalise, scale)
        assert got.ids.dtype == torch.int32 and got.weights.dtype == torch.float32
        assert torch.equal(got.ids, expected.ids)
        torch.testing.assert_close(got.weights, expected.weights, rtol=1e-4, atol=1e-6)


def route_logits(logits: Tensor, top_k: int) -> Routing:
    """These very numbers as logits: rows of an identity, whose norm is 1, through a router that holds them."""
    rows, count = logits.shape
    eye = torch.eye(rows, 64, device=DEVICE) * 8
    router = DenseLinear(torch.zeros(count, 64, device=DEVICE))
    router.linear_float32 = lambda x: logits  # type: ignore[method-assign]
    router.tiles = None
    return cuda.norm_route(Normed(eye, Norm(torch.ones(64, device=DEVICE), 0.0)), router, top_k, True)


@gpu
def test_ties_go_to_the_lower_number_and_nan_is_chosen_but_stays_inside() -> None:
    inf, nan = float("inf"), float("nan")
    logits = torch.zeros(9, 40, device=DEVICE)
    logits[1, [7, 21, 35]] = 1.0
    logits[2, ::2] = -0.0  # equals 0
    logits[3] = -inf
    logits[4, 30] = nan
    logits[5] = nan
    logits[6, 1:] = -inf
    logits[7, [3, 9]] = inf
    logits[8] = -torch.arange(40, device=DEVICE).float()
    got = route_logits(logits, 4)
    assert got.ids.tolist() == [
        [0, 1, 2, 3], [7, 21, 35, 0], [0, 1, 2, 3], [0, 1, 2, 3], [30, 0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3],
        [3, 9, 0, 1], [0, 1, 2, 3],
    ]  # fmt: skip
    stable = logits.sort(dim=-1, descending=True, stable=True).indices[:, :4]
    assert torch.equal(got.ids.long(), stable), "the reference's order"
    assert got.weights[4].isnan().all() and got.weights[5].isnan().all()
    assert got.weights[0].tolist() == [0.25] * 4 and got.weights[6].tolist() == [1, 0, 0, 0]


@gpu
@pytest.mark.parametrize(
    "rows, top_k, count, size", [(1, 2, 8, 16), (5, 3, 8, 16), (34, 2, 4, 16), (70, 2, 8, 16), (700, 2, 8, 32)]
)
def test_blocks_hold_every_pair_once(rows: int, top_k: int, count: int, size: int) -> None:
    ids = torch.rand(rows, count, device=DEVICE).argsort(1)[:, :top_k].int().contiguous()
    if rows == 5:
        ids[:] = integers([6, 1, 3])  # all rows alike, and experts without any
    if rows == 34:
        ids[::2], ids[1::2] = integers([0, 1]), integers([3, 2])  # 17 of each: as many blocks as there can be
    blocks = routing.cut(Routing(ids, torch.zeros(rows, top_k, device=DEVICE)), count, size)
    order, table, flat = blocks.order.tolist(), blocks.table.tolist(), ids.flatten().tolist()
    used = [entry for entry in table if entry[0] >= 0]
    assert table[: len(used)] == used and all(entry[0] == -1 for entry in table[len(used) :])
    assert len(used) == sum(-(-flat.count(e) // size) for e in set(flat))
    seen = []
    for expert, first, last in used:
        assert 0 < last - first <= size and all(flat[pair] == expert for pair in order[first:last])
        seen += order[first:last]
    assert rows != 34 or len(used) == len(table) == 8
    assert seen == order == sorted(range(len(flat)), key=lambda pair: (flat[pair], pair))


@gpu
@pytest.mark.parametrize("rows, count, top_k, live", [(6, 64, 2, 4), (16, 8, 2, 5), (16, 8, 2, 0), (40, 8, 2, 17)])
def test_dead_rows_reach_no_expert(rows: int, count: int, top_k: int, live: int) -> None:
    """Pair by pair, in blocks, and in batches of more rows: those before them are as if they were alone."""
    problem, x = Problem.of(count, 40, 24, DTYPES[0]), randn(rows, 40, dtype=DTYPES[0])
    router, number = DenseLinear(randn(count, 40, dtype=DTYPES[0])), integers([live])
    got, expected = (
        ops.norm_route(Normed(x, problem.norm), router, top_k, True, None, number) for ops in (cuda, reference)
    )
    assert torch.equal(got.ids, expected.ids) and (got.ids[live:] == -1).all() and (got.ids[:live] >= 0).all()
    assert not got.weights[live:].any()
    blocks = routing.cut(got, count, 16)
    used = [entry for entry in blocks.table.tolist() if entry[0] >= 0]
    assert {entry[0] for entry in used} == set(got.ids[:live].flatten().tolist())
    assert sorted(pair for _, first, last in used for pair in blocks.order[first:last].tolist()) == [
        *range(live * top_k)
    ]
    added = cuda.add_experts(Normed(x.clone(), problem.norm), got, *problem.arguments, problem.then)
    wanted = reference.add_experts(Normed(x.clone(), problem.norm), expected, *problem.arguments, problem.then)
    if live:
        assert_close(added.x[:live], wanted.x[:live], DTYPES[0])
    assert torch.equal(wanted.x[live:], x[live:])


# Experts


@dataclass(frozen=True)
class Problem:
    gate_up: DenseExperts
    down: DenseExperts
    norm: Norm
    then: Norm
    activation: Activation

    @classmethod
    def of(
        cls, count: int, hidden: int, inter: int, dtype: torch.dtype, bias: bool = False, activation: Activation = SILU
    ) -> Problem:
        wide, narrow = randn(count, 2 * inter, hidden) / hidden**0.5, randn(count, hidden, inter) * 2 / inter**0.5
        biases = [randn(count, n).to(dtype) if bias else None for n in (2 * inter, hidden)]
        norms = [Norm(torch.rand(hidden, device=DEVICE) + 0.5, EPS) for _ in range(2)]  # gains may be float32
        return cls(
            DenseExperts(wide.to(dtype), biases[0]), DenseExperts(narrow.to(dtype), biases[1]), norms[0],
            Norm(norms[1].gain.to(dtype), EPS), activation,
        )  # fmt: skip

    @property
    def arguments(self) -> tuple[DenseExperts, DenseExperts, Activation]:
        return self.gate_up, self.down, self.activation

    def exact(self, x: Tensor, chosen: Routing) -> Tensor:
        """Of the reference in float32, where it rounds nothing on the way."""
        wide = [
            DenseExperts(e.floats.float(), None if e.bias is None else e.bias.float())
            for e in (self.gate_up, self.down)
        ]
        return reference.norm_experts(Normed(x.float(), self.norm), chosen, *wide, self.activation)


def random_routing(rows: int, count: int, top_k: int) -> Routing:
    ids = torch.rand(rows, count, device=DEVICE).argsort(1)[:, :top_k].int().contiguous()
    return Routing(ids, torch.rand(rows, top_k, device=DEVICE).softmax(-1))


def strided(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows that are apart in memory, with NaN between them."""
    whole = torch.full((rows, width + 8), float("nan"), device=DEVICE, dtype=dtype)
    whole[:, :width] = randn(rows, width, dtype=dtype)
    return whole[:, :width]


def check_experts(rows: int, top_k: int, problem: Problem, dtype: torch.dtype) -> None:
    hidden = problem.norm.gain.shape[0]
    residual = strided(rows + 1, hidden, dtype)
    x, untouched = residual[:rows], residual[rows].clone()
    chosen = random_routing(rows, problem.gate_up.count, top_k)
    expected = problem.exact(x, chosen)
    got = cuda.norm_experts(Normed(x, problem.norm), chosen, *problem.arguments)
    assert got.dtype == dtype and got.shape == x.shape
    assert_close(got, expected, dtype)
    total = x.float() + expected
    left = cuda.add_experts(Normed(x, problem.norm), chosen, *problem.arguments, problem.then)
    assert left.x.data_ptr() == residual.data_ptr() and left.norm is problem.then
    assert_close(x, total, dtype)
    assert torch.equal(residual[rows], untouched), "wrote past the rows"
    assert (left.scaled is not None) == (left.squares is not None) == (rows <= few_tokens.MOST_TOKENS)
    if left.scaled is not None:
        assert torch.equal(left.scaled, (x.double() * problem.then.gain.double()).to(dtype))
        torch.testing.assert_close(left.squares.double().sum(1), x.double().square().sum(1), rtol=1e-5, atol=0)


@gpu
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 16, 17, 64, 65, 200])
def test_experts_by_rows(rows: int) -> None:
    """In order: pairs one by one, blocks of 16 to 64."""
    for dtype in DTYPES[:: 2 if INTERPRET and rows > 2 else 1]:
        check_experts(rows, 2, Problem.of(8, 40, 24, dtype), dtype)


@gpu
@pytest.mark.parametrize(
    "rows, count, top_k", [(1, 32, 8), (3, 128, 8), (1, 128, 5), (2, 8, 1), (3, 8, 7), (130, 8, 8)]
)
def test_experts_by_choices(rows: int, count: int, top_k: int) -> None:
    """One by one with choices that are no power of two, and the largest blocks."""
    check_experts(rows, top_k, Problem.of(count, 48, 32, DTYPES[0]), DTYPES[0])


@gpu
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("activation", [SILU, GELU_TANH, CLAMPED], ids=lambda a: a.kind)
def test_experts_with_biases_and_every_activation(activation: Activation, rows: int) -> None:
    check_experts(rows, 2, Problem.of(8, 136, 72, DTYPES[1], True, activation), DTYPES[1])


PUBLISHED = {  # experts, choices, hidden, inter, biases, activation
    "qwen3-30b-a3b": (128, 8, 2048, 768, False, SILU),
    "gpt-oss-20b": (32, 4, 2880, 2880, True, Activation("clamped_swiglu", 7.0)),
    "gemma4-26b-a4b": (128, 8, 2816, 704, False, GELU_TANH),
}


@gpu_only
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 64, 200])
@pytest.mark.parametrize("name", PUBLISHED)
def test_experts_of_published_shapes(name: str, rows: int) -> None:
    count, top_k, hidden, inter, bias, activation = PUBLISHED[name]
    check_experts(rows, top_k, Problem.of(count, hidden, inter, torch.bfloat16, bias, activation), torch.bfloat16)


@gpu
def test_no_rows() -> None:
    problem, nothing = Problem.of(8, 40, 24, DTYPES[0]), randn(0, 40, dtype=DTYPES[0])
    chosen = cuda.norm_route(Normed(nothing, problem.norm), DenseLinear(randn(8, 40, dtype=DTYPES[0])), 2, True)
    assert chosen.ids.shape == chosen.weights.shape == (0, 2)
    assert cuda.norm_experts(Normed(nothing, problem.norm), chosen, *problem.arguments).shape == (0, 40)
    assert cuda.add_experts(Normed(nothing, problem.norm), chosen, *problem.arguments, problem.then).x is nothing


def check_rows_alone(problem: Problem, top_k: int, dtype: torch.dtype, ranges: list[tuple[int, int]]) -> None:
    x, chosen = randn(16, problem.norm.gain.shape[0], dtype=dtype), random_routing(16, problem.gate_up.count, top_k)

    def run(rows: Tensor, first: int, last: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        part = Routing(chosen.ids[first:last].contiguous(), chosen.weights[first:last].contiguous())
        normed = few_tokens_normed(rows[first:last].clone(), problem.norm)
        plain = cuda.norm_experts(normed, part, *problem.arguments)
        left = cuda.add_experts(normed, part, *problem.arguments, problem.then)
        return plain, left.x, left.scaled, left.squares

    whole = run(x, 0, 16)
    assert not any(part.isnan().any() for part in whole)
    for first, last in ranges:
        for name, a, b in zip(("sum", "x", "scaled", "squares"), run(x, first, last), whole, strict=True):
            assert torch.equal(a, b[first:last]), f"{name} of rows {first} to {last}"
    strange = x.clone()
    strange[:9] = float("nan")
    strange[10:] *= 1000
    for name, a, b in zip(("sum", "x", "scaled", "squares"), run(strange, 0, 16), whole, strict=True):
        assert torch.equal(a[9], b[9]), f"{name} beside strange rows"


def few_tokens_normed(x: Tensor, norm: Norm) -> Normed:
    scaled, squares = few_tokens.prepare(Normed(x, norm))
    return Normed(x, norm, scaled, squares)


@gpu
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_does_not_depend_on_its_neighbours(bias: bool) -> None:
    """Alone it is taken one by one, in company in a block."""
    assert experts.one_by_one(1, 2, 8) and not experts.one_by_one(2, 2, 8)
    for dtype in DTYPES[1:] if INTERPRET else DTYPES[:2]:
        problem = Problem.of(8, 100, 40, dtype, bias)
        check_rows_alone(problem, 2, dtype, [(0, 1), (9, 10), (3, 5), (1, 8)])


def check_padding(problem: Problem, top_k: int, rows: int, dtype: torch.dtype, patch: pytest.MonkeyPatch) -> None:
    x, chosen = randn(rows, problem.norm.gain.shape[0], dtype=dtype), random_routing(rows, problem.gate_up.count, top_k)
    found = []
    for eight in (True, False):
        patch.setattr(few_tokens, "EIGHT_ROWS", eight)
        left = cuda.add_experts(few_tokens_normed(x.clone(), problem.norm), chosen, *problem.arguments, problem.then)
        found.append((left.x, left.scaled, left.squares))
    assert not found[0][0].isnan().any() and all(map(torch.equal, *found))


@gpu
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_a_row_does_not_depend_on_its_padding(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs one by one and in blocks; choices are columns too."""
    for dtype in DTYPES:
        check_padding(Problem.of(8, 100, 40, dtype, True), 2, rows, dtype, monkeypatch)


@gpu_only
@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_row_of_a_published_shape_does_not_depend_on_its_padding(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, top_k, hidden, inter, bias, activation = PUBLISHED[name]
    problem = Problem.of(count, hidden, inter, torch.bfloat16, bias, activation)
    check_padding(problem, top_k, rows, torch.bfloat16, monkeypatch)


@gpu_only
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_row_of_a_published_shape_does_not_depend_on_its_neighbours(name: str) -> None:
    count, top_k, hidden, inter, bias, activation = PUBLISHED[name]
    problem = Problem.of(count, hidden, inter, torch.bfloat16, bias, activation)
    check_rows_alone(problem, top_k, torch.bfloat16, [(n, n + 1) for n in range(16)] + [(0, 2), (3, 7), (5, 13)])


@gpu_only
@pytest.mark.parametrize("rows", [1, 4, 16, 64])
def test_layers_in_a_graph_equal_launches_one_by_one(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel reads what the one before has written, and a replay routes anew: an early read would show."""
    monkeypatch.undo()  # capture wants the real torch.empty
    dtype, hidden = torch.bfloat16, 512
    layers = [(Problem.of(32, hidden, 256, dtype), DenseLinear(randn(32, hidden, dtype=dtype))) for _ in range(6)]
    inputs, start = randn(3, rows, hidden, dtype=dtype), randn(rows, hidden, dtype=dtype)

    def chain() -> Tensor:
        residual = start.clone()
        normed = Normed(residual, layers[-1][0].norm)
        for problem, router in layers:
            chosen = cuda.norm_route(normed, router, 4, True)
            normed = cuda.add_experts(normed, chosen, *problem.arguments, problem.then)
        return residual

    monkeypatch.setattr(pdl, "ENABLED", False)
    expected = []
    for each in inputs:
        start.copy_(each)
        expected.append(chain())
    monkeypatch.setattr(pdl, "ENABLED", True)
    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(5):
        for each, result in zip(inputs, expected, strict=True):
            start.copy_(each)
            captured.fill_(float("nan"))
            graph.replay()
            assert torch.equal(captured, result) and not result.isnan().any()


@gpu_only
def test_a_router_with_a_bias_is_not_rounded_on_the_way() -> None:
    x, router = randn(40, 256).bfloat16(), DenseLinear(randn(32, 256).bfloat16(), randn(32).bfloat16())
    exact = x.double() @ router.weight.double().t() + router.bias.double()
    torch.testing.assert_close(router.linear_float32(x).double(), exact, rtol=1e-5, atol=1e-4)


# Host choices


@pytest.mark.parametrize("capability", GPUS)
def test_tiles_of_few_tokens_run_one_instruction(capability: int) -> None:
    """Those of the tables and those of the rule: else a row's bits could depend on the rows beside it."""
    target = GPUS[capability]
    known = {
        (kernel, key)
        for (kernel, form), found in tuned.tables(target).items()
        for key in found
        if kernel.startswith("experts") and form == "16bit"
    }
    for count, top_k, hidden, inter, *_ in [*PUBLISHED.values(), (16, 1, 512, 256), (64, 6, 1024, 640)]:
        wide, narrow, choices = (2 * inter, hidden), (hidden, inter), triton.next_power_of_2(top_k)
        known |= {(experts.FEW_GATE_UP, (*wide, choices)), (experts.FEW_DOWN, (*narrow, choices))}
        known |= {(experts.ROW_DOWN, (*narrow, choices)), (experts.GATE_UP, (*wide, 16)), (experts.DOWN, (*narrow, 16))}
        known |= {(kernel, (*narrow, size)) for kernel in (experts.DOWN,) for size in (32, 64, 128)}
        assert experts.one_by_one(1, top_k, count)
    for kernel, (out, in_, size) in known:
        for programs in (1, 8, 128):  # `_launch` itself asserts it
            launch = experts._launch(kernel, (out, in_), size, programs, "16bit", 16, 2, target)
            assert launch.stages >= 2 and launch.programs * launch.tile.block_n >= out


def test_block_sizes() -> None:
    assert [experts.block_size(rows, 8, 128) for rows in (5, 16, 64, 200, 1024, 4096)] == [16, 16, 16, 32, 64, 128]
    assert experts.block_size(16, 8, 8) == 16, "up to 16 rows one tile serves all"


def experts_step(name: str, rows: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """The router and experts of a layer, on tensors without memory."""
    count, top_k, hidden, inter, bias, activation = PUBLISHED[name]
    x, norm = empty(rows, hidden, dtype=dtype), Norm(empty(hidden, dtype=dtype), EPS)
    gate_up = DenseExperts(
        empty(count, 2 * inter, hidden, dtype=dtype), empty(count, 2 * inter, dtype=dtype) if bias else None
    )
    down = DenseExperts(empty(count, hidden, inter, dtype=dtype), empty(count, hidden, dtype=dtype) if bias else None)
    normed = Normed(x, norm)
    live = empty(1, dtype=torch.int32) if rows > 1 else None
    chosen = cuda.norm_route(normed, DenseLinear(empty(count, hidden, dtype=dtype)), top_k, True, None, live)
    cuda.add_experts(normed, chosen, gate_up, down, activation, norm)


MATMULS = (experts._gate_up, experts._down, experts._row_down)


@compiled
@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_compile(name: str, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    few: set[str] = set()
    for rows in (1, 16, 64, 256, 2048):
        for launch in captured_launches(monkeypatch, capability, lambda rows=rows: experts_step(name, rows)):
            made, signature = compile_launch(capability, launch)
            assert made.metadata.shared <= LIMIT[capability] and made.metadata.launch_pdl, launch
            if launch.kernel.__module__ == few_tokens.__name__:
                continue  # test_cuda_few_tokens.py reads those
            check_order(launch.kernel, signature, made.asm["ptx"])
            used = set(re.findall(r"wgmma\.mma_async\S+|mma\.sync\S+", made.asm["ptx"]))
            if launch.kernel is routing._route_few:  # the router's own matmul
                assert len(used) == 1 and rows <= few_tokens.MOST_TOKENS
                continue
            assert len(used) == (launch.kernel in MATMULS), (launch.kernel, used)
            few |= used if rows <= few_tokens.MOST_TOKENS else set()
    assert len(few) == 1, few


@compiled
@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_types_compile(dtype: torch.dtype, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for rows in (1, 16, 300):
        step = lambda rows=rows: experts_step("gpt-oss-20b", rows, dtype)  # noqa: E731
        for launch in captured_launches(monkeypatch, capability, step):
            made, _ = compile_launch(capability, launch)
            assert made.metadata.shared <= LIMIT[capability], launch
