"""What a layer asks of its part of the cache. A layer knows nothing else of it: formats, pages and slots are in
cache/."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from sparkdraft.kernels.ops import AttentionParams, AttentionView, RecurrentState, RopeArgs


class LayerKV(Protocol):
    """The keys and values of one attention layer. Layers of one model may have different formats."""

    def write(self, qkv: Tensor, rope_args: RopeArgs, slots: Tensor) -> None:
        """Rotate the queries of qkv [tokens, projected heads * head_dim] in place, and store its keys and values.

        slots: int32 [tokens]; a token with a negative slot is not stored. Afterwards only the queries are defined.
        """

    def attend(self, q: Tensor, view: AttentionView, params: AttentionParams) -> Tensor:
        """q [tokens, heads, head_dim] -> [tokens, heads * head_dim]."""


class LayerState(Protocol):
    """The states of one recurrent layer, for all requests."""

    @property
    def memory(self) -> RecurrentState: ...

    @property
    def slots(self) -> Tensor:
        """int32 [sequences]: the slot of each sequence of the running step."""
