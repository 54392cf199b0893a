"""Recurrent layers in C++ against their definition, and against themselves: same bits in any cutting into steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparkdraft.kernels import native, reference
from sparkdraft.kernels.ops import AttentionView
from tests.kernels.recurrent_cases import Layer, Part, Shape, random_steps, row_by_row, view_of

pytestmark = pytest.mark.skipif(native.unavailable_reason() is not None, reason=str(native.unavailable_reason()))

SMALL = Shape()
SHAPES = [SMALL, Shape(1, 3, 20, 40, 2), Shape(1, 2, 128, 128), Shape(2, 2, 256, 72, 8)]  # 40, 72: strips and a rest


@pytest.fixture(autouse=True)
def two_threads() -> None:
    native.set_threads(2)


def assert_like(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_steps_are_the_definitions(shape: Shape) -> None:
    layer = Layer(shape, 2)
    part, other, memories = layer.rows(1, 60), layer.rows(0, 60), (layer.memory(), layer.memory())
    for done, kept, rejected in random_steps(60, shape.most_rows, 1):
        run = [part.cut(done, done + kept).followed_by(layer.rows(1, rejected)), other.cut(done, done + kept)]
        results = [layer.step(ops, memory, run) for ops, memory in zip((native, reference), memories, strict=True)]
        for ours, theirs in zip(*results, strict=True):
            assert_like(ours, theirs)
    ours, theirs = memories
    assert torch.equal(ours.base, theirs.base) and torch.equal(ours.inputs.nan_to_num(), theirs.inputs.nan_to_num())
    for name in ("state", "keys", "updates", "decays"):
        a, b = getattr(ours, name), getattr(theirs, name)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_bits_in_every_cutting_company_and_thread_count(shape: Shape) -> None:
    layer = Layer(shape, 3)
    part, other = layer.rows(2, 50), layer.rows(0, 50)
    expected = row_by_row(layer, native, part)
    for seed in range(3):
        native.set_threads(seed + 1)
        memory = layer.memory()
        for done, kept, rejected in random_steps(50, shape.most_rows, seed):
            run = [part.cut(done, done + kept).followed_by(layer.rows(2, rejected))]
            got = layer.step(native, memory, [other.cut(done, done + kept), *run] if seed else run)[-1]
            for each, whole in zip(got, expected, strict=True):
                assert torch.equal(each[:kept], whole[done : done + kept]), (seed, done, kept, rejected)


def test_rows_of_nobody() -> None:
    layer = Layer(SMALL, 2)
    part, memory = layer.rows(0, 5), layer.memory()
    nobody = Part(-1, 0, *(t[:3] * float("nan") for t in (part.x, part.ab)))
    results = layer.step(native, memory, [part.cut(0, 0), nobody, part, nobody], padding=2)
    assert torch.equal(results[2][1], row_by_row(layer, native, part)[1])
    assert not results[1][0].any() and not results[3][1].any(), "they are zeros"
    assert memory.state[1].isnan().all() and memory.inputs[1].isnan().all() and (memory.base[1] == 12345).all()


def test_gated_norm_of_strided_rows() -> None:
    o, gate, gain = torch.randn(5, 104)[:, :96], torch.randn(5, 200)[:, 100:196] * 4, torch.rand(24) + 0.5
    gate[0, 0], gate[0, 1] = -200.0, 200.0
    expected = reference.gated_norm(o, gate, gain, 1e-5)
    torch.testing.assert_close(native.gated_norm(o, gate, gain, 1e-5), expected, rtol=1e-5, atol=1e-6)


def test_find_states() -> None:
    slot_of = torch.tensor([-1, 7, 3, -1, 5], dtype=torch.int32)
    tables = torch.tensor([[1, 2, 0], [4, 1, 2], [2, 0, 0], [0, 0, 0], [3, 3, 3], [-1, 0, 0]], dtype=torch.int32)
    starts = torch.tensor([0, 1, 5, 5, 8, 9, 10], dtype=torch.int32)
    contexts = torch.tensor([17, 20, 3, 0, 4, 1], dtype=torch.int32)
    view = AttentionView(starts, contexts, tables, 4, 20)
    outs = [torch.full((6,), 99, dtype=torch.int32) for _ in range(2)]
    for ops, out in zip((native, reference), outs, strict=True):
        ops.find_states(slot_of, view, 16, out)
    assert outs[0].tolist() == outs[1].tolist() == [3, 7, -1, -1, -1, -1]


def test_a_recorded_layer_gives_the_bits_of_its_run() -> None:
    """Recorded at one place of a text and replayed at the next: lengths and slots are read where they lie."""
    layer = Layer(SMALL, 2)
    part, memory, again = layer.rows(1, 40), layer.memory(), layer.memory()
    gain, gate = torch.rand(SMALL.value_dim) + 0.5, torch.randn(4, SMALL.value_heads * SMALL.value_dim)
    x, ab = part.x[:4].clone(), part.ab[:4].clone()
    view, slots = view_of([part.cut(0, 4)])
    table, slot_of = torch.zeros(1, 3, dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    view = AttentionView(view.query_start, view.context_len, table, 4, 40)

    def run() -> Tensor:
        native.find_states(slot_of, view, 16, slots)
        conv = native.causal_conv(x, layer.weight, memory, slots, view)
        return native.gated_norm(native.delta_rule(conv, ab, memory, slots, view, layer.params), gate, gain, 1e-6)

    recording = native.Graph(run)
    assert recording.kernels == ["find_states", "causal_conv", "delta_rule", "gated_norm"]
    for first in range(0, 40, 4):
        got = recording.replay()
        o = layer.step(native, again, [part.cut(first, first + 4)])[0][1]
        assert torch.equal(got, native.gated_norm(o, gate, gain, 1e-6)), first
        x.copy_(part.x[first + 4 : first + 8] if first < 36 else x)
        ab.copy_(part.ab[first + 4 : first + 8] if first < 36 else ab)
        view.context_len.add_(4)
