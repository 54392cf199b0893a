"""Runs the target model once over a batch: prompt chunks, single rows, drafts to verify, all in one ragged pass.

It lays the rows out (engine/inputs.py), calls the model or replays its recording (engine/graphs.py), and returns the
logits of the rows that are to be sampled; what a drafter asked to see of the hidden states is left in `taps`. What is
run is the scheduler's business, what is sampled the sampler's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.core import Batch, TokenLogprob, Work
from sparkdraft.engine.graphs import Graphs, Shape, gpu_sizes
from sparkdraft.engine.inputs import Rows, StepInputs
from sparkdraft.engine.sampler import token_logprob
from sparkdraft.kernels import Unrecordable
from sparkdraft.models.blocks import Decoder, Step
from sparkdraft.plan.resolve import Fallback, Plan

PROMPT_LOGPROB_ROWS = 128  # rows of logits alive at once while a prompt is scored


class Runner:
    def __init__(
        self, model: Decoder, kv: DenseKV, plan: Plan, device: torch.device, tap_layers: Sequence[int] = ()
    ) -> None:
        self.model, self.kv, self.plan, self.tap_layers = model, kv, plan, tap_layers
        max_blocks = -(-plan.max_model_len // plan.block_size)
        self.inputs = StepInputs(plan.max_rows, plan.max_seqs, max_blocks, plan.block_size, device)
        shape = (plan.max_rows if tap_layers else 0, len(tap_layers), model.config.hidden_size)
        self.taps = torch.empty(shape, dtype=model.norm.gain.dtype, device=device)  # of the last step's rows
        self.graphs: Graphs | None = None
        self._residual: Tensor | None = None  # of the last eager step, for prompt log-probabilities
        if plan.graphs:
            self._record()

    def run(self, batch: Batch) -> Tensor:
        """float32 logits [sampled rows, vocab], in the order of the batch."""
        parts = [_rows(w) for w in batch.work]
        shape = self._recordable(batch)
        if self.graphs and shape:
            num_read = self.inputs.fill(parts, pad_to=shape.seqs)
            return self.graphs.replay(shape)[:num_read]
        num_read = self.inputs.fill(parts)
        max_query, max_context = max(w.num_scheduled for w in batch.work), max(w.stop for w in batch.work)
        self._residual = self._forward(Shape(len(parts), batch.num_rows, max_query), max_context)
        rows = self.inputs.logit_rows[:num_read]
        chosen = self._residual if num_read == batch.num_rows else self.model.ops.embed(rows, self._residual)
        return self.model.logits(chosen)

    def prompt_logprobs(self, work: Work, first_row: int, top: int) -> list[TokenLogprob]:
        """What the rows of one prompt chunk, just run, say of the prompt ids that follow them."""
        assert self._residual is not None
        request, start = work.request, work.start
        stop = min(start + work.num_known, request.num_prompt - 1)
        out = []
        for low in range(start, stop, PROMPT_LOGPROB_ROWS):
            high = min(low + PROMPT_LOGPROB_ROWS, stop)
            rows = self._residual[first_row + low - start : first_row + high - start]
            scores = self.model.logits(rows).log_softmax(-1)
            following = request.prompt_ids[low + 1 : high + 1]
            out += [token_logprob(row, token, top) for row, token in zip(scores, following, strict=True)]
        return out

    def _recordable(self, batch: Batch) -> Shape | None:
        """The shape a batch can be replayed in: decode rows with or without drafts; on a GPU, as many for each."""
        if not batch.decodes:
            return None
        seqs, rows = len(batch.work), batch.num_rows
        if self.plan.device == "cpu":
            return Shape(seqs, rows, 0)  # the CPU's kernels do not ask how rows are shared out
        each = batch.work[0].num_scheduled
        if each == 1 and rows == seqs:
            size = next(s for s in gpu_sizes(self.plan.max_seqs) if s >= seqs)
            return Shape(size, size, 1)
        return Shape(seqs, rows, each) if all(w.num_scheduled == each for w in batch.work) else None

    def _forward(self, shape: Shape, max_context: int) -> Tensor:
        inputs, rows = self.inputs, shape.rows
        step = Step(
            inputs.token_ids[:rows],
            inputs.positions[:rows],
            inputs.slots[:rows],
            inputs.view(shape.seqs, shape.max_query, max_context),
            self.kv,
        )
        return self.model.forward(step, self.tap_layers, self.taps[:rows] if self.tap_layers else None)

    def _decode(self, shape: Shape) -> Tensor:
        return self.model.logits(self._forward(shape, self.plan.max_model_len))

    @torch.inference_mode()
    def _record(self) -> None:
        """On a GPU all sizes: a first request should be as fast as the tenth. On a CPU one, to see that it works."""
        sizes = gpu_sizes(self.plan.max_seqs) if self.plan.device == "cuda" else []
        graphs = Graphs(self._decode, self.model.ops)
        try:
            graphs.record([Shape(s, s, 1) for s in sizes] or [Shape(1, 1, 0)])
        except Unrecordable as reason:
            message = f"the model's '{reason}' is not one of the CPU kernels"
            self.plan.fallbacks.append(Fallback("decode steps are launched one operator at a time", message))
        else:
            self.graphs = graphs


def _rows(work: Work) -> Rows:
    request, known = work.request, work.num_known
    ids = request.ids(work.start, work.start + known) + work.drafts
    return Rows(ids, work.start, request.blocks, len(ids) - work.num_sampled, len(ids))
