"""The operators of a transformer step in plain torch: the definition that every other kernel is tested against.

`native` (C++ for CPUs) and `cuda` (Triton) hold the same functions with the same signatures; a model is handed one of
the three modules and calls nothing else on tensors but its weights' `linear`. This one runs on any device and dtype,
and is the path that `--dtype float32` takes on a CPU. It favours clearness over speed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkdraft.kernels.dice import draw
from sparkdraft.kernels.view import AttentionView
from sparkdraft.weights.quant.group import GroupQuant

NAME = "reference"
__all__ = [
    "draw",
    "embed",
    "group_linear",
    "kv_write",
    "paged_attention",
    "qk_norm_rope",
    "rms_norm",
    "silu_mul",
    "tap",
]


def embed(ids: Tensor, table: Tensor | GroupQuant) -> Tensor:  # int32 [rows] -> [rows, hidden]
    """Rows by id; a gather, where the table is of floats. Integer rows stay integers until they are looked up."""
    if isinstance(table, Tensor):
        return table[ids.long()]
    return table.take(ids).dequantize()


def tap(residual: Tensor, taps: Tensor, index: int) -> None:
    """taps[:, index] = residual, of [rows, hidden]: what a drafter will read of this layer."""
    taps[:, index] = residual


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [rows, dim] -> [rows, dim]
    x32 = x.float()
    scaled = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype)


def qk_norm_rope(
    qkv: Tensor,  # [rows, (heads + 2 * kv_heads) * head_dim], changed in place
    positions: Tensor,  # int32 [rows]
    table: Tensor,  # float32 [max_position, rotary_dim]: cosines, then sines
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None,  # [head_dim]: RMS norm of each head before it is rotated (Qwen3)
    k_norm: Tensor | None,
    eps: float,
) -> None:
    rows = qkv.shape[0]
    head_dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    heads = qkv.view(rows, -1, head_dim)
    half = table.shape[1] // 2
    cos, sin = table[positions.long()].unsqueeze(1).split(half, dim=-1)  # [rows, 1, half]
    for part, norm in (
        (heads[:, :num_heads], q_norm),
        (heads[:, num_heads : num_heads + num_kv_heads], k_norm),
    ):
        x = part.float() if norm is None else rms_norm(part, norm, eps).float()
        a, b = x[..., :half], x[..., half : 2 * half]
        part.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]), dim=-1))


def silu_mul(gate_up: Tensor) -> Tensor:  # [rows, 2 * inter] -> [rows, inter]
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(gate_up.dtype)


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


def paged_attention(
    q: Tensor,  # [rows, heads, head_dim], a strided view of qkv
    k_cache: Tensor,  # [blocks, kv_heads, block_size, head_dim]
    v_cache: Tensor,
    view: AttentionView,
    scale: float,
    causal: bool = True,
    window: int = 0,  # 0: all keys; else a row sees keys nearer than this
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
        seen = key <= position if causal else torch.ones_like(key <= position)
        if window:
            seen &= (position - key).abs() < window
        grouped = q[first:last].reshape(last - first, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        scores = torch.matmul(grouped.float(), k.float().unsqueeze(1).transpose(-1, -2)) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        mixed = torch.matmul(weights, v.float().unsqueeze(1))  # [kv_heads, group, query, dim]
        out[first:last] = mixed.permute(2, 0, 1, 3).reshape(last - first, num_heads, head_dim)
    return out.flatten(1)


def group_linear(x: Tensor, q: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """Integer matmul of weights/quant/group.py: each row of x is rounded to int8 by itself, in the same groups of 32.

    A row's result depends on that row alone, whatever else is in the batch: drafted and plain decoding agree in every
    bit because of it. Shapes as in GroupQuant: q [out, groups, 16 or 32] -> y float32 [rows, out].
    """
    integers = q.float() if q.dtype == torch.int8 else torch.cat((q & 15, q >> 4), dim=-1).float()
    rows, groups = x.shape[0], q.shape[1]
    xg = x.float().view(rows, groups, -1)
    peak = xg.abs().amax(-1, keepdim=True)  # [rows, groups, 1]
    xq = torch.round(xg * torch.where(peak > 0, 127 / peak, 0.0))
    step = (peak / 127).squeeze(-1)
    dots = torch.einsum("rgk,ogk->rog", xq, integers)  # exact: below 2**24
    y = (dots * step.unsqueeze(1) * scale.float()).sum(-1)
    if offset is not None:
        y += (xq.sum(-1) * step) @ offset.float().t()
    return y
