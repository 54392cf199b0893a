"""What training reads from the frozen target: the residuals of a batch's context, and its logits as a teacher.

The target is the engine's own model on the engine's own kernels, run once over the packed documents, so a drafter
learns from the same numbers that it will see in service. Nothing is written to disk, and layers after the last one
needed are not run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.kernels.ops import AttentionView
from sparkdraft.models.common.blocks import Decoder, Step
from sparkdraft.train.batches import TrainBatch
from sparkdraft.train.target import Target
from sparkdraft.weights.linear import Linear

BLOCK = 16  # positions per cache block


class Features:
    def __init__(
        self, target: Target, taps: tuple[int, ...], context: int, longest: int, teach: Linear | None = None
    ) -> None:
        """teach: the head, if the logits of every row are wanted too; then all layers run."""
        self.target, self.taps, self.teach, self.longest = target, taps, teach is not None, longest
        whole = target.decoder
        layers = whole.layers if teach else whole.layers[: max(taps) + 1]
        ends = (whole.embedding, teach or whole.head, whole.norm, whole.context, whole.ops, whole.dtype)
        self.decoder = Decoder(whole.config, layers, *ends)
        config, device = whole.config, target.device
        # Every document begins in its own cache block: at worst one more block per document, of at least two tokens.
        self.num_blocks = context // BLOCK + context // 2 + 1
        # Rows are not read again once their layer is done: layers of one geometry share their tensors.
        one_each = {spec.geometry: spec for spec in config.attention[: len(layers)]}
        shared = DenseKV(list(one_each.values()), self.num_blocks, BLOCK, target.dtype, device, target.ops)
        by_geometry = dict(zip(one_each, shared.layers, strict=True))
        self.kv = [by_geometry[spec.geometry] for spec in config.attention[: len(layers)]]

    @torch.no_grad()
    def __call__(self, batch: TrainBatch) -> tuple[Tensor, Tensor | None]:
        """Taps [N, taps * hidden], and logits [N, vocab] if they teach."""
        rows, hidden = len(batch.ids), self.decoder.config.hidden_size
        lengths = batch.bounds.diff()
        blocks = (lengths + BLOCK - 1) // BLOCK
        first = blocks.cumsum(0, dtype=torch.int32) - blocks  # first block of each document
        columns = torch.arange(-(-self.longest // BLOCK), dtype=torch.int32, device=lengths.device)
        tables = (first.unsqueeze(1) + columns).clamp_max(self.num_blocks - 1)
        document = torch.searchsorted(batch.bounds, torch.arange(rows, device=lengths.device), right=True) - 1
        slots = (first[document] * BLOCK + batch.positions).int()
        view = AttentionView(batch.bounds, lengths, tables, self.longest, self.longest)
        taps = torch.empty(rows, len(self.taps), hidden, dtype=self.target.dtype, device=lengths.device)
        residual = self.decoder.forward(Step(batch.ids, batch.positions, slots, view, self.kv), self.taps, taps)
        return taps.flatten(1), self.decoder.scores(residual) if self.teach else None
