"""Edits, filters and draws in C++: noise that cannot matter is not computed. Masks are applied by numpy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparkdraft.kernels.native.library import c
from sparkdraft.kernels.ops import Draws, LogitEdits
from sparkdraft.kernels.reference.sampling import argmax

# Per byte of a mask: the upper bounds of its eight columns. Taking a minimum needs a quarter of the time of an indexed
# assignment.
BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], 1, bitorder="little")
BOUNDS = np.where(BITS, np.float32(np.inf), np.float32(-np.inf))  # [256, 8]


def edit_logits(logits: Tensor, edits: LogitEdits) -> None:
    tensors = [*edits[:-1], *edits.tables]
    assert logits.stride(1) == 1 and all(tensor.is_contiguous() for tensor in tensors)
    (rows, columns), most = logits.shape, edits.tables.biased.shape[1]
    places = [tensor.data_ptr() for tensor in tensors]
    c.sd_edit_logits(logits.data_ptr(), logits.stride(0), rows, columns, *places, most)


def forbid_bits(logits: Tensor, masks: Tensor, which: Tensor) -> None:
    table, bits, columns = logits.numpy(), masks.numpy(), logits.shape[1]
    for row, number in enumerate(which.tolist()):
        if number >= 0:
            np.minimum(table[row], BOUNDS.take(bits[number], 0).ravel()[:columns], out=table[row])


def sample(logits: Tensor, draws: Draws | None, ids: Tensor | None = None) -> Tensor:
    if draws is None:
        return argmax(logits)
    out = torch.empty(len(logits), dtype=torch.int64)
    _run(logits, draws, ids, out, None, 0.0)
    return out


def sample_sure(logits: Tensor, draws: Draws | None, ids: Tensor | None, widest: float) -> tuple[Tensor, Tensor]:
    out, gaps = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
    _run(logits, draws, ids, out, gaps, widest)
    return out, gaps


def _run(
    logits: Tensor, draws: Draws | None, ids: Tensor | None, out: Tensor, gaps: Tensor | None, widest: float
) -> None:
    rows, columns = logits.shape
    tables: tuple[Tensor | None, ...] = draws or (None,) * 4
    assert draws is None or len(draws.slots) == len(draws.positions) == rows, rows
    assert all(each is None or each.is_contiguous() for each in tables)
    logits, ids = logits.contiguous(), None if ids is None else ids.contiguous()
    places = [None if each is None else each.data_ptr() for each in (*tables, ids, out, gaps)]
    slots = draws.floats.shape[1] if draws else 0
    c.sd_sample(logits.data_ptr(), logits.stride(0), rows, columns, slots, *places, widest)
