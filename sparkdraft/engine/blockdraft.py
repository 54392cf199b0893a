"""The tensor side of block drafting: feeds a drafter the hidden states of committed rows, and asks it for blocks.

Rows of a prompt chunk are observed at once. Rows of decoding wait until the request drafts again or a block of the
cache becomes full, and are then observed together: a parked drafter costs next to nothing, and every full block holds
its draft K/V, so whoever finds it in the prefix cache can draft from there.

    committed rows   | observed ................ | pending |         pending never reaches across a full block
    K/V of a draft                                         | anchor, masks |   overwritten once rows are committed
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkdraft.core import Request, Work
from sparkdraft.engine.graphs import Graphs, Shape
from sparkdraft.engine.inputs import Rows, StepInputs
from sparkdraft.kernels import Unrecordable
from sparkdraft.plan.resolve import Fallback, Plan
from sparkdraft.spec.drafter import DraftBlock, Drafter


@dataclass(slots=True)
class Pending:
    """Hidden states of committed rows that the drafter has not seen: positions [start, start + count)."""

    taps: Tensor  # [room, layers tapped, hidden]
    start: int
    count: int = 0


class BlockDraft:
    def __init__(self, drafter: Drafter, plan: Plan, device: torch.device, ops: object) -> None:
        self.drafter, self.plan, self.device = drafter, plan, device
        self.block_size = drafter.caps.block_size
        max_blocks = -(-plan.max_model_len // plan.block_size)
        rows = plan.max_seqs * self.block_size
        self._inputs = StepInputs(rows, plan.max_seqs, max_blocks, plan.block_size, device)
        self._pending: dict[Request, Pending] = {}
        self._graphs = Graphs(self._propose, ops) if plan.graphs else None  # type: ignore[arg-type]

    def width(self, depth: int) -> int:
        """Rows of a block that drafts 'depth' ids: the trained size, or a half or a quarter where that is enough.

        Masks see each other, so a narrower block drafts a little worse: 1 % fewer accepted with a quarter of 16 rows,
        which costs half of what 8 rows do.
        """
        quarter, half = self.block_size // 4, self.block_size // 2
        return next(w for w in (quarter, half, self.block_size) if depth < w)

    @torch.inference_mode()
    def observe(self, work: Work, num_accepted: int, taps: Tensor, positions: Tensor, slots: Tensor) -> None:
        """taps, positions and slots of the work's own rows; those of rejected drafts are left out."""
        count = work.num_known + num_accepted
        if not work.decodes:
            self.drafter.observe(taps[:count], positions[:count], slots[:count])
            return
        pending = self._pending.get(work.request)
        if pending is None:
            room = torch.empty(self.plan.block_size + self.block_size, *taps.shape[1:], dtype=taps.dtype)
            pending = self._pending[work.request] = Pending(room.to(self.device), work.start)
        assert pending.start + pending.count == work.start, (pending.start, pending.count, work.start)
        pending.taps[pending.count : pending.count + count] = taps[:count]
        pending.count += count
        if pending.start // self.plan.block_size != (pending.start + pending.count) // self.plan.block_size:
            self.flush([work.request])

    @torch.inference_mode()
    def flush(self, requests: list[Request]) -> None:
        """Let the drafter see all that waits, of all these requests in one pass."""
        waiting = [(r, self._pending[r]) for r in requests if r in self._pending and self._pending[r].count]
        if not waiting:
            return
        size = self.plan.block_size
        positions: list[int] = []
        slots: list[int] = []
        for request, pending in waiting:
            span = range(pending.start, pending.start + pending.count)
            positions += span
            slots += [request.blocks[p // size] * size + p % size for p in span]
        taps = torch.cat([p.taps[: p.count] for _, p in waiting]) if len(waiting) > 1 else waiting[0][1].taps
        both = torch.tensor([positions, slots], dtype=torch.int32, device=self.device)
        self.drafter.observe(taps[: len(positions)], both[0], both[1])
        for _, pending in waiting:
            pending.start, pending.count = pending.start + pending.count, 0

    @torch.inference_mode()
    def propose(self, works: list[Work]) -> list[list[int]]:
        """Drafts for each, as many as it has room for, in one forward pass of the drafter."""
        self.flush([w.request for w in works])
        depth = max(w.most_drafts for w in works)
        width = self.width(depth)
        mask = [self.drafter.caps.mask_id] * (width - 1)
        parts = [
            Rows([*w.request.ids(w.start, w.start + 1), *mask], w.start, w.request.blocks, 1, depth + 1) for w in works
        ]
        self._inputs.fill(parts)
        shape = Shape(len(works), len(works) * width, len(works) * depth)
        ids = self.drafter.to_target(self._run(shape).max(-1).indices).view(len(works), depth).tolist()
        return [row[: w.most_drafts] for row, w in zip(ids, works, strict=True)]

    def release(self, request: Request) -> None:
        self._pending.pop(request, None)

    def _run(self, shape: Shape) -> Tensor:
        if self._graphs is None:
            return self._propose(shape)
        try:
            return self._graphs.replay(shape)
        except Unrecordable as reason:
            self.plan.fallbacks.append(
                Fallback("drafts are launched one operator at a time", f"the drafter's '{reason}' is not a CPU kernel")
            )
            self._graphs = None
            return self._propose(shape)

    def _propose(self, shape: Shape) -> Tensor:
        """shape.max_query stands for the rows whose logits are read: here every sequence has the same rows."""
        inputs, rows = self._inputs, shape.rows
        block = DraftBlock(
            inputs.token_ids[:rows],
            inputs.positions[:rows],
            inputs.slots[:rows],
            inputs.view(shape.seqs, rows // shape.seqs, self.plan.max_model_len),
            inputs.logit_rows[: shape.max_query],
        )
        return self.drafter.propose(block)
