"""Bytes of weights by format, against sizes of published files, and what a quantization_config states."""

from __future__ import annotations

from typing import Any

import pytest

from sparkdraft.core import UserError
from sparkdraft.models.common.sizes import model_sizes
from sparkdraft.operate.bench.shapes import SHAPES, TARGET_FILES, shape
from sparkdraft.plan import weight_formats
from sparkdraft.plan.memory import weight_bytes
from sparkdraft.plan.weight_formats import BYTES, WeightFormats, bytes_by_format, parts_of, quantised_at_load, stated
from tests.fakes.counting import lines_run
from tests.operate.forecast.published import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_parts_are_the_whole_model(name: str) -> None:
    model = MODELS[name]
    assert sum(part.weights for part in parts_of(model, WeightFormats("bfloat16"))) == model_sizes(model).held
    assert bytes_by_format(model, WeightFormats("bfloat16")) == {"bfloat16": weight_bytes(model, 2)}


@pytest.mark.parametrize(
    ("name", "weights", "gigabytes"),
    [  # the text part of published files, embedding and head included
        ("qwen3.5-27b", "nvfp4", 18.8),
        ("qwen3.5-27b", "nvfp4,recurrent=bfloat16", 26.8),
        ("qwen3.5-27b", "fp8", 29.5),
        ("gemma4-31b", "fp8", 32.1),
        ("gemma4-31b", "bfloat16,mlp=nvfp4", 31.5),
        ("gemma4-31b", "int4", 17.9),
        ("gpt-oss-120b", "bfloat16,experts=mxfp4", 65.2),
        ("qwen3-coder-next", "nvfp4", 45.8),
        ("gemma4-26b-a4b", "nvfp4", 15.3),
    ],
)
def test_published_sizes(name: str, weights: str, gigabytes: float) -> None:
    """Files have no filling: that of planes is in tests/weights/test_planes.py."""
    parts = parts_of(MODELS[name], WeightFormats.parse(weights))
    assert sum(part.weights * BYTES[part.format] for part in parts) / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_what_gpt_oss_states_is_read() -> None:
    found = stated(TARGET_FILES["gpt-oss-120b"], 36)
    assert found is not None
    assert {group: found.of(group, 7) for group in ("attention", "experts", "router", "head", "embedding")} == {
        "attention": "bfloat16", "experts": "mxfp4", "router": "bfloat16", "head": "bfloat16", "embedding": "bfloat16",
    }  # fmt: skip
    by_hand = WeightFormats.parse("bfloat16,experts=mxfp4")
    assert bytes_by_format(shape("gpt-oss-120b"), found) == bytes_by_format(shape("gpt-oss-120b"), by_hand)


def test_a_config_without_quantised_weights_states_nothing() -> None:
    assert stated(TARGET_FILES["qwen3-30b-a3b"], 48) is None and stated({}, 4) is None
    fp8 = {"quant_method": "fp8"}
    assert stated({"compression_config": fp8}, 2) == stated({"quantization_config": fp8}, 2) is not None
    for method in ("bitsandbytes", "fbgemm_fp8"):  # which are not read
        with pytest.raises(UserError, match=method):
            stated({"quantization_config": {"quant_method": method, "bits": 4}}, 2)


STATED: list[tuple[dict[str, Any], dict[str, str]]] = [
    (
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head", "re:.*linear_"],
         "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}}}},
        {"attention": "nvfp4", "recurrent": "bfloat16", "mlp": "nvfp4", "head": "bfloat16"},
    ),
    (
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
         "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}}},
        {"attention": "int4", "mlp": "int4", "head": "bfloat16"},
    ),
    (
        {"quant_method": "modelopt", "quant_algo": "NVFP4",
         "ignore": ["lm_head", "model.language_model.layers.*.self_attn*"]},
        {"attention": "bfloat16", "mlp": "nvfp4", "head": "bfloat16", "embedding": "bfloat16"},
    ),
    (
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
            "model.layers.*.mlp*": {"quant_algo": "NVFP4"}, "model.layers.*.self_attn*": {"quant_algo": "FP8"},
            "lm_head": {"quant_algo": "NVFP4"}}},
        {"attention": "fp8", "mlp": "nvfp4", "recurrent": "bfloat16", "head": "nvfp4"},
    ),
    (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["linear_attn"]},
        {"attention": "fp8-block", "recurrent": "bfloat16", "experts": "fp8-block", "router": "bfloat16"},
    ),
    ({"quant_method": "auto-round", "bits": 4, "group_size": 128}, {"attention": "int4", "experts": "int4"}),
    ({"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False}, {"mlp": "int4-g32-asym"}),
    ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True}, {"mlp": "int4-g64-asym"}),
    ({"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True, "desc_act": True}, {"mlp": "int8-row"}),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, {"mlp": "int4-desc-act"}),
    (
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}}}},
        {"attention": "int4-g32-asym"},
    ),
    (
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "block"}}}},
        {"mlp": "fp8-block"},
    ),
    ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, {"mlp": "fp8-block"}),
]  # fmt: skip


@pytest.mark.parametrize(("config", "groups"), STATED)
def test_what_files_state(config: dict[str, Any], groups: dict[str, str]) -> None:
    for raw in ({"quantization_config": config}, {"text_config": {"quantization_config": config}}):
        found = stated(raw, 2)
        assert found is not None and {group: found.of(group, 1) for group in groups} == groups


def test_layers_may_differ() -> None:
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["model.layers.0.mlp"]}
    found = stated({"quantization_config": config}, 2)
    assert found is not None and [found.of("mlp", i) for i in range(2)] == ["bfloat16", "fp8"]
    assert found.of("attention", 0) == "fp8"


def test_a_layer_number_is_not_taken_for_the_beginning_of_another() -> None:
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["model.layers.1.mlp"]}
    found = stated({"quantization_config": config}, 20)
    assert found is not None and found.of("mlp", 11) == "fp8" and found.of("mlp", 1) == "bfloat16"


EXPERTS = [f"model.layers.{i}.mlp.experts.{e}.{m}_proj" for i in range(20) for e in range(300) for m in ("gate", "up")]


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "modelopt", "quantized_layers": {name: {"quant_algo": "NVFP4"} for name in EXPERTS}},
        {"quant_method": "compressed-tensors", "format": "nvfp4", "config_groups": {"a": {"targets": EXPERTS}}},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [f"{name}.none" for name in EXPERTS]},
    ],
)
def test_a_config_that_names_every_expert_is_read_in_a_moment(config: dict[str, Any]) -> None:
    kinds = set[str]()

    def read() -> None:
        found = stated({"quantization_config": config}, 20)
        assert found is not None
        kinds.update(found.of("experts", i) for i in range(20))

    assert lines_run(read) < 40 * len(EXPERTS) and kinds == {"nvfp4"}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "quip"}, "of the kind 'quip'.*--weights"),
        ({"quant_method": "gptq", "bits": 3}, "3 bits"),
        ({"quant_method": "modelopt", "quant_algo": "W2A8"}, "quant_algo W2A8"),
    ],
)
def test_what_is_not_known_is_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        stated({"quantization_config": config}, 2)


@pytest.mark.parametrize(("text", "words"), [("fp7", "'fp7' is no format"), ("fp8,heads=fp8", "'heads' is no part")])
def test_bad_formats_are_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        WeightFormats.parse(text)


def test_what_no_kernel_reads_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    found = stated(TARGET_FILES["gpt-oss-20b"], 24)
    assert found is not None
    monkeypatch.setattr(weight_formats, "KEPT_ON_GPU", weight_formats.FLOATS)
    assert weight_formats.names_of(weight_formats.kept(found)) == ["bfloat16"]
    assert sum(bytes_by_format(shape("gpt-oss-20b"), weight_formats.kept(found)).values()) == weight_bytes(
        shape("gpt-oss-20b"), 2
    )
    monkeypatch.setattr(weight_formats, "KEPT_ON_GPU", (*weight_formats.FLOATS, "mxfp4"))
    assert weight_formats.kept(found) == found


def test_heads_stay_in_bfloat16_unless_they_are_named() -> None:
    plain, named = (bytes_by_format(SHAPES["qwen3-8b"], WeightFormats.parse(t)) for t in ("fp8", "fp8,head=fp8"))
    vocab, hidden = SHAPES["qwen3-8b"].vocab_size, SHAPES["qwen3-8b"].hidden_size
    assert plain["bfloat16"] - named["bfloat16"] == 2 * vocab * hidden
    assert named["fp8"] - plain["fp8"] == vocab * (hidden + 4)  # and a scale per row


def test_what_is_decoded_at_load_is_counted_as_floats() -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}
    found = stated({"quantization_config": config}, 36)
    assert found is not None
    held = bytes_by_format(SHAPES["qwen3-8b"], weight_formats.kept(found))
    assert held == {"bfloat16": weight_bytes(SHAPES["qwen3-8b"], 2)}


@pytest.mark.parametrize(("weights", "share"), [("fp8", 0.501), ("int4", 0.2813), ("nvfp4", 0.282)])
def test_what_is_quantised_at_load_is_counted_so(weights: str, share: float) -> None:
    model = SHAPES["qwen3-8b"]
    found, sizes = quantised_at_load(model, weights), model_sizes(model)
    assert found.floats == sizes.head + sizes.embedding
    assert found.quantised / (2 * (sizes.held - found.floats)) == pytest.approx(share, rel=2e-3)
    gated = MODELS["qwen3-coder-next"]  # of which the loader stacks chosen rows, and leaves them as they are
    mixers = sum(p.weights for p in parts_of(gated, WeightFormats("fp8")) if p.group in ("attention", "recurrent"))
    assert quantised_at_load(gated, weights).floats > mixers > 0
