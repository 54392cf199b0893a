"""Environment variables that configure existing vLLM containers, and what each one means here.

The names have no prefix, so other programs may use similar ones: a near miss is reported, not refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkdraft.bridges.shell_text import split_words
from sparkdraft.bridges.tables import Found, Unread, finish_numbers, read_flags
from sparkdraft.core import UserError
from sparkdraft.server.config import FALSE, TRUE, ServerConfig, converted, merge
from sparkdraft.util.names import alike, did_you_mean

# The field that each variable sets. SPARKDRAFT_* variables beat them.
CONTAINER_NAMES = {
    "MODEL_PATH": "model",
    "DFLASH_DRAFTER": "drafter",
    "DFLASH_NUM_SPEC_TOKENS": "spec",
    "MAX_MODEL_LEN": "max_model_len",
    "MAX_NUM_SEQS": "max_seqs",
    "MAX_NUM_BATCHED_TOKENS": "max_step_tokens",
    "GPU_MEMORY_UTILIZATION": "memory_fraction",
    "TQ_MODE": "tq_mode",
    "TQ_KEY_BITS": "tq_key_bits",
    "TQ_VALUE_BITS": "tq_value_bits",
    "TQ_RING_CAPACITY": "tq_ring_capacity",
    "TQ_INITIAL_LAYERS": "tq_initial_layers",
    "SERVED_MODEL_NAME": "served_name",
    "VLLM_API_KEY": "api_key",
}
TURBOQUANT = "ENABLE_TURBOQUANT"  # the containers' switch for TurboQuant
EXTRA_ARGS = "EXTRA_ARGS"  # flags of `vllm serve`
ATTENTION_BACKEND = "ATTENTION_BACKEND"
# Variables that set no single field, and how they are read.
OTHERS = {
    TURBOQUANT: "1 or true is `--kv turboquant`; with 0 the `TQ_` variables are not read",
    EXTRA_ARGS: "flags of `vllm serve`, read as `sparkdraft import` reads them (`--engine vllm` hands on what sets "
    "nothing here, or not all that it asks for)",
    ATTENTION_BACKEND: "accepted and not needed: one kernel runs targets and drafters (`--engine vllm` hands it on)",
}
KNOWN = (*CONTAINER_NAMES, *OTHERS)
OWN_PREFIXES = ("DFLASH_", "TQ_")  # used by no other program
NEAR = 0.87  # similarity from which a name counts as misspelt


def is_container_name(name: str) -> bool:
    return name in CONTAINER_NAMES or name in OTHERS


def container_values(environ: Mapping[str, str]) -> dict[str, Any]:
    """The fields that the variables set. EXTRA_ARGS beats the others. The TQ_ variables are not read if
    ENABLE_TURBOQUANT is off. An empty variable counts as not set."""
    switch = environ.get(TURBOQUANT, "").lower()
    if switch and switch not in TRUE + FALSE:
        raise UserError(f"{TURBOQUANT} is '{environ[TURBOQUANT]}'; it must be true or false")
    read = {key: name for key, name in CONTAINER_NAMES.items() if switch not in FALSE or not name.startswith("tq_")}
    values = {name: converted(name, environ[key], key) for key, name in read.items() if environ.get(key)}
    values |= {"kv": "turboquant"} if switch in TRUE else {}
    return values | _read_extra_args(environ).values


def merge_with_container(
    flags: Mapping[str, Any],
    toml_path: str | Path | None,
    environ: Mapping[str, str],
    base: Mapping[str, Any] | None = None,
) -> ServerConfig:
    """`server.config.merge`, which also reads these variables."""
    return merge(flags, toml_path, environ, base, container_values)


def unread_args(environ: Mapping[str, str]) -> list[Unread]:
    """The flags in EXTRA_ARGS that set no field, or not all that they ask for. They can be handed on to vLLM."""
    return _read_extra_args(environ).unread


def _read_extra_args(environ: Mapping[str, str]) -> Found:
    found = Found()
    if text := environ.get(EXTRA_ARGS):
        from sparkdraft.bridges.vllm.flags import VLLM  # a large table that few commands need

        found = read_flags(VLLM, split_words(text, EXTRA_ARGS))
        finish_numbers(found.values, found.notes)
    return found


def container_notes(environ: Mapping[str, str], to_vllm: bool = False) -> list[str]:
    """Notes on variables without an effect and on misspelt ones. to_vllm: vLLM gets those without an effect here."""
    notes = []
    if environ.get(ATTENTION_BACKEND) and not to_vllm:
        notes.append(f"{ATTENTION_BACKEND} is {environ[ATTENTION_BACKEND]}: {OTHERS[ATTENTION_BACKEND]}")
    found = _read_extra_args(environ)
    handed_on = [note for each in found.unread for note in each.notes] if to_vllm else []
    notes += [f"{EXTRA_ARGS}: {note}" for note in found.notes if note not in handed_on]
    for name, value in environ.items():
        if value and name not in KNOWN and (name.startswith(OWN_PREFIXES) or alike(name, KNOWN, NEAR)):
            question = did_you_mean(name, KNOWN)
            notes.append(f"{name} is not read" + (f"; {question}" if question else ""))
    return notes
