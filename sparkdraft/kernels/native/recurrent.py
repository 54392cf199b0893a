"""The operators of recurrent layers (kernels/reference/recurrent.py) by recurrent.cpp, row by row."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64

from torch import Tensor

from sparkdraft.kernels.native.graph import empty, keep
from sparkdraft.kernels.native.library import c
from sparkdraft.kernels.ops import FOLD, AttentionView, DeltaParams, RecurrentState, record_ring

MOST_KEY_DIM, MOST_WIDTH = 256, 8  # as in recurrent.cpp, whose strips and taps have a fixed place
ALIGNED = 8  # channels and dimensions come in multiples of this: no vector has a rest


class _Conv(ctypes.Structure):
    """Mirrors 'Conv' of recurrent.cpp."""

    _fields_ = [
        *((name, c_int64) for name in ("x", "x_row", "weight", "inputs")),
        *((name, c_int64) for name in ("slots", "query_start", "context_len")),
        *((name, c_int64) for name in ("seqs", "channels", "width", "ring", "out")),
    ]


class _Rule(ctypes.Structure):
    """Mirrors 'Rule' of recurrent.cpp."""

    _fields_ = [
        *((name, c_int64) for name in ("qkv", "qkv_row", "decay_beta", "decay_beta_row")),
        *((name, c_int64) for name in ("state", "base", "keys", "updates", "decays")),
        *((name, c_int64) for name in ("slots", "query_start", "context_len")),
        *((name, c_int64) for name in ("seqs", "ring", "most_rows", "fold")),
        *((name, c_int64) for name in ("key_heads", "value_heads", "key_dim", "value_dim", "rate", "bias")),
        *(("eps", c_float), ("out", c_int64)),
    ]


def find_states(slot_of: Tensor, view: AttentionView, block_size: int, out: Tensor) -> None:
    tables = view.block_tables
    assert tables.is_contiguous() and tables.shape[0] == out.shape[0], (tables.shape, tables.stride(), out.shape)
    places = (slot_of.data_ptr(), *_batch(view), tables.data_ptr(), out.data_ptr())
    c.sd_find_states(*places, *tables.shape, block_size)


def causal_conv(x: Tensor, weight: Tensor, memory: RecurrentState, slots: Tensor, view: AttentionView) -> Tensor:
    rows, channels = x.shape
    width, inputs = weight.shape[1], memory.inputs
    assert weight.is_contiguous() and inputs.is_contiguous(), (weight.stride(), inputs.stride())
    assert channels % ALIGNED == 0 and width <= MOST_WIDTH, (channels, width)
    out = empty(rows, channels)
    call = _Conv(
        *(x.data_ptr(), x.stride(0), weight.data_ptr(), inputs.data_ptr()),
        *(slots.data_ptr(), *_batch(view)),
        *(slots.shape[0], channels, width, inputs.shape[1], out.data_ptr()),
    )
    keep(call)
    c.sd_causal_conv(ctypes.addressof(call))
    return out


def delta_rule(
    qkv: Tensor,
    decay_beta: Tensor,
    memory: RecurrentState,
    slots: Tensor,
    view: AttentionView,
    params: DeltaParams,
) -> Tensor:
    assert params.key_dim <= MOST_KEY_DIM and params.value_dim % ALIGNED == 0, (params.key_dim, params.value_dim)
    assert memory.ring >= record_ring(memory.most_rows), (memory.ring, memory.most_rows)
    kept = (memory.state, memory.base, memory.keys, memory.updates, memory.decays)
    assert all(each.is_contiguous() for each in kept), [each.stride() for each in kept]
    out = empty(qkv.shape[0], params.num_value_heads * params.value_dim)
    call = _Rule(
        *(qkv.data_ptr(), qkv.stride(0), decay_beta.data_ptr(), decay_beta.stride(0)),
        *(each.data_ptr() for each in kept),
        *(slots.data_ptr(), *_batch(view)),
        *(slots.shape[0], memory.ring, memory.most_rows, FOLD),
        *(params.num_key_heads, params.num_value_heads, params.key_dim, params.value_dim),
        *(params.rate.data_ptr(), params.bias.data_ptr(), params.eps, out.data_ptr()),
    )
    keep(call)
    c.sd_delta_rule(ctypes.addressof(call))
    return out


def gated_norm(o: Tensor, gate: Tensor, gain: Tensor, eps: float) -> Tensor:  # [rows, heads * dim], gate alike
    (rows, width), dim = o.shape, gain.shape[0]
    assert dim % 4 == 0, dim
    y = empty(rows, width)
    places = (o.data_ptr(), o.stride(0), gate.data_ptr(), gate.stride(0), gain.data_ptr(), y.data_ptr())
    c.sd_gated_norm(*places, rows, width // dim, dim, eps)
    return y


def sigmoid_gate(x: Tensor, gate: Tensor) -> None:  # [rows, width] twice, or one gate per row: [rows, 1]
    rows, width = x.shape
    assert width % 4 == 0 and x.stride(1) == 1 and gate.shape[1] in (1, width), (x.shape, x.stride(), gate.shape)
    step = 0 if gate.shape[1] == 1 else 1
    c.sd_sigmoid_gate(x.data_ptr(), x.stride(0), gate.data_ptr(), gate.stride(0), step, rows, width)


def _batch(view: AttentionView) -> tuple[int, int]:
    return view.query_start.data_ptr(), view.context_len.data_ptr()
