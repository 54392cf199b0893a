"""Turns a corpus into training batches: whole documents laid end to end, and anchors among the tokens of their answers.

Each epoch reads the documents in its own order, and each step draws its anchors by its own number. So a batch is a
function of (seed, step, cursor), and a run that resumes at a saved cursor sees what an unbroken one would. Documents
come from the memory-mapped corpus one by one; tensors are made here, on the CPU.

    ids        | prompt  answer  user  answer | prompt  answer | prompt  ans      N tokens, the last document cut to fit
    anchors              ^  ^           ^  ^              ^              ^        A of them, sorted
    a block    [anchor, mask, mask, ...] at the anchor's position, W rows; its labels are the answer's ids after it

A drafter that is shown the first and the last rows of a context only (drafters/base.py) has its context laid out
anew: a
long document is divided into chunks of anchors, and each chunk gets a copy of the rows that its blocks see. So what a
block sees is always one stretch, and the work of attention does not grow with the lengths of documents. A block sees up
to a quarter more than it must, as it sees up to a block of the cache more in service; finer chunks take more rows.

    a document        | first |                    | last rows | a chunk of anchors |
    laid out      ... | first | last rows | a chunk |                                      'seen': the token of each row
    a block sees      starts                 stops                                         up to its anchor
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.drafters.base import SeenContext
from sparkdraft.train.corpus import Corpus
from sparkdraft.train.memory import CHUNKS, LAID_OUT

SHORT = 8  # a document of at most one part in so many of a batch may be cut at the batch's end


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
    starts: Tensor  # int32 [A]: the first row of the layout that each block sees
    stops: Tensor  # int32 [A]: the first row after those
    seen: Tensor  # int32 [R]: the token of each row of the layout; empty: the tokens themselves are the layout
    labels: Tensor  # int64 [A, W - 1]; -1 past the end of the answer
    temperature: Tensor  # float32 [A]: the temperature of the anchor's document; 0: greedy
    width: int  # W

    def tensors(self) -> dict[str, Tensor]:
        names = ("ids", "bounds", "positions", "anchors", "starts", "stops", "seen", "labels", "temperature")
        return {name: getattr(self, name) for name in names}

    def padded(self, multiple: int) -> TrainBatch:
        """The batch with empty documents at the end, so that there are few shapes."""
        missing = -(len(self.bounds) - 1) % multiple
        return replace(self, bounds=torch.cat((self.bounds, self.bounds[-1:].expand(missing))))


class Batches:
    def __init__(
        self,
        corpus: Corpus,
        context: int,
        block_rows: int,
        widths: tuple[int, ...],
        longest: int,
        seed: int,
        sees: SeenContext | None = None,
    ) -> None:
        """context: tokens per batch. block_rows: rows of all blocks together. longest: tokens per document at most.
        sees: what the drafter is shown of a context; None: all of it."""
        self.corpus, self.context, self.block_rows, self.widths = corpus, context, block_rows, widths
        self.longest, self.seed, self.sees = min(longest, context), seed, sees
        begins, ends = corpus.spans.T
        owner = np.repeat(np.arange(len(corpus)), np.diff(corpus.first_span))
        self.usable = np.unique(owner[np.minimum(ends, self.longest) - begins >= 2])  # an anchor and a label
        if not len(self.usable):
            raise UserError(
                f"{corpus.folder}: no document has an answer of two tokens within {self.longest}; "
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
        left, order, at = self.context, self._epoch(self.cursor.epoch), self.cursor.document
        while left > 0:
            document = int(order[at % len(order)])  # an epoch's last batch is filled with its first documents
            length = min(int(self.corpus.length[document]), self.longest, left)
            documents.append(document)
            lengths.append(length)
            left, at = left - length, at + 1
        self.cursor = Cursor(self.cursor.epoch, at) if at < len(order) else Cursor(self.cursor.epoch + 1)
        return documents, lengths

    def _epoch(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self._pack(np.random.default_rng((self.seed, 0, epoch)).permutation(self.usable))
        return self._order[1]

    def _pack(self, order: np.ndarray) -> np.ndarray:
        """The same documents so that only short ones are cut at the end of a batch: a long one that does not fit waits
        for the next batch. Without it, the ends of long documents would hardly ever be seen."""
        lengths = np.minimum(self.corpus.length, self.longest).astype(int)
        packed, waiting, left = list[int](), deque[int](), self.context
        for document, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
            if left < length > self.context // SHORT:
                waiting.append(document)
                continue
            packed.append(document)
            left -= length
            while left <= 0:
                left = self.context
                while waiting and lengths[waiting[0]] <= left:
                    packed.append(waiting.popleft())
                    left -= lengths[packed[-1]]
        return np.array([*packed, *waiting])

    def _batch(self, documents: list[int], lengths: list[int], width: int, rng: np.random.Generator) -> TrainBatch:
        bounds = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        parts = zip(documents, lengths, strict=True)
        ids = np.concatenate([self.corpus.ids(d)[:n] for d, n in parts]).astype(np.int32)
        owner = np.repeat(np.arange(len(lengths)), lengths)  # [N]: the document of each token
        positions = np.arange(self.context, dtype=np.int32) - bounds[owner]
        ends = self._answer_ends(documents, bounds)
        candidates = np.flatnonzero(np.arange(self.context) + 1 < ends)
        assert len(candidates), "the first document of a batch is usable and whole"
        count = self.block_rows // width
        anchors = np.sort(rng.choice(candidates, count, replace=count > len(candidates))).astype(np.int64)
        where = anchors[:, None] + np.arange(1, width)  # [A, W - 1]
        inside = where < ends[anchors][:, None]
        labels = np.where(inside, ids[np.minimum(where, self.context - 1)], -1).astype(np.int64)
        temperature = self.corpus.temperature[documents].astype(np.float32)[owner[anchors]]
        int32 = {"ids": ids, "bounds": bounds, "positions": positions, "anchors": anchors}
        int32 |= self._layout(anchors, bounds, owner[anchors])
        tensors = {name: torch.from_numpy(value.astype(np.int32)) for name, value in int32.items()}
        return TrainBatch(
            **tensors, labels=torch.from_numpy(labels), temperature=torch.from_numpy(temperature), width=width
        )

    def _layout(self, anchors: np.ndarray, bounds: np.ndarray, owner: np.ndarray) -> dict[str, np.ndarray]:
        """Lay out what the blocks see. owner: the document of each anchor."""
        if self.sees is None:
            return {"starts": bounds[owner], "stops": anchors, "seen": anchors[:0]}
        first, last = self.sees.first, self.sees.last
        most = first + last  # rows that a block must see
        chunk = -(-most // CHUNKS)
        place = np.maximum(anchors - bounds[owner] - most, 0) // chunk  # of each anchor: its chunk in its document
        new = np.concatenate(([True], (np.diff(owner) != 0) | (np.diff(place) != 0)))  # anchors that begin a chunk
        parts, starts, moved, end = list[np.ndarray](), list[int](), list[int](), 0
        for document, number in zip(owner[new].tolist(), place[new].tolist(), strict=True):
            begin, stop = int(bounds[document]), int(bounds[document + 1])
            shown = begin + first + number * chunk  # the first row after the first ones
            tail = np.arange(shown, min(begin + most + (number + 1) * chunk, stop))
            head = np.arange(begin, min(begin + first, stop))
            parts += [head, tail]
            starts.append(end)
            moved.append(end + first - shown)  # a token's row in the layout, less its number
            end += len(head) + len(tail)
        which = np.cumsum(new) - 1
        # One size for all batches. Nothing sees rows past the end; their gradients, 0, are added to different tokens.
        seen = np.arange(LAID_OUT * self.context) % self.context
        seen[:end] = np.concatenate(parts)
        return {"starts": np.array(starts)[which], "stops": anchors + np.array(moved)[which], "seen": seen}

    def _answer_ends(self, documents: list[int], bounds: np.ndarray) -> np.ndarray:  # int64 [N]
        """Where the answer of each token ends, or is cut; 0 for tokens of no answer."""
        ends = np.zeros(self.context, dtype=np.int64)
        for document, start, stop in zip(documents, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            for begin, end in (start + self.corpus.answers(document)).tolist():
                if begin < stop:
                    ends[begin : min(end, stop)] = min(end, stop)
        return ends
