"""Checkpoints of the architectures with experts, windows and fused matrices that are damaged or contradict themselves.

Each is refused in one sentence that names what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from sparkdraft import LLM
from sparkdraft.core import UserError
from sparkdraft.models.registry import read_config
from tests.models.test_file_forms import config_of, fused, tensors_of, write
from tests.models.tiny import write_tiny

Change = Callable[[dict[str, Tensor], dict[str, Any]], None]
LAYER = "model.layers.0."


def without(name: str) -> Change:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        del tensors[name]

    return change


def config(**keys: Any) -> Change:
    return lambda tensors, config: config.update(keys)


def text(**keys: Any) -> Change:
    return lambda tensors, config: config["text_config"].update(keys)


def cut(name: str, size: int, dim: int = 0) -> Change:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors[name] = tensors[name].narrow(dim, 0, size)

    return change


def fused_with(change: Change) -> Change:
    def both(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        other = fused(tensors)
        tensors.clear()
        tensors.update(other)
        change(tensors, config)

    return both


def codes(blocks: tuple[int, ...], scales: tuple[int, ...] | None) -> Change:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        name = f"{LAYER}mlp.experts.gate_up_proj"
        del tensors[name]
        tensors[f"{name}_blocks"] = torch.full(blocks, 0x21, dtype=torch.uint8)
        if scales:
            tensors[f"{name}_scales"] = torch.full(scales, 120, dtype=torch.uint8)
        config["quantization_config"] = {"quant_method": "mxfp4"}

    return change


EXPERT = f"{LAYER}mlp.experts."
MISTAKES: list[tuple[str, Change, str]] = [
    (
        "qwen3_moe",
        without(f"{EXPERT}5.up_proj.weight"),
        "tensor model.layers.0.mlp.experts.5.up_proj.weight is miss",
    ),
    ("qwen3_moe", without(f"{LAYER}mlp.gate.weight"), "tensor model.layers.0.mlp.gate.weight is missing"),
    ("qwen3_moe", config(num_local_experts=16), r"mlp.gate.weight has shape \(8, 64\), the config says \(16, 64\)"),
    ("qwen3_moe", config(num_local_experts=4), r"mlp.gate.weight has shape \(8, 64\), the config says \(4, 64\)"),
    ("qwen3_moe", config(num_experts=4), "num_experts 4 and num_local_experts 8"),
    ("qwen3_moe", config(num_experts_per_tok=9), "a row to 9 of 8 experts"),
    ("qwen3_moe", config(head_dim=16), r"q_proj.weight has shape \(128, 64\), the config says \(64, 64\)"),
    ("qwen3_moe", config(num_key_value_heads=3), "num_attention_heads 4 and num_key_value_heads 3"),
    ("qwen3_moe", config(moe_intermediate_size=None), "no 'moe_intermediate_size'"),
    ("qwen3_moe", config(moe_intermediate_size=0), "moe_intermediate_size 0, which must be a whole number"),
    ("qwen3_moe", config(mlp_only_layers=[]), "tensor model.layers.1.mlp.gate.weight is missing"),
    (
        "qwen3_moe",
        fused_with(cut(f"{EXPERT}gate_up_proj", 48, 1)),
        r"experts.gate_up_proj has shape \(8, 48, 64\), the config says \(8, 64, 64\)",
    ),
    (
        "qwen3_moe",
        fused_with(cut(f"{EXPERT}down_proj", 7)),
        r"experts.down_proj has shape \(7, 64, 32\), the config says \(8, 64, 32\)",
    ),
    ("gpt_oss", config(sliding_window=0), "sliding_window 0, which must be a whole number from 1"),
    ("gpt_oss", config(sliding_window=None), "a sliding_attention among its layer_types and no sliding_window"),
    ("gpt_oss", config(layer_types=["full_attention"]), "1 layer_types and num_hidden_layers 4"),
    ("gpt_oss", config(rope_parameters={"rope_type": "spiral"}), "rope_parameters of the kind 'spiral'"),
    ("gpt_oss", config(num_local_experts=4), r"router.weight has shape \(8, 64\), the config says \(4, 64\)"),
    ("gpt_oss", without(f"{EXPERT}down_proj_bias"), "experts.down_proj_bias is missing"),
    ("gpt_oss", without(f"{LAYER}self_attn.sinks"), "self_attn.sinks is missing"),
    (
        "gpt_oss",
        lambda t, c: t.update({f"{EXPERT}gate_up_proj": t[f"{EXPERT}gate_up_proj"].transpose(1, 2)}),
        r"gate_up_proj has shape \(8, 128, 64\), the config says \(8, 64, 128\)",
    ),
    ("gpt_oss", codes((8, 128, 2, 16), None), "no tensor model.layers.0.mlp.experts.gate_up_proj_scales"),
    ("gpt_oss", codes((8, 128, 2, 16), (8, 128, 3)), r"scales of \(8, 128, 3\) of uint8"),
    ("gpt_oss", codes((8, 128, 2, 8), (8, 128, 2)), r"blocks of shape \(8, 128, 2, 8\)"),
    ("gpt_oss", codes((8, 64, 2, 16), (8, 64, 2)), r"has shape \(8, 64, 64\), the config says \(8, 128, 64\)"),
    ("mistral", config(sliding_window=-4), "sliding_window -4, which must be a whole number from 1"),
    ("mistral", config(sliding_window="all"), "sliding_window 'all', which must be a whole number from 1"),
    (
        "qwen3-windows",
        config(use_sliding_window=False),
        "a sliding_attention among its layer_types and no sliding_window",
    ),
    (
        "phi3",
        cut(f"{LAYER}self_attn.qkv_proj.weight", 192),
        r"qkv_proj.weight has shape \(192, 64\), the config says \(256, 64\)",
    ),
    (
        "phi3",
        cut(f"{LAYER}mlp.gate_up_proj.weight", 96),
        r"gate_up_proj.weight has shape \(96, 64\), the config says \(192, 64\)",
    ),
    ("gemma4", text(per_layer_config=None, global_head_dim=32), r"config says \(128, 64\)"),
    ("gemma4", text(attention_k_eq_v=False), "layers.2.self_attn.v_proj.weight is missing"),
    ("gemma4", text(sliding_window=0), "sliding_window 0, which must be a whole number from 1"),
    ("gemma4", text(rope_parameters={"sliding_attention": {"rope_theta": 1e4}}), "without those of 'full_attention'"),
    ("gemma4", config(text_config=3), "text_config 3, which must be an object"),
    ("gemma4-experts", text(num_experts=16), r"router.proj.weight has shape \(8, 64\), the config says \(16, 64\)"),
    ("gemma4-experts", text(enable_moe_block=False), r"tensors belong to no part of the model: .*experts.down_proj"),
    (
        "gemma4-experts",
        without("model.language_model.layers.3.router.per_expert_scale"),
        "layers.3.router.per_expert_scale is missing",
    ),
]


@pytest.mark.parametrize(("variant", "change", "words"), MISTAKES, ids=[f"{v}: {w}" for v, _, w in MISTAKES])
def test_what_is_wrong_is_said_in_one_sentence(variant: str, change: Change, words: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "right", variant)
    tensors, settings = tensors_of(folder), config_of(folder)
    change(tensors, settings)
    with pytest.raises(UserError, match=words) as error:
        LLM(str(write(tmp_path / "wrong", tensors, settings)), device="cpu", dtype="float32")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("keys", "window"), [({"sliding_window": None}, 0), ({}, 4096)], ids=["null", "absent"])
def test_a_window_that_is_left_out_is_mistrals_own(keys: dict[str, Any], window: int, tmp_path: Path) -> None:
    """As in transformers."""
    settings = config_of(write_tiny(tmp_path, "mistral"))
    assert {spec.window for spec in read_config(settings).attention} == {8}
    del settings["sliding_window"]
    assert {spec.window for spec in read_config(settings | keys).attention} == {window}
    assert transformers.MistralConfig(**(settings | keys)).sliding_window == (window or None)


@pytest.mark.parametrize("variant", ["llama", "qwen3", "gemma3", "gemma4", "gpt_oss", "phi3", "mistral", "qwen3_moe"])
def test_an_epsilon_that_is_left_out_is_the_architectures_own(variant: str, tmp_path: Path) -> None:
    settings = config_of(write_tiny(tmp_path, variant))
    inner = settings.get("text_config", settings)
    kind = type(transformers.AutoConfig.for_model(inner["model_type"]))
    inner.pop("rms_norm_eps", None)
    assert read_config(settings).rms_eps == kind().rms_norm_eps


NUMBERS = {"head_dim": 30.0, "num_key_value_heads": -2, "rms_norm_eps": "1e-5", "rope_theta": "1e4"}


@pytest.mark.parametrize("key", [*NUMBERS, "rope_scaling", "factor"])
def test_numbers_that_are_none(key: str, tmp_path: Path) -> None:
    settings = config_of(write_tiny(tmp_path, "llama"))
    settings.pop("rope_parameters", None)
    wrong = {"rope_scaling": [1], "factor": {"rope_type": "linear", "factor": True}}
    settings |= {key: NUMBERS[key]} if key in NUMBERS else {"rope_scaling": wrong[key]}
    with pytest.raises(UserError, match=key):
        read_config(settings)
