"""Keys and values as codes of a few bits, with the first and the most recent rows of each context uncoded beside them.

Codes are in the engine's blocks, uncoded rows in a small number of pages. cache/recent_rows.py decides which blocks
have a page, and `send` updates the device. A row's codes depend on that row alone, as in DenseKV, so rollback is a
shorter length and a prefix block is complete by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkdraft.cache.formats import KVFormat
from sparkdraft.kernels.ops import AttentionParams, AttentionView, Ops, RopeArgs
from sparkdraft.kernels.turboquant.store import CodedLayer
from sparkdraft.kernels.turboquant.vectors import VectorFormat
from sparkdraft.models.common.layers import AttentionSpec


@dataclass(frozen=True, slots=True)
class CodedLayerKV:
    store: CodedLayer
    ops: Ops
    same_bits_up_to: int

    def write(self, qkv: Tensor, rope_args: RopeArgs, slots: Tensor) -> None:
        self.ops.tq_rope_write(self.store, qkv, rope_args, slots)

    def attend(self, q: Tensor, view: AttentionView, params: AttentionParams) -> Tensor:
        out = self.ops.tq_attention(self.store, q, view, params, self.same_bits_up_to)
        return out


class TurboQuantKV(KVFormat):
    def __init__(
        self,
        key_bits: Sequence[int],  # per layer
        value_bits: int,
        attention: Sequence[AttentionSpec],  # per layer
        num_blocks: int,
        block_size: int,
        uncoded: tuple[int, int, int],  # first and recent positions that stay uncoded, and the number of pages for them
        centres: Sequence[Tensor] | None,  # per layer, float32 [kv_heads, head_dim], subtracted from its keys
        device: torch.device,
        ops: Ops,
        same_bits_up_to: int = 0,
    ) -> None:
        first, recent, num_pages = uncoded
        taken: Sequence[Tensor | None] = centres or [None] * len(key_bits)
        # A centre shifts all scores of a row alike, which a softmax does not see; but a sink is no key, and would stay.
        taken = [None if spec.sinks else centre for spec, centre in zip(attention, taken, strict=True)]
        formats = {
            (spec.head_dim, bits): VectorFormat(spec.head_dim, bits, device=device)
            for spec, own in zip(attention, key_bits, strict=True)
            for bits in (own, value_bits)
        }
        self.page_of = torch.full((num_blocks,), -1, dtype=torch.int32, device=device) if recent else None
        page_dtype = torch.float16 if device.type == "cuda" else torch.float32
        stores = [
            CodedLayer.make(
                num_blocks, spec.num_kv_heads, block_size,
                formats[spec.head_dim, bits], formats[spec.head_dim, value_bits], centre,
                num_pages=num_pages, page_dtype=page_dtype, page_of=self.page_of, first=first, recent=recent,
            )
            for spec, bits, centre in zip(attention, key_bits, taken, strict=True)
        ]  # fmt: skip
        self.layers: list[CodedLayerKV] = [CodedLayerKV(store, ops, same_bits_up_to) for store in stores]
        sizes = (spec.num_kv_heads * store.layout.nbytes for spec, store in zip(attention, stores, strict=True))
        self.bytes_per_token = sum(size // block_size for size in sizes)

    def send(self, changes: list[tuple[int, int]]) -> None:
        """Update the device's map: (block, its page or -1) of blocks that got or lost a page, before the next step."""
        assert self.page_of is not None
        if changes:
            blocks, pages = torch.tensor(changes, dtype=torch.int32).t().to(self.page_of.device, non_blocking=True)
            self.page_of[blocks.long()] = pages
