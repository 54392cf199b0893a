"""The ways keys and values are kept. All write a layer's rows by slot and attend to them through a view."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from sparkdraft.kernels.view import AttentionView


class KVFormat(Protocol):
    bytes_per_token: int  # of all layers

    def rotate_and_write(
        self,
        layer: int,
        qkv: Tensor,  # [rows, (heads + 2 * kv_heads) * head_dim]; only its queries are defined afterwards
        positions: Tensor,
        rope: Tensor,
        counts: tuple[int, int],  # query and K/V heads
        norms: tuple[Tensor | None, Tensor | None],  # of queries and of keys
        eps: float,
        slots: Tensor,  # int32 [rows]; negative: nowhere
    ) -> None: ...

    def send(self, changes: list[tuple[int, int]]) -> None: ...  # (block, its page of exact rows or -1)

    def attend(
        self, layer: int, q: Tensor, view: AttentionView, scale: float, causal: bool = True, window: int = 0
    ) -> Tensor: ...
