"""The bookkeeping of a decode step in plain torch against loops over lanes and rows; random cases, many of them.

And the step's fused write on a CPU: the reference's and the native one, which a recording must be able to hold.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from sparkdraft.kernels import native, reference
from sparkdraft.kernels.ops import Ops, RopeArgs

FILL = 99
needs_compiler = pytest.mark.skipif(native.unavailable_reason() is not None, reason=str(native.unavailable_reason()))
Rows = tuple[list[int], list[int], list[int], list[int]]


def int32(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def laid_out(length: list[int], tables: list[list[int]], token: list[int], width: int, size: int,
             first: list[int] | None) -> Rows:  # fmt: skip
    ids, positions, slots, contexts = [], [], [], []
    for lane, written in enumerate(length):
        for i in range(width):
            place = max(written - 1 + i, 0)
            ids.append(token[lane] if i == 0 else FILL)
            positions.append(place if first is None else first[lane] + i)
            here = written > 0 and place < len(tables[lane]) * size
            slots.append(tables[lane][place // size] * size + place % size if here else -1)
        contexts.append(min(written - 1 + width, len(tables[lane]) * size) if written else 0)
    return ids, positions, slots, contexts


@pytest.mark.parametrize("ops", [reference, pytest.param(native, marks=needs_compiler)], ids=lambda ops: ops.NAME)
def test_make_rows_is_what_a_loop_does(ops: Ops) -> None:
    rng = random.Random(0)
    for case in range(200):
        seqs, width, size, blocks = (rng.randint(1, 9) for _ in range(4))
        length = [rng.choice([0, 1, rng.randint(1, blocks * size)]) for _ in range(seqs)]
        tables = [[rng.randint(0, 99) for _ in range(blocks)] for _ in range(seqs)]
        token = [rng.randint(0, 500) for _ in range(seqs)]
        first = [rng.randint(0, 500) for _ in range(seqs)] if case % 3 else None
        start = None if first is None else int32(first)
        got = ops.make_rows(int32(length), int32(tables), int32(token), width, size, FILL, start)
        assert all(t.dtype == torch.int32 for t in got)
        assert tuple(t.tolist() for t in got) == laid_out(length, tables, token, width, size, first)


def test_pack_rows_is_what_a_loop_does() -> None:
    rng = random.Random(0)
    for case in range(300):
        seqs, size, blocks = (rng.randint(1, 9) for _ in range(3))
        depth = rng.choice([0, 0, 1, 3, 7])
        length = [rng.choice([0, 1, rng.randint(1, blocks * size)]) for _ in range(seqs)]
        tables = [[rng.randint(0, 99) for _ in range(blocks)] for _ in range(seqs)]
        token = [rng.randint(0, 500) for _ in range(seqs)]
        drafts = [[rng.randint(0, 500) for _ in range(depth)] for _ in range(seqs)]
        kept = [rng.randint(0, depth + 2) for _ in range(seqs)]  # more than there are: all
        stamp = torch.zeros(1, dtype=torch.int64)
        given = torch.tensor(drafts, dtype=(torch.int32, torch.int64)[case % 2]) if depth else None
        needed = sum(min(1 + n, 1 + depth) for n, written in zip(kept, length, strict=True) if written)
        room = rng.randint(max(needed, 1), seqs * (1 + depth)) if case % 3 else None
        rows = reference.pack_rows(int32(length), int32(tables), int32(token), given, int32(kept), size, stamp, room)
        assert all(t.dtype == torch.int32 for t in rows) and stamp.item() > 0
        live, dead, starts, contexts = [], [], [0], []
        for lane, written in enumerate(length):
            alive = min(1 + kept[lane], 1 + depth) if written else 0
            for i in range(1 + depth):
                place = written - 1 + i
                slot = tables[lane][place // size] * size + place % size if 0 <= place < blocks * size else -1
                row = ([token[lane], *drafts[lane]][i], place, slot) if i < alive else (0, 0, -1)
                (live if i < alive else dead).append((*row, lane, (lane, i)))
            starts.append(starts[-1] + alive)
            contexts.append(written - 1 + alive if written else 0)
        found = list(zip(*(t.tolist() for t in rows[:4]), strict=True))
        assert found == [row[:4] for row in live + dead][:room]
        assert rows.query_start.tolist() == starts and rows.context_len.tolist() == contexts
        assert [rows.places[where].item() for *_, where in live + dead] == list(range(seqs * (1 + depth)))


def test_accept_drafts_is_what_a_loop_does() -> None:
    rng = random.Random(0)
    for case in range(300):
        seqs, depth = rng.randint(1, 9), rng.randint(0, 6)
        drafts = [[rng.randint(0, 1) for _ in range(depth)] for _ in range(seqs)]
        samples = [rng.randint(0, 1) for _ in range(seqs * (depth + 1))]
        kept = [rng.randint(0, depth) for _ in range(seqs)]
        length = [rng.choice([0, rng.randint(1, 50)]) for _ in range(seqs)]
        given = [rng.randint(0, depth) for _ in range(seqs)] if case % 3 == 0 else None
        lanes, stamp = [int32(x) for x in (length, [-7] * seqs, [-8] * seqs)], torch.zeros(1, dtype=torch.int64)
        verified = int32(drafts) if depth else None
        tables = int32([[2 * lane, 2 * lane + 1] for lane in range(seqs)])
        needed = sum(1 + n for n, written in zip(kept, length, strict=True) if written)
        room = rng.randint(max(needed, 1), len(samples)) if case % 2 else len(samples)
        samples = samples[:room]
        rows = reference.pack_rows(lanes[0], tables, lanes[1], verified, int32(kept), 32, stamp, room)
        result, kept_slots = reference.accept_drafts(
            verified, int32(samples), int32(kept), *lanes, rows, stamp, None if given is None else torch.tensor(given)
        )
        assert result.dtype == kept_slots.dtype == torch.int32 and result[:, -1].min() > 0
        for lane in range(seqs):
            places = rows.places[lane].tolist()
            own = [samples[place] if place < room else 0 for place in places]
            count = 0
            while count < depth and drafts[lane][count] == own[count]:
                count += 1
            count = min(count if given is None else given[lane], kept[lane])
            assert result[lane, :-1].tolist() == [*own, count, kept[lane]]
            assert all(place < room for place in places[: count + 1]) or not length[lane]
            inside = [(i, place) for i, place in enumerate(places) if place < room]
            slots = [rows.slots[place].item() if i <= count else -1 for i, place in inside]
            assert [kept_slots[place].item() for _, place in inside] == slots
            now = [t[lane].item() for t in lanes]
            alive = length[lane] > 0
            seen = -8 if not depth else length[lane] + count if alive else 0
            assert now == [length[lane] + count + 1 if alive else 0, own[count], seen]


@needs_compiler
@pytest.mark.parametrize("values", ["given", "normed", "keys"])
@pytest.mark.parametrize(
    "heads, kv_heads, dim, rotary", [(4, 2, 32, 32), (0, 3, 32, 32), (3, 1, 512, 512), (6, 1, 64, 16)]
)
def test_the_native_rope_write_is_the_reference_and_can_be_recorded(
    heads: int, kv_heads: int, dim: int, rotary: int, values: str
) -> None:
    torch.manual_seed(0)
    slots, positions, width = int32([3, -1, 40, 17]), int32([5, 0, 9, 2]), heads + kv_heads * (1 + (values != "keys"))
    whole, table, norm = torch.randn(4, width * dim + 8), torch.randn(16, rotary), torch.randn(dim)
    qkv, q_norm = whole[:, :-8], norm if heads else None
    expected, wanted = qkv.clone(), torch.randn(2, 4, kv_heads, 16, dim)
    caches, start, untouched = wanted.clone(), qkv.clone(), wanted.clone()
    args = RopeArgs(positions, table, heads, kv_heads, q_norm, norm, 1e-6, values)
    reference.rope_write(expected, args, *wanted, slots)

    def step() -> Tensor:
        native.rope_write(qkv, args, *layers, slots)
        return qkv

    layers = list(caches)
    recording = native.Graph(step)
    assert recording.kernels == ["unit_rms"] * (values != "given") + ["qk_norm_rope", "kv_write"]
    assert torch.equal(qkv, start) and torch.equal(caches, untouched), "recording computes nothing"
    for _ in range(2):
        recording.replay()
        torch.testing.assert_close(qkv[:, : heads * dim], expected[:, : heads * dim], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(caches, wanted, rtol=1e-5, atol=1e-5)
        qkv.copy_(start)
        caches.copy_(untouched)


@needs_compiler
def test_the_native_make_rows_can_be_recorded() -> None:
    length, token, first = int32([5, 0, 9]), int32([11, 0, 12]), int32([21, 0, 9])
    tables = int32([[4, 2], [0, 0], [7, 3]])
    before = native.make_rows(length, tables, token, 3, 8, FILL, first)[2]
    recording = native.Graph(lambda: native.make_rows(length, tables, token, 3, 8, FILL, first)[2])
    assert recording.kernels == ["make_rows"]
    length.add_(1)
    expected = reference.make_rows(length, tables, token, 3, 8, FILL, first)[2]
    assert torch.equal(recording.replay(), expected) and not torch.equal(before, expected)
