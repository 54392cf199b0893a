"""Reads the small files of a checkpoint's folder, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparkdraft.core import UserError


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
