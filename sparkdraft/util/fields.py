"""Reads small files that others wrote, and single values out of them, each with its type and limits.

A config.json is a few kilobytes and can ask for a billion layers, NaN as a rotation or a list where a number belongs.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkdraft.core import UserError

MAX_LAYERS = 1024
MAX_SIZE = 1 << 20  # widths and counts of heads, experts and matrices
MAX_VOCAB = 1 << 24
MAX_TOKENS = (1 << 31) - 1  # positions are 32-bit numbers
LIMITS = {  # where MAX_SIZE is not the limit
    **dict.fromkeys(("num_hidden_layers", "num_target_layers"), MAX_LAYERS),
    "block_size": 1024,
    **dict.fromkeys(("vocab_size", "draft_vocab_size", "mask_token_id"), MAX_VOCAB),
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), MAX_TOKENS),
    **dict.fromkeys(("sliding_window", "swa_window_size", "draft_window_size", "draft_sink_size"), MAX_TOKENS),
}
CONFIG = "config.json"


def whole(said: Mapping[str, Any], key: str, low: int = 1, where: str = CONFIG) -> int | None:
    """Return a whole number from 'low' to the limit of its key; None if the key is absent or null. Raises UserError."""
    value, high = said.get(key), LIMITS.get(key, MAX_SIZE)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise wrong(key, value, f"a whole number from {low} to {high:,}", where)
    return value


def real(
    said: Mapping[str, Any], key: str, low: float = 0.0, high: float = math.inf, where: str = CONFIG
) -> float | None:
    """Return a finite number above 'low' and up to 'high'; None if the key is absent or null. Raises UserError."""
    value = said.get(key)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low < value <= high or not -1e30 < value < 1e30:  # every comparison with NaN fails
        limits = [f"above {low:g}"] * (low > -math.inf) + [f"at most {high:g}"] * (high < math.inf)
        raise wrong(key, value, f"a finite number {' and '.join(limits)}".strip(), where)
    return float(value)


def flag(said: Mapping[str, Any], key: str, default: bool = False, where: str = CONFIG) -> bool:
    """Return true or false, also given as 1 or 0; the default if the key is absent or null. Raises UserError."""
    value = said.get(key)
    if value is None:
        return default
    if not isinstance(value, bool | int) or value not in (0, 1):
        raise wrong(key, value, "true or false", where)
    return bool(value)


def text(said: Mapping[str, Any], key: str, where: str = CONFIG) -> str:
    """Return a text; "" if the key is absent or null. Raises UserError."""
    value = said.get(key)
    if value is not None and not isinstance(value, str):
        raise wrong(key, value, "a text", where)
    return value or ""


def listed(said: Mapping[str, Any], key: str, kind: type, where: str = CONFIG) -> list[Any] | None:
    """Return a list whose entries are all of one type; None if the key is absent or null. Raises UserError."""
    value = said.get(key)
    if value is None:
        return None
    if not isinstance(value, list | tuple) or any(type(each) is not kind for each in value):
        names = {int: "whole numbers", str: "texts"}
        raise wrong(key, value, f"a list of {names[kind]}", where)
    return list(value)


def mapping(said: Mapping[str, Any], key: str, where: str = CONFIG) -> Mapping[str, Any]:
    """Return an object; {} if the key is absent or null. Raises UserError."""
    value = said.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise wrong(key, value, "an object", where)
    return value or {}


def wrong(key: str, value: Any, rule: str, where: str = CONFIG) -> UserError:
    return UserError(f"{where} has {key} {reprlib.repr(value)}, which must be {rule}: correct it, or fetch it again.")


# ---- files


def read_json(path: Path, optional: bool = False, unique: bool = False) -> dict[str, Any]:
    """Read the object in a file. optional: a missing file is {}. unique: a repeated key is an error."""
    if optional and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique if unique else None)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}): fetch it again.") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object: fetch it again.")
    return value


def read_chat_template(folder: Path) -> str | None:
    """Prefers a file of its own to tokenizer_config.json, and of several templates the one named default, as Hugging
    Face does."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read as text ({error}): fetch it again.") from error
    template = read_json(folder / "chat_template.json", optional=True).get("chat_template")
    template = template or read_json(folder / "tokenizer_config.json", optional=True).get("chat_template")
    if isinstance(template, list):
        named = {t["name"]: t["template"] for t in template if isinstance(t, dict) and {"name", "template"} <= t.keys()}
        template = named.get("default", next(iter(named.values()), None))
    return template if isinstance(template, str) else None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse repeated keys, of which json.loads keeps the last: of two places for one tensor neither can be trusted."""
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in names if names.count(key) > 1)} is listed twice")
    return value
