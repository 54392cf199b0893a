"""Another server's command as ours: `sparkdraft import`."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from typing import Any

from sparkdraft.bridges.container_env import container_notes, is_container_name, merge_with_container
from sparkdraft.bridges.sources import Source, find_source
from sparkdraft.bridges.tables import read_flags
from sparkdraft.bridges.vllm.extra_args import finish_numbers
from sparkdraft.config import ENGINE_FIELDS
from sparkdraft.server.config import FIELDS, default_of, merge

PLACE_OF_KEY = "SPARKDRAFT_API_KEY"
PATHS = ("model", "drafter")
CHAT = "chat"
# What a shell fills in where ours is started: a variable or a command's output; and a path with variables in it
FILLED = re.compile(r"""\$\w+|\$\{\w+\}|\$\([^()"]*\)|`[^`"]*`""")
FILLED_PATH = re.compile(r"(?:\$\w+|\$\{\w+\}|[\w./:@+~-])+")


@dataclass(frozen=True, slots=True)
class Imported:
    server: str
    values: dict[str, Any]  # our fields that differ from the defaults
    notes: list[str]
    verb: str = "serve"

    def command(self) -> str:
        """For a shell. The key is a variable, which `ps` does not show."""
        words = [f"{PLACE_OF_KEY}={_quoted(self.values['api_key'])}"] if "api_key" in self.values else []
        words += [f"sparkdraft {self.verb}"]
        for name in (name for name in FIELDS if name in self.values and name != "api_key"):
            value, flag = self.values[name], name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{'' if value else 'no-'}{flag}")
            elif self.verb == CHAT and name == "sampling_defaults":  # its values are flags of their own there
                words += [f"--{key.replace('_', '-')} {x}" for key, x in (p.split("=") for p in value.split(","))]
            else:
                text = _quoted(value, is_path=name in PATHS)
                words.append(f"--{flag}{'=' if text.startswith('-') else ' '}{text}")
        return " ".join(words)

    def toml(self) -> str:
        """As a file for `serve --config`. The key is left out: it belongs into the environment."""
        given = {name: self.values[name] for name in FIELDS if name in self.values and name != "api_key"}
        return "".join(f"{name} = {json.dumps(value)}\n" for name, value in given.items())

    def unfilled(self) -> list[str]:
        """What a shell would fill in, for a note: no one fills it into a file."""
        given = {name: str(self.values[name]) for name in self.values if name != "api_key"}
        return [
            f"{name}: {text} is for a shell to fill in, and none reads the file: write what it stands for"
            for name, text in given.items()
            if FILLED.fullmatch(text) or (name in PATHS and "$" in text)
        ]


def read(text: str, service: str = "") -> Imported:
    """text: a command, or a compose file's name. Raises UserError for what could not be served here at all."""
    source = find_source(text, service)
    found = read_flags(source.server, source.words)
    values = _from_variables(source, found.notes) | found.values
    notes = source.notes + found.notes
    _finish(values, notes, source)
    merge(values, None, {})  # refuses what is wrong
    kept = {name: value for name, value in values.items() if value != default_of(name)}
    if not source.is_chat:
        return Imported(source.server.name, kept, notes)
    of_servers = [name for name in kept if name not in ENGINE_FIELDS and name != "sampling_defaults"]
    notes += [f"{name}: left out, a setting of servers" for name in of_servers]
    kept = {name: value for name, value in kept.items() if name not in of_servers}
    return Imported(source.server.name, kept, notes, CHAT)


def _from_variables(source: Source, notes: list[str]) -> dict[str, Any]:
    """Our fields for the variables that a command is started with. Those of its own flags are read as flags."""
    ours = {key: value for key, value in source.environ.items() if is_container_name(key)}
    key = ours.pop("VLLM_API_KEY", "")
    plain = merge_with_container({"allow_public": True}, None, ours)
    values = {name: getattr(plain.engine if hasattr(plain.engine, name) else plain, name) for name in FIELDS}
    values = {name: value for name, value in values.items() if value != default_of(name) and name != "allow_public"}
    notes += container_notes(ours)
    words = []
    for variable, flag in source.server.variables:
        words += [f"{flag}={source.environ[variable]}"] if source.environ.get(variable) else []
    flags = read_flags(source.server, words)
    notes += flags.notes
    known = {variable for variable, _ in source.server.variables} | ours.keys() | {"VLLM_API_KEY"}
    prefixes = (source.server.prefix, "NCCL_", "TORCH", "PYTORCH_", "CUDA_")
    own = [name for name in source.environ if name.startswith(prefixes) and name not in known]
    notes += [f"{name}: a variable of {source.server.name} or its libraries, without a counterpart" for name in own]
    return values | ({"api_key": key} if key else {}) | flags.values


def _finish(values: dict[str, Any], notes: list[str], source: Source) -> None:
    """What needs more than one flag to be known."""
    finish_numbers(values, notes)
    if file := values.pop("hub file", ""):
        values["model"] = f"{values.get('model', '')}:{file}"
        notes[:] = [note for note in notes if not note.startswith("--hf-repo: name the file")]
    for name in PATHS:
        value = values.get(name, "")
        for inside, host in source.mounts.items():
            if value == inside or value.startswith(inside.rstrip("/") + "/"):
                values[name] = host + value[len(inside.rstrip("/")) :]
                notes.append(f"{name}: {value} of the container is {values[name]}")
                break
    if not values.get("model"):
        notes.append(f"no model is named: name one with --model, or ours serves {default_of('model')}")
    _publish(values, notes, source.ports)
    if values.get("host", "") in ("0.0.0.0", "::") and not values.get("api_key"):
        values["allow_public"] = True
        notes.append(f"--host {values['host']}: other machines can reach it without a key, as there")
    elif "host" not in values and source.server.host == "0.0.0.0":
        more = "" if values.get("api_key") else " and a key"
        notes.append(f"{source.server.name} listens on all addresses, ours on this machine: add --host 0.0.0.0{more}")


def _publish(values: dict[str, Any], notes: list[str], ports: list[str]) -> None:
    """Listen where the container was reached: on the host's side of the first published port."""
    for each in ports:
        *address, outside, inside = each.split("/")[0].split(":") if ":" in each else ("", "")
        if outside.isdecimal() and inside in (str(values.get("port", inside)),):
            notes.append(f"port: {inside} of the container is {outside} of this machine")
            values["port"] = int(outside)
            values["host"] = address[0] if address else "0.0.0.0"
            return


def _quoted(value: Any, is_path: bool = False) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    is_filled = FILLED.fullmatch(text) or (is_path and "$" in text and FILLED_PATH.fullmatch(text))
    return f'"{text}"' if is_filled else shlex.quote(text)
