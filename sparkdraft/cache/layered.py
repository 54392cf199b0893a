"""A model's cache, put together of what its layers need: blocks, pages of a window, states, or another layer's part.

A layer over the whole context has its part in the full layers' format (exact, 8 bits or coded), a layer with a sliding
window in that window's pages (cache/windows.py), a recurrent layer among the states (cache/states.py), and a layer that
reads another's keys and values has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from sparkdraft.cache.formats import KVFormat, LayerKV, LayerState
from sparkdraft.cache.formats.dense import BorrowedLayer
from sparkdraft.cache.states import RecurrentStates
from sparkdraft.cache.windows import WindowGroup, WindowLayer
from sparkdraft.kernels.ops import AttentionView, Ops
from sparkdraft.models.common.layers import AttentionSpec, RecurrentSpec


class LayeredKV(KVFormat):
    def __init__(
        self,
        mixers: Sequence[AttentionSpec | RecurrentSpec],  # by layer
        full: KVFormat,
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
                layers.append(WindowLayer(group, next(slid[mixer.window])))
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
