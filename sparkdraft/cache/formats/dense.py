"""Keys and values kept as they are computed, or rounded to 8 bits: two tensors per layer, in blocks of positions.

Inside a block every head's rows are contiguous, so that a kernel reads one tile per (block, head). Layers may differ in
heads and head size; one that reads another layer's keys and values has no tensors of its own. Token-local: the K/V of a
row depend on that row alone, so rollback is a shorter length and a prefix block is complete by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from sparkdraft.cache.formats import KVFormat, LayerKV, RopeArgs
from sparkdraft.kernels.view import AttentionParams, AttentionView
from sparkdraft.models.layers import AttentionSpec


@dataclass(frozen=True, slots=True)
class DenseLayer:
    k: Tensor  # [blocks, kv_heads, block_size, head_dim]
    v: Tensor
    ops: ModuleType
    same_bits_up_to: int

    def write(self, qkv: Tensor, rope_args: RopeArgs, slots: Tensor) -> None:
        self.ops.rope_write(qkv, *rope_args, self.k, self.v, slots)

    def attend(self, q: Tensor, view: AttentionView, params: AttentionParams) -> Tensor:
        out: Tensor = self.ops.paged_attention(q, self.k, self.v, view, params, self.same_bits_up_to)
        return out


@dataclass(frozen=True, slots=True)
class BorrowedLayer:
    """A layer that attends to the keys and values of another, which ran before it in the same step."""

    owner: LayerKV
    ops: ModuleType

    def write(self, qkv: Tensor, rope_args: RopeArgs, slots: Tensor) -> None:
        """qkv holds queries alone: they are rotated, and nothing is kept."""
        self.ops.rope_queries(
            qkv, rope_args.positions, rope_args.rope, rope_args.num_heads, rope_args.q_norm, rope_args.eps
        )

    def attend(self, q: Tensor, view: AttentionView, params: AttentionParams) -> Tensor:
        return self.owner.attend(q, view, params)


class DenseKV(KVFormat):
    def __init__(
        self,
        layers: Sequence[AttentionSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        ops: ModuleType,
        same_bits_up_to: int = 0,
    ) -> None:
        """same_bits_up_to: a row has the same bits in batches of up to this many rows per sequence."""
        self.layers: list[LayerKV] = []
        self.k: list[Tensor] = []  # of the layers that own keys and values
        self.v: list[Tensor] = []
        for spec in layers:
            if spec.kv_from is not None:
                self.layers.append(BorrowedLayer(self.layers[spec.kv_from], ops))
                continue
            shape = (num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
            k, v = (torch.empty(shape, dtype=dtype, device=device) for _ in "kv")
            self.k.append(k)
            self.v.append(v)
            self.layers.append(DenseLayer(k, v, ops, same_bits_up_to))
        self.bytes_per_token = sum(2 * spec.kv_width for spec in layers if spec.kv_from is None) * dtype.itemsize
