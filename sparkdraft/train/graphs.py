"""A training step as one CUDA graph: launching its thousand small kernels takes longer than running them.

The first steps of each shape run eagerly, because kernels are compiled and chosen there; then the step is recorded and
replayed over fixed input buffers. Whatever changes from step to step must be a tensor, as the batch and the learning
rates are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparkdraft.train.batches import TrainBatch

EAGER = 3  # steps of a shape before it is recorded
DOCUMENTS = 64  # batches are padded to a multiple of this number of documents: the target's attention visits them all


@dataclass(slots=True)
class Shape:
    batch: TrainBatch  # the buffers that a recording reads
    steps: int = 0
    graph: torch.cuda.CUDAGraph | None = None


class StepGraphs:
    def __init__(self, run: Callable[[TrainBatch], None], device: torch.device) -> None:
        self.run, self.device, self.eager = run, device, EAGER
        self.shapes: dict[tuple[int, int], Shape] = {}

    def __call__(self, batch: TrainBatch) -> None:
        shape = self._place(batch.padded(DOCUMENTS))
        shape.steps += 1
        if shape.steps <= self.eager:
            self.run(shape.batch)
            return
        if shape.graph is None:
            shape.graph = self._record(shape.batch)
        shape.graph.replay()

    def _place(self, batch: TrainBatch) -> Shape:
        """Copy the batch into its shape's buffers on the device."""
        key = batch.width, len(batch.bounds)
        if key not in self.shapes:
            buffers: dict[str, Any] = {
                name: torch.empty_like(t, device=self.device) for name, t in batch.tensors().items()
            }
            self.shapes[key] = Shape(replace(batch, **buffers))
        held = self.shapes[key].batch.tensors()
        for name, tensor in batch.tensors().items():
            held[name].copy_(tensor.pin_memory(), non_blocking=True)
        return self.shapes[key]

    def _record(self, batch: TrainBatch) -> torch.cuda.CUDAGraph:
        """Record the step, which runs nothing: the caller replays it."""
        pool = next((s.graph.pool() for s in self.shapes.values() if s.graph), None)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream(self.device)):
            self.run(batch)
        return graph
