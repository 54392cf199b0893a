"""The variables by which existing vLLM containers are configured, and what each one means to this server.

Their names carry no prefix, so a program beside this one may use a similar name: one that is nearly such a name is
reported, not refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdraft.core import UserError
from sparkdraft.server.config import FALSE, TRUE, ServerConfig, converted, merge
from sparkdraft.util.names import alike, did_you_mean

if TYPE_CHECKING:
    from sparkdraft.bridges.tables import Unread

# The field that each variable sets. SPARKDRAFT_* beats them.
CONTAINER_NAMES = {
    "MODEL_PATH": "model",
    "DFLASH_DRAFTER": "drafter",
    "DFLASH_NUM_SPEC_TOKENS": "spec",
    "MAX_MODEL_LEN": "max_model_len",
    "MAX_NUM_SEQS": "max_seqs",
    "MAX_NUM_BATCHED_TOKENS": "max_rows",
    "GPU_MEMORY_UTILIZATION": "memory_fraction",
    "TQ_MODE": "tq_mode",
    "TQ_KEY_BITS": "tq_key_bits",
    "TQ_VALUE_BITS": "tq_value_bits",
    "TQ_RING_CAPACITY": "tq_ring_capacity",
    "TQ_INITIAL_LAYERS": "tq_initial_layers",
    "SERVED_MODEL_NAME": "served_name",
    "VLLM_API_KEY": "api_key",
}
TURBOQUANT = "ENABLE_TURBOQUANT"  # how those containers switch it on
EXTRA_ARGS = "EXTRA_ARGS"  # flags of `vllm serve`
ATTENTION_BACKEND = "ATTENTION_BACKEND"
# Variables that set no single field, and what becomes of them.
OTHERS = {
    TURBOQUANT: "1 or true is `--kv turboquant`; with 0 the `TQ_` variables are not read",
    EXTRA_ARGS: "flags of `vllm serve`, read as `sparkdraft import` reads them (`--engine vllm` hands on what sets "
    "nothing here, or not all that it asks for)",
    ATTENTION_BACKEND: "accepted and not needed: one kernel runs targets and drafters (`--engine vllm` hands it on)",
}
KNOWN = (*CONTAINER_NAMES, *OTHERS)
OWN_PREFIXES = ("DFLASH_", "TQ_")  # nobody else's
NEAR = 0.87  # likeness from which a name is taken for a misspelt one


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
    return values | extra_args(environ)


def merge_with_container(
    flags: Mapping[str, Any],
    toml_path: str | Path | None,
    environ: Mapping[str, str],
    base: Mapping[str, Any] | None = None,
) -> ServerConfig:
    """`server.config.merge`, which also reads these variables."""
    return merge(flags, toml_path, environ, base, container_values)


def extra_args(environ: Mapping[str, str]) -> dict[str, Any]:
    """Our fields for the flags in EXTRA_ARGS."""
    if not environ.get(EXTRA_ARGS):
        return {}
    from sparkdraft.bridges.vllm.extra_args import read_extra_args

    return read_extra_args(environ[EXTRA_ARGS]).values


def unread_args(environ: Mapping[str, str]) -> list[Unread]:
    """The flags in EXTRA_ARGS that set nothing here, or not all that they ask for: vLLM can be given them."""
    if not environ.get(EXTRA_ARGS):
        return []
    from sparkdraft.bridges.vllm.extra_args import read_extra_args

    return read_extra_args(environ[EXTRA_ARGS]).unread


def container_notes(environ: Mapping[str, str], to_vllm: bool = False) -> list[str]:
    """What a user should know about the variables that are set: those without an effect, and misspelt ones. to_vllm:
    vLLM gets what has none here."""
    notes = []
    if environ.get(ATTENTION_BACKEND) and not to_vllm:
        notes.append(f"{ATTENTION_BACKEND} is {environ[ATTENTION_BACKEND]}: {OTHERS[ATTENTION_BACKEND]}")
    if environ.get(EXTRA_ARGS):
        from sparkdraft.bridges.vllm.extra_args import read_extra_args

        found = read_extra_args(environ[EXTRA_ARGS])
        handed_on = [note for each in found.unread for note in each.notes] if to_vllm else []
        notes += [f"{EXTRA_ARGS}: {note}" for note in found.notes if note not in handed_on]
    for name, value in environ.items():
        if value and name not in KNOWN and (name.startswith(OWN_PREFIXES) or alike(name, KNOWN, NEAR)):
            question = did_you_mean(name, KNOWN)
            notes.append(f"{name} is not read" + (f"; {question}" if question else ""))
    return notes
