"""The mean of each layer's keys over a fixed text, which a coded cache subtracts from every key before coding it.

A softmax does not change if all its scores change by the same number, so a centre costs nothing, and the codes' bits
describe only what differs between keys. It is the same for every request and fixed before the first one: blocks can be
shared, and no text depends on which request came first. Keys are averaged before their rotation, and the mean is then
rotated by the average over all positions of the context. The pairs that RoPE turns fast average to nearly zero, the
slow ones remain, and none depends on the length of the fixed text. The caller runs the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkdraft.cache.formats import KVFormat, LayerKV, LayerState
from sparkdraft.kernels.ops import AttentionParams, AttentionView, RopeArgs
from sparkdraft.kernels.reference import rms_norm

TEXT = Path(__file__).parent.parent.parent / "assets" / "calibration.txt"
SKIPPED = 16  # rows at the beginning, whose keys differ from all others

# Runs a model once over one sequence: its ids, positions and slots, the view, and the layers' caches.
Forward = Callable[[Tensor, Tensor, Tensor, AttentionView, Sequence[LayerKV | LayerState]], object]


class KeyMean:
    """One layer's cache that averages the keys written to it and passes every call on to the given one."""

    def __init__(self, inner: LayerKV) -> None:
        self.inner = inner
        self.centre = torch.empty(0)  # float32 [kv_heads, head_dim]

    def write(self, qkv: Tensor, rope_args: RopeArgs, slots: Tensor) -> None:
        heads, kv_heads = rope_args.num_heads, rope_args.num_kv_heads
        keys = qkv.view(qkv.shape[0], rope_args.projected_heads, -1)[SKIPPED:, heads : heads + kv_heads]
        normed = keys if rope_args.k_norm is None else rms_norm(keys, rope_args.k_norm, rope_args.eps)
        self.centre = _rotated(normed.float().mean(0), rope_args.table)
        self.inner.write(qkv, rope_args, slots)

    def attend(self, q: Tensor, view: AttentionView, params: AttentionParams) -> Tensor:
        return self.inner.attend(q, view, params)


def key_centres(
    forward: Forward, ids: Sequence[int], kv: KVFormat, block_size: int, device: torch.device
) -> list[Tensor]:
    """The centre of each layer with attention: float32 [kv_heads, head_dim]. kv: an exact cache for these ids, not
    needed afterwards."""
    parts: list[Any] = list(kv.layers)
    means, rows = {i: KeyMean(part) for i, part in enumerate(parts) if hasattr(part, "attend")}, len(ids)
    assert rows > SKIPPED, f"{rows} ids are too few to average"
    positions = torch.arange(rows, dtype=torch.int32, device=device)
    starts, context = (torch.tensor(values, dtype=torch.int32, device=device) for values in ([0, rows], [rows]))
    tables = torch.arange(-(-rows // block_size), dtype=torch.int32, device=device).unsqueeze(0)
    view = AttentionView(starts, context, tables, rows, rows)
    if kv.begin:
        kv.begin(positions, view)
    layers = [means.get(i, part) for i, part in enumerate(parts)]
    forward(torch.tensor(ids, dtype=torch.int32, device=device), positions, positions, view, layers)
    return [layer.centre for layer in means.values()]


def _rotated(mean: Tensor, rope: Tensor) -> Tensor:
    """The average over all positions of the context of the rotated mean."""
    cos, sin = rope.double().mean(0).float().chunk(2)
    half = len(cos)
    a, b, rest = mean[:, :half], mean[:, half : 2 * half], mean[:, 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=1)
