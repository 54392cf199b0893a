"""Drives a model over hand-made ragged batches: any split of any sequences, in any order, in one paged cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from sparkdraft import kernels
from sparkdraft.cache.formats import KVCache
from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.cache.layered import LayeredKV
from sparkdraft.cache.states import RecurrentStates, StateSizes, recurrent_layers
from sparkdraft.kernels.ops import AttentionView, Ops
from sparkdraft.models.common.blocks import Step
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.registry import architecture, read_config
from sparkdraft.weights.checkpoint import open_checkpoint
from sparkdraft.weights.loader import Loader

BLOCK, BLOCKS, SLOTS = 8, 64, 8
MOST_ROWS = 16  # of a step whose rows may be taken back


def mixed_cache(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, ops: Ops
) -> tuple[KVCache, RecurrentStates | None]:
    """Exact K/V of all positions, and states. What was never written must never be read: it is not a number."""
    dense = DenseKV(config.cached_attention, BLOCKS, BLOCK, dtype, device, ops)
    for cache in (*dense.k, *dense.v):
        cache.fill_(float("nan"))
    mixers, states = [layer.mixer for layer in config.layers], None
    if recurrent := recurrent_layers(config):
        states = RecurrentStates(recurrent, StateSizes(SLOTS, 2, MOST_ROWS, BLOCKS, BLOCK), dtype, device, ops)
        poison(states)
    return LayeredKV(mixers, dense, {}, states, ops), states


def poison(states: RecurrentStates) -> None:
    for part in (states.state, states.keys, states.updates, states.decays, states.inputs, states.saved_state):
        part.fill_(float("nan"))
    states.saved_inputs.fill_(float("nan"))
    states.base.fill_(1 << 20)


class Harness:
    def __init__(
        self,
        folder: Path,
        kernel: str = "reference",
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        change: Callable[[ModelConfig], ModelConfig] = lambda config: config,  # before it is built
    ) -> None:
        self.device, ops = torch.device(device), kernels.load(kernel)
        source = open_checkpoint(str(folder))
        config = change(read_config(source.config))
        self.loader = Loader(source, self.device, dtype, ops)
        self.model = architecture(config.model_type).build(config, self.loader, ops, 256)
        self.kv, self.states = mixed_cache(config, dtype, self.device, ops)
        self.lengths: dict[str, int] = {}
        self.tables: dict[str, list[int]] = {}
        self.free = list(torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)))

    @torch.inference_mode()
    def run(self, chunks: dict[str, list[int]], aux_layers: tuple[int, ...] = ()) -> tuple[dict[str, Tensor], Tensor]:
        """Feed each named sequence its next ids in one ragged batch: (logits of its rows by name, aux_hidden)."""
        ids, positions, slots, starts, contexts = [], [], [], [0], []
        for name, chunk in chunks.items():
            first = self.lengths.setdefault(name, 0)
            table = self.tables.setdefault(name, [])
            last = first + len(chunk)
            while len(table) * BLOCK < last:
                table.append(int(self.free.pop()))
            ids += chunk
            positions += range(first, last)
            slots += [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(first, last)]
            starts.append(len(ids))
            contexts.append(last)
            self.lengths[name] = last
        width = max(len(self.tables[n]) for n in chunks)
        tables = [self.tables[n] + [0] * (width - len(self.tables[n])) for n in chunks]
        view = AttentionView(
            self._int(starts), self._int(contexts), self._int(tables), max(map(len, chunks.values())), max(contexts)
        )
        if self.states:
            slot_of = {name: i % SLOTS for i, name in enumerate(self.lengths)}
            self.states.send([(block, slot_of[name]) for name in chunks for block in self.tables[name]])
        if self.kv.begin:
            self.kv.begin(self._int(slots), view)
        step = Step(self._int(ids), self._int(positions), self._int(slots), view, self.kv.layers)
        shape = (len(ids), len(aux_layers), self.model.config.hidden_size)
        aux_hidden = torch.full(shape, float("nan"), device=self.device, dtype=self.model.dtype)
        residual = self.model.forward(step, aux_layers, aux_hidden if aux_layers else None)
        logits = self.model.logits(residual).float().cpu()
        return {name: logits[starts[i] : starts[i + 1]] for i, name in enumerate(chunks)}, aux_hidden.float().cpu()

    def _int(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)
