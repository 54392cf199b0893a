"""Compares a coded KV cache with its bound: what it gives back for the tokens of a text, against what was written.

The model runs once over the text with an exact cache. Each layer's tokens are also written to its part of the engine's
own cache, in free blocks, and read back. The errors of codes depend on their bits and hardly on the model
(docs/numbers/turboquant.md), so a cache beyond the limit has a broken kernel, a wrong table or a wrong layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparkdraft.backend import CodingError
from sparkdraft.cache.formats import KeptLayer
from sparkdraft.cache.formats.dense import DenseLayer, rows_at, whole_text
from sparkdraft.engine.build import scratch_cache
from sparkdraft.engine.engine import Engine
from sparkdraft.kernels.ops import AttentionParams, AttentionView, RopeArgs
from sparkdraft.models.common.blocks import Step

MOST_CHARS, MOST_ROWS = 600, 64


class TwinLayer:
    """A layer's exact cache that writes each token to a coded one as well, and compares what they hold."""

    def __init__(self, number: int, exact: DenseLayer, kept: KeptLayer, slots: Tensor) -> None:
        self.number, self.exact, self.kept, self.slots = number, exact, kept, slots
        self.found: list[CodingError] = []

    def write(self, qkv: Tensor, rope_args: RopeArgs, slots: Tensor) -> None:
        other = qkv.clone()  # each cache changes its own copy
        self.exact.write(qkv, rope_args, slots)
        self.kept.write(other, rope_args, self.slots)
        k, v = (rows_at(cache, slots) for cache in (self.exact.k, self.exact.v))
        found = zip(("keys", "values"), self.kept.deviations(k, v, self.slots), strict=True)
        self.found += [CodingError(f"{what} of layer {self.number}", *each) for what, each in found]

    def attend(self, q: Tensor, view: AttentionView, params: AttentionParams) -> Tensor:
        return self.exact.attend(q, view, params)


@torch.inference_mode()
def coding_errors(engine: Engine, ids: Sequence[int]) -> list[CodingError]:
    """Empty if no layer is coded. No request may run meanwhile."""
    kept = {
        i: part
        for i, layer in enumerate(engine.runner.kv.layers)
        if isinstance(layer, KeptLayer) and (part := layer.lossy)
    }
    ids = ids[: min(MOST_ROWS, engine.plan.max_model_len)]
    size, model, device = engine.plan.block_size, engine.runner.model, engine.runner.aux_hidden.device
    blocks = range(-(-len(ids) // size))
    if not kept or not ids:
        return []
    assert not engine.has_work and len(blocks) <= engine.pool.num_free, "the cache is in use"
    scratch = scratch_cache(model.config, len(ids), engine.plan, model.dtype, device, model.ops)
    taken = [engine.pool.allocate() for _ in blocks]
    slots = torch.tensor([taken[i // size] * size + i % size for i in range(len(ids))], dtype=torch.int32).to(device)
    tokens, positions, view = whole_text(ids, scratch, size, device)
    exact: list[Any] = list(scratch.layers)
    twins = {i: TwinLayer(i, exact[i], part, slots) for i, part in kept.items()}
    parts = [twins.get(i, layer) for i, layer in enumerate(exact)]
    model.forward(Step(tokens, positions, positions, view, parts))
    engine.pool.release(reversed(taken))
    found = [error for twin in twins.values() for error in twin.found]
    return sorted(found, key=lambda e: e.error / e.limit if e.error == e.error else float("inf"), reverse=True)
