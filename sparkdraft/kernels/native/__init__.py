"""The operators of `ops.Ops` for CPUs, in C++. Its matmuls are of integers (packed.py, experts.py).

Tensors are float32. A row has the same bits whatever rows are beside it and however many threads run. The C++ beside
this file is compiled on first use (`build.py`); where that cannot be, `unavailable_reason()` says why.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64

import torch
from torch import Tensor

from sparkdraft.kernels import reference
from sparkdraft.kernels.native import turboquant
from sparkdraft.kernels.native.experts import (
    ACTIVATIONS,
    choose_experts,
    keep_experts,
    keep_float_experts,
    write_experts,
)
from sparkdraft.kernels.native.graph import Graph, empty, keep
from sparkdraft.kernels.native.leveled import keep_matrix, keep_table
from sparkdraft.kernels.native.library import c, set_threads, unavailable_reason
from sparkdraft.kernels.native.packed import FloatLinear, PackedLinear, keep_float_matrix, place
from sparkdraft.kernels.native.recurrent import causal_conv, delta_rule, find_states, gated_norm, sigmoid_gate
from sparkdraft.kernels.native.sampling import edit_logits, forbid_bits, sample, sample_sure
from sparkdraft.kernels.ops import Activation, AttentionParams, AttentionView, Norm, Normed, RopeArgs, Routing
from sparkdraft.kernels.reference import (
    accept_drafts,
    add_linear,
    admit_drafts,
    append_text,
    count_ids,
    linear,
    match_text,
    pack_rows,
    sampled_rows,
)
from sparkdraft.kernels.turboquant.store import CodedLayer
from sparkdraft.weights.linear import ExpertLinear, Linear
from sparkdraft.weights.quant.stored import GROUP, GroupQuant, Stored

NAME = "native"
compiler = None


def embed(ids: Tensor, table: Stored, scale: float = 1.0) -> Tensor:  # int32 [rows] -> [rows, hidden]
    if isinstance(table, Tensor):
        y = empty(ids.shape[0], table.shape[1])
        _copy_rows(table, ids, y, scale)
        return y
    assert isinstance(table, GroupQuant), "as `keep_table` leaves it"
    rows, groups = ids.shape[0], table.q.shape[1]
    y = empty(rows, groups * GROUP)
    places = [x for t in (table.q, table.scale, table.offset) for x in place(t)]
    c.sd_embed(ids.data_ptr(), rows, table.bits, *places, groups, y.data_ptr(), float(scale))
    return y


def store_aux(residual: Tensor, aux: Tensor, index: int, positions: Tensor) -> None:
    if aux.dim() == 4:  # rings, which only a GPU's engine has; tests use them here
        reference.store_aux(residual, aux, index, positions)
    else:
        _copy_rows(residual, None, aux[:, index])


def _copy_rows(source: Tensor, ids: Tensor | None, target: Tensor, scale: float = 1.0) -> None:
    """Row i of the target is row ids[i] of the source, or row i without ids, times 'scale'."""
    rows, width = target.shape
    places = (source.data_ptr(), source.stride(0), target.data_ptr(), target.stride(0))
    c.sd_copy_rows(*places, None if ids is None else ids.data_ptr(), rows, width, float(scale))


def concat(left: Tensor, right: Tensor) -> Tensor:  # [rows, a] and [rows, b] -> [rows, a + b]
    y, middle = empty(left.shape[0], left.shape[1] + right.shape[1]), left.shape[1]
    _copy_rows(left, None, y[:, :middle])
    _copy_rows(right, None, y[:, middle:])
    return y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [rows, dim] -> [rows, dim]
    rows, dim = x.shape
    y = empty(rows, dim)
    c.sd_rms_norm(x.data_ptr(), x.stride(0), weight.data_ptr(), y.data_ptr(), rows, dim, eps)
    return y


def qk_norm_rope(qkv: Tensor, args: RopeArgs) -> None:
    rows, width = qkv.shape
    c.sd_qk_norm_rope(
        *(qkv.data_ptr(), qkv.stride(0), args.positions.data_ptr(), args.table.data_ptr(), args.table.shape[1]),
        *(rows, args.num_heads, args.num_kv_heads, width // args.projected_heads),
        None if args.q_norm is None else args.q_norm.data_ptr(),
        None if args.k_norm is None else args.k_norm.data_ptr(),
        args.eps,
    )


def unit_rms(x: Tensor, eps: float) -> Tensor:  # [rows, heads, head_dim], a strided view of qkv
    rows, heads, head_dim = x.shape
    y = empty(rows, heads * head_dim)
    c.sd_unit_rms(x.data_ptr(), x.stride(0), x.stride(1), y.data_ptr(), rows, heads, head_dim, eps)
    return y.view(rows, heads, head_dim)


def gated(gate_up: Tensor, activation: Activation) -> Tensor:  # [rows, 2 * inter] -> [rows, inter]
    rows, width = gate_up.shape
    y = empty(rows, width // 2)
    kind, limit = ACTIVATIONS.index(activation.kind), float(activation.limit)
    c.sd_gated(gate_up.data_ptr(), gate_up.stride(0), y.data_ptr(), rows, width // 2, kind, limit)
    return y


def norm_linear(normed: Normed, matrix: Linear) -> Tensor:  # [rows, in] -> [rows, out]
    return matrix.linear(normed.applied(rms_norm))


def norm_gated(normed: Normed, gate_up: Linear, activation: Activation) -> Tensor:  # [rows, in] -> [rows, inter]
    return gated(norm_linear(normed, gate_up), activation)


def norm_logits(normed: Normed, head: Linear, softcap: float = 0.0) -> Tensor:  # float32 [rows, vocabulary]
    logits = norm_linear(normed, head)
    if softcap:
        c.sd_softcap(logits.data_ptr(), logits.shape[0] * logits.shape[1], float(softcap))
    return logits


def norm_argmax(normed: Normed, head: Linear, softcap: float = 0.0) -> Tensor:  # int64 [rows]; the lowest wins a tie
    """By numpy, which takes a tenth of torch's time; not in compiled steps."""
    return torch.from_numpy(norm_logits(normed, head, softcap).numpy().argmax(-1))


def add_normed(residual: Tensor, y: Tensor, norm: Norm, then: Norm, scale: float = 1.0) -> Normed:
    rows, dim = residual.shape
    places = (residual.data_ptr(), residual.stride(0), y.data_ptr(), y.stride(0), norm.gain.data_ptr())
    c.sd_add_normed(*places, rows, dim, norm.eps, float(scale))
    return Normed(residual, then)


def norm_route(
    normed: Normed,
    router: Linear,
    top_k: int,
    renormalise: bool,
    scale: Tensor | None = None,
    live: Tensor | None = None,
) -> Routing:
    routing = Routing(*choose_experts(norm_linear(normed, router), top_k, renormalise, scale))
    if live is not None:  # only a GPU's steps are padded; here tests do it
        routing.ids[int(live) :] = -1
        routing.weights[int(live) :] = 0
    return routing


def norm_experts(
    normed: Normed, routing: Routing, gate_up: ExpertLinear, down: ExpertLinear, activation: Activation
) -> Tensor:
    y = empty(*normed.x.shape)
    write_experts(y, normed.applied(rms_norm), *routing, gate_up, down, activation, add=False)
    return y


def add_experts(
    normed: Normed, routing: Routing, gate_up: ExpertLinear, down: ExpertLinear, activation: Activation, then: Norm
) -> Normed:
    write_experts(normed.x, normed.applied(rms_norm), *routing, gate_up, down, activation, add=True)
    return Normed(normed.x, then)


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    _, kv_heads, block_size, head_dim = k_cache.shape
    (k_row, k_head, _), (v_row, v_head, _) = k.stride(), v.stride()
    c.sd_kv_write(
        *(k.data_ptr(), k_row, k_head, v.data_ptr(), v_row, v_head, k_cache.data_ptr(), v_cache.data_ptr()),
        *(slots.data_ptr(), slots.shape[0], kv_heads, block_size, head_dim),
    )


def rope_write(qkv: Tensor, args: RopeArgs, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    _, k, v = _roped(qkv, args)
    kv_write(k, v, k_cache, v_cache, slots)


def tq_rope_write(layer: CodedLayer, qkv: Tensor, args: RopeArgs, slots: Tensor) -> None:
    turboquant.write(layer, *_roped(qkv, args), slots)


def _roped(qkv: Tensor, args: RopeArgs) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, [rows, heads, dim] each."""
    heads = qkv.view(qkv.shape[0], args.projected_heads, -1)
    keys = args.num_heads + args.num_kv_heads
    k = heads[:, args.num_heads : keys]
    v = k if args.values == "keys" else heads[:, keys:]
    if args.values != "given":
        v = unit_rms(v, args.eps)  # before the keys are normed and rotated
    qk_norm_rope(qkv, args)
    return heads[:, : args.num_heads], k, v


def rope_queries(q: Tensor, args: RopeArgs) -> None:
    qk_norm_rope(q, args)


def find_pages(
    page_of: Tensor,
    slots: Tensor,
    tables: Tensor,
    block_size: int,
    page_slots: Tensor,
    page_tables: Tensor,
    missing: int,
) -> None:
    places = (page_of.data_ptr(), slots.data_ptr(), tables.data_ptr(), page_slots.data_ptr(), page_tables.data_ptr())
    c.sd_find_pages(*places, slots.shape[0], tables.shape[0] * tables.shape[1], block_size, missing)


def make_rows(
    length: Tensor, tables: Tensor, token: Tensor, width: int, block_size: int, fill: int, first: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert tables.is_contiguous()
    seqs, max_blocks = tables.shape
    rows = seqs * width
    out = empty(1, 3 * rows + seqs).view(torch.int32)[0]
    c.sd_make_rows(
        *(length.data_ptr(), tables.data_ptr(), token.data_ptr(), None if first is None else first.data_ptr()),
        *(seqs, max_blocks, width, block_size, fill, out.data_ptr()),
    )
    return out[:rows], out[rows : 2 * rows], out[2 * rows : 3 * rows], out[3 * rows :]


class _AttentionCall(ctypes.Structure):
    """Mirrors 'Call' of attention.cpp."""

    _fields_ = [
        *((name, c_int64) for name in ("q", "q_row", "q_head", "k_cache", "v_cache")),
        *((name, c_int64) for name in ("query_start", "context_len", "block_tables", "seqs", "max_blocks")),
        *((name, c_int64) for name in ("heads", "kv_heads", "head_dim", "block_size")),
        *(("scale", c_float), ("causal", ctypes.c_bool), ("window", c_int64)),
        *((name, c_int64) for name in ("out", "sinks", "coded")),
    ]


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, view: AttentionView, params: AttentionParams, same_bits_up_to: int = 0
) -> Tensor:
    _, kv_heads, block_size, _ = k_cache.shape
    return _attend(q, (k_cache.data_ptr(), v_cache.data_ptr()), kv_heads, block_size, view, params)


def tq_attention(
    layer: CodedLayer, q: Tensor, view: AttentionView, params: AttentionParams, same_bits_up_to: int = 0
) -> Tensor:
    assert params.causal, "only drafters look ahead, and they keep an exact cache"
    assert params.sinks is None or layer.centre is None, "a centre shifts all scores, and would have to shift sinks"
    coded = turboquant.coded(layer)
    keep(coded)
    return _attend(q, (0, 0), coded.kv_heads, coded.block_size, view, params, ctypes.addressof(coded))


def _attend(
    q: Tensor,
    caches: tuple[int, int],
    kv_heads: int,
    block_size: int,
    view: AttentionView,
    params: AttentionParams,
    coded: int = 0,
) -> Tensor:
    rows, heads, head_dim = q.shape
    q_row, q_head, _ = q.stride()
    tables = view.block_tables
    out = empty(rows, heads * head_dim)
    call = _AttentionCall(
        *(q.data_ptr(), q_row, q_head, *caches),
        *(view.query_start.data_ptr(), view.context_len.data_ptr(), tables.data_ptr()),
        *(*tables.shape, heads, kv_heads, head_dim, block_size),
        *(params.scale, params.causal, params.window, out.data_ptr()),
        *(0 if params.sinks is None else params.sinks.data_ptr(), coded),
    )
    keep(call)
    c.sd_paged_attention(ctypes.addressof(call))
    return out
