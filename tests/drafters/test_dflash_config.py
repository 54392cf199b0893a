"""Both formats of config.json, their defaults, and every reason for which a drafter is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparkdraft.core import UserError
from sparkdraft.drafters import find
from sparkdraft.drafters.dflash import DFlashConfig
from sparkdraft.models.registry import read_config
from tests.drafters.tiny_drafter import body, speculators, zlab
from tests.models.tiny import SHAPE

MISSING = object()
TARGET = read_config({"model_type": "llama", **SHAPE})
# What z-lab/Qwen3-8B-DFlash-b16 says, in the words of its config.json.
QWEN3_8B: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_target_layers": 36,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
    "attention_bias": False,
    "hidden_act": "silu",
}


def masks(draft: DFlashConfig) -> list[tuple[int, bool]]:
    return [(spec.window, spec.causal) for spec in draft.model.attention]


def test_a_published_config() -> None:
    draft = DFlashConfig.read(QWEN3_8B)
    assert (draft.aux_layers, draft.block_size, draft.mask_token_id) == ((1, 9, 17, 25, 33), 16, 151669)
    assert masks(draft) == [(0, False)] * 5
    assert (draft.num_target_layers, draft.draft_vocab_size, draft.target_hidden_size) == (36, 151936, 4096)
    assert (draft.input_embedding_scale, draft.output_multiplier, draft.softcap) == (None, 1.0, None)
    caps = draft.caps()
    assert (caps.name, caps.kv, caps.chain) == ("dflash", draft.model.attention, False)
    assert (caps.aux_layers, caps.max_depth) == (draft.aux_layers, 15)


def test_the_dialects_mean_the_same() -> None:
    """speculators counts the embedding: its 1 and 3 are z-lab's layers 0 and 2."""
    one, other = DFlashConfig.read(zlab(body("sf", window=4))), DFlashConfig.read(speculators(body("sf", window=4)))
    assert one.aux_layers == other.aux_layers == (0, 2)
    assert masks(one) == masks(other) == [(4, True), (0, False)]
    assert (one.model, one.block_size, one.mask_token_id) == (other.model, other.block_size, other.mask_token_id)


def test_newer_configs_keep_the_block_size_and_scales_inside() -> None:
    config = zlab(body(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 77.0}))
    del config["block_size"]
    config["dflash_config"] |= {"block_size": 5, "input_embedding_scale": 2, "final_logit_softcapping": 30.0}
    draft = DFlashConfig.read(config)
    assert (draft.block_size, draft.input_embedding_scale, draft.softcap) == (5, 2.0, 30.0)
    assert draft.model.uniform()[0].rope.theta == 77.0
    assert DFlashConfig.read(zlab(body(), final_logit_softcapping=9)).softcap == 9.0


@pytest.mark.parametrize(
    ("layers", "aux_layers"),
    [(1, (18,)), (2, (1, 33)), (3, (1, 17, 33)), (5, (1, 9, 17, 25, 33)), (4, (1, 12, 22, 33))],
)
def test_aux_layers_where_the_config_is_silent(layers: int, aux_layers: tuple[int, ...]) -> None:
    config = {**QWEN3_8B, "num_hidden_layers": layers, "layer_types": None, "dflash_config": {"mask_token_id": 1}}
    assert DFlashConfig.read(config).aux_layers == aux_layers


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (zlab(body("sf", window=4)), [(4, True), (0, False)]),
        (zlab(body("sf", window=4), is_causal=False), [(4, False), (0, False)]),
        (zlab(body("sf", window=4), is_causal=True), [(4, True), (0, True)]),
        (zlab(body("sf", window=4), inner={"causal": False}), [(4, False), (0, False)]),
        (zlab(body("sf", window=4), inner={"causal": False}, is_causal=True), [(4, True), (0, True)]),
        (zlab(body("ff"), inner={"use_swa": True, "swa_window_size": 9}), [(9, False), (9, False)]),
        (zlab(body("ss", window=4, use_sliding_window=False)), [(0, True), (0, True)]),
        (zlab(body("ff", window=4, layer_types=None, max_window_layers=1)), [(0, False), (4, True)]),
        (zlab(body("ff", layer_types=None, max_window_layers=0)), [(0, False), (0, False)]),
        (speculators(body("sf", window=4), sliding_window_non_causal=True), [(4, False), (0, False)]),
    ],
)
def test_windows_and_who_sees_whom(config: dict[str, Any], layers: list[tuple[int, bool]]) -> None:
    assert masks(DFlashConfig.read(config)) == layers


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "'LlamaForCausalLM' are not supported yet"),
        ({"model_type": "llama"}, "'llama' are not supported yet"),
        ({**QWEN3_8B, "architectures": ["DFlash2DraftModel"]}, "'DFlash2DraftModel' are not supported yet"),
        (speculators(body(), speculators_model_type="dspark"), "'dspark' are not supported yet"),
        (speculators(body(), speculators_model_type="eagle3"), "'eagle3' are not supported yet"),
        (speculators(body(), sample_from_anchor=True), "dspark"),
        (zlab(body(), inner={"conv_kernel_size": 2}), "dflash2"),
        (zlab(body(), inner={"projector_type": "domino"}), "projector_type domino"),
        (zlab(body(), inner={"attention_value_scale": 0.7}), "attention_value_scale"),
        (zlab(body(hidden_act="gelu")), "hidden_act gelu"),
        (zlab(body(), inner={"mask_token_id": None}), "mask_token_id"),
        (zlab(body(), inner={"target_layer_ids": [1, 1]}), "target_layer_ids"),
        (zlab(body(), inner={"target_layer_ids": None}, num_target_layers=None), "num_target_layers"),
        (zlab(body(), block_size=1), "block_size 1, which must be a whole number from 2"),
        (zlab(body(layer_types=["full_attention"])), "layer_types"),
        (zlab(body()) | {"hidden_size": MISSING}, "hidden_size"),
        (zlab(body(), block_size="eight"), "block_size 'eight'"),  # type: ignore[arg-type]
        (zlab(body()) | {"dflash_config": [1]}, "which must be an object"),
        (speculators(body(), aux_hidden_state_layer_ids=[0, 2]), "embedding"),
        (speculators(body(), aux_hidden_state_layer_ids=None), "aux_hidden_state_layer_ids"),
        (speculators(body(), transformer_layer_config=None), "transformer_layer_config"),
    ],
)
def test_what_is_not_built_or_not_said_is_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        DFlashConfig.read({key: value for key, value in config.items() if value is not MISSING})


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (zlab(body(hidden_size=64)), "hidden size 64, the model 96"),
        (speculators(body(), target_hidden_size=128), "hidden size 128, the model 96"),
        (zlab(body(vocab_size=400)), "vocabulary of 400, the model one of 320"),
        (speculators(body(), draft_vocab_size=400), "400 ids, the model has 320"),
        (zlab(body(), inner={"target_layer_ids": [0, 3]}), "reads layer 3, the model has 3"),
        (speculators(body(), aux_hidden_state_layer_ids=[1, 4]), "reads layer 3, the model has 3"),
        (zlab(body(), num_target_layers=4), "model of 4 layers, this one has 3"),
        (zlab(body(), inner={"mask_token_id": 320}), "mask id 320"),
    ],
)
def test_a_drafter_that_does_not_fit(config: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=f"does not fit the model: .*{says}"):
        DFlashConfig.read(config).check_fits(TARGET)


def test_one_that_fits() -> None:
    DFlashConfig.read(zlab(body())).check_fits(TARGET)
    DFlashConfig.read(speculators(body(), aux_hidden_state_layer_ids=[1, 3])).check_fits(TARGET)


def test_the_embedded_drafter(tmp_path: Path) -> None:
    folder = find.default_drafter("smollm2")
    assert folder is not None and find.default_drafter("another") is None
    for name in (folder, "smollm2-dflash"):
        draft = DFlashConfig.read(find.open_drafter(name).config)
        assert (draft.aux_layers, draft.block_size, draft.mask_token_id) == ((1, 8, 14, 20, 27), 16, 16)
    with pytest.raises(UserError, match="GGUF"):
        find.open_drafter(str(tmp_path / "a.gguf"))
