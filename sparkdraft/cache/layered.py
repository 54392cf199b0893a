"""Puts a model's cache together of what its layers need, and reads it for drafters that attend to the target's K/V.

A layer over the whole context has its part in the chosen format (cache/formats), one with a sliding window in that
window's pages (cache/windows.py), a recurrent one among the states (cache/states.py), and one that reads another's K/V
has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from sparkdraft.cache.formats import KeptLayer, KVCache
from sparkdraft.cache.formats.dense import BorrowedLayer
from sparkdraft.cache.states import RecurrentStates
from sparkdraft.cache.windows import PageLookup, WindowGroup, WindowLayer
from sparkdraft.kernels.ops import AttentionView, Ops
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
        """windows: the groups, per window; layers of other windows are full layers."""
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
            group.lookup.begin(slots, view)
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
    """Reads some layers' keys and values, for a drafter whose queries attend to the target's. Writes nothing.

    A reader is a `LayerKV` that is handed queries alone: `write` norms and rotates them as the keys were, and `attend`
    is the layer's own. Pages are looked up in tables of the reader's own. The plan's `reads_back` keeps the pages held.
    """

    def __init__(self, kv: KVCache, layers: Sequence[int]) -> None:
        self._lookups: dict[int, PageLookup] = {}  # by the id of a group, which has no other name
        self.layers = [self._reader(kv.layers[number]) for number in layers]
        kept = (part for number in layers if isinstance(part := kv.layers[number], KeptLayer))
        self.bytes_per_token = sum(part.bytes_per_token for part in kept)  # of the layers that keep every position

    def begin(self, view: AttentionView) -> None:
        """Before the layers read: looks up the pages of the blocks that the view names."""
        for lookup in self._lookups.values():
            lookup.begin(view.context_len[:0], view)  # nothing is written

    def _reader(self, part: LayerKV | LayerState) -> LayerKV:
        if isinstance(part, WindowLayer):
            assert isinstance(part.inner, KeptLayer)
            group = part.lookup.group
            lookup = self._lookups.setdefault(id(group), PageLookup(group, 0))
            return WindowLayer(lookup, part.inner.reader())
        assert isinstance(part, KeptLayer), f"{type(part).__name__} holds no keys and values"
        return part.reader()
