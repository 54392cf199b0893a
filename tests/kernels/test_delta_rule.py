"""The definition of recurrent layers against transformers, and in other steps against itself."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

from sparkdraft.kernels import native, reference
from sparkdraft.kernels.ops import FOLD, AttentionView, RecurrentState, input_ring, record_ring
from tests.kernels.recurrent_cases import Layer, Part, Shape, random_steps, row_by_row

SMALL = Shape()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def final_state(layer: Layer, memory: RecurrentState, part: Part) -> Tensor:
    """What S is after all of a request's rows: a step of one more row has it in front of it."""
    base, ring = int(memory.base[part.slot, 0]), memory.ring
    state, share = memory.state[part.slot].clone(), layer.shape.value_heads // layer.shape.key_heads
    for position in range(base, part.first + len(part)):
        key = memory.keys[part.slot, position % ring].repeat_interleave(share, 0)
        state *= memory.decays[part.slot, position % ring].view(-1, 1, 1)
        state += key.unsqueeze(2) * memory.updates[part.slot, position % ring].unsqueeze(1)
    return state


# ---- against transformers


def test_the_rule_is_transformers() -> None:
    theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    shape = Shape(key_heads=2, value_heads=6, key_dim=32, value_dim=16, most_rows=4)
    layer, count = Layer(shape, 1), 50
    part, memory = layer.rows(0, count), layer.memory()
    conv, o = (torch.cat(each) for each in zip(*[layer.step(reference, memory, [part.cut(i, i + 2)])[0]
                                               for i in range(0, count, 2)], strict=True))  # fmt: skip
    x = torch.nn.functional.pad(part.x.t(), (shape.width - 1, 0)).unsqueeze(0)
    expected = torch.nn.functional.conv1d(x, layer.weight.unsqueeze(1), groups=shape.channels)[0].t()
    torch.testing.assert_close(conv, torch.nn.functional.silu(expected), rtol=1e-5, atol=1e-5)
    wide = shape.key_heads * shape.key_dim
    q, k, v = conv.split([wide, wide, shape.value_heads * shape.value_dim], -1)
    q, k = (t.view(1, count, shape.key_heads, -1).repeat_interleave(3, 2) for t in (q, k))
    a, b = part.ab.split(shape.value_heads, -1)
    g = layer.params.rate * torch.nn.functional.softplus(a + layer.params.bias)
    expected, state = theirs.torch_recurrent_gated_delta_rule(
        *(q, k, v.view(1, count, shape.value_heads, -1), g.unsqueeze(0), b.sigmoid().unsqueeze(0)),
        initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    torch.testing.assert_close(o, expected[0].flatten(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(final_state(layer, memory, part), state[0], rtol=1e-5, atol=1e-5)


def test_the_gated_norm_is_transformers() -> None:
    theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    norm, o, gate = theirs.Qwen3NextRMSNormGated(16, eps=1e-5), torch.randn(5, 48), torch.randn(5, 48) * 3
    norm.weight.data.uniform_(0.5, 2.0)
    expected = norm(o.view(-1, 16), gate.view(-1, 16)).view(5, 48)
    torch.testing.assert_close(reference.gated_norm(o, gate, norm.weight, 1e-5), expected, rtol=1e-6, atol=1e-6)


# ---- any cutting into steps


def test_any_cutting_gives_the_same_bits() -> None:
    """Steps of few rows with rejected ones behind them, long steps in between, alone and with others beside."""
    layer = Layer(SMALL, 3)
    part, other = layer.rows(1, 90), layer.rows(2, 90)
    expected, beside = row_by_row(layer, reference, part), row_by_row(layer, reference, other)
    for seed in range(4):
        memory = layer.memory()
        for done, kept, rejected in random_steps(len(part), SMALL.most_rows, seed):
            run = part.cut(done, done + kept).followed_by(layer.rows(1, rejected))
            results = layer.step(reference, memory, [run, other.cut(done, done + kept)])
            for got, wanted in ((results[0], expected), (results[1], beside)):
                for each, whole in zip(got, wanted, strict=True):
                    assert torch.equal(each[:kept], whole[done : done + kept]), (seed, done, kept, rejected)


def test_a_slot_holds_what_a_former_request_left() -> None:
    layer = Layer(SMALL, 1)
    first, second = layer.rows(0, 40), layer.rows(0, 23)
    memory = layer.memory()
    assert memory.state.isnan().all()
    layer.step(reference, memory, [first])
    for i in range(0, 23, 3):
        got = layer.step(reference, memory, [second.cut(i, i + 3)])[0][1]
        assert torch.equal(got, row_by_row(layer, reference, second)[1][i : i + 3])


def test_where_the_state_is_left() -> None:
    """At the last multiple of FOLD that is not past the first row, or where it was; after a long step at its end."""
    layer = Layer(SMALL, 1)
    part, memory, bases = layer.rows(0, 200), layer.memory(), []
    steps = [(0, 3), (3, 6), (9, 6), (15, 6), (16, 1), (17, 6), (23, 20), (43, 2), (45, 5), (48, 4), (52, 6), (58, 6),
             (64, 1), (65, 1)]  # fmt: skip
    for first, count in steps:
        layer.step(reference, memory, [part.cut(first, first + count)])
        assert memory.base.unique().numel() == 1
        bases.append(int(memory.base[0, 0]))
    assert bases == [0, 0, 0, 0, 16, 16, 43, 43, 43, 48, 48, 48, 64, 64] and FOLD == 16
    assert record_ring(6) == 27 and input_ring(6, 4) == 24


def test_a_state_that_is_not_there_is_refused() -> None:
    layer = Layer(SMALL, 1)
    part, memory = layer.rows(0, 20), layer.memory()
    layer.step(reference, memory, [part])
    with pytest.raises(AssertionError, match="slot 0: state at 20, rows from 19"):
        layer.step(reference, memory, [part.cut(19, 20)])


def test_empty_and_unowned_sequences_are_left_alone() -> None:
    layer = Layer(SMALL, 2)
    part, memory = layer.rows(0, 5), layer.memory()
    nobody = Part(-1, 0, *(t[:3] * float("nan") for t in (part.x, part.ab)))
    results = layer.step(reference, memory, [part.cut(0, 0), nobody, part, nobody], padding=2)
    assert torch.equal(results[2][1], row_by_row(layer, reference, part)[1])
    assert not results[1][0].any() and not results[3][1].any(), "rows of nobody are zeros"
    assert memory.state[1].isnan().all() and memory.inputs[1].isnan().all()


# ---- the three modules


@pytest.mark.parametrize("name", ["find_states", "causal_conv", "delta_rule", "gated_norm"])
def test_one_signature(name: str) -> None:
    cuda = pytest.importorskip("sparkdraft.kernels.cuda", reason="triton is not installed", exc_type=ImportError)
    assert len({str(inspect.signature(getattr(ops, name))) for ops in (reference, native, cuda)}) == 1


# ---- slots


def test_find_states() -> None:
    slot_of = torch.tensor([-1, 7, 3, -1, 5], dtype=torch.int32)
    tables = torch.tensor([[1, 2, 0], [4, 1, 2], [2, 0, 0], [0, 0, 0], [3, 3, 3]], dtype=torch.int32)
    starts = torch.tensor([0, 1, 5, 5, 8, 9], dtype=torch.int32)
    contexts = torch.tensor([17, 20, 3, 0, 4], dtype=torch.int32)  # the fourth lane is empty, and has rows
    out = torch.full((5,), 99, dtype=torch.int32)
    reference.find_states(slot_of, AttentionView(starts, contexts, tables, 4, 20), 16, out)
    assert out.tolist() == [3, 7, -1, -1, -1]
