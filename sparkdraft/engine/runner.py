"""Runs the target model once over a batch: prompt chunks, single rows, all in one ragged pass.

It lays the rows out (engine/inputs.py), calls the model or replays its recording (engine/graphs.py), and returns the
logits of the rows that are to be sampled. What is run is the scheduler's business, what is sampled the sampler's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.core import Batch, TokenLogprob, Work
from sparkdraft.engine.graphs import DecodeGraphs, gpu_sizes
from sparkdraft.engine.inputs import StepInputs, bounds, is_decode
from sparkdraft.engine.sampler import token_logprob
from sparkdraft.kernels import Unrecordable
from sparkdraft.models.blocks import Decoder, Step
from sparkdraft.plan.resolve import Fallback, Plan

PROMPT_LOGPROB_ROWS = 128  # rows of logits alive at once while a prompt is scored


class Runner:
    def __init__(self, model: Decoder, kv: DenseKV, plan: Plan, device: torch.device) -> None:
        self.model, self.kv, self.plan = model, kv, plan
        max_blocks = -(-plan.max_model_len // plan.block_size)
        self.inputs = StepInputs(plan.max_rows, plan.max_seqs, max_blocks, plan.block_size, device)
        self.graphs: DecodeGraphs | None = None
        self._residual: Tensor | None = None  # of the last eager step, for prompt log-probabilities
        if plan.graphs:
            self._record()

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor:
        """float32 logits [sampled rows, vocab], in the order of the batch."""
        if self.graphs and is_decode(batch):
            size = self.graphs.size_for(len(batch.work))
            self.inputs.fill_decode(batch, size)
            return self.graphs.replay(size)[: len(batch.work)].float()
        num_sampled = self.inputs.fill(batch)
        self._residual = self._forward(batch.num_rows, len(batch.work), *bounds(batch))
        rows = self.inputs.logit_rows[:num_sampled]
        chosen = self._residual if num_sampled == batch.num_rows else self._residual[rows.long()]
        return self.model.logits(chosen).float()

    @torch.inference_mode()
    def prompt_logprobs(self, work: Work, first_row: int, top: int) -> list[TokenLogprob]:
        """What the rows of one prompt chunk, just run, say of the prompt ids that follow them."""
        assert self._residual is not None
        request, start = work.request, work.start
        stop = min(work.stop, request.num_prompt - 1)
        out = []
        for low in range(start, stop, PROMPT_LOGPROB_ROWS):
            high = min(low + PROMPT_LOGPROB_ROWS, stop)
            rows = self._residual[first_row + low - start : first_row + high - start]
            scores = self.model.logits(rows).float().log_softmax(-1)
            following = request.prompt_ids[low + 1 : high + 1]
            out += [token_logprob(row, token, top) for row, token in zip(scores, following, strict=True)]
        return out

    def _forward(self, rows: int, num_seqs: int, max_query: int, max_context: int) -> Tensor:
        inputs = self.inputs
        step = Step(
            inputs.token_ids[:rows],
            inputs.positions[:rows],
            inputs.slots[:rows],
            inputs.view(num_seqs, max_query, max_context),
            self.kv,
        )
        return self.model.forward(step)

    def _decode(self, size: int) -> Tensor:
        return self.model.logits(self._forward(size, size, 1, self.plan.max_model_len))

    @torch.inference_mode()
    def _record(self) -> None:
        """On a GPU all sizes: a first request should be as fast as the tenth. On a CPU one, to see that it works."""
        most = self.plan.max_seqs
        sizes = gpu_sizes(most) if self.plan.device == "cuda" else list(range(1, most + 1))
        graphs = DecodeGraphs(sizes, self._decode, self.model.ops)
        try:
            graphs.record(sizes if self.plan.device == "cuda" else [1])
        except Unrecordable as reason:
            message = f"the model's '{reason}' is not one of the CPU kernels"
            self.plan.fallbacks.append(Fallback("decode steps are launched one operator at a time", message))
        else:
            self.graphs = graphs
