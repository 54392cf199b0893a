"""How keys and values are kept. Each layer has a part of its own, which writes rows by slot and attends to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from sparkdraft.kernels.view import AttentionParams, AttentionView, RopeArgs


class LayerKV(Protocol):
    """One layer's keys and values: all that a layer knows of the cache. Layers may keep theirs differently."""

    def write(self, qkv: Tensor, rope_args: RopeArgs, slots: Tensor) -> None:
        """qkv [rows, projected heads * head_dim]: its queries are rotated in place, the rest is kept by slot.

        slots: int32 [rows]; a row with a negative slot is not kept. Only the queries of qkv are defined afterwards.
        """

    def attend(self, q: Tensor, view: AttentionView, params: AttentionParams) -> Tensor:
        """q [rows, heads, head_dim] -> [rows, heads * head_dim]."""


class Meter(Protocol):
    """What a cache measures of itself while it serves."""

    def errors(self) -> dict[str, Any]: ...  # waits for the device

    def forget(self) -> None:
        """Begin anew: what ran so far was nobody's request."""


Begin = Callable[[Tensor, AttentionView], None]
Commit = Callable[[Tensor], None]


class KVFormat:
    """A whole cache: the layers' parts, and what they share. A format says what it can do by what is not None."""

    layers: Sequence[LayerKV]
    bytes_per_token: int  # of the layers that keep every position

    # Before a step's layers run, as part of it (and of its recording): where its rows go, int32 [rows], and what they
    # see. None where layers need no more than what they are handed.
    begin: Begin | None = None

    # After a step: how many of each sequence's rows stand, int32 [sequences] on the cache's device, in the order of the
    # step's view; 0 for a sequence that is padding. Rows of rejected drafts are the last ones and do not count.
    #
    # None where a row's K/V depend on that row alone: there the rejected rows are behind the sequence's length, nobody
    # reads them, and the next step writes over them. State that runs through all rows (recurrent layers) must be
    # brought back to the last row that stands, and learns here which one that is. Every step ends with one call, before
    # the next step is launched. Where the device takes steps by itself the call is recorded within the step
    # (engine/lanes.py): the counts stay on the device, and it must not wait for them.
    commit: Commit | None = None
    meter: Meter | None = None

    def bytes_read(self, context: int) -> int:
        """What a row that sees so many positions reads of it."""
        return context * self.bytes_per_token
