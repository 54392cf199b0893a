"""Writing to a coded layer and attending to it, in plain torch: the definition that its kernels are tested against.

Both hang on a row's own position and slot alone, not on the rows it is run with. That a block has a page as long as
one of its keys must be read exactly, and that rejected rows are written anew before anybody reads them, is left to the
caller. It favours clearness over speed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparkdraft.kernels.turboquant.attention import Part, attend_codes, attend_exact, is_exact, merge
from sparkdraft.kernels.turboquant.store import CodedLayer, planes
from sparkdraft.kernels.turboquant.vectors import Encoded
from sparkdraft.kernels.view import AttentionView


def tq_write(
    layer: CodedLayer,  # changed in place
    k: Tensor,  # [rows, kv_heads, dim], a strided view of qkv
    v: Tensor,
    slots: Tensor,  # int32 [rows]: block * block_size + offset; a negative slot, or one past the end, is not written
    q: Tensor | None = None,  # [rows, heads, dim], rotated in place
) -> None:
    if q is not None:
        q.copy_(layer.keys.rotation.forward(q))
    num_blocks, size = len(layer.records), layer.layout.block_size
    kept = ((slots >= 0) & (slots < num_blocks * size)).nonzero().squeeze(1)
    slot = slots[kept].long()
    block, offset = slot // size, slot % size
    rotated = layer.keys.rotate(k[kept], layer.centre), layer.values.rotate(v[kept])
    for fmt, stored, y in zip((layer.keys, layer.values), planes(layer), rotated, strict=True):
        encoded = fmt.encode_rotated(y)
        stored.scale[block, :, offset] = encoded.scale
        for plane, codes in zip(stored.planes, encoded.planes, strict=True):
            plane[block, :, offset] = codes
    if layer.pages is not None and layer.exact_of is not None:
        page = layer.exact_of[block].long()
        has = page >= 0
        layer.pages[page[has], :, :, offset[has]] = torch.stack(rotated, dim=1)[has].to(layer.pages.dtype)


def tq_attention(
    layer: CodedLayer,
    q: Tensor,  # [rows, heads, dim], a strided view of qkv, as tq_write has rotated it
    view: AttentionView,
    scale: float,
    window: int = 0,  # 0: all keys up to a row's own; else those of them that are nearer than this
    most_query: int = 0,  # batches of up to so many rows a sequence give a row the same bits; here it changes nothing
) -> Tensor:  # [rows, heads * dim]
    num_kv_heads = layer.records.shape[1]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    starts, contexts = view.query_start.tolist(), view.context_len.tolist()
    for s, context in enumerate(contexts):
        rows = slice(starts[s], starts[s + 1])
        asked = layer.keys.rotation.inverse(q[rows])  # what follows is defined by queries as they were
        grouped = asked.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)  # [kv_heads, group, rows, dim]
        mixed = _attend(layer, grouped, view.block_tables[s].long(), context, scale, window)
        out[rows] = mixed.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
    return out.flatten(1)


def _attend(layer: CodedLayer, q: Tensor, blocks: Tensor, context: int, scale: float, window: int) -> Tensor:
    """One sequence: q [kv_heads, group, rows, dim], its last row at position context - 1 -> the same shape."""
    position = torch.arange(context - q.shape[2], context, device=q.device).unsqueeze(1)
    key = torch.arange(context, device=q.device)
    seen = key <= position
    if window:
        seen &= position - key < window
    exact = is_exact(position, key, layer.first, layer.recent)
    parts = [_attend_codes(layer, q, blocks, scale, seen & ~exact)]
    if layer.first or layer.recent:
        parts.append(_attend_pages(layer, q, blocks, scale, seen & exact))
    return merge(parts).out


def _attend_codes(layer: CodedLayer, q: Tensor, blocks: Tensor, scale: float, seen: Tensor) -> Part:
    key, block, offset = _places(layer, blocks, seen)
    keys, values = (
        Encoded(tuple(_by_head(p[block, :, offset]) for p in stored.planes), _by_head(stored.scale[block, :, offset]))
        for stored in planes(layer)
    )
    return attend_codes(q, keys, values, layer.keys, layer.values, scale, seen[:, key])


def _attend_pages(layer: CodedLayer, q: Tensor, blocks: Tensor, scale: float, seen: Tensor) -> Part:
    """Pages are rotated as codes are: so the query is too, and what comes of it is rotated back."""
    assert layer.pages is not None and layer.exact_of is not None, "keys to be read exactly, and no pages"
    key, block, offset = _places(layer, blocks, seen)
    page = layer.exact_of[block].long()
    assert (page >= 0).all(), f"blocks {block[page < 0].unique().tolist()} are to be read exactly and have no page"
    turned = layer.keys.rotate(q)
    k, v = (_by_head(x).to(turned.dtype) for x in layer.pages[page, :, :, offset].unbind(1))
    part = attend_exact(turned, k, v, scale, seen[:, key])
    return Part(layer.values.rotation.inverse(part.out), part.lse)


def _places(layer: CodedLayer, blocks: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The keys that a row sees, [keys], and the block and offset of each. No other is touched: it may be anything."""
    key = seen.any(0).nonzero().squeeze(1)
    return key, blocks[key // layer.layout.block_size], key % layer.layout.block_size


def _by_head(x: Tensor) -> Tensor:  # [keys, kv_heads, n] -> [kv_heads, 1, keys, n], for every query of a group
    return x.transpose(0, 1).unsqueeze(1)
