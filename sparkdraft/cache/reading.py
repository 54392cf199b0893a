"""Reads some layers' keys and values from outside of the model: for a drafter whose queries attend to the target's.

Nothing is written. Whatever format a layer's keys and values are kept in, its reader is a `LayerKV` that is handed
queries alone: `write` norms, rotates and, for codes, turns them as the keys were, and `attend` is the layer's own.
Pages of layers with a window are looked up in tables of the reader's own, so the tables of a running step stay as they
are. The caller sees to it that the pages are still held (Plan.reads_back).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparkdraft.cache.formats import KVFormat, LayerKV, LayerState
from sparkdraft.cache.formats.capture import CaptureLayer
from sparkdraft.cache.formats.dense import BorrowedLayer, DenseLayer
from sparkdraft.cache.formats.turboquant import CodedLayerKV
from sparkdraft.cache.windows import WindowGroup, WindowLayer
from sparkdraft.kernels.ops import AttentionParams, AttentionView, Ops, RopeArgs


class CacheReader:
    """layers: a reader for each of the given layers of a cache, of which several may be the same."""

    def __init__(self, kv: KVFormat, layers: Sequence[int], ops: Ops) -> None:
        self._lookups: dict[int, PageLookup] = {}  # by the id of a group, which has no other name
        self.layers = [self._reader(kv.layers[number], ops) for number in layers]
        # of one position in those of the layers that keep all positions
        self.bytes_per_token = sum(_token_bytes(kv.layers[number]) for number in layers)

    def begin(self, view: AttentionView) -> None:
        """Before the layers read: look up the pages of the blocks that the view names."""
        for lookup in self._lookups.values():
            lookup.begin(view)

    def _reader(self, part: LayerKV | LayerState, ops: Ops) -> LayerKV:
        if isinstance(part, WindowLayer):
            lookup = self._lookups.setdefault(id(part.group), PageLookup(part.group))
            return PagedReader(lookup, BorrowedLayer(part.inner, ops))
        if isinstance(part, CodedLayerKV):
            return CodedReader(part, ops)
        if isinstance(part, CaptureLayer):  # which reads its exact half, and measures the steps of the model alone
            part = part.exact
        assert isinstance(part, DenseLayer), f"{type(part).__name__} holds no keys and values"
        return BorrowedLayer(part, ops)


class PageLookup:
    """The pages of a window's layers under the blocks of a view."""

    def __init__(self, group: WindowGroup) -> None:
        self.group = group
        self._tables = torch.zeros_like(group.tables)  # at a fixed address, because recorded passes read and write them
        self._no_rows = group.tables.new_zeros(0)
        self.view = AttentionView(self._no_rows, self._no_rows, self._tables, 0, 0)

    def begin(self, view: AttentionView) -> None:
        group, none, tables = self.group, self._no_rows, self._tables[: view.block_tables.shape[0]]
        group.ops.find_pages(group.page_of, none, view.block_tables, group.block_size, none, tables, group.missing)
        self.view = replace(view, block_tables=tables)


@dataclass(frozen=True, slots=True)
class PagedReader:
    lookup: PageLookup
    inner: BorrowedLayer

    def write(self, qkv: Tensor, rope_args: RopeArgs, slots: Tensor) -> None:
        self.inner.write(qkv, rope_args, slots)

    def attend(self, q: Tensor, view: AttentionView, params: AttentionParams) -> Tensor:
        return self.inner.attend(q, self.lookup.view, params)


@dataclass(frozen=True, slots=True)
class CodedReader:
    """Codes are of turned keys, so queries are turned too, by the operator that writes: it is handed no keys."""

    owner: CodedLayerKV
    ops: Ops

    def write(self, qkv: Tensor, rope_args: RopeArgs, slots: Tensor) -> None:
        assert rope_args.num_kv_heads == 0, "a reader writes nothing"
        self.ops.tq_rope_write(self.owner.store, qkv, rope_args, slots)

    def attend(self, q: Tensor, view: AttentionView, params: AttentionParams) -> Tensor:
        return self.owner.attend(q, view, params)


def _token_bytes(part: LayerKV | LayerState) -> int:
    if isinstance(part, DenseLayer):
        return 2 * part.k.shape[1] * part.k.shape[3] * part.k.element_size()
    if isinstance(part, CodedLayerKV):
        records, layout = part.store.records, part.store.layout
        return int(records.shape[1] * layout.nbytes // layout.block_size)
    return _token_bytes(part.exact) if isinstance(part, CaptureLayer) else 0
