"""What must be known of a model to serve it elsewhere: its family, its weights, its drafters. From its config.json if
that is at hand, else from its name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkdraft.core import UserError
from sparkdraft.drafters import pairs
from sparkdraft.models.registry import read_config
from sparkdraft.text.reasoning import by_marks
from sparkdraft.util.paths import user_path
from sparkdraft.weights.checkpoint import read_config_json
from sparkdraft.weights.folder_files import read_chat_template
from sparkdraft.weights.hub import portable_name

HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # recurrent layers among those with attention
WINDOWED = ("gemma3", "gemma4", "gpt_oss")  # sliding windows in some layers
FORMATS = (("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"), ("int4|awq|gptq|autoround|w4a16", "int4"), ("fp8", "fp8"))


@dataclass(frozen=True, slots=True)
class Target:
    name: str  # as another engine loads it: a hub id or a path
    family: str  # model_type of its text model
    weights: str  # how its file is quantised; empty: it is not, or that is not known
    known: pairs.KnownTarget | None
    template: str | None = None  # its chat template, where the model is a folder that has one
    doubt: str = ""  # where this was not read from its config.json, or it is only similar to the known one

    @property
    def is_hybrid(self) -> bool:
        return self.family in HYBRID

    @property
    def writes_code(self) -> bool:
        """Qwen's Coders have a format of tool calls of their own."""
        return "coder" in self._title

    @property
    def thinks(self) -> bool:
        """Some of Qwen's models do not: their names say so, whatever template a re-upload brings, or their template has
        no thoughts. vLLM's parser takes all text for thoughts until these end, and would leave their answers empty."""
        if not self.family.startswith("qwen"):
            return True
        is_named_so = "coder" in self._title or "instruct" in self._title
        return not is_named_so and (self.template is None or by_marks(self.template)[0] is not None)

    @property
    def _title(self) -> str:
        """The model's own name: folders above it say nothing, but for a snapshot in the hub's cache."""
        parts = Path(self.name.lower()).parts
        return parts[-3] if parts[-2:-1] == ("snapshots",) else parts[-1]


def find_target(model: str) -> Target:
    """Asks the network for config.json only if neither a file nor the name says enough."""
    name = portable_name(model)
    by_name = None if user_path(name).exists() or _is_cached(name) else _named(name)
    if by_name:
        doubt = "" if by_name.name == name else f"{name} is taken for {by_name.name} by its name"
        return Target(name, by_name.model_type, _weights(name, {}), by_name, doubt=doubt)
    raw = read_config_json(model)
    try:
        match = pairs.match(name, read_config(raw))
    except UserError:  # an architecture that this engine does not have, and others may
        match = None
    family, folder = str(raw.get("model_type") or "").removesuffix("_text"), user_path(name)
    known, doubt = (match.target, match.doubt) if match else (None, "")
    template = read_chat_template(folder) if folder.is_dir() else None
    return Target(name, family, _weights(name, raw), known, template, doubt)


def _named(name: str) -> pairs.KnownTarget | None:
    simple = name.lower().replace("_", "-")
    named = [target for target in pairs.targets() if target.name == name or target.short in simple]
    return max(named, key=lambda target: (target.name == name, len(target.short)), default=None)


def _is_cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return "/" in name and not Path(name).is_absolute() and isinstance(try_to_load_from_cache(name, "config.json"), str)


def _weights(name: str, config: dict[str, Any]) -> str:
    """The format of quantised weights, by config.json and, where it is silent, by the name."""
    quantised = config.get("quantization_config") or {}
    text = f"{quantised.get('quant_method', '')} {quantised.get('quant_algo', '')} {quantised.get('format', '')} {name}"
    text += f" int{quantised.get('bits')}" if quantised.get("bits") else ""
    return next(
        (kind for words, kind in FORMATS if re.search(words, text.lower())), "mxfp4" if "gpt-oss" in name else ""
    )
