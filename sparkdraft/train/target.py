"""The model that a drafter is trained for, as generating and training use it: a decoder, its tokenizer, its template.

It is built from the engine's own parts, but as floats (bfloat16 on a GPU, float32 on a CPU) and without scheduler, plan
or cache, because its users bring their own batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparkdraft import kernels
from sparkdraft.config import EngineConfig
from sparkdraft.drafters.dflash_config import DFlashConfig, check_fits
from sparkdraft.engine.machine import detect
from sparkdraft.kernels.ops import Ops
from sparkdraft.models.common.blocks import Decoder
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.registry import architecture, read_config
from sparkdraft.text import chat
from sparkdraft.text.tokenizer import Tokenizer
from sparkdraft.weights.checkpoint import open_checkpoint
from sparkdraft.weights.loader import Loader, Progress
from sparkdraft.weights.quant.stored import take_rows


@dataclass(frozen=True)
class ChatModel:
    """What prompts and conversations ask of a model, whatever runs it."""

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
    """A model as floats: it is trained for, and on a GPU it writes its own texts."""

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
    """Chosen rows [ids, hidden] of the head of a drafter's target, as floats; nothing else of the target is read."""
    checkpoint = open_checkpoint(name)
    config = read_config(checkpoint.config)
    check_fits(draft, config)
    table = checkpoint.read("model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight")
    rows = take_rows(table, ids)
    return rows if isinstance(rows, Tensor) else rows.dequantize()
