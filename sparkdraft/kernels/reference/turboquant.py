"""Writing to a TurboQuant layer and attending to it, in plain torch: the definition that kernels are tested against.

The query is rotated instead of every key; a key's scale multiplies its dot product, a value's scale its probability,
and the sum is rotated back once. Coded and uncoded keys are attended to apart and joined by their log-sum-exp.

    positions      0 .. first | ........ coded ........ | recent .. p        of a token at position p:
                   uncoded                                uncoded            each token has its own border

A token's result depends on its own position and slot alone, to the bit: attention is computed for tiles of TILE
positions, in the same shapes whichever of their tokens are there. The caller keeps a page for every block with keys
that must be read uncoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparkdraft.kernels.ops import AttentionParams, AttentionView
from sparkdraft.kernels.turboquant.store import CodedLayer, planes
from sparkdraft.kernels.turboquant.vectors import Encoded, VectorFormat

TILE = 64  # positions, from a multiple of it on


def tq_write(layer: CodedLayer, k: Tensor, v: Tensor, slots: Tensor, q: Tensor | None = None) -> None:
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
    layer: CodedLayer, q: Tensor, view: AttentionView, params: AttentionParams, same_bits_up_to: int = 0
) -> Tensor:
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
    """Tokens of one sequence and one tile, [rows, heads, dim], from position 'low' on."""
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
    """The keys that tokens of a tile see, and where they lie."""

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
    """Pages are rotated as codes are, so the query is too, and the result is rotated back."""
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


@dataclass(frozen=True, slots=True)
class Part:
    """Attention over some of the keys."""

    out: Tensor  # [..., rows, dim], normalised over these keys; 0 in a row that sees none of them
    lse: Tensor  # [..., rows], the logarithm of the sum of exponentials of its scores; -inf in such a row


def is_uncoded(position: Tensor, key: Tensor, first: int, recent: int) -> Tensor:
    """Whether a token reads a key uncoded, if it sees it: position [rows, 1] and key [keys] -> bool [rows, keys]."""
    return (key < first) | (position - key < recent)


def attend_codes(
    q: Tensor,  # [..., rows, dim]
    keys: Encoded,  # of [..., keys, dim], centred or not: a centre is the same for all keys, and cancels
    values: Encoded,
    key_format: VectorFormat,
    value_format: VectorFormat,
    scale: float,
    seen: Tensor,  # bool [rows, keys]
) -> Part:
    weights, lse = _softmax(code_scores(q, keys, key_format) * scale, seen)
    return Part(code_values(weights, values, value_format), lse)


def attend_uncoded(
    q: Tensor,  # [..., rows, dim]
    k: Tensor,  # [..., keys, dim], less the centre where the codes beside them are centred: all scores share one zero
    v: Tensor,
    scale: float,
    seen: Tensor,  # bool [rows, keys]
) -> Part:
    q, k, v = (x if q.dtype == torch.float64 else x.float() for x in (q, k, v))
    weights, lse = _softmax(q @ k.transpose(-1, -2) * scale, seen)
    return Part(weights @ v, lse)


def merge(parts: list[Part]) -> Part:
    """Attention over the keys of all parts."""
    lse = torch.stack([p.lse for p in parts])
    total = lse.logsumexp(0)  # -inf where a row sees nothing in any of them
    share = (lse - total.where(total > -torch.inf, 0)).exp()
    out = sum(p.out * w.unsqueeze(-1) for p, w in zip(parts, share, strict=True))
    assert isinstance(out, Tensor)
    return Part(out, total)


def code_scores(q: Tensor, keys: Encoded, fmt: VectorFormat) -> Tensor:  # -> [..., rows, keys]
    """q . k for every key, up to the constant that a centre leaves out."""
    turned = fmt.rotation.forward(q).unflatten(-1, (fmt.num_blocks, fmt.width))
    dots = torch.einsum("...rbw,...kbw->...rkb", turned, fmt.unit(keys, turned.dtype))
    return (dots * keys.scale.to(dots.dtype).unsqueeze(-3)).sum(-1)


def code_values(weights: Tensor, values: Encoded, fmt: VectorFormat) -> Tensor:  # [..., rows, keys] -> [..., rows, dim]
    """The weighted sum of values, rotated back."""
    scaled = weights.unsqueeze(-1) * values.scale.to(weights.dtype).unsqueeze(-3)  # [..., rows, keys, blocks]
    mixed = torch.einsum("...rkb,...kbw->...rbw", scaled, fmt.unit(values, weights.dtype))
    return fmt.rotation.inverse(mixed.flatten(-2))


def _softmax(scores: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of the seen keys, and their log-sum-exp."""
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse.where(lse > -torch.inf, 0).unsqueeze(-1)).exp(), lse
