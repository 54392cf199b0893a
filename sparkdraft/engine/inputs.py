"""Writes the integers of a step that kernels read: ids, positions, slots, lengths, block tables.

They have fixed offsets in a host buffer and in one device buffer of the same shape. So a step costs a single copy to
the device (none on a CPU, where both are the same memory), and CUDA graphs find the integers where they were at
capture.

The copy is asynchronous: it waits in the device's queue behind the kernels of earlier steps. A step that samples
nothing (a chunk of a long prompt) never makes the host wait, so the host may fill the next step before the copy of this
one has run. Therefore two host buffers take turns, and each is refilled only after its own copy is done.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from sparkdraft.kernels.ops import AttentionView

NUM_HOST_BUFFERS = 2  # the host can fill one step while the copy of the step before waits


class Copied(Protocol):
    def synchronize(self) -> None:
        """Wait until the copy is done and its source may be written again."""


IntArray = npt.NDArray[np.int32]
Copy = Callable[[torch.Tensor, torch.Tensor], Copied]  # copies the host's tensor to the device's, without waiting


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one sequence in a step: ids from position 'start' on, and from which row on logits are read."""

    ids: list[int]
    start: int
    blocks: array[int]
    read_from: int  # index among its own rows
    read_to: int
    visible: IntArray | None = None  # the blocks that its rows may read, including those they write; None: all

    @property
    def num_read(self) -> int:
        return self.read_to - self.read_from


class HostBuffer:
    """One step's integers as the host writes them: numpy views of one tensor, and the copy that reads it."""

    def __init__(self, sizes: Sequence[int], max_seqs: int, pinned: bool) -> None:
        self.tensor = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=pinned)
        arrays = [part.numpy() for part in self.tensor.split(list(sizes))]
        self.ids, self.positions, self.slots, self.starts, self.contexts, self.logit_rows = arrays[:6]
        self.tables = arrays[6].reshape(max_seqs, -1)
        self.copied: Copied | None = None  # the copy that was started last

    def wait(self) -> None:
        """Wait until the copy started last has read this buffer."""
        if self.copied:
            self.copied.synchronize()


class StepInputs:
    def __init__(
        self,
        max_rows: int,
        max_seqs: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        copy: Copy | None = None,
    ) -> None:
        """copy: how integers reach the device. By default CUDA's asynchronous copy, and no copy on a CPU."""
        self.block_size, self.max_blocks, self.max_seqs = block_size, max_blocks, max_seqs
        sizes = (max_rows, max_rows, max_rows, max_seqs + 1, max_seqs, max_rows, max_seqs * max_blocks)
        on_gpu = device.type == "cuda"
        self._copy = copy or (_copy_to_gpu if on_gpu else None)
        self._hosts = [HostBuffer(sizes, max_seqs, on_gpu) for _ in range(NUM_HOST_BUFFERS if self._copy else 1)]
        self._turn = 0
        first = self._hosts[0].tensor
        self._device = torch.zeros_like(first, device=device) if self._copy else first
        self._tables_at = sum(sizes[:-1])
        tensors = self._device.split(sizes)
        self.token_ids, self.positions, self.slots, self.query_start, self.context_len, self.logit_rows = tensors[:6]
        self.block_tables = tensors[6].view(max_seqs, max_blocks)

    def fill(self, parts: Sequence[Rows], seqs: int = 0, rows: int = 0) -> int:
        """Write the parts one after the other and send them to the device. Returns the number of rows whose logits are
        read.

        The step is padded to 'seqs' sequences and 'rows' rows. Padding sequences have no rows. Padding rows belong to
        no sequence and have slot -1, so they write nowhere.
        """
        self._turn = (self._turn + 1) % len(self._hosts)
        host = self._hosts[self._turn]
        host.wait()
        row, num_read = 0, 0
        for seq, part in enumerate(parts):
            end = row + len(part.ids)
            self._fill_sequence(host, seq, part, row, end)
            host.logit_rows[num_read : num_read + part.num_read] = np.arange(row + part.read_from, row + part.read_to)
            num_read += part.num_read
            row = end
        _pad(host, slice(row, max(rows, row)), slice(len(parts), max(seqs, len(parts))), num_read)
        if self._copy:
            used = self._tables_at + max(len(parts), seqs) * self.max_blocks
            host.copied = self._copy(host.tensor[:used], self._device[:used])
        return num_read

    def view(self, num_seqs: int, max_query: int, max_context: int) -> AttentionView:
        return AttentionView(
            self.query_start[: num_seqs + 1],
            self.context_len[:num_seqs],
            self.block_tables[:num_seqs],
            max_query,
            max_context,
        )

    def _fill_sequence(self, host: HostBuffer, seq: int, part: Rows, row: int, end: int) -> None:
        first, size = part.start, self.block_size
        blocks = np.frombuffer(part.blocks, dtype=np.int32)
        visible = blocks if part.visible is None else part.visible
        host.tables[seq, : len(visible)] = visible
        host.ids[row:end] = part.ids
        if end - row == 1:
            host.positions[row] = first
            host.slots[row] = blocks[first // size] * size + first % size
        else:
            positions = np.arange(first, first + end - row, dtype=np.int32)
            host.positions[row:end] = positions
            host.slots[row:end] = blocks[positions // size] * size + positions % size
        host.starts[seq + 1] = end
        host.contexts[seq] = first + end - row - (len(blocks) - len(visible)) * size


def _pad(host: HostBuffer, rows: slice, seqs: slice, num_read: int) -> None:
    host.ids[rows] = 0
    host.positions[rows] = 0
    host.slots[rows] = -1
    host.contexts[seqs] = 0
    host.starts[seqs.start + 1 : seqs.stop + 1] = rows.start
    host.logit_rows[num_read : seqs.stop] = 0  # padding logits are read from row 0, which always exists


def _copy_to_gpu(source: torch.Tensor, target: torch.Tensor) -> Copied:
    target.copy_(source, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return done
