"""The small kernels of a decode step: what they compute, and that each waits for its predecessor.

The first part runs on a GPU, or under TRITON_INTERPRET=1: the fused write and the bookkeeping against the reference,
whose bookkeeping test_reference_stepping.py holds against loops. The last part needs no GPU: it compiles what each
operator of a decode step launches, for sm_90 and sm_121, and reads the order around the wait.
"""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

from sparkdraft.kernels import cuda, reference
from sparkdraft.kernels.cuda.runtime import pdl
from sparkdraft.kernels.cuda.sampling import argmax
from sparkdraft.kernels.ops import (
    SILU,
    WIDEST,
    AttentionParams,
    AttentionView,
    DraftTerms,
    Draws,
    EditedSlots,
    Ends,
    LogitEdits,
    RopeArgs,
)
from tests.kernels.ahead_of_time import LIMIT, captured_launches, check_order, compile_launch
from tests.kernels.ahead_of_time import empty as made
from tests.kernels.triton_device import (
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


# The fused write

SLOTS = [0, 17, -1, 79, 33, -7, 80, 62]  # one is past the cache, as a padding row's may be


def rope_case(
    heads: int, kv_heads: int, head_dim: int, rotary_dim: int, norms: str, dtype: torch.dtype, cached: torch.dtype,
    values: str = "given",
) -> tuple[Tensor, RopeArgs, list[Tensor]]:  # fmt: skip
    """Arguments of rope_write up to its slots: the rows apart in memory, and two caches."""
    width = (heads + kv_heads * (1 if values == "keys" else 2)) * head_dim
    qkv = randn(len(SLOTS), width + 16, dtype=dtype)[:, :width]
    positions, table = integers([0, 3, 49, 7, 11, 12, -1, 2**30]), randn(50, rotary_dim).cos()
    q_norm = randn(head_dim, dtype=dtype) if norms in ("both", "q") else None
    k_norm = randn(head_dim, dtype=dtype) if norms in ("both", "k") else None
    caches = [randn(5, kv_heads, 16, head_dim, dtype=cached) for _ in range(2)]
    return qkv, RopeArgs(positions, table, heads, kv_heads, q_norm, k_norm, 1e-6, values), caches


ROPE_SHAPES = [(9, 3, 64, 64), (4, 2, 80, 80), (4, 1, 96, 32), (0, 3, 96, 32)]
ROPE_SHAPES += [(3, 1, 128, 128)] if INTERPRET else [(32, 8, 128, 128), (0, 8, 128, 128)]


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", ["both", "none", "q", "k"])
@pytest.mark.parametrize("heads, kv_heads, head_dim, rotary_dim", ROPE_SHAPES)
def test_rope_write_is_the_reference(
    heads: int, kv_heads: int, head_dim: int, rotary_dim: int, norms: str, dtype: torch.dtype
) -> None:
    """Norms and RoPE within rounding, values to the bit, and nothing changes but queries and the slots' rows."""
    for cached in {dtype, torch.float16}:
        qkv, args, caches = rope_case(heads, kv_heads, head_dim, rotary_dim, norms, dtype, cached)
        before, expected, wanted = qkv.clone(), qkv.clone(), [cache.clone() for cache in caches]
        slots = integers(SLOTS)
        inside = args.positions.clamp(0, 49)  # padding rows may hold any number, which only the kernel allows
        reference.rope_write(expected, args._replace(positions=inside), *wanted, slots.where(slots < 80, -1))
        cuda.rope_write(qkv, args, *caches, slots)
        queries = heads * head_dim
        coarsest = cached if dtype == torch.float32 else dtype
        for got, want in ((qkv[:, :queries], expected[:, :queries]), (caches[0], wanted[0])):
            if coarsest == torch.float32:
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            elif got.numel():
                assert_close(got, want, coarsest)
        assert torch.equal(caches[1], wanted[1]), "values are copied"
        assert torch.equal(qkv[:, queries:], before[:, queries:]), "keys and values stay as they were"


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", ["normed", "keys"])
@pytest.mark.parametrize("norms", ["both", "none", "q"])
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, rotary_dim", [(4, 2, 80, 80), (5, 2, 96, 32), (0, 3, 64, 64), (2, 1, 512, 512)]
)
def test_values_are_normed_or_made_of_the_keys_projection(
    heads: int, kv_heads: int, head_dim: int, rotary_dim: int, norms: str, values: str, dtype: torch.dtype
) -> None:
    """In one launch, that leaves what it reads of keys and values as it was."""
    for cached in {dtype, torch.float16} | (set() if INTERPRET else {torch.float8_e4m3fn}):
        qkv, args, caches = rope_case(heads, kv_heads, head_dim, rotary_dim, norms, dtype, dtype, values)
        caches = [cache.to(cached) for cache in caches]
        before, expected, wanted = qkv.clone(), qkv.clone(), [cache.clone() for cache in caches]
        slots, queries = integers(SLOTS), heads * head_dim
        inside = args.positions.clamp(0, 49)
        reference.rope_write(expected, args._replace(positions=inside), *wanted, slots.where(slots < 80, -1))
        cuda.rope_write(qkv, args, *caches, slots)
        eight = cached == torch.float8_e4m3fn
        for got, want in ((qkv[:, :queries], expected[:, :queries]), *zip(caches, wanted, strict=True)):
            if eight:  # a number on the border between two goes to either: 2 ** -3 of it away
                torch.testing.assert_close(got.float(), want.float(), rtol=0.13, atol=0.02)
            elif got.numel():
                assert_close(got, want, torch.float16 if cached == torch.float16 != dtype else dtype)
        assert torch.equal(qkv[:, queries:], before[:, queries:]), "keys and values stay as they were"
        rms = caches[1][0, :, 0].float().square().mean(-1).sqrt()  # slot 0 is the first row's
        torch.testing.assert_close(rms, torch.ones_like(rms), rtol=0.02, atol=0.02)


@gpu
@pytest.mark.parametrize("values", ["given", "normed", "keys"])
def test_queries_alone_have_no_values(values: str) -> None:
    qkv, args, _ = rope_case(4, 2, 64, 32, "both", *[torch.float32] * 2)
    q = qkv[:, : 4 * 64].contiguous()
    args = args._replace(num_kv_heads=0, k_norm=None, values=values, positions=args.positions.clamp(0, 49))
    expected = q.clone()
    cuda.rope_queries(q, args)
    reference.rope_queries(expected, args)
    torch.testing.assert_close(q, expected, rtol=1e-5, atol=1e-5)


@gpu
def test_no_rows() -> None:
    qkv, args, caches = rope_case(4, 2, 64, 64, "both", *[torch.float32] * 2)
    before = [cache.clone() for cache in caches]
    cuda.rope_write(qkv[:0], args._replace(positions=args.positions[:0]), *caches, integers([]))
    assert all(torch.equal(a, b) for a, b in zip(before, caches, strict=True))
    empty = integers([])
    assert [len(t) for t in cuda.make_rows(empty, integers([[]]).view(0, 0), empty, 4, 16, 0)] == [0] * 4
    rows = cuda.pack_rows(empty, integers([[]]).view(0, 0), empty, None, empty, 16, STAMP)
    assert rows.query_start.tolist() == [0] and rows.places.shape == (0, 1)
    result, kept = cuda.accept_drafts(None, empty, empty, empty, empty, empty, rows, STAMP)
    assert (result.shape, kept.shape) == ((0, 4), (0,))


# The bookkeeping


STAMP = integers([0], torch.int64) if INTERPRET or torch.cuda.is_available() else None


@gpu
@pytest.mark.parametrize("width", [1, 2, 4, 7, 16])
def test_make_rows(width: int) -> None:
    rng = random.Random(width)
    for case in range(6):
        seqs, blocks, size = rng.choice([1, 3, 8]), rng.randint(1, 9), rng.choice([1, 8, 16])
        lengths = [rng.choice([0, 1, rng.randint(1, blocks * size)]) for _ in range(seqs)]
        length, token = integers(lengths), integers([rng.randint(0, 10**5) for _ in range(seqs)])
        tables = integers([[rng.randint(0, 10**5) for _ in range(blocks + 3)] for _ in range(seqs)])[:, :blocks]
        first = integers([rng.randint(0, 10**5) for _ in range(seqs)]) if case > 2 else None
        got = cuda.make_rows(length, tables, token, width, size, 77, first)
        expected = reference.make_rows(length, tables, token, width, size, 77, first)
        for mine, wanted in zip(got, expected, strict=True):
            assert mine.dtype == torch.int32 and torch.equal(mine, wanted)


@gpu
@pytest.mark.parametrize("depth", [0, 1, 3, 7, 15])
def test_rows_are_packed_and_drafts_accepted(depth: int) -> None:
    """Lanes of which some are empty, and of which each keeps as many drafts as it likes."""
    rng = random.Random(depth)

    def some(count: int, low: int, high: int) -> Tensor:
        return integers([rng.randint(low, high) for _ in range(count)])

    for case in range(8):
        seqs, size, blocks = rng.choice([1, 3, 8]), rng.choice([1, 8, 16]), rng.randint(1, 5)
        drafts: Tensor | None = some(seqs * (depth + 2), 0, 1).view(seqs, -1)[:, 1 : depth + 1]  # rows apart
        samples, kept = some(seqs * (depth + 1), 0, 1), some(seqs, 0, depth + 1)
        if case % 2:
            samples, drafts = samples.long(), drafts.long().contiguous()
        drafts = drafts if depth or case % 3 else None
        accepted = some(seqs, 0, depth).long() if case % 4 == 3 else None
        tables = some(seqs * (blocks + 3), 0, 10**5).view(seqs, -1)[:, :blocks]
        length = some(seqs + 2, 1, blocks * size) * some(seqs + 2, 0, 1)
        needed = int(((1 + kept.clamp(max=depth)) * (length[:seqs] > 0)).sum())
        room = rng.choice([None, rng.randint(max(needed, 1), seqs * (depth + 1)), max(needed, 1)])
        samples = samples[:room]
        lanes = [length, some(seqs + 2, 0, 9), some(seqs + 2, 0, 9)]  # more lanes than take part
        wanted = [t.clone() for t in lanes]
        packed = []
        for ops, state in ((cuda, lanes), (reference, wanted)):
            mine = [t[:seqs] for t in state]
            rows = ops.pack_rows(mine[0], tables, mine[1], drafts, kept, size, STAMP, room)
            result, slots = ops.accept_drafts(drafts, samples, kept, *mine, rows, STAMP, accepted)
            packed.append([*rows, result[:, :-1], slots, *state])
        assert all(t.dtype == torch.int32 for t in packed[0])
        assert all(torch.equal(one, other) for one, other in zip(*packed, strict=True))


@gpu
@pytest.mark.parametrize("depth", [1, 3, 7, 15])
@pytest.mark.parametrize("seqs", [1, 5, 40])
def test_drafts_are_admitted_as_the_reference_admits_them(seqs: int, depth: int) -> None:
    """Whether tokens are dear or free, and where the cost of tokens jumps."""
    torch.manual_seed(depth)
    deepest, found = depth + 3, set()
    for price in (0.0, 0.02, 0.1, 0.4, 0.9):
        gaps = randn(seqs, depth) * 4
        gaps[0, 0] = float("nan")
        gaps[-1] = 99.0
        most = torch.randint(0, depth + 1, (seqs,), dtype=torch.int32, device=gaps.device)
        worth = (torch.rand(seqs * deepest + 1, device=gaps.device) * 2 * price).cumsum(0)
        worth = torch.cat((worth[:1] * 0, worth[1:] - worth[0]))
        fits = torch.cat((randn(2, 1).abs() + 0.2, randn(2, 1), randn(2, deepest) * 0.2), 1)
        fair = (torch.rand(seqs, device=gaps.device) + 0.2).where(torch.rand(seqs, device=gaps.device) < 0.8, -1.0)
        temperature = torch.rand(seqs, device=gaps.device).round()
        terms = DraftTerms(fits, fair, worth)
        got, expected = (ops.admit_drafts(gaps, most, temperature, terms) for ops in (cuda, reference))
        assert got.dtype == torch.int32 and torch.equal(got, expected)
        assert (got <= most).all() and torch.equal(got[fair < 0], most[fair < 0])
        found |= {int((most - got).sum())}
    assert len(found) > 1 or seqs == 1, "some are not admitted"


@gpu_only
@pytest.mark.parametrize("rows", [1, 16])
def test_overlapped_launches_in_a_graph_equal_launches_one_by_one(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of which each kernel reads what the one before has written, step after step: an early read would show."""
    monkeypatch.undo()  # capture wants the real torch.empty
    heads, kv_heads, dim, seqs, blocks = 32, 8, 128, 4, 64
    norm, table = randn(dim, dtype=torch.bfloat16), torch.randn(2048, dim, device="cuda")
    start = randn(seqs * rows, (heads + 2 * kv_heads) * dim, dtype=torch.bfloat16)
    gain = randn(start.shape[1], dtype=torch.bfloat16)
    tables = torch.randperm(seqs * blocks, device="cuda").int().view(seqs, blocks)
    samples = torch.randint(0, 2, (seqs, rows), device="cuda", dtype=torch.int32)
    kept = integers([rows - 1, 0, rows // 2, rows - 1])
    begin = integers([[5, 300, 0, 77], [1, 2, 3, 4], [0] * seqs])

    def chain() -> tuple[Tensor, ...]:
        k, v = (torch.zeros(seqs * blocks, kv_heads, 16, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        length, token, observed = begin.clone().unbind(0)
        qkv, out = start.clone(), start[:, : heads * dim].clone()
        for _ in range(12):
            drafts = samples[:, 1:].contiguous() if rows > 1 else None
            made = cuda.pack_rows(length, tables, token, drafts, kept, 16, STAMP)
            view = AttentionView(made.query_start, made.context_len, tables, rows, 1024)
            qkv = cuda.rms_norm(qkv, gain, 1e-6)
            cuda.rope_write(qkv, RopeArgs(made.positions, table, heads, kv_heads, norm, norm, 1e-6), k, v, made.slots)
            q = qkv[:, : heads * dim].view(-1, heads, dim)
            alive = torch.arange(len(q), device="cuda").unsqueeze(1) < made.query_start[seqs]
            out = cuda.paged_attention(q, k, v, view, AttentionParams(0.09), 16).where(alive, 0.0)
            gated = cuda.gated(torch.cat([out, out], 1), SILU)
            qkv = torch.cat([gated, qkv[:, gated.shape[1] :]], 1)
            cuda.accept_drafts(drafts, samples.flatten(), kept, length, token, observed, made, STAMP)
        return out, k, v, length, token, observed

    monkeypatch.setattr(pdl, "ENABLED", False)
    expected = chain()
    monkeypatch.setattr(pdl, "ENABLED", True)
    assert all(torch.equal(a, b) for a, b in zip(chain(), expected, strict=True))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(20):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


# Ahead of time compiles: no GPU, but not under the interpreter, which replaces the compiler


def decode_step(rows: int, heads: int, kv_heads: int, dim: int, most: int) -> None:
    """Each operator of a decode step once, on tensors without memory."""
    seqs, width = 4, (heads + 2 * kv_heads) * dim

    def ints(*shape: int) -> Tensor:
        return made(*shape, dtype=torch.int32)

    tables, lanes = ints(seqs, 256), [ints(seqs) for _ in range(4)]
    drafts = ints(seqs, rows - 1).long() if rows > 1 else None
    cuda.make_rows(lanes[0], tables, lanes[1], rows, 16, 7)
    cuda.make_rows(lanes[0], tables, lanes[1], rows, 16, 7, lanes[2])
    stamp, floats = made(1, dtype=torch.int64), partial(made, dtype=torch.float32)
    if rows > 1:
        terms = DraftTerms(floats(2, rows + 1), floats(seqs), floats(seqs * rows))
        cuda.admit_drafts(floats(seqs, rows - 1), lanes[2], floats(seqs), terms)
    packed = cuda.pack_rows(lanes[0], tables, lanes[1], drafts, lanes[2], 16, stamp)
    positions, slots, context = packed.positions, packed.slots, packed.context_len
    qkv, norm, table = made(seqs * rows, width), made(dim), made(4096, dim, dtype=torch.float32)
    caches = [made(1024, kv_heads, 16, dim) for _ in range(2)]
    cuda.rms_norm(qkv, made(width), 1e-6)
    args = RopeArgs(positions, table, heads, kv_heads, norm, norm, 1e-6)
    cuda.rope_write(qkv, args, *caches, slots)
    for norms in ((None, None), (norm, norm)):  # partial rotary
        some = args._replace(table=table[:, : dim // 2], q_norm=norms[0], k_norm=norms[1])
        cuda.rope_write(qkv, some, *caches, slots)
    cuda.rope_write(qkv[:, heads * dim :], args._replace(num_heads=0, q_norm=None), *caches, slots)
    eight = [cache.to(torch.float8_e4m3fn) for cache in caches]
    cuda.rope_write(qkv, args, *eight, slots)
    for values, end in (("normed", width), ("keys", width - kv_heads * dim)):
        for kept in (caches, eight):
            cuda.rope_write(qkv[:, :end], args._replace(values=values), *kept, slots)
    q = qkv[:, : heads * dim].view(-1, heads, dim)
    view = AttentionView(ints(seqs + 1), context, tables, rows, 4096)
    for causal, window in ((True, 0), (False, 0), (False, 512)):
        cuda.paged_attention(q, *caches, view, AttentionParams(0.1, causal, window), most)
    cuda.paged_attention(q, *eight, view, AttentionParams(0.1), most)
    sinks = made(heads, dtype=torch.float32)
    for kept, window in ((caches, 0), (caches, 128), (eight, 0)):
        cuda.paged_attention(q, *kept, view, AttentionParams(0.1, True, window, sinks), most)
    cuda.gated(made(seqs * rows, 3072), SILU)
    argmax.argmax(floats(seqs * rows, 40000))
    ends = Ends(ints(2).long(), ints(2).long(), positions)
    sampled = [cuda.sampled_rows(*some, lanes[0], lanes[1]) for some in ((packed, ends), (packed, None), (None, ends))]
    draws = Draws(sampled[1].slots, sampled[1].positions, floats(3, seqs), ints(2, seqs).long())
    cuda.sample(floats(seqs * rows, 40000), draws)
    cuda.sample_sure(floats(seqs * rows, 40000), draws, ints(40000).long(), WIDEST)
    cuda.sample_sure(floats(seqs * rows, 40000), None, None, WIDEST)
    edited = EditedSlots(ints(seqs, 40000), floats(seqs, 3), ints(seqs, 1200), floats(seqs, 1200), ints(seqs, 1200))
    cuda.edit_logits(floats(seqs * rows, 40000), LogitEdits(*(ints(seqs * rows) for _ in range(4)), edited))
    cuda.count_ids(edited.counts, lanes[0], ints(seqs, rows), lanes[1])
    cuda.count_ids(edited.counts, lanes[0], ints(seqs, 1))
    cuda.store_aux(made(seqs * rows, 576), made(seqs * rows, 5, 576), 2, positions)
    cuda.store_aux(made(seqs, 576), made(seqs, 16, 5, 576), 2, positions)
    state = lanes[2], lanes[0], lanes[1], lanes[3], packed, stamp
    cuda.accept_drafts(drafts, ints(seqs * rows), *state)
    cuda.accept_drafts(drafts, ints(seqs * rows).long(), *state, lanes[2])


@compiled
@pytest.mark.parametrize("capability", LIMIT)
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("heads, kv_heads, dim", [(32, 8, 128), (9, 3, 64), (12, 2, 256), (16, 2, 512)])
def test_every_kernel_of_a_decode_step_compiles_and_waits(
    rows: int, heads: int, kv_heads: int, dim: int, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = captured_launches(monkeypatch, capability, lambda: decode_step(rows, heads, kv_heads, dim, 16))
    for launch in launches:
        built, signature = compile_launch(capability, launch)
        assert built.metadata.launch_pdl and built.metadata.shared <= LIMIT[capability], launch.kernel
        check_order(launch.kernel, signature, built.asm["ptx"])
