"""Keys and values as they are computed, or rounded to 8 bits: two tensors per layer, in blocks of positions.

Inside a block every head's rows are contiguous, so that a kernel reads one tile per (block, head). Layers may differ in
heads and head size. A layer that reads another layer's keys and values has no tensors of its own. The K/V of a row
depend on that row alone, so rollback is a shorter length and a prefix block is complete by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkdraft.cache.formats import KVFormat, LayerKV
from sparkdraft.kernels.ops import AttentionParams, AttentionView, Ops, RopeArgs
from sparkdraft.models.common.layers import AttentionSpec

HUGE_PAGE = 1 << 21  # bytes
ALIGNED = 64  # a tensor inside another begins at a multiple of this many elements


@dataclass(frozen=True, slots=True)
class DenseLayer:
    k: Tensor  # [blocks, kv_heads, block_size, head_dim]
    v: Tensor
    ops: Ops
    same_bits_up_to: int

    def write(self, qkv: Tensor, rope_args: RopeArgs, slots: Tensor) -> None:
        self.ops.rope_write(qkv, rope_args, self.k, self.v, slots)

    def attend(self, q: Tensor, view: AttentionView, params: AttentionParams) -> Tensor:
        out = self.ops.paged_attention(q, self.k, self.v, view, params, self.same_bits_up_to)
        return out


@dataclass(frozen=True, slots=True)
class BorrowedLayer:
    """A layer that attends to the keys and values of another layer, which ran before it in the same step."""

    owner: LayerKV
    ops: Ops

    def write(self, qkv: Tensor, rope_args: RopeArgs, slots: Tensor) -> None:
        """Rotate the queries, which are all that qkv holds; nothing is stored."""
        self.ops.rope_queries(qkv, rope_args)

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
        ops: Ops,
        same_bits_up_to: int = 0,
    ) -> None:
        """same_bits_up_to: a row has the same bits in batches of up to this many rows per sequence."""
        owners = [spec for spec in layers if spec.kv_from is None]
        shapes = [(num_blocks, spec.num_kv_heads, block_size, spec.head_dim) for spec in owners]
        tensors = _tensors(shapes + shapes, dtype, device)
        self.k, self.v = tensors[: len(owners)], tensors[len(owners) :]  # of the layers that own keys and values
        self.layers: list[LayerKV] = []
        own = zip(self.k, self.v, strict=True)
        for spec in layers:
            if spec.kv_from is None:
                self.layers.append(DenseLayer(*next(own), ops, same_bits_up_to))
            else:
                self.layers.append(BorrowedLayer(self.layers[spec.kv_from], ops))
        self.bytes_per_token = sum(2 * spec.kv_width for spec in owners) * dtype.itemsize


def _tensors(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """One tensor per shape. On a CPU they are parts of one allocation, each at a different offset within its page.

    The system clears memory when it is first written, up to HUGE_PAGE at a time, and all layers write the same block
    in the same step. With equal offsets they would all reach a new page in one step, which would take twice its time.
    """
    if device.type != "cpu":
        return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    page = HUGE_PAGE // dtype.itemsize
    begins, end = [], 0
    for i, shape in enumerate(shapes):
        apart = i * page // len(shapes) // ALIGNED * ALIGNED
        begins.append(end + (apart - end) % page)
        end = begins[-1] + math.prod(shape)
    whole = torch.empty(end, dtype=dtype, device=device)
    return [whole[begin : begin + math.prod(shape)].view(shape) for begin, shape in zip(begins, shapes, strict=True)]
