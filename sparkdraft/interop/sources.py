"""Finds another server's command in what a user has: a command line, a `docker run`, or a compose file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sparkdraft.core import UserError
from sparkdraft.interop.llama_flags import LLAMA_CPP
from sparkdraft.interop.tables import Server
from sparkdraft.interop.vllm_flags import VLLM

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)
REFERENCE = re.compile(r"\$\{(\w+)(?:(:?[-?])([^}]*))?\}")  # ${NAME}, ${NAME:-default}, ${NAME:?message}
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
# A shell's text: comments, what ends a command (with the number of a stream that is redirected), and pieces of words
PIECE = r"""'[^']*'|"(?:[^"\\]|\\.)*"|\\.|\$\([^()]*\)|[^\s'"\\();<>|&]"""
LEXEME = re.compile(rf"(?P<skip>[^\S\n]+|\#[^\n]*)|(?P<end>\d*[();<>|&]+|\n)|(?P<word>(?:{PIECE})+)", re.S)
SHOWN = 80  # characters of what follows a command, in a note
LLAMA_SERVER, API_SERVER = "llama-server", "vllm.entrypoints.openai.api_server"


@dataclass(slots=True)
class Source:
    """A command of another server: its flags, the variables it is started with, and its mounted folders."""

    server: Server
    words: list[str]
    environ: dict[str, str] = field(default_factory=dict)
    mounts: dict[str, str] = field(default_factory=dict)  # folder in the container -> folder on the host
    ports: list[str] = field(default_factory=list)  # as Docker writes them: [address:]port of the host:port
    notes: list[str] = field(default_factory=list)


def find_source(text: str, service: str = "") -> Source:
    """text: a command, or the name of a compose file or of a script. service: which one of a compose file's."""
    path = Path(text) if "\n" not in text and len(text) < 4096 else None
    if path is not None and " " not in text and path.suffix in (".yml", ".yaml", ".sh") and not path.is_file():
        raise UserError(f"the file {path} does not exist")
    if path is not None and path.is_file():
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.suffix in (".yml", ".yaml"):
            return _from_compose(text, str(path), service)
    return _from_shell(text)


def _from_shell(text: str) -> Source:
    """The first command of a server, and the variables that are set before it. A command ends at an operator, such as a
    redirection or a pipe, and at the end of its line."""
    text = text.replace("\\\r\n", " ").replace("\\\n", " ")
    before: list[str] = []
    for words, rest in _commands(text):
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
        "no `vllm serve` and no `llama-server` is in it; give such a command in quotes, a `docker run` of a "
        "server's image, or a compose file"
    )


def _commands(text: str) -> Iterator[tuple[list[str], str]]:
    """The words of each command, without their quotes; and what stands behind it, for a note."""
    words: list[str] = []
    place = 0
    while place < len(text):
        found = LEXEME.match(text, place)
        if found is None:
            raise UserError(f"the command cannot be read: No closing quotation after {text[place : place + 20]}")
        place = found.end()
        if found["word"]:
            words.append(re.sub(PIECE, _unquoted, found["word"], flags=re.S))
        elif found["end"] and words:
            yield words, _shortened(text[found.start() :])
            words = []
    if words:
        yield words, ""


def _unquoted(piece: re.Match[str]) -> str:
    text = piece[0]
    if text[0] == '"':
        return re.sub(r'\\(["\\$`])', r"\1", text[1:-1])
    return text[1:-1] if text[0] == "'" else text[1:] if text[0] == "\\" else text


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."


def split_words(text: str, what: str) -> list[str]:
    """Words that no shell sees, only a splitter of words. Raises UserError. what: where they stand."""
    try:
        return shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise UserError(f"{what} cannot be read: {error} in {_shortened(text)}") from None


def _program(words: list[str]) -> tuple[Server, list[str], list[str]] | None:
    """The server, the words before its command, and its flags."""
    for i, word in enumerate(words):
        if Path(word).name == LLAMA_SERVER:
            return LLAMA_CPP, words[:i], words[i + 1 :]
        if Path(word).name == "vllm" and words[i + 1 : i + 2] == ["serve"]:
            return VLLM, words[:i], words[i + 2 :]
        if word == API_SERVER:
            return VLLM, words[: max(i - 2, 0)], words[i + 1 :]
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
    while words and words[0].startswith("-"):
        name, equals, value = words.pop(0).partition("=")
        is_switch = name in DOCKER_SWITCHES or re.fullmatch(r"-[ditP]+", name)
        value = value if equals or is_switch or not words else words.pop(0)
        if name in ("-e", "--env"):
            key, equals, text = value.partition("=")
            environ[key] = text if equals else f"${key}"
        elif name in ("-v", "--volume"):
            _mount(mounts, value)
        elif name in ("-p", "--publish"):
            ports.append(value)
        elif name == "--entrypoint":
            entrypoint = [value]
    if not words:
        raise UserError("the `docker run` names no image")
    return _in_container(words[0], entrypoint + words[1:], environ, mounts, ports)


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


def _from_compose(text: str, name: str, wanted: str) -> Source:
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{name} is not valid YAML: {str(error).splitlines()[0]}") from None
    services = found.get("services") if isinstance(found, Mapping) else None
    if not isinstance(services, Mapping) or not services:
        raise UserError(f"{name} has no services; give a compose file, or a command in quotes")
    if wanted and wanted not in services:
        raise UserError(f"{name} has no service '{wanted}', only {', '.join(services)}")
    serving = [key for key, service in services.items() if isinstance(service, Mapping) and _serves(service)]
    if not wanted and len(serving) != 1:
        what = f"several servers: {', '.join(serving)}" if serving else f"no server among {', '.join(services)}"
        raise UserError(f"{name} has {what}; name one with --service")
    return _of_service(services[wanted or serving[0]])


def _of_service(service: Mapping[str, Any]) -> Source:
    mounts: dict[str, str] = {}
    for volume in service.get("volumes") or []:
        if isinstance(volume, Mapping):
            mounts[str(volume.get("target"))] = str(volume.get("source"))
        else:
            _mount(mounts, _filled(str(volume)))
    ports = [
        f"{port.get('published')}:{port.get('target')}" if isinstance(port, Mapping) else _filled(str(port))
        for port in service.get("ports") or []
    ]
    words = _words(service.get("entrypoint")) + _words(service.get("command"))
    environ = _environment(service.get("environment"))
    return _in_container(str(service.get("image", "")), words, environ, mounts, ports)


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
        return [_filled(str(word)) for word in command]
    return split_words(_filled(str(command)), "the command") if command else []


def _environment(given: Any) -> dict[str, str]:
    if isinstance(given, Mapping):
        pairs = [(str(key), value) for key, value in given.items()]
    else:
        pairs = [
            (key, value if equals else None)
            for key, equals, value in (str(each).partition("=") for each in given or [])
        ]
    return {key: f"${key}" if value is None else _filled(str(value)) for key, value in pairs}


def _filled(text: str) -> str:
    """References to variables: the default that they name, else a plain reference."""
    return REFERENCE.sub(lambda found: found[3] if found[2] in ("-", ":-") else f"${found[1]}", text)
