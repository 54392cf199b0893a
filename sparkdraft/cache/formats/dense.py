"""Keys and values kept as they are computed, or rounded to 8 bits, one tensor each a layer, in blocks of positions.

Inside a block every head's rows lie together, so a kernel reads one contiguous tile a (block, head). Token-local: a
row's K/V depend on that row alone, so rollback is a shorter length and a prefix block is complete by itself.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from sparkdraft.cache.formats import Turn
from sparkdraft.kernels.view import AttentionView


class DenseKV:
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
        """most_query: batches of up to so many rows a sequence give a row the same bits, where kernels see to that."""
        shape = (num_layers, num_blocks, num_kv_heads, block_size, head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.layers = list(zip(self.k.unbind(0), self.v.unbind(0), strict=True))
        self.ops, self.most_query = ops, most_query
        self.bytes_per_token = 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize

    def rotate_and_write(self, layer: int, qkv: Tensor, turn: Turn, slots: Tensor) -> None:
        self.ops.rope_write(qkv, *turn, *self.layers[layer], slots)

    def send(self, changes: list[tuple[int, int]]) -> None:
        assert not changes, "all rows are exact here"

    def attend(
        self, layer: int, q: Tensor, view: AttentionView, scale: float, causal: bool = True, window: int = 0
    ) -> Tensor:
        layers = self.layers[layer]
        out: Tensor = self.ops.paged_attention(q, *layers, view, scale, causal, window, self.most_query)
        return out
