"""Drives a model over hand-made ragged batches: any split of any sequences, in any order, in one paged cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from sparkdraft import kernels
from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.kernels.view import AttentionView
from sparkdraft.models.blocks import Step
from sparkdraft.models.config import ModelConfig
from sparkdraft.models.registry import architecture, read_config
from sparkdraft.weights.checkpoint import open_checkpoint
from sparkdraft.weights.loader import Loader

BLOCK = 8


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
        self.kv = DenseKV(config.attention, 64, BLOCK, dtype, self.device, ops)
        for cache in (*self.kv.k, *self.kv.v):
            cache.fill_(float("nan"))  # what was never written must never be read
        self.lengths: dict[str, int] = {}
        self.tables: dict[str, list[int]] = {}
        self.free = list(torch.randperm(64, generator=torch.Generator().manual_seed(1)))

    @torch.inference_mode()
    def run(self, chunks: dict[str, list[int]], tap_layers: tuple[int, ...] = ()) -> tuple[dict[str, Tensor], Tensor]:
        """Feed each named sequence its next ids in one ragged batch: (logits of its rows by name, taps)."""
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
        step = Step(self._int(ids), self._int(positions), self._int(slots), view, self.kv.layers)
        shape = (len(ids), len(tap_layers), self.model.config.hidden_size)
        taps = torch.full(shape, float("nan"), device=self.device, dtype=self.model.dtype)
        residual = self.model.forward(step, tap_layers, taps if tap_layers else None)
        logits = self.model.logits(residual).float().cpu()
        return {name: logits[starts[i] : starts[i + 1]] for i, name in enumerate(chunks)}, taps.float().cpu()

    def _int(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)
