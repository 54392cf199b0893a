"""Each key of a config.json is read, ignored, or refused.

A key that changes what the model computes is honoured, or refused by name unless its value switches it off; keys that
describe training, generation or the file itself are ignored. So is a key that is in none of the tables, and the plan
tells the user its name (`ModelConfig.unknown_keys`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparkdraft.core import UserError
from sparkdraft.util.fields import flag, mapping, real, whole

if TYPE_CHECKING:
    from sparkdraft.weights.loader import Loader


Config = Mapping[str, Any]

Allowed = dict[str, tuple[Any, ...]]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def only_values(names: str, *allowed: Any) -> Allowed:
    return dict.fromkeys(names.split(), allowed)


READ = _names("""
    model_type num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim
    vocab_size max_position_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters tie_word_embeddings
    attention_bias mlp_bias sliding_window use_sliding_window max_window_layers layer_types
    quantization_config compression_config
""")
# Names, training, classes and flags of transformers, and defaults of generation that old files keep here.
IGNORED = _names("""
    architectures name_or_path transformers_version transformers.js_config unsloth_version unsloth_fixed
    is_llama_config torch_dtype dtype use_bfloat16 torchscript tf_legacy_loss tokenizer_class model_max_length
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id prefix
    initializer_range pretraining_tp attention_dropout hidden_dropout resid_pdrop embd_pdrop classifier_dropout
    gradient_checkpointing finetuning_task task_specific_params problem_type id2label label2id num_labels
    use_cache output_attentions output_hidden_states return_dict chunk_size_feed_forward is_decoder
    attn_implementation experts_implementation cross_attention_hidden_size
    max_length max_new_tokens min_length min_new_tokens do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p min_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens output_router_logits router_aux_loss_coef cache_implementation auto_map
""")
# Keys that change the computation, and the values at which they do not; null is such a value for every key.
ONLY: Allowed = {
    **only_values("hidden_act hidden_activation", "silu", "swish"),
    **only_values("position_embedding_type", "rope", "rotary"),
    **only_values("is_causal use_rope", True),
    **only_values("partial_rotary_factor rotary_pct rotary_emb_fraction", 1),
    **only_values("logit_scale logits_scaling embedding_multiplier residual_multiplier scale_emb", 1),
    **only_values("attention_multiplier query_pre_attn_scalar scale_depth clip_qkv per_layer_config"),
    **only_values("original_max_position_embeddings q_lora_rank kv_lora_rank no_rope_layers"),
    **only_values("cross_attention_layers pruned_heads", [], {}),
    **only_values("num_experts num_local_experts n_routed_experts num_experts_per_tok moe_num_experts", 0),
    **only_values("moe_intermediate_size shared_expert_intermediate_size num_kv_shared_layers", 0),
    **only_values("attn_logit_softcapping final_logit_softcapping attn_logit_softcap logit_softcap", 0),
    **only_values("alibi use_alibi rope_interleaved rope_traditional qkv_bias use_qkv_bias attention_sinks", False),
    **only_values("parallel_attn use_parallel_residual attn_output_gate use_bidirectional_attention", False),
    **only_values("is_encoder_decoder tie_encoder_decoder add_cross_attention", False),
}
ROPE_KINDS = {  # the numbers that each kind needs
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "proportional": (),
}
ROPE_READ = _names("""
    rope_type type rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings
    beta_fast beta_slow attention_factor attn_factor finetuned truncate
""")
ROPE_NUMBERS = [  # each above the first and up to the second, where it is given
    *((key, 0.0, 1e6) for key in ["factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"]),
    *((key, 0.0, 1e3) for key in ("attention_factor", "attn_factor")),
    ("rope_theta", 1.0, 1e30),
    ("partial_rotary_factor", 0.0, 1.0),
]
ROPE_ONLY = only_values("partial_rotary_factor", 1)


def check_keys(config: Config, more: Allowed, read: str = "") -> tuple[str, ...]:
    """The keys that are in no table. Raises UserError for one that asks for a computation that is not built.

    more: what the architecture adds to ONLY, key -> values that it runs. read: further keys that it honours.
    """
    honoured = READ | _names(read)
    only = {key: values for key, values in (ONLY | more).items() if key in more or key not in honoured}
    given = {key: value for key, value in config.items() if value is not None}
    for key in sorted(only.keys() & given.keys()):
        if given[key] not in only[key]:
            raise refused(key, given[key], only[key])
    known = honoured | IGNORED | only.keys()
    return tuple(sorted(key for key in given if key not in known and not key.startswith("_")))


def rope_of(config: Config, layer_type: str = "", reads: str = "") -> dict[str, Any]:
    """The rotation, checked: rope_scaling counts before rope_parameters, as in transformers.

    layer_type: of a config that may have one dict per type of layer. reads: further keys that the architecture honours.
    """
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = mapping(config, name)
    if layer_type and any(isinstance(value, Mapping) for value in given.values()):
        if not isinstance(given.get(layer_type), Mapping):
            raise damaged(f"{name} without those of {layer_type!r} layers")
        given = given[layer_type]
    rope = {key: value for key, value in given.items() if value is not None}
    kind = rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        raise refused(f"{name} of the kind", kind, tuple(ROPE_KINDS))
    known = ROPE_READ | _names(reads) | ({"partial_rotary_factor"} if kind == "proportional" else set())
    for key, value in rope.items():
        if key not in known and value not in ROPE_ONLY.get(key, ()):
            raise refused(f"{name} with {key}", value, ROPE_ONLY.get(key, ()))
    for key in ROPE_KINDS[kind]:
        if key not in rope:
            raise damaged(f"{name} of the kind {kind!r} without a {key}")
    _check_numbers(rope, f"config.json ({name})")
    return rope


def _check_numbers(rope: Config, where: str) -> None:
    whole(rope, "original_max_position_embeddings", where=where)
    flag(rope, "truncate", where=where)
    for key, low, high in ROPE_NUMBERS:
        real(rope, key, low, high, where)
    if rope["rope_type"] == "llama3" and not rope["low_freq_factor"] < rope["high_freq_factor"]:
        raise UserError(
            f"{where} has low_freq_factor {rope['low_freq_factor']} and high_freq_factor {rope['high_freq_factor']}, "
            "which must be larger: fetch it again."
        )


def damaged(what: str) -> UserError:
    return UserError(f"config.json has {what}: fetch it again.")


def refused(key: str, value: Any, allowed: tuple[Any, ...]) -> UserError:
    runs = " or ".join(map(repr, allowed)) or "null"
    return UserError(
        f"config.json has {key} {value!r}, which changes what the model computes and is not built here; "
        f"{runs} is supported: use another checkpoint."
    )


# ---- multimodal models: the text model is one part of the file and of its config.json


PREFIXES = ("model.language_model.", "language_model.model.", "model.")  # the first that the file has
# What else a file may hold: the prefixes of its tensors, and why it is not loaded ("": drafters/ says so).
OTHERS = {
    "the vision tower": (
        "model.vision_tower. model.embed_vision. model.visual. visual. vision_tower. model.multi_modal_projector. "
        "multi_modal_projector.",
        "only text is read",
    ),
    "the audio tower": ("model.audio_tower. model.embed_audio. audio_tower.", "only text is read"),
    "a drafter": ("mtp. model.mtp.", ""),  # drafters/find.py says who drafts
}
# Keys beside text_config that do not concern the text.
OUTER = """
    text_config vision_config audio_config image_token_id image_token_index video_token_id audio_token_id
    boi_token_id boi_token_index eoi_token_id eoi_token_index boa_token_id eoa_token_id eoa_token_index
    vision_start_token_id vision_end_token_id mm_tokens_per_image vision_soft_tokens_per_image
"""


def unread_names(drafts: bool) -> tuple[str, ...]:
    """Prefixes of the tensors that are not loaded. drafts: a drafter in the target's file is loaded."""
    return tuple(name for names, reason in OTHERS.values() if reason or not drafts for name in names.split())


def text_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The text model's own config, under the whole file's model_type, and the outer keys that are not known."""
    if config.get("text_config") is None:
        return dict(config), ()
    inner = mapping(config, "text_config")
    outer = {key: config[key] for key in ("tie_word_embeddings", "model_type") if config.get(key) is not None}
    text = {**outer, **inner, "model_type": config["model_type"]}
    return text, check_keys(config, {}, OUTER)


def text_prefix(load: Loader) -> str:
    return next((prefix for prefix in PREFIXES if load.has(f"{prefix}embed_tokens.weight")), PREFIXES[-1])


def leave_others(load: Loader) -> None:
    """Leave the tensors of other parts, with one notice for each part."""
    for what, (prefixes, reason) in OTHERS.items():
        if (count := sum(map(load.leave, prefixes.split()))) and reason:
            load.note(f"{count} tensors of {what} are not loaded", reason, is_choice=True)
