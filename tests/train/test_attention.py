"""Block attention on a CPU: against float64 loops that know nothing of masks, its gradient against differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sparkdraft.train.model import block_attention

DOCUMENTS = [7, 1, 12]  # tokens of each
ANCHORS = [0, 3, 6, 7, 8, 13, 13, 19]  # the first and the last token of documents among them; one twice
STARTS = [0, 0, 0, 7, 8, 8, 8, 8]


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make(
    blocks: int, width: int, heads: int, kv_heads: int, dim: int, tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(blocks + width)

    def tensor(rows: int, count: int) -> Tensor:
        return torch.randn(rows, count, dim, dtype=torch.float64, requires_grad=True)

    q, block_k, block_v = (tensor(blocks * width, n) for n in (heads, kv_heads, kv_heads))
    return q, block_k, block_v, tensor(tokens, kv_heads), tensor(tokens, kv_heads)


def loop(
    q: Tensor, block_k: Tensor, block_v: Tensor, context_k: Tensor, context_v: Tensor,
    starts: list[int], anchors: list[int], width: int, scale: float,
) -> Tensor:  # fmt: skip
    """One row and one head at a time, over lists of the keys it sees."""
    out = torch.zeros(q.shape, dtype=q.dtype)
    for row in range(q.shape[0]):
        j = row // width
        for head in range(q.shape[1]):
            kv = head // (q.shape[1] // block_k.shape[1])
            pairs = [(context_k[t, kv], context_v[t, kv]) for t in range(starts[j], anchors[j])]
            pairs += [(block_k[j * width + i, kv], block_v[j * width + i, kv]) for i in range(width)]
            powers = [math.exp(float(q[row, head] @ k) * scale) for k, _ in pairs]
            for power, (_, v) in zip(powers, pairs, strict=True):
                out[row, head] += power / sum(powers) * v
    return out


@pytest.mark.parametrize("width, heads, kv_heads", [(4, 4, 2), (2, 3, 1), (3, 2, 2)])
def test_values(width: int, heads: int, kv_heads: int) -> None:
    inputs = [t.detach() for t in make(len(ANCHORS), width, heads, kv_heads, 5, sum(DOCUMENTS))]
    got = block_attention(*inputs, int32(STARTS), int32(ANCHORS), width, 0.7)
    expected = loop(*inputs, STARTS, ANCHORS, width, 0.7)
    torch.testing.assert_close(got, expected)


def test_gradients() -> None:
    starts, anchors = int32([0, 0, 4]), int32([0, 3, 6])
    inputs = make(3, 2, 4, 2, 3, 7)
    assert torch.autograd.gradcheck(lambda *x: block_attention(*x, starts, anchors, 2, 0.5), inputs)


def test_a_block_sees_its_context_and_itself_alone() -> None:
    inputs = make(len(ANCHORS), 3, 2, 1, 4, sum(DOCUMENTS))
    for j, (start, anchor) in enumerate(zip(STARTS, ANCHORS, strict=True)):
        out = block_attention(*inputs, int32(STARTS), int32(ANCHORS), 3, 0.5)
        grads = torch.autograd.grad(out[3 * j : 3 * j + 3].square().sum(), inputs)
        touched = [set(g.abs().sum((1, 2)).nonzero().flatten().tolist()) for g in grads]
        assert touched[0] == touched[1] == touched[2] == {3 * j, 3 * j + 1, 3 * j + 2}
        assert touched[3] == touched[4] == set(range(start, anchor))


def test_no_blocks_and_no_context() -> None:
    inputs = make(0, 4, 2, 1, 4, 5)
    assert block_attention(*inputs, int32([]), int32([]), 4, 0.5).shape == (0, 2, 4)
    q, block_k, block_v, *context = make(2, 4, 2, 1, 4, 0)
    out = block_attention(q, block_k, block_v, *context, int32([0, 0]), int32([0, 0]), 4, 0.5)
    expected = loop(*(t.detach() for t in (q, block_k, block_v, *context)), [0, 0], [0, 0], 4, 0.5)
    torch.testing.assert_close(out, expected)


def test_float32_views() -> None:
    """Slices of one fused matrix, as a model hands them in."""
    fused = torch.randn(8, 6, 4)
    q, block_k, block_v = fused.split((4, 1, 1), dim=1)
    context_k, context_v = torch.randn(9, 2, 4).split(1, dim=1)
    inputs = (q, block_k, block_v, context_k, context_v)
    got = block_attention(*inputs, int32([0, 4]), int32([2, 9]), 4, 0.5)
    assert got.dtype == torch.float32
    expected = loop(*(t.double() for t in inputs), [0, 4], [2, 9], 4, 0.5)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
