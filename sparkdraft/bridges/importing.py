"""Turns another server's command into ours, for `sparkdraft import`.

It finds the command in what a user has (a command line, a script, a `docker run` or a compose file), reads its flags by
the tables, and writes ours.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sparkdraft.bridges.container_env import container_notes, is_container_name, merge_with_container
from sparkdraft.bridges.llama_cpp import LLAMA_CPP
from sparkdraft.bridges.shell_text import ASSIGNMENT, commands, filled, split_words
from sparkdraft.bridges.tables import Server, finish_numbers, read_flags
from sparkdraft.bridges.vllm.flags import VLLM
from sparkdraft.core import UserError
from sparkdraft.server.config import FIELDS, default_of, merge

PLACE_OF_KEY = "SPARKDRAFT_API_KEY"
PATHS = ("model", "drafter")
# What a shell fills in when our command starts: a variable or a command's output, or a path with variables
FILLED = re.compile(r"""\$\w+|\$\{\w+\}|\$\([^()"]*\)|`[^`"]*`""")
FILLED_PATH = re.compile(r"(?:\$\w+|\$\{\w+\}|[\w./:@+~-])+")
# Flags of `docker run` without a value
DOCKER_SWITCHES = re.compile("--(detach|rm|interactive|tty|privileged|init|read-only|no-healthcheck)|-[ditP]+")
LLAMA_SERVER, API_SERVER = "llama-server", "vllm.entrypoints.openai.api_server"


@dataclass(frozen=True, slots=True)
class Imported:
    server: str
    values: dict[str, Any]  # our fields that differ from the defaults
    notes: list[str]

    def command(self) -> str:
        """Our command for a shell. The key is an environment variable, which `ps` does not show."""
        words = [f"{PLACE_OF_KEY}={_quoted(self.values['api_key'])}"] if "api_key" in self.values else []
        words += ["sparkdraft serve"]
        for name in (name for name in FIELDS if name in self.values and name != "api_key"):
            value, flag = self.values[name], name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{'' if value else 'no-'}{flag}")
            else:
                text = _quoted(value, is_path=name in PATHS)
                words.append(f"--{flag}{'=' if text.startswith('-') else ' '}{text}")
        return " ".join(words)


def read(text: str, service: str = "") -> Imported:
    """Imports a command or a file. Raises UserError for what cannot be served here at all."""
    source = find_source(text, service)
    found = read_flags(source.server, source.words)
    values = _from_variables(source, found.notes) | found.values
    notes = source.notes + found.notes
    _finish(values, notes, source)
    merge(values, None, {})  # refuses what is wrong
    kept = {name: value for name, value in values.items() if value != default_of(name)}
    return Imported(source.server.name, kept, notes)


def _from_variables(source: Source, notes: list[str]) -> dict[str, Any]:
    """Our fields for the environment of a command. Variables that stand for its flags are read as flags."""
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
    """Sets what depends on several flags: model, paths, address."""
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
    """Listens where the container was reached: at the host's side of the first published port."""
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


@dataclass(slots=True)
class Source:
    """A command of another server with its environment, mounts and ports."""

    server: Server
    words: list[str]
    environ: dict[str, str] = field(default_factory=dict)
    mounts: dict[str, str] = field(default_factory=dict)  # folder in the container -> folder on the host
    ports: list[str] = field(default_factory=list)  # as Docker writes them: [address:]port of the host:port
    notes: list[str] = field(default_factory=list)


def find_source(text: str, service: str = "") -> Source:
    """text: a command, or the name of a script or a compose file. service: the one of a compose file."""
    path = Path(text)
    is_file = _is_file(path)
    if not is_file and path.suffix in (".yml", ".yaml", ".sh") and not set(" \n") & set(text):
        raise UserError(f"the file {path} does not exist")
    if is_file:
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.suffix in (".yml", ".yaml"):
            return _from_yaml(text, str(path), service)
    if service:
        raise UserError(f"--service is {service}, and a command has no services: leave it out, or give a compose file")
    return _from_shell(text)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the text is too long for a file name
        return False


def _from_shell(text: str) -> Source:
    """Finds the first command of a server and the variables set before it. A command ends at an operator, such as a
    pipe, or at the end of its line."""
    before: list[str] = []
    for words, rest in commands(text):
        notes = [f"left out, after the command: {rest}"] if rest else []
        if "run" in words[:4] and any(Path(word).name in ("docker", "podman") for word in words[:3]):
            source = _from_docker(words[words.index("run") + 1 :])
            source.notes += notes
            return source
        if (found := _program(words)) is None:
            before += words
            continue
        server, wrapper, after = found
        environ, others = _variables(before + wrapper)
        if others and server is VLLM:
            notes.insert(0, f"left out, before the command: {' '.join(others)}")
        return Source(server, after, environ, notes=notes)
    raise UserError(
        "no `vllm serve` or `llama-server` is in it; give such a command in quotes, a `docker run` of a "
        "server's image, or a compose file"
    )


def _program(words: list[str]) -> tuple[Server, list[str], list[str]] | None:
    """Returns the server, the words before its command, and its flags."""
    for i, word in enumerate(words):
        if Path(word).name == LLAMA_SERVER:
            return LLAMA_CPP, words[:i], words[i + 1 :]
        if Path(word).name == "vllm" and words[i + 1 : i + 2] == ["serve"]:
            return VLLM, words[:i], words[i + 2 :]
        if word == API_SERVER:
            return VLLM, words[: max(i - 2, 0)], words[i + 1 :]
    return None


def _variables(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Splits the words before a command into variables (also by -e of a wrapper) and the rest."""
    environ, rest = {}, []
    for word in words:
        if found := ASSIGNMENT.fullmatch(word):
            environ[found[1]] = found[2]
        elif word not in ("-e", "--env", "env", "export", "exec"):
            rest.append(word)
    return environ, rest


def _from_docker(words: list[str]) -> Source:
    environ: dict[str, str] = {}
    mounts: dict[str, str] = {}
    ports: list[str] = []
    entrypoint: list[str] = []
    notes: list[str] = []
    while words and words[0].startswith("-"):
        name, equals, value = words.pop(0).partition("=")
        value = value if equals or DOCKER_SWITCHES.fullmatch(name) or not words else words.pop(0)
        if name in ("-e", "--env"):
            key, equals, text = value.partition("=")
            environ[key] = text if equals else f"${key}"
        elif name == "--env-file":
            notes.append(_unread_file(name, value))
        elif name in ("-v", "--volume"):
            _mount(mounts, value)
        elif name in ("-p", "--publish"):
            ports.append(value)
        elif name == "--entrypoint":
            entrypoint = [value]
    if not words:
        raise UserError("the `docker run` names no image")
    source = _in_container(words[0], entrypoint + words[1:], environ, mounts, ports)
    source.notes += notes
    return source


def _unread_file(name: str, value: str) -> str:
    return f"{name}: the variables of {value} are not read; set them where ours starts, or name them in the command"


def _mount(mounts: dict[str, str], text: str) -> None:
    host, _, rest = text.partition(":")
    if rest:
        mounts[rest.split(":")[0]] = host


def _in_container(
    image: str, words: list[str], environ: dict[str, str], mounts: dict[str, str], ports: list[str]
) -> Source:
    if len(words) > 2 and Path(words[0]).name in ("sh", "bash") and re.fullmatch("-[a-z]*c", words[1]):
        inner = _from_shell(words[2])
        return Source(inner.server, inner.words, environ | inner.environ, mounts, ports, inner.notes)
    found = _program(words)
    if found:
        return Source(found[0], found[2], environ | _variables(found[1])[0], mounts, ports)
    server = LLAMA_CPP if "llama" in image.lower() else VLLM
    return Source(server, words, environ, mounts, ports, [f"the command is the default of the image {image}"])


def _from_yaml(text: str, name: str, wanted: str) -> Source:
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an invalid date
        raise UserError(f"{name} is not valid YAML: {str(error).splitlines()[0]}") from None
    services = found.get("services") if isinstance(found, Mapping) else None
    if not isinstance(services, Mapping) or not services:
        raise UserError(f"{name} has no services; give a compose file, or a command in quotes")
    services = {str(key): service for key, service in services.items()}  # YAML makes a number of 1
    if wanted and wanted not in services:
        raise UserError(f"{name} has no service '{wanted}', only {', '.join(services)}")
    serving = [key for key, service in services.items() if isinstance(service, Mapping) and _serves(service)]
    if not wanted and len(serving) != 1:
        what = f"several servers: {', '.join(serving)}" if serving else f"no server among {', '.join(services)}"
        raise UserError(f"{name} has {what}; name one with --service")
    chosen = wanted or serving[0]
    _check_service(services[chosen], chosen, name)
    return _of_service(services[chosen])


def _check_service(service: Any, key: str, name: str) -> None:
    """Raises UserError for what compose would refuse as well."""
    kinds: dict[str, Any] = {"volumes": list, "ports": list, "environment": (list, Mapping), "command": (list, str)}
    given = service if isinstance(service, Mapping) else {}
    wrong = [part for part, kind in kinds.items() if given.get(part) is not None and not isinstance(given[part], kind)]
    if wrong or not given:
        what = f"{wrong[0]} of the service '{key}'" if wrong else f"the service '{key}'"
        raise UserError(f"{name}: {what} is {given.get(wrong[0]) if wrong else service!r}, which compose cannot read")


def _of_service(service: Mapping[str, Any]) -> Source:
    mounts: dict[str, str] = {}
    for volume in service.get("volumes") or []:
        if isinstance(volume, Mapping):
            mounts[str(volume.get("target"))] = str(volume.get("source"))
        else:
            _mount(mounts, filled(str(volume), {}))
    ports = [
        f"{port.get('published')}:{port.get('target')}" if isinstance(port, Mapping) else filled(str(port), {})
        for port in service.get("ports") or []
    ]
    words = _words(service.get("entrypoint")) + _words(service.get("command"))
    environ = _environment(service.get("environment"))
    source = _in_container(str(service.get("image", "")), words, environ, mounts, ports)
    files = service.get("env_file") or []
    source.notes += [_unread_file("env_file", str(each)) for each in (files if isinstance(files, list) else [files])]
    return source


def _serves(service: Mapping[str, Any]) -> bool:
    text = " ".join(
        [str(service.get("image", "")), *_words(service.get("entrypoint")), *_words(service.get("command"))]
    )
    return any(name in text.lower() for name in ("vllm", "llama")) or "MODEL_PATH" in _environment(
        service.get("environment")
    )


def _words(command: Any) -> list[str]:
    """Splits a command of a compose file, which is a list of words or one text."""
    if isinstance(command, list):
        return [filled(str(word), {}) for word in command]
    return split_words(filled(str(command), {}), "the command") if command else []


def _environment(given: Any) -> dict[str, str]:
    if isinstance(given, Mapping):
        pairs = [(str(key), value) for key, value in given.items()]
    else:
        pairs = [
            (key, value if equals else None)
            for key, equals, value in (str(each).partition("=") for each in (given if isinstance(given, list) else []))
        ]
    return {key: f"${key}" if value is None else filled(str(value), {}) for key, value in pairs}
