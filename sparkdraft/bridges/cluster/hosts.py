"""The machines of a cluster: the TOML file that names them, and commands run on them over ssh or locally.

Keys that a host leaves out are taken from the top of the file; docs/cluster.md has an example with every key. Commands
are lines for a POSIX shell and start in the home folder. ssh never prompts (BatchMode), gives up a connection that is
not made in time, and notices a dead one.
"""

from __future__ import annotations

import io
import ipaddress
import os
import re
import shlex
import signal
import subprocess
import tarfile
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from sparkdraft.core import UserError
from sparkdraft.util.names import did_you_mean, user_path

LOCAL = "local"  # the address of this machine, which needs no ssh
NAME = re.compile(r"[\w.-]+")
# Keys of the file and their types: of the whole cluster, of a host or at the top for all hosts, and of a host alone
CLUSTER_KEYS = {"name": str, "port": int, "restarts": int}
CLUSTER_KEYS |= dict.fromkeys(("silence_seconds", "hang_seconds", "ready_seconds"), float)
SHARED_KEYS = {"python": str, "vllm": str, "folder": str, "gid_index": int, "interfaces": list, "rdma": list}
SHARED_KEYS |= {"environment": dict}
HOST_KEYS = {"address": str, "ip": str, **SHARED_KEYS}
KINDS = {str: "a text", int: "a whole number", float: "a number", list: "a list of names", dict: "a table of variables"}
CONNECT_SECONDS = 10
OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": CONNECT_SECONDS,
    "ServerAliveInterval": 5,
    "ServerAliveCountMax": 3,
    "LogLevel": "ERROR",
}
NO_CONNECTION = 255  # exit status of ssh itself
COPY_SECONDS = 30.0
NODE = Path(__file__).parent / "node"
MAIN = b"import sys\n\nfrom node.__main__ import main\n\nsys.exit(main())\n"
# What to do about an error of ssh, by a part of its text.
ADVICE = {
    "Permission denied": "give this user's key to it once: ssh-copy-id {0}",
    "Host key verification failed": "accept its key once: ssh {0}",
    "Could not resolve hostname": "correct the address in the hosts file",
    "REMOTE HOST IDENTIFICATION HAS CHANGED": "remove the old key if the machine is a new one: ssh-keygen -R {0}",
}


@dataclass(frozen=True, slots=True)
class HostSpec:
    address: str  # as ssh knows it, or "local"
    ip: str  # on the fast network, which the ranks use
    interfaces: Sequence[str] = ()  # of that network
    rdma: Sequence[str] = ()  # RoCE devices of these ports, both twins of each; none: TCP
    gid_index: int | None = None  # index of the RoCE v2 entry with the IPv4 address; None: NCCL's choice
    python: str = "python3"
    vllm: str = "vllm"
    folder: str = ".cache/sparkdraft/cluster"  # for the code that runs there, relative to the home folder
    environment: Mapping[str, str] = field(default_factory=dict)  # overrides the derived variables


@dataclass(frozen=True, slots=True)
class Cluster:
    name: str
    hosts: tuple[HostSpec, ...]
    port: int = 29501  # of the first host, for rendezvous
    silence_seconds: float = 15.0  # without heartbeats of a machine, or on it of the supervisor
    hang_seconds: float = 300.0  # without a token; vLLM's own limit for a step is the same
    ready_seconds: float = 3600.0  # until the first token
    restarts: int = 3  # of all ranks together, within an hour

    def labels(self) -> list[str]:
        """Names of the hosts, with their rank where a machine has several."""
        names = [each.address for each in self.hosts]
        return [f"{name}/{i}" if names.count(name) > 1 else name for i, name in enumerate(names)]


def read_cluster(path: str) -> Cluster:
    try:
        data = tomllib.loads(user_path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"the hosts file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"the hosts file {path} is not valid TOML: {error}") from None
    try:
        return parse_cluster(data, Path(path).stem)
    except UserError as error:
        raise UserError(f"the hosts file {path}: {error}") from None


def parse_cluster(data: dict[str, Any], name: str) -> Cluster:
    tables = data.get("host", [])
    top = {key: value for key, value in data.items() if key != "host"}
    given = _typed(top, {**CLUSTER_KEYS, **SHARED_KEYS}, "at the top", ["host"])
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables) or len(tables) < 2:
        raise UserError("it needs two or more [[host]] tables, each with an address and an ip")
    shared = {key: given.pop(key) for key in SHARED_KEYS if key in given}
    hosts = tuple(_host(shared, each, f"in host {i}") for i, each in enumerate(tables, 1))
    ips = [each.ip for each in hosts if each.address != LOCAL]
    if twice := next((ip for ip in ips if ips.count(ip) > 1), None):
        raise UserError(f"the ip {twice} is that of two hosts; every machine has its own")
    cluster = Cluster(**{"name": name, **given, "hosts": hosts})
    if not NAME.fullmatch(cluster.name):
        raise UserError(f"the name is '{cluster.name}'; letters, digits, dots and dashes name a folder")
    if not 0 < cluster.port < 65536:
        raise UserError(f"port is {cluster.port}; it must be 1 to 65535")
    return cluster


def _host(shared: dict[str, Any], table: dict[str, Any], where: str) -> HostSpec:
    given = _typed(table, HOST_KEYS, where)
    for key in ("address", "ip"):
        if key not in given:
            raise UserError(f"{where} {key} is missing")
    environment = {**shared.get("environment", {}), **given.get("environment", {})}
    host = HostSpec(**{**shared, **given, "environment": environment})
    if not host.address or host.address.startswith("-") or set(host.address) & set(" \t\n"):
        raise UserError(f"{where} the address is '{host.address}'; give it as `ssh` takes it, such as me@spark-1")
    try:
        ipaddress.IPv4Address(host.ip)
    except ValueError:
        raise UserError(f"{where} the ip is '{host.ip}'; give the IPv4 address on the fast network") from None
    return replace(host, folder=host.folder.removeprefix("~/"))


def _typed(table: dict[str, Any], kinds: dict[str, type], where: str, tables: Sequence[str] = ()) -> dict[str, Any]:
    """Checks the keys and the types of a table. tables: other names that may have been meant."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key not in kinds:
            question = did_you_mean(key, [*kinds, *tables])
            raise UserError(f"{where} '{key}' is not known" + (f": {question}" if question else ""))
        kind = kinds[key]
        fits = isinstance(value, int | float if kind is float else kind) and not isinstance(value, bool)
        if not fits or (kind is list and not all(isinstance(each, str) for each in value)):
            raise UserError(f"{key} {where} must be {KINDS[kind]}, and is {value!r}")
        if isinstance(value, int | float) and value < 0:
            raise UserError(f"{key} {where} is {value}; it must be 0 or more")
        for name, each in value.items() if kind is dict else ():
            if isinstance(each, bool) or not isinstance(each, str | int | float):
                raise UserError(f"{name} of the environment {where} must be a text or a number, and is {each!r}")
        found[key] = {name: str(each) for name, each in value.items()} if kind is dict else value
    return found


class Done(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        return (self.err.strip() or self.out.strip() or "it said nothing").splitlines()[-1]


@dataclass(frozen=True)
class Host:
    spec: HostSpec
    label: str
    rank: int
    run_name: str  # the cluster's

    @property
    def run_folder(self) -> str:
        return f"{self.spec.folder}/{self.run_name}/rank{self.rank}"

    def run(self, script: str, seconds: float, data: bytes = b"") -> Done:
        """Runs a shell line to its end. Raises UserError if the machine is not reached or does not answer in time."""
        process = self.start(script, stderr=subprocess.PIPE)
        try:
            out, err = process.communicate(data, timeout=seconds)
        except subprocess.TimeoutExpired:
            kill_group(process)
            process.communicate()
            raise UserError(f"{self.label} has not answered in {seconds:g} s: is it up, or overloaded?") from None
        done = Done(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))
        if done.status == NO_CONNECTION and self.spec.address != LOCAL:
            raise UserError(f"{self.label} cannot be reached over ssh ({done.last_line}): {self._advice(done.err)}")
        return done

    def start(self, script: str, stderr: int = subprocess.STDOUT) -> subprocess.Popen[bytes]:
        """Starts ssh, or the command itself, with pipes and in a session that Ctrl-C in a terminal does not reach."""
        words = ["sh", "-c", script] if self.spec.address == LOCAL else [*ssh_words(), "--", self.spec.address, script]
        pipe = subprocess.PIPE
        try:
            return subprocess.Popen(
                words, stdin=pipe, stdout=pipe, stderr=stderr, cwd=Path.home(), start_new_session=True
            )
        except FileNotFoundError:
            raise UserError(f"`{words[0]}` is not installed here, and {self.label} is reached by it") from None

    def node_script(self, *words: str) -> str:
        """Returns the line that runs a verb of node/ there, after `install` has copied it."""
        return f"exec {shlex.join([self.spec.python.removeprefix('~/'), self.code_folder, *words])}"

    def install(self) -> None:
        """Copies node/ to the machine. Raises UserError."""
        code = shlex.quote(self.code_folder)
        done = self.run(f"mkdir -p {code} && tar -xf - -C {code}", COPY_SECONDS, _archive())
        if done.status:
            raise UserError(
                f"{self.label}: the folder {self.spec.folder} cannot be written ({done.last_line}): free some space, "
                "or name another folder in the hosts file"
            )

    @property
    def code_folder(self) -> str:
        """Where `install` puts node/, relative to the home folder. Each rank has its own, because unpacking twice
        into one folder at the same time fails."""
        return f"{self.run_folder}/code"

    def _advice(self, errors: str) -> str:
        found = next((text for part, text in ADVICE.items() if part in errors), "is it up, and does `ssh {0}` work?")
        return found.format(self.spec.address)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def ssh_words() -> Sequence[str]:
    return ["ssh", "-T", *(f"-o{name}={value}" for name, value in OPTIONS.items())]


@cache
def _archive() -> bytes:
    """Packs node/ into a tar file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        files = {f"node/{path.name}": path.read_bytes() for path in sorted(NODE.glob("*.py"))}
        for name, data in {"__main__.py": MAIN, **files}.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o644
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()
