"""Writing to a coded layer and attending to it, in plain torch: the definition that its kernels are tested against.

Both depend on a row's own position and slot alone, not on the rows it is run with, to the bit: attention is computed
for tiles of TILE positions, in the same shapes whichever of their rows are there, since a matrix product's last bits
depend on its shape. That a block has a page as long as one of its keys must be read uncoded, and that rejected rows are
written anew before anybody reads them, is left to the caller. It favours clearness over speed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparkdraft.kernels.ops import AttentionParams, AttentionView
from sparkdraft.kernels.turboquant.attention import Part, attend_codes, attend_uncoded, is_uncoded, merge
from sparkdraft.kernels.turboquant.store import CodedLayer, planes
from sparkdraft.kernels.turboquant.vectors import Encoded

TILE = 64  # positions from a multiple of it on


def tq_write(
    layer: CodedLayer,  # changed in place
    k: Tensor,  # [rows, kv_heads, dim], a strided view of qkv
    v: Tensor,
    slots: Tensor,  # int32 [rows]: block * block_size + offset; a negative slot, or one past the end, is not written
    q: Tensor | None = None,  # [rows, heads, dim], rotated in place
) -> None:
    if q is not None:
        q.copy_(layer.keys.rotation.forward(q))
    if not k.shape[1]:
        return  # queries that read what others wrote
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
    if layer.pages is not None and layer.page_of is not None:
        page = layer.page_of[block].long()
        has = page >= 0
        layer.pages[page[has], :, :, offset[has]] = torch.stack(rotated, dim=1)[has].to(layer.pages.dtype)


def tq_attention(
    layer: CodedLayer,
    q: Tensor,  # [rows, heads, dim], a strided view of qkv, as tq_write has rotated it
    view: AttentionView,
    params: AttentionParams,
    same_bits_up_to: int = 0,  # ignored: a row's bits never depend on the rows beside it
) -> Tensor:  # [rows, heads * dim]
    assert params.causal, "only drafters look ahead, and they keep an exact cache"
    assert params.sinks is None or layer.centre is None, "a centre shifts all scores, and would have to shift sinks"
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    starts, contexts = view.query_start.tolist(), view.context_len.tolist()
    for s, context in enumerate(contexts):
        blocks = view.block_tables[s].long()
        begin = context - (starts[s + 1] - starts[s])  # the position of the first row
        for tile in range(begin // TILE, -(-context // TILE)):
            low, high = max(begin, tile * TILE), min(context, (tile + 1) * TILE)
            rows = slice(starts[s] + low - begin, starts[s] + high - begin)
            out[rows] = _attend_tile(layer, q[rows], blocks, low, params).to(q.dtype)
    return out.flatten(1)


def _attend_tile(layer: CodedLayer, q: Tensor, blocks: Tensor, low: int, params: AttentionParams) -> Tensor:
    """Rows of one sequence and one tile, [rows, heads, dim], from position 'low' on -> the same shape."""
    first, there = low // TILE * TILE, slice(low % TILE, low % TILE + len(q))
    turned_back = layer.keys.rotation.inverse(q)  # what follows is defined by queries as they were
    asked = turned_back.new_zeros(TILE, *q.shape[1:])
    asked[there] = turned_back
    grouped = asked.unflatten(1, (layer.records.shape[1], -1)).permute(1, 2, 0, 3)  # [kv_heads, group, TILE, dim]
    position = torch.arange(first, first + TILE, device=q.device).unsqueeze(1)
    key = torch.arange(first + TILE, device=q.device)
    seen = key <= position
    if params.window:
        seen &= position - key < params.window
    is_there = torch.zeros(TILE, 1, dtype=torch.bool, device=q.device)
    is_there[there] = True
    uncoded = is_uncoded(position, key, layer.first, layer.recent)
    parts = [_attend_codes(layer, grouped, _places(layer, blocks, seen & ~uncoded, is_there), params.scale)]
    if layer.first or layer.recent:
        parts.append(_attend_pages(layer, grouped, _places(layer, blocks, seen & uncoded, is_there), params.scale))
    if params.sinks is not None:  # a part of the softmax that has no values
        lse = params.sinks.to(parts[0].lse.dtype).view(*grouped.shape[:2], 1).expand(grouped.shape[:3])
        parts.append(Part(torch.zeros_like(parts[0].out), lse))
    return merge(parts).out.permute(2, 0, 1, 3).flatten(1, 2)[there]


class Places(NamedTuple):
    """The keys that rows of a tile see, those that are there and those that are not, and where they lie."""

    block: Tensor  # [keys]
    offset: Tensor
    seen: Tensor  # bool [TILE, keys]: by a row that is there
    used: Tensor  # bool [keys, 1, 1]: seen by any of them; what lies elsewhere may be anything, and is read as 0


def _places(layer: CodedLayer, blocks: Tensor, seen: Tensor, is_there: Tensor) -> Places:
    key, size = seen.any(0).nonzero().squeeze(1), layer.layout.block_size
    found = seen[:, key] & is_there
    block = blocks[(key // size).clamp(max=len(blocks) - 1)]
    return Places(block, key % size, found, found.any(0).view(-1, 1, 1))


def _attend_codes(layer: CodedLayer, q: Tensor, places: Places, scale: float) -> Part:
    block, offset, seen, used = places
    keys, values = (
        Encoded(
            tuple(_by_head(p[block, :, offset]) for p in stored.planes),
            _by_head(stored.scale[block, :, offset].where(used, 0)),
        )
        for stored in planes(layer)
    )
    return attend_codes(q, keys, values, layer.keys, layer.values, scale, seen)


def _attend_pages(layer: CodedLayer, q: Tensor, places: Places, scale: float) -> Part:
    """Pages are rotated as codes are: so the query is too, and what comes of it is rotated back."""
    assert layer.pages is not None and layer.page_of is not None, "keys to be read uncoded, and no pages"
    block, offset, seen, used = places
    page = layer.page_of[block].long()
    lost = (page < 0) & used.flatten()
    assert not lost.any(), f"blocks {block[lost].unique().tolist()} are to be read uncoded and have no page"
    turned = layer.keys.rotate(q)
    rows = layer.pages[page.clamp(min=0), :, :, offset].where(used.unsqueeze(1), 0)  # [keys, 2, kv_heads, dim]
    k, v = (_by_head(x).to(turned.dtype) for x in rows.unbind(1))
    part = attend_uncoded(turned, k, v, scale, seen)
    return Part(layer.values.rotation.inverse(part.out), part.lse)


def _by_head(x: Tensor) -> Tensor:  # [keys, kv_heads, n] -> [kv_heads, 1, keys, n], for every query of a group
    return x.transpose(0, 1).unsqueeze(1)
