"""Checkpoints that see and hear as well: their text model is one part of the file and of its config.json.

`config.json` holds the text model's numbers in `text_config`, and the tensors have a longer prefix; text-only copies of
the same models have neither. Both are read here, and what else a file holds is left, and the user is told. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparkdraft.core import UserError

if TYPE_CHECKING:
    from sparkdraft.weights.loader import Loader

PREFIXES = ("model.language_model.", "language_model.model.", "model.")  # the first that the file has
TOWERS = {
    "the vision tower": "model.vision_tower. model.embed_vision. model.visual. visual. vision_tower. "
    "model.multi_modal_projector. multi_modal_projector.",
    "the audio tower": "model.audio_tower. model.embed_audio. audio_tower.",
    "an MTP drafter": "mtp. model.mtp.",
}
# What stands beside text_config and does not concern the text.
OUTER = frozenset([
    *("architectures", "model_type", "text_config", "vision_config", "audio_config", "dtype", "torch_dtype"),
    *("transformers_version", "initializer_range", "tie_word_embeddings", "quantization_config", "compression_config"),
    *("eos_token_id", "bos_token_id", "pad_token_id", "image_token_id", "image_token_index", "video_token_id"),
    *("audio_token_id", "boi_token_id", "boi_token_index", "eoi_token_id", "eoi_token_index", "boa_token_id"),
    *("eoa_token_id", "eoa_token_index", "vision_start_token_id", "vision_end_token_id", "mm_tokens_per_image"),
    *("vision_soft_tokens_per_image", "use_cache", "name_or_path"),
])  # fmt: skip


def text_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The text model's own config, named by the whole file's type, and outer keys that are not known."""
    inner = config.get("text_config")
    if inner is None:
        return dict(config), ()
    if not isinstance(inner, Mapping):
        raise UserError("config.json has a text_config that is no object: fetch it again.")
    outer = {key: config[key] for key in ("tie_word_embeddings", "model_type") if config.get(key) is not None}
    text = {**outer, **inner, "model_type": config["model_type"]}
    unknown = [key for key, value in config.items() if value is not None and key not in OUTER]
    return text, tuple(sorted(key for key in unknown if not key.startswith("_")))


def text_prefix(load: Loader) -> str:
    return next((prefix for prefix in PREFIXES if load.has(f"{prefix}embed_tokens.weight")), PREFIXES[-1])


def leave_towers(load: Loader) -> None:
    """What is not read of a file; the user is told once."""
    counts = {what: sum(map(load.leave, prefixes.split())) for what, prefixes in TOWERS.items()}
    found = [f"{count} tensors of {what}" for what, count in counts.items() if count]
    if found:
        load.note("text only", f"{' and '.join(found)} are not loaded")
