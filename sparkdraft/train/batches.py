"""Turns a corpus into training batches: whole documents laid end to end, and anchors among their response tokens.

Each epoch reads the documents in its own order, and each step draws its anchors by its own number. So a batch is a
function of (seed, step, cursor), and a run that resumes at a saved cursor sees what an unbroken one would. Documents
come from the memory-mapped corpus one by one; tensors are made here, on the CPU.

    ids        | prompt  response | prompt  response | prompt  resp      N tokens, the last document cut to fit
    anchors              ^  ^   ^              ^               ^         A of them, sorted
    a block    [anchor, mask, mask, ...] at the anchor's position, W rows; its labels are the ids after the anchor
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.train.corpus import Corpus


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where the next batch begins."""

    epoch: int = 0
    document: int = 0  # in the epoch's order


@dataclass(frozen=True, slots=True)
class TrainBatch:
    ids: Tensor  # int32 [N]
    bounds: Tensor  # int32 [documents + 1]: where each begins, and where the last ends
    positions: Tensor  # int32 [N]: in the document
    anchors: Tensor  # int32 [A], ascending
    starts: Tensor  # int32 [A]: where each anchor's document begins
    labels: Tensor  # int64 [A, W - 1]; -1 past the end of the document
    temperature: Tensor  # float32 [A]: the temperature of the anchor's document; 0: greedy
    width: int  # W

    def tensors(self) -> dict[str, Tensor]:
        names = ("ids", "bounds", "positions", "anchors", "starts", "labels", "temperature")
        return {name: getattr(self, name) for name in names}

    def padded(self, multiple: int) -> TrainBatch:
        """The batch with empty documents at the end, so that there are few shapes."""
        missing = -(len(self.bounds) - 1) % multiple
        return replace(self, bounds=torch.cat((self.bounds, self.bounds[-1:].expand(missing))))


class Batches:
    def __init__(
        self, corpus: Corpus, context: int, block_rows: int, widths: tuple[int, ...], longest: int, seed: int
    ) -> None:
        """context: tokens per batch. block_rows: rows of all blocks together. longest: tokens per document at most."""
        self.corpus, self.context, self.block_rows, self.widths = corpus, context, block_rows, widths
        self.longest, self.seed = min(longest, context), seed
        lengths = np.minimum(corpus.length, self.longest).astype(np.int64)
        self.usable = np.flatnonzero(lengths - corpus.num_prompt >= 2)  # an anchor and a label
        if not len(self.usable):
            raise UserError(
                f"{corpus.folder}: no document has two response tokens within {self.longest}; "
                "make more data, or raise --longest and --context"
            )
        self.cursor = Cursor()
        self._order: tuple[int, np.ndarray] | None = None  # (epoch, documents in its order)

    def take(self, step: int) -> TrainBatch:
        """The batch of this step; advances the cursor."""
        documents, lengths = self._gather()
        rng = np.random.default_rng((self.seed, 1, step))
        width = self.widths[int(rng.integers(len(self.widths)))]
        return self._batch(documents, lengths, width, rng)

    # ---- the parts

    def _gather(self) -> tuple[list[int], list[int]]:
        """Documents for one context, and how many tokens of each."""
        documents: list[int] = []
        lengths: list[int] = []
        left, cursor = self.context, self.cursor
        while left > 0:
            if cursor.document == len(self.usable):
                cursor = Cursor(cursor.epoch + 1, 0)
            document = int(self._epoch(cursor.epoch)[cursor.document])
            cursor = Cursor(cursor.epoch, cursor.document + 1)
            length = min(int(self.corpus.length[document]), self.longest, left)
            documents.append(document)
            lengths.append(length)
            left -= length
        self.cursor = cursor
        return documents, lengths

    def _epoch(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng((self.seed, 0, epoch)).permutation(self.usable)
        return self._order[1]

    def _batch(self, documents: list[int], lengths: list[int], width: int, rng: np.random.Generator) -> TrainBatch:
        bounds = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        parts = zip(documents, lengths, strict=True)
        ids = np.concatenate([self.corpus.ids(d)[:n] for d, n in parts]).astype(np.int32)
        owner = np.repeat(np.arange(len(lengths)), lengths)  # [N]: the document of each token
        positions = np.arange(self.context, dtype=np.int32) - bounds[owner]
        prompt = self.corpus.num_prompt[documents].astype(np.int64)
        ends = bounds[1:][owner]
        candidates = np.flatnonzero((positions >= prompt[owner]) & (np.arange(self.context) + 1 < ends))
        assert len(candidates), "the first document of a batch is usable and whole"
        count = self.block_rows // width
        anchors = np.sort(rng.choice(candidates, count, replace=count > len(candidates))).astype(np.int64)
        where = anchors[:, None] + np.arange(1, width)  # [A, W - 1]
        inside = where < ends[anchors][:, None]
        labels = np.where(inside, ids[np.minimum(where, self.context - 1)], -1).astype(np.int64)
        temperature = self.corpus.temperature[documents].astype(np.float32)[owner[anchors]]
        int32 = {"ids": ids, "bounds": bounds, "positions": positions, "anchors": anchors}
        int32["starts"] = bounds[owner[anchors]]
        tensors = {name: torch.from_numpy(value.astype(np.int32)) for name, value in int32.items()}
        return TrainBatch(
            **tensors, labels=torch.from_numpy(labels), temperature=torch.from_numpy(temperature), width=width
        )
