"""CUDA graphs of the decode step: the whole forward pass recorded once a batch size, then replayed by one launch.

Recorded at the buckets below with the step's fixed input buffers; a batch runs in the next larger bucket, padded with
rows that write nowhere. Lengths are read on the device, so one recording serves any context. Prompt chunks run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def buckets(max_seqs: int) -> list[int]:
    """1, 2, 4, 8, then every 8th, up to max_seqs."""
    sizes = [b for b in (1, 2, 4) if b < max_seqs] + list(range(8, max_seqs, 8))
    return [*sizes, max_seqs]


class DecodeGraphs:
    def __init__(self, max_seqs: int, run: Callable[[int], Tensor]) -> None:
        """run(bucket) computes logits [bucket, vocab] from the fixed input buffers."""
        self._run = run
        self._sizes = buckets(max_seqs)
        self._recorded: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._memory = torch.cuda.graph_pool_handle()

    def bucket(self, num_seqs: int) -> int:
        return next(b for b in self._sizes if b >= num_seqs)

    def record_all(self) -> None:
        """Largest first, so that the smaller ones fit into its memory."""
        for bucket in reversed(self._sizes):
            self._run(bucket)  # compiles kernels outside the recording
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory):
                logits = self._run(bucket)
            self._recorded[bucket] = (graph, logits)

    def replay(self, bucket: int) -> Tensor:
        graph, logits = self._recorded[bucket]
        graph.replay()
        return logits
