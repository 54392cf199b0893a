"""Keys of config.json: each one is honoured, known to be harmless, refused by name, or shown to the user."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.llm import LLM
from sparkdraft.models.registry import read_config
from sparkdraft.operate.bench.shapes import TARGET_FILES
from sparkdraft.plan.hardware import Hardware
from sparkdraft.plan.resolve import resolve
from sparkdraft.weights.checkpoint import open_checkpoint
from tests.models.harness import Harness
from tests.models.tiny import SHAPE, VARIANTS, oracle_logits, write_tiny

PROMPT = list(range(40, 80))
# As the hub has them, less the numbers: what old and new releases of transformers and their users leave in a file.
SMOLLM2 = {
    "is_llama_config": True, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000, "use_cache": True,
    "pretraining_tp": 1, "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "hidden_act": "silu",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "attention_dropout": 0.0,
}  # fmt: skip
LLAMA31 = {
    "attention_bias": False, "mlp_bias": False, "eos_token_id": [128001, 128008, 128009], "rope_theta": 500000.0,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
                     "original_max_position_embeddings": 8192},
    "_name_or_path": "meta-llama/Llama-3.1-8B", "temperature": 0.6, "unsloth_fixed": True,
}  # fmt: skip
QWEN3 = {
    "sliding_window": None, "use_sliding_window": False, "max_window_layers": 36, "rope_theta": 1000000,
    "rope_scaling": None, "layer_types": ["full_attention"] * 3, "_attn_implementation_autoset": True,
}  # fmt: skip
QWEN3_30B = {
    "decoder_sparse_step": 1, "head_dim": 128, "max_window_layers": 48, "mlp_only_layers": [], "norm_topk_prob": True,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "output_router_logits": False,
    "router_aux_loss_coef": 0.001, "sliding_window": None, "use_sliding_window": False, "rope_scaling": None,
}  # fmt: skip
GPT_OSS_20B = {
    "attention_bias": True, "experts_per_token": 4, "num_experts_per_tok": 4, "num_local_experts": 32,
    "initial_context_length": 4096, "output_router_logits": False, "router_aux_loss_coef": 0.9, "swiglu_limit": 7.0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 128,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": False}, "rope_theta": 150000,
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
}  # fmt: skip
PHI4 = {
    "embd_pdrop": 0.0, "resid_pdrop": 0.0, "original_max_position_embeddings": 16384, "rope_scaling": None,
    "rope_theta": 250000, "sliding_window": None, "attention_bias": False,
}  # fmt: skip
GEMMA4_31B = {
    "attention_k_eq_v": True, "enable_moe_block": False, "final_logit_softcapping": 30.0, "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0, "moe_intermediate_size": None,
    "num_experts": None, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0, "sliding_window": 1024,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "top_k_experts": None,
    "use_bidirectional_attention": "vision", "use_double_wide_mlp": False, "vocab_size_per_layer_input": 262144,
    "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6,
                                           "rope_type": "proportional"},
                        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}},
}  # fmt: skip
GEMMA4_OUTER = {
    "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": None, "audio_token_id": 258881,
    "boa_token_id": 256000, "boi_token_id": 255999, "eoa_token_index": 258883, "eoi_token_id": 258882,
    "eos_token_id": [1, 106], "image_token_id": 258880, "vision_config": {"hidden_size": 1152}, "dtype": "bfloat16",
    "vision_soft_tokens_per_image": 280, "video_token_id": 258884, "tie_word_embeddings": True,
}  # fmt: skip
GEMMA3_4B = {
    "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
}  # fmt: skip
GEMMA3_OUTER = {
    "boi_token_index": 255999, "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144,
    "mm_tokens_per_image": 256, "vision_config": {"hidden_size": 1152}, "torch_dtype": "bfloat16",
}  # fmt: skip

CODER_NEXT = {
    "decoder_sparse_step": 1, "full_attention_interval": 4, "mlp_only_layers": [], "norm_topk_prob": True,
    "partial_rotary_factor": 0.25, "rope_scaling": None, "rope_theta": 5000000, "use_sliding_window": False,
    "output_router_logits": False, "router_aux_loss_coef": 0.001,
}  # fmt: skip
QWEN35_27B = {
    "attn_output_gate": True, "full_attention_interval": 4, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False, "output_gate_type": "swish", "layer_types": ["linear_attention"] * 3,
    "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                        "rope_theta": 10000000, "rope_type": "default"},
}  # fmt: skip
QWEN35_OUTER = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056, "video_token_id": 248057,
    "vision_start_token_id": 248053, "vision_end_token_id": 248054, "vision_config": {"depth": 27},
    "tie_word_embeddings": False,
}  # fmt: skip

LINEAR = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}  # fmt: skip
NEEDED: dict[str, dict[str, Any]] = {  # beyond what all have
    "qwen3_next": {
        **LINEAR,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "qwen3_5_text": LINEAR,
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8},
    "gemma3_text": {"sliding_window": 8},
    "gemma4_text": {"sliding_window": 8},
}


def config_of(model_type: str, **keys: Any) -> dict[str, Any]:
    return {"model_type": model_type, **SHAPE, **NEEDED.get(model_type, {}), **keys}


def rewritten(folder: Path, **keys: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return folder


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_what_transformers_writes_holds_no_unknown_key(variant: str, tmp_path: Path) -> None:
    config = open_checkpoint(str(write_tiny(tmp_path, variant))).config
    assert read_config(config).unknown_keys == ()


def test_all_keys_of_transformers_own_configs_are_known() -> None:
    import transformers

    names = "Llama Mistral Phi3 Qwen2 Qwen3 Qwen3Moe GptOss Gemma3Text Gemma3 Gemma4 Qwen3Next Qwen3_5 Qwen3_5Moe"
    for name in names.split():
        kind = getattr(transformers, f"{name}Config")
        plain = {"text_config": {"hidden_size_per_layer_input": 0}} if name == "Gemma4" else {}
        assert read_config(kind(**plain).to_dict()).unknown_keys == (), kind


@pytest.mark.parametrize(
    "config",
    [
        config_of("llama", **SMOLLM2),
        config_of("llama", **LLAMA31),
        config_of("qwen3", **QWEN3),
        config_of("qwen3_moe", **QWEN3_30B),
        config_of("gpt_oss", **GPT_OSS_20B),
        config_of("phi3", **PHI4),
        {"model_type": "gemma4", "text_config": config_of("gemma4_text", **GEMMA4_31B), **GEMMA4_OUTER},
        {"model_type": "gemma3", "text_config": GEMMA3_4B, **GEMMA3_OUTER},
        config_of("qwen3_next", **CODER_NEXT),
        {"model_type": "qwen3_5", "text_config": config_of("qwen3_5_text", **QWEN35_27B), **QWEN35_OUTER},
        config_of("qwen3_5_text", **QWEN35_27B),
    ],
    ids=lambda config: config["model_type"],
)
def test_published_configs_hold_no_unknown_key(config: dict[str, Any]) -> None:
    assert read_config(config).unknown_keys == ()


REFUSED = [
    ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ("llama", {"sliding_window": 64}, "sliding_window 64"),
    ("llama", {"num_local_experts": 8}, "num_local_experts 8"),
    ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
    ("llama", {"use_qk_norm": True}, "use_qk_norm True"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling of the kind 'dynamic'"),
    ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": 2.0}}, "with mscale 2.0"),
    ("llama", {"rope_scaling": {"rope_type": "yarn"}}, "without a factor"),
    ("llama", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "with 'sliding_attention'"),
    ("qwen3", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "with 'chunked_attention'"),
    ("qwen3", {"num_experts": 128}, "num_experts 128"),
    ("qwen3", {"rope_parameters": {"rope_type": "mrope"}}, "of the kind 'mrope'"),
    ("qwen2", {"use_mrope": True}, "use_mrope True"),
    ("mistral", {"attention_bias": True}, "attention_bias True"),
    ("qwen3_5_text", {"attention_bias": True}, "attention_bias True"),
    ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate False"),
    ("qwen3_5_text", {"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid'"),
    ("qwen3_5_text", {"layer_types": ["sliding_attention"] * 3}, "with 'sliding_attention'"),
    ("qwen3_5_text", {"linear_num_value_heads": 5}, "linear_num_value_heads 5"),
    ("qwen3_next", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size 0"),
    ("qwen3", {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "with 'linear_attention'"),
    ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "kind 'longrope'"),
    ("phi3", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "kind 'yarn'"),  # by which early files mean longrope
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 16}, "sliding_window 16"),
    ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size 64"),
    ("qwen3_moe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
    ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
    ("gemma4_text", {"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input 256"),
    ("gemma4_text", {"num_kv_shared_layers": 10}, "num_kv_shared_layers 10"),
    ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all'"),
    ("gemma4_text", {"per_layer_config": {"1": {"sliding_window": 4}}}, "sliding_window in per_layer_config"),
]


@pytest.mark.parametrize(("model_type", "keys", "words"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_a_key_that_changes_the_computation_is_refused(model_type: str, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        read_config(config_of(model_type, **keys))
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("llama", {"hidden_act": "gelu"}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 16}),
        ("gemma4", {"num_kv_shared_layers": 3}),
        ("gemma4", {"hidden_size_per_layer_input": 16}),
    ],
)
def test_transformers_does_compute_something_else_there(variant: str, changes: dict[str, Any], tmp_path: Path) -> None:
    plain, changed = write_tiny(tmp_path / "plain", variant), write_tiny(tmp_path / "changed", variant, **changes)
    assert not torch.allclose(oracle_logits(plain, PROMPT), oracle_logits(changed, PROMPT), atol=1e-3)
    with pytest.raises(UserError, match="changes what the model computes"):
        LLM(str(changed), dtype="float32")


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}),
        ("qwen3", {"attention_bias": True}),
        ("llama", {"rope_theta": 500.0}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}}),
        ("llama", {"hidden_act": "swish"}),
    ],
    ids=str,
)
def test_what_is_accepted_computes_what_transformers_computes(
    variant: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_tiny(tmp_path, variant, **changes)
    logits, _ = Harness(folder).run({"a": PROMPT})
    torch.testing.assert_close(logits["a"], oracle_logits(folder, PROMPT), atol=1e-4, rtol=1e-4)


def test_the_inner_rope_theta_counts_before_the_outer_one(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 500.0}
    folder = rewritten(write_tiny(tmp_path, "llama"), rope_theta=10000.0, rope_parameters=rope)
    logits, _ = Harness(folder).run({"a": PROMPT})
    torch.testing.assert_close(logits["a"], oracle_logits(folder, PROMPT), atol=1e-4, rtol=1e-4)


def test_an_unknown_key_is_ignored_and_the_user_sees_it(tmp_path: Path) -> None:
    folder = rewritten(write_tiny(tmp_path, "llama"), depth_of_thought=3, a_note=None)
    model = read_config(open_checkpoint(str(folder)).config)
    assert model.unknown_keys == ("depth_of_thought",)
    plan = resolve(EngineConfig(model=str(folder)), model, Hardware("cpu", "a CPU", 4, 8 << 30), None)
    (notice,) = plan.fallbacks
    assert "not known here are ignored" in notice.name and "depth_of_thought" in notice.reason
    assert "depth_of_thought" in plan.describe()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("rope.dimension_count", 8, "partial_rotary_factor 0.5"), ("attention.sliding_window", 32, "sliding_window 32")],
)
def test_a_gguf_file_that_computes_something_else_is_refused(
    key: str, value: int, words: str, tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", settings={f"llama.{key}": value})
    with pytest.raises(UserError, match=words):
        read_config(open_checkpoint(str(path)).config)


def test_a_yarn_that_was_added_lengthens_the_context() -> None:
    """As Qwen's cards say; max_position_embeddings stays as it was."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = TARGET_FILES["qwen3-30b-a3b"] | {"max_position_embeddings": 40960, "rope_scaling": yarn}
    assert read_config(config).max_position == 131072
    assert read_config(config | {"max_position_embeddings": 262144}).max_position == 262144
