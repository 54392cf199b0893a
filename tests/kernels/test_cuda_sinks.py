"""Sinks in the Triton kernels against the torch reference: on a GPU, or few shapes under TRITON_INTERPRET=1.

A sink joins a row's softmax once, however its keys are split: tests run both ways and check that they did. What must
not be read is poisoned, as in test_cuda.py. TurboQuant's attention runs on a GPU alone; elsewhere it is compiled.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

from sparkdraft.kernels import cuda, reference
from sparkdraft.kernels.cuda.attention import paged, turboquant
from sparkdraft.kernels.cuda.attention.turboquant.rotation import join, signs
from sparkdraft.kernels.cuda.elementwise import run
from sparkdraft.kernels.cuda.runtime.gpu import gpu_of
from sparkdraft.kernels.ops import AttentionParams, AttentionView
from sparkdraft.kernels.turboquant.store import CodedLayer, RecordLayout
from sparkdraft.kernels.turboquant.vectors import VectorFormat
from tests.kernels import test_cuda_turboquant as coded
from tests.kernels.ahead_of_time import LIMIT, captured_launches
from tests.kernels.test_cuda import MOST, check_attention, last_rows, make_batch
from tests.kernels.triton_device import (
    DEVICE,
    DTYPES,
    INTERPRET,
    assert_close,
    compiled,
    gluon,
    gpu,
    gpu_only,
    integers,
    randn,
)

pytestmark = pytest.mark.usefixtures("poisoned_empty")

SHAPES = [(8, 1, 64)] + [(64, 8, 64), (32, 8, 128), (12, 2, 256), (16, 2, 512)] * (not INTERPRET)
BATCHES = [([1, 1, 1], [17, 300, 1]), ([5, 2, 1], [5, 140, 400]), ([40, 1, 17], [40, 270, 90])]
BATCHES += [([300, 1, 1, 5], [300, 5000, 1, 1000]), ([16] * 16, [300 * i + 16 for i in range(16)])] * (not INTERPRET)


def sinks_of(heads: int) -> Tensor:
    return torch.linspace(-3, 5, heads, device=DEVICE)  # from next to nothing to more than all keys of a row


@gpu
@pytest.mark.parametrize("heads, kv_heads, head_dim", SHAPES)
@pytest.mark.parametrize("window", [0, 37, 128])
@pytest.mark.parametrize("queries, contexts", BATCHES)
def test_sinks(queries: list[int], contexts: list[int], window: int, heads: int, kv_heads: int, head_dim: int) -> None:
    """Windows among them, and contexts shorter than one."""
    q, k, v, view = make_batch(queries, contexts, heads, kv_heads, head_dim, DTYPES[0])
    got = check_attention(q, k, v, view, window=window, sinks=sinks_of(heads))
    without = cuda.paged_attention(q, k, v, view, AttentionParams(head_dim**-0.5, window=window))
    assert (got - without)[: sum(queries)].abs().max() > 0.05


def is_split(q: Tensor, k: Tensor, view: AttentionView) -> bool:
    shape = (*q.shape[:1], len(view.context_len), q.shape[1], k.shape[1], q.shape[2], q.element_size())
    return paged._launch(*shape, view.max_query, 0, view.max_context, gpu_of(q.device)).splits > 1


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_counts_once_whether_keys_are_split_or_not(dtype: torch.dtype) -> None:
    q, k, v, view = make_batch([2, 1], [600, 40], 4, 2, 64, dtype)
    whole = replace(view, max_context=64)  # shapes the launch alone: too few keys to split
    assert is_split(q, k, view) and not is_split(q, k, whole)
    for each in (view, whole):
        check_attention(q, k, v, each, sinks=sinks_of(4))
        nothing, all_ = (torch.full((4,), value, device=DEVICE) for value in (-500.0, 500.0))
        plain, sunk, drowned = (
            cuda.paged_attention(q, k, v, each, AttentionParams(0.125, sinks=sinks))[:3]
            for sinks in (None, nothing, all_)
        )
        assert torch.equal(plain, sunk) and not drowned.any()


@gpu
@pytest.mark.parametrize("dtype, heads, head_dim", [(DTYPES[0], 8, 64)] + [(DTYPES[0], 8, 512)] * (not INTERPRET))
@pytest.mark.parametrize("contexts, window", [([16, 70, 523], 0), ([64, 139, 260], 50), ([17, 40, 90], 128)])
def test_a_row_of_a_block_with_sinks_equals_the_row_alone(
    contexts: list[int], window: int, dtype: torch.dtype, heads: int, head_dim: int
) -> None:
    batch, sinks = len(contexts), sinks_of(heads)
    params = AttentionParams(head_dim**-0.5, window=window, sinks=sinks)
    q, k, v, view = make_batch([MOST] * batch, contexts, heads, 1, head_dim, dtype, padding=0)
    block = check_attention(q, k, v, last_rows(view, contexts, MOST), True, window, MOST, sinks).view(batch, MOST, -1)
    q = q.reshape(batch, MOST, heads, head_dim)
    for end, width in ((16, 1), (9, 1), (9, 5), (1, 1)):
        cut = [context - MOST + end for context in contexts]
        rows = q[:, end - width : end].reshape(batch * width, heads, head_dim)
        got = cuda.paged_attention(rows, k, v, last_rows(view, cut, width), params, MOST)
        assert torch.equal(got.view(batch, width, -1), block[:, end - width : end]), f"{width} rows up to {end}"


@gpu
@pytest.mark.parametrize("most", [1, 40])
def test_padding_with_sinks(most: int) -> None:
    q, k, v, view = make_batch([1, most, 1, 1], [300, 290, 0, 0], 8, 2, 64, DTYPES[0])
    params = AttentionParams(0.125, sinks=sinks_of(8))
    got = cuda.paged_attention(q, k, v, view, params)
    real = AttentionView(view.query_start[:3], view.context_len[:2], view.block_tables[:2], most, 300)
    expected = reference.paged_attention(q.float(), k.float(), v.float(), real, params)
    assert_close(got[: 1 + most], expected[: 1 + most], q.dtype)
    assert (got[1 + most : 3 + most] == 0).all(), "a padding row without keys gives zeros"


@gpu
@pytest.mark.parametrize("window, contexts", [(37, [300, 90]), (128, [400, 100])])
def test_a_windows_table_has_holes(window: int, contexts: list[int]) -> None:
    """Blocks that have left the window are a page of zeros in its tables, as cache/windows.py has it."""
    q, k, v, view = make_batch([2, 1], contexts, 8, 1, 64, DTYPES[0])
    params = AttentionParams(0.125, window=window, sinks=sinks_of(8))
    expected = reference.paged_attention(q.float(), k.float(), v.float(), view, params)
    tables, zero = view.block_tables.clone(), len(k)
    k, v = (torch.cat((x, torch.zeros_like(x[:1]))) for x in (k, v))
    for s, (rows, context) in enumerate(zip((2, 1), contexts, strict=True)):
        gone = max(context - rows - window + 1, 0) // 16
        k[tables[s, :gone].long()], v[tables[s, :gone].long()] = float("nan"), float("nan")
        tables[s, :gone] = zero
    got = cuda.paged_attention(q, k, v, replace(view, block_tables=tables), params)
    assert_close(got[:3], expected[:3], q.dtype)


@gpu_only
def test_sinks_over_keys_of_eight_bits() -> None:
    q, k, v, view = make_batch([1, 16, 5], [300, 700, 40], 64, 8, 64, torch.bfloat16)
    check_attention(q, *(x.to(torch.float8_e4m3fn) for x in (k, v)), view, window=128, sinks=sinks_of(64))


@gpu_only
def test_a_graph_with_sinks_follows_its_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # capture wants the real torch.empty
    q, k, v, view = make_batch([1] * 3, [2000, 900, 120], 64, 8, 64, torch.bfloat16, padding=0)
    params = AttentionParams(0.125, window=128, sinks=sinks_of(64))
    cuda.paged_attention(q, k, v, view, params)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cuda.paged_attention(q, k, v, view, params)
    for contexts in ([2000, 900, 120], [5, 129, 119], [1999, 0, 1]):  # no longer than at first
        view.context_len.copy_(integers(contexts))
        graph.replay()
        assert torch.equal(captured, cuda.paged_attention(q, k, v, view, params))


# Codes


def uncentred(layer: CodedLayer) -> CodedLayer:
    """Records and pages as they are: what they hold are then other keys, less nothing."""
    return replace(layer, centre=None)


def coded_by_torch(layer: CodedLayer, q: Tensor, view: AttentionView, params: AttentionParams) -> Tensor:
    """In float64: without its sink a row is coded.expected's, and a sink takes exp(sink) of exp(lse) away."""
    asked = coded.asked(layer, q)
    without = coded.expected(layer, q, view, params.scale, params.window).view_as(asked)
    keep = torch.zeros(asked.shape[:2], dtype=torch.float64, device=q.device)
    starts, contexts, group = view.query_start.tolist(), view.context_len.tolist(), q.shape[1] // layer.records.shape[1]
    for s, context in enumerate(contexts):
        position = torch.arange(context, device=q.device)
        slots = view.block_tables[s].long()[position // coded.SIZE] * coded.SIZE + position % coded.SIZE
        k = layer.keys.decode(coded.encoded(layer, slots)[0], dtype=torch.float64)
        near_k = k
        if layer.pages is not None:
            rows = layer.pages[layer.page_of[slots // coded.SIZE].long(), 0, :, slots % coded.SIZE].double()
            near_k = layer.keys.rotation.inverse(rows)
        for row in range(starts[s], starts[s + 1]):
            p = context - starts[s + 1] + row
            seen = position[max(p - params.window + 1, 0) if params.window else 0 : p + 1]
            near = ((seen < layer.first) | (p - seen < layer.recent))[:, None, None]
            mine = torch.where(near, near_k[seen], k[seen])
            for head in range(q.shape[1]):
                lse = (mine[:, head // group] @ asked[row, head] * params.scale).logsumexp(0)
                keep[row, head] = torch.sigmoid(lse - params.sinks[head].double())
    return (without * keep.unsqueeze(-1)).flatten(1)


@gluon
@pytest.mark.parametrize("heads, kv_heads, dim", [(8, 1, 64), (32, 8, 128), (12, 2, 256)])
@pytest.mark.parametrize("mode, window", [((4, 128), 0), ((0, 0), 0), ((4, 16), 50)])
@pytest.mark.parametrize("queries, contexts", [([1, 1], [300, 20]), ([16, 5], [700, 140]), ([100, 1], [260, 4000])])
def test_codes_with_sinks(
    queries: list[int], contexts: list[int], mode: tuple[int, int], window: int, heads: int, kv_heads: int, dim: int
) -> None:
    layer, q, view = coded.make_batch(queries, contexts, heads, kv_heads, dim, DTYPES[0], mode=mode)
    layer, last = uncentred(layer), sum(queries)
    params = AttentionParams(dim**-0.5, window=window, sinks=sinks_of(heads))
    want = coded_by_torch(layer, q[:last], view, params)
    for most in (0, MOST):
        got = turboquant.tq_attention(layer, q, view, params, most)
        assert (got[:last].double() - want).abs().max() <= 4e-3 * want.abs().max()


@gluon
@pytest.mark.parametrize("window", [0, 50])
def test_a_row_of_codes_with_sinks_equals_the_row_alone(window: int) -> None:
    contexts, heads = [139, 523, 2048], 8
    layer, q, view = coded.make_batch([MOST] * 3, contexts, heads, 1, 64, DTYPES[0])
    layer, params = uncentred(layer), AttentionParams(0.125, window=window, sinks=sinks_of(heads))
    view, q = replace(view, max_context=2048), q[:-2].reshape(3, MOST, heads, 64)
    block = turboquant.tq_attention(layer, q.flatten(0, 1), view, params, MOST).view(3, MOST, -1)
    for end, width in ((16, 1), (16, 9), (7, 2), (1, 1)):
        starts, cut = integers([width * s for s in range(4)]), integers([c - MOST + end for c in contexts])
        rows = q[:, end - width : end].reshape(3 * width, heads, 64)
        alone = AttentionView(starts, cut, view.block_tables, width, 2048)
        got = turboquant.tq_attention(layer, rows, alone, params, MOST)
        assert torch.equal(got.view(3, width, -1), block[:, end - width : end]), f"{width} rows up to {end}"


@gpu
def test_parts_of_codes_are_joined_with_a_sink() -> None:
    """Of three rows the last is padding; a part without keys has no say, and a row without any part is zeros."""
    heads, dim, shares, start = 2, 64, 3, integers([0, 2])
    parts, power, out = randn(3, heads, shares, dim), randn(3, heads, shares), randn(3, heads * dim)
    power[0, 0, 1:], power[1, 1] = float("-inf"), float("-inf")
    sinks, padding = torch.tensor([0.7, -0.4], device=DEVICE), out[2].clone()
    logits = torch.cat((power * math.log(2), sinks.view(1, heads, 1).expand(3, heads, 1)), -1)
    mixed = (parts * logits.softmax(-1)[..., :-1].unsqueeze(-1)).sum(2)
    wanted = VectorFormat(dim, 4, device=parts.device).rotation.inverse(mixed).flatten(1)
    parts[0, 0, 1:], parts[1, 1] = float("nan"), float("nan")
    sizes = {"HEADS": heads, "DIM": dim, "STEPS": 6, "LINES": 4, "SHARES": 4, "SINKS": True, "num_warps": 4}
    run(join, (2,), parts, power, signs(dim, parts.device), sinks, out, start, 1, shares, **sizes)
    torch.testing.assert_close(out[:2], wanted[:2], rtol=1e-5, atol=1e-5)
    assert torch.equal(out[2], padding) and not out[1, dim:].any()


def test_a_centred_layer_takes_no_sinks() -> None:
    """A centre shifts the scores of all keys by the same number, and a sink would have to follow."""
    keys = VectorFormat(64, 4)
    layer = CodedLayer.make(2, 1, 16, keys, keys, centre=torch.zeros(1, 64))
    q, ints = torch.zeros(1, 1, 64), partial(torch.tensor, dtype=torch.int32)
    view = AttentionView(ints([0, 1]), ints([1]), ints([[0]]), 1, 1)
    for module in (turboquant, reference):
        with pytest.raises(AssertionError, match="a centre shifts all scores"):
            module.tq_attention(layer, q, view, AttentionParams(0.1, sinks=torch.zeros(1)))


# Ahead of time compiles: no GPU, but not under the interpreter, which replaces the compiler


@compiled
@pytest.mark.parametrize("capability", LIMIT)
@pytest.mark.parametrize("rows, seqs, context", [(1, 4, 32000), (16, 4, 32000), (1, 4, 64), (100, 64, 32000)])
def test_codes_with_sinks_compile(
    rows: int, seqs: int, context: int, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = partial(coded.layer_step, rows, 64, 8, 64, seqs=seqs, sinks=True, context=context)
    launches = [each for each in captured_launches(monkeypatch, capability, step) if "SINKS" in each.options]
    split = launches[0].options["SPLIT"]
    assert [each.kernel for each in launches] == [turboquant.attend] + [join] * split and split == (
        seqs * context == 128000
    )
    for launch in launches:
        assert launch.options["SINKS"]
        coded.check_launch(capability, launch, RecordLayout(16, 64, 4, 3))
