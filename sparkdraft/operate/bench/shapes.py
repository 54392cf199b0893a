"""Dimensions and tensors of published models and drafters, without their weights. No torch.

Models with equal layers are a line of SHAPES. For the others, and for published drafters, shapes.json has their
config.json. random_model.py fills them with random weights; `sparkdraft plan` needs the dimensions alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sparkdraft.core import UserError
from sparkdraft.drafters import mtp_config
from sparkdraft.drafters.assistant_config import AssistantConfig
from sparkdraft.drafters.dflash_config import DFlashConfig, spread_taps
from sparkdraft.drafters.draft_configs import DraftConfig, check_fits, read_draft_config
from sparkdraft.drafters.mtp_config import MTP, MtpConfig
from sparkdraft.models.common.config import ModelConfig, uniform_config
from sparkdraft.models.common.layers import AttentionSpec, DenseSpec, LayerSpec
from sparkdraft.models.registry import read_config
from sparkdraft.util.names import did_you_mean, spelled

_qwen3, _llama = partial(uniform_config, "qwen3", qk_norm=True), partial(uniform_config, "llama")

SHAPES = {
    "tiny": _qwen3(8, 64, 128, 4, 2, 32, 512, 4096, 1e-6, 1e6, None, True, qk_norm=True),  # does it run at all?
    "smollm2-135m": _llama(30, 576, 1536, 9, 3, 64, 49152, 8192, 1e-5, 1e5, None, True),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, 8, 128, 151936, 40960, 1e-6, 1e6, None, True, qk_norm=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, 8, 128, 151936, 40960, 1e-6, 1e6, None, True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32, 8, 128, 151936, 40960, 1e-6, 1e6, None, False, qk_norm=True),
    "llama-3.1-8b": _llama(32, 4096, 14336, 32, 8, 128, 128256, 131072, 1e-5, 5e5, None, False),
}
_FILES = json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))
TARGET_FILES: dict[str, dict[str, Any]] = _FILES["targets"]  # as in config.json
DRAFTER_FILES: dict[str, dict[str, Any]] = _FILES["drafters"]  # DFlash in z-lab's dialect; some lack RoPE's theta


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """DFlash layers with the target's own dimensions; embedding and head are the target's."""

    num_layers: int
    block_size: int = 16
    num_taps: int = 5


DRAFTER_SHAPES = {"dflash-5x": DrafterShape(5), "dflash-3x": DrafterShape(3)}


def targets() -> list[str]:
    """All names of models; util/names.py allows other spellings."""
    return [*SHAPES, *TARGET_FILES]


def drafters() -> list[str]:
    return [*DRAFTER_SHAPES, MTP, *DRAFTER_FILES]


def shape(name: str) -> ModelConfig:
    found = spelled(name, targets())
    if found is None:
        raise UserError(f"shape '{name}' is not known: {_known(name, targets())}")
    return read_config(TARGET_FILES[found]) if found in TARGET_FILES else SHAPES[found]


def drafter_shape(name: str, target: ModelConfig) -> DraftConfig:
    """Return the drafter of this name, if it fits the target."""
    found = spelled(name, drafters())
    if found is None:
        raise UserError(f"drafter shape '{name}' is not known: {_known(name, drafters())}")
    if found == MTP:
        return MtpConfig.of(target, in_target=False)
    is_shape = found in DRAFTER_SHAPES
    draft = _like(target, DRAFTER_SHAPES[found], found) if is_shape else read_draft_config(DRAFTER_FILES[found])
    check_fits(draft, target)
    return draft


def _known(name: str, names: list[str]) -> str:
    question = did_you_mean(name, names)
    return f"{question} Known are {', '.join(names)}" if question else f"known are {', '.join(names)}"


def _like(target: ModelConfig, own: DrafterShape, name: str) -> DFlashConfig:
    layer = target.layers[0]
    attention, mlp = layer.mixer, layer.mlp
    is_alike = all(each == layer for each in target.layers)
    if not (is_alike and isinstance(attention, AttentionSpec) and isinstance(mlp, DenseSpec)):
        raise UserError(
            f"drafter shape '{name}' copies the target's layers, which must be dense and all alike; this "
            f"{target.model_type} model's are not: use one of {', '.join(DRAFTER_FILES)}"
        )
    layer = LayerSpec(replace(attention, qk_norm=True, causal=False), mlp)
    return DFlashConfig(
        model=replace(target, model_type="qwen3", layers=(layer,) * own.num_layers, tie_embeddings=True),
        taps=spread_taps(target.num_layers, own.num_taps),
        block_size=own.block_size,
        mask_token_id=target.vocab_size - 1,
        draft_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        num_target_layers=target.num_layers,
    )


# ---- tensors of a checkpoint
#
# Models with equal layers, and drafters, are listed from their specs; the others from their config.json, which says
# more about the file. The experts of a layer are one tensor, as in most of these files.

Sizes = dict[str, tuple[int, ...]]
Config = Mapping[str, Any]

SANDWICH = ("input", "post_attention", "pre_feedforward", "post_feedforward")  # norms of a layer of Gemma
MXFP4_GROUP = 32  # weights that share a scale; two of them are a byte


def tensor_shapes(model: ModelConfig) -> Sizes:
    """The tensors of a model of Llama's kind."""
    return _ends("model.", model.vocab_size, model.hidden_size, model.tie_embeddings) | _layer_shapes(model, "model.")


def drafter_tensor_shapes(draft: DraftConfig) -> Sizes:
    if isinstance(draft, AssistantConfig):
        return _assistant(draft)
    if isinstance(draft, MtpConfig):
        return mtp_config.tensor_shapes(draft)
    hidden = draft.model.hidden_size
    sizes: Sizes = {
        "fc.weight": (hidden, len(draft.taps) * draft.target_hidden_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    return sizes | _layer_shapes(draft.model, "")


def file_tensor_shapes(config: Config) -> Sizes:
    """The tensors of the checkpoint that a published config.json belongs to."""
    text, (prefix, layer) = config.get("text_config", config), LAYERS[config["model_type"]]
    sizes = _ends(prefix, text["vocab_size"], text["hidden_size"], text["tie_word_embeddings"])
    for i in range(text["num_hidden_layers"]):
        sizes |= {f"{prefix}layers.{i}.{name}": size for name, size in layer(text, i).items()}
    return sizes


# ---- the parts


def _ends(prefix: str, vocab: int, hidden: int, is_tied: bool) -> Sizes:
    sizes: Sizes = {f"{prefix}embed_tokens.weight": (vocab, hidden), f"{prefix}norm.weight": (hidden,)}
    return sizes if is_tied else sizes | {"lm_head.weight": (vocab, hidden)}


def _layer_shapes(model: ModelConfig, prefix: str) -> Sizes:
    sizes: Sizes = {}
    hidden = model.hidden_size
    for i, layer in enumerate(model.layers):
        attention, mlp = layer.mixer, layer.mlp
        assert isinstance(attention, AttentionSpec) and isinstance(mlp, DenseSpec), layer
        own: Sizes = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            **_projections(hidden, attention.query_width, attention.kv_width),
            **_gated("mlp", hidden, mlp.intermediate_size),
        }
        if attention.qk_norm:
            own |= {f"self_attn.{part}_norm": (attention.head_dim,) for part in "qk"}
        sizes |= {f"{prefix}layers.{i}.{name}.weight": size for name, size in own.items()}
    return sizes


def _projections(hidden: int, queries: int, keys: int) -> Sizes:
    rows = {"q": queries, "k": keys, "v": keys}
    sizes: Sizes = {f"self_attn.{part}_proj": (n, hidden) for part, n in rows.items()}
    return sizes | {"self_attn.o_proj": (hidden, queries)}


def _gated(name: str, hidden: int, inter: int) -> Sizes:
    rows: Sizes = {f"{name}.{part}_proj": (inter, hidden) for part in ("gate", "up")}
    return rows | {f"{name}.down_proj": (hidden, inter)}


def _experts(name: str, count: int, hidden: int, inter: int) -> Sizes:
    return {f"{name}.gate_up_proj": (count, 2 * inter, hidden), f"{name}.down_proj": (count, hidden, inter)}


def _weights(sizes: Sizes) -> Sizes:
    return {f"{name}.weight": size for name, size in sizes.items()}


# ---- a layer of each architecture


def _qwen3_moe(config: Config, i: int) -> Sizes:
    hidden, dim, count = config["hidden_size"], config["head_dim"], config["num_experts"]
    own: Sizes = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "mlp.gate": (count, hidden)}
    own |= _projections(hidden, config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim)
    own |= {f"self_attn.{part}_norm": (dim,) for part in "qk"}
    return _weights(own) | _experts("mlp.experts", count, hidden, config["moe_intermediate_size"])


def _gpt_oss(config: Config, i: int) -> Sizes:
    hidden, dim, count = config["hidden_size"], config["head_dim"], config["num_local_experts"]
    linear = _projections(hidden, config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim)
    linear["mlp.router"] = (count, hidden)
    sizes = _weights({"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), **linear})
    sizes |= {f"{name}.bias": size[:1] for name, size in linear.items()}
    sizes["self_attn.sinks"] = (config["num_attention_heads"],)
    for name, (_, rows, width) in _experts("mlp.experts", count, hidden, config["intermediate_size"]).items():
        groups = width // MXFP4_GROUP
        sizes[f"{name}_blocks"] = (count, rows, groups, MXFP4_GROUP // 2)
        sizes[f"{name}_scales"] = (count, rows, groups)
        sizes[f"{name}_bias"] = (count, rows)
    return sizes


def _gemma4(config: Config, i: int) -> Sizes:
    is_full = config["layer_types"][i] == "full_attention"
    hidden, dim = config["hidden_size"], config["global_head_dim" if is_full else "head_dim"]
    keys = dim * config["num_global_key_value_heads" if is_full else "num_key_value_heads"]
    own = _projections(hidden, config["num_attention_heads"] * dim, keys)
    if is_full and config["attention_k_eq_v"]:
        del own["self_attn.v_proj"]
    own |= {f"self_attn.{part}_norm": (dim,) for part in "qk"} | _gated("mlp", hidden, config["intermediate_size"])
    norms = [f"{part}_layernorm" for part in SANDWICH]
    sizes: Sizes = {"layer_scalar": (1,)}
    if config["enable_moe_block"]:
        count = config["num_experts"]
        own["router.proj"] = (count, hidden)
        sizes |= {"router.scale": (hidden,), "router.per_expert_scale": (count,)}
        sizes |= _experts("experts", count, hidden, config["moe_intermediate_size"])
        norms += ["post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"]
    return sizes | _weights(own | dict.fromkeys(norms, (hidden,)))


def _recurrent(config: Config, keys: int, values: int) -> Sizes:
    """The tensors that both forms of a recurrent layer have. keys, values: of all heads."""
    heads, hidden = config["linear_num_value_heads"], config["hidden_size"]
    return {
        "linear_attn.conv1d.weight": (2 * keys + values, 1, config["linear_conv_kernel_dim"]),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (config["linear_value_head_dim"],),
        "linear_attn.out_proj.weight": (hidden, values),
    }


def _hybrid(config: Config, i: int) -> Sizes:
    """A layer of Qwen3.5 or Qwen3-Next, which stores the projections of a recurrent layer in two tensors, not four."""
    hidden, dim, heads = config["hidden_size"], config["head_dim"], config["linear_num_value_heads"]
    own: Sizes = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    sizes: Sizes = {}
    types, every = config.get("layer_types"), config["full_attention_interval"]
    if types[i] == "full_attention" if types else (i + 1) % every == 0:
        own |= _projections(hidden, config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim)
        own["self_attn.q_proj"] = (2 * config["num_attention_heads"] * dim, hidden)  # with gates
        own |= {f"self_attn.{part}_norm": (dim,) for part in "qk"}
    else:
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = heads * config["linear_value_head_dim"]
        sizes |= _recurrent(config, keys, values)
        rows = {"qkvz": 2 * (keys + values), "ba": 2 * heads}
        if config["model_type"] != "qwen3_next":
            rows = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
        own |= {f"linear_attn.in_proj_{part}": (count, hidden) for part, count in rows.items()}
    if "num_experts" not in config:
        return sizes | _weights(own | _gated("mlp", hidden, config["intermediate_size"]))
    count = config["num_experts"]
    own |= {"mlp.gate": (count, hidden), "mlp.shared_expert_gate": (1, hidden)}
    own |= _gated("mlp.shared_expert", hidden, config["shared_expert_intermediate_size"])
    return sizes | _weights(own) | _experts("mlp.experts", count, hidden, config["moe_intermediate_size"])


def _assistant(draft: AssistantConfig) -> Sizes:
    """Gemma 4's layers without keys and values, between two projections. Its ordered head is not among the shapes."""
    assert not draft.num_clusters, "the order of ids is not random"
    model, hidden, wide = draft.model, draft.model.hidden_size, draft.target_hidden_size
    sizes = _ends("model.", model.vocab_size, hidden, is_tied=True)
    sizes |= {"pre_projection.weight": (hidden, 2 * wide), "post_projection.weight": (wide, hidden)}
    for i, layer in enumerate(model.layers):
        attention, mlp = layer.mixer, layer.mlp
        assert isinstance(attention, AttentionSpec) and isinstance(mlp, DenseSpec), layer
        own = _projections(hidden, attention.query_width, 0) | _gated("mlp", hidden, mlp.intermediate_size)
        del own["self_attn.k_proj"], own["self_attn.v_proj"]
        own["self_attn.q_norm"] = (attention.head_dim,)
        own |= {f"{norm}_layernorm": (hidden,) for norm in SANDWICH}
        sizes |= {f"model.layers.{i}.{name}": size for name, size in _weights(own).items()}
        sizes[f"model.layers.{i}.layer_scalar"] = (1,)
    return sizes


# By model_type: where the layers are, and what one of them holds.
LAYERS: dict[str, tuple[str, Callable[[Config, int], Sizes]]] = {
    "qwen3_moe": ("model.", _qwen3_moe),
    "gpt_oss": ("model.", _gpt_oss),
    "gemma4": ("model.language_model.", _gemma4),
    "qwen3_next": ("model.", _hybrid),
    "qwen3_5": ("model.language_model.", _hybrid),
    "qwen3_5_moe": ("model.language_model.", _hybrid),
}
