"""The attention of drafter training: draft blocks of W rows, each over the context before its anchor and over itself.

All blocks of a batch attend at once, to context rows that are laid end to end, so many blocks share one document's keys
and values. The dense masked form here defines the operator. A CPU runs it over a few neighbouring blocks at a time, on
the stretch of context that they see, and again on the way back; on a GPU train/kernels/block_attention.py computes the
same without the mask. The model does projections, norms and rotation.

    context rows     | document 0 .................... | document 1 .................... | ...
    block j                                              [starts[j] ... anchors[j]) + its own rows j*W .. j*W + W - 1
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparkdraft.train.memory import CPU_SCORES

WIDEST = 16  # most rows of a block that the GPU's kernel takes


def block_attention(
    q: Tensor,  # [blocks * width, heads, head_dim]
    block_k: Tensor,  # [blocks * width, kv_heads, head_dim]
    block_v: Tensor,
    context_k: Tensor,  # [tokens, kv_heads, head_dim]
    context_v: Tensor,
    starts: Tensor,  # int32 [blocks], never descending: the first token that the block sees, of its own document
    anchors: Tensor,  # int32 [blocks], never descending: the first token that the block does not see as context
    width: int,
    scale: float,
) -> Tensor:  # [blocks * width, heads, head_dim]
    """Differentiable in its five float inputs, which may be views whose last dimension is contiguous."""
    assert q.shape[0] == block_k.shape[0] == len(anchors) * width == len(starts) * width, (q.shape, anchors.shape)
    assert q.shape[1] % block_k.shape[1] == 0 and q.shape[2] == block_k.shape[2], (q.shape, block_k.shape)
    assert block_k.shape == block_v.shape and context_k.shape == context_v.shape, (block_k.shape, context_k.shape)
    assert block_k.shape[1:] == context_k.shape[1:], (block_k.shape, context_k.shape)
    if q.is_cuda:
        # imported here because triton is not available everywhere
        from sparkdraft.train.kernels import block_attention as kernel

        return kernel.block_attention(q, block_k, block_v, context_k, context_v, starts, anchors, width, scale)
    parts = []
    for first, last in _neighbours(starts.tolist(), anchors.tolist(), width):
        low, high = int(starts[first]), int(anchors[last - 1])
        rows = (tensor[first * width : last * width] for tensor in (q, block_k, block_v))
        context = (tensor[low:high] for tensor in (context_k, context_v))
        places = (tensor[first:last] - low for tensor in (starts, anchors))
        parts.append(checkpoint(reference_attention, *rows, *context, *places, width, scale, use_reentrant=False))
    return torch.cat(parts) if parts else q


def _neighbours(starts: list[int], anchors: list[int], width: int) -> Iterator[tuple[int, int]]:
    """Runs of blocks that have few (row, key) pairs together: [first, last) of each."""
    first = 0
    for last in range(1, len(anchors) + 1):
        if last < len(anchors):
            keys = anchors[last] - starts[first] + width
            if (last + 1 - first) * width * keys <= CPU_SCORES:
                continue
        yield first, last
        first = last


def reference_attention(
    q: Tensor,
    block_k: Tensor,
    block_v: Tensor,
    context_k: Tensor,
    context_v: Tensor,
    starts: Tensor,
    anchors: Tensor,
    width: int,
    scale: float,
) -> Tensor:
    """The definition, in the inputs' own dtype: memory grows with blocks * width * heads * tokens."""
    kv_heads, tokens = context_k.shape[1], context_k.shape[0]
    grouped = q.unflatten(0, (-1, width)).unflatten(2, (kv_heads, -1))  # [blocks, width, kv_heads, group, dim]
    own_k, own_v = block_k.unflatten(0, (-1, width)), block_v.unflatten(0, (-1, width))
    token = torch.arange(tokens, device=q.device)
    seen = (token >= starts.unsqueeze(1)) & (token < anchors.unsqueeze(1))  # [blocks, tokens]
    context = torch.einsum("bwkgd,tkd->bwkgt", grouped, context_k)
    context = context.masked_fill(~seen[:, None, None, None], float("-inf"))
    own = torch.einsum("bwkgd,bvkd->bwkgv", grouped, own_k)
    weights = (torch.cat((context, own), dim=-1) * scale).softmax(-1)
    to_context, to_own = weights.split((tokens, width), dim=-1)
    mixed = torch.einsum("bwkgt,tkd->bwkgd", to_context, context_v)
    mixed = mixed + torch.einsum("bwkgv,bvkd->bwkgd", to_own, own_v)
    return mixed.reshape(q.shape)
