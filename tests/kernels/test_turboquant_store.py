"""What is written to a coded layer, by any rows in any order, is read coded or uncoded, by each row's own position.

Checked against attention over decoded keys in float64. Whatever nobody has written is poisoned: codes of all ones, with
scales and pages that are no numbers; and a block that no row of a batch must read uncoded has lost its page by then.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from sparkdraft.kernels.ops import AttentionParams, AttentionView
from sparkdraft.kernels.reference.turboquant import tq_attention, tq_write
from sparkdraft.kernels.turboquant.layout import PLANES, token_bytes
from sparkdraft.kernels.turboquant.store import CodedLayer, RecordLayout, planes
from sparkdraft.kernels.turboquant.vectors import VectorFormat

SIZE, HEADS, KV_HEADS = 16, 4, 2
FIRST, RECENT = 4, 128
Span = tuple[int, int, int]  # sequence, its first row's position, and the position after its last


def int32(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Cache:
    """A few sequences whose keys and values are known, and a layer that they are written to bit by bit."""

    def __init__(
        self,
        lengths: list[int],
        dim: int = 64,
        bits: tuple[int, int] = (4, 3),
        first: int = FIRST,
        recent: int = RECENT,
        window: int = 0,
        centred: bool = True,
        page_dtype: torch.dtype = torch.float64,
    ) -> None:
        self.generator = torch.Generator().manual_seed(dim + sum(lengths))
        self.window, self.scale = window, dim**-0.5
        self.common = 3 * self.random(KV_HEADS, dim)
        self.k = [self.random(n, KV_HEADS, dim) + self.common for n in lengths]
        self.v = [self.random(n, KV_HEADS, dim) for n in lengths]
        self.q = [self.random(n, HEADS, dim) * 2 for n in lengths]
        most = -(-max(lengths) // SIZE)
        num_blocks = len(lengths) * most + 3
        numbers = torch.randperm(num_blocks, generator=self.generator)
        self.tables = numbers[: len(lengths) * most].reshape(-1, most).int()
        keys, values = (VectorFormat(dim, b) for b in bits)
        self.layer = CodedLayer.make(
            *(num_blocks, KV_HEADS, SIZE, keys, values),
            centre=self.common.float() if centred else None,
            num_pages=num_blocks,
            page_dtype=page_dtype,
            page_of=torch.full((num_blocks,), -1, dtype=torch.int32),
            first=first,
            recent=recent,
        )
        assert self.layer.pages is not None and self.layer.page_of is not None
        self.pages, self.page_of = self.layer.pages, self.layer.page_of
        self.layer.records.fill_(0xFF)
        self.pages.fill_(torch.nan)
        self.free = torch.randperm(num_blocks, generator=self.generator).tolist()

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def write(self, spans: list[Span], wrong: bool = False) -> None:
        """The rows of these positions, and two without a slot. wrong: of other vectors than the text has."""
        slots = [-1]
        for s, start, end in spans:
            for p in range(start, end):
                block = int(self.tables[s, p // SIZE])
                if self.page_of[block] < 0:
                    self.page_of[block] = self.free.pop()
                slots.append(block * SIZE + p % SIZE)
        slots.append(len(self.layer.records) * SIZE)
        none = torch.full((1, *self.common.shape), torch.nan, dtype=torch.float64)
        k, v = (torch.cat([none, *(x[s][a:b] for s, a, b in spans), none]) for x in (self.k, self.v))
        if wrong:
            k, v = 5 - k, v + 5
        tq_write(self.layer, k, v, int32(slots))

    def forget_pages(self, spans: list[Span]) -> None:
        """Pages stay only where these rows, or rows after them, read a key uncoded."""
        starts = {s: start for s, start, _ in spans}
        for s, start in starts.items():
            for i in range(start // SIZE):
                begin, end = i * SIZE, (i + 1) * SIZE
                block = int(self.tables[s, i])
                page = int(self.page_of[block])
                if begin >= self.layer.first and start - (end - 1) >= self.layer.recent and page >= 0:
                    self.page_of[block] = -1
                    self.pages[page] = torch.nan
                    self.free.append(page)

    def view(self, spans: list[Span]) -> AttentionView:
        starts = [0]
        for _, start, end in spans:
            starts.append(starts[-1] + end - start)
        contexts = [end for _, _, end in spans]
        tables = self.tables[[s for s, _, _ in spans]]
        most = max(b - a for a, b in pairwise(starts))
        return AttentionView(int32(starts), int32(contexts), tables, most, max(contexts))

    def attend(self, spans: list[Span], dtype: torch.dtype = torch.float64) -> Tensor:
        """[rows, heads, dim]; behind the rows is one that belongs to nobody."""
        nobody = torch.full((1, *self.q[0].shape[1:]), torch.nan, dtype=dtype)
        q = torch.cat([*(self.q[s][a:b].to(dtype) for s, a, b in spans), nobody])
        turned = self.layer.keys.rotation.forward(q).to(dtype)
        out = tq_attention(self.layer, turned, self.view(spans), self.params)
        assert out.dtype == dtype and out.shape == (len(q), q[0].numel())
        return out[:-1].view_as(q[:-1])

    @property
    def params(self) -> AttentionParams:
        return AttentionParams(self.scale, window=self.window)

    def weights(self, scores: Tensor) -> Tensor:  # [heads, rows, keys], -inf where a key is not seen
        return scores.softmax(-1)

    def decoded(self, s: int) -> tuple[Tensor, Tensor]:
        keys, values, centre = self.layer.keys, self.layer.values, self.layer.centre
        k = keys.decode(keys.encode(self.k[s], centre), centre, torch.float64)
        return k, values.decode(values.encode(self.v[s]), dtype=torch.float64)

    def wanted(self, spans: list[Span]) -> Tensor:
        """All keys in both forms; each row picks scores and values by the distance of the key."""
        outs = []
        for s, start, end in spans:
            position, key = torch.arange(start, end).unsqueeze(1), torch.arange(end)
            far = (key >= self.layer.first) & (key <= position - self.layer.recent)
            hidden = key > position
            if self.window:
                hidden |= key <= position - self.window
            (dk, dv), k, v = self.decoded(s), self.k[s], self.v[s]
            dk, dv, k, v = (x[:end].repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (dk, dv, k, v))
            coded, uncoded = (torch.einsum("rhd,khd->hrk", self.q[s][start:end], x) for x in (dk, k))
            scores = torch.where(far, coded, uncoded) * self.scale
            weights = self.weights(scores.masked_fill(hidden, -torch.inf))
            out = torch.einsum("hrk,khd->rhd", weights * far, dv) + torch.einsum("hrk,khd->rhd", weights * ~far, v)
            outs.append(out)
        return torch.cat(outs)

    def step(self, spans: list[Span]) -> None:
        self.write(spans)
        self.forget_pages(spans)
        close(self.attend(spans), self.wanted(spans))


def close(a: Tensor, b: Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


# ---- the record


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 192, 256, 576])
def test_the_planes_are_the_record_and_nothing_is_left_over(dim: int) -> None:
    for key_bits in PLANES:
        for value_bits in PLANES:
            layer = CodedLayer.make(2, 3, SIZE, VectorFormat(dim, key_bits), VectorFormat(dim, value_bits))
            assert layer.pages is None and layer.layout.nbytes == SIZE * token_bytes(dim, key_bits, value_bits)
            for stored in planes(layer):
                assert stored.scale.dtype == torch.float16
                for plane in (*stored.planes, stored.scale.view(torch.uint8)):
                    assert plane.shape[:3] == (2, 3, SIZE)
                    plane += 1  # a byte of two planes would be 2, and one of none 0
            assert (layer.records == 1).all()


def test_the_bytes_of_a_token() -> None:
    assert RecordLayout(SIZE, 128, 4, 3).nbytes == SIZE * 116
    assert RecordLayout(SIZE, 256, 4, 3).nbytes == SIZE * 228
    layer = CodedLayer.make(1, 1, SIZE, VectorFormat(128, 4), VectorFormat(128, 3))
    keys, values = planes(layer)
    views = (*keys.planes, *values.planes, keys.scale, values.scale)
    begins = [SIZE * n for n in (0, 64, 96, 112, 114)]  # part of the format: kernels count with these
    assert [x.data_ptr() - layer.records.data_ptr() for x in views] == begins == list(layer.layout.offsets)


# ---- writing


def test_a_row_is_written_where_its_slot_says_and_nowhere_else() -> None:
    cache = Cache([40], dim=96)
    layer, k, v = cache.layer, cache.k[0], cache.v[0]
    cache.page_of[2] = 5
    tq_write(layer, k[:4], v[:4], int32([2 * SIZE + 7, -1, 3 * SIZE, len(layer.records) * SIZE + 1]))
    centred = layer.keys.rotate(k, layer.centre)
    assert torch.equal(cache.pages[5, :, :, 7], torch.stack([centred[0], layer.values.rotate(v[0])]))
    cache.pages[5, :, :, 7] = torch.nan
    assert cache.pages.isnan().all()  # block 3 has codes only
    for stored, encoded in zip(
        planes(layer), (layer.keys.encode(k, layer.centre), layer.values.encode(v)), strict=True
    ):
        for plane, codes in zip((*stored.planes, stored.scale), (*encoded.planes, encoded.scale), strict=True):
            assert torch.equal(plane[2, :, 7], codes[0]) and torch.equal(plane[3, :, 0], codes[2])
            for block, offset in ((2, 7), (3, 0)):
                plane[block, :, offset].view(torch.uint8).fill_(0xFF)
    assert (layer.records == 0xFF).all()


# ---- reading


@pytest.mark.parametrize("window", [0, 1, 100, 128, 129, 200])
def test_every_context_from_1_to_300(window: int) -> None:
    cache = Cache([300], window=window)
    cache.step([(0, 0, 300)])
    cache.step([(0, 126, 131)])  # keys lie in the cache; pages for these rows and no earlier ones
    cache.step([(0, 299, 300)])


@pytest.mark.parametrize(("first", "recent"), [(0, 0), (4, 0), (0, 128), (4, 1), (20, 50), (4, 1000)])
def test_other_borders_than_the_usual(first: int, recent: int) -> None:
    Cache([140], first=first, recent=recent, centred=False).step([(0, 0, 140)])


def test_without_uncoded_rows_there_are_no_pages_and_no_map() -> None:
    cache = Cache([40], first=0, recent=0)
    cache.layer = replace(cache.layer, pages=None, page_of=None)
    cache.write([(0, 0, 40)])
    close(cache.attend([(0, 10, 40)]), cache.wanted([(0, 10, 40)]))
    with pytest.raises(AssertionError, match="uncoded rows need pages"):
        CodedLayer.make(1, 1, SIZE, cache.layer.keys, cache.layer.values, recent=1)


CASES = [(64, (4, 3)), (64, (3, 5)), (96, (5, 4)), (128, (4, 3)), (128, (2, 2)), (256, (5, 2)), (512, (4, 3))]


def run_ragged(cache: Cache, lengths: list[int], rng: random.Random) -> None:
    """Chunks, single rows and drafts of which the last are rejected, of sequences that stand anywhere, in any order."""
    done = [0] * len(lengths)
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        batch = [s for s in range(len(lengths)) if done[s] < lengths[s] and rng.random() < 0.8]
        rng.shuffle(batch)
        rows = {s: rng.choice([1, 1, 5, 16, 17, 60]) for s in batch}
        spans = [(s, done[s], min(done[s] + rows[s], lengths[s])) for s in batch]
        if not spans:
            continue
        cache.step(spans)
        for s, start, end in spans:
            done[s] = end if end - start > 16 else rng.randint(start + 1, end)
            cache.write([(s, done[s], end)], wrong=True)  # what was rejected is no part of the text


@pytest.mark.parametrize(("dim", "bits"), CASES)
def test_ragged_batches(dim: int, bits: tuple[int, int]) -> None:
    lengths = [170, 150, 30, 133]
    run_ragged(Cache(lengths, dim, bits), lengths, random.Random(dim + sum(bits)))


def test_company_changes_nothing() -> None:
    """A row of a chunk, the same row by itself, and in a batch with others. To the last bits, which torch's own matrix
    products owe to the number of their rows."""
    cache = Cache([200, 140, 3])
    whole = [(0, 0, 200), (1, 0, 140), (2, 0, 3)]
    cache.write(whole)
    together = cache.attend(whole).split([200, 140, 3])
    for p in (0, 3, 4, 126, 127, 128, 129, 130, 139):
        for spans in ([(0, p, p + 1)], [(2, 1, 3), (0, p, p + 1)], [(1, 50, 140), (0, p, p + 8)]):
            out = cache.attend(spans)[sum(b - a for _, a, b in spans[:-1])]
            close(out, together[0][p], 1e-12)


def test_an_empty_lane_sees_nothing_and_gets_zeros() -> None:
    cache = Cache([20])
    cache.write([(0, 0, 20)])
    q = torch.cat([cache.random(3, HEADS, 64), cache.q[0][19:]])
    view = AttentionView(int32([0, 3, 3, 4]), int32([0, 7, 20]), cache.tables[[0, 0, 0]], 3, 20)
    out = tq_attention(cache.layer, cache.layer.keys.rotation.forward(q), view, AttentionParams(cache.scale)).view_as(q)
    assert not out[:3].any()
    close(out[3:], cache.wanted([(0, 19, 20)]))


def test_a_missing_page_is_the_callers_mistake() -> None:
    cache = Cache([170])
    cache.write([(0, 0, 170)])
    block = int(cache.tables[0, 1])  # of positions 16 .. 31
    cache.page_of[block] = -1
    far = [(0, 31 + RECENT, 170)]
    close(cache.attend(far), cache.wanted(far))
    with pytest.raises(AssertionError, match=rf"blocks \[{block}\] are to be read uncoded and have no page"):
        cache.attend([(0, 31 + RECENT - 1, 170)])


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-3), (torch.float16, 4e-3)])
def test_float16_pages_and_narrow_queries_are_near(dtype: torch.dtype, atol: float) -> None:
    cache = Cache([160], dim=128, page_dtype=torch.float16)
    cache.write([(0, 0, 160)])
    close(cache.attend([(0, 100, 160)], dtype).double(), cache.wanted([(0, 100, 160)]), atol)
