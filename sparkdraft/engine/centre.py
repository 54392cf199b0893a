"""The mean of each layer's keys over a fixed text: what a coded cache takes off every key before it rounds it.

A softmax does not see what all its scores share, so a centre costs nothing and leaves the bits to what differs between
keys. It is the same for every request and fixed before the first is read, so that blocks can be shared and nobody's
text depends on who came first. Keys are averaged as they are before their rotation, and the mean is turned as the whole
context turns it on average: pairs that turn fast vanish by themselves, slow ones stay, and none is learnt at the angle
that a short text happens to end at.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from sparkdraft.cache.formats import KVFormat, LayerKV, Turn
from sparkdraft.kernels.reference import rms_norm
from sparkdraft.kernels.view import AttentionParams, AttentionView
from sparkdraft.models.blocks import Decoder, Step

TEXT = Path(__file__).parent.parent / "assets" / "calibration.txt"
SKIPPED = 16  # rows of the beginning, whose keys are like no others


class KeyMean:
    """One layer's cache that averages the keys written to it, and is otherwise the one it is given."""

    def __init__(self, inner: LayerKV) -> None:
        self.inner = inner
        self.mean = torch.empty(0)  # [kv_heads, head_dim], of keys as they are before their rotation
        self.rope = torch.empty(0)  # the layer's table

    def write(self, qkv: Tensor, turn: Turn, slots: Tensor) -> None:
        heads, kv_heads = turn.num_heads, turn.num_kv_heads
        keys = qkv.view(qkv.shape[0], heads + 2 * kv_heads, -1)[SKIPPED:, heads : heads + kv_heads]
        normed = keys if turn.k_norm is None else rms_norm(keys, turn.k_norm, turn.eps)
        self.mean, self.rope = normed.float().mean(0), turn.rope
        self.inner.write(qkv, turn, slots)

    def attend(self, q: Tensor, view: AttentionView, params: AttentionParams) -> Tensor:
        return self.inner.attend(q, view, params)


def key_centres(
    model: Decoder, ids: Sequence[int], kv: KVFormat, block_size: int, device: torch.device
) -> list[Tensor]:
    """float32 [kv_heads, head_dim] of each layer; 'kv' is an exact cache for these ids, and not needed afterwards."""
    means, rows = [KeyMean(layer) for layer in kv.layers], len(ids)
    assert rows > SKIPPED, f"{rows} ids are too few to average"
    positions = torch.arange(rows, dtype=torch.int32, device=device)
    starts, context = (torch.tensor(values, dtype=torch.int32, device=device) for values in ([0, rows], [rows]))
    tables = torch.arange(-(-rows // block_size), dtype=torch.int32, device=device).unsqueeze(0)
    view = AttentionView(starts, context, tables, rows, rows)
    model.forward(Step(torch.tensor(ids, dtype=torch.int32, device=device), positions, positions, view, means))
    return [_turned(layer.mean, layer.rope) for layer in means]


def _turned(mean: Tensor, rope: Tensor) -> Tensor:
    """What a key that is the mean everywhere is on average, over all positions of the context."""
    cos, sin = rope.double().mean(0).float().chunk(2)
    half = len(cos)
    a, b, rest = mean[:, :half], mean[:, half : 2 * half], mean[:, 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=1)
