"""Names and sizes of the tensors that a checkpoint of a shape holds, as its publisher names them.

Models whose layers are all alike are listed from their specs; the others from their config.json. Experts of one layer
are one tensor, as in most files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.layers import AttentionSpec, DenseSpec

Sizes = dict[str, tuple[int, ...]]
Config = Mapping[str, Any]

SANDWICH = ("input", "post_attention", "pre_feedforward", "post_feedforward")  # norms of a layer of Gemma
MXFP4_GROUP = 32  # weights that share a scale; two of them are a byte


def tensor_shapes(model: ModelConfig) -> Sizes:
    """The tensors of a model like Llama."""
    return ends("model.", model.vocab_size, model.hidden_size, model.tie_embeddings) | layer_shapes(model, "model.")


def file_tensor_shapes(config: Config) -> Sizes:
    """The tensors of the file beside a published config.json."""
    text, (prefix, layer) = config.get("text_config", config), LAYERS[config["model_type"]]
    sizes = ends(prefix, text["vocab_size"], text["hidden_size"], text["tie_word_embeddings"])
    for i in range(text["num_hidden_layers"]):
        sizes |= {f"{prefix}layers.{i}.{name}": size for name, size in layer(text, i).items()}
    return sizes


# ---- the parts


def ends(prefix: str, vocab: int, hidden: int, is_tied: bool) -> Sizes:
    sizes: Sizes = {f"{prefix}embed_tokens.weight": (vocab, hidden), f"{prefix}norm.weight": (hidden,)}
    return sizes if is_tied else sizes | {"lm_head.weight": (vocab, hidden)}


def layer_shapes(model: ModelConfig, prefix: str) -> Sizes:
    sizes: Sizes = {}
    hidden = model.hidden_size
    for i, layer in enumerate(model.layers):
        attention, mlp = layer.mixer, layer.mlp
        assert isinstance(attention, AttentionSpec) and isinstance(mlp, DenseSpec), layer
        own: Sizes = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            **projections(hidden, attention.query_width, attention.kv_width),
            **gated("mlp", hidden, mlp.intermediate_size),
        }
        if attention.qk_norm:
            own |= {f"self_attn.{part}_norm": (attention.head_dim,) for part in "qk"}
        sizes |= {f"{prefix}layers.{i}.{name}.weight": size for name, size in own.items()}
    return sizes


def projections(hidden: int, queries: int, keys: int) -> Sizes:
    rows = {"q": queries, "k": keys, "v": keys}
    sizes: Sizes = {f"self_attn.{part}_proj": (n, hidden) for part, n in rows.items()}
    return sizes | {"self_attn.o_proj": (hidden, queries)}


def gated(name: str, hidden: int, inter: int) -> Sizes:
    rows: Sizes = {f"{name}.{part}_proj": (inter, hidden) for part in ("gate", "up")}
    return rows | {f"{name}.down_proj": (hidden, inter)}


def experts(name: str, count: int, hidden: int, inter: int) -> Sizes:
    return {f"{name}.gate_up_proj": (count, 2 * inter, hidden), f"{name}.down_proj": (count, hidden, inter)}


def weights(sizes: Sizes) -> Sizes:
    return {f"{name}.weight": size for name, size in sizes.items()}


# ---- a layer of each architecture


def _qwen3_moe(config: Config, i: int) -> Sizes:
    hidden, dim, count = config["hidden_size"], config["head_dim"], config["num_experts"]
    own: Sizes = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "mlp.gate": (count, hidden)}
    own |= projections(hidden, config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim)
    own |= {f"self_attn.{part}_norm": (dim,) for part in "qk"}
    return weights(own) | experts("mlp.experts", count, hidden, config["moe_intermediate_size"])


def _gpt_oss(config: Config, i: int) -> Sizes:
    hidden, dim, count = config["hidden_size"], config["head_dim"], config["num_local_experts"]
    linear = projections(hidden, config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim)
    linear["mlp.router"] = (count, hidden)
    sizes = weights({"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), **linear})
    sizes |= {f"{name}.bias": size[:1] for name, size in linear.items()}
    sizes["self_attn.sinks"] = (config["num_attention_heads"],)
    for name, (_, rows, width) in experts("mlp.experts", count, hidden, config["intermediate_size"]).items():
        groups = width // MXFP4_GROUP
        sizes[f"{name}_blocks"] = (count, rows, groups, MXFP4_GROUP // 2)
        sizes[f"{name}_scales"] = (count, rows, groups)
        sizes[f"{name}_bias"] = (count, rows)
    return sizes


def _gemma4(config: Config, i: int) -> Sizes:
    is_full = config["layer_types"][i] == "full_attention"
    hidden, dim = config["hidden_size"], config["global_head_dim" if is_full else "head_dim"]
    keys = dim * config["num_global_key_value_heads" if is_full else "num_key_value_heads"]
    own = projections(hidden, config["num_attention_heads"] * dim, keys)
    if is_full and config["attention_k_eq_v"]:
        del own["self_attn.v_proj"]
    own |= {f"self_attn.{part}_norm": (dim,) for part in "qk"} | gated("mlp", hidden, config["intermediate_size"])
    norms = [f"{part}_layernorm" for part in SANDWICH]
    sizes: Sizes = {"layer_scalar": (1,)}
    if config["enable_moe_block"]:
        count = config["num_experts"]
        own["router.proj"] = (count, hidden)
        sizes |= {"router.scale": (hidden,), "router.per_expert_scale": (count,)}
        sizes |= experts("experts", count, hidden, config["moe_intermediate_size"])
        norms += ["post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"]
    return sizes | weights(own | dict.fromkeys(norms, (hidden,)))


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
    """Qwen3.5 and Qwen3-Next. The latter has the projections of a recurrent layer in two tensors, not in four."""
    hidden, dim, heads = config["hidden_size"], config["head_dim"], config["linear_num_value_heads"]
    own: Sizes = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    sizes: Sizes = {}
    types, every = config.get("layer_types"), config["full_attention_interval"]
    if types[i] == "full_attention" if types else (i + 1) % every == 0:
        own |= projections(hidden, config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim)
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
        return sizes | weights(own | gated("mlp", hidden, config["intermediate_size"]))
    count = config["num_experts"]
    own |= {"mlp.gate": (count, hidden), "mlp.shared_expert_gate": (1, hidden)}
    own |= gated("mlp.shared_expert", hidden, config["shared_expert_intermediate_size"])
    return sizes | weights(own) | experts("mlp.experts", count, hidden, config["moe_intermediate_size"])


# By model_type: where the layers are, and what one of them holds.
LAYERS: dict[str, tuple[str, Callable[[Config, int], Sizes]]] = {
    "qwen3_moe": ("model.", _qwen3_moe),
    "gpt_oss": ("model.", _gpt_oss),
    "gemma4": ("model.language_model.", _gemma4),
    "qwen3_next": ("model.", _hybrid),
    "qwen3_5": ("model.language_model.", _hybrid),
    "qwen3_5_moe": ("model.language_model.", _hybrid),
}
