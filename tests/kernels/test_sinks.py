"""Attention sinks: one logit per head that every row sees beside its keys, and that has no value.

The C++ kernels, and codes in plain torch; what a sink is, is checked here by a loop. A GPU's are in
test_cuda_sinks.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sparkdraft.cache.formats.turboquant import TurboQuantKV
from sparkdraft.kernels import native, reference
from sparkdraft.kernels.ops import AttentionParams, AttentionView, Ops
from sparkdraft.models.common.layers import AttentionSpec, RopeSpec
from tests.kernels.test_native import batch, one_row
from tests.kernels.test_turboquant_store import HEADS as CODED_HEADS
from tests.kernels.test_turboquant_store import Cache, close

needs_compiler = pytest.mark.skipif(native.unavailable_reason() is not None, reason=str(native.unavailable_reason()))
MODULES = [reference, pytest.param(native, marks=needs_compiler)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    if native.unavailable_reason() is None:
        native.set_threads(2)


def by_loop(q: Tensor, k: Tensor, v: Tensor, view: AttentionView, params: AttentionParams) -> Tensor:
    """A row and a head at a time, in float64, from what a sink is: exp(sink) more in the denominator."""
    out, group, size = torch.zeros(q.shape, dtype=torch.float64), q.shape[1] // k.shape[1], k.shape[2]
    starts, contexts = view.query_start.tolist(), view.context_len.tolist()
    for s, context in enumerate(contexts):
        for row in range(starts[s], starts[s + 1]):
            position = context - starts[s + 1] + row
            first = max(position - params.window + 1, 0) if params.window else 0
            for head in range(q.shape[1]):
                total, mixed = math.exp(float(params.sinks[head])), torch.zeros(q.shape[2], dtype=torch.float64)
                for key in range(first, position + 1):
                    at = int(view.block_tables[s, key // size]), head // group, key % size
                    weight = math.exp(float(q[row, head].double() @ k[at].double()) * params.scale)
                    total, mixed = total + weight, mixed + weight * v[at].double()
                out[row, head] = mixed / total
    return out.flatten(1)


@pytest.mark.parametrize("ops", MODULES, ids=lambda ops: ops.NAME)
@pytest.mark.parametrize("window", [0, 5, 100])  # 100: no context is as long
def test_a_sink_adds_to_the_denominator_alone(ops: Ops, window: int) -> None:
    q, k, v, view = batch(4, 2, 8, [1, 3, 9], [30, 3, 20])
    sinks = torch.tensor([-3.0, 0.0, 2.5, 6.0])
    params = AttentionParams(0.3, window=window, sinks=sinks)
    got = ops.paged_attention(q, k, v, view, params).double()
    torch.testing.assert_close(got, by_loop(q, k, v, view, params), rtol=1e-5, atol=1e-6)


# ---- C++ ------------------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(
    ("heads", "kv", "dim"), [(8, 1, 64), (9, 3, 64), (4, 4, 128), (12, 2, 256), (16, 1, 256), (8, 1, 512), (4, 2, 512)]
)
@pytest.mark.parametrize(
    ("causal", "window"), [(True, 0), (False, 0), (True, 37), (False, 50), (True, 1), (True, 4000)]
)
def test_native_attention_with_sinks_is_the_reference(heads: int, kv: int, dim: int, causal: bool, window: int) -> None:
    q, k, v, view = batch(heads, kv, dim, [1, 0, 5, 70, 17], [130, 9, 5, 70, 1100])
    params = AttentionParams(dim**-0.5, causal, window, torch.randn(heads) * 3)
    y, expected = (ops.paged_attention(q, k, v, view, params) for ops in (native, reference))
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=3e-6)
    without = native.paged_attention(q, k, v, view, replace(params, sinks=None))
    assert not torch.allclose(y, without, atol=1e-2)


@needs_compiler
@pytest.mark.parametrize("sink", [-200.0, 200.0])
def test_sinks_far_from_the_scores(sink: float) -> None:
    """One that weighs nothing leaves every bit as it is; one that outweighs all keys leaves zeros."""
    q, k, v, view = batch(4, 2, 64, [1, 40], [300, 40])
    plain = native.paged_attention(q, k, v, view, AttentionParams(0.125))
    sunk = native.paged_attention(q, k, v, view, AttentionParams(0.125, sinks=torch.full((4,), sink)))
    assert torch.equal(sunk, plain if sink < 0 else torch.zeros_like(plain))


@needs_compiler
@pytest.mark.parametrize("window", [0, 700])
def test_a_row_with_sinks_has_the_same_bits_in_a_chunk_and_alone(window: int) -> None:
    """However the work is shared out: a span by itself, whole units, slices of queries."""
    q, k, v, view = batch(8, 1, 64, [3, 300], [40, 2400])
    params = AttentionParams(0.125, window=window, sinks=torch.randn(8))
    whole = native.paged_attention(q, k, v, view, params)
    for threads in (1, 2, 3):
        native.set_threads(threads)
        assert torch.equal(native.paged_attention(q, k, v, view, params), whole)
        for row in (3, 66, 150, 302):
            alone = native.paged_attention(q[row : row + 1], k, v, one_row(view, row), params)
            assert torch.equal(alone[0], whole[row]), (threads, row)


@pytest.mark.parametrize("ops", MODULES, ids=lambda ops: ops.NAME)
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("keys", [20, 3000])  # few and many: one after the other, and shared out
def test_padding_without_keys_is_zeros(ops: Ops, sunk: bool, keys: int) -> None:
    q, k, v, view = batch(4, 2, 64, [2, 3, 1], [keys, 0, 9])
    params = AttentionParams(0.125, sinks=torch.randn(4) if sunk else None)
    out = ops.paged_attention(q, k, v, view, params)
    assert out[:2].isfinite().all() and out[:2].any() and not out[2:5].any() and out[5:].isfinite().all()


@needs_compiler
def test_attention_with_sinks_can_be_recorded() -> None:
    q, k, v, view = batch(4, 2, 64, [2], [200])
    params = AttentionParams(0.125, window=50, sinks=torch.randn(4))
    q = q.clone()
    recording = native.Graph(lambda: native.paged_attention(q, k, v, view, params))
    assert recording.kernels == ["paged_attention"]
    q.copy_(torch.randn(q.shape))
    assert torch.equal(recording.replay(), native.paged_attention(q, k, v, view, params))


# ---- codes, in plain torch ------------------------------------------------------------------------------------------


class SunkCache(Cache):
    """The same sequences and codes, seen by a layer with sinks."""

    sinks = torch.tensor([-2.0, 0.5, 1.0, 4.0])

    @property
    def params(self) -> AttentionParams:
        return AttentionParams(self.scale, window=self.window, sinks=self.sinks)

    def weights(self, scores: Tensor) -> Tensor:  # [heads, rows, keys]
        assert len(scores) == CODED_HEADS
        sink = self.sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]


@pytest.mark.parametrize("window", [0, 1, 128, 200])
@pytest.mark.parametrize(("first", "recent"), [(4, 128), (0, 0), (4, 16)])
def test_coded_keys_with_sinks(first: int, recent: int, window: int) -> None:
    cache = SunkCache([300, 20], first=first, recent=recent, window=window, centred=False)
    cache.step([(0, 0, 300), (1, 0, 20)])
    cache.step([(0, 126, 131), (1, 19, 20)])
    whole = cache.attend([(0, 290, 300)])
    close(cache.attend([(1, 3, 9), (0, 295, 296)])[6:], whole[5:6], 1e-12)


def test_a_layer_with_sinks_is_not_centred() -> None:
    """A centre shifts the scores of all keys alike, which a softmax does not see; a sink would not shift with them."""
    plain = AttentionSpec(CODED_HEADS, 1, 64, RopeSpec(64), 0.125)
    centres = [torch.ones(1, 64), torch.ones(1, 64)]
    kv = TurboQuantKV(
        [4, 4], 3, [plain, replace(plain, sinks=True)], 4, 16, (0, 0, 0), centres, torch.device("cpu"), reference
    )
    assert [layer.store.centre is None for layer in kv.layers] == [False, True]
    view = AttentionView(*(torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [1], [[0]])), 1, 1)
    with pytest.raises(AssertionError, match="a centre shifts all scores"):
        sunk = AttentionParams(0.125, sinks=torch.zeros(CODED_HEADS))
        kv.layers[0].attend(torch.zeros(1, CODED_HEADS, 64), view, sunk)
