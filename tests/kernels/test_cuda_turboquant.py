"""The kernels of the compressed KV cache against plain torch, on a GPU; writing and joining also under
TRITON_INTERPRET=1. Attention itself is written in Gluon, which has no interpreter: elsewhere it is only compiled.

Writes must give what VectorFormat.encode gives; attention what float64 gives of decoded records and uncoded rows.
Whatever must not be read is poisoned: unowned blocks, records and rows of pages that no query needs, fresh outputs. The
last part needs no GPU: it runs the PTX that unpacks codes in a small emulator, and compiles all launches for sm_90 and
sm_121. Speed is left to tools/cuda_turboquant.py.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

from sparkdraft.kernels import reference
from sparkdraft.kernels.cuda.attention import turboquant
from sparkdraft.kernels.cuda.attention.turboquant.levels import as_they_lie, in_pairs
from sparkdraft.kernels.cuda.attention.turboquant.rotation import join, signs, turn_back
from sparkdraft.kernels.cuda.elementwise import run
from sparkdraft.kernels.ops import AttentionParams, AttentionView, RopeArgs
from sparkdraft.kernels.turboquant.layout import PLANES
from sparkdraft.kernels.turboquant.store import CodedLayer, RecordLayout
from sparkdraft.kernels.turboquant.vectors import Encoded, VectorFormat, pack, unpack
from tests.kernels.ahead_of_time import GPUS, LIMIT, Launch, captured_launches, check_order, compile_launch, empty
from tests.kernels.triton_device import DEVICE, DTYPES, INTERPRET, compiled, gluon, gpu, integers, randn

pytestmark = pytest.mark.usefixtures("poisoned_empty")

SIZE = 16  # positions a block
FORMATS = [(4, 3), (5, 4), (3, 2), (2, 5)]  # bits of keys and of values
MODES = [(4, 128), (0, 0)]  # uncoded keys: the first, the recent


def make_layer(
    blocks: int, kv_heads: int, dim: int, bits: tuple[int, int] = (4, 3), mode: tuple[int, int] = (4, 128)
) -> CodedLayer:
    """Poisoned throughout, and no block has a page."""
    layout, device = RecordLayout(SIZE, dim, *bits), torch.device(DEVICE)
    records = torch.full((blocks, kv_heads, layout.nbytes), 255, dtype=torch.uint8, device=device)  # scales: NaN
    keys, values = (VectorFormat(dim, b, device=device) for b in bits)
    if mode == (0, 0):
        return CodedLayer(layout, records, keys, values, None, None, None)
    pages = torch.full((blocks, 2, kv_heads, SIZE, dim), float("nan"), dtype=torch.float16, device=device)
    page_of = torch.full((blocks,), -1, dtype=torch.int32, device=device)
    return CodedLayer(layout, records, keys, values, randn(kv_heads, dim), pages, page_of, *mode)


def planes(layer: CodedLayer) -> list[Tensor]:
    """Views of the records: each plane [blocks, kv_heads, positions, bytes], the scales as float16 without the last."""
    layout = layer.layout
    parts = [
        layer.records[:, :, at : at + SIZE * width] for at, width in zip(layout.offsets, layout.planes, strict=True)
    ]
    codes = [part.unflatten(-1, (SIZE, -1)) for part in parts[:-2]]
    return codes + [part.view(torch.float16) for part in parts[-2:]]


def encoded(layer: CodedLayer, slots: Tensor) -> tuple[Encoded, Encoded]:
    """What the records hold of some slots: keys and values [slots, kv_heads, dim]."""
    block, offset = slots.long() // SIZE, slots.long() % SIZE
    found = [plane[block, :, offset] for plane in planes(layer)]
    count = len(PLANES[layer.layout.key_bits])
    key = Encoded(tuple(found[:count]), found[-2].unsqueeze(-1))
    return key, Encoded(tuple(found[count:-2]), found[-1].unsqueeze(-1))


def put(layer: CodedLayer, k: Tensor, v: Tensor, slots: Tensor, uncoded: Tensor) -> None:
    """tq_write in torch. uncoded: bool [rows], those whose page is to hold them; their blocks get one."""
    block, offset = slots.long() // SIZE, slots.long() % SIZE
    key, value = layer.keys.encode(k, layer.centre), layer.values.encode(v)
    written = [*key.planes, *value.planes, key.scale.squeeze(-1), value.scale.squeeze(-1)]
    for plane, rows in zip(planes(layer), written, strict=True):
        plane[block, :, offset] = rows
    if layer.pages is not None:
        assert layer.page_of is not None
        layer.page_of[block[uncoded]] = (len(layer.page_of) - 1 - block[uncoded]).int()  # any page but its own number
        rotate = layer.keys.rotation.forward
        turned = torch.stack((rotate(k.float() - layer.centre), rotate(v.float())), 1)
        layer.pages[layer.page_of[block[uncoded]].long(), :, :, offset[uncoded]] = turned[uncoded].half()


def make_batch(
    queries: list[int], contexts: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype = torch.float32,
    bits: tuple[int, int] = (4, 3), mode: tuple[int, int] = (4, 128),
) -> tuple[CodedLayer, Tensor, AttentionView]:  # fmt: skip
    """Two rows more than there are, of NaN; tables that end in blocks out of range."""
    owned = [-(-context // SIZE) for context in contexts]
    layer = make_layer(sum(owned) + 3, kv_heads, dim, bits, mode)
    order = torch.randperm(sum(owned) + 3, device=DEVICE)
    tables = torch.full((len(contexts), max(owned) + 3), 10**8, dtype=torch.int32, device=DEVICE)
    for s, (rows, context) in enumerate(zip(queries, contexts, strict=True)):
        tables[s, : owned[s]] = order[sum(owned[:s]) : sum(owned[: s + 1])]
        position = torch.arange(context, device=DEVICE)
        slots = tables[s].long()[position // SIZE] * SIZE + position % SIZE
        uncoded = (position < mode[0]) | (position > context - rows - mode[1])
        k, v = (randn(context, kv_heads, dim) * (0.5 + torch.rand(context, 1, 1, device=DEVICE)) for _ in range(2))
        put(layer, k if layer.centre is None else k + layer.centre, v, slots, uncoded)
    rows = sum(queries)
    qkv = randn(rows + 2, (heads + 2 * kv_heads) * dim, dtype=dtype)
    qkv[rows:] = float("nan")
    starts = [sum(queries[:s]) for s in range(len(queries) + 1)]
    view = AttentionView(integers(starts), integers(contexts), tables, max(queries), max(contexts))
    q = qkv[:, : heads * dim].view(rows + 2, heads, dim)
    turned = layer.keys.rotation.forward(q)
    q.copy_(turned.half().view(dtype) if dtype == torch.bfloat16 else turned)  # as tq_write leaves it
    return layer, q, view


def asked(layer: CodedLayer, q: Tensor) -> Tensor:
    """Queries as they were before tq_write, float64."""
    return layer.keys.rotation.inverse((q.view(torch.float16) if q.dtype == torch.bfloat16 else q).double())


def expected(layer: CodedLayer, q: Tensor, view: AttentionView, scale: float, window: int = 0) -> Tensor:
    """In float64, a row and a head at a time; keys less the centre, which no softmax sees."""
    q = asked(layer, q)
    out = torch.zeros_like(q)
    starts, contexts, group = view.query_start.tolist(), view.context_len.tolist(), q.shape[1] // layer.records.shape[1]
    for s, context in enumerate(contexts):
        position = torch.arange(context, device=q.device)
        slots = view.block_tables[s].long()[position // SIZE] * SIZE + position % SIZE
        key, value = encoded(layer, slots)
        k, v = layer.keys.decode(key, dtype=torch.float64), layer.values.decode(value, dtype=torch.float64)
        uncoded_k, uncoded_v = k, v
        if layer.pages is not None:
            rows = layer.pages[layer.page_of[slots // SIZE].long(), :, :, slots % SIZE].double()
            uncoded_k, uncoded_v = layer.keys.rotation.inverse(rows).unbind(1)  # [context, kv_heads, dim]
        for row in range(starts[s], starts[s + 1]):
            p = context - starts[s + 1] + row
            seen = position[max(p - window + 1, 0) if window else 0 : p + 1]
            near = ((seen < layer.first) | (p - seen < layer.recent))[:, None, None]
            mine_k, mine_v = torch.where(near, uncoded_k[seen], k[seen]), torch.where(near, uncoded_v[seen], v[seen])
            for head in range(q.shape[1]):
                weights = (mine_k[:, head // group] @ q[row, head] * scale).softmax(0)
                out[row, head] = weights @ mine_v[:, head // group]
    return out.flatten(1)


def check(layer: CodedLayer, q: Tensor, view: AttentionView, window: int = 0, same_bits_up_to: int = 0) -> Tensor:
    scale, last = q.shape[2] ** -0.5, int(view.query_start[-1])
    got = turboquant.tq_attention(layer, q, view, AttentionParams(scale, window=window), same_bits_up_to)
    want = expected(layer, q[:last], view, scale, window)
    worst, largest = (got[:last].double() - want).abs().max().item(), want.abs().max().item()
    allowed = 4e-3 if q.dtype == torch.bfloat16 else 1e-3  # bf16 rounds the result alone by 2e-3
    assert worst <= allowed * largest, f"off by {worst}, largest value {largest}"  # NaN fails too
    return got


# Writes


def closest(x: Tensor, fmt: VectorFormat, centre: Tensor | None) -> Tensor:
    """How far each coordinate lies from the nearest threshold, in float64."""
    turned = fmt.rotation.forward(x.double() if centre is None else x.double() - centre.double())
    unit = turned / turned.norm(dim=-1, keepdim=True)
    thresholds = torch.tensor(fmt.codebook.thresholds, dtype=torch.float64, device=x.device) * fmt.width**-0.5
    return (unit.unsqueeze(-1) - thresholds).abs().amin(-1)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim, bits", [(64, b) for b in FORMATS] + [(128, (4, 3)), (256, (5, 4))])
def test_writes_are_the_encoding(dim: int, bits: tuple[int, int], dtype: torch.dtype) -> None:
    rows, kv_heads = 3 if INTERPRET else 300, 2
    qkv = randn(rows, 5 * kv_heads * dim, dtype=dtype) * 3
    k, v = qkv.view(rows, -1, dim)[:, 3 * kv_heads :].split(kv_heads, dim=1)
    layer = make_layer(rows, kv_heads, dim, bits)
    slots = torch.randperm(rows * SIZE, device=DEVICE)[:rows].int()
    turboquant.tq_write(layer, k, v, slots)
    found_k, found_v = encoded(layer, slots)
    for x, found, fmt, centre in ((k, found_k, layer.keys, layer.centre), (v, found_v, layer.values, None)):
        wanted = fmt.encode(x, centre)
        off = unpack(found.planes, fmt.bits) != unpack(wanted.planes, fmt.bits)
        assert off.float().mean() <= 1e-3 and (closest(x, fmt, centre)[off] < 1e-6).all(), off.sum()
        # A number half way between two levels may get either, and the scale of its row follows from the codes.
        same = ~off.any(-1)
        torch.testing.assert_close(found.scale[same], wanted.scale[same], rtol=1e-3, atol=0)
        torch.testing.assert_close(found.scale, wanted.scale, rtol=1e-2, atol=0)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_queries_are_rotated_in_place(dim: int, dtype: torch.dtype) -> None:
    """Of rows that are written nowhere too; in float16 where they are of bfloat16. Keys and values stay."""
    layer, qkv = make_layer(2, 2, dim), randn(3, 10, dim, dtype=dtype)
    before, (q, k, v) = qkv.clone(), qkv.split((6, 2, 2), dim=1)
    turboquant.tq_write(layer, k, v, integers([5, -1, 20]), q)
    found = q.view(torch.float16) if dtype == torch.bfloat16 else q
    wanted = layer.keys.rotation.forward(before[:, :6])
    off = 1e-5 if dtype == torch.float32 else 1e-3
    torch.testing.assert_close(found.float(), wanted, rtol=off, atol=off)
    assert torch.equal(qkv[:, 6:], before[:, 6:])


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", ["both", "none", "q", "k"])
@pytest.mark.parametrize("dim, rotary", [(64, 64), (128, 128), (256, 64)])
def test_norms_and_rope_on_the_way(dim: int, rotary: int, norms: str, dtype: torch.dtype) -> None:
    """tq_rope_write is qk_norm_rope and tq_write; positions of padding rows may be any number."""
    heads, kv_heads, slots = 2 if INTERPRET else 6, 2 - INTERPRET, integers([5, -1, 20, 31, 7])
    q_norm, k_norm = (randn(dim, dtype=dtype) if norms in ("both", n) else None for n in "qk")
    positions = integers([0, 49, 3, 2**30, -5])
    args = RopeArgs(positions, randn(50, rotary).cos(), heads, kv_heads, q_norm, k_norm, 1e-6)
    layer, other = make_layer(2, kv_heads, dim), make_layer(2, kv_heads, dim)
    layer.page_of[:] = other.page_of[:] = integers([1, -1])
    other.centre.copy_(layer.centre)
    other.records.copy_(layer.records)
    other.pages.copy_(layer.pages)
    qkv = randn(5, (heads + 2 * kv_heads) * dim + 16, dtype=dtype)[:, : (heads + 2 * kv_heads) * dim]
    before, twice = qkv.clone(), qkv.clone()
    turboquant.tq_rope_write(layer, qkv, args, slots)
    reference.qk_norm_rope(twice, args._replace(positions=positions.clamp(0, 49)))
    q, k, v = twice.view(5, -1, dim).split((heads, kv_heads, kv_heads), dim=1)
    turboquant.tq_write(other, k, v, slots, q)
    half = dtype == torch.bfloat16
    got, want = (x[:, : heads * dim].view(torch.float16) if half else x[:, : heads * dim] for x in (qkv, twice))
    off = 1e-5 if dtype == torch.float32 else 1e-2  # a norm's squares are added in another order
    torch.testing.assert_close(got, want, rtol=off, atol=off)
    assert torch.equal(qkv[:, heads * dim :], before[:, heads * dim :]), "keys and values stay as they were"
    torch.testing.assert_close(layer.pages, other.pages, rtol=2e-3, atol=2e-3, equal_nan=True)
    differ = [(a != b).float().mean() for a, b in zip(planes(layer)[:-2], planes(other)[:-2], strict=True)]
    assert max(differ) < 0.02, differ


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", ["normed", "keys"])
def test_values_are_normed_or_made_of_the_keys_projection(values: str, dtype: torch.dtype) -> None:
    """As if they had been made first: codes and uncoded rows; and the projection's keys stay as they are."""
    heads, kv_heads, dim, slots = 2, 1 if INTERPRET else 2, 64, integers([5, -1, 20, 31, 7])
    norm, positions = randn(dim, dtype=dtype), integers([0, 49, 3, 17, 2])
    args = RopeArgs(positions, randn(50, dim).cos(), heads, kv_heads, norm, norm, 1e-6, values)
    layer, other = make_layer(2, kv_heads, dim), make_layer(2, kv_heads, dim)
    layer.page_of[:] = other.page_of[:] = integers([1, -1])
    for mine, its in ((layer.centre, other.centre), (layer.records, other.records), (layer.pages, other.pages)):
        its.copy_(mine)
    qkv = randn(5, args.projected_heads * dim, dtype=dtype) * 3
    before, twice = qkv.clone(), qkv.clone()
    turboquant.tq_rope_write(layer, qkv, args, slots)
    q, k, v = reference.make_qkv(twice, args)
    turboquant.tq_write(other, k, v, slots, q)
    assert torch.equal(qkv[:, heads * dim :], before[:, heads * dim :]), "keys and values stay as they were"
    torch.testing.assert_close(layer.pages, other.pages, rtol=5e-3, atol=5e-3, equal_nan=True)
    differ = [(a != b).float().mean() for a, b in zip(planes(layer)[:-2], planes(other)[:-2], strict=True)]
    assert max(differ) < 0.02, differ
    length = encoded(layer, slots[:1])[1].scale.float()  # a value of RMS 1 is about as long as a unit vector, times 8
    torch.testing.assert_close(length, torch.full_like(length, dim**0.5), rtol=0.2, atol=0)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_alone_are_made_as_beside_keys_and_nothing_is_written(dtype: torch.dtype) -> None:
    """For a drafter that reads what its target wrote."""
    heads, kv_heads, dim, slots = 2, 1, 64, integers([5, -1, 20])
    norm, positions = randn(dim, dtype=dtype), integers([0, 49, 3])
    args = RopeArgs(positions, randn(50, dim).cos(), heads, kv_heads, norm, norm, 1e-6)
    layer = make_layer(2, kv_heads, dim)
    layer.page_of[:] = integers([1, -1])
    qkv = randn(3, (heads + 2 * kv_heads) * dim, dtype=dtype)
    alone = qkv[:, : heads * dim].clone()
    before = layer.records.clone(), layer.pages.clone()
    turboquant.tq_rope_write(layer, alone, args._replace(num_kv_heads=0, k_norm=None), slots)
    assert torch.equal(layer.records, before[0])
    torch.testing.assert_close(layer.pages, before[1], rtol=0, atol=0, equal_nan=True)
    turboquant.tq_rope_write(layer, qkv, args, slots)
    assert torch.equal(alone, qkv[:, : heads * dim])


@gpu
def test_rows_go_to_their_slots_and_pages_alone() -> None:
    layer, slots = make_layer(6, 2, 64), integers([0, 17, -1, 79, 33, -7, 96])  # the last is past the cache
    layer.page_of[:] = integers([3, -1, 0, 2, 5, 4])
    k, v = randn(7, 2, 64), randn(7, 2, 64)
    k[3], v[4] = layer.centre, 0  # of a vector of length 0 nothing is left but its scale
    before, pages = layer.records.clone(), layer.pages.clone()
    turboquant.tq_write(layer, k, v, slots)
    want = CodedLayer(layer.layout, before, layer.keys, layer.values, layer.centre, pages, layer.page_of, 4, 128)
    kept = integers([0, 1, 3, 4]).long()
    expected_of = layer.page_of.clone()
    put(want, k[kept], v[kept], slots[kept], torch.zeros(4, dtype=torch.bool, device=DEVICE))
    assert torch.equal(layer.records, before) and torch.equal(layer.page_of, expected_of)
    for row, page, offset in ((0, 3, 0), (3, 5, 15), (4, 0, 1)):
        for part, x in ((0, k[row] - layer.centre), (1, v[row])):
            pages[page, part, :, offset] = layer.keys.rotation.forward(x).half()
    torch.testing.assert_close(layer.pages, pages, rtol=1e-3, atol=1e-6, equal_nan=True)


@gpu
def test_no_rows() -> None:
    layer, q, view = make_batch([1], [5], 4, 2, 64)
    before = layer.records.clone()
    turboquant.tq_write(layer, q[:0, :2], q[:0, :2], integers([]))
    assert torch.equal(layer.records, before)
    assert turboquant.tq_attention(
        layer, q[:0], replace(view, query_start=integers([0, 0])), AttentionParams(0.1)
    ).shape == (0, 256)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shares", [1, 3])
def test_parts_are_joined_and_turned_back(shares: int, dtype: torch.dtype) -> None:
    """Of three rows the last is padding, and left as it is; a share without keys has no say."""
    heads, dim, lines, start = 2, 64, 4, integers([0, 2])
    parts, power, out = randn(3, heads, shares, dim), randn(3, heads, shares), randn(3, heads * dim, dtype=dtype)
    power[0, 0, 1:] = float("-inf")
    padding, sizes = out[2].clone(), {"HEADS": heads, "DIM": dim, "STEPS": 6, "LINES": lines, "num_warps": 4}
    weights = (power * math.log(2)).softmax(-1)
    parts[0, 0, 1:] = float("nan")
    if shares == 1:
        run(turn_back, (2,), parts, out, signs(dim, parts.device), start, 1, **sizes)
    else:
        run(
            join,
            (2,),
            parts,
            power,
            signs(dim, parts.device),
            None,
            out,
            start,
            1,
            shares,
            SHARES=4,
            SINKS=False,
            **sizes,
        )
    mixed = (parts.nan_to_num(0.0) * weights.unsqueeze(-1)).sum(2)
    wanted = VectorFormat(dim, 4, device=parts.device).rotation.inverse(mixed).flatten(1)
    off = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out[:2].float(), wanted[:2], rtol=off, atol=off)
    assert torch.equal(out[2], padding)


# Attention

BATCHES = [  # rows a sequence, keys a sequence
    ([1, 1, 1], [17, 300, 1]),
    ([5, 2, 1], [5, 140, 260]),
    ([1], [1]),
    ([1], [5000]),
    ([16], [4999]),
    ([40, 1, 17, 1], [40, 270, 190, 3]),
    ([300, 1, 1, 5], [300, 5000, 1, 1000]),
    ([300, 17, 2], [5000, 1000, 129]),
    ([1] * 64, [64 * i + 1 for i in range(64)]),
    ([16] * 16, [300 * i + 16 for i in range(16)]),
]
SHAPES = [(9, 3, 64), (32, 8, 128), (16, 16, 64), (8, 1, 256), (64, 8, 128), (4, 1, 256)]


@gluon
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("queries, contexts", BATCHES)
def test_attention(queries: list[int], contexts: list[int], mode: tuple[int, int], dtype: torch.dtype) -> None:
    check(*make_batch(queries, contexts, 4, 2, 64, dtype, mode=mode))


@gluon
@pytest.mark.parametrize("bits", FORMATS)
@pytest.mark.parametrize("heads, kv_heads, dim", SHAPES)
def test_attention_of_every_shape_and_format(heads: int, kv_heads: int, dim: int, bits: tuple[int, int]) -> None:
    check(*make_batch([3, 1], [3, 200], heads, kv_heads, dim, DTYPES[0], bits))
    check(*make_batch([70, 16], [300, 700], heads, kv_heads, dim, DTYPES[0], bits))


@gluon
@pytest.mark.parametrize("window", [1, 37, 200])
@pytest.mark.parametrize("mode", [(4, 128), (20, 32), (0, 16), (4, 0), (0, 0)])
def test_windows_and_modes(mode: tuple[int, int], window: int) -> None:
    check(*make_batch([3, 1], [230, 20], 2, 1, 64, mode=mode), window)


@gluon
def test_borders_of_the_recent_keys() -> None:
    contexts = [*range(126, 131), 132, 133]
    layer, q, view = make_batch([1] * len(contexts), contexts, 2, 1, 64)
    check(layer, q, view)
    coded = layer.records.clone()
    layer.records.fill_(255)  # up to 128 keys all are recent, and of up to 132 all others are the first
    got = turboquant.tq_attention(layer, q, view, AttentionParams(0.125))
    layer.records.copy_(coded)
    want = expected(layer, q[: len(contexts)], view, 0.125)
    assert (got[:6] - want[:6]).abs().max() < 2e-3 and got[6].isnan().all()


@gluon
def test_chunks_that_see_no_codes_and_chunks_that_do() -> None:
    check(*make_batch([40, 20], [40, 170], 8, 2, 64))
    check(*make_batch([70], [200], 4, 1, 64, mode=(4, 16)))


@gluon
def test_rows_after_rejected_drafts() -> None:
    """Five drafted rows are written and looked at, then three of them again, of other tokens."""
    layer, q, view = make_batch([5], [171], 2, 1, 64, mode=(4, 16))
    check(layer, q, view)
    position = torch.arange(168, 171, device=DEVICE)
    slots = view.block_tables[0].long()[position // SIZE] * SIZE + position % SIZE
    k, v = randn(3, 1, 64), randn(3, 1, 64)
    turboquant.tq_write(layer, k, v, slots.int())
    check(layer, q, view)
    pages = layer.pages[layer.page_of[slots // SIZE].long(), :, :, slots % SIZE]
    torch.testing.assert_close(pages[:, 1].float(), layer.values.rotation.forward(v), rtol=1e-3, atol=1e-5)


@gluon
@pytest.mark.parametrize("padded_tokens", [0, 1])
def test_padding_sequences(padded_tokens: int) -> None:
    layer, q, view = make_batch([1, 3, padded_tokens, padded_tokens], [200, 290, 0, 0], 4, 2, 64)
    got = turboquant.tq_attention(layer, q, view, AttentionParams(0.125))
    real = AttentionView(view.query_start[:3], view.context_len[:2], view.block_tables[:2], 3, 290)
    assert (got[:4] - expected(layer, q[:4], real, 0.125)).abs().max() < 2e-3
    assert (got[4 : 4 + 2 * padded_tokens] == 0).all(), "a padding row without keys gives zeros"


MOST = 16  # rows of a drafted block
ALIKE = [(3, 1, 64), *SHAPES]


@gluon
@pytest.mark.parametrize("heads, kv_heads, dim", ALIKE)
@pytest.mark.parametrize("mode, window", [((4, 128), 0), ((0, 0), 0), ((4, 16), 50)])
def test_a_row_of_a_block_equals_the_row_alone(
    heads: int, kv_heads: int, dim: int, mode: tuple[int, int], window: int
) -> None:
    """Every bit of it, whose later keys are poisoned, on either side of tiles, units and the recent keys' border."""
    contexts, scale = [16, 139, 262, 523, 1290, 2048], dim**-0.5
    layer, q, view = make_batch([MOST] * len(contexts), contexts, heads, kv_heads, dim, DTYPES[0], mode=mode)
    view = replace(view, max_context=2048)
    q = q[:-2].reshape(len(contexts), MOST, heads, dim)
    block = check(layer, q.flatten(0, 1), view, window, MOST).view(len(contexts), MOST, -1)
    for end in range(MOST, 0, -1):
        cut = [context - MOST + end for context in contexts]
        for s, context in enumerate(cut):
            last = int(view.block_tables[s, (context - 1) // SIZE])
            for plane in planes(layer):
                plane[last, :, (context - 1) % SIZE + 1 :] = float("nan") if plane.dtype == torch.float16 else 255
            if layer.pages is not None:
                layer.pages[int(layer.page_of[last]), :, :, (context - 1) % SIZE + 1 :] = float("nan")
        for width in [w for w in (1, 5, 2, 9, 12) if w <= end]:
            rows = q[:, end - width : end].reshape(len(cut) * width, heads, dim)
            starts = integers([width * s for s in range(len(cut) + 1)])
            alone = AttentionView(starts, integers(cut), view.block_tables, width, 2048)
            got = turboquant.tq_attention(layer, rows, alone, AttentionParams(scale, window=window), MOST)
            assert torch.equal(got.view(len(cut), width, -1), block[:, end - width : end]), f"{width} rows up to {end}"


# The PTX of levels, emulated: no GPU


def permute(a: int, b: int, order: int) -> int:
    """prmt.b32"""
    source, result = (a | b << 32).to_bytes(8, "little"), 0
    for i in range(4):
        nibble = order >> 4 * i & 15
        byte = source[nibble & 7]
        result |= (byte if nibble < 8 else 255 * (byte >> 7)) << 8 * i
    return result


WORD = 2**32 - 1
INSTRUCTIONS = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a & WORD,
    "shl": lambda a, b: a << b & WORD,
    "shr": lambda a, b: a >> b,
    "sub": lambda a, b: a - b & WORD,
    "mul.lo": lambda a, b: a * b & WORD,
    "mov": lambda a: a,
    "prmt": permute,
}


def emulate(ptx: str, inputs: list[bytes], outputs: int) -> list[int]:
    register = {f"${outputs + i}": int.from_bytes(value, "little") for i, value in enumerate(inputs)}
    for name, target, operands in re.findall(r"^(\S+)\.[bu]32 (\S+), (.*);$", ptx, re.M):
        values = [register[o] if o in register else int(o) for o in operands.split(", ")]
        register[target] = INSTRUCTIONS[name](*values)
    return [register[f"${i}"] for i in range(outputs)]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("bits", PLANES)
def test_the_ptx_of_levels(bits: int, dim: int) -> None:
    levels = turboquant._constants(RecordLayout(SIZE, dim, bits, bits)).key_levels
    table, stretches, eighth = np.array(levels, np.float16), 8 // PLANES[bits][0], dim // 8
    width = dim // stretches
    for even, odd in torch.randint(0, 2**bits, (10, 2, dim)):
        planes = [[p.tolist() for p in pack(codes, bits)] for codes in (even, odd)]
        for at in range(0, width, 4):
            words = [bytes(plane[0][at : at + 4]) for plane in planes]
            shift = bytes((at // eighth, 0, 0, 0))
            high = [bytes(p[1][c % eighth] for c in range(at, at + 4)) for p in planes if len(p) > 1]
            found = emulate(as_they_lie(levels), [words[0], *high[:1], shift], 2 * stretches)
            got = np.array(found, np.uint32).view(np.float16).reshape(stretches, 4)
            columns = np.arange(stretches)[:, None] * width + at + np.arange(4)
            assert (got == table[even.numpy()[columns]]).all()
            found = emulate(in_pairs(levels), [*words, *high, shift], 4 * stretches)
            got = np.array(found, np.uint32).view(np.float16).reshape(stretches, 4, 2)
            assert (got == table[np.stack((even, odd), -1)[columns]]).all()


# Ahead of time compiles: no GPU, but not under the interpreter, which replaces the compiler

ROOM = {90: 228 << 10, 121: 100 << 10}  # shared memory of an SM


def layer_step(
    rows: int, heads: int, kv_heads: int, dim: int, bits: tuple[int, int] = (4, 3), mode: tuple[int, int] = (4, 128),
    window: int = 0, seqs: int = 4, sinks: bool = False, context: int = 32000,
) -> None:  # fmt: skip
    """A layer's writes and its attention, on tensors without memory."""
    layout, uncoded = RecordLayout(SIZE, dim, *bits), mode != (0, 0)
    ints = partial(empty, dtype=torch.int32)
    layer = CodedLayer(
        layout, empty(512, kv_heads, layout.nbytes, dtype=torch.uint8), *(VectorFormat(dim, b) for b in bits),
        empty(kv_heads, dim, dtype=torch.float32) if uncoded and not sinks else None,
        empty(64, 2, kv_heads, SIZE, dim, dtype=torch.float16) if uncoded else None, ints(512) if uncoded else None,
        *mode,
    )  # fmt: skip
    qkv = empty(seqs * rows, heads + 2 * kv_heads, dim)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    slots = positions = ints(seqs * rows)
    turboquant.tq_write(layer, k, v, slots, q)
    table, norm = empty(4000, dim, dtype=torch.float32), empty(dim)
    args = RopeArgs(positions, table, heads, kv_heads, norm, norm, 1e-6)
    turboquant.tq_rope_write(layer, qkv.flatten(1), args, slots)
    keys_only = qkv.flatten(1)[:, : (heads + kv_heads) * dim]
    for values, projected in (("normed", qkv.flatten(1)), ("keys", keys_only)):
        turboquant.tq_rope_write(layer, projected, args._replace(values=values), slots)
    view = AttentionView(ints(seqs + 1), ints(seqs), ints(seqs, 2000), rows, context)
    params = AttentionParams(0.1, window=window, sinks=empty(heads, dtype=torch.float32) if sinks else None)
    turboquant.tq_attention(layer, q, view, params, MOST)


def check_launch(capability: int, launch: Launch, layout: RecordLayout) -> None:
    """Fits, waits for its predecessor, and adds up as tiles of all heights do: keys and columns 16 by 16, in order."""
    made, signature = compile_launch(capability, launch)
    print(f"sm_{capability} {launch.kernel.__name__} {made.metadata.shared} bytes")
    assert made.metadata.launch_pdl and made.metadata.shared <= LIMIT[capability], launch.kernel
    check_order(launch.kernel, signature, made.asm["ptx"])
    if launch.kernel is turboquant.attend:
        options = launch.options
        found = turboquant._at_once(options["W"], layout, GPUS[capability])  # a program too many would wait for a turn
        assert found * (made.metadata.shared + 1024) <= ROOM[capability], (found, made.metadata.shared)
        assert found * 32 * options["W"] * options["maxnreg"] <= 64 << 10
        reductions = re.findall(r'"tt\.reduce".*?tt\.reduce\.return', made.asm["ttgir"], re.S)
        assert reductions
        dots = set(re.findall(r"(?:wgmma\.mma_async|mma)\.sync\.aligned\.m\d+n\d+(\S+)", made.asm["ptx"]))
        assert dots <= {"k16.row.col.f32.f16.f16.f32", "k16.f32.f16.f16"}, dots


@compiled
@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("rows", [1, 8, 16, 100])
def test_a_layer_compiles(rows: int, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = captured_launches(monkeypatch, capability, lambda: layer_step(rows, 32, 8, 128))
    assert [launch.kernel for launch in found][:5] == [turboquant.write] * 4 + [turboquant.attend]
    for launch in found:
        check_launch(capability, launch, RecordLayout(SIZE, 128, 4, 3))


@compiled
@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("heads, kv_heads, dim, bits, mode, window", [
    (9, 3, 64, (5, 4), (4, 128), 0),
    (32, 8, 128, (3, 5), (0, 0), 0),
    (8, 1, 256, (4, 3), (4, 128), 100),
    (8, 1, 256, (5, 5), (4, 128), 0),
    (16, 16, 64, (2, 2), (0, 64), 0),
])  # fmt: skip
def test_other_shapes_compile(
    heads: int, kv_heads: int, dim: int, bits: tuple[int, int], mode: tuple[int, int], window: int,
    capability: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for rows in (1, 16):
        step = partial(layer_step, rows, heads, kv_heads, dim, bits, mode, window)
        for launch in captured_launches(monkeypatch, capability, step):
            check_launch(capability, launch, RecordLayout(SIZE, dim, *bits))


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("heads, kv_heads, dim", [*SHAPES, (16, 1, 64)])
def test_rows_up_to_same_bits_up_to_go_through_the_keys_alike(
    heads: int, kv_heads: int, dim: int, capability: int
) -> None:
    for seqs, bits in product((1, 3, 8, 64), ((4, 3), (5, 5))):
        shape = (seqs, heads, kv_heads, RecordLayout(SIZE, dim, *bits))
        made = [turboquant._launch(n * seqs, *shape, n, MOST, 32000, GPUS[capability]) for n in range(1, MOST + 1)]
        assert len({a.splits for a in made}) == 1
        assert all(
            a.per_sequence * turboquant.LANES[a.warps] >= rows * heads // kv_heads and a.tiles == seqs * a.per_sequence
            for rows, a in enumerate(made, 1)
        )
