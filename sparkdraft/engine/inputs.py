"""Lays a step's rows out as the integers that kernels read: ids, positions, slots, lengths, block tables.

They live at fixed offsets of one host buffer and one device buffer of the same shape, so a step costs a single copy to
the device (none on a CPU, where both are the same memory) and CUDA graphs find them where they were at capture.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sparkdraft.kernels.view import AttentionView


@dataclass(frozen=True, slots=True)
class Rows:
    """What one sequence brings to a step: ids from position 'start' on, and of which of them the logits are read."""

    ids: list[int]
    start: int
    blocks: array[int]
    read_from: int  # among its own rows
    read_to: int

    @property
    def num_read(self) -> int:
        return self.read_to - self.read_from


class StepInputs:
    def __init__(self, max_rows: int, max_seqs: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self.block_size, self.max_blocks, self.max_seqs = block_size, max_blocks, max_seqs
        sizes = (max_rows, max_rows, max_rows, max_seqs + 1, max_seqs, max_rows, max_seqs * max_blocks)
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = self._host if device.type == "cpu" else torch.zeros_like(self._host, device=device)
        self._tables_at = sum(sizes[:-1])
        arrays = [t.numpy() for t in self._host.split(sizes)]
        self._ids, self._positions, self._slots, self._starts, self._contexts, self._logit_rows = arrays[:6]
        self._tables = arrays[6].reshape(max_seqs, max_blocks)
        tensors = self._device.split(sizes)
        self.token_ids, self.positions, self.slots, self.query_start, self.context_len, self.logit_rows = tensors[:6]
        self.block_tables = tensors[6].view(max_seqs, max_blocks)

    def fill(self, parts: Sequence[Rows], seqs: int = 0, rows: int = 0) -> int:
        """Write the parts one after the other and send them to the device; returns of how many rows logits are read.

        Up to so many sequences and rows more are added: sequences without rows, and rows that are no sequence's and
        write nowhere.
        """
        row, num_read = 0, 0
        for seq, part in enumerate(parts):
            end = row + len(part.ids)
            self._fill_sequence(seq, part, row, end)
            self._logit_rows[num_read : num_read + part.num_read] = np.arange(row + part.read_from, row + part.read_to)
            num_read += part.num_read
            row = end
        self._pad(slice(row, max(rows, row)), slice(len(parts), max(seqs, len(parts))), num_read)
        self._send(max(len(parts), seqs))
        return num_read

    def view(self, num_seqs: int, max_query: int, max_context: int) -> AttentionView:
        return AttentionView(
            self.query_start[: num_seqs + 1],
            self.context_len[:num_seqs],
            self.block_tables[:num_seqs],
            max_query,
            max_context,
        )

    def _fill_sequence(self, seq: int, part: Rows, row: int, end: int) -> None:
        first, size = part.start, self.block_size
        blocks = np.frombuffer(part.blocks, dtype=np.int32)
        self._tables[seq, : len(blocks)] = blocks
        self._ids[row:end] = part.ids
        if end - row == 1:
            self._positions[row] = first
            self._slots[row] = blocks[first // size] * size + first % size
        else:
            positions = np.arange(first, first + end - row, dtype=np.int32)
            self._positions[row:end] = positions
            self._slots[row:end] = blocks[positions // size] * size + positions % size
        self._starts[seq + 1] = end
        self._contexts[seq] = first + end - row

    def _pad(self, rows: slice, seqs: slice, num_read: int) -> None:
        self._ids[rows] = 0
        self._positions[rows] = 0
        self._slots[rows] = -1
        self._contexts[seqs] = 0
        self._starts[seqs.start + 1 : seqs.stop + 1] = rows.start
        self._logit_rows[num_read : seqs.stop] = 0  # of any row that there is

    def _send(self, num_seqs: int) -> None:
        if self._device is not self._host:
            used = self._tables_at + num_seqs * self.max_blocks
            self._device[:used].copy_(self._host[:used], non_blocking=True)
