"""Caches that keep one number per number: two tensors per layer, in blocks of positions.

Inside a block every head's positions are contiguous, so that a kernel reads one tile per (block, head). Layers may
differ in heads and head size. A layer that reads another layer's keys and values has no tensors of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkdraft.cache.formats import Build, KeptLayer, KVCache, KVFormat, KVPlan, kv_format
from sparkdraft.models.common.layers import AttentionSpec
from sparkdraft.models.common.sizes import kv_bytes_per_token

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from sparkdraft.cache.groups import CacheGroup
    from sparkdraft.kernels.ops import AttentionParams, AttentionView, Ops, RopeArgs
    from sparkdraft.models.common.layers import LayerKV

HUGE_PAGE = 1 << 21  # bytes
ALIGNED = 64  # a tensor inside another begins at a multiple of this many elements


@dataclass(frozen=True, slots=True)
class DenseLayer(KeptLayer):
    k: Tensor  # [blocks, kv_heads, block_size, head_dim]
    v: Tensor
    ops: Ops
    same_bits_up_to: int
    limit: float = 0.0  # of the relative error that rounding makes; 0: nothing is rounded

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.k.shape[1] * self.k.shape[3] * self.k.element_size()

    @property
    def lossy(self) -> KeptLayer | None:
        return self if self.limit else None

    def reader(self) -> LayerKV:
        return BorrowedLayer(self, self.ops)

    def write(self, qkv: Tensor, rope_args: RopeArgs, slots: Tensor) -> None:
        self.ops.rope_write(qkv, rope_args, self.k, self.v, slots)

    def attend(self, q: Tensor, view: AttentionView, params: AttentionParams) -> Tensor:
        return self.ops.paged_attention(q, self.k, self.v, view, params, self.same_bits_up_to)

    def deviations(self, k: Tensor, v: Tensor, slots: Tensor) -> list[tuple[float, float]]:
        kept = (rows_at(cache, slots) for cache in (self.k, self.v))
        return [(relative_error(got, wanted), self.limit) for got, wanted in zip(kept, (k, v), strict=True)]


@dataclass(frozen=True, slots=True)
class BorrowedLayer:
    """A layer that attends to the keys and values of another layer, which ran before it in the same step."""

    owner: LayerKV
    ops: Ops

    def write(self, qkv: Tensor, rope_args: RopeArgs, slots: Tensor) -> None:
        self.ops.rope_queries(qkv, rope_args)

    def attend(self, q: Tensor, view: AttentionView, params: AttentionParams) -> Tensor:
        return self.owner.attend(q, view, params)


class DenseKV(KVCache):
    def __init__(
        self,
        layers: Sequence[AttentionSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
        same_bits_up_to: int = 0,
        limit: float = 0.0,
    ) -> None:
        """same_bits_up_to: a token has the same bits in batches of up to this many tokens per sequence."""
        owners = [spec for spec in layers if spec.kv_from is None]
        shapes = [(num_blocks, spec.num_kv_heads, block_size, spec.head_dim) for spec in owners]
        tensors = _tensors(shapes + shapes, dtype, device)
        self.k, self.v = tensors[: len(owners)], tensors[len(owners) :]  # of the layers that own keys and values
        self.layers: list[LayerKV] = []
        own = zip(self.k, self.v, strict=True)
        for spec in layers:
            if spec.kv_from is None:
                self.layers.append(DenseLayer(*next(own), ops, same_bits_up_to, limit))
            else:
                self.layers.append(BorrowedLayer(self.layers[spec.kv_from], ops))
        self.bytes_per_token = sum(2 * spec.kv_width for spec in owners) * dtype.itemsize


def _tensors(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """One tensor per shape. On a CPU they are parts of one allocation, each at a different offset within its page.

    The system clears memory when it is first written, up to HUGE_PAGE at a time, and all layers write the same block in
    the same step. With equal offsets they would all reach a new page in one step, which would take twice its time.
    """
    import torch

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


def whole_text(
    ids: Sequence[int], cache: KVCache, block_size: int, device: torch.device
) -> tuple[Tensor, Tensor, AttentionView]:
    """Ids, positions and view of one step over a text in a cache's first blocks, which the cache begins."""
    import torch

    from sparkdraft.kernels.ops import AttentionView

    def integers(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    count, positions = len(ids), integers(range(len(ids)))
    tables = integers(range(-(-count // block_size))).unsqueeze(0)
    view = AttentionView(integers([0, count]), integers([count]), tables, count, count)
    if cache.begin:
        cache.begin(positions, view)
    return integers(ids), positions, view


def rows_at(cache: Tensor, slots: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The tokens at these slots, [tokens, kv_heads, ...], of a cache [blocks, kv_heads, block_size, ...]; in float32
    where no type is named."""
    import torch

    size, slot, kind = cache.shape[2], slots.long(), cache.dtype
    raw = cache.view(torch.uint8) if kind == torch.float8_e4m3fn else cache  # torch cannot index fp8 everywhere
    return raw[slot // size, :, slot % size].view(kind).to(dtype or torch.float32)


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got.float() - wanted).norm() / wanted.norm().clamp(min=1e-12))


class DenseFormat(KVFormat):
    """A format that only chooses the type of its numbers."""

    limit = 0.0  # see DenseLayer

    def itemsize(self, exact: int) -> int:
        """Bytes per number, given those of an exact one."""
        return exact

    def dtype(self, exact: torch.dtype) -> torch.dtype:
        return exact

    def bytes_per_token(self, layers: Sequence[AttentionSpec], itemsize: int, plan: KVPlan | None) -> int:
        return kv_bytes_per_token(layers, self.itemsize(itemsize))

    def build(self, job: Build) -> tuple[KVCache, list[CacheGroup]]:
        sizes = (job.num_blocks, job.block_size, self.dtype(job.dtype), job.device)
        return DenseKV(job.layers, *sizes, job.ops, job.same_bits_up_to, self.limit), []


def in_windows(kv: KVFormat) -> DenseFormat:
    """The format of layers with a sliding window."""
    kept = kv_format(kv.in_windows)
    assert isinstance(kept, DenseFormat), f"pages of a window cannot be {kept.name}"
    return kept
