"""Layers with a sliding window: their keys and values are in pages of a pool of their own, as many as the window needs.

A row of such a layer sees the last 'window' positions, so the K/V of earlier blocks are never read again and their
pages can serve other requests. A page belongs to a block, as in a TurboQuant cache: the same holding decides which
blocks have one, and the map from blocks to pages is on the device. A step begins by looking up the pages of its rows
and tables once; after that these layers run like all others.

    blocks of a request    | ........ no page any more ........ | window | to be written |
    pages held             |                                    |  held  |     held      |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparkdraft.cache.formats import LayerKV
from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.kernels.ops import AttentionParams, AttentionView, Ops, RopeArgs
from sparkdraft.models.common.layers import AttentionSpec


@dataclass(frozen=True, slots=True)
class StepRoom:
    """The largest step, which sizes the buffers of looked-up pages."""

    rows: int
    seqs: int
    blocks: int  # per sequence


class WindowGroup:
    """The layers with one and the same window."""

    def __init__(
        self,
        specs: Sequence[AttentionSpec],  # of the layers that own keys and values
        num_pages: int,
        num_blocks: int,
        block_size: int,
        room: StepRoom,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
        same_bits_up_to: int = 0,
    ) -> None:
        self.ops, self.block_size = ops, block_size
        # One extra page of zeros takes the place of missing pages: a tile may reach beyond the window, and the masked
        # values there must be finite and must not be another request's.
        self.missing = num_pages
        self.kv = DenseKV(specs, num_pages + 1, block_size, dtype, device, ops, same_bits_up_to)
        for tensor in (*self.kv.k, *self.kv.v):
            tensor[self.missing].zero_()
        self.page_of = torch.full((num_blocks,), -1, dtype=torch.int32, device=device)  # per block; -1: it has no page
        # At fixed addresses, because recorded steps read and write them.
        self._slots = torch.zeros(room.rows, dtype=torch.int32, device=device)
        self.tables = torch.zeros(room.seqs, room.blocks, dtype=torch.int32, device=device)
        self.slots, self.view = self._slots, AttentionView(self._slots, self._slots, self.tables, 0, 0)

    def begin(self, slots: Tensor, view: AttentionView) -> None:
        """Translate the slots of this step's rows, and the blocks they see, to pages."""
        self.slots, tables = self._slots[: slots.shape[0]], self.tables[: view.block_tables.shape[0]]
        self.ops.find_pages(self.page_of, slots, view.block_tables, self.block_size, self.slots, tables, self.missing)
        self.view = replace(view, block_tables=tables)

    def send(self, changes: list[tuple[int, int]]) -> None:
        """Update the device's map: (block, its page or -1) of blocks that got or lost a page, before the next step."""
        if changes:
            blocks, pages = torch.tensor(changes, dtype=torch.int32).t().to(self.page_of.device, non_blocking=True)
            self.page_of[blocks.long()] = pages


@dataclass(frozen=True, slots=True)
class WindowLayer:
    group: WindowGroup
    inner: LayerKV

    def write(self, qkv: Tensor, rope_args: RopeArgs, slots: Tensor) -> None:
        self.inner.write(qkv, rope_args, self.group.slots)

    def attend(self, q: Tensor, view: AttentionView, params: AttentionParams) -> Tensor:
        return self.inner.attend(q, self.group.view, params)
