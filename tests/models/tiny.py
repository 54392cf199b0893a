"""Tiny random checkpoints that transformers writes itself, and its logits for them: the oracle of each architecture."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,  # wide enough that greedy text is not one token for ever
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_theta": 10000.0, "tie_word_embeddings": False}),
    "llama-tied-biased": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "qwen3": ("Qwen3", {"tie_word_embeddings": False}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True}),
}


# Of the architectures below: wide enough for two K/V heads, and with a window that a short prompt is longer than.
SMALL = {**SHAPE, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "pad_token_id": 0}
WINDOW = {"sliding_window": 8}
TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 64,
}  # fmt: skip
QWEN3_MOE = {
    "mlp_only_layers": [1], "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "norm_topk_prob": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
# swiglu_limit: at the published 7 nothing of a tiny model is clamped, and a missing clamp would stay unseen.
GPT_OSS = {
    **WINDOW, "intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2, "swiglu_limit": 0.3,
    "rope_parameters": YARN, "num_hidden_layers": 4,
}  # fmt: skip
GEMMA3 = {**WINDOW, "layer_types": TYPES, "query_pre_attn_scalar": 24, "rope_parameters": {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}}  # fmt: skip
GEMMA4 = {
    **WINDOW, "layer_types": TYPES * 2, "num_hidden_layers": 6, "global_head_dim": 64, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True, "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 320, "num_kv_shared_layers": 0, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}  # fmt: skip
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}
# Three value heads to a key head, as in the 27B; unequal sizes of shared and routed experts.
RECURRENT = {
    "num_hidden_layers": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6,
}  # fmt: skip
SHARED = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
}  # fmt: skip
QUARTER = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
MROPE = {"rope_parameters": {
    **QUARTER, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2], "mrope_interleaved": True,
}}  # fmt: skip
VARIANTS |= {
    "qwen3_next": ("Qwen3Next", {**SMALL, **RECURRENT, **SHARED, "rope_parameters": QUARTER, "mlp_only_layers": [1]}),
    "qwen3_5": ("Qwen3_5", {**SMALL, **RECURRENT, **MROPE, "tie_word_embeddings": False}),
    "qwen3_5_moe": ("Qwen3_5Moe", {**SMALL, **RECURRENT, **SHARED, **MROPE, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {**SMALL, "tie_word_embeddings": True}),
    "qwen2-windows": ("Qwen2", {**SMALL, **WINDOW, "use_sliding_window": True, "layer_types": TYPES}),
    "qwen3-windows": ("Qwen3", {**SMALL, **WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    "mistral": ("Mistral", {**SMALL, **WINDOW}),
    "phi3": (
        "Phi3",
        {**SMALL, **WINDOW, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    "qwen3_moe": ("Qwen3Moe", {**SMALL, **QWEN3_MOE}),
    "qwen3_moe-shares": (
        "Qwen3Moe",
        {**SMALL, **QWEN3_MOE, "norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": []},
    ),
    "gpt_oss": ("GptOss", {**SMALL, **GPT_OSS}),
    "gemma3": ("Gemma3Text", {**SMALL, **GEMMA3}),
    "gemma3-nested": ("Gemma3", {**SMALL, **GEMMA3}),
    "gemma4": ("Gemma4", {**SMALL, **GEMMA4}),
    "gemma4-experts": ("Gemma4", {**SMALL, **GEMMA4, **GEMMA4_EXPERTS}),
}
EYE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
}  # fmt: skip
QWEN_EYE = {
    "vision_config": {
        "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
        "num_position_embeddings": 16, "patch_size": 4,
    },
    "image_token_id": 300, "video_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303,
    "tie_word_embeddings": False,
}  # fmt: skip
# Those whose numbers are in a text_config, and what stands beside it.
NESTED: dict[str, dict[str, Any]] = {
    "Qwen3_5": QWEN_EYE,
    "Qwen3_5Moe": QWEN_EYE,
    "Gemma3": {"vision_config": {**EYE, "image_size": 16}, "image_token_index": 300},
    "Gemma4": {
        "vision_config": {**EYE, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64},
        "audio_config": None, "image_token_id": 300, "boi_token_id": 301, "eoi_token_id": 302, "video_token_id": 303,
        "audio_token_id": 304, "boa_token_id": 305, "eoa_token_index": 306,
    },
}  # fmt: skip
EARLY = ("Llama", "Qwen3")  # shaken as they always were: other tests know their texts


TinyOf = Callable[..., Path]  # the fixture tiny_of: write_tiny without a folder, once per checkpoint


def write_tiny(folder: Path, variant: str, shards: str = "40KB", **changes: Any) -> Path:
    """A sharded checkpoint with a tokenizer of bytes, as a hub would hold it."""
    import transformers

    family, options = VARIANTS[variant]
    torch.manual_seed(11)
    options, kind = {**SHAPE, **options, **changes}, getattr(transformers, f"{family}Config")
    config = kind(text_config=options, **NESTED[family]) if family in NESTED else kind(**options)
    made_for = "ForConditionalGeneration" if family in NESTED else "ForCausalLM"
    model = getattr(transformers, family.removesuffix("Text") + made_for)(config).float().eval()
    if family in EARLY:
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):  # all ones or zeros at birth, which would hide mistakes
                torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    else:
        shake(model)
    model.save_pretrained(folder, max_shard_size=shards)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@torch.no_grad()
def shake(model: torch.nn.Module) -> None:
    """Norms, sinks, scales and routers are 0 or 1 at birth, which would hide mistakes: every number is moved."""
    generator, kind = torch.Generator().manual_seed(1), model.config.model_type
    # Recurrent layers: transformers runs them in chunks of 64 rows, whose rounding larger weights would make visible.
    size = 0.1 if kind.startswith(("qwen3_5", "qwen3_next")) else 0.15
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim <= 1:
            parameter.add_(noise * 0.1)
        else:
            parameter.copy_(noise * size)
        if name.endswith(("q_norm.weight", "k_norm.weight")) and kind == "gemma4":
            parameter.mul_(0.4)  # the scale of scores is 1: they would be so large that float32's noise is seen
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.7)


def byte_tokenizer() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {letter: i + 3 for i, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    return tokenizer


@cache
def oracle(folder: Path) -> Any:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for module in model.modules():
        if hasattr(module, "limit"):  # gpt-oss's experts: a constant in some releases, the config's in others
            module.limit = model.config.swiglu_limit
    return model


@torch.inference_mode()
def oracle_logits(folder: Path, ids: list[int]) -> torch.Tensor:  # [rows, vocab]
    return oracle(folder)(torch.tensor([ids])).logits[0]
