"""The rows of the draft loss as Triton kernels: what a row of logits says of its label, and its gradient in place.

Both are bound by bytes: `row_stats` reads the logits once (and the teacher's, where labels are mixed) with an online
softmax over each; `to_gradient` reads them once more and writes weight * (softmax - label) over them, in their own
dtype. train/loss.py defines the loss and owns weights, chunks and matmuls; a row without a label, or of weight zero,
is not read at all.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, SOFT_BLOCK = 4096, 2048  # ids a step: 64 registers a thread, so that four programs share a multiprocessor
WARPS = 8


@dataclass(frozen=True, slots=True)
class Targets:
    """The labels of all rows, flat. Without a teacher the last three are None."""

    ids: Tensor  # int64 [rows], negative: no label
    soft: float  # the teacher's share
    teacher: Tensor | None = None  # [tokens, vocab], its rows dense
    teacher_rows: Tensor | None = None  # int64 [rows], negative: the id alone
    inverse_temperature: Tensor | None = None  # float32 [rows]

    def rows(self, part: slice) -> Targets:
        if self.teacher is None or self.teacher_rows is None or self.inverse_temperature is None:
            return Targets(self.ids[part], 0.0)
        return Targets(self.ids[part], self.soft, self.teacher, self.teacher_rows[part], self.inverse_temperature[part])


@dataclass(frozen=True, slots=True)
class RowStats:
    """What `row_stats` finds, one number a row; zeros and False where there is no label."""

    lse: Tensor  # float32: log-sum-exp of the logits
    teacher_lse: Tensor  # float32: of the teacher's, after its temperature; only where it has a share
    entropy: Tensor  # float32: cross-entropy with the label
    probability: Tensor  # float32: of the label's id
    correct: Tensor  # bool: the id is the first of the largest logits

    @staticmethod
    def empty(shape: tuple[int, ...], device: torch.device) -> RowStats:
        lse, teacher_lse, entropy, probability = (
            torch.empty(shape, dtype=torch.float32, device=device) for _ in range(4)
        )
        correct = torch.empty(shape, dtype=torch.bool, device=device)
        return RowStats(lse, teacher_lse, entropy, probability, correct)

    def rows(self, part: slice) -> RowStats:
        return RowStats(*(getattr(self, field.name).view(-1)[part] for field in fields(self)))


PLAIN = ["ids", "teacher_rows", "temperatures", "lse", "teacher_lse", "entropy", "probability", "correct", "weight"]


@triton.jit
def _softmax_step(value, peak, total):
    """Online softmax with a peak for the row but a total for each lane: only the peak is reduced in the loop."""
    peak_now = tl.maximum(peak, tl.max(value, 0))
    power = tl.exp(value - peak_now)
    fade = tl.exp(peak - peak_now)
    return peak_now, fade, power, total * fade + power


@triton.jit(do_not_specialize=PLAIN[:-1])
def _row_stats(
    logits, ids, teacher, teacher_rows, temperatures, lse, teacher_lse, entropy, probability, correct,
    stride_row, stride_teacher, vocab, soft, SOFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(ids + row)
    if label < 0:
        tl.store(lse + row, 0.0)
        tl.store(teacher_lse + row, 0.0)
        tl.store(entropy + row, 0.0)
        tl.store(probability + row, 0.0)
        tl.store(correct + row, False)
        return
    logits += row * stride_row
    column = tl.arange(0, BLOCK)
    peak = float("-inf")
    place = 0  # of the first step that met the peak
    total = tl.zeros([BLOCK], tl.float32)
    # Each step's ids are fetched one step ahead, so that the reduction of the peak does not wait for memory too.
    ahead = tl.load(logits + column, mask=column < vocab, other=float("-inf"))
    if SOFT:
        teacher_row = tl.load(teacher_rows + row)
        taught = teacher_row >= 0
        teacher += tl.maximum(teacher_row, 0) * stride_teacher
        temperature = tl.load(temperatures + row)
        teacher_peak = float("-inf")
        teacher_total = tl.zeros([BLOCK], tl.float32)
        product = tl.zeros([BLOCK], tl.float32)  # sum of the teacher's powers * logits
        teacher_ahead = tl.load(teacher + column, mask=(column < vocab) & taught, other=0.0)
    for first in tl.range(0, vocab, BLOCK):
        inside = first + column < vocab
        following = first + BLOCK + column
        value = ahead.to(tl.float32)
        ahead = tl.load(logits + following, mask=following < vocab, other=float("-inf"))
        before = peak
        peak, fade, power, total = _softmax_step(value, peak, total)
        place = tl.where(peak > before, first, place)
        if SOFT:
            lesson = tl.where(inside, teacher_ahead.to(tl.float32) * temperature, float("-inf"))
            teacher_ahead = tl.load(teacher + following, mask=(following < vocab) & taught, other=0.0)
            teacher_peak, fade, power, teacher_total = _softmax_step(lesson, teacher_peak, teacher_total)
            product = product * fade + power * tl.where(inside, value, 0.0)  # not 0 * -inf
    row_lse = peak + tl.log(tl.sum(total, 0))
    label_logit = tl.load(logits + label).to(tl.float32)
    expected = label_logit
    row_teacher_lse = 0.0
    if SOFT:
        teacher_sum = tl.sum(teacher_total, 0)
        mixed = (1.0 - soft) * label_logit + soft * tl.sum(product, 0) / teacher_sum
        expected = tl.where(taught, mixed, label_logit)
        row_teacher_lse = teacher_peak + tl.log(teacher_sum)
    column += place
    value = tl.load(logits + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    best = tl.min(tl.where(value == peak, column, vocab), 0)
    tl.store(lse + row, row_lse)
    tl.store(teacher_lse + row, row_teacher_lse)
    tl.store(entropy + row, row_lse - expected)
    tl.store(probability + row, tl.exp(label_logit - row_lse))
    tl.store(correct + row, best == label)


@triton.jit(do_not_specialize=PLAIN)
def _to_gradient(
    logits, ids, teacher, teacher_rows, temperatures, lse, teacher_lse, weight,
    stride_row, stride_teacher, vocab, soft, SOFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    logits += row * stride_row
    row_weight = tl.load(weight + row)
    if row_weight == 0.0:
        tl.store(logits + column, tl.zeros([BLOCK], logits.dtype.element_ty), mask=inside)
        return
    value = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32)
    result = tl.exp(value - tl.load(lse + row))
    hard = 1.0
    if SOFT:
        teacher_row = tl.load(teacher_rows + row)
        if teacher_row >= 0:
            hard = 1.0 - soft
            lesson = tl.load(teacher + teacher_row * stride_teacher + column, mask=inside, other=0.0)
            lesson = lesson.to(tl.float32) * tl.load(temperatures + row) - tl.load(teacher_lse + row)
            result -= soft * tl.exp(lesson)
    result -= tl.where(column == tl.load(ids + row), hard, 0.0)
    tl.store(logits + column, (row_weight * result).to(logits.dtype.element_ty), mask=inside)


def _stride(targets: Targets, vocab: int) -> int:
    teacher = targets.teacher
    if teacher is None:
        return 0
    assert teacher.stride(1) == 1 and teacher.shape[1] == vocab, (teacher.shape, vocab)
    return teacher.stride(0)


def _block(targets: Targets, vocab: int) -> int:
    return min(BLOCK if targets.teacher is None else SOFT_BLOCK, triton.next_power_of_2(vocab))


def row_stats(logits: Tensor, targets: Targets, stats: RowStats) -> None:  # logits [rows, vocab]
    """Fills 'stats', whose tensors are flat."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1 and targets.ids.is_contiguous(), (logits.stride(), targets.ids.stride())
    _row_stats[(rows,)](
        logits, targets.ids, targets.teacher, targets.teacher_rows, targets.inverse_temperature,
        stats.lse, stats.teacher_lse, stats.entropy, stats.probability, stats.correct,
        logits.stride(0), _stride(targets, vocab), vocab, targets.soft,
        SOFT=targets.teacher is not None, BLOCK=_block(targets, vocab), num_warps=WARPS,
    )  # fmt: skip


def to_gradient(logits: Tensor, targets: Targets, stats: RowStats, weight: Tensor) -> None:
    """logits [rows, vocab] become weight [rows] * (softmax - label)."""
    rows, vocab = logits.shape
    block = _block(targets, vocab)
    _to_gradient[(rows, triton.cdiv(vocab, block))](
        logits, targets.ids, targets.teacher, targets.teacher_rows, targets.inverse_temperature,
        stats.lse, stats.teacher_lse, weight,
        logits.stride(0), _stride(targets, vocab), vocab, targets.soft,
        SOFT=targets.teacher is not None, BLOCK=block, num_warps=WARPS,
    )  # fmt: skip
