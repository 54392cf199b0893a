"""A layer's experts as experts.cpp reads them, and the operators on them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64

import torch
from torch import Tensor

from sparkdraft.kernels.native.graph import empty, keep
from sparkdraft.kernels.native.leveled import all_rounded, pack_alike, packable
from sparkdraft.kernels.native.library import c
from sparkdraft.kernels.native.packed import FloatLinear, Matrix, NativeLinear
from sparkdraft.kernels.ops import Activation
from sparkdraft.weights.linear import ExpertLinear, ToFloats
from sparkdraft.weights.quant.stored import Stored

ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")  # as in activation.h


def keep_experts(experts: Sequence[Sequence[Stored]], bias: Tensor | None, floats: ToFloats) -> ExpertLinear:
    """Parts of one expert that differ in form are rounded to 8 bits."""
    return NativeExperts([_pack(parts, b) for parts, b in zip(experts, _each(bias, experts), strict=True)])


def _pack(parts: Sequence[Stored], bias: Tensor | None) -> NativeLinear:
    ready = packable(parts)
    kept = pack_alike(ready, bias) or pack_alike(all_rounded(ready), bias)
    assert kept is not None, "integers of 8 bits are alike"
    return kept


def keep_float_experts(experts: Sequence[Sequence[Stored]], bias: Tensor | None, floats: ToFloats) -> ExpertLinear:
    return NativeExperts(
        [
            FloatLinear(torch.cat([floats(part) for part in parts]), b)
            for parts, b in zip(experts, _each(bias, experts), strict=True)
        ]
    )


def _each(bias: Tensor | None, experts: Sequence[object]) -> Sequence[Tensor | None]:
    return [None] * len(experts) if bias is None else list(bias)


class NativeExperts(ExpertLinear):
    """A matrix of matmul.cpp per expert."""

    def __init__(self, matrices: Sequence[NativeLinear]) -> None:
        self._matrices, self.count = matrices, len(matrices)
        self.nbytes = sum(m.nbytes for m in matrices)
        self.rounded = next((m.rounded for m in matrices if m.rounded), "")
        self._array = (Matrix * self.count)(*(m.matrix for m in matrices))
        self.handle = ctypes.addressof(self._array)

    def expert(self, number: int) -> NativeLinear:
        return self._matrices[number]


class _ExpertsCall(ctypes.Structure):
    """Mirrors 'Call' of experts.cpp."""

    _fields_ = [
        *((name, c_int64) for name in ("x", "x_stride", "rows", "ids", "weights", "top_k", "experts")),
        *((name, c_int64) for name in ("gate_up", "down", "activation")),
        *(("limit", c_float), ("out", c_int64), ("out_stride", c_int64), ("add", ctypes.c_bool)),
    ]


def write_experts(
    y: Tensor,  # [rows, hidden]
    x: Tensor,  # [rows, hidden], normed
    ids: Tensor,  # int32 [rows, top_k]
    weights: Tensor,  # float32 [rows, top_k]
    gate_up: ExpertLinear,
    down: ExpertLinear,
    activation: Activation,
    add: bool,  # to what y holds
) -> None:
    assert isinstance(gate_up, NativeExperts) and isinstance(down, NativeExperts), "they are kept by `keep_experts`"
    assert ids.is_contiguous() and weights.is_contiguous() and ids.shape == weights.shape, (ids.shape, ids.stride())
    call = _ExpertsCall(
        *(x.data_ptr(), x.stride(0), x.shape[0], ids.data_ptr(), weights.data_ptr(), ids.shape[1], down.count),
        *(gate_up.handle, down.handle, ACTIVATIONS.index(activation.kind), activation.limit),
        *(y.data_ptr(), y.stride(0), add),
    )
    keep(call)
    c.sd_experts(ctypes.addressof(call))


def choose_experts(
    logits: Tensor, top_k: int, renormalise: bool, scale: Tensor | None
) -> tuple[Tensor, Tensor]:  # int32, float32 [rows, top_k]
    rows, experts = logits.shape
    assert 0 < top_k <= experts, (top_k, experts)
    ids, weights = empty(rows, top_k).view(torch.int32), empty(rows, top_k)
    places = (None if scale is None else scale.data_ptr(), ids.data_ptr(), weights.data_ptr())
    c.sd_route(logits.data_ptr(), rows, experts, top_k, int(renormalise), *places)
    return ids, weights
