"""What the last program of a launch does for the others: on a GPU, or under TRITON_INTERPRET=1.

Attention's parts are joined by it or by a kernel of its own, and so are experts chosen: both ways must agree to the
bit, and no counter may be left behind. Sums whose order is written out are compared with torch.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl

from sparkdraft.kernels import cuda
from sparkdraft.kernels.cuda.attention import paged
from sparkdraft.kernels.cuda.linear import few_tokens
from sparkdraft.kernels.cuda.moe import routing
from sparkdraft.kernels.cuda.runtime import ending
from sparkdraft.kernels.cuda.runtime.gpu import Gpu, gpu_of
from sparkdraft.kernels.ops import AttentionParams, AttentionView, Norm, Normed, Routing
from sparkdraft.operate.tune import tiles
from sparkdraft.weights.linear import DenseLinear
from tests.kernels.ahead_of_time import captured_launches, empty
from tests.kernels.test_cuda import MOST, check_attention, last_rows, make_batch
from tests.kernels.triton_device import DEVICE, DTYPES, INTERPRET, gpu, gpu_only, integers, no_interpreter, randn

pytestmark = pytest.mark.usefixtures("poisoned_empty")

HOPPER = Gpu(9, 0, 132)


def assert_no_counter_is_left() -> None:
    assert not ending.counters(torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)).any()


# Sums in a written order


@triton.jit
def _sums(x, rows, columns, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    lane, column = tl.arange(0, COUNT), tl.arange(0, WIDTH)
    value = tl.load(x + lane[:, None] * WIDTH + column[None, :])
    tl.store(rows + column, ending.sum_rows(value, COUNT, WIDTH))
    tl.store(columns + lane, ending.sum_columns(value, COUNT, WIDTH))


def halves(x: Tensor) -> Tensor:
    """Over the first dimension: the second half is added to the first, and so on."""
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x[0]


@gpu
@pytest.mark.parametrize("count, width", [(1, 16), (64, 8), (64, 16), (16, 64), (8, 512), (2, 1)])
def test_sums_are_halves_of_halves(count: int, width: int) -> None:
    x, rows, columns = randn(count, width), randn(width), randn(count)
    for warps in (1, 4):
        _sums[(1,)](x, rows, columns, COUNT=count, WIDTH=width, num_warps=warps)
        assert torch.equal(rows, halves(x)) and torch.equal(columns, halves(x.t()))


# Attention's parts


def both_joins(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[Tensor, Tensor]:
    """Joined by the last program, and by the second kernel."""
    found = []
    for most in (1 << 40, 0):
        monkeypatch.setattr(paged, "JOIN_INSIDE", most)
        found.append(cuda.paged_attention(*arguments))
        assert_no_counter_is_left()
    return found[0], found[1]


BATCHES = [  # rows and keys of each sequence, the rows that agree in bits, window
    ([1], [700], 0, 0),
    ([1, 1, 1], [17, 300, 1], 0, 0),
    ([5, 2, 1], [5, 140, 700], MOST, 0),
    ([16, 16], [16, 333], MOST, 0),
    ([1, 2], [700, 523], 0, 37),
    ([3, 1], [650, 400], MOST, 128),
]
BATCHES += [([1], [9000], 0, 0), ([16] * 4, [8000, 17, 5000, 300], MOST, 0), ([300, 1], [5000, 9000], 0, 1024)] * (
    not INTERPRET
)
SHAPES = [(DTYPES[0], 8, 2, 64), (DTYPES[1], 3, 1, 80)]
SHAPES += [(torch.bfloat16, *each) for each in ((32, 4, 128), (64, 8, 64), (24, 4, 256), (16, 2, 512))] * (
    not INTERPRET
)


@gpu
@pytest.mark.parametrize("dtype, heads, kv_heads, head_dim", SHAPES)
@pytest.mark.parametrize("queries, contexts, most, window", BATCHES)
@pytest.mark.parametrize("sinks", [False, True])
def test_both_ways_join_parts_alike(
    sinks: bool, queries: list[int], contexts: list[int], most: int, window: int, dtype: torch.dtype,
    heads: int, kv_heads: int, head_dim: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    q, k, v, view = make_batch(queries, contexts, heads, kv_heads, head_dim, dtype)
    sink = torch.linspace(-3, 5, heads, device=DEVICE) if sinks else None
    params, last = AttentionParams(head_dim**-0.5, True, window, sink), sum(queries)
    inside, apart = both_joins(monkeypatch, q, k, v, view, params, most)
    assert not inside[:last].isnan().any() and torch.equal(inside[:last], apart[:last])
    monkeypatch.setattr(paged, "JOIN_INSIDE", 1 << 40)
    check_attention(q, k, v, view, True, window, most, sink)


@gpu
def test_lines_and_steps_of_any_number_join_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many parts are on their way, and of how many lines, changes no sum."""
    q, k, v, view = make_batch([2], [1500], 4, 1, 64, DTYPES[0])
    found = []
    for numbers in (16, 64, 1024):
        monkeypatch.setattr(paged, "JOIN_NUMBERS", numbers)
        found += both_joins(monkeypatch, q, k, v, view, AttentionParams(0.125))
    assert all(torch.equal(found[0][:2], each[:2]) for each in found)


@gpu
@pytest.mark.parametrize("most", [1, 40])
def test_rows_without_keys_are_zeros(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, view = make_batch([1, most, 1, 1], [300, 290, 0, 0], 8, 2, 64, DTYPES[0])
    for got in both_joins(monkeypatch, q, k, v, view, AttentionParams(0.125)):
        assert (got[1 + most : 3 + most] == 0).all()


@gpu
def test_a_single_row_joins_inside_as_its_block_joins_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafted block has more parts than a program should join, its rows alone have not."""
    contexts = [523]
    q, k, v, view = make_batch([MOST], contexts, 8, 1, 64, DTYPES[0], padding=0)
    monkeypatch.setattr(paged, "JOIN_INSIDE", 0)
    params = AttentionParams(0.125)
    block = cuda.paged_attention(q, k, v, last_rows(view, contexts, MOST), params, MOST)
    monkeypatch.setattr(paged, "JOIN_INSIDE", 1 << 40)
    for row in (0, 9, 15):
        alone = last_rows(view, [contexts[0] - MOST + 1 + row], 1)
        assert torch.equal(cuda.paged_attention(q[row : row + 1], k, v, alone, params, MOST)[0], block[row])


@gpu_only
def test_keys_of_eight_bits_join_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, view = make_batch([1, 1, 5], [3000, 700, 40], 32, 8, 128, torch.bfloat16)
    k, v = (x.to(torch.float8_e4m3fn) for x in (k, v))
    inside, apart = both_joins(monkeypatch, q, k, v, view, AttentionParams(0.1))
    assert torch.equal(inside[:7], apart[:7])


@gpu_only
def test_replays_leave_no_counter_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # capture wants the real torch.empty
    q, k, v, view = make_batch([1] * 2, [6000, 900], 32, 4, 128, torch.bfloat16, padding=0)
    router, norm = DenseLinear(randn(128, 512, dtype=q.dtype)), Norm(randn(512, dtype=q.dtype), 1e-6)
    x = randn(2, 512, dtype=q.dtype)

    def step() -> tuple[Tensor, Tensor, Tensor]:
        return cuda.paged_attention(q, k, v, view, AttentionParams(0.1)), *cuda.norm_route(
            Normed(x, norm), router, 8, True
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for contexts in ([6000, 900], [5, 129], [5999, 0]):
        view.context_len.copy_(integers(contexts))
        for _ in range(20):
            graph.replay()
        assert all(map(torch.equal, captured, step()))
        assert_no_counter_is_left()


def attention_launches(monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, dim: int, rows: int, seqs: int):
    def step() -> None:
        q, caches = empty(rows * seqs, heads, dim), [empty(64, kv_heads, 16, dim) for _ in range(2)]
        starts, contexts, tables = (empty(*n, dtype=torch.int32) for n in ((seqs + 1,), (seqs,), (seqs, 2048)))
        cuda.paged_attention(q, *caches, AttentionView(starts, contexts, tables, rows, 32768), AttentionParams(0.1))

    return [launch.kernel for launch in captured_launches(monkeypatch, 90, step)]


@no_interpreter
def test_parts_of_few_tokens_are_joined_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = [paged._attend], [paged._attend, paged._join]
    assert attention_launches(monkeypatch, 32, 4, 128, 1, 1) == one, "qwen3-30b-a3b"
    assert attention_launches(monkeypatch, 64, 8, 64, 1, 1) == one, "gpt-oss-20b"
    assert attention_launches(monkeypatch, 32, 8, 128, 1, 16) == one, "16 streams"
    assert attention_launches(monkeypatch, 32, 8, 128, 16, 1) == two, "a drafted block has more than a program reads"
    assert attention_launches(monkeypatch, 32, 8, 128, 256, 1) == two, "a part of a prompt"


# The choice of experts


def both_routes(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[Routing, Routing]:
    found = []
    for few in (True, False):
        monkeypatch.setattr(routing, "ROUTE_FEW", few)
        found.append(cuda.norm_route(*arguments))
        assert_no_counter_is_left()
    return found[0], found[1]


@gpu
@pytest.mark.parametrize("split", [1, 3, 8])
@pytest.mark.parametrize("rows, count, top_k", [(1, 128, 8), (3, 32, 4), (8, 100, 5), (9, 8, 8), (16, 40, 1)])
def test_the_router_chooses_as_a_kernel_of_its_own(
    rows: int, count: int, top_k: int, split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """test_cuda_experts.py compares it with the reference."""
    dtype, here = DTYPES[1], gpu_of(torch.device(DEVICE))
    x, norm = randn(rows, 200, dtype=dtype), Norm(randn(200, dtype=dtype), 1e-6)
    router, scale = DenseLinear(randn(count, 200, dtype=dtype) / 4, randn(count, dtype=dtype)), randn(count).abs()
    with tiles.using(here, few_tokens.KERNEL, "16bit", (count, 200), [16, 16, 4, 3, split]):
        for renormalise, factors in ((True, None), (False, scale)):
            few, apart = both_routes(monkeypatch, Normed(x, norm), router, top_k, renormalise, factors)
            assert torch.equal(few.ids, apart.ids) and torch.equal(few.weights, apart.weights)


@gpu
def test_the_router_breaks_ties_and_chooses_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of an identity reads one column of the router, whose numbers are its logits."""
    inf, nan = float("inf"), float("nan")
    logits = torch.zeros(40, 6)
    logits[[7, 21, 35], 1] = 1.0
    logits[::2, 2] = -0.0
    logits[:, 3] = -torch.arange(40.0)
    logits[[3, 9], 4] = 500.0
    x = torch.zeros(6, 64)
    x[torch.arange(6), torch.arange(6)] = 8.0  # the norm of 64 columns makes it 8 again
    x[5] = nan
    router = torch.zeros(40, 64)
    router[:, :6] = logits / 8
    normed = Normed(x.to(DEVICE), Norm(torch.ones(64, device=DEVICE), 0.0))
    few, apart = both_routes(monkeypatch, normed, DenseLinear(router.to(DEVICE)), 4, True, None)
    assert few.ids.tolist() == [[0, 1, 2, 3], [7, 21, 35, 0], [0, 1, 2, 3], [0, 1, 2, 3], [3, 9, 0, 1], [0, 1, 2, 3]]
    assert torch.equal(few.ids, apart.ids) and torch.equal(few.weights[:5], apart.weights[:5])
    assert few.weights[5].isnan().all() and few.weights[0].tolist() == [0.25] * 4
    assert inf > few.weights[4].sum() > 0.99


@no_interpreter
def test_few_tokens_are_routed_by_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(rows: int) -> None:
        norm, scaled = Norm(empty(2048), 1e-6), empty(rows, 2048)
        normed = Normed(empty(rows, 2048), norm, scaled, empty(rows, 32, dtype=torch.float32))
        cuda.norm_route(normed, DenseLinear(empty(128, 2048)), 8, True)

    for rows in (1, 8, 16):
        assert [each.kernel for each in captured_launches(monkeypatch, 90, lambda rows=rows: step(rows))] == [
            routing._route_few
        ]
    assert routing._route in [each.kernel for each in captured_launches(monkeypatch, 90, lambda: step(17))]
