"""Weights' matmuls and what stands around them: one launch for few rows of floats (few_rows.py), else one by one.

Few rows are what decoding brings, drafts included, and there a row's result does not depend on the rows beside it; a
matmul of more rows is cuBLAS's, whose last bit may.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparkdraft.kernels.cuda import few_rows
from sparkdraft.kernels.cuda.elementwise import rms_norm, silu_mul
from sparkdraft.weights.linear import DenseLinear, Linear


def _few(x: Tensor, matrix: Linear) -> DenseLinear | None:
    """The matrix, if the kernels for few rows take it."""
    return matrix if isinstance(matrix, DenseLinear) and 0 < x.shape[0] <= few_rows.MOST_ROWS else None


def norm_linear(x: Tensor, gain: Tensor, eps: float, matrix: Linear) -> Tensor:  # [rows, in] -> [rows, out]
    if few := _few(x, matrix):
        return few_rows.norm_linear(x, gain, eps, few.weight, few.bias)
    return matrix.linear(rms_norm(x, gain, eps))


def norm_gated(x: Tensor, gain: Tensor, eps: float, gate_up: Linear) -> Tensor:  # [rows, in] -> [rows, inter]
    if (few := _few(x, gate_up)) and few.bias is None:
        return few_rows.norm_gated(x, gain, eps, few.weight)
    return silu_mul(norm_linear(x, gain, eps, gate_up))


def norm_logits(x: Tensor, gain: Tensor, eps: float, head: Linear) -> Tensor:  # float32 [rows, vocabulary]
    if few := _few(x, head):
        return few_rows.norm_linear(x, gain, eps, few.weight, few.bias, torch.float32)
    return head.linear(rms_norm(x, gain, eps)).float()


def norm_argmax(x: Tensor, gain: Tensor, eps: float, head: Linear) -> Tensor:  # int64 [rows]
    if (few := _few(x, head)) and few.bias is None:
        return few_rows.norm_argmax(x, gain, eps, few.weight)
    return norm_logits(x, gain, eps, head).argmax(-1)


def add_linear(residual: Tensor, x: Tensor, matrix: Linear) -> None:
    if few := _few(x, matrix):
        few_rows.add_linear(residual, x, few.weight, few.bias)
    else:
        matrix.add_to(residual, x)
