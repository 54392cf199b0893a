"""A model's dimensions: its ends (vocabulary, hidden size) and one spec per layer (models/common/layers.py).

Each architecture's file reads its own config.json into this record; GGUF metadata is translated to such a config first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparkdraft.core import UserError
from sparkdraft.models.common.keys import damaged, refused, rope_of
from sparkdraft.models.common.layers import AttentionSpec, DenseSpec, LayerSpec, RopeSpec
from sparkdraft.util.fields import MAX_TOKENS, flag, listed, real, text, whole

FULL, SLIDING = "full_attention", "sliding_attention"
FINAL = -1  # as an aux layer: the output of the final norm


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model_type: str
    hidden_size: int
    vocab_size: int
    max_position: int
    layers: tuple[LayerSpec, ...]
    rms_eps: float = 1e-6
    tie_embeddings: bool = False
    norm_plus_one: bool = False  # files hold the gains of RMS norms less 1
    embedding_scale: float = 1.0
    softcap: float = 0.0  # of the logits, by a tanh; 0: none
    unknown_keys: tuple[str, ...] = ()  # of config.json: ignored, and shown to the user

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        """The attention layers, in order."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionSpec))

    @property
    def cached_attention(self) -> tuple[AttentionSpec, ...]:
        """The layers that keep keys and values of their own."""
        return tuple(spec for spec in self.attention if spec.kv_from is None)

    def uniform(self) -> tuple[AttentionSpec, DenseSpec]:
        """The attention and MLP of a model whose layers are all alike."""
        first = self.layers[0]
        if any(layer != first for layer in self.layers):
            raise UserError(f"the layers of this {self.model_type} model differ; this needs a model of equal layers")
        if not isinstance(first.mixer, AttentionSpec) or not isinstance(first.mlp, DenseSpec):
            raise UserError(f"this {self.model_type} model has experts or a recurrence; this needs plain dense layers")
        return first.mixer, first.mlp


def dense_config(
    config: Mapping[str, Any],
    unknown_keys: tuple[str, ...] = (),
    windows: Sequence[int] = (),  # of each layer, 0: everything; (): all see everything
    partial: bool = False,  # allows partial rotary embedding
    **special: Any,  # fields of AttentionSpec that no key states
) -> ModelConfig:
    """A config.json of Llama's kind."""
    attention = replace(attention_of(config, partial=partial), **special)
    mlp = DenseSpec(need(config, "intermediate_size"), bias=flag(config, "mlp_bias"))
    layers = [LayerSpec(replace(attention, window=window), mlp) for window in windows or (0,) * layer_count(config)]
    return decoder_config(config, layers, unknown_keys=unknown_keys)


def need(config: Mapping[str, Any], key: str) -> int:
    """A whole number of 1 or more that has no default. Raises UserError."""
    value = whole(config, key)
    if value is None:
        raise UserError(f"config.json has no '{key}': it does not describe a decoder this engine knows")
    return value


def layer_count(config: Mapping[str, Any]) -> int:
    return need(config, "num_hidden_layers")


def expert_layers(config: Mapping[str, Any]) -> list[bool]:
    """True if each layer of a Qwen model has experts."""
    step, dense = whole(config, "decoder_sparse_step") or 1, listed(config, "mlp_only_layers", int) or ()
    return [i not in dense and (i + 1) % step == 0 for i in range(layer_count(config))]


def softcap_of(config: Mapping[str, Any]) -> float:
    """0 where logits are left as they are."""
    key = "final_logit_softcapping"
    return 0.0 if config.get(key) == 0 else real(config, key) or 0.0


def experts_of(config: Mapping[str, Any], counts: str, chosen: str) -> tuple[int, int]:
    """The numbers of experts, and of those that a token is sent to. counts, chosen: the names of each, which agree."""
    found = []
    for names in (counts.split(), chosen.split()):
        given = {name: need(config, name) for name in names if config.get(name) is not None}
        if len(set(given.values())) > 1:
            said = " and ".join(f"{name} {value}" for name, value in given.items())
            raise damaged(f"{said}, which are the same number elsewhere")
        found.append(next(iter(given.values()), None) or need(config, names[0]))
    if found[1] > found[0]:
        raise UserError(f"config.json sends a row to {found[1]} of {found[0]} experts: fetch it again.")
    return found[0], found[1]


def attention_of(config: Mapping[str, Any], layer_type: str = "", partial: bool = False) -> AttentionSpec:
    """Heads, scale and rotation in the keys that most files have. partial: allows partial rotary embedding."""
    heads, bias = need(config, "num_attention_heads"), flag(config, "attention_bias")
    head_dim = whole(config, "head_dim") or need(config, "hidden_size") // heads
    if head_dim < 1:
        raise damaged(f"hidden_size {config['hidden_size']} and num_attention_heads {heads}, which leaves empty heads")
    kv_heads = whole(config, "num_key_value_heads") or heads
    if heads % kv_heads:
        raise damaged(f"num_attention_heads {heads} and num_key_value_heads {kv_heads}, which does not divide it")
    rope = rope_spec(config, head_dim, layer_type, "partial_rotary_factor" if partial else "")
    return AttentionSpec(heads, kv_heads, head_dim, rope, scale=head_dim**-0.5, bias=bias, output_bias=bias)


def decoder_config(config: Mapping[str, Any], layers: Sequence[LayerSpec], **special: Any) -> ModelConfig:
    """The ends of a model in the keys that most files have, around its layers. special: other fields."""
    return ModelConfig(
        model_type=text(config, "model_type"),
        hidden_size=need(config, "hidden_size"),
        vocab_size=need(config, "vocab_size"),
        max_position=max([need(config, "max_position_embeddings"), *map(_stretched, layers)]),
        layers=tuple(layers),
        rms_eps=real(config, "rms_norm_eps", high=1.0) or 1e-6,
        tie_embeddings=flag(config, "tie_word_embeddings"),
        **special,
    )


def _stretched(layer: LayerSpec) -> int:
    """Tokens that a yarn was added for: Qwen's cards leave the number of positions as it was."""
    scaling = layer.mixer.rope.scaling if isinstance(layer.mixer, AttentionSpec) and layer.mixer.rope else None
    if not scaling or scaling.get("rope_type") != "yarn" or not scaling.get("original_max_position_embeddings"):
        return 0
    original = need(scaling, "original_max_position_embeddings")
    if (stretched := int(scaling["factor"] * original)) > MAX_TOKENS:
        raise UserError(
            f"config.json has a rope that stretches {original:,} tokens by {scaling['factor']:g}; the limit is "
            f"{MAX_TOKENS:,} tokens: correct it, or fetch it again."
        )
    return stretched


def rope_spec(config: Mapping[str, Any], head_dim: int, layer_type: str = "", reads: str = "") -> RopeSpec:
    """The rope of a config.json; layer_type and reads as in `rope_of`. "partial_rotary_factor" may be beside the dict
    too."""
    rope = rope_of(config, layer_type, reads)
    theta = real(rope if rope.get("rope_theta") else config, "rope_theta", 1.0) or 10000.0
    scaling = rope if rope["rope_type"] != "default" else None
    part = 0
    if "partial_rotary_factor" in reads.split() and rope["rope_type"] != "proportional":
        factor = rope.get("partial_rotary_factor") or real(config, "partial_rotary_factor", high=1.0) or 1.0
        part = int(head_dim * factor)
        if not 0 < part <= head_dim or part % 2:
            raise UserError(
                f"config.json has partial_rotary_factor {factor}, which rotates {part} of {head_dim} lanes; "
                "they must be pairs of lanes of a head: use another checkpoint."
            )
    return RopeSpec(head_dim, theta, scaling, need(config, "max_position_embeddings"), part if part < head_dim else 0)


def uniform_config(
    model_type: str,
    num_layers: int,
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
    max_position: int,
    rms_eps: float = 1e-6,
    rope_theta: float = 10000.0,
    rope_scaling: Mapping[str, Any] | None = None,
    tie_embeddings: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> ModelConfig:
    """A model whose layers are all alike, from plain numbers."""
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=RopeSpec(head_dim, rope_theta, rope_scaling, max_position),
        scale=head_dim**-0.5,
        qk_norm=qk_norm,
        bias=attention_bias,
        output_bias=attention_bias,
    )
    layer = LayerSpec(attention, DenseSpec(intermediate_size, bias=mlp_bias))
    return ModelConfig(
        model_type, hidden_size, vocab_size, max_position, (layer,) * num_layers, rms_eps, tie_embeddings
    )


# ---- windows: which layers see only the last positions
#
# A window counts the token itself: with a window of 8 a token sees itself and the 7 before it.


def window_of(config: Mapping[str, Any]) -> int:
    """The window of the layers that slide; 0 if the key is absent or null."""
    return whole(config, "sliding_window") or 0


def types_of(
    config: Mapping[str, Any], otherwise: Sequence[str], known: tuple[str, ...] = (FULL, SLIDING)
) -> list[str]:
    """The type of each layer, one of the known. otherwise: where the config has none."""
    given = listed(config, "layer_types", str)
    types = list(otherwise) if given is None else given
    for each in types:
        if each not in known:
            raise refused("layer_types with", each, known)
    if len(types) != len(otherwise):
        raise damaged(f"{len(types)} layer_types and num_hidden_layers {len(otherwise)}")
    return types


def windows_of(types: Sequence[str], window: int) -> list[int]:
    """The window of each layer; 0 where it sees everything."""
    if SLIDING in types and not window:
        raise UserError(
            f"config.json has a {SLIDING} among its layer_types and no sliding_window in force: "
            f"set one, or make all layers {FULL}."
        )
    return [window if each == SLIDING else 0 for each in types]


def qwen_windows(config: Mapping[str, Any], num_layers: int) -> list[int]:
    """Qwen 2 and 3: a window counts where use_sliding_window says so, by default from layer max_window_layers on."""
    window = window_of(config) if flag(config, "use_sliding_window") else 0
    first = whole({"max_window_layers": 28, **config}, "max_window_layers", low=0) or 0
    types = [SLIDING if window and i >= first else FULL for i in range(num_layers)]
    return windows_of(types_of(config, types), window)


def sliding_layers(config: Mapping[str, Any], pattern: int, last_is_full: bool = False) -> list[tuple[str, int]]:
    """The type and window of each layer. Where the config has no types, all slide except every 'pattern'-th."""
    types = types_of(config, [SLIDING if (i + 1) % pattern else FULL for i in range(layer_count(config))])
    if last_is_full:
        types[-1] = FULL
    return list(zip(types, windows_of(types, window_of(config)), strict=True))


def refuse_windows(config: Mapping[str, Any], slides_by_default: bool) -> None:
    """All layers must see the whole context. slides_by_default: a sliding_window counts without use_sliding_window."""
    for each in listed(config, "layer_types", str) or ():
        if each != FULL:
            raise refused("layer_types with", each, (FULL,))
    window = window_of(config) if flag(config, "use_sliding_window", slides_by_default) else 0
    if 0 < window < config["max_position_embeddings"] and config.get("layer_types") is None:
        raise refused("sliding_window", window, ())
