"""The ways keys and values are kept. Each layer has its own part, which writes rows by slot and attends to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from sparkdraft.kernels.view import AttentionParams, AttentionView


class Turn(NamedTuple):
    """What is done to a layer's queries and keys before they are compared, as the kernels take it."""

    positions: Tensor  # int32 [rows]
    rope: Tensor  # float32 [context, head_dim]
    num_heads: int
    num_kv_heads: int
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    eps: float


class LayerKV(Protocol):
    """One layer's keys and values: all that a layer knows of the cache. Layers may keep theirs differently."""

    def write(self, qkv: Tensor, turn: Turn, slots: Tensor) -> None:
        """qkv [rows, (heads + 2 * kv_heads) * head_dim]: its queries are rotated in place, the rest is kept by slot.

        slots: int32 [rows]; a row with a negative slot is not kept. Only the queries of qkv are defined afterwards.
        """

    def attend(self, q: Tensor, view: AttentionView, params: AttentionParams) -> Tensor:
        """q [rows, heads, head_dim] -> [rows, heads * head_dim]."""


class KVFormat(Protocol):
    """A whole cache: the layers' parts, and what they share."""

    bytes_per_token: int  # of all layers

    @property
    def layers(self) -> Sequence[LayerKV]: ...

    def send(self, changes: list[tuple[int, int]]) -> None: ...  # (block, its page of exact rows or -1)
