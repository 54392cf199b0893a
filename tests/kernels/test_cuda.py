"""The Triton kernels against the torch reference: on a GPU, or few shapes under TRITON_INTERPRET=1.

Whatever must not be read is poisoned: fresh outputs and scratch, unowned blocks, the unused end of a last
block, and rows past the batch all hold NaN. The last part needs no GPU: it compiles each tile for sm_90 and
sm_121 and reads the shared memory it takes and what a row's bits depend on; speed is left to tools/cuda_kernels.py.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

from sparkdraft.kernels import cuda, reference
from sparkdraft.kernels.cuda import elementwise
from sparkdraft.kernels.cuda.attention import paged
from sparkdraft.kernels.cuda.linear import few_tokens
from sparkdraft.kernels.cuda.runtime import tuned
from sparkdraft.kernels.cuda.runtime.gpu import Gpu
from sparkdraft.kernels.cuda.sampling.argmax import argmax as cuda_argmax
from sparkdraft.kernels.ops import GELU_TANH, SILU, Activation, AttentionParams, AttentionView, Norm, RopeArgs
from tests.kernels.ahead_of_time import GPUS, spilled_bytes
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


# Elementwise


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, dim", [(1, 64), (3, 576), (17, 1000), (2, 4096)] + [(300, 4096), (5, 16384)] * (not INTERPRET)
)
def test_rms_norm(rows: int, dim: int, dtype: torch.dtype) -> None:
    x, weight = randn(rows, dim + 8, dtype=dtype)[:, :dim], randn(dim, dtype=dtype)  # a strided row
    assert_close(cuda.rms_norm(x, weight, 1e-5), reference.rms_norm(x.float(), weight, 1e-5), dtype)


ACTIVATIONS = [SILU, GELU_TANH, Activation("clamped_swiglu", 1.5)]


@gpu
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.kind)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, inter", [(1, 64), (3, 1536), (5, 3000)] + [(300, 12288)] * (not INTERPRET))
def test_gated(rows: int, inter: int, dtype: torch.dtype, activation: Activation) -> None:
    gate_up = randn(rows, 2 * inter, dtype=dtype)
    gate_up[0, 0] = -100.0  # exp(100) overflows float32 on its way to zero
    gate_up[0, 1:3], gate_up[0, inter + 1 : inter + 3] = 30.0, torch.tensor([-30.0, 30.0])
    assert_close(cuda.gated(gate_up, activation), reference.gated(gate_up.float(), activation), dtype)
    gate_up[0, 5], gate_up[0, inter + 6] = float("nan"), float("nan")
    assert cuda.gated(gate_up, activation)[0].isnan().nonzero().flatten().tolist() == [5, 6]


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, width, gates", [(1, 64, 64), (3, 3000, 3000), (5, 1536, 1), (2, 1, 1)])
def test_sigmoid_gate(rows: int, width: int, gates: int, dtype: torch.dtype) -> None:
    """One gate per number, or one per row; gates and rows are columns of wider tensors."""
    wide, gate = randn(rows, width + 8, dtype=dtype), 4 * randn(rows, gates + 40, dtype=dtype)[:, 40:]
    gate[0, 0] = -100.0  # exp(100) overflows float32 on its way to zero
    expected = wide.float()
    reference.sigmoid_gate(expected[:, :width], gate)
    cuda.sigmoid_gate(wide[:, :width], gate)
    assert torch.equal(wide[:, width:].float(), expected[:, width:])
    assert_close(wide, expected, dtype)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, dim", [(1, 64), (3, 576), (16, 100), (17, 1000)] + [(300, 2816)] * (not INTERPRET))
def test_add_normed(rows: int, dim: int, dtype: torch.dtype) -> None:
    """Gains may be float32; few rows are prepared for the next norm."""
    residual, y = randn(rows + 1, dim + 8, dtype=dtype)[:, :dim], randn(rows, dim + 8, dtype=dtype)[:, :dim]
    for kind, scale in ((dtype, 1.0), (torch.float32, 0.7)):
        norm, then = Norm(randn(dim).to(kind), 1e-5), Norm(randn(dim).to(kind), 1e-6)
        before, untouched = residual[:rows].clone(), residual[rows].clone()
        left = cuda.add_normed(residual[:rows], y, norm, then, scale)
        expected = (before.float() + reference.rms_norm(y.float(), *norm)) * scale
        assert left.x.data_ptr() == residual.data_ptr() and left.norm is then
        assert_close(left.x, expected, dtype)
        assert torch.equal(residual[rows], untouched), "wrote past the rows"
        assert (left.scaled is None) == (left.squares is None) == (rows > few_tokens.MOST_TOKENS)
        if left.scaled is not None:
            assert torch.equal(left.scaled, (left.x.float() * then.gain.float()).to(dtype))
            torch.testing.assert_close(left.squares.double().sum(1), left.x.double().square().sum(1), rtol=1e-5, atol=0)


@gpu
@pytest.mark.parametrize("vocab", [3, 100, 40000] + [151936] * (not INTERPRET))
def test_argmax_of_many_rows(vocab: int) -> None:
    logits = randn(6, vocab + 5)[:, :vocab]  # strided rows
    logits[1, vocab // 2] = logits[1, vocab - 1] = logits[1].max() + 1  # a tie between parts
    logits[2, :2] = 9.0  # and within one
    logits[3, 1] = float("nan")
    logits[4] = float("-inf")
    logits[5] = float("nan")
    got = cuda_argmax(logits)
    expected = logits.nan_to_num(float("-inf"), neginf=float("-inf")).cpu().numpy().argmax(1).tolist()
    assert got.dtype == torch.int64 and got.tolist()[:4] == expected[:4] and got.tolist()[4:] == [0, 0]


@gpu
@pytest.mark.parametrize("shape", [(9, 3, 100), (9, 4, 3, 100)])
def test_taps_touch_their_own_layer_alone(shape: tuple[int, ...]) -> None:
    residual, positions = randn(5, 104)[:, :100], integers([0, 3, 4, 9, 1000])
    aux_hidden, expected = (torch.full(shape, -1.0, device=DEVICE) for _ in range(2))
    cuda.store_aux(residual, aux_hidden[:5], 1, positions)
    reference.store_aux(residual, expected[:5], 1, positions)
    assert torch.equal(aux_hidden, expected) and (aux_hidden != -1).sum() == 500


# Attention


def make_batch(
    queries: list[int], contexts: list[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype,
    padding: int = 2, block_size: int = 16,
) -> tuple[Tensor, Tensor, Tensor, AttentionView]:  # fmt: skip
    """q, K, V and the view; NaN wherever no sequence looks, and block numbers out of range past its own."""
    owned = [-(-context // block_size) for context in contexts]
    order = torch.randperm(sum(owned) + 3, device=DEVICE)
    k = torch.full((len(order), kv_heads, block_size, head_dim), float("nan"), device=DEVICE, dtype=dtype)
    v = k.clone()
    tables = torch.full((len(contexts), max(owned) + 3), 10**8, dtype=torch.int32, device=DEVICE)
    for s, (blocks, context) in enumerate(zip(owned, contexts, strict=True)):
        tables[s, :blocks] = order[sum(owned[:s]) : sum(owned[: s + 1])]
        position = torch.arange(context, device=DEVICE)
        block = tables[s].long()[position // block_size]
        k[block, :, position % block_size] = randn(context, kv_heads, head_dim, dtype=dtype)
        v[block, :, position % block_size] = randn(context, kv_heads, head_dim, dtype=dtype)
    rows = sum(queries)
    qkv = randn(rows + padding, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    qkv[rows:] = float("nan")
    q = qkv[:, : heads * head_dim].view(rows + padding, heads, head_dim)
    starts = [sum(queries[:s]) for s in range(len(queries) + 1)]
    return q, k, v, AttentionView(integers(starts), integers(contexts), tables, max(queries), max(contexts))


def check_attention(
    q: Tensor, k: Tensor, v: Tensor, view: AttentionView, causal: bool = True, window: int = 0,
    same_bits_up_to: int = 0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    params, last = AttentionParams(q.shape[2] ** -0.5, causal, window, sinks), int(view.query_start[-1])
    got = cuda.paged_attention(q, k, v, view, params, same_bits_up_to)
    expected = reference.paged_attention(q.float(), k.float(), v.float(), view, params)
    assert_close(got[:last], expected[:last], q.dtype)
    return got


BATCHES = [  # rows a sequence, keys a sequence
    ([1], [1]),
    ([1, 1, 1], [17, 300, 1]),
    ([5, 2, 1], [5, 140, 700]),
    ([16, 16], [16, 333]),
    ([40, 1, 17, 1], [40, 270, 90, 3]),
]
GPU_BATCHES = [
    ([1], [5000]),
    ([16], [4999]),
    ([17, 16, 1], [17, 4000, 64]),
    ([300, 1, 1, 5], [300, 5000, 1, 1000]),
    ([300, 17, 2], [5000, 1000, 129]),
    ([1] * 64, [64 * i + 1 for i in range(64)]),
    ([16] * 16, [300 * i + 16 for i in range(16)]),
]
SHAPES = [
    (9, 3, 64),
    (32, 8, 128),
    (16, 16, 64),
    (8, 1, 256),
    (64, 8, 128),
    (8, 2, 80),
    (8, 8, 96),
    (4, 1, 256),
    (12, 2, 256),
    (32, 2, 256),
    (4, 2, 256),
    (64, 8, 64),
    (16, 2, 512),
    (16, 1, 512),
    (2, 2, 512),
]
CASES = [(DTYPES[0], *shape) for shape in (SHAPES if not INTERPRET else [(9, 3, 64), (8, 1, 80)])]
CASES += [(dtype, 9, 3, 64) for dtype in DTYPES[1:]] + [(dtype, 8, 2, 128) for dtype in DTYPES[2:]]


@gpu
@pytest.mark.parametrize("dtype, heads, kv_heads, head_dim", CASES)
@pytest.mark.parametrize("queries, contexts", BATCHES + GPU_BATCHES * (not INTERPRET))
def test_attention(
    queries: list[int], contexts: list[int], dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    check_attention(*make_batch(queries, contexts, heads, kv_heads, head_dim, dtype))


@gpu
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim",
    [
        *((4, 2, 16), (16, 16, 64), (32, 8, 128), (64, 8, 128), (4, 1, 256), (6, 1, 256), (16, 1, 256), (2, 1, 256)),
        *((8, 1, 512), (3, 1, 512), (2, 2, 512), (16, 1, 512)),
    ],
)
def test_attention_of_every_head_shape(heads: int, kv_heads: int, head_dim: int) -> None:
    check_attention(*make_batch([3, 1], [3, 150], heads, kv_heads, head_dim, DTYPES[0]))
    check_attention(*make_batch([20], [150], heads, kv_heads, head_dim, DTYPES[0]))


@gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 1, 37, 256])
@pytest.mark.parametrize(
    "queries, contexts", [([1, 1], [700, 20]), ([16, 5], [500, 5]), ([130, 1, 20], [260, 600, 20])]
)
def test_windows_and_full_attention(queries: list[int], contexts: list[int], window: int, causal: bool) -> None:
    check_attention(*make_batch(queries, contexts, 4, 2, 64, DTYPES[0]), causal, window)


@gpu_only
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries, contexts", [([1, 1], [300, 17]), ([16, 5], [700, 40]), ([130], [333])])
def test_keys_and_values_of_eight_bits(queries: list[int], contexts: list[int], dtype: torch.dtype) -> None:
    q, k, v, view = make_batch(queries, contexts, 32, 8, 128, dtype)
    check_attention(q, k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn), view)
    kv = randn(9, 4 * 64, dtype=dtype) * 100  # past what eight bits hold
    still = torch.tensor([1.0] * 32 + [0.0] * 32, device=DEVICE).view(1, 64)  # no rotation, so that all bits are told
    caches, expected = ([torch.zeros(4, 2, 16, 64, device=DEVICE).to(torch.float8_e4m3fn) for _ in "kv"] for _ in "ab")
    slots = integers([0, 3, 17, 31, 40, -1, 63, 62, 5])
    for module, cache in ((cuda, caches), (reference, expected)):
        module.rope_write(kv.clone(), RopeArgs(torch.zeros_like(slots), still, 0, 2, None, None, 1e-6), *cache, slots)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(caches, expected, strict=True))


@gpu
@pytest.mark.parametrize("block_size", [8, 32, 128])
def test_block_sizes(block_size: int) -> None:
    check_attention(*make_batch([20, 1], [20, 300], 4, 2, 64, DTYPES[0], block_size=block_size))


@gpu
@pytest.mark.parametrize("max_query, max_context", [(1, 4096), (16, 4096), (300, 4096)])
def test_bounds_may_be_far_above_the_lengths(max_query: int, max_context: int) -> None:
    """A captured graph keeps the largest bounds: only the launch may change with them."""
    q, k, v, view = make_batch([1, 1, 1], [300, 40, 1], 8, 2, 64, DTYPES[0])
    check_attention(q, k, v, replace(view, max_query=max_query, max_context=max_context))


@gpu
@pytest.mark.parametrize("padded_tokens", [0, 1])
@pytest.mark.parametrize("most", [1, 40])
def test_padding_sequences(padded_tokens: int, most: int) -> None:
    queries, contexts = [1, most, padded_tokens, padded_tokens], [300, 290, 0, 0]
    q, k, v, view = make_batch(queries, contexts, 8, 2, 64, DTYPES[0])
    got = cuda.paged_attention(q, k, v, view, AttentionParams(0.125))
    real = AttentionView(view.query_start[:3], view.context_len[:2], view.block_tables[:2], most, 300)
    expected = reference.paged_attention(q.float(), k.float(), v.float(), real, AttentionParams(0.125))
    last = 1 + most
    assert_close(got[:last], expected[:last], q.dtype)
    assert (got[last : last + 2 * padded_tokens] == 0).all(), "a padding row without keys gives zeros"


@gpu
def test_long_contexts_in_a_full_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sequences alone fill the GPU, a long one is still cut, and the short ones are left whole."""
    monkeypatch.setattr(paged, "gpu_of", lambda device: Gpu(12, 1, 1))
    monkeypatch.setattr(paged, "LONG_SPLIT", 256)
    paged._launch.cache_clear()
    check_attention(*make_batch([1, 1, 2, 1], [700, 3, 256, 257], 8, 2, 64, DTYPES[0]))
    assert paged._launch(7, 4, 8, 2, 64, DTYPES[0].itemsize, 2, 0, 700, Gpu(12, 1, 1)).splits == 3
    paged._launch.cache_clear()


@gpu
@pytest.mark.parametrize("rows", [1, 16, 40])
def test_a_row_does_not_depend_on_its_neighbours(rows: int) -> None:
    """The same sequence in the same bucket, beside others of other lengths: every bit is the same."""
    q, k, v, view = make_batch([rows, 1, rows], [700, 300, 200], 8, 2, 64, DTYPES[0], padding=0)
    got = cuda.paged_attention(q, k, v, view, AttentionParams(0.125))
    other = replace(view, context_len=integers([700, 5, 100]), query_start=integers([0, rows, rows + 1, rows + 1]))
    assert torch.equal(got[:rows], cuda.paged_attention(q, k, v, other, AttentionParams(0.125))[:rows])
    moved = AttentionView(integers([0, 0, 1, 1 + rows]), integers([0, 9, 700]), view.block_tables[[1, 1, 0]], rows, 700)
    shifted = torch.cat((q[rows : rows + 1], q[:rows], q[rows + 1 :]))
    assert torch.equal(got[:rows], cuda.paged_attention(shifted, k, v, moved, AttentionParams(0.125))[1 : 1 + rows])


MOST = 16  # rows of a drafted block
BORDERS = [  # contexts whose last rows lie on either side of a tile of 32, 64 or 128 keys, a unit, a round of units
    [16, 17, 40, 70],
    [64, 129, 139, 260],
    [523, 642, 396, 650],
] + [[1290, 1031, 2048, 1537]] * (not INTERPRET)
ALIKE = [(DTYPES[0], 3, 1, 64), (DTYPES[1], 4, 1, 128), (DTYPES[1], 6, 1, 256)]
ALIKE += [(dtype, *shape) for dtype in DTYPES for shape in ((2, 2, 64), *SHAPES)] * (not INTERPRET)


def last_rows(view: AttentionView, contexts: list[int], width: int) -> AttentionView:
    """The same sequences cut short, of which only the last rows are looked at."""
    starts = integers([width * s for s in range(len(contexts) + 1)])
    return AttentionView(starts, integers(contexts), view.block_tables, width, 2048)


@gpu
@pytest.mark.parametrize("dtype, heads, kv_heads, head_dim", ALIKE)
@pytest.mark.parametrize("contexts, window", [(contexts, 0) for contexts in BORDERS] + [(BORDERS[1], 50)])
def test_a_row_of_a_block_equals_the_row_alone(
    contexts: list[int], dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, window: int
) -> None:
    """Every bit of it: a block as wide as is drafted, a narrower one, and a single row whose later keys are NaN."""
    batch, scale = len(contexts), head_dim**-0.5
    q, k, v, view = make_batch([MOST] * batch, contexts, heads, kv_heads, head_dim, dtype, padding=0)
    q = q.reshape(batch, MOST, heads, head_dim)
    block = cuda.paged_attention(
        q.flatten(0, 1), k, v, last_rows(view, contexts, MOST), AttentionParams(scale, window=window), MOST
    )
    block = block.view(batch, MOST, -1)
    check_attention(q.flatten(0, 1), k, v, last_rows(view, contexts, MOST), True, window, MOST)
    for end in (16, 7, 1) if INTERPRET else range(MOST, 0, -1):
        cut = [context - MOST + end for context in contexts]
        for s, context in enumerate(cut):
            for cache in (k, v) if context % 16 else ():
                cache[int(view.block_tables[s, context // 16]), :, context % 16 :] = float("nan")
        for width in [w for w in (1, 5, 2, 9, 12)[: 2 if INTERPRET else 5] if w <= end]:
            rows = q[:, end - width : end].reshape(batch * width, heads, head_dim)
            got = cuda.paged_attention(
                rows, k, v, last_rows(view, cut, width), AttentionParams(scale, window=window), MOST
            )
            assert torch.equal(got.view(batch, width, -1), block[:, end - width : end]), f"{width} rows up to {end}"


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [4, 16])
def test_a_block_does_not_depend_on_the_blocks_beside_it(width: int, causal: bool, dtype: torch.dtype) -> None:
    contexts = [390, 129, 16, 260]
    q, k, v, view = make_batch([width] * 4, contexts, 6, 2, 64, dtype, padding=0)
    got = cuda.paged_attention(q, k, v, last_rows(view, contexts, width), AttentionParams(0.125, causal), MOST).view(
        4, width, -1
    )
    order, others = [2, 1, 3, 0], [16, 20, 260, 17]  # moved, beside others, and cut where it may be
    moved = replace(last_rows(view, contexts, width), block_tables=view.block_tables[order])
    for lengths, kept in (([contexts[s] for s in order], [0, 1, 2, 3]), (others, [0, 2])):
        rows = torch.cat([q[s * width : (s + 1) * width] for s in order])
        again = replace(moved, context_len=integers(lengths))
        result = cuda.paged_attention(rows, k, v, again, AttentionParams(0.125, causal), MOST).view(4, width, -1)
        for place in kept:
            assert torch.equal(result[place], got[order[place]])


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRET or not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("rows", [1, 16, 100])
def test_graph_replay_with_changed_lengths_equals_eager(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # capture wants the real torch.empty
    q, k, v, full = make_batch([rows] * 4, [2000, 900, 1500, 120], 32, 8, 128, torch.bfloat16, padding=0)
    view = AttentionView(*(t.clone() for t in (full.query_start, full.context_len, full.block_tables)), rows, 2000)
    q = q.clone()
    cuda.paged_attention(q, k, v, view, AttentionParams(0.1))  # compiles before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cuda.paged_attention(q, k, v, view, AttentionParams(0.1))
    for lengths, contexts in (
        ([rows] * 4, [2000, 900, 1500, 120]),
        ([rows, rows, 1, 0], [100, 899, 1, 0]),
        ([1, 1, 1, 1], [1, 17, 1400, 119]),
    ):
        q.copy_(torch.randn_like(q))
        view.query_start.copy_(integers([sum(lengths[:s]) for s in range(5)]))
        view.context_len.copy_(integers(contexts))
        captured.fill_(float("nan"))
        graph.replay()
        last = sum(lengths)
        eager = cuda.paged_attention(q, k, v, view, AttentionParams(0.1))[:last]
        assert torch.equal(captured[:last], eager)
        check_attention(q, k, v, view)


# Host choices


def test_splits_fill_the_gpu_and_no_more() -> None:
    choose = paged._choose_splits
    assert choose(8, 264, 100) == 30  # one stream, 8 K/V heads, H200: about one wave
    assert choose(8, 264, 3) == 3
    assert choose(160, 264, 100) == 3  # 160 programs leave two fifths idle, 480 a tenth
    assert choose(8, 264, 0) == 1


def test_a_full_gpu_splits_only_long_contexts() -> None:
    def launch(seqs: int, rows: int, keys: int) -> paged.Launch:
        return paged._launch(rows * seqs, seqs, 32, 8, 128, 2, rows, 0, keys, Gpu(9, 0, 132))

    assert launch(64, 1, 4096).splits == 1
    assert (launch(64, 1, 32000).splits, launch(64, 1, 32000).unit) == (4, paged.LONG_SPLIT)
    assert launch(1, 1, 32000).splits == 30
    assert launch(1, 8192, 8192).splits == 1
    assert launch(1, 256, 32000).splits > 1  # a small chunk over a long context has too few tiles by itself


@pytest.mark.parametrize("least", [32, 64, 128, 256])
def test_a_split_is_whole_tiles_whatever_its_least_size(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "LEAST_UNIT", least)
    for (kind, form), known in tuned.tables(Gpu(9, 0, 132)).items():
        for tile in [tile for found in known.values() for tile in found] if kind == "attention_decode" else ():
            made = paged.Tile(*tile)
            unit, _ = paged._choose_cuts(made, 4, 4096, 300, False, True, Gpu(9, 0, 132))
            assert unit >= least and unit % made.block_n == 0, (form, tile)


def test_tile_numbers_leave_every_sequence_enough_tiles() -> None:
    for lengths in ([1], [0, 3, 0], [31, 32, 33, 1, 0, 64], [5] * 20):
        for queries in (1, 4, 32, 42):
            starts = [sum(lengths[:s]) for s in range(len(lengths) + 1)]
            first = [start // queries + s for s, start in enumerate(starts)]  # as _find_sequence numbers them
            for s, length in enumerate(lengths):
                assert first[s + 1] - first[s] >= -(-length // queries)
            assert first[-1] <= starts[-1] // queries + len(lengths)


# Ahead of time compiles: no GPU, but not under the interpreter, which replaces the compiler

LIMIT = {90: 227 << 10, 121: 99 << 10}  # bytes of shared memory a block may take
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def compile_kernel(
    kernel: object,
    capability: int,
    types: dict[str, str],
    constants: dict[str, object],
    warps: int,
    stages: int = 3,
) -> object:
    """The compiled kernel. Pointers and strides count as divisible by 16, as they are at run time."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    plain = {param.name for param in kernel.params if param.do_not_specialize}
    wide = [n for n, t in types.items() if n not in plain and (t.startswith("*") or n.startswith("stride"))]
    hints = {(names.index(name),): [["tt.divisibility", 16]] for name in wide}
    source = ASTSource(kernel, signature, constants, hints)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def compile_attend(
    capability: int, dtype: torch.dtype, head_dim: int, tile: paged.Tile, search: bool, split: bool,
    causal: bool = True, window: int = 0, group: int = 4, sinks: bool = False, inside: bool = False,
) -> object:  # fmt: skip
    """inside: the parts, 64 at most, are joined by the last program."""
    pointer, ints = "*" + TYPES[dtype], ("query_start", "context_len", "block_tables")
    types = dict.fromkeys(("q", "k_cache", "v_cache"), pointer) | dict.fromkeys(ints, "*i32")
    types |= dict.fromkeys(("out", "lse"), "*fp32" if split else pointer) | {"scale": "fp32"}
    types |= {name: "i32" for name in paged._attend.arg_names if name.startswith("stride_")}
    types |= {"seqs": "i32"} | ({"sinks": "*fp32"} if sinks else {})
    types |= {"joined": pointer, "counters": "*i32"} if inside else {}
    constants = {name: None for name in ("sinks", "joined", "counters") if name not in types}
    constants |= paged._join_sizes(tile.block_m, 64, paged._padded(head_dim), tile.warps)
    constants |= {
        "GROUP": group, "HEAD_DIM": head_dim, "DIM": triton.next_power_of_2(head_dim), "BLOCK_SIZE": 16,
        "CAUSAL": causal, "WINDOW": window, "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "RUN": 512 // tile.block_n, "SEARCH": search, "SPLIT": split,
        "SINKS": sinks, "PDL": True,
    }  # fmt: skip
    return compile_kernel(paged._attend, capability, types, constants, tile.warps, tile.stages)


@compiled
@pytest.mark.parametrize("capability", [90, 121])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("dtype", TYPES)
def test_attention_compiles_within_shared_memory(capability: int, head_dim: int, dtype: torch.dtype) -> None:
    known, form = tuned.tables(GPUS[capability]), f"{8 * dtype.itemsize}bit"
    chunk, decode = (known[f"attention_{kind}", form][head_dim,] for kind in ("chunk", "decode"))
    for numbers, search in [(chunk, True)] + [(tile, False) for tile in decode]:
        tile = paged.Tile(*numbers)
        made = compile_attend(capability, dtype, head_dim, tile, search, split=not search, inside=not search)
        used = made.metadata.shared
        assert search or dtype == torch.float32 or spilled_bytes(made) <= 64, "the join takes the scan's registers"
        kind = "chunk" if search else "few rows"
        print(f"sm_{capability} head_dim {head_dim} {TYPES[dtype]} {kind} {tile}: {used} bytes")
        assert used < LIMIT[capability]


@compiled
@pytest.mark.parametrize("capability", [90, 121])
def test_attention_variants_compile(capability: int) -> None:
    for causal, window, head_dim, group, sinks in (
        *((True, 100, 80, 3, False), (False, 0, 96, 1, False), (False, 100, 128, 8, False)),
        *((True, 128, 64, 8, True), (True, 0, 64, 8, True), (True, 0, 512, 8, True), (True, 0, 256, 6, True)),
    ):
        for lanes, split, inside in ((16, 0, 0), (16, 1, 0), (16, 1, 1), (1000, 0, 0), (1000, 1, 0)):
            tile, search = paged._choose_tile(lanes, paged._padded(head_dim), 2, GPUS[capability])
            made = compile_attend(
                capability, torch.bfloat16, head_dim, tile, search, bool(split), causal, window, group, sinks,
                bool(inside),
            )  # fmt: skip
            assert made.metadata.shared < LIMIT[capability]


def alike(capability: int, heads: int, kv_heads: int, dim: int, itemsize: int, seqs: int) -> list[paged.Launch]:
    """The launches of 1 to MOST rows a sequence."""
    shape = (seqs, heads, kv_heads, dim, itemsize)
    return [paged._launch(n * seqs, *shape, n, MOST, 32000, GPUS[capability]) for n in range(1, MOST + 1)]


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("heads, kv_heads, head_dim", [*SHAPES, (16, 1, 64)])
def test_rows_up_to_same_bits_up_to_go_through_the_keys_alike(
    heads: int, kv_heads: int, head_dim: int, itemsize: int, capability: int
) -> None:
    for seqs in (1, 3, 8, 64):
        launches = alike(capability, heads, kv_heads, head_dim, itemsize, seqs)
        assert len({(a.tile.block_n, a.unit, a.splits) for a in launches}) == 1
        assert all(a.unit % a.tile.block_n == 0 for a in launches)
        for rows, a in enumerate(launches, 1):
            assert a.tile.block_m >= rows * heads // kv_heads or a.search


@compiled
@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim", [(32, 8, 128), (9, 3, 64), (16, 16, 64), (8, 1, 256), (6, 1, 256), (8, 1, 512)]
)
def test_tiles_of_all_heights_add_up_alike(heads: int, kv_heads: int, head_dim: int, capability: int) -> None:
    """No reduction sums across lanes, in an order that would depend on the tile: all sums are dots of 16 keys."""
    tiles = {(a.tile, a.search): None for a in alike(capability, heads, kv_heads, head_dim, 2, 1)}
    for tile, search in tiles:
        made = compile_attend(
            capability, torch.bfloat16, head_dim, tile, search, split=True, group=heads // kv_heads, inside=not search
        )  # fmt: skip
        reductions = re.findall(r'"tt\.reduce".*?tt\.reduce\.return', made.asm["ttgir"], re.S)
        assert reductions and all("maxnumf" in body and "addf" not in body for body in reductions)
        dots = set(re.findall(r"(?:wgmma\.mma_async|mma)\.sync\.aligned\.m\d+n\d+(\S+)", made.asm["ptx"]))
        assert dots <= {"k16.f32.bf16.bf16", "k16.row.col.f32.bf16.bf16.f32"}, dots
        assert made.metadata.shared <= LIMIT[capability], (tile, made.metadata.shared)


@compiled
@pytest.mark.parametrize("capability", [90, 121])
def test_small_kernels_compile(capability: int) -> None:
    join = {
        "parts": "*fp32",
        "lse": "*fp32",
        "out": "*bf16",
        "query_start": "*i32",
        "seqs": "i32",
        "splits": "i32",
        "sinks": "*fp32",
    }
    for splits, lines, dim, warps in ((2, 8, 256, 4), (128, 1, 256, 4), (2, 4, 512, 8), (128, 1, 512, 8)):
        assert splits <= paged.MOST_SPLITS
        sizes = {"HEADS": 32, "HEAD_DIM": dim, "DIM": dim, "SINKS": True, "PDL": False}
        sizes |= paged._join_sizes(lines, splits, dim, warps)
        assert compile_kernel(paged._join, capability, join, sizes, warps).metadata.shared < LIMIT[121]
    norm = {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "stride_x": "i32", "dim": "i32", "eps": "fp32"}
    sizes = {"BLOCK": 16384, "PDL": False}
    assert compile_kernel(elementwise._rms_norm, capability, norm, sizes, 16).metadata.shared < LIMIT[121]
    gate = {"gate_up": "*bf16", "out": "*bf16", "stride_row": "i32", "inter": "i32"}
    sizes = {"ACT": "silu", "LIMIT": 0.0, "BLOCK": 1024, "PDL": False}
    assert compile_kernel(elementwise._gated, capability, gate, sizes, 4).metadata.shared < LIMIT[121]
    # rope_write, and the bookkeeping of a step: test_cuda_stepping.py
