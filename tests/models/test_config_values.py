"""Wrong values in the files of a checkpoint: every key of every config is given a dozen of them.

Each is read as if it were right or refused in one sentence; never another exception, and never more layers or tokens
than the limits of sparkdraft/util/fields.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from sparkdraft import LLM
from sparkdraft.cli.main import main
from sparkdraft.config import EngineConfig, usable_defaults
from sparkdraft.core import UserError
from sparkdraft.drafters.assistant import TYPE
from sparkdraft.drafters.find import read_draft_config
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.rope import rope_table
from sparkdraft.models.registry import read_config
from sparkdraft.plan.hardware import Hardware
from sparkdraft.plan.resolve import resolve
from sparkdraft.plan.weight_formats import stated
from sparkdraft.text.families import stop_ids
from sparkdraft.util.fields import LIMITS, MAX_LAYERS, MAX_TOKENS
from sparkdraft.weights.checkpoint import open_checkpoint, read_config_json, tensor_names
from sparkdraft.weights.quant.formats import check_config
from sparkdraft.weights.quant.stated import read_stated
from tests.drafters.tiny_assistant import TEXT
from tests.drafters.tiny_drafter import body, speculators, zlab
from tests.models.tiny import NESTED, SHAPE, VARIANTS, write_tiny

NAN, INF = math.nan, math.inf
WRONG: list[Any] = [NAN, INF, -1, 0, 1.5, 10**9, 10**400, "3", True, None, [], [1, "x"], {"x": [NAN]}]
MACHINE = Hardware("cpu", "a CPU", 4, 8 << 30)
SEEN = "dtype transformers_version architectures vision_config audio_config id2label label2id"  # no part reads these
ARCHITECTURES = {VARIANTS[name][0]: name for name in reversed(VARIANTS)}  # one variant of each


def config_of(variant: str) -> dict[str, Any]:
    family, options = VARIANTS[variant]
    kind = getattr(transformers, f"{family}Config")
    shape = {**SHAPE, **options}
    config = kind(text_config=shape, **NESTED[family]) if family in NESTED else kind(**shape)
    return dict(json.loads(config.to_json_string(use_diff=False)))


def damaged(config: Any, path: str = "") -> Iterator[str]:
    """Put each wrong value in each place of a config, in turn, and name it."""
    for key, right in list(config.items()) if isinstance(config, dict) else list(enumerate(config)):
        if str(key) in SEEN.split():
            continue
        for value in WRONG:
            config[key] = value
            yield f"{path}{key} = {str(value)[:20]}"
        config[key] = right
        if isinstance(right, dict | list):
            yield from damaged(right, f"{path}{key}.")


def check(config: Any, use: Callable[[], None]) -> None:
    for what in damaged(config):
        try:
            use()
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000, what
        except Exception as error:
            raise AssertionError(f"{what}: {error!r}") from error


def use_model(model: ModelConfig) -> None:
    """What plan and loading compute from a config before they look at a tensor."""
    assert model.num_layers <= MAX_LAYERS and model.max_position <= MAX_TOKENS
    ropes = {json.dumps([s.rope.theta, s.rope.scaling, s.rope.width]): s.rope for s in model.attention if s.rope}
    for rope in ropes.values():
        if rope.width <= 512:
            assert rope_table(rope, 4).isfinite().all()


@pytest.mark.parametrize("variant", list(ARCHITECTURES.values()))
def test_every_key_of_an_architecture(variant: str) -> None:
    config = config_of(variant)
    check(config, lambda: use_model(read_config(config)))


@pytest.mark.parametrize("variant", ["llama-yarn", "gemma4-experts", "qwen3_next"])
def test_the_plan_of_what_was_accepted(variant: str) -> None:
    config = config_of(variant)

    def use() -> None:
        model = read_config(config)
        stated(config, model.num_layers)
        resolve(EngineConfig(model="x"), model, MACHINE, None)

    check(config, use)


DRAFTERS: dict[str, dict[str, Any]] = {
    "zlab": zlab(
        body("sf", window=8, rope_scaling={"rope_type": "yarn", "factor": 2.0}),
        inner={"causal": True, "use_swa": False, "draft_window_size": 16, "draft_sink_size": 4},
        input_embedding_scale=2.0, output_multiplier=1.5, final_logit_softcapping=30.0, target_hidden_size=96,
    ),
    "zlab-swa": zlab(body(), inner={"use_swa": True, "swa_window_size": 8}, is_causal=False),
    "speculators": speculators(body("sf", window=8), target_hidden_size=96),
    "assistant": {"model_type": TYPE, "text_config": TEXT, "backbone_hidden_size": 64},
}  # fmt: skip


@pytest.mark.parametrize("name", list(DRAFTERS))
def test_every_key_of_a_drafter(name: str) -> None:
    config = json.loads(json.dumps(DRAFTERS[name]))

    def use() -> None:
        draft = read_draft_config(config)
        use_model(draft.model)
        draft.caps()

    read_draft_config(config).caps()
    check(config, use)


WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "actorder": None}
QUANTISED: dict[str, dict[str, Any]] = {
    "compressed": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", "re:.*gate"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}},
        "sparsity_config": {}, "transform_config": {},
    },
    "modelopt": {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "exclude_modules": ["lm_head"],
        "quantized_layers": {"model.layers.0.mlp.gate_proj": {"quant_algo": "NVFP4", "group_size": 16}},
    },
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]},
    "gptq": {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False,
        "checkpoint_format": "gptq", "dynamic": {"-:.*down.*": {}, "+:.*up.*": {"bits": 8}},
    },
    "awq": {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "gemm"},
    "auto-round": {
        "quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "packing_format": "auto_round",
        "extra_config": {"model.layers.0.mlp.*": {"bits": 8, "group_size": -1, "data_type": "int"}},
    },
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}  # fmt: skip


@pytest.mark.parametrize("method", list(QUANTISED))
def test_every_key_of_a_quantization_config(method: str) -> None:
    config = {"quantization_config": json.loads(json.dumps(QUANTISED[method]))}

    def use() -> None:
        said = read_stated(Path("x"), config, {})
        for name in ("lm_head", "model.layers.0.mlp.gate_proj"):
            if said:
                said.of(name)
        stated(config, 2)

    use()
    check(config, use)


@pytest.mark.parametrize("bits", [4.25, "4bpw", [4, 6]])
def test_a_method_that_is_not_read_is_named_whatever_its_keys_mean(bits: Any) -> None:
    config = {"quantization_config": {"quant_method": "exl2", "bits": bits, "targets": {}}}
    with pytest.raises(UserError, match=r"exl2.* in a way that is not read"):
        check_config(Path("x"), config, {})
    with pytest.raises(UserError, match="weights of the kind 'exl2'"):
        stated(config, 2)


def test_modules_named_by_no_regular_expression() -> None:
    config = {"quantization_config": {"quant_method": "compressed-tensors", "ignore": ["re:(["]}}
    with pytest.raises(UserError, match="no regular expression"):
        stated(config, 2)


def test_every_key_of_a_generation_config() -> None:
    generation = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}
    generation |= {"do_sample": True, "eos_token_id": [2]}

    def use() -> None:
        usable_defaults(generation)
        stop_ids(generation, {"model_type": "qwen3"}, None, lambda token: None)

    check(generation, use)


def test_every_setting_of_a_gguf_file(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    names = "attention.head_count embedding_length feed_forward_length block_count context_length rope.freq_base"
    more = "attention.key_length attention.head_count_kv attention.layer_norm_rms_epsilon rope.dimension_count"
    for key in f"{names} {more} attention.sliding_window rope.scaling.factor".split():
        for value in (0, 2**32 - 1, NAN, INF, -1.5, "3", True, [1, 2]):
            scaling = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}
            path = write_gguf(tmp_path / "tiny.gguf", settings={**scaling, f"llama.{key}": value})
            try:
                use_model(read_config(open_checkpoint(str(path)).config))
            except UserError:
                continue


@pytest.mark.parametrize("header", [b"[1]", b"3", b"[" * 100_000, b'{"a": NaN', b"null"])
def test_headers_that_are_no_object(header: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(UserError, match="damaged or incomplete"):
        tensor_names(tmp_path)
    (tmp_path / "config.json").write_bytes(header)
    with pytest.raises(UserError, match=r"cannot be read as JSON|holds no JSON object"):
        read_config_json(str(tmp_path))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_hidden_layers", 10**9, f"num_hidden_layers 1000000000, which must be .* 1 to {MAX_LAYERS:,}"),
        ("model_type", ["x"], r"model_type \['x'\], which must be a text"),
        ("rms_norm_eps", NAN, "rms_norm_eps nan, which must be a finite number above 0 and at most 1"),
        ("vocab_size", 10**12, f"vocab_size 1000000000000, .* {LIMITS['vocab_size']:,}"),
        ("attention_bias", "false", "attention_bias 'false', which must be true or false"),
    ],
)
def test_plan_and_loading_refuse_the_same(
    key: str, value: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny(tmp_path, "llama")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(UserError, match=words):
        LLM(str(folder), device="cpu", dtype="float32")
    capsys.readouterr()  # the bars of transformers
    assert main(["plan", "--model", str(folder), "--machine", "gb10"]) == 1
    err = capsys.readouterr().err
    assert f"{key} " in err and len(err.splitlines()) == 1
