"""Filters and draws in one call: what engine/sampler.py and engine/sampler.py do in several passes."""

from __future__ import annotations

import torch
from torch import Tensor

from sparkdraft.kernels.native.library import c


def sample(
    logits: Tensor,  # float32 [rows, columns]
    floats: Tensor,  # float32 [3 * rows]: temperature, min_p, top_p
    integers: Tensor,  # int64 [3 * rows]: top_k, seed, position
    ids: Tensor | None = None,  # int64 [columns]: what the columns stand for; None: themselves
) -> Tensor:  # int64 [rows]
    """Noise that cannot matter is not computed."""
    rows, columns = logits.shape
    out = torch.empty(rows, dtype=torch.int64)
    assert floats.numel() == integers.numel() == 3 * rows, (rows, floats.shape, integers.shape)
    logits, ids = logits.contiguous(), None if ids is None else ids.contiguous()
    places = (floats.data_ptr(), integers.data_ptr(), None if ids is None else ids.data_ptr())
    c.sd_sample(logits.data_ptr(), logits.stride(0), rows, columns, *places, out.data_ptr(), None, 0.0)
    return out


def sample_sure(
    logits: Tensor, floats: Tensor | None, integers: Tensor | None, ids: Tensor | None, widest: float
) -> tuple[Tensor, Tensor]:  # int64 [rows], float32 [rows]
    rows, columns = logits.shape
    out, gaps = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    logits, ids = logits.contiguous(), None if ids is None else ids.contiguous()
    places = (None if each is None else each.data_ptr() for each in (floats, integers, ids))
    c.sd_sample(logits.data_ptr(), logits.stride(0), rows, columns, *places, out.data_ptr(), gaps.data_ptr(), widest)
    return out, gaps
