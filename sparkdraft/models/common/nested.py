"""Checkpoints that see and hear as well: their text model is one part of the file and of its config.json.

`config.json` holds the text model's numbers in `text_config`, and the tensors have a longer prefix; text-only copies of
the same models have neither. Both are read here, and what else a file holds is left, and the user is told. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparkdraft.models.common.keys import check_keys
from sparkdraft.util.fields import mapping

if TYPE_CHECKING:
    from sparkdraft.weights.loader import Loader

PREFIXES = ("model.language_model.", "language_model.model.", "model.")  # the first that the file has
# What a file may hold besides: where, and why it is not loaded; "": that is not for the model to say.
OTHERS = {
    "the vision tower": (
        "model.vision_tower. model.embed_vision. model.visual. visual. vision_tower. model.multi_modal_projector. "
        "multi_modal_projector.",
        "only text is read",
    ),
    "the audio tower": ("model.audio_tower. model.embed_audio. audio_tower.", "only text is read"),
    "a drafter": ("mtp. model.mtp.", ""),  # drafters/find.py decides who drafts
}
# What stands beside text_config and does not concern the text.
OUTER = """
    text_config vision_config audio_config image_token_id image_token_index video_token_id audio_token_id
    boi_token_id boi_token_index eoi_token_id eoi_token_index boa_token_id eoa_token_id eoa_token_index
    vision_start_token_id vision_end_token_id mm_tokens_per_image vision_soft_tokens_per_image
"""


def unread_names(drafts: bool) -> tuple[str, ...]:
    """How the names begin of what is not loaded. drafts: a drafter of the target's file is."""
    return tuple(name for names, reason in OTHERS.values() if reason or not drafts for name in names.split())


def text_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The text model's own config, named by the whole file's type, and outer keys that are not known."""
    if config.get("text_config") is None:
        return dict(config), ()
    inner = mapping(config, "text_config")
    outer = {key: config[key] for key in ("tie_word_embeddings", "model_type") if config.get(key) is not None}
    text = {**outer, **inner, "model_type": config["model_type"]}
    return text, check_keys(config, {}, OUTER)


def text_prefix(load: Loader) -> str:
    return next((prefix for prefix in PREFIXES if load.has(f"{prefix}embed_tokens.weight")), PREFIXES[-1])


def leave_others(load: Loader) -> None:
    """Leave what is not the text model's; the user is told once."""
    for what, (prefixes, reason) in OTHERS.items():
        if (count := sum(map(load.leave, prefixes.split()))) and reason:
            load.note(f"{count} tensors of {what} are not loaded", reason, is_choice=True)
