"""Finds another server's command in what a user has: a command line, a `docker run`, a compose file, vLLM's YAML."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkdraft.bridges.llama_cpp.flags import LLAMA_CPP
from sparkdraft.bridges.shell_text import ASSIGNMENT, commands, filled, split_words
from sparkdraft.bridges.tables import Server
from sparkdraft.bridges.vllm.config_file import flags_of, is_config, read_yaml, with_config
from sparkdraft.bridges.vllm.flags import VLLM
from sparkdraft.core import UserError

DOCKER_SWITCHES = (
    "--detach",
    "--rm",
    "--interactive",
    "--tty",
    "--privileged",
    "--init",
    "--read-only",
    "--no-healthcheck",
)
LLAMA_SERVER, LLAMA_CLI, API_SERVER = "llama-server", "llama-cli", "vllm.entrypoints.openai.api_server"
WINDOWS = re.compile(r"\b[A-Za-z]:\\|(?:^|\s)\.{0,2}\\\w|\.exe\b", re.I)  # C:\models, .\build, llama-server.exe


@dataclass(slots=True)
class Source:
    """A command of another server: its flags, the variables it is started with, and its mounted folders."""

    server: Server
    words: list[str]
    environ: dict[str, str] = field(default_factory=dict)
    mounts: dict[str, str] = field(default_factory=dict)  # folder in the container -> folder on the host
    ports: list[str] = field(default_factory=list)  # as Docker writes them: [address:]port of the host:port
    notes: list[str] = field(default_factory=list)
    is_chat: bool = False  # a program for a terminal, not a server


def find_source(text: str, service: str = "") -> Source:
    """text: a command, or a file's name: compose's, vLLM's YAML or a script. service: which one of a compose file's."""
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
    except OSError:  # a command is often longer than a file's name may be
        return False


def _from_shell(text: str) -> Source:
    """The first command of a server, and the variables that are set before it. A command ends at an operator, such as a
    redirection or a pipe, and at the end of its line."""
    before: list[str] = []
    for words, rest in commands(_slashes(text) if WINDOWS.search(text) else text):
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
        is_chat = server is LLAMA_CPP and _program_name(words[len(wrapper)]) == LLAMA_CLI
        return Source(server, after, environ, notes=notes, is_chat=is_chat)
    raise UserError(
        "no `vllm serve`, `llama-server` or `llama-cli` is in it; give such a command in quotes, a `docker run` of a "
        "server's image, or a compose file"
    )


def _slashes(text: str) -> str:
    """A Windows command as a POSIX shell reads it: / in paths, which Windows reads too, and lines that go on joined."""
    joined = re.sub(r"[\^`]\r?\n", " ", text)
    return re.sub(r"\\(?![\r\n\"'])", "/", joined)


def _program_name(word: str) -> str:
    """llama-server for ./build/bin/llama-server and C:/llama/llama-server.exe."""
    return re.sub(r"\.exe$", "", Path(word).name, flags=re.I)


def _program(words: list[str]) -> tuple[Server, list[str], list[str]] | None:
    """The server, the words before its command, and its flags."""
    for i, word in enumerate(words):
        if _program_name(word) in (LLAMA_SERVER, LLAMA_CLI):
            return LLAMA_CPP, words[:i], words[i + 1 :]
        if _program_name(word) == "vllm" and words[i + 1 : i + 2] == ["serve"]:
            return VLLM, words[:i], with_config(words[i + 2 :])
        if word == API_SERVER:
            return VLLM, words[: max(i - 2, 0)], with_config(words[i + 1 :])
    return None


def _variables(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Variables that are set before a command, also by a wrapper's -e; and the other words."""
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
        is_switch = name in DOCKER_SWITCHES or re.fullmatch(r"-[ditP]+", name)
        value = value if equals or is_switch or not words else words.pop(0)
        if name in ("-e", "--env"):
            key, equals, text = value.partition("=")
            environ[key] = text if equals else f"${key}"
        elif name == "--env-file":
            notes.append(_unread_file(name, value))
        elif name in ("-v", "--volume"):
            _mount(mounts, value)
        elif name == "--mount":
            given = dict(each.partition("=")[::2] for each in value.split(","))
            target = given.get("target") or given.get("dst") or given.get("destination") or ""
            _mount(mounts, f"{given.get('source') or given.get('src') or ''}:{target}")
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
    return Source(server, words, environ, mounts, ports, [f"the command is that of the image {image}"])


def _from_yaml(text: str, name: str, wanted: str) -> Source:
    found = read_yaml(text, name)
    services = found.get("services") if isinstance(found, Mapping) else None
    if not services and not wanted and is_config(found):
        return Source(VLLM, flags_of(found))
    if not isinstance(services, Mapping) or not services:
        raise UserError(f"{name} has no services; give a compose file, vLLM's own YAML file, or a command in quotes")
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
    """Raises UserError for what compose would refuse too."""
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
    """A command as compose has it: a list of words, or one text for a shell."""
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
