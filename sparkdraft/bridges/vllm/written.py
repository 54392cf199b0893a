"""A `vllm serve` command as text: for a shell, as a YAML file for `vllm serve --config`, or as a systemd unit.

A key is never written: the shell's form refers to a variable, the unit to a file that only root reads.
"""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from sparkdraft.bridges.tables import LIST, ON
from sparkdraft.bridges.vllm.command import VllmCommand
from sparkdraft.bridges.vllm.flags import VLLM
from sparkdraft.core import UserError

KEY_FILE = "/etc/sparkdraft/vllm.env"
GRACE = 30  # seconds after the drain until systemd kills what is left


def shell(command: VllmCommand) -> str:
    lines: list[str] = []
    for word in command.words()[3:]:
        if word.startswith("--"):
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    start = "".join(f'{name}="${name}" ' for name in command.secrets) + shlex.join(command.words()[:3])
    return " \\\n  ".join([start, *lines]) + "\n"


def as_yaml(command: VllmCommand) -> str:
    """Started by `vllm serve --config FILE`; a key stays in the environment, as VLLM_API_KEY. What is off is written by
    its --no- name: vLLM's reader leaves out a name whose value is false."""
    found: dict[str, Any] = {"model": command.model}
    for name, value in command.flags.items():
        found |= {f"no-{name}": True} if value is False else {name: value}
    for each in command.extra:
        if not each.name.startswith("--"):
            raise UserError(f"{each.name}: a YAML file has long names only; write the flag with its long name")
        flag, name = VLLM.find(each.name), each.name[2:]
        if name in found or f"no-{name}" in found:
            raise UserError(
                f"{each.name} is given twice, and a YAML file has a name once: give it once, or choose --form command "
                "or systemd"
            )
        if len(each.words) == 1 and "=" not in each.words[0]:
            found[name if each.value == ON else f"no-{name}"] = True
        else:
            found[name] = list(each.words[1:]) if flag and flag.kind == LIST and each.words[1:] else each.value
    return str(yaml.safe_dump(found, sort_keys=False, allow_unicode=True, width=100))


def systemd(command: VllmCommand, program: str = "/usr/bin/env vllm") -> str:
    words = [_systemd_word(word) for word in command.words()[1:]]
    drain = int(command.flags.get("shutdown-timeout", 0))
    keys = f"# {', '.join(command.secrets)}=... in a file that only root reads\nEnvironmentFile={KEY_FILE}\n"
    return (
        f"[Unit]\nDescription=vLLM serves {command.model.replace('%', '%%')}\nAfter=network-online.target\n"
        "Wants=network-online.target\n\n[Service]\n"
        f"{keys if command.secrets else ''}ExecStart={program} {' '.join(words)}\n"
        f"Restart=on-failure\nRestartSec=10\nKillMode=mixed\nTimeoutStopSec={drain + GRACE}\n\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )


def write(command: VllmCommand, form: str) -> str:
    return {"command": shell, "yaml": as_yaml, "systemd": systemd}[form](command)


def _systemd_word(word: str) -> str:
    """A word as systemd reads it: within double quotes, without specifiers and variables."""
    word = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$").replace("\n", "\\n")
    return f'"{word}"' if not word or set(word) & set(" '\"\\;{}") else word
