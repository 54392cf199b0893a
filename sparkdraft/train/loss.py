"""The loss of every draft position over the target's frozen head: cross-entropy, weighted by what a position is worth.

A drafted token counts only if all before it in its block are right, so later positions have smaller weights, by the
drafter's own probabilities of the labels before them (D-PACE). The plain form defines the loss. A CPU
runs it over a few blocks at a time, and again on the way back, so that few logits are in memory. A GPU goes through the
vocabulary chunk by chunk and computes the gradient on the way (train/kernels/draft_loss.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparkdraft.train.memory import CHUNK_ROWS, CPU_CHUNK_ROWS

if TYPE_CHECKING:
    from sparkdraft.train.kernels.draft_loss import Targets


@dataclass(frozen=True, slots=True)
class LossOptions:
    alpha: float = 0.5  # 0 uses the drafter's probabilities, 1 treats every draft as accepted
    soft: float = 0.0  # share of the target's own distribution in the label, for tokens that have one


@dataclass(frozen=True, slots=True)
class Labels:
    ids: Tensor  # int64 [blocks, width - 1]; negative: no label (past the document's end)
    teacher: Tensor | None = None  # [tokens, vocab]: the target's logits of each context row
    teacher_rows: Tensor | None = None  # int64 [blocks, width - 1]: the row that predicts this label; negative: none
    inverse_temperature: Tensor | None = None  # float32 [blocks, width - 1]: multiplies the teacher's logits; None: 1

    def __post_init__(self) -> None:
        assert (self.teacher is None) == (self.teacher_rows is None), "a teacher needs its rows, and they need it"
        assert self.teacher_rows is None or self.teacher_rows.shape == self.ids.shape, self.ids.shape

    def blocks(self, part: slice) -> Labels:
        """The labels of some of the blocks."""
        rows, warmth = (None if each is None else each[part] for each in (self.teacher_rows, self.inverse_temperature))
        return Labels(self.ids[part], self.teacher, rows, warmth)

    def temperatures(self) -> Tensor:  # float32 [blocks, width - 1]
        given = self.inverse_temperature
        return torch.ones(self.ids.shape, device=self.ids.device) if given is None else given


@dataclass(frozen=True, slots=True)
class LossReport:
    """All on the device: reading a number from it waits."""

    loss: Tensor  # scalar, differentiable in the hidden rows
    correct: Tensor  # bool [blocks, width - 1]: the most likely id is the label's; False without a label
    entropy: Tensor  # float32 [blocks, width - 1]: cross-entropy with the (mixed) label; 0 without a label


def draft_loss(
    hidden: Tensor,  # [blocks, width - 1, dim]: the drafter's normed output at the mask rows
    head: Tensor,  # [vocab, dim], frozen
    labels: Labels,
    options: LossOptions,
    chunk_rows: int = CHUNK_ROWS,
) -> LossReport:
    """sum(weight * entropy) / sum(weight) over the whole batch; 0 if nothing has a label."""
    assert hidden.shape[:2] == labels.ids.shape and hidden.shape[2] == head.shape[1], (hidden.shape, head.shape)
    if hidden.is_cuda:
        return chunked_loss(hidden, head, labels, options, chunk_rows)
    few = max(CPU_CHUNK_ROWS // hidden.shape[1], 1)
    parts = [slice(first, first + few) for first in range(0, max(len(hidden), 1), few)]
    return _combined(
        [checkpoint(_rows, hidden[p], head, labels.blocks(p), options, use_reentrant=False) for p in parts],
        labels,
        options,
    )


def position_weights(probability: Tensor, labelled: Tensor, options: LossOptions) -> Tensor:
    """The weight of each position, [blocks, width - 1], from the drafter's probability of its label.

    The expected number of accepted drafts is the sum over m of c_m, the probability that drafts 1 .. m are all right;
    position j is part of c_j and all after it. A position without a label ends its block: every c from there is
    0.
    """
    kept = (options.alpha + (1 - options.alpha) * probability) * labelled
    return kept.cumprod(1).flip(1).cumsum(1).flip(1)


def weighted_mean(entropy: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and the divisor of the gradient of sum(weight * entropy)."""
    total = weight.sum()
    divisor = torch.where(total > 0, total, torch.ones_like(total))
    return (weight * entropy).sum() / divisor, divisor


# ---- the definition


def reference_loss(hidden: Tensor, head: Tensor, labels: Labels, options: LossOptions) -> LossReport:
    """Plain autograd in the inputs' own dtype, with all logits at once."""
    return _combined([_rows(hidden, head, labels, options)], labels, options)


def _rows(hidden: Tensor, head: Tensor, labels: Labels, options: LossOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy, probability of the label, and whether that is the most likely id, for each token."""
    logits = hidden @ head.detach().t()  # [blocks, width - 1, vocab]
    labelled, ids = labels.ids >= 0, labels.ids.clamp(min=0)
    target = _label_distribution(logits.detach(), ids, labels, options)
    entropy = (logits.logsumexp(-1) - (target * logits).sum(-1)) * labelled
    probability = logits.detach().softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return entropy, probability, (logits.argmax(-1) == ids) & labelled


def _combined(rows: list[tuple[Tensor, Tensor, Tensor]], labels: Labels, options: LossOptions) -> LossReport:
    entropy, probability, correct = (torch.cat(parts) for parts in zip(*rows, strict=True))
    loss, _ = weighted_mean(entropy, position_weights(probability, labels.ids >= 0, options))
    return LossReport(loss, correct, entropy.detach().float())


def _label_distribution(logits: Tensor, ids: Tensor, labels: Labels, options: LossOptions) -> Tensor:
    hard = F.one_hot(ids, logits.shape[-1]).to(logits.dtype)
    if labels.teacher is None or labels.teacher_rows is None or not options.soft:
        return hard
    taught = labels.teacher[labels.teacher_rows.clamp(min=0)].to(logits.dtype)
    taught = (taught * labels.temperatures().to(logits.dtype).unsqueeze(-1)).softmax(-1)
    mixed = (1 - options.soft) * hard + options.soft * taught
    return torch.where((labels.teacher_rows >= 0).unsqueeze(-1), mixed, hard)


# ---- on a GPU


def chunked_loss(
    hidden: Tensor, head: Tensor, labels: Labels, options: LossOptions, chunk_rows: int = CHUNK_ROWS
) -> LossReport:
    """The same with Triton, holding the logits of at most 'chunk_rows' rows (but of one block at least)."""
    assert hidden.dtype == head.dtype, (hidden.dtype, head.dtype)
    wanted = torch.is_grad_enabled() and hidden.requires_grad
    return LossReport(*_ChunkedLoss.apply(hidden, head, labels, options, chunk_rows, wanted))


def _targets(labels: Labels, options: LossOptions) -> Targets:
    from sparkdraft.train.kernels.draft_loss import Targets

    ids = labels.ids.reshape(-1)
    if labels.teacher is None or labels.teacher_rows is None or not options.soft:
        return Targets(ids, 0.0)
    temperatures = labels.temperatures().float().reshape(-1)
    return Targets(ids, options.soft, labels.teacher, labels.teacher_rows.reshape(-1), temperatures)


class _ChunkedLoss(torch.autograd.Function):
    """The forward pass computes the gradient too, while a chunk's logits are there; only its common divisor is missing.

    A chunk holds whole blocks, so that it knows its own weights; their sum over the batch is known after the last one.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, labels: Labels, options: LossOptions, chunk_rows: int, wanted: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        # imported here because triton is not available everywhere
        from sparkdraft.train.kernels import draft_loss as kernel

        blocks, positions, dim = hidden.shape
        rows, step = hidden.reshape(-1, dim), max(chunk_rows // positions, 1) * positions
        stats = kernel.RowStats.empty((blocks, positions), hidden.device)
        weight = torch.zeros((blocks, positions), dtype=torch.float32, device=hidden.device)
        grad = torch.empty(rows.shape, dtype=hidden.dtype, device=hidden.device) if wanted else None
        buffer = torch.empty((min(step, len(rows)), len(head)), dtype=hidden.dtype, device=hidden.device)
        targets = _targets(labels, options)
        for first in range(0, len(rows), step):
            part = slice(first, min(first + step, len(rows)))
            block = slice(first // positions, part.stop // positions)
            logits = torch.mm(rows[part], head.t(), out=buffer[: part.stop - first])
            kernel.row_stats(logits, targets.rows(part), stats.rows(part))
            weight[block] = position_weights(stats.probability[block], labels.ids[block] >= 0, options)
            if grad is not None:
                kernel.to_gradient(logits, targets.rows(part), stats.rows(part), weight.view(-1)[part])
                torch.mm(logits, head, out=grad[part])
        loss, divisor = weighted_mean(stats.entropy, weight)
        ctx.mark_non_differentiable(stats.correct, stats.entropy)
        ctx.save_for_backward(grad, divisor)
        ctx.shape = hidden.shape
        return loss, stats.correct, stats.entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, divisor = ctx.saved_tensors
        scaled = (grad * (grads[0] / divisor)).to(grad.dtype)
        return scaled.view(ctx.shape), None, None, None, None, None
