"""The draft loss on a CPU: against loops over plain numbers, its gradient against differences and algebra."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sparkdraft.train import loss as loss_module
from sparkdraft.train.loss import Labels, LossOptions, draft_loss

BLOCKS, POSITIONS, DIM, VOCAB, TOKENS = 4, 3, 5, 11, 6
OPTIONS = [
    LossOptions(),
    LossOptions(alpha=0.1, soft=0.4),
    LossOptions(alpha=1.0, soft=1.0),
]


def make(soft: bool = True) -> tuple[Tensor, Tensor, Labels]:
    torch.manual_seed(0)
    hidden = torch.randn(BLOCKS, POSITIONS, DIM, dtype=torch.float64, requires_grad=True)
    head = torch.randn(VOCAB, DIM, dtype=torch.float64)
    ids = torch.randint(0, VOCAB, (BLOCKS, POSITIONS))
    ids[1, 2] = ids[2, 1] = ids[2, 2] = -1
    ids[3] = -1
    if not soft:
        return hidden, head, Labels(ids)
    rows = torch.randint(0, TOKENS, (BLOCKS, POSITIONS))
    rows[0, 1] = -1
    teacher = torch.randn(TOKENS, VOCAB, dtype=torch.float64)
    return hidden, head, Labels(ids, teacher, rows, torch.rand(BLOCKS, POSITIONS) + 0.5)


def softmax(values: list[float]) -> list[float]:
    powers = [math.exp(v) for v in values]
    return [p / sum(powers) for p in powers]


def slow(
    hidden: Tensor, head: Tensor, labels: Labels, options: LossOptions
) -> tuple[float, list[list[float]], list[list[float]], list[list[bool]], Tensor]:
    """Loss, weights, entropies, hits and d loss / d logits (with weights held constant), in Python numbers."""
    logits = (hidden @ head.t()).tolist()
    entropies, weights, hits = [], [], []
    slope = torch.zeros(*hidden.shape[:2], len(head), dtype=torch.float64)
    for b, block in enumerate(logits):
        kept, entropy, hit = [], [], []
        for i, row in enumerate(block):
            label, p = int(labels.ids[b, i]), softmax(row)
            if label < 0:
                kept.append(0.0)
                entropy.append(0.0)
                hit.append(False)
                continue
            target = [float(v == label) for v in range(len(row))]
            if options.soft and labels.teacher is not None and labels.teacher_rows[b, i] >= 0:
                taught = labels.teacher[labels.teacher_rows[b, i]] * float(labels.inverse_temperature[b, i])
                mix = zip(target, softmax(taught.tolist()), strict=True)
                target = [(1 - options.soft) * hard + options.soft * soft for hard, soft in mix]
            entropy.append(-sum(t * math.log(q) for t, q in zip(target, p, strict=True)))
            kept.append((1 - options.alpha) * p[label] + options.alpha)
            hit.append(row.index(max(row)) == label)
            slope[b, i] = torch.tensor(p) - torch.tensor(target)
        weight = []
        for j in range(len(block)):
            weight.append(sum(math.prod(kept[: m + 1]) for m in range(j, len(block))))
        entropies.append(entropy)
        weights.append(weight)
        hits.append(hit)
    total = sum(map(sum, weights))
    loss = sum(w * e for ws, es in zip(weights, entropies, strict=True) for w, e in zip(ws, es, strict=True)) / total
    return loss, weights, entropies, hits, slope * (torch.tensor(weights) / total).unsqueeze(-1)


@pytest.mark.parametrize("chunk_rows", [1, 512])
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_values_and_gradient(
    options: LossOptions, soft: bool, chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "CPU_CHUNK_ROWS", chunk_rows)
    hidden, head, labels = make(soft)
    labels.ids[0, 0] = (hidden @ head.t())[0, 0].argmax()  # at least one that is right
    report = draft_loss(hidden, head, labels, options)
    report.loss.backward()
    loss, weights, entropies, hits, slope = slow(hidden.detach(), head, labels, options)
    assert report.loss.item() == pytest.approx(loss)
    assert report.entropy.dtype == torch.float32 and not report.entropy.requires_grad
    torch.testing.assert_close(report.entropy.double(), torch.tensor(entropies).double(), rtol=1e-5, atol=1e-6)
    assert report.correct.tolist() == hits and report.correct[0, 0]
    torch.testing.assert_close(hidden.grad, slope.double() @ head, rtol=1e-6, atol=1e-7)
    assert weights[3] == [0.0] * 3 and (hidden.grad[3] == 0).all()


def test_the_gradient_is_that_of_differences() -> None:
    """Where weights do not depend on the logits (alpha 1), differences of the loss itself are the gradient."""
    hidden, head, labels = make()
    options = LossOptions(alpha=1.0, soft=0.3)
    assert torch.autograd.gradcheck(lambda x: draft_loss(x, head, labels, options).loss, hidden)


def test_a_missing_label_ends_the_block() -> None:
    hidden, head, labels = make(soft=False)
    labels.ids[0] = torch.tensor([3, -1, 5])
    draft_loss(hidden, head, labels, LossOptions()).loss.backward()
    assert (hidden.grad[0, 1:] == 0).all() and (hidden.grad[0, 0] != 0).any()


def test_no_temperature_is_one() -> None:
    hidden, head, labels = make()
    options = LossOptions(soft=0.5)
    ones = replace(labels, inverse_temperature=torch.ones(BLOCKS, POSITIONS))
    bare = replace(labels, inverse_temperature=None)
    assert torch.equal(draft_loss(hidden, head, ones, options).loss, draft_loss(hidden, head, bare, options).loss)


@pytest.mark.parametrize("options", OPTIONS)
def test_an_empty_batch(options: LossOptions) -> None:
    hidden, head, labels = make()
    labels.ids.fill_(-1)
    report = draft_loss(hidden, head, labels, options)
    report.loss.backward()
    assert report.loss.item() == 0 and (hidden.grad == 0).all()
    assert not report.correct.any() and (report.entropy == 0).all()
    none = hidden.detach()[:0].requires_grad_()
    report = draft_loss(none, head, Labels(labels.ids[:0]), options)
    report.loss.backward()
    assert report.loss.item() == 0 and report.correct.shape == (0, POSITIONS)
