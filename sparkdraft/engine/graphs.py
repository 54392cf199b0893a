"""Decode steps recorded once a batch size and replayed by one call: a CUDA graph on a GPU, a list of calls on a CPU.

Launching a step operator by operator costs as much host time as the operators themselves take, on a GPU and on a CPU
alike. Recordings read the step's fixed input buffers, lengths included, so one serves any context. On a GPU they are
made at start, for a few sizes; a batch runs in the next larger one, padded with rows that write nowhere. On a CPU they
are made when a size first comes up. Prompt chunks run eagerly. How to record is the kernels' business.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from torch import Tensor


class DecodeGraphs:
    def __init__(self, sizes: list[int], run: Callable[[int], Tensor], ops: ModuleType) -> None:
        """run(size) computes logits [size, vocab] from the fixed input buffers."""
        self._sizes, self._run, self._ops = sizes, run, ops
        self._recorded: dict[int, Any] = {}

    def size_for(self, num_seqs: int) -> int:
        return next(s for s in self._sizes if s >= num_seqs)

    def record(self, sizes: list[int]) -> None:
        """Largest first: on a GPU the smaller ones then fit into its memory."""
        for size in sorted(sizes, reverse=True):
            beside = next(iter(self._recorded.values()), None)
            self._recorded[size] = self._ops.Recording(partial(self._run, size), beside)

    def replay(self, size: int) -> Tensor:
        if size not in self._recorded:
            self.record([size])
        logits: Tensor = self._recorded[size].replay()
        return logits


def gpu_sizes(max_seqs: int) -> list[int]:
    """1, 2, 4, then every 8th, up to max_seqs."""
    sizes = [b for b in (1, 2, 4) if b < max_seqs] + list(range(8, max_seqs, 8))
    return [*sizes, max_seqs]
