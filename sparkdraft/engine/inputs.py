"""Lays a step's rows out as the integers that kernels read: ids, positions, slots, lengths, block tables.

They live at fixed offsets of one host buffer and one device buffer of the same shape, so a step costs a single copy to
the device (none on a CPU, where both are the same memory) and CUDA graphs find them where they were at capture.
"""

from __future__ import annotations

import numpy as np
import torch

from sparkdraft.core import Batch, Work
from sparkdraft.kernels.view import AttentionView


class StepInputs:
    def __init__(self, max_rows: int, max_seqs: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self.block_size, self.max_blocks, self.max_seqs = block_size, max_blocks, max_seqs
        sizes = (max_rows, max_rows, max_rows, max_seqs + 1, max_seqs, max_seqs, max_seqs * max_blocks)
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = self._host if device.type == "cpu" else torch.zeros_like(self._host, device=device)
        self._tables_at = sum(sizes[:-1])
        arrays = [t.numpy() for t in self._host.split(sizes)]
        self._ids, self._positions, self._slots, self._starts, self._contexts, self._logit_rows = arrays[:6]
        self._tables = arrays[6].reshape(max_seqs, max_blocks)
        tensors = self._device.split(sizes)
        self.token_ids, self.positions, self.slots, self.query_start, self.context_len, self.logit_rows = tensors[:6]
        self.block_tables = tensors[6].view(max_seqs, max_blocks)

    def fill(self, batch: Batch) -> int:
        """Write the batch and send it to the device; returns how many rows are to be sampled."""
        row, num_sampled = 0, 0
        for seq, work in enumerate(batch.work):
            end = row + work.num_scheduled
            self._fill_sequence(seq, work, row, end)
            if work.samples:
                self._logit_rows[num_sampled] = end - 1
                num_sampled += 1
            row = end
        self._send(len(batch.work))
        return num_sampled

    def fill_decode(self, batch: Batch, size: int) -> None:
        """A batch of single rows, padded to 'size' sequences whose rows write nowhere and see nothing."""
        for seq, work in enumerate(batch.work):
            self._fill_sequence(seq, work, seq, seq + 1)
        used = len(batch.work)
        self._ids[used:size] = 0
        self._positions[used:size] = 0
        self._slots[used:size] = -1
        self._contexts[used:size] = 0
        self._starts[used + 1 : size + 1] = np.arange(used + 1, size + 1)
        self._send(size)

    def view(self, num_seqs: int, max_query: int, max_context: int) -> AttentionView:
        return AttentionView(
            self.query_start[: num_seqs + 1],
            self.context_len[:num_seqs],
            self.block_tables[:num_seqs],
            max_query,
            max_context,
        )

    def _fill_sequence(self, seq: int, work: Work, row: int, end: int) -> None:
        first, last = work.start, work.stop
        blocks = np.frombuffer(work.request.blocks, dtype=np.int32)
        self._tables[seq, : len(blocks)] = blocks
        self._ids[row:end] = work.request.ids(first, last)
        if end - row == 1:
            self._positions[row] = first
            self._slots[row] = blocks[first // self.block_size] * self.block_size + first % self.block_size
        else:
            positions = np.arange(first, last, dtype=np.int32)
            self._positions[row:end] = positions
            self._slots[row:end] = blocks[positions // self.block_size] * self.block_size + positions % self.block_size
        self._starts[seq + 1] = end
        self._contexts[seq] = last

    def _send(self, num_seqs: int) -> None:
        if self._device is not self._host:
            used = self._tables_at + num_seqs * self.max_blocks
            self._device[:used].copy_(self._host[:used], non_blocking=True)


def bounds(batch: Batch) -> tuple[int, int]:
    """(most rows of a sequence, longest context): the host numbers that shape an eager launch."""
    rows = max(w.num_scheduled for w in batch.work)
    return rows, max(w.stop for w in batch.work)


def is_decode(batch: Batch) -> bool:
    return all(w.num_scheduled == 1 and w.samples for w in batch.work)
