"""TurboQuant caches in C++ (turboquant.cpp, attention.cpp): the operators' names for its layers."""

from __future__ import annotations

import ctypes
from ctypes import c_int64
from functools import cache

import torch
from torch import Tensor

from sparkdraft.kernels.native.graph import keep
from sparkdraft.kernels.native.library import c
from sparkdraft.kernels.turboquant.codebook import codebook
from sparkdraft.kernels.turboquant.layout import block_width, plane_bytes
from sparkdraft.kernels.turboquant.store import CodedLayer, RecordLayout
from sparkdraft.kernels.turboquant.vectors import signs

_Floats = ctypes.c_float * 32
LARGEST_DIM, LARGEST_BLOCK = 1024, 1 << 16  # of turboquant.h


class _Side(ctypes.Structure):
    """Mirrors 'Side' of turboquant.h."""

    _fields_ = tuple((name, c_int64) for name in ("bits", "low", "high", "scales", "levels", "thresholds"))


class Coded(ctypes.Structure):
    """Mirrors 'Coded' of turboquant.h."""

    _fields_ = (
        *((name, c_int64) for name in ("records", "record_bytes", "kv_heads", "block_size", "dim", "width")),
        *((name, _Side) for name in ("keys", "values")),
        *((name, c_int64) for name in ("turn", "centre", "pages", "page_of", "first", "recent")),
    )


class _Write(ctypes.Structure):
    """Mirrors 'Call' of turboquant.cpp."""

    _fields_ = tuple(
        (name, c_int64)
        for name in (
            "coded",
            "q",
            "q_row",
            "heads",
            "kv_heads",
            "k",
            "k_row",
            "v",
            "v_row",
            "slots",
            "rows",
            "num_slots",
        )
    )


# A capture may compute nothing in torch, so tables are made without it.


@cache
def _levels(width: int, bits: int) -> tuple[ctypes.Array[ctypes.c_float], ctypes.Array[ctypes.c_float]]:
    """Levels of a unit vector by code as it is kept, which is by its distance from the middle, and thresholds."""
    book, half = codebook(width, bits), 2 ** (bits - 1)
    kept = [*book.levels[half - 1 :: -1], *book.levels[half:]]
    levels, thresholds = ([number * width**-0.5 for number in numbers] for numbers in (kept, book.thresholds))
    return _Floats(*levels), _Floats(*thresholds)


@cache
def _turn(dim: int) -> ctypes.Array[ctypes.c_float]:
    """What a rotation multiplies by."""
    return (ctypes.c_float * dim)(*(sign * block_width(dim) ** -0.5 for sign in signs(dim)))


@cache
def _sides(layout: RecordLayout) -> tuple[_Side, _Side]:
    width, split = block_width(layout.dim), len(plane_bytes(layout.dim, layout.key_bits))
    *planes, key_scales, value_scales = layout.offsets
    parts = (layout.key_bits, planes[:split], key_scales), (layout.value_bits, planes[split:], value_scales)
    keys, values = (
        _Side(bits, places[0], places[-1], scales, *map(ctypes.addressof, _levels(width, bits)))
        for bits, places, scales in parts
    )
    return keys, values


def coded(layer: CodedLayer) -> Coded:
    layout, pages, (_, kv_heads, nbytes) = layer.layout, layer.pages, layer.records.shape
    assert pages is None or pages.dtype == torch.float32, "pages of a CPU are float32"
    assert layout.dim <= LARGEST_DIM and layout.block_size <= LARGEST_BLOCK, layout
    return Coded(
        *(layer.records.data_ptr(), nbytes, kv_heads, layout.block_size, layout.dim, block_width(layout.dim)),
        *(*_sides(layout), ctypes.addressof(_turn(layout.dim))),
        *(0 if part is None else part.data_ptr() for part in (layer.centre, pages, layer.page_of)),
        *(layer.first, layer.recent),
    )


def write(layer: CodedLayer, q: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Rotates queries in place, and writes keys and values: [rows, heads, dim] each, a row's heads together."""
    assert all(part.stride()[1:] == (layer.layout.dim, 1) for part in (q, k, v)), "heads are one after the other"
    of_layer, num_slots = coded(layer), len(layer.records) * layer.layout.block_size
    assert k.shape[1] in (0, of_layer.kv_heads), "no heads where nothing is written"
    call = _Write(
        *(ctypes.addressof(of_layer), q.data_ptr(), q.stride(0), q.shape[1], k.shape[1]),
        *(k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), slots.data_ptr(), len(slots), num_slots),
    )
    keep((of_layer, call))
    c.sd_tq_write(ctypes.addressof(call))
