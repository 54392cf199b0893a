"""Keys and values kept as they are computed, or rounded to 8 bits, one tensor each a layer, in blocks of positions.

Inside a block every head's rows lie together, so a kernel reads one contiguous tile a (block, head). Token-local: a
row's K/V depend on that row alone, so rollback is a shorter length and a prefix block is complete by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from sparkdraft.cache.formats import KVFormat, Turn
from sparkdraft.kernels.view import AttentionView


@dataclass(frozen=True, slots=True)
class DenseLayer:
    k: Tensor  # [blocks, kv_heads, block_size, head_dim]
    v: Tensor
    ops: ModuleType
    most_query: int

    def write(self, qkv: Tensor, turn: Turn, slots: Tensor) -> None:
        self.ops.rope_write(qkv, *turn, self.k, self.v, slots)

    def attend(self, q: Tensor, view: AttentionView, scale: float, causal: bool = True, window: int = 0) -> Tensor:
        out: Tensor = self.ops.paged_attention(q, self.k, self.v, view, scale, causal, window, self.most_query)
        return out


class DenseKV(KVFormat):
    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        ops: ModuleType,
        most_query: int = 0,
    ) -> None:
        """most_query: a row has the same bits in batches of up to this many rows per sequence."""
        shape = (num_layers, num_blocks, num_kv_heads, block_size, head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.layers: list[DenseLayer] = [DenseLayer(k, v, ops, most_query) for k, v in zip(self.k, self.v, strict=True)]
        self.bytes_per_token = 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize
