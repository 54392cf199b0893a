"""Edits, filters and draws in C++: noise that cannot matter is not computed."""

from __future__ import annotations

import torch
from torch import Tensor

from sparkdraft.kernels.native.library import c
from sparkdraft.kernels.ops import LogitEdits
from sparkdraft.kernels.reference.sampling import argmax


def edit_logits(logits: Tensor, edits: LogitEdits) -> None:
    tensors = [*edits[:-1], *edits.tables]
    assert logits.stride(1) == 1 and all(tensor.is_contiguous() for tensor in tensors)
    (rows, columns), most = logits.shape, edits.tables.biased.shape[1]
    places = [tensor.data_ptr() for tensor in tensors]
    c.sd_edit_logits(logits.data_ptr(), logits.stride(0), rows, columns, *places, most)


def sample(logits: Tensor, floats: Tensor | None, integers: Tensor | None, ids: Tensor | None = None) -> Tensor:
    if floats is None:
        return argmax(logits)
    out = torch.empty(len(logits), dtype=torch.int64)
    _run(logits, floats, integers, ids, out, None, 0.0)
    return out


def sample_sure(
    logits: Tensor, floats: Tensor | None, integers: Tensor | None, ids: Tensor | None, widest: float
) -> tuple[Tensor, Tensor]:
    out, gaps = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
    _run(logits, floats, integers, ids, out, gaps, widest)
    return out, gaps


def _run(
    logits: Tensor, floats: Tensor | None, integers: Tensor | None, ids: Tensor | None, out: Tensor,
    gaps: Tensor | None, widest: float,
) -> None:  # fmt: skip
    rows, columns = logits.shape
    assert all(each is None or each.numel() == 3 * rows for each in (floats, integers)), rows
    logits, ids = logits.contiguous(), None if ids is None else ids.contiguous()
    places = [None if each is None else each.data_ptr() for each in (floats, integers, ids, out, gaps)]
    c.sd_sample(logits.data_ptr(), logits.stride(0), rows, columns, *places, widest)
