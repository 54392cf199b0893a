"""How keys and values are kept. Each layer has its own part of the cache, which writes rows by slot and attends to
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from sparkdraft.kernels.ops import AttentionParams, AttentionView, RecurrentState, RopeArgs


class LayerKV(Protocol):
    """One layer's keys and values: the only part of the cache that the layer knows. Layers may have different
    formats."""

    def write(self, qkv: Tensor, rope_args: RopeArgs, slots: Tensor) -> None:
        """Rotate the queries of qkv [rows, projected heads * head_dim] in place, and store its keys and values by slot.

        slots: int32 [rows]; a row with a negative slot is not stored. Afterwards only the queries of qkv are defined.
        """

    def attend(self, q: Tensor, view: AttentionView, params: AttentionParams) -> Tensor:
        """q [rows, heads, head_dim] -> [rows, heads * head_dim]."""


class LayerState(Protocol):
    """One recurrent layer's memory of all requests, and whose is whose: all of the cache that the layer knows."""

    @property
    def memory(self) -> RecurrentState: ...

    @property
    def slots(self) -> Tensor:  # int32 [sequences]: where in the memory each sequence of the running step is
        ...


class Meter(Protocol):
    """What a cache measures about itself while it serves."""

    def errors(self) -> dict[str, Any]: ...  # waits for the device

    def forget(self) -> None:
        """Start anew: the requests so far were not a user's."""


Begin = Callable[[Tensor, AttentionView], None]


class KVFormat:
    """A whole cache: the layers' parts, and what they share. An optional capability that a format lacks is None.

    A cache is never told which rows were committed. K/V depend on their own row alone: those of rejected drafts lie
    behind the sequence's length, and the next step writes over them. States of recurrent layers lag behind and replay
    what was committed (kernels/reference/recurrent.py).
    """

    layers: Sequence[LayerKV | LayerState]
    bytes_per_token: int  # of the layers that keep every position

    # Runs before a step's layers, as part of the step and of its recording: gets the slots of its rows, int32 [rows],
    # and its view. None where layers need nothing beyond what they are handed.
    begin: Begin | None = None

    meter: Meter | None = None

    def bytes_read(self, context: int) -> int:
        """What a row that sees so many positions reads of it."""
        return context * self.bytes_per_token
