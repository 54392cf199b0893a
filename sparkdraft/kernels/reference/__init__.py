"""The operators of kernels/ops.py in plain torch: the definition that other kernels are tested against.

It runs on any device and dtype, and `--dtype float32` on a CPU runs it. It favours clearness over speed.
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
from sparkdraft.kernels.reference.sampling import count_ids, edit_logits, forbid_bits, sample, sample_sure
from sparkdraft.kernels.reference.stepping import accept_drafts, admit_drafts, make_rows, pack_rows, sampled_rows
from sparkdraft.kernels.reference.text import append_text, match_text
from sparkdraft.kernels.reference.turboquant import tq_attention, tq_write
from sparkdraft.kernels.turboquant.store import CodedLayer
from sparkdraft.weights.linear import ExpertLinear, Linear, ToFloats, keep_float_experts, keep_floats
from sparkdraft.weights.quant.stored import Stored

NAME = "reference"
Graph = compiler = None


keep_matrix = keep_float_matrix = keep_floats  # whatever the file holds
keep_experts = keep_float_experts


def keep_table(part: Stored, floats: ToFloats) -> Stored:
    return floats(part)


def embed(ids: Tensor, table: Stored, scale: float = 1.0) -> Tensor:  # int32 [rows] -> [rows, hidden]
    """Rows of integers stay integers until they are looked up."""
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


def qk_norm_rope(qkv: Tensor, args: RopeArgs) -> None:
    """Norms, where there are any, and rotates queries and keys in place."""
    heads = qkv.view(qkv.shape[0], args.projected_heads, -1)
    half, keys = args.table.shape[1] // 2, args.num_heads + args.num_kv_heads
    cos, sin = args.table[args.positions.long()].unsqueeze(1).split(half, dim=-1)  # [rows, 1, half]
    for part, norm in ((heads[:, : args.num_heads], args.q_norm), (heads[:, args.num_heads : keys], args.k_norm)):
        x = part.float() if norm is None else rms_norm(part, norm, args.eps).float()
        a, b = x[..., :half], x[..., half : 2 * half]
        part.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]), dim=-1))


def unit_rms(x: Tensor, eps: float) -> Tensor:  # [..., dim]
    """An RMS norm without a gain. x: [..., dim]."""
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
    x.copy_(x.float() * torch.sigmoid(gate.float()))


def norm_linear(normed: Normed, matrix: Linear) -> Tensor:  # [rows, in] -> [rows, out]
    return matrix.linear(normed.applied(rms_norm))


def norm_gated(normed: Normed, gate_up: Linear, activation: Activation) -> Tensor:  # [rows, in] -> [rows, inter]
    return gated(norm_linear(normed, gate_up), activation)


def norm_logits(normed: Normed, head: Linear, softcap: float = 0.0) -> Tensor:  # float32 [rows, vocabulary]
    logits = head.linear_float32(normed.applied(rms_norm))
    return torch.tanh(logits / softcap) * softcap if softcap else logits


def norm_argmax(normed: Normed, head: Linear, softcap: float = 0.0) -> Tensor:  # int64 [rows]; the lowest wins a tie
    return norm_logits(normed, head, softcap).argmax(-1)


def norm_route(
    normed: Normed,
    router: Linear,
    top_k: int,
    renormalise: bool,
    scale: Tensor | None = None,
    live: Tensor | None = None,
) -> Routing:
    """A stable sort, because torch.topk promises no order of equal logits."""
    logits = norm_logits(normed, router)
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = logits.gather(1, order).softmax(-1) if renormalise else logits.softmax(-1).gather(1, order)
    weights = weights if scale is None else weights * scale[order]
    if live is None:
        return Routing(order.int(), weights)
    is_live = (torch.arange(len(order), device=order.device) < live).unsqueeze(1)
    return Routing(order.where(is_live, -1).int(), weights.where(is_live, 0.0))


def norm_experts(
    normed: Normed, routing: Routing, gate_up: ExpertLinear, down: ExpertLinear, activation: Activation
) -> Tensor:
    x = normed.applied(rms_norm)
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
    normed.x.add_(norm_experts(normed, routing, gate_up, down, activation))
    return Normed(normed.x, then)


def add_linear(residual: Tensor, x: Tensor, matrix: Linear, then: Norm) -> Normed:
    matrix.add_to(residual, x)
    return Normed(residual, then)


def add_normed(residual: Tensor, y: Tensor, norm: Norm, then: Norm, scale: float = 1.0) -> Normed:
    residual += rms_norm(y, *norm)
    if scale != 1:
        residual *= scale
    return Normed(residual, then)


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    block_size = k_cache.shape[2]
    keep = (slots >= 0).nonzero().squeeze(1)
    slots = slots[keep].long()
    block, offset = slots // block_size, slots % block_size
    k_cache[block, :, offset] = k[keep].to(k_cache.dtype)
    v_cache[block, :, offset] = v[keep].to(v_cache.dtype)


def rope_write(qkv: Tensor, args: RopeArgs, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
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


def rope_queries(q: Tensor, args: RopeArgs) -> None:
    qk_norm_rope(q, args)


def tq_rope_write(layer: CodedLayer, qkv: Tensor, args: RopeArgs, slots: Tensor) -> None:
    q, k, v = make_qkv(qkv, args)
    tq_write(layer, k, v, slots, q)


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, view: AttentionView, params: AttentionParams, same_bits_up_to: int = 0
) -> Tensor:
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
        if params.sinks is not None:
            sink = params.sinks.float().view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
            weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        mixed = torch.matmul(weights, v.float().unsqueeze(1))  # [kv_heads, group, query, dim]
        out[first:last] = mixed.permute(2, 0, 1, 3).reshape(last - first, num_heads, head_dim)
    return out.flatten(1)


def find_pages(
    page_of: Tensor,
    slots: Tensor,
    tables: Tensor,
    block_size: int,
    page_slots: Tensor,
    page_tables: Tensor,
    missing: int,
) -> None:
    page = page_of[(slots.clamp(min=0) // block_size).long()]
    page_slots.copy_((page * block_size + slots % block_size).where((slots >= 0) & (page >= 0), -1))
    page = page_of[tables.long()]
    page_tables.copy_(page.where(page >= 0, missing))
