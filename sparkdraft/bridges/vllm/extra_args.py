"""Flags of another server that make fields of ours only together, and those that containers have in EXTRA_ARGS."""

from __future__ import annotations

from typing import Any

from sparkdraft.bridges.shell_text import split_words
from sparkdraft.bridges.tables import Found, read_flags
from sparkdraft.bridges.vllm.flags import VLLM
from sparkdraft.config import EngineConfig

BASE = "sampling base"  # what --sampling-defaults begins with
SAMPLING = "sampling "  # before the name of a value that --sampling-defaults takes


def read_extra_args(text: str) -> Found:
    """Flags of `vllm serve` alone, as containers have them in EXTRA_ARGS."""
    found = read_flags(VLLM, split_words(text, "EXTRA_ARGS"))
    finish_numbers(found.values, found.notes)
    return found


def finish_numbers(values: dict[str, Any], notes: list[str]) -> None:
    if blocks := values.pop("blocks", 0):
        values["kv_tokens"] = blocks * values.get("block_size", EngineConfig.of().block_size)
    if context := values.pop("context", 0):
        slots = max(values.get("max_seqs", 0), 1)
        each = values.get("max_model_len") or context // slots
        values |= {"kv_tokens": context, "max_model_len": each}
        if slots > 1:
            notes.append(f"--ctx-size {context}: shared by {slots} slots there, so {each} tokens per request")
    if base := values.pop(BASE, ""):
        single = values.get("sampling_defaults")
        values["sampling_defaults"] = f"{base},{single}" if single and base != "model" else single or base
    if sampling := {name: values.pop(name) for name in list(values) if name.startswith(SAMPLING)}:
        values["sampling_defaults"] = ",".join(f"{name[len(SAMPLING) :]}={value:g}" for name, value in sampling.items())
