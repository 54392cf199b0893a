"""What is read of an assistant's config.json, what is refused, and which targets it fits. One sentence each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.drafters import find, pairs
from sparkdraft.drafters.assistant import AssistantConfig
from sparkdraft.drafters.find import find_drafter
from sparkdraft.models.common.config import FINAL, ModelConfig
from sparkdraft.models.registry import read_config
from sparkdraft.plan.hardware import Hardware
from sparkdraft.plan.resolve import resolve
from tests.drafters.tiny_assistant import write_assistant
from tests.models.tiny import write_tiny

# The published shapes, from the files of google/gemma-4-31B-it and its assistant, and of the 26B's.
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
COMMON: dict[str, Any] = {
    "model_type": "gemma4_text", "vocab_size": 262144, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
    "head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": True, "sliding_window": 1024, "rope_parameters": ROPES,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0, "tie_word_embeddings": True,
}  # fmt: skip
HEADS_31B = {"num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4}
HEADS_26B = {"num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2}
TARGET_31B = {
    **COMMON, **HEADS_31B, "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60,
}  # fmt: skip
LAYERS = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 4, "num_kv_shared_layers": 4}


def published(heads: dict[str, int] = HEADS_31B, wide: int = 5376, **outer: Any) -> dict[str, Any]:
    text = {**COMMON, **heads, **LAYERS, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
    return {"model_type": "gemma4_assistant", "backbone_hidden_size": wide, "text_config": text, **outer}


def changed(**text: Any) -> dict[str, Any]:
    config = published()
    return {**config, "text_config": {**config["text_config"], **text}}


@pytest.fixture(scope="module")
def target() -> ModelConfig:
    return read_config(TARGET_31B)


def test_the_published_pair_fits(target: ModelConfig) -> None:
    draft = AssistantConfig.read(published())
    draft.check_fits(target)
    specs = draft.borrowing(target)
    assert [spec.kv_from for spec in specs] == [58, 58, 58, 59]
    assert [spec.window for spec in specs] == [1025, 1025, 1025, 0]
    assert [spec.head_dim for spec in specs] == [256, 256, 256, 512]


def test_the_plan_counts_its_bytes_and_the_pages_it_reads(target: ModelConfig) -> None:
    caps = AssistantConfig.read(published()).caps()
    joins, head = 3 * 5376 * 1024, 262144 * 1024
    queries, mlp = 3 * 8192 + 16384, 3 * 8192
    assert caps.num_weights == joins + head + 1024 * (2 * queries + 4 * mlp)
    assert (caps.aux_layers, caps.kv, caps.chain, caps.own_head, caps.reads_back) == ((FINAL,), (), True, True, 2)
    gpu = Hardware("cuda", "a GPU", 16, 160 << 30, (9, 0))
    config = EngineConfig(model="x", kv_tokens=16384)
    bare, plan = (resolve(config, target, gpu, None, each) for each in (None, caps))
    assert plan.memory.weights - bare.memory.weights == 2 * caps.num_weights
    assert plan.memory.kv == bare.memory.kv and plan.reads_back == 2 and bare.reads_back == 0
    assert plan.windows[0].pages >= bare.windows[0].pages


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (published(wide=4096), "made for a hidden size of 4096, the model has 5376"),
        (changed(vocab_size=262208), "a vocabulary of 262208, the model one of 262144"),
        (published(HEADS_26B), "it reads layer 58 with K/V heads 8, the model has 16 there"),
        (changed(global_head_dim=256), "it reads layer 59 with a head size of 256, the model has 512 there"),
        (changed(sliding_window=512), "it reads layer 58 with a window of 512, the model has 1024 there"),
        (
            changed(rope_parameters={**ROPES, "sliding_attention": {"rope_theta": 5e5}}),
            "layer 58 with a RoPE theta of 500000.0, the model has 10000.0",
        ),
    ],
)
def test_a_pair_that_does_not_fit_is_refused(target: ModelConfig, config: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=r"does not fit the model: .*; use the drafter that was trained for") as error:
        AssistantConfig.read(config).check_fits(target)
    assert words in str(error.value) and str(error.value).count(". ") == 0


def test_a_target_of_another_kind_has_no_layers_for_it() -> None:
    other = {"model_type": "qwen3", "num_hidden_layers": 2, **HEADS_31B, "intermediate_size": 64}
    shape = {"hidden_size": 5376, "vocab_size": 262144, "max_position_embeddings": 512, "head_dim": 256}
    with pytest.raises(UserError, match="it reads sliding layers, and the model has none"):
        AssistantConfig.read(published()).check_fits(read_config({**other, **shape}))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (published(number_of_heads_of_mine=3), "number_of_heads_of_mine"),
        (changed(a_new_norm=True), "a_new_norm"),
        (published(tie_word_embeddings=False), "tie_word_embeddings False"),
        (changed(enable_moe_block=True), "enable_moe_block True"),
        (changed(use_double_wide_mlp=True), "use_double_wide_mlp True"),
        (changed(hidden_size_per_layer_input=256), "hidden_size_per_layer_input 256"),
        (changed(num_kv_shared_layers=2), "num_kv_shared_layers 2"),
        (changed(model_type="gemma4_unified_text"), "gemma4_unified_text"),
        (changed(hidden_activation="silu"), "hidden_activation 'silu'"),
        ({"model_type": "gemma4_assistant", "backbone_hidden_size": 64}, "no text_config"),
        (published(use_ordered_embeddings=True), "use_ordered_embeddings True"),
    ],
)
def test_what_is_not_known_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        AssistantConfig.read(config)
    assert words in str(error.value)


# ---- files


def test_a_folder_is_recognised_by_its_type(tmp_path: Path) -> None:
    target = read_config(json.loads((write_tiny(tmp_path / "t", "gemma4") / "config.json").read_text()))
    found = find_drafter(str(write_assistant(tmp_path / "a")), target)
    assert isinstance(found.config, AssistantConfig) and found.caps.name == "assistant"
    other = json.loads((tmp_path / "a" / "config.json").read_text()) | {"model_type": "gemma4_unified_assistant"}
    other["architectures"] = ["Gemma4UnifiedAssistantForCausalLM"]
    (tmp_path / "a" / "config.json").write_text(json.dumps(other))
    with pytest.raises(UserError, match="'Gemma4UnifiedAssistantForCausalLM' are not supported yet"):
        find_drafter(str(tmp_path / "a"), target)


def test_one_in_the_hubs_cache_is_found_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(json.loads((write_tiny(tmp_path / "t", "gemma4") / "config.json").read_text()))
    folder = write_assistant(tmp_path / "a")
    known = next(d for t in pairs.targets() for d in t.drafters if d.repo == "google/gemma-4-26B-A4B-it-assistant")
    shape = (config.num_layers, config.hidden_size, config.vocab_size)
    monkeypatch.setattr(pairs, "targets", lambda: (pairs.KnownTarget("google/tiny", "gemma4", *shape, (known,)),))
    monkeypatch.setattr(find, "cached_snapshot", lambda repo: folder if repo == known.repo else None)
    found = find.choose("google/tiny", config)
    assert found.drafter and found.drafter.caps.name == "assistant" and known.repo in found.fallbacks[0].name
    pairs.check_pair(known.repo, config)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    from sparkdraft import LLM

    target = write_tiny(tmp_path / "t", "gemma4")
    folder = write_assistant(tmp_path / "a")
    file = folder / "model.safetensors"
    whole = load_file(file)
    for tensors, words in (
        ({k: v for k, v in whole.items() if k != "post_projection.weight"}, "post_projection.weight is missing"),
        ({**whole, "model.layers.0.self_attn.k_proj.weight": whole["model.norm.weight"].clone()}, "belong to no part"),
    ):
        save_file(tensors, file)
        with pytest.raises(UserError, match=words):
            LLM(str(target), dtype="float32", threads=1, drafter=str(folder))
