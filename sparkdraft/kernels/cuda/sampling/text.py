"""Drafts from a request's own text: kernels/reference/text.py in two launches, and one that adds ids to the text.

Every earlier position is compared with the text's end, `BLOCK` positions at a time and one id further back while any
of them still agrees: three ids on average in prose and code. `PARTS` programs take the blocks of a text in turn, so a
short text costs one block and a long one is read by many programs. A run and its end are one number, whose maximum is
the answer, so it does not depend on the order of programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkdraft.kernels.cuda.elementwise import run
from sparkdraft.kernels.cuda.runtime.pdl import enter
from sparkdraft.kernels.ops import MOST_MATCH

PARTS, BLOCK = 32, 1024  # programs of a text at most; positions that a program compares at a time
END_BITS = 25  # of a match: its run above, its end below
_BITS, _END = tl.constexpr(END_BITS), tl.constexpr((1 << END_BITS) - 1)


@triton.jit(do_not_specialize=["length", "stride_ids", "room"])
def _match_part(
    ids, length, best, stride_ids, room,
    MOST: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best match that ends in one part of one text; 0: none."""
    enter(PDL)
    seq, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    text, last = ids + seq * stride_ids, tl.minimum(tl.load(length + seq), room) - 1
    best_here = tl.zeros([BLOCK], tl.int32)
    for first in range(part * BLOCK, last, PARTS * BLOCK):
        end = first + tl.arange(0, BLOCK)
        agrees, ran = end < last, tl.zeros([BLOCK], tl.int32)
        back, some = 0, 1
        while (some > 0) & (back < MOST):
            agrees = agrees & (end >= back)
            # Some position, which is before the last, agrees so far: there is an id to compare with.
            agrees = agrees & (tl.load(text + end - back, mask=agrees, other=0) == tl.load(text + last - back))
            ran += agrees.to(tl.int32)
            some = tl.max(agrees.to(tl.int32), 0)
            back += 1
        best_here = tl.maximum(best_here, tl.where(ran > 0, (ran << _BITS) | end, 0))
    tl.store(best + seq * PARTS + part, tl.max(best_here, 0))


@triton.jit(do_not_specialize=["length", "drafts", "stride_ids", "stride_drafts", "room", "min_match"])
def _draft_match(
    ids, length, best, drafts, matched, stride_ids, stride_drafts, room, min_match,
    DEPTH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    seq = tl.program_id(0).to(tl.int64)
    match = tl.max(tl.load(best + seq * PARTS + tl.arange(0, PARTS)), 0)
    ran = match >> _BITS
    enough = ran >= min_match
    tl.store(matched + seq, tl.where(enough, ran, 0))
    if enough:
        start, column = (match & _END) + 1, tl.arange(0, BLOCK)
        period = tl.minimum(tl.load(length + seq), room) - start
        found = tl.load(ids + seq * stride_ids + start + column % period, mask=column < DEPTH)
        tl.store(drafts + seq * stride_drafts + column, found, mask=column < DEPTH)


def match_text(ids: Tensor, length: Tensor, min_match: int, drafts: Tensor) -> Tensor:
    (seqs, room), depth = ids.shape, drafts.shape[1]
    assert len(length) == len(drafts) == seqs and length.is_contiguous(), (seqs, length.shape, drafts.shape)
    assert ids.stride(1) == drafts.stride(1) == 1 and room <= 1 << END_BITS, (ids.stride(), room)
    assert 1 <= min_match <= MOST_MATCH and depth >= 1, (min_match, depth)
    parts = min(PARTS, triton.next_power_of_2(triton.cdiv(room, BLOCK)))
    best = torch.empty((seqs, parts), dtype=torch.int32, device=ids.device)
    matched = torch.empty((seqs,), dtype=torch.int32, device=ids.device)
    if seqs:
        run(
            _match_part, (seqs, parts), ids, length, best, ids.stride(0), room,
            MOST=MOST_MATCH, PARTS=parts, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
        run(
            _draft_match, (seqs,), ids, length, best, drafts, matched, ids.stride(0), drafts.stride(0), room, min_match,
            DEPTH=depth, PARTS=parts, BLOCK=triton.next_power_of_2(depth), num_warps=1,
        )  # fmt: skip
    return matched


@triton.jit(do_not_specialize=["length", "samples", "count", "stride_ids", "stride_samples", "stride_count", "room"])
def _append_text(
    ids, length, samples, count, stride_ids, stride_samples, stride_count, room,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    seq, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    start, number = tl.load(length + seq), tl.load(count + seq * stride_count)
    place = start + column
    wanted = (start > 0) & (place < room) & (column < number) & (column < WIDTH)
    sample = tl.load(samples + seq * stride_samples + column, mask=wanted)
    tl.store(ids + seq * stride_ids + place, sample.to(tl.int32), mask=wanted)


def append_text(ids: Tensor, length: Tensor, samples: Tensor, count: Tensor) -> None:
    (seqs, room), width = ids.shape, samples.shape[1]
    assert len(length) == len(samples) == len(count) == seqs and length.is_contiguous(), (seqs, samples.shape)
    assert ids.stride(1) == samples.stride(1) == 1, (ids.stride(), samples.stride())
    if seqs:
        run(
            _append_text, (seqs,), ids, length, samples, count, ids.stride(0), samples.stride(0), count.stride(0), room,
            WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=1,
        )  # fmt: skip
