"""The drafter for a target: its config.json in z-lab's layout, before any weight exists.

Heads, rotation and norms are the target's, aux layers are spread over its depth, and the mask is an id that the target
never learnt, so that its embedding means nothing else. settings.py has the sizes of the run itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.drafters.dflash import SINK_KEY, WINDOW_KEY, DFlashConfig, spread_aux_layers
from sparkdraft.drafters.find import open_drafter
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.train.corpus import Corpus
from sparkdraft.train.settings import FitSettings
from sparkdraft.weights.quant.stored import as_float


def find_mask_id(embedding: Tensor, tokenizer_size: int) -> int:
    """An id beyond the tokenizer's, else the last of the ids that share one row of the embedding: training never
    changed them."""
    if tokenizer_size < embedding.shape[0]:
        return tokenizer_size
    places = torch.arange(1, embedding.shape[1] + 1, dtype=torch.float64, device=embedding.device)
    _, group, sizes = (embedding.double() @ places).unique(return_inverse=True, return_counts=True)
    if int(sizes.max()) == 1:
        raise UserError(
            "every token of the target has been trained, so none is free to be the mask: name one with --mask-id"
        )
    return int((group == sizes.argmax()).nonzero().max())


def drafter_config(target: ModelConfig, settings: FitSettings, mask_id: int) -> dict[str, Any]:
    """A complete config.json."""
    attention, mlp = target.uniform()
    aux_layers = settings.aux_layers or spread_aux_layers(target.num_layers)
    beyond = [t for t in aux_layers if not 0 <= t < target.num_layers]
    if beyond:
        raise UserError(
            f"--aux-layers names layer {beyond[0]}; {settings.target} has layers 0 to {target.num_layers - 1}: "
            "choose among them"
        )
    if not 0 <= mask_id < target.vocab_size:
        raise UserError(f"--mask-id is {mask_id}; the target's ids go from 0 to {target.vocab_size - 1}")
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "block_size": settings.block,
        "dflash_config": {"mask_token_id": mask_id, "target_layer_ids": list(aux_layers), **_seen(settings)},
        "dtype": "bfloat16",
        "hidden_size": target.hidden_size,
        "intermediate_size": settings.intermediate or mlp.intermediate_size,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "num_target_layers": target.num_layers,
        "layer_types": ["full_attention"] * settings.layers,
        "max_position_embeddings": target.max_position,
        "max_window_layers": settings.layers,
        "rms_norm_eps": target.rms_eps,
        "rope_theta": attention.rope.theta,
        "rope_scaling": dict(attention.rope.scaling) if attention.rope.scaling else None,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "vocab_size": target.vocab_size,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
    }


def _seen(settings: FitSettings) -> dict[str, int]:
    """Keys of the config for a drafter that is shown a part of the context."""
    return {SINK_KEY: settings.sinks, WINDOW_KEY: settings.window} if settings.window else {}


# ---- a drafter that exists already


def grown_config(settings: FitSettings, target: ModelConfig) -> dict[str, Any]:
    """The config of the drafter that a run begins with, with as many layers as the run asks for."""
    held = open_drafter(settings.init)
    config = dict(held.config)
    if "lm_head.weight" not in held.names():
        config.pop("draft_vocab_size", None)  # the ids that it drafts among are chosen at export
    draft = DFlashConfig.read(config)
    draft.check_fits(target)
    _trainable(draft, config, settings)
    layers: dict[str, Any] = {"num_hidden_layers": settings.layers, "max_window_layers": settings.layers}
    layers["layer_types"] = ["full_attention"] * settings.layers
    config.pop("quantization_config", None)
    return config | layers | {"dflash_config": {**config["dflash_config"], **_seen(settings)}}


def _trainable(draft: DFlashConfig, config: Mapping[str, Any], settings: FitSettings) -> None:
    """Raises UserError for a drafter that the trainer would change, or that does not match the run's settings."""
    own = settings.init
    if "dflash_config" not in config:
        raise UserError(f"--init names {own}, which is not in z-lab's layout: only those can be gone on from")
    plain = len({spec.window for spec in draft.model.attention}) == 1 and not any(
        s.causal for s in draft.model.attention
    )
    scaled = (draft.input_embedding_scale or 1.0, draft.output_multiplier, draft.softcap) != (1.0, 1.0, None)
    if not plain or scaled or draft.draft_vocab_size != draft.model.vocab_size or draft.model.uniform()[0].bias:
        raise UserError(f"--init names {own}, which has windows, causal layers, biases or its own head: not supported")
    if settings.layers < draft.model.num_layers:
        raise UserError(
            f"--layers is {settings.layers}; {own} has {draft.model.num_layers} already: give as many or more"
        )
    asked = {"block": draft.block_size, "aux_layers": draft.aux_layers, "mask_id": draft.mask_token_id}
    asked["intermediate"] = draft.model.uniform()[1].intermediate_size
    for name, held in asked.items():
        value = getattr(settings, name)
        if value not in (held, (), -1, 0):
            raise UserError(f"--{name.replace('_', '-')} is {value}; {own} has {held}: leave it out, or give that")


def trained_weights(name: str) -> dict[str, Tensor]:
    source = open_drafter(name)
    parts = {tensor: source.read(tensor) for tensor in source.names() if tensor != "d2t"}
    return {n: as_float(p) for n, p in parts.items()}


def draft_ids(settings: FitSettings, corpus: Corpus, count: int) -> Tensor:
    """The 'count' ids that it drafts among, int64, ascending: those of the drafter that the run begins with if they are
    as many, else the most frequent ones of the corpus."""
    if settings.init:
        source = open_drafter(settings.init)
        if source.config.get("draft_vocab_size") == count and "d2t" in source.names():
            offsets = as_float(source.read("d2t")).long()
            return offsets + torch.arange(count)
    return torch.from_numpy(corpus.most_frequent(count))
