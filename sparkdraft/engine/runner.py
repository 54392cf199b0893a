"""Runs the target model once over a batch: prompt chunks, decode tokens and drafts to verify, in one ragged pass.

It lays out the tokens, calls the model or replays its graph (engine/graphs.py), and returns the logits of the rows to
be sampled. The hidden states that a drafter reads are left in `aux_hidden`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparkdraft.cache.formats import KVCache
from sparkdraft.core import Batch, TokenLogprob, Work
from sparkdraft.engine.graphs import Graphs, Shape
from sparkdraft.engine.sampler import token_logprobs
from sparkdraft.kernels.ops import AttentionView, CannotCapture
from sparkdraft.models.common.blocks import Decoder, Step
from sparkdraft.plan.resolve import Plan

PROMPT_LOGPROB_ROWS = 128  # rows of logits in memory at once while a prompt is scored
NUM_HOST_BUFFERS = 2  # the host can fill one while the copy of the other waits


class Runner:
    def __init__(
        self, model: Decoder, kv: KVCache, plan: Plan, device: torch.device, aux_layers: Sequence[int] = ()
    ) -> None:
        self.model, self.kv, self.plan, self.aux_layers = model, kv, plan, aux_layers
        max_blocks = -(-plan.max_model_len // plan.block_size)
        self.inputs = StepInputs(plan.max_step_tokens, plan.max_seqs, max_blocks, plan.block_size, device)
        rows = plan.max_step_tokens + plan.max_seqs  # with the padding of decoding slots (engine/device_steps.py)
        shape = (rows if aux_layers else 0, len(aux_layers), model.config.hidden_size)
        self.aux_hidden = torch.empty(shape, dtype=model.dtype, device=device)  # hidden states of the last step's rows
        self.graphs: Graphs | None = None
        self.unrecorded: list[str] = []  # why steps are not replayed although the plan says so
        self._residual: Tensor | None = None  # of the last eager step, for prompt log-probabilities
        if plan.graphs and plan.device == "cpu":
            self._record()

    def run(self, batch: Batch) -> Tensor:
        """Returns float32 logits [sampled rows, vocab], in the order of the batch."""
        parts, rows = [_rows(w) for w in batch.work], batch.num_rows
        num_read = self.inputs.fill(parts)
        if self.graphs and batch.decodes:
            return torch.as_tensor(self.graphs.replay(_decoding(len(parts), rows)))
        max_query, max_context = max(w.num_scheduled for w in batch.work), max(w.stop for w in batch.work)
        shape = Shape(len(parts), rows, max_query, num_read)
        self._residual = self._forward(shape, max_context)
        return self._logits(shape, self._residual)

    def prompt_logprobs(
        self, work: Work, first_row: int, top: int, residual: Tensor | None = None
    ) -> list[TokenLogprob]:
        """The log-probabilities of the prompt ids that follow the tokens of one chunk. residual: of its step; None: of
        the step that has just run here."""
        residual = self._residual if residual is None else residual
        request, start = work.request, work.start
        stop = min(start + work.num_known, request.num_prompt - 1)
        out: list[TokenLogprob] = []
        if stop <= start:  # a prompt of one id, whose step may have been replayed, which leaves no residual
            return out
        assert residual is not None
        for low in range(start, stop, PROMPT_LOGPROB_ROWS):
            high = min(low + PROMPT_LOGPROB_ROWS, stop)
            rows = residual[first_row + low - start : first_row + high - start]
            out += token_logprobs(self.model.logits(rows), request.prompt_ids[low + 1 : high + 1], top)
        return out

    def _forward(self, shape: Shape, max_context: int) -> Tensor:
        inputs, rows = self.inputs, shape.rows
        slots, view = inputs.slots[:rows], inputs.view(shape.seqs, shape.max_query, max_context)
        if self.kv.begin:
            self.kv.begin(slots, view)
        step = Step(inputs.token_ids[:rows], inputs.positions[:rows], slots, view, self.kv.layers)
        return self.model.forward(step, self.aux_layers, self.aux_hidden[:rows] if self.aux_layers else None)

    def _logits(self, shape: Shape, residual: Tensor) -> Tensor:
        if shape.num_read < shape.rows:
            residual = self.model.ops.embed(self.inputs.logit_rows[: shape.num_read], residual)
        return self.model.logits(residual)

    def _step(self, shape: Shape) -> Tensor:
        return self._logits(shape, self._forward(shape, self.plan.max_model_len))

    @torch.inference_mode()
    def record_rows(self, most: int) -> None:
        """Captures the steps of one request with up to this many tokens: a block of drafts may be cut anywhere, and a
        text should not wait for that."""
        if self.graphs:
            self.graphs.record([_decoding(1, rows) for rows in range(2, most + 1)])

    @torch.inference_mode()
    def _record(self) -> None:
        """Captures one step at start, to see whether it works. A GPU's steps are captured with what follows the model
        (engine/device_steps.py)."""
        graphs = Graphs(self._step, self.model.ops)
        try:
            graphs.record([_decoding(1, 1)])
        except CannotCapture as reason:
            self.unrecorded.append(f"a step calls '{reason}', which is not one of the CPU kernels")
        else:
            self.graphs = graphs


def _decoding(seqs: int, rows: int) -> Shape:
    """The captured step of so many sequences that decode; CPU kernels do not need to know the rows of each."""
    return Shape(seqs, rows, 0, rows)


def _rows(work: Work) -> Rows:
    request, known = work.request, work.num_known
    ids = request.ids(work.start, work.start + known) + work.drafts
    return Rows(ids, work.start, request.blocks, len(ids) - work.num_sampled, len(ids))


class Copied(Protocol):
    def synchronize(self) -> None:
        """Wait until the copy is done and its source may be written again."""


IntArray = npt.NDArray[np.int32]
Copy = Callable[[torch.Tensor, torch.Tensor], Copied]  # copies the host's tensor to the device's, without waiting


@dataclass(frozen=True, slots=True)
class Rows:
    """The tokens of one sequence in a step: ids from position 'start' on, and from which one on logits are read."""

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
        """Waits until the copy started last has read this buffer."""
        if self.copied:
            self.copied.synchronize()


class StepInputs:
    """The integers of a step that kernels read: ids, positions, slots, lengths, block tables.

    They have fixed offsets in a host buffer and in one device buffer of the same shape, so a step costs one copy to the
    device (none on a CPU), and graphs find the integers where they were.

    The copy is asynchronous, and a step that samples nothing never makes the host wait. So two host buffers take turns,
    and each is refilled only after its own copy is done.
    """

    def __init__(
        self,
        max_step_tokens: int,
        max_seqs: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        copy: Copy | None = None,
    ) -> None:
        """copy: how integers reach the device; by default CUDA's asynchronous copy, and none on a CPU."""
        self.block_size, self.max_blocks, self.max_seqs = block_size, max_blocks, max_seqs
        sizes = (*(max_step_tokens,) * 3, max_seqs + 1, max_seqs, max_step_tokens, max_seqs * max_blocks)
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
        """Writes the parts one after the other and sends them to the device. Returns the number of rows whose logits
        are read.

        The step is padded to 'seqs' sequences without tokens, and to 'rows' tokens that belong to no sequence and have
        slot -1.
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
        starts, contexts = self.query_start[: num_seqs + 1], self.context_len[:num_seqs]
        return AttentionView(starts, contexts, self.block_tables[:num_seqs], max_query, max_context)

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
