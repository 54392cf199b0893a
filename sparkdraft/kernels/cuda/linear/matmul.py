"""Matmuls and what is around them: one launch for few tokens (few_tokens.py), else one operator after the other.

The bits of few tokens do not depend on the tokens beside them. More tokens, or a matrix without tiles, go to the
matrix's own product: cuBLAS for floats, whose last bit may depend on the number of rows, and planes.py for codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparkdraft.kernels.cuda.elementwise import gated, rms_norm
from sparkdraft.kernels.cuda.linear import few_tokens
from sparkdraft.kernels.cuda.sampling.argmax import argmax
from sparkdraft.kernels.ops import Activation, Norm, Normed
from sparkdraft.weights.linear import Linear, WeightTiles


def _few(x: Tensor, matrix: Linear, bias: bool = True) -> WeightTiles | None:
    """The matrix's tiles, if the kernels for few tokens take them. bias: whether they would add one."""
    tiles = matrix.tiles if 0 < x.shape[0] <= few_tokens.MOST_TOKENS else None
    return tiles if tiles and (bias or tiles.bias is None) else None


def linear(x: Tensor, matrix: Linear) -> Tensor:  # [rows, in] -> [rows, out]
    if tiles := _few(x, matrix):
        return few_tokens.linear(x, tiles)
    return matrix.linear(x)


def norm_linear(normed: Normed, matrix: Linear) -> Tensor:  # [rows, in] -> [rows, out]
    if tiles := _few(normed.x, matrix):
        return few_tokens.norm_linear(normed, tiles)
    if matrix.parts and normed.x.shape[0] <= few_tokens.MOST_TOKENS:
        return torch.cat([norm_linear(normed, part) for part in matrix.parts], dim=-1)
    return matrix.linear(normed.applied(rms_norm))


def norm_gated(normed: Normed, gate_up: Linear, activation: Activation) -> Tensor:  # [rows, in] -> [rows, inter]
    if tiles := _few(normed.x, gate_up, bias=False):
        return few_tokens.norm_gated(normed, tiles, activation)
    return gated(norm_linear(normed, gate_up), activation)


def norm_logits(normed: Normed, head: Linear, softcap: float = 0.0) -> Tensor:  # float32 [rows, vocabulary]
    if tiles := _few(normed.x, head):
        logits = few_tokens.norm_linear(normed, tiles, torch.float32)
    else:
        logits = head.linear_float32(normed.applied(rms_norm))
    return torch.tanh(logits / softcap) * softcap if softcap else logits


def norm_argmax(normed: Normed, head: Linear, softcap: float = 0.0) -> Tensor:  # int64 [rows]
    if not softcap and (tiles := _few(normed.x, head, bias=False)):
        return few_tokens.norm_argmax(normed, tiles)
    return argmax(norm_logits(normed, head, softcap))


def add_linear(residual: Tensor, x: Tensor, matrix: Linear, then: Norm) -> Normed:
    if tiles := _few(x, matrix):
        return few_tokens.add_linear(residual, x, tiles, then)
    matrix.add_to(residual, x)
    return Normed(residual, then)
