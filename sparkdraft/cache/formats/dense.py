"""Keys and values kept as they are computed, one tensor each a layer, in blocks of `block_size` positions.

Inside a block every head's rows lie together, so a kernel reads one contiguous tile a (block, head). Token-local: a
row's K/V depend on that row alone, so rollback is a shorter length and a prefix block is complete by itself.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

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
    ) -> None:
        shape = (num_layers, num_blocks, num_kv_heads, block_size, head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.layers = list(zip(self.k.unbind(0), self.v.unbind(0), strict=True))
        self.ops = ops

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        self.ops.kv_write(k, v, *self.layers[layer], slots)

    def attend(
        self, layer: int, q: Tensor, view: AttentionView, scale: float, causal: bool = True, window: int = 0
    ) -> Tensor:
        out: Tensor = self.ops.paged_attention(q, *self.layers[layer], view, scale, causal, window)
        return out
