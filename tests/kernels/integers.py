"""The matmul of the native kernels in plain torch: integer weights, and activations rounded to int8."""

from __future__ import annotations

import torch
from torch import Tensor


def group_linear(x: Tensor, q: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """Integer matmul of weights/quant/stored.py: each row of x is rounded to int8 by itself, in the same groups of 32,
    except for its outliers, which stay floats.

    A row's result depends on that row alone, whatever else is in the batch: drafted and plain decoding agree in every
    bit because of it. Shapes as in GroupQuant: q [out, groups, 16 or 32] -> y float32 [rows, out].
    """
    integers = q.float() if q.dtype == torch.int8 else torch.cat((q & 15, q >> 4), dim=-1).float()
    xg, outliers = split_outliers(x.float().unflatten(1, (q.shape[1], -1)))
    peak = xg.abs().amax(-1, keepdim=True)  # [rows, groups, 1]
    xq = torch.round(xg * torch.where(peak > 0, 127 / peak, 0.0))
    step = (peak / 127).squeeze(-1)
    dots = torch.einsum("rgk,ogk->rog", xq, integers)  # exact: below 2**24
    y = (dots * step.unsqueeze(1) * scale.float()).sum(-1)
    if offset is not None:
        y += (xq.sum(-1) * step) @ offset.float().t()
    weights = integers * scale.float().unsqueeze(-1)
    if offset is not None:
        weights += offset.float().unsqueeze(-1)
    return y + outliers.flatten(1) @ weights.flatten(1).t()


def split_outliers(groups: Tensor) -> tuple[Tensor, Tensor]:  # [rows, groups, 32] -> two of the same shape
    """Up to two elements per row are taken out: the largest one, while that removes a fifth of the squared error that
    rounding the row to int8 is expected to have. Returns the rest and the outliers, zeros elsewhere."""
    rest, every = groups.clone(), torch.arange(len(groups))
    error = torch.zeros(len(groups))
    for g in range(groups.shape[1]):
        error += rest[:, g].abs().amax(-1).square()
    going_on = torch.ones(len(groups), dtype=torch.bool)
    for _ in range(2):
        sizes = rest.abs()
        group = sizes.amax(-1).argmax(-1)
        first, second = sizes[every, group].topk(2).values.unbind(-1)
        column = sizes[every, group].argmax(-1)
        removed = first.square() - second.square()
        going_on &= removed > 0.2 * error
        error -= removed
        rest[every[going_on], group[going_on], column[going_on]] = 0
    return rest, groups - rest
