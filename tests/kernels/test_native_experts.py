"""Experts in C++ against the reference's maths, and against themselves: same bits in every company and thread count.

Packed experts round each row to int8, so they are held to the reference's `norm_experts` over matrices that do the same
(`group_linear`); float experts to the reference's over floats.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparkdraft.kernels import native, reference
from sparkdraft.kernels.ops import GELU_TANH, SILU, Activation, Norm, Normed, Routing
from sparkdraft.weights.linear import CannotKeep, DenseExperts, DenseLinear, ExpertLinear, Linear
from sparkdraft.weights.quant.stored import GroupQuant, as_float
from tests.kernels.integers import group_linear
from tests.kernels.test_native import random_quant

pytestmark = pytest.mark.skipif(native.unavailable_reason() is not None, reason=str(native.unavailable_reason()))

CLAMPED = Activation("clamped_swiglu", 2.0)
ACTIVATIONS = (SILU, GELU_TANH, CLAMPED)
COUNT, TOP, HIDDEN, INTER = 7, 3, 96, 64


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    native.set_threads(2)


class GroupLinear(Linear):
    """The reference's integer matmul, of several parts and a bias."""

    def __init__(self, parts: list[GroupQuant], bias: Tensor | None) -> None:
        self.parts, self.bias = parts, bias

    def linear(self, x: Tensor) -> Tensor:
        y = torch.cat([group_linear(x, p.q, p.scale, p.offset) for p in self.parts], 1)
        return y if self.bias is None else y + self.bias


class GroupExperts(ExpertLinear):
    def __init__(self, experts: list[list[GroupQuant]], bias: Tensor | None) -> None:
        self.experts, self.bias = experts, bias

    def expert(self, number: int) -> Linear:
        return GroupLinear(self.experts[number], None if self.bias is None else self.bias[number])


def quantised(
    bits: int, biased: bool, count: int = COUNT, hidden: int = HIDDEN, inter: int = INTER
) -> tuple[list[ExpertLinear], list[ExpertLinear]]:
    """gate_up and down, kept by the C++ kernels, and as the reference reads them."""
    ours, theirs = list[ExpertLinear](), list[ExpertLinear]()
    for shapes in ([(inter, hidden), (inter, hidden)], [(hidden, inter)]):
        experts = [[random_quant(*shape, bits) for shape in shapes] for _ in range(count)]
        bias = torch.randn(count, sum(out for out, _ in shapes)) * 0.1 if biased else None
        ours.append(native.keep_experts(experts, bias, as_float))
        theirs.append(GroupExperts(experts, bias))
    return ours, theirs


def rows(count: int, hidden: int = HIDDEN) -> Normed:
    return Normed(torch.randn(count, hidden), Norm(torch.rand(hidden) + 0.5, 1e-6))


def random_routing(count: int, experts: int = COUNT, top: int = TOP) -> Routing:
    ids = torch.stack([torch.randperm(experts)[:top] for _ in range(count)]).int()
    return Routing(ids, torch.rand(count, top))


# ---- results


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.kind)
@pytest.mark.parametrize(("bits", "biased"), [(4, False), (8, True), (4, True)])
def test_packed_experts_are_the_reference_over_group_linear(activation: Activation, bits: int, biased: bool) -> None:
    ours, theirs = quantised(bits, biased)
    for count in (1, 2, 5, 70):
        normed, routing = rows(count), random_routing(count)
        found = native.norm_experts(normed, routing, ours[0], ours[1], activation)
        expected = reference.norm_experts(normed, routing, theirs[0], theirs[1], activation)
        # A value in the middle that rounds to the other int8 moves a result by one step, and few do.
        assert (found - expected).abs().max() < 0.02 * expected.abs().max()
        assert (found - expected).abs().mean() < 1e-4 * expected.abs().mean()


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.kind)
def test_float_experts_are_the_references(activation: Activation) -> None:
    hidden, inter = 50, 37
    weights = [torch.randn(COUNT, 2 * inter, hidden) * 0.2, torch.randn(COUNT, hidden, inter) * 0.2]
    biases = [torch.randn(COUNT, w.shape[1]) for w in weights]
    ours = [native.keep_float_experts([[e] for e in w], b, as_float) for w, b in zip(weights, biases, strict=True)]
    theirs = [DenseExperts(w, b) for w, b in zip(weights, biases, strict=True)]
    normed, routing = rows(33, hidden), random_routing(33)
    found = native.norm_experts(normed, routing, ours[0], ours[1], activation)
    expected = reference.norm_experts(normed, routing, theirs[0], theirs[1], activation)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    with pytest.raises(CannotKeep, match=f"width {hidden} is no multiple of 32"):
        native.keep_experts([[e] for e in weights[0]], None, as_float)


def test_parts_of_one_expert_that_differ_in_bits_are_rounded_to_eight() -> None:
    parts = [random_quant(8, 64, 4), random_quant(4, 64, 8)]
    kept = native.keep_experts([parts], None, as_float)
    x = torch.randn(5, 64)
    expected = x @ torch.cat([p.dequantize() for p in parts]).t()
    torch.testing.assert_close(kept.expert(0).linear(x), expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


def test_floats_may_lie_the_other_way_round() -> None:
    turned = torch.randn(COUNT, 64, 40)
    kept = native.keep_experts([[each.t()] for each in turned], None, as_float)
    x = torch.randn(5, 64)
    plain = native.keep_experts([[each.t().contiguous()] for each in turned], None, as_float)
    assert torch.equal(kept.expert(2).linear(x), plain.expert(2).linear(x))


def test_bytes_are_those_of_all_experts_and_their_biases() -> None:
    (gate_up, _), _ = quantised(8, True)
    assert gate_up.count == COUNT and gate_up.nbytes == COUNT * (2 * INTER * HIDDEN // 32 * 34 + 4 * 2 * INTER)


def test_add_experts_adds_the_same_in_place() -> None:
    ours, _ = quantised(8, False)
    normed, routing, then = rows(9), random_routing(9), Norm(torch.ones(HIDDEN), 1e-5)
    before, added = normed.x.clone(), native.norm_experts(normed, routing, *ours, SILU)
    after = native.add_experts(normed, routing, *ours, SILU, then)
    assert after.x is normed.x and after.norm is then and torch.equal(after.x, before + added)


def test_a_row_may_choose_one_expert_twice() -> None:
    ours, theirs = quantised(8, False)
    normed, ids = rows(2), torch.tensor([[3, 3], [3, 0]], dtype=torch.int32)
    routing = Routing(ids, torch.tensor([[0.25, 0.5], [1.0, 2.0]]))
    found = native.norm_experts(normed, routing, *ours, SILU)
    expected = reference.norm_experts(normed, routing, *theirs, SILU)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# ---- bits


def test_a_row_sums_its_experts_in_the_order_of_its_choice() -> None:
    """Weights are powers of 2, so that products are exact and the order of the sums is all that is left."""
    ours, _ = quantised(8, True)
    normed, (ids, _) = rows(20), random_routing(20)
    weights = 2.0 ** torch.randint(-3, 3, (20, TOP))
    ones, total = torch.ones(20, 1), torch.zeros(20, HIDDEN)
    for rank in range(TOP):
        part = native.norm_experts(normed, Routing(ids[:, rank : rank + 1].contiguous(), ones), *ours, SILU)
        total += weights[:, rank : rank + 1] * part
    assert torch.equal(native.norm_experts(normed, Routing(ids, weights), *ours, SILU), total)


@pytest.mark.parametrize("form", ["4 bits", "8 bits", "floats"])
def test_a_row_has_the_same_bits_in_every_company_and_thread_count(form: str) -> None:
    """Large enough that threads share the work; more rows than are gathered at once."""
    count, hidden, inter = 9, 160, 96
    if form == "floats":
        weights = [torch.randn(count, 2 * inter, hidden), torch.randn(count, hidden, inter)]
        ours = [native.keep_float_experts([[e] for e in w], None, as_float) for w in weights]
    else:
        ours, _ = quantised(int(form[0]), True, count, hidden, inter)
    normed, routing = rows(600, hidden), random_routing(600, count)
    normed.x[::3, 5] = 90.0  # an outlier
    whole = native.norm_experts(normed, routing, *ours, GELU_TANH)
    for threads in (1, 2, 3, 8):
        native.set_threads(threads)
        for first, last in ((0, 1), (0, 2), (7, 16), (500, 600), (599, 600), (0, 600)):
            some = Routing(routing.ids[first:last], routing.weights[first:last])
            alone = native.norm_experts(Normed(normed.x[first:last], normed.norm), some, *ours, GELU_TANH)
            assert torch.equal(alone, whole[first:last]), (threads, first, last)


@pytest.mark.parametrize(("out", "width"), [(128, 256), (37, 41), (3, 7), (64, 8)])
def test_a_float_matrix(out: int, width: int) -> None:
    weight, bias, x = torch.randn(out, width), torch.randn(out), torch.randn(300, width + 3)[:, :width]
    matrix = native.FloatLinear(weight, bias)
    whole = matrix.linear(x)
    torch.testing.assert_close(whole, DenseLinear(weight, bias).linear(x), rtol=2e-5, atol=2e-5)
    for threads in (1, 2, 3):
        native.set_threads(threads)
        for count in (1, 2, 3, 8, 299):
            assert torch.equal(matrix.linear(x[300 - count :]), whole[300 - count :]), (threads, count)


# ---- routing


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize(("experts", "top"), [(4, 2), (32, 4), (128, 8), (7, 7), (512, 10), (5, 1)])
def test_routes_are_the_references(experts: int, top: int, scaled: bool, renormalise: bool) -> None:
    normed, weight, bias = rows(40), torch.randn(experts, HIDDEN) * 0.1, torch.randn(experts) * 0.1
    scale = torch.rand(experts) + 0.5 if scaled else None
    found = native.norm_route(normed, native.FloatLinear(weight, bias), top, renormalise, scale)
    expected = reference.norm_route(normed, DenseLinear(weight, bias), top, renormalise, scale)
    assert found.ids.dtype == torch.int32 and torch.equal(found.ids, expected.ids)
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-5, atol=1e-7)
    one = native.norm_route(Normed(normed.x[5:6], normed.norm), native.FloatLinear(weight, bias), top, renormalise)
    alone = native.norm_route(normed, native.FloatLinear(weight, bias), top, renormalise)
    assert torch.equal(one.ids[0], alone.ids[5]) and torch.equal(one.weights[0], alone.weights[5])


def test_of_equal_experts_the_lower_number_comes_first() -> None:
    """Rows of 8 logits that the router hands through: ties at the top, at the border, and everywhere."""
    logits = torch.tensor([[1, 5, 2, 5, 5, 0, 2, 2], [3] * 8, [-9, 0, 0, 1, 0, 1, 1, -9], [0, 0, 0, 0, 0, 0, 0, 7]])
    for top, expected in (
        (2, [[1, 3], [0, 1], [3, 5], [7, 0]]),
        (5, [[1, 3, 4, 2, 6], [0, 1, 2, 3, 4], [3, 5, 6, 1, 2], [7, 0, 1, 2, 3]]),
    ):
        ids, weights = native.choose_experts(logits.float(), top, True, None)
        assert ids.tolist() == expected
        assert torch.equal(ids, logits.sort(dim=-1, descending=True, stable=True).indices[:, :top].int())
        torch.testing.assert_close(weights.sum(-1), torch.ones(4))


def test_logits_that_are_no_numbers_choose_experts_that_exist() -> None:
    logits = torch.full((3, 6), float("nan"))
    logits[1, 2:4], logits[2] = 1.0, float("-inf")
    ids, _ = native.choose_experts(logits, 3, True, None)
    assert ids.tolist() == [[0, 1, 2], [0, 1, 4], [0, 1, 2]]


@pytest.mark.parametrize("live", [0, 1, 4, 6])
def test_dead_rows_reach_no_expert(live: int) -> None:
    ours, _ = quantised(8, True)
    weight, bias, normed = torch.randn(COUNT, HIDDEN), torch.randn(COUNT), rows(6)
    number, then = torch.tensor([live], dtype=torch.int32), Norm(torch.ones(HIDDEN), 1e-5)
    routing = native.norm_route(normed, native.FloatLinear(weight, bias), TOP, True, None, number)
    expected = reference.norm_route(normed, DenseLinear(weight, bias), TOP, True, None, number)
    assert torch.equal(routing.ids, expected.ids) and (routing.ids[live:] == -1).all()
    some = Routing(routing.ids[:live].contiguous(), routing.weights[:live].contiguous())
    made = native.norm_experts(normed, routing, *ours, CLAMPED)
    assert not made[live:].any(), "nothing is added up"
    if live:
        assert torch.equal(made[:live], native.norm_experts(Normed(normed.x[:live], normed.norm), some, *ours, CLAMPED))
    added = native.add_experts(Normed(normed.x.clone(), normed.norm), routing, *ours, CLAMPED, then)
    assert torch.equal(added.x[live:], normed.x[live:])


# ---- recording


def test_a_recorded_layer_reads_its_choices_anew() -> None:
    ours, _ = quantised(8, True)
    router, then = native.FloatLinear(torch.randn(COUNT, HIDDEN), torch.randn(COUNT)), Norm(torch.ones(HIDDEN), 1e-5)
    x, norm = torch.randn(6, HIDDEN), Norm(torch.rand(HIDDEN) + 0.5, 1e-6)
    ids = torch.arange(6, dtype=torch.int32)

    def step() -> Tensor:
        normed = Normed(native.embed(ids, x), norm)
        routing = native.norm_route(normed, router, TOP, True)
        normed = native.add_experts(normed, routing, *ours, CLAMPED, then)
        return native.norm_experts(normed, routing, *ours, GELU_TANH)

    recording = native.Graph(step)
    assert [k for k in recording.kernels if k in ("route", "experts")] == ["route", "experts", "experts"]
    chosen = set()
    for seed in range(4):
        x.copy_(torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(seed)))
        assert torch.equal(recording.replay(), step())
        chosen.add(tuple(native.norm_route(Normed(x, norm), router, TOP, True).ids.flatten().tolist()))
    assert len(chosen) == 4, "each time other experts"
