"""The CPU's own kernels of a TurboQuant cache: what they write is what VectorFormat encodes, what they read is
attention over decoded keys in float64, and a row has the same bits in any company.

Cache (test_turboquant_store.py) poisons what nobody has written, and takes pages from blocks that no row needs.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from sparkdraft import LLM, SamplingParams
from sparkdraft.kernels import native
from sparkdraft.kernels.ops import AttentionParams, AttentionView
from sparkdraft.kernels.turboquant.layout import PLANES
from sparkdraft.kernels.turboquant.store import CodedLayer, planes
from sparkdraft.kernels.turboquant.vectors import Encoded, VectorFormat
from tests.kernels import test_turboquant_store as store
from tests.kernels.test_turboquant_store import HEADS, KV_HEADS, SIZE, Span, close, int32

pytestmark = pytest.mark.skipif(native.unavailable_reason() is not None, reason="the CPU kernels are not available")


class Cache(store.Cache):
    def __init__(self, lengths: list[int], *args: object, sinks: Tensor | None = None, **options: object) -> None:
        super().__init__(lengths, *args, page_dtype=torch.float32, **options)  # type: ignore[arg-type,misc]
        self.sinks = sinks

    def attend(self, spans: list[Span], dtype: torch.dtype = torch.float64) -> Tensor:
        q = torch.cat([self.q[s][a:b] for s, a, b in spans]).float()
        native.turboquant.write(self.layer, q, *torch.zeros(2, len(q), KV_HEADS, q.shape[2]), int32([-1] * len(q)))
        return native.tq_attention(self.layer, q, self.view(spans), self.params).view_as(q)

    @property
    def params(self) -> AttentionParams:
        return AttentionParams(self.scale, window=self.window, sinks=self.sinks)

    def weights(self, scores: Tensor) -> Tensor:
        if self.sinks is None:
            return scores.softmax(-1)
        sinks = self.sinks.double().view(-1, 1, 1).expand(*scores.shape[:2], 1)
        return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]

    def decoded(self, s: int) -> tuple[Tensor, Tensor]:
        """As the records hold them: a coordinate that lies on a border may have either code."""
        position = torch.arange(len(self.k[s]))
        block, offset = self.tables[s].long()[position // SIZE], position % SIZE
        k, v = (
            form.decode(Encoded(tuple(p[block, :, offset] for p in part.planes), part.scale[block, :, offset]),
                        centre, torch.float64).nan_to_num()
            for form, part, centre in zip((self.layer.keys, self.layer.values), planes(self.layer),
                                          (self.layer.centre, None), strict=True)
        )  # fmt: skip
        return k, v

    def step(self, spans: list[Span]) -> None:
        self.write(spans)
        self.forget_pages(spans)
        close(self.attend(spans).double(), self.wanted(spans), 2e-5)


@pytest.fixture(autouse=True)
def native_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(layer: CodedLayer, k: Tensor, v: Tensor, slots: Tensor) -> None:
        native.turboquant.write(layer, k.new_zeros(len(k), 0, k.shape[2]).float(), k.float(), v.float(), slots)

    monkeypatch.setattr(store, "tq_write", write)


# ---- writing


def by_token(plane: Tensor) -> Tensor:  # [blocks, kv_heads, positions, n] -> [tokens, kv_heads, n]
    return plane.transpose(1, 2).flatten(0, 1)


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256, 512, 576])
def test_what_is_written_is_what_the_format_encodes(dim: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    k, v = torch.randn(2, 40, 3, dim, generator=generator)
    k[7], v[8] = 0, 1e6  # nothing to bring to length 1, and a scale beyond float16's largest
    centre, slots = torch.randn(3, dim, generator=generator), torch.arange(40, dtype=torch.int32)
    centre[1] = 0
    for bits in PLANES:
        keys, values = VectorFormat(dim, bits), VectorFormat(dim, 7 - bits)
        layer = CodedLayer.make(3, 3, SIZE, keys, values, centre)
        native.turboquant.write(layer, torch.zeros(40, 0, dim), k, v, slots)
        wanted = keys.encode(k, centre), values.encode(v)
        for stored, encoded in zip(planes(layer), wanted, strict=True):
            for plane, rows in zip(stored.planes, encoded.planes, strict=True):
                assert (by_token(plane)[:40] == rows).float().mean() > 0.999, "but for coordinates between two levels"
                assert not by_token(plane)[40:].any(), "nobody wrote there"
            torch.testing.assert_close(by_token(stored.scale)[:40], encoded.scale, rtol=1e-2, atol=0)
            assert not by_token(stored.scale)[40:].any()


def test_queries_are_rotated_as_keys_are() -> None:
    q, layer = torch.randn(5, 6, 96), CodedLayer.make(1, 2, SIZE, VectorFormat(96, 4), VectorFormat(96, 3))
    wanted = layer.keys.rotation.forward(q)
    native.turboquant.write(layer, q, *torch.zeros(2, 5, 2, 96), int32([-1] * 5))
    close(q, wanted, 1e-5)
    assert not layer.records.any()


def test_queries_alone_are_rotated_and_what_is_no_number_stays_none() -> None:
    layer = CodedLayer.make(1, 2, SIZE, VectorFormat(64, 4), VectorFormat(64, 3))
    q, none = torch.randn(3, 6, 64), torch.zeros(3, 0, 64)
    native.turboquant.write(layer, q, none, none, int32([0, 1, 2]))
    assert not layer.records.any()
    k = torch.zeros(2, 3, 2, 64)
    k[0, 1, 0, 5] = torch.nan
    native.turboquant.write(layer, q, *k, int32([0, 1, 2]))
    assert planes(layer)[0].scale.isnan().flatten().nonzero().flatten().tolist() == [1]


# ---- reading


@pytest.mark.parametrize("window", [0, 1, 100, 129, 200])
def test_every_context_from_1_to_300(window: int) -> None:
    cache = Cache([300], window=window)
    cache.step([(0, 0, 300)])
    cache.step([(0, 126, 131)])
    cache.step([(0, 299, 300)])


@pytest.mark.parametrize(("first", "recent"), [(0, 0), (4, 0), (0, 128), (4, 1), (20, 50), (4, 1000), (150, 20)])
def test_other_borders_than_the_usual(first: int, recent: int) -> None:
    Cache([340], first=first, recent=recent, centred=False).step([(0, 0, 340)])


def test_a_sink_has_its_part() -> None:
    Cache([200], centred=False, sinks=torch.linspace(-2, 2, HEADS)).step([(0, 0, 200)])


@pytest.mark.parametrize(("dim", "bits"), [*store.CASES, (80, (4, 3)), (576, (4, 3)), (64, (2, 4))])
def test_ragged_batches(dim: int, bits: tuple[int, int]) -> None:
    lengths = [170, 150, 30, 133]
    store.run_ragged(Cache(lengths, dim, bits), lengths, random.Random(dim + sum(bits)))


def test_company_and_threads_change_no_bit() -> None:
    cache = Cache([700, 140, 3])
    whole = [(0, 0, 700), (1, 0, 140), (2, 0, 3)]
    cache.write(whole)
    together = cache.attend(whole).split([700, 140, 3])
    try:
        for threads in (1, 3):
            native.set_threads(threads)
            for p in (0, 3, 4, 126, 127, 128, 129, 139):
                for spans in ([(0, p, p + 1)], [(2, 1, 3), (0, p, p + 1)], [(1, 50, 140), (0, p, p + 8)]):
                    out = cache.attend(spans)[sum(b - a for _, a, b in spans[:-1])]
                    assert torch.equal(out, together[0][p]), (threads, p, spans)
            for a, b in pairwise((130, 131, 147, 300, 301, 640, 700)):
                assert torch.equal(cache.attend([(0, a, b)]), together[0][a:b]), (threads, a, b)
    finally:
        native.set_threads(torch.get_num_threads())


def test_an_empty_lane_gets_zeros() -> None:
    cache = Cache([20])
    cache.write([(0, 0, 20)])
    view = AttentionView(int32([0, 3, 3, 4]), int32([0, 7, 20]), cache.tables[[0, 0, 0]], 3, 20)
    out = native.tq_attention(cache.layer, torch.randn(4, HEADS, 64), view, AttentionParams(cache.scale))
    assert not out[:3].any() and out[3:].any()


# ---- the engine


def test_steps_of_the_embedded_model_are_replayed_and_drafts_change_no_text(smollm2_path: object) -> None:
    """Counts calls: a step that is launched one operator at a time takes several times as long."""
    llm = LLM("smollm2", device="cpu", kv="turboquant", tq_ring_capacity=24, max_seqs=2)
    assert not llm.fallbacks()
    prompt = llm.chat_ids([{"role": "user", "content": "Write a Python function that adds two numbers."}])
    texts, calls = [], list[int]()
    forward = llm.engine.runner._forward
    llm.engine.runner._forward = lambda *args: calls.append(1) or forward(*args)  # type: ignore[method-assign,func-returns-value]
    for params in ({"num_draft": 0}, {"num_draft": 7}, {}):
        both = [
            SamplingParams(max_tokens=60, ignore_eos=True, **params),
            SamplingParams(max_tokens=60, temperature=0.8, seed=3, **params),
        ]
        done = llm.generate([prompt] * 2, both)
        texts.append([each.completions[0].ids for each in done])
        steps = done[0].completions[0].speculation
        assert params != {"num_draft": 7} or (steps and steps["num_accepted_draft_tokens"] > 0)
    assert texts[0] == texts[1] == texts[2] and len(texts[0][0]) == 60
    assert len(calls) < 20, "prompts, and new shapes"
