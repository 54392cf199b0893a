"""Weights' matmuls and what stands around them: one launch for few rows of floats (few_rows.py), else one by one.

Few rows are what decoding one sequence brings, drafts included, and there a row's result does not depend on the rows
beside it; a matmul of more rows is cuBLAS's, whose last bit may.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparkdraft.kernels.cuda import few_rows
from sparkdraft.kernels.cuda.argmax import argmax
from sparkdraft.kernels.cuda.elementwise import rms_norm, silu_mul
from sparkdraft.kernels.norm import Norm, Normed
from sparkdraft.weights.linear import DenseLinear, Linear


def _few(x: Tensor, matrix: Linear) -> DenseLinear | None:
    """The matrix, if the kernels for few rows take it."""
    return matrix if isinstance(matrix, DenseLinear) and 0 < x.shape[0] <= few_rows.MOST_ROWS else None


def norm_linear(normed: Normed, matrix: Linear) -> Tensor:  # [rows, in] -> [rows, out]
    if few := _few(normed.x, matrix):
        return few_rows.norm_linear(normed, few.weight, few.bias)
    return matrix.linear(rms_norm(normed.x, *normed.norm))


def norm_gated(normed: Normed, gate_up: Linear) -> Tensor:  # [rows, in] -> [rows, inter]
    if (few := _few(normed.x, gate_up)) and few.bias is None:
        return few_rows.norm_gated(normed, few.weight)
    return silu_mul(norm_linear(normed, gate_up))


def norm_logits(normed: Normed, head: Linear) -> Tensor:  # float32 [rows, vocabulary]
    if few := _few(normed.x, head):
        return few_rows.norm_linear(normed, few.weight, few.bias, torch.float32)
    x = rms_norm(normed.x, *normed.norm)
    if isinstance(head, DenseLinear) and head.bias is None and x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, head.weight.t(), out_dtype=torch.float32)  # not rounded on the way, and not written twice
    return head.linear(x).float()


def norm_argmax(normed: Normed, head: Linear) -> Tensor:  # int64 [rows]
    if (few := _few(normed.x, head)) and few.bias is None:
        return few_rows.norm_argmax(normed, few.weight)
    return argmax(norm_logits(normed, head))


def add_linear(residual: Tensor, x: Tensor, matrix: Linear, then: Norm) -> Normed:
    if few := _few(x, matrix):
        return few_rows.add_linear(residual, x, few.weight, few.bias, then)
    matrix.add_to(residual, x)
    return Normed(residual, then)
