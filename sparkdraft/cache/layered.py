"""Composes a model's cache of what its layers need, and reads it for drafters that attend to the target's K/V.

A layer over the whole context has its part in the chosen format (cache/formats), a layer with a sliding window in that
window's pages (cache/windows.py), a recurrent layer among the states (cache/states.py), and a layer that reads
another's keys and values has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparkdraft.cache.formats import KeptLayer, KVCache
from sparkdraft.cache.formats.dense import BorrowedLayer
from sparkdraft.cache.states import RecurrentStates
from sparkdraft.cache.windows import WindowGroup, WindowLayer
from sparkdraft.kernels.ops import AttentionParams, AttentionView, Ops, RopeArgs
from sparkdraft.models.common.layers import AttentionSpec, LayerKV, LayerState, RecurrentSpec


class LayeredKV(KVCache):
    def __init__(
        self,
        mixers: Sequence[AttentionSpec | RecurrentSpec],  # by layer
        full: KVCache,
        windows: Mapping[int, WindowGroup],
        states: RecurrentStates | None,
        ops: Ops,
    ) -> None:
        """windows: the groups, per window. A layer whose window is not among them is a full layer."""
        self.full, self.windows, self.states = full, windows, states
        slid = {window: iter(group.kv.layers) for window, group in windows.items()}
        rest, recurrent = iter(full.layers), iter(states.layers if states else ())
        layers: list[LayerKV | LayerState] = []
        for mixer in mixers:
            if isinstance(mixer, RecurrentSpec):
                layers.append(next(recurrent))
            elif mixer.kv_from is not None:
                layers.append(_borrowed(mixer, mixers[mixer.kv_from], layers[mixer.kv_from], windows, ops))
            elif group := windows.get(mixer.window):
                layers.append(group.layer(next(slid[mixer.window])))
            else:
                layers.append(next(rest))
        self.layers, self.bytes_per_token = layers, full.bytes_per_token
        self.begin, self.meter = self._begin, full.meter

    def bytes_read(self, context: int) -> int:
        slid = (min(size, context) * group.kv.bytes_per_token for size, group in self.windows.items())
        states = self.states.bytes_per_step if self.states else 0
        return self.full.bytes_read(context) + sum(slid) + int(states)

    def _begin(self, slots: Tensor, view: AttentionView) -> None:
        if self.full.begin:
            self.full.begin(slots, view)
        for group in self.windows.values():
            group.begin(slots, view)
        if self.states:
            self.states.begin(view)


def _borrowed(
    spec: AttentionSpec,
    owner: AttentionSpec | RecurrentSpec,
    part: LayerKV | LayerState,
    windows: Mapping[int, WindowGroup],
    ops: Ops,
) -> BorrowedLayer:
    assert isinstance(owner, AttentionSpec), "a recurrent layer has no keys and values"
    assert owner.window not in windows or 0 < spec.window <= owner.window, "it reads what is not kept"
    return BorrowedLayer(part, ops)  # type: ignore[arg-type]


class CacheReader:
    """Reads some layers' keys and values: for a drafter whose queries attend to the target's. Writes nothing.

    A reader is a `LayerKV` that is handed queries alone: `write` norms and rotates them as the keys were, and `attend`
    is the layer's own. Pages of layers with a window are looked up in tables of the reader's own, so the tables of a
    running step stay as they are. The plan's `reads_back` makes sure that the pages are still held.
    """

    def __init__(self, kv: KVCache, layers: Sequence[int]) -> None:
        self._lookups: dict[int, PageLookup] = {}  # by the id of a group, which has no other name
        self.layers = [self._reader(kv.layers[number]) for number in layers]
        kept = (part for number in layers if isinstance(part := kv.layers[number], KeptLayer))
        self.bytes_per_token = sum(part.bytes_per_token for part in kept)  # of the layers that keep every position

    def begin(self, view: AttentionView) -> None:
        """Before the layers read: look up the pages of the blocks that the view names."""
        for lookup in self._lookups.values():
            lookup.begin(view)

    def _reader(self, part: LayerKV | LayerState) -> LayerKV:
        if isinstance(part, WindowLayer):
            lookup = self._lookups.setdefault(id(part.group), PageLookup(part.group))
            return PagedReader(lookup, part.inner.reader())
        assert isinstance(part, KeptLayer), f"{type(part).__name__} holds no keys and values"
        return part.reader()


class PageLookup:
    """The pages of a window's layers under the blocks of a view."""

    def __init__(self, group: WindowGroup) -> None:
        self.group = group
        self._tables = torch.zeros_like(group.tables)  # at a fixed address, because captured passes read and write them
        self._no_rows = group.tables.new_zeros(0)
        self.view = AttentionView(self._no_rows, self._no_rows, self._tables, 0, 0)

    def begin(self, view: AttentionView) -> None:
        group, none, tables = self.group, self._no_rows, self._tables[: view.block_tables.shape[0]]
        group.ops.find_pages(group.page_of, none, view.block_tables, group.block_size, none, tables, group.missing)
        self.view = replace(view, block_tables=tables)


@dataclass(frozen=True, slots=True)
class PagedReader:
    lookup: PageLookup
    inner: LayerKV

    def write(self, qkv: Tensor, rope_args: RopeArgs, slots: Tensor) -> None:
        self.inner.write(qkv, rope_args, slots)

    def attend(self, q: Tensor, view: AttentionView, params: AttentionParams) -> Tensor:
        return self.inner.attend(q, self.lookup.view, params)
