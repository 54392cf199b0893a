"""How a GGUF file wants to be sampled, with the keys of Hugging Face's generation_config.json.

New files say it themselves (general.sampling.*, as llama.cpp writes it). For known models whose files do not, there is
a table of what their authors recommend. What is done with these values is for sparkdraft/defaults.py to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEYS = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# By general.basename in small letters, for files with a chat template.
RECOMMENDED = {
    "smollm2": {"temperature": 0.2, "top_p": 0.9},  # from the model card of SmolLM2's instruct models
}


def sampling_of(meta: Mapping[str, Any]) -> dict[str, float]:
    """From the file's metadata; the table counts only where the file says nothing."""
    said = {name: meta.get(f"general.sampling.{key}") for key, name in KEYS.items()}
    found = {name: round(value, 6) for name, value in said.items() if isinstance(value, int | float)}
    if found or not meta.get("tokenizer.chat_template"):
        return found
    return dict(RECOMMENDED.get(str(meta.get("general.basename", "")).lower(), {}))
