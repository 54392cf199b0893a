"""The ways keys and values are kept. All write a layer's rows by slot and attend to them through a view."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from sparkdraft.kernels.view import AttentionView


class Turn(NamedTuple):
    """What is done to a layer's queries and keys before they are compared, as the kernels take it."""

    positions: Tensor  # int32 [rows]
    rope: Tensor  # float32 [context, head_dim]
    num_heads: int
    num_kv_heads: int
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    eps: float


class KVFormat(Protocol):
    bytes_per_token: int  # of all layers

    def rotate_and_write(self, layer: int, qkv: Tensor, turn: Turn, slots: Tensor) -> None:
        """qkv [rows, (heads + 2 * kv_heads) * head_dim]: its queries are turned in place, the rest is kept by slot.

        slots: int32 [rows], a negative one is nowhere. Only the queries of qkv are defined afterwards.
        """

    def send(self, changes: list[tuple[int, int]]) -> None: ...  # (block, its page of exact rows or -1)

    def attend(
        self, layer: int, q: Tensor, view: AttentionView, scale: float, causal: bool = True, window: int = 0
    ) -> Tensor: ...
