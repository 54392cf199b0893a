"""vLLM's own YAML file, which `vllm serve --config` reads, as the flags that it stands for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sparkdraft.bridges.vllm.flags import VLLM
from sparkdraft.core import UserError

CONFIG = "--config"


def read_yaml(text: str, name: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: what looks like a date and is none
        raise UserError(f"{name} is not valid YAML: {str(error).splitlines()[0]}") from None


def is_config(found: Any) -> bool:
    """Whether a YAML file is one of vLLM's: some of its names are flags'."""
    return isinstance(found, Mapping) and any(VLLM.find(_flag(name)) for name in found)


def _flag(name: Any) -> str:
    return f"--{name}".replace("_", "-")


def flags_of(found: Mapping[str, Any]) -> list[str]:
    words = []
    for flag, value in ((_flag(name), value) for name, value in found.items()):
        if isinstance(value, bool):
            words += [flag] if value else [f"--no-{flag[2:]}"] if not flag.startswith("--no-") else []
        elif isinstance(value, list):  # in vLLM each is a word of its own
            words.append(f"{flag}={','.join(map(str, value))}")
        elif value is not None:
            words.append(f"{flag}={json.dumps(value, default=str) if isinstance(value, Mapping) else value}")
    return words


def with_config(words: list[str]) -> list[str]:
    """The words of a command, after those of the file that its --config names: what the command says beats the file.
    Without such a file the words are as they were, and --config is reported like other flags that set nothing."""
    for i, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag == CONFIG:
            path = Path(value if equals else "".join(words[i + 1 : i + 2]))
            if not path.is_file():
                return words
            found = read_yaml(path.read_text(encoding="utf-8", errors="replace"), str(path))
            if not isinstance(found, Mapping):
                raise UserError(f"{path} is no file for vLLM's --config: it has no names with values")
            return [*flags_of(found), *words[:i], *words[i + (1 if equals else 2) :]]
    return words
