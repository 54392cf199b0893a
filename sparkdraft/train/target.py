"""The target that a drafter is trained for: its decoder, tokenizer and template, and the hidden states training reads.

It is built from the engine's own parts and kernels, so a drafter learns from the numbers that it will see in service,
but as floats (bfloat16 on a GPU, float32 on a CPU) and without scheduler, plan or cache: callers bring their batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparkdraft import kernels
from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.config import EngineConfig
from sparkdraft.drafters.dflash import DFlashConfig
from sparkdraft.engine.machine import detect
from sparkdraft.kernels.ops import AttentionView, Ops
from sparkdraft.models.common.blocks import Decoder, Step
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.registry import architecture, read_config
from sparkdraft.text import chat
from sparkdraft.text.tokenizer import Tokenizer
from sparkdraft.train.batches import TrainBatch
from sparkdraft.weights.checkpoint import open_checkpoint
from sparkdraft.weights.linear import Linear
from sparkdraft.weights.loader import Loader, Progress
from sparkdraft.weights.quant.stored import take_rows

BLOCK = 16  # positions per cache block


@dataclass(frozen=True)
class ChatModel:
    """The tokenizer and the template of a model, whatever runs it."""

    name: str  # as the user named it
    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: str | None
    special: dict[str, Any]  # what the template may read: bos_token and so on
    context: int  # the longest document

    def chat_text(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        return chat.render(self.chat_template, messages, add_generation_prompt, **self.special)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """A conversation up to the assistant's turn, exactly as it is served (llm.py)."""
        control = self.tokenizer.control
        return self.tokenizer.encode_chat(chat.prompt_text(control, self.chat_template, messages, self.special))


@dataclass(frozen=True)
class Target(ChatModel):
    """A model as floats, to train a drafter for; on a GPU it also writes the corpus."""

    decoder: Decoder
    device: torch.device
    dtype: torch.dtype
    ops: Ops


def load_target(name: str, device: str = "auto", context: int = 2048, progress: Progress | None = None) -> Target:
    """context: the longest document that will be read, at most what the model was made for."""
    checkpoint = open_checkpoint(name)
    config = read_config(checkpoint.config)
    where = torch.device(detect(EngineConfig(model=name, device=device)).device)
    on_gpu = where.type == "cuda"
    dtype, ops = torch.bfloat16 if on_gpu else torch.float32, kernels.load("cuda" if on_gpu else "reference")
    tokenizer = Tokenizer.of(checkpoint)
    with torch.no_grad():  # not inference mode: a loss must be able to use the head
        loader = Loader(checkpoint, where, dtype, ops, progress, all_floats=True)
        decoder = architecture(config.model_type).build(config, loader, ops, min(context, config.max_position))
    about = (name, config, tokenizer, checkpoint.chat_template, checkpoint.special, decoder.context)
    return Target(*about, decoder, where, dtype, ops)


def head_rows(name: str, ids: Tensor, draft: DFlashConfig) -> Tensor:
    """Read the rows [ids, hidden] of the output head of a drafter's target as floats, and nothing else of it."""
    checkpoint = open_checkpoint(name)
    config = read_config(checkpoint.config)
    draft.check_fits(config)
    table = checkpoint.read("model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight")
    rows = take_rows(table, ids)
    return rows if isinstance(rows, Tensor) else rows.dequantize()


class Features:
    """Runs the frozen target over a batch of packed documents for its aux hidden states, and its logits as a teacher.

    Layers after the last one needed are not run, and nothing is written to disk.
    """

    def __init__(
        self, target: Target, aux_layers: tuple[int, ...], context: int, longest: int, teach: Linear | None = None
    ) -> None:
        """teach: the output head, if the logits of every token are wanted too; then all layers run."""
        self.target, self.aux_layers, self.teach, self.longest = target, aux_layers, teach is not None, longest
        whole = target.decoder
        layers = whole.layers if teach else whole.layers[: max(aux_layers) + 1]
        ends = (whole.embedding, teach or whole.head, whole.norm, whole.context, whole.ops, whole.dtype)
        self.decoder = Decoder(whole.config, layers, *ends)
        config, device = whole.config, target.device
        # Every document of two or more tokens begins a new cache block: at worst one extra block per document.
        self.num_blocks = context // BLOCK + context // 2 + 1
        # K/V are not read after their layer has run, so layers of one geometry share tensors.
        one_each = {spec.geometry: spec for spec in config.attention[: len(layers)]}
        shared = DenseKV(list(one_each.values()), self.num_blocks, BLOCK, target.dtype, device, target.ops)
        by_geometry = dict(zip(one_each, shared.layers, strict=True))
        self.kv = [by_geometry[spec.geometry] for spec in config.attention[: len(layers)]]

    @torch.no_grad()
    def __call__(self, batch: TrainBatch) -> tuple[Tensor, Tensor | None]:
        """Return aux hidden states [N, aux_hidden * hidden], and logits [N, vocab] for a teacher."""
        rows, hidden = len(batch.ids), self.decoder.config.hidden_size
        lengths = batch.bounds.diff()
        blocks = (lengths + BLOCK - 1) // BLOCK
        first = blocks.cumsum(0, dtype=torch.int32) - blocks  # first block of each document
        columns = torch.arange(-(-self.longest // BLOCK), dtype=torch.int32, device=lengths.device)
        tables = (first.unsqueeze(1) + columns).clamp_max(self.num_blocks - 1)
        document = torch.searchsorted(batch.bounds, torch.arange(rows, device=lengths.device), right=True) - 1
        slots = (first[document] * BLOCK + batch.positions).int()
        view = AttentionView(batch.bounds, lengths, tables, self.longest, self.longest)
        aux_hidden = torch.empty(rows, len(self.aux_layers), hidden, dtype=self.target.dtype, device=lengths.device)
        residual = self.decoder.forward(
            Step(batch.ids, batch.positions, slots, view, self.kv), self.aux_layers, aux_hidden
        )
        return aux_hidden.flatten(1), self.decoder.scores(residual) if self.teach else None
