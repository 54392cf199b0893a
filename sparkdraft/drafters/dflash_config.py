"""The config of a DFlash checkpoint, in one record for the two formats in which it is published.

z-lab keeps the drafter's dimensions at the top of config.json and the rest in `dflash_config`; speculators keeps the
dimensions in `transformer_layer_config` and counts taps from the embedding, so one higher. Whatever would change the
computation and is not implemented here is refused by name. dflash.py reads the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sparkdraft.core import UserError
from sparkdraft.drafters.caps import SeenContext
from sparkdraft.models.common.config import ModelConfig, dense_config, softcap_of
from sparkdraft.models.common.layers import LayerSpec
from sparkdraft.util.fields import MAX_LAYERS, flag, listed, mapping, real, whole, wrong

Config = Mapping[str, Any]
OWN = "The drafter's config.json"
WINDOW_KEY, SINK_KEY = "draft_window_size", "draft_sink_size"  # of dflash_config
TAPS = 5  # of the drafters that are made here
Mask = tuple[int, bool]  # of a layer: window (0: none), and whether a row is blind to the rows after it

# Keys that stand for another algorithm or a computation that we do not have, and its name.
FOREIGN = {
    "conv_kernel_size": "dflash2",
    "selector_rank": "dflash2",
    "markov_rank": "dspark",
    "enable_confidence_head": "dspark",
    "sample_from_anchor": "dspark (sample_from_anchor)",
    "gru_hidden_dim": "domino",
    "attention_sink_bias": "dflash with attention sinks",
    "pure_draft_prefix_len": "dflash with a pure draft prefix",
    "shift_label": "dflash with shifted labels",
}
# Keys that must have one of the given values if they are present.
ONLY = {
    "projector_type": (None, "", "dflash"),
    "attention_value_scale": (None, 1, 1.0),
    "use_aux_hidden_state": (None, True),
    "is_neox_style": (None, True),
    "hidden_act": (None, "silu"),
}


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    model: ModelConfig  # the drafter's own layers, windows and causality included; vocab_size is that of the target
    taps: tuple[int, ...]  # target blocks, from 0; the residual after each is read, in this order
    block_size: int  # the anchor counts
    mask_token_id: int
    draft_vocab_size: int  # of an output head of its own, where the checkpoint has one
    target_hidden_size: int
    num_target_layers: int | None = None  # where the config says
    input_embedding_scale: float | None = 1.0  # None: the target's own, for rows that its first layer reads scaled
    output_multiplier: float = 1.0
    softcap: float | None = None
    sees: SeenContext | None = None  # of the context; None: all of it

    @staticmethod
    def read(config: Config) -> DFlashConfig:
        """Read a config.json in either format. Raises UserError."""
        dialect = _read_zlab
        if "speculators_model_type" in config or "speculators_config" in config:
            dialect = _read_speculators
        return dialect(config)


def check_fits(draft: DFlashConfig, target: ModelConfig) -> None:
    """Raises UserError if the drafter was not made for a target of this shape."""
    vocab, layers, beyond = target.vocab_size, target.num_layers, [t for t in draft.taps if t >= target.num_layers]
    for own in (draft.model.hidden_size, draft.target_hidden_size):
        must_fit(own == target.hidden_size, f"it has hidden size {own}, the model {target.hidden_size}")
    must_fit(
        draft.model.vocab_size == vocab, f"it has a vocabulary of {draft.model.vocab_size}, the model one of {vocab}"
    )
    must_fit(draft.draft_vocab_size <= vocab, f"it drafts among {draft.draft_vocab_size} ids, the model has {vocab}")
    must_fit(not beyond, f"it reads layer {max(beyond, default=0)}, the model has {layers} layers, counted from 0")
    made_for = draft.num_target_layers
    must_fit(made_for in (None, layers), f"it was made for a model of {made_for} layers, this one has {layers}")
    mask = draft.mask_token_id
    must_fit(0 <= mask < vocab, f"its mask id {mask} is outside the model's vocabulary of {vocab}")


def spread_taps(num_layers: int, count: int = TAPS) -> tuple[int, ...]:
    """Taps from the second layer to the third from the end, as in z-lab's drafters; all layers of a tiny target."""
    first, last = min(1, num_layers - 1), max(num_layers - 3, 0)
    if last - first < count - 1:
        return tuple(range(max(num_layers - count, 0), num_layers))
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))


def must_fit(ok: bool, reason: str) -> None:
    """Raises UserError, for drafters of every kind."""
    if not ok:
        raise UserError(
            f"The drafter does not fit the model: {reason}; use the drafter that was trained for this model."
        )


# ---- the two formats


def _read_zlab(config: Config) -> DFlashConfig:
    architectures = listed(config, "architectures", str, OWN) or []
    if architectures and "DFlashDraftModel" not in architectures:
        raise _not_built(architectures[0])
    if "dflash_config" not in config and not architectures:
        raise _not_built(str(config.get("model_type", "unknown")))
    inner = mapping(config, "dflash_config", OWN)
    both = {**config, **inner}  # a key may be in either place; the inner one wins, as in z-lab's own code
    _refuse_foreign(both)
    model = _masked(dense_config(_one_rope(config), qk_norm=True), partial(_zlab_masks, config, inner))
    target_layers = whole(config, "num_target_layers", where=OWN)
    if both.get("target_layer_ids") is None:
        both["target_layer_ids"] = _default_taps(target_layers, model.num_layers)
    return DFlashConfig(
        model=model,
        taps=_ids(both, "target_layer_ids"),
        block_size=whole(both, "block_size", 2, OWN) or 16,
        mask_token_id=_required(both, "mask_token_id"),
        draft_vocab_size=whole(both, "draft_vocab_size", where=OWN) or model.vocab_size,
        target_hidden_size=whole(both, "target_hidden_size", where=OWN) or model.hidden_size,
        num_target_layers=target_layers,
        input_embedding_scale=real(both, "input_embedding_scale", -math.inf, where=OWN),
        output_multiplier=1.0 if (said := real(both, "output_multiplier", -math.inf, where=OWN)) is None else said,
        softcap=softcap_of(both) or None,
        sees=_seen_context(both),
    )


def _read_speculators(config: Config) -> DFlashConfig:
    stated = mapping(config, "speculators_config", OWN)
    algorithm = str(config.get("speculators_model_type") or stated.get("algorithm"))
    if algorithm != "dflash":
        raise _not_built(algorithm)
    body = config.get("transformer_layer_config")
    if not isinstance(body, Mapping):
        raise UserError(
            "config.json has no 'transformer_layer_config': a speculators drafter keeps its dimensions there"
        )
    _refuse_foreign({**body, **config})
    causal = not flag(config, "sliding_window_non_causal", where=OWN)  # full layers always see the whole block

    def masks(num_layers: int) -> list[Mask]:
        return [(window, causal and slides) for window, slides in _windows(body, num_layers)]

    model = _masked(dense_config(_one_rope({"model_type": "qwen3", **body}), qk_norm=True), masks)
    taps = _ids(config, "aux_hidden_state_layer_ids")
    if 0 in taps:
        raise UserError("The drafter reads the embedding (aux_hidden_state_layer_ids has 0), which is not built yet")
    return DFlashConfig(
        model=model,
        taps=tuple(tap - 1 for tap in taps),  # in this format, 1 is the output of layer 0
        block_size=whole(config, "block_size", 2, OWN) or 8,
        mask_token_id=_required(config, "mask_token_id"),
        draft_vocab_size=whole(config, "draft_vocab_size", where=OWN) or model.vocab_size,
        target_hidden_size=whole(config, "target_hidden_size", where=OWN) or model.hidden_size,
        sees=_seen_context(body),
    )


def _masked(model: ModelConfig, masks: Callable[[int], list[Mask]]) -> ModelConfig:
    """The model with each layer's window, and with layers whose rows may see the rows of their block after them."""
    specs = [
        replace(spec, window=window, causal=causal)
        for spec, (window, causal) in zip(model.attention, masks(model.num_layers), strict=True)
    ]
    return replace(model, layers=tuple(LayerSpec(s, layer.mlp) for s, layer in zip(specs, model.layers, strict=True)))


def _zlab_masks(config: Config, inner: Config, num_layers: int) -> list[Mask]:
    """Who says whether a block is causal: the config, else dflash_config, else whether the layer slides."""
    of_block = flag(inner, "causal", where=OWN) if inner.get("causal") is not None else None
    said = flag(config, "is_causal", where=OWN) if config.get("is_causal") is not None else of_block
    if flag(inner, "use_swa", where=OWN):
        return [(_required(inner, "swa_window_size"), bool(said))] * num_layers
    return [(window, slides if said is None else said) for window, slides in _windows(config, num_layers)]


def _windows(config: Config, num_layers: int) -> list[tuple[int, bool]]:
    """(window, is a sliding layer) of each layer, with transformers' defaults for Qwen3."""
    window = whole(config, "sliding_window", 0, OWN) or 0 if flag(config, "use_sliding_window", True, OWN) else 0
    kinds = listed(config, "layer_types", str, OWN)
    if kinds is None:
        first = whole(config, "max_window_layers", 0, OWN) or 0 if window else num_layers
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown or len(kinds) != num_layers:
        known = f"{num_layers} of full_attention or sliding_attention"
        raise UserError(f"The drafter's layer_types are {', '.join(map(str, kinds))}; they must be {known}")
    return [(window, True) if kind == "sliding_attention" else (0, False) for kind in kinds]


# ---- the parts


def _seen_context(config: Config) -> SeenContext | None:
    """Keys of our own, which other programs ignore: they show the drafter all of the context. They are named after
    SGLang's --speculative-dflash-draft-window-size and after attention sinks."""
    if not config.get(WINDOW_KEY):
        return None
    return SeenContext(whole(config, SINK_KEY, 0, OWN) or 0, _required(config, WINDOW_KEY, 1))


def _default_taps(target_layers: int | None, draft_layers: int) -> list[int]:
    """z-lab's default taps: spaced evenly from layer 1 to the third from the end."""
    if not target_layers:
        raise UserError(
            "The drafter's config names neither target_layer_ids nor num_target_layers; one of them is needed"
        )
    if draft_layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (draft_layers - 1)) for i in range(draft_layers)]


def _one_rope(config: Config) -> Config:
    """If rotations are given per kind of layer, take those of the sliding layers for all, as speculators does."""
    rope = mapping(config, "rope_parameters", OWN)
    return {**config, "rope_parameters": rope["sliding_attention"]} if "sliding_attention" in rope else config


def _refuse_foreign(config: Config) -> None:
    for key, kind in FOREIGN.items():
        if config.get(key):
            raise _not_built(kind)
    if any(key.startswith("lilicorr") for key in config):
        raise _not_built("lilicorr")
    for key, allowed in ONLY.items():
        if config.get(key) not in allowed:
            raise _not_built(f"dflash with {key} {config[key]}")


def _not_built(kind: str) -> UserError:
    return UserError(f"Drafters of the kind '{kind}' are not supported yet: use DFlash, of z-lab or of speculators.")


def _required(config: Config, key: str, low: int = 0) -> int:
    value = whole(config, key, low, OWN)
    if value is None:
        raise UserError(f"{OWN} has no {key}, which is a whole number: fetch it again.")
    return value


def _ids(config: Config, key: str) -> tuple[int, ...]:
    ids = tuple(listed(config, key, int, OWN) or ())
    if not ids or not all(0 <= each <= MAX_LAYERS for each in ids) or len(set(ids)) < len(ids):
        raise wrong(key, list(ids), f"a list of distinct layer numbers up to {MAX_LAYERS:,}", OWN)
    return ids
