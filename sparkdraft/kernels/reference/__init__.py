"""The operators of a transformer step in plain torch: the definition that every other kernel is tested against.

`native` (C++ for CPUs) and `cuda` (Triton) hold the same functions with the same signatures; a model is handed one of
the three modules and calls nothing else on tensors but its weights' `linear`. This one runs on any device and dtype,
and is the path that `--dtype float32` takes on a CPU. It favours clearness over speed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkdraft.kernels.ops import (
    CLAMPED_SLOPE,
    Activation,
    AttentionParams,
    AttentionView,
    Norm,
    Normed,
    RopeArgs,
    Routing,
)
from sparkdraft.kernels.reference.recurrent import causal_conv, delta_rule, find_states, gated_norm
from sparkdraft.kernels.reference.sampling import edit_logits, sample, sample_sure
from sparkdraft.kernels.reference.stepping import accept_drafts, cut_drafts, make_rows, pack_rows
from sparkdraft.kernels.reference.turboquant import tq_attention, tq_write
from sparkdraft.kernels.turboquant.store import CodedLayer
from sparkdraft.weights.linear import ExpertLinear, Linear, ToFloats, keep_float_experts, keep_floats
from sparkdraft.weights.quant.stored import Stored

NAME = "reference"
Graph = compiler = None


keep_matrix, keep_experts = keep_floats, keep_float_experts  # whatever the file holds
keep_float_matrix = keep_floats  # where floats are asked for, or `keep_matrix` had no form


def keep_table(part: Stored, floats: ToFloats) -> Stored:
    """A matrix as `embed` looks rows up in it."""
    return floats(part)


def embed(ids: Tensor, table: Stored, scale: float = 1.0) -> Tensor:  # int32 [rows] -> [rows, hidden]
    """Rows by id, times 'scale'. Rows of integers stay integers until they are looked up."""
    rows = table[ids.long()] if isinstance(table, Tensor) else table.take(ids).dequantize()
    return rows if scale == 1 else rows * scale


def store_aux(residual: Tensor, aux: Tensor, index: int, positions: Tensor) -> None:
    if aux.dim() == 3:
        aux[:, index] = residual
    else:  # rings
        aux[torch.arange(len(residual), device=aux.device), positions.long() % aux.shape[1], index] = residual


def concat(left: Tensor, right: Tensor) -> Tensor:  # [rows, a] and [rows, b] -> [rows, a + b]
    return torch.cat((left, right), dim=1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [rows, dim] -> [rows, dim]
    x32 = x.float()
    scaled = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype)


def qk_norm_rope(
    qkv: Tensor,  # [rows, projected heads * head_dim], changed in place
    args: RopeArgs,
) -> None:
    """Queries and keys are normed, where they have norms, and rotated; what else is in qkv stays as it is."""
    heads = qkv.view(qkv.shape[0], args.projected_heads, -1)
    half, keys = args.table.shape[1] // 2, args.num_heads + args.num_kv_heads
    cos, sin = args.table[args.positions.long()].unsqueeze(1).split(half, dim=-1)  # [rows, 1, half]
    for part, norm in ((heads[:, : args.num_heads], args.q_norm), (heads[:, args.num_heads : keys], args.k_norm)):
        x = part.float() if norm is None else rms_norm(part, norm, args.eps).float()
        a, b = x[..., :half], x[..., half : 2 * half]
        part.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]), dim=-1))


def unit_rms(x: Tensor, eps: float) -> Tensor:  # [..., dim]
    """An RMS norm without a gain."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def gated(gate_up: Tensor, activation: Activation) -> Tensor:  # [rows, 2 * inter] -> [rows, inter]
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation.kind == "silu":
        out = F.silu(gate) * up
    elif activation.kind == "gelu_tanh":
        out = F.gelu(gate, approximate="tanh") * up
    else:
        assert activation.kind == "clamped_swiglu", activation
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        out = (up + 1) * gate * torch.sigmoid(CLAMPED_SLOPE * gate)
    return out.to(gate_up.dtype)


def linear(x: Tensor, matrix: Linear) -> Tensor:  # [rows, in] -> [rows, out]
    return matrix.linear(x)


def sigmoid_gate(x: Tensor, gate: Tensor) -> None:  # [rows, width] twice, or one gate per row: [rows, 1]
    """x *= sigmoid(gate), in place, in float32 until it is written. Both may be columns of wider tensors."""
    x.copy_(x.float() * torch.sigmoid(gate.float()))


def norm_linear(normed: Normed, matrix: Linear) -> Tensor:  # [rows, in] -> [rows, out]
    return matrix.linear(rms_norm(normed.x, *normed.norm))


def norm_gated(normed: Normed, gate_up: Linear, activation: Activation) -> Tensor:  # [rows, in] -> [rows, inter]
    return gated(norm_linear(normed, gate_up), activation)


def norm_logits(normed: Normed, head: Linear, softcap: float = 0.0) -> Tensor:  # float32 [rows, vocabulary]
    """softcap: no logit is larger than this, by a tanh that keeps their order; 0: as they are."""
    logits = head.linear_float32(rms_norm(normed.x, *normed.norm))
    return torch.tanh(logits / softcap) * softcap if softcap else logits


def norm_argmax(normed: Normed, head: Linear, softcap: float = 0.0) -> Tensor:  # int64 [rows]; the lowest wins a tie
    """softcap: as in `norm_logits`. It keeps the order of logits, but its rounding makes ties."""
    return norm_logits(normed, head, softcap).argmax(-1)


def norm_route(
    normed: Normed,
    router: Linear,
    top_k: int,
    renormalise: bool,
    scale: Tensor | None = None,
    live: Tensor | None = None,
) -> Routing:
    """Send each row to the 'top_k' experts with the largest logits, which the router makes in float32.

    renormalise: weights are shares among the chosen, else among all. scale: float32 [experts], multiplies an expert's
    weight after that. live: int32 [1], the number of rows that are sent anywhere, the first ones; None: all. torch.topk
    promises no order of equal logits, so a stable sort stands here.
    """
    logits = norm_logits(normed, router)
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = logits.gather(1, order).softmax(-1) if renormalise else logits.softmax(-1).gather(1, order)
    weights = weights if scale is None else weights * scale[order]
    if live is None:
        return Routing(order.int(), weights)
    is_live = (torch.arange(len(order), device=order.device) < live).unsqueeze(1)
    return Routing(order.where(is_live, -1).int(), weights.where(is_live, 0.0))


def norm_experts(
    normed: Normed,  # [rows, hidden]
    routing: Routing,
    gate_up: ExpertLinear,  # [2 * inter, hidden] each
    down: ExpertLinear,  # [hidden, inter] each
    activation: Activation,
) -> Tensor:  # [rows, hidden]: the weighted sum of the chosen experts' results
    """A row's sum is made in float32 and in the order of its own choice, so it depends on that row alone."""
    x = rms_norm(normed.x, *normed.norm)
    parts = torch.zeros(*routing.ids.shape, x.shape[1], dtype=torch.float32, device=x.device)
    for number in routing.ids[routing.ids >= 0].unique().tolist():
        row, rank = (routing.ids == number).nonzero(as_tuple=True)
        inside = gated(gate_up.expert(number).linear(x[row]), activation)
        parts[row, rank] = down.expert(number).linear(inside).float()
    total = torch.zeros_like(x, dtype=torch.float32)
    for rank in range(parts.shape[1]):
        total += routing.weights[:, rank : rank + 1] * parts[:, rank]
    return total.to(x.dtype)


def add_experts(
    normed: Normed, routing: Routing, gate_up: ExpertLinear, down: ExpertLinear, activation: Activation, then: Norm
) -> Normed:
    """x += `norm_experts`, in place; gives it as the norm that reads it next wants it."""
    normed.x.add_(norm_experts(normed, routing, gate_up, down, activation))
    return Normed(normed.x, then)


def add_linear(residual: Tensor, x: Tensor, matrix: Linear, then: Norm) -> Normed:
    """residual [rows, out] += x W^T, in place; gives it as the norm that reads it next wants it."""
    matrix.add_to(residual, x)
    return Normed(residual, then)


def add_normed(residual: Tensor, y: Tensor, norm: Norm, then: Norm, scale: float = 1.0) -> Normed:
    """residual [rows, dim] = (residual + norm(y)) * scale, in place; then as in `add_linear`."""
    residual += rms_norm(y, *norm)
    if scale != 1:
        residual *= scale
    return Normed(residual, then)


def kv_write(
    k: Tensor,  # [rows, kv_heads, head_dim], a strided view of qkv
    v: Tensor,
    k_cache: Tensor,  # [blocks, kv_heads, block_size, head_dim], changed in place
    v_cache: Tensor,
    slots: Tensor,  # int32 [rows]: block * block_size + offset; a negative slot is not written
) -> None:
    block_size = k_cache.shape[2]
    keep = (slots >= 0).nonzero().squeeze(1)
    slots = slots[keep].long()
    block, offset = slots // block_size, slots % block_size
    k_cache[block, :, offset] = k[keep].to(k_cache.dtype)
    v_cache[block, :, offset] = v[keep].to(v_cache.dtype)


def rope_write(
    qkv: Tensor,  # [rows, projected heads * head_dim]; only its queries are defined afterwards
    args: RopeArgs,
    k_cache: Tensor,  # [blocks, kv_heads, block_size, head_dim], changed in place
    v_cache: Tensor,
    slots: Tensor,  # int32 [rows]: block * block_size + offset; a negative slot is not written
) -> None:
    """All that stands between a layer's qkv and its attention: `qk_norm_rope`, then `kv_write` of its K and V."""
    _, k, v = make_qkv(qkv, args)
    kv_write(k, v, k_cache, v_cache, slots)


def make_qkv(qkv: Tensor, args: RopeArgs) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [rows, heads, head_dim] of a projection, which is changed in place."""
    heads = qkv.view(qkv.shape[0], args.projected_heads, -1)
    q, k = heads[:, : args.num_heads], heads[:, args.num_heads : args.num_heads + args.num_kv_heads]
    v = k if args.values == "keys" else heads[:, args.num_heads + args.num_kv_heads :]
    if args.values != "given":
        v = unit_rms(v, args.eps)  # before the keys are normed and rotated
    qk_norm_rope(qkv, args)
    return q, k, v


def rope_queries(
    q: Tensor,  # [rows, heads * head_dim], changed in place
    args: RopeArgs,  # with 0 key and value heads
) -> None:
    """For a layer that reads another's keys and values: norm and RoPE of its queries, and nothing is kept."""
    qk_norm_rope(q, args)


def tq_rope_write(
    layer: CodedLayer,  # changed in place
    qkv: Tensor,  # [rows, projected heads * head_dim]; only its queries are defined afterwards
    args: RopeArgs,
    slots: Tensor,  # int32 [rows]: block * block_size + offset; a negative slot is not written
) -> None:
    """The same for a compressed cache: `qk_norm_rope`, then `tq_write`, which rotates the queries too. With 0 key and
    value heads it is the compressed cache's `rope_queries`, and nothing is written."""
    q, k, v = make_qkv(qkv, args)
    tq_write(layer, k, v, slots, q)


def paged_attention(
    q: Tensor,  # [rows, heads, head_dim], a strided view of qkv
    k_cache: Tensor,  # [blocks, kv_heads, block_size, head_dim]
    v_cache: Tensor,
    view: AttentionView,
    params: AttentionParams,
    same_bits_up_to: int = 0,  # batches of up to this many rows per sequence give a row the same bits; ignored here
) -> Tensor:  # [rows, heads * head_dim]
    rows, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    out = torch.zeros(rows, num_heads, head_dim, dtype=q.dtype, device=q.device)
    starts, contexts = view.query_start.tolist(), view.context_len.tolist()
    for s, context in enumerate(contexts):
        first, last = starts[s], starts[s + 1]
        if first == last:
            continue
        blocks = view.block_tables[s, : -(-context // block_size)].long()
        k = k_cache[blocks].transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, :context]
        v = v_cache[blocks].transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, :context]
        position = torch.arange(context - (last - first), context, device=q.device).unsqueeze(1)
        key = torch.arange(context, device=q.device)
        seen = key <= position if params.causal else torch.ones_like(key <= position)
        if params.window:
            seen &= (position - key).abs() < params.window
        grouped = q[first:last].reshape(last - first, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        scores = torch.matmul(grouped.float(), k.float().unsqueeze(1).transpose(-1, -2)) * params.scale
        scores = scores.masked_fill(~seen, float("-inf"))
        if params.sinks is not None:  # a key that every row sees and that has no value
            sink = params.sinks.float().view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
            weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        mixed = torch.matmul(weights, v.float().unsqueeze(1))  # [kv_heads, group, query, dim]
        out[first:last] = mixed.permute(2, 0, 1, 3).reshape(last - first, num_heads, head_dim)
    return out.flatten(1)


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


def find_pages(
    page_of: Tensor,  # int32 [blocks]; -1: the block has none
    slots: Tensor,  # int32 [rows]: block * block_size + offset, or negative
    tables: Tensor,  # int32 [seqs, max_blocks]
    block_size: int,
    page_slots: Tensor,  # int32 [rows], written: the same places in pages, -1 where there is none
    page_tables: Tensor,  # int32 [seqs, max_blocks], written
    missing: int,  # stands in the tables for a block without a page, whose rows may be read but count for nothing
) -> None:
    """Slots and tables of blocks as slots and tables of the pages that belong to them."""
    page = page_of[(slots.clamp(min=0) // block_size).long()]
    page_slots.copy_((page * block_size + slots % block_size).where((slots >= 0) & (page >= 0), -1))
    page = page_of[tables.long()]
    page_tables.copy_(page.where(page >= 0, missing))
