"""The file that names the machines of a cluster, in TOML. docs/cluster.md has an example with every key.

What a host leaves out is taken from the top of the file. A key that is not known is refused with the nearest one.
"""

from __future__ import annotations

import ipaddress
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from sparkdraft.core import UserError
from sparkdraft.util.names import did_you_mean
from sparkdraft.util.paths import user_path

LOCAL = "local"  # the address of this machine, reached without ssh
NAME = re.compile(r"[\w.-]+")
SHARED = ("python", "vllm", "folder", "gid_index", "interfaces", "rdma", "environment")  # of a host, or for all


@dataclass(frozen=True, slots=True)
class HostSpec:
    address: str  # as ssh knows it, or "local"
    ip: str  # on the fast network, where the ranks meet
    interfaces: tuple[str, ...] = ()  # of that network
    rdma: tuple[str, ...] = ()  # RoCE devices of the same ports, both twins of a port; none: TCP
    gid_index: int | None = None  # of the RoCE v2 entry with the IPv4 address; None: NCCL's choice
    python: str = "python3"
    vllm: str = "vllm"
    folder: str = ".cache/sparkdraft/cluster"  # for logs, from the home folder
    environment: Mapping[str, str] = field(default_factory=dict)  # beats what is derived here


@dataclass(frozen=True, slots=True)
class Cluster:
    name: str
    hosts: tuple[HostSpec, ...]
    port: int = 29501  # where the ranks meet, on the first host
    silence_seconds: float = 15.0  # without a sign of life of a machine, or of the supervisor there
    hang_seconds: float = 300.0  # without a token; vLLM gives up a step after as many
    ready_seconds: float = 3600.0  # until the first token
    restarts: int = 3  # of all ranks together, within an hour

    def labels(self) -> list[str]:
        """The hosts by name; with their rank, where a machine has several."""
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
    own = [each.name for each in fields(Cluster) if each.name != "hosts"]
    _check_keys(data, [*own, *SHARED, "host"], "at the top")
    tables = data.get("host", [])
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables) or len(tables) < 2:
        raise UserError("it needs two or more [[host]] tables, each with an address and an ip")
    shared = {key: data[key] for key in SHARED if key in data}
    hosts = tuple(_host(shared, each, i) for i, each in enumerate(tables, 1))
    ips = [each.ip for each in hosts if each.address != LOCAL]
    if twice := next((ip for ip in ips if ips.count(ip) > 1), None):
        raise UserError(f"the ip {twice} is that of two hosts; every machine has its own")
    given = {key: _typed(key, value, _kind(Cluster, key)) for key, value in data.items() if key in own}
    cluster = Cluster(**{"name": name, **given, "hosts": hosts})
    if not NAME.fullmatch(cluster.name):
        raise UserError(f"the name is '{cluster.name}'; letters, digits, dots and dashes name a folder")
    if not 0 < cluster.port < 65536:
        raise UserError(f"port is {cluster.port}; it must be 1 to 65535")
    return cluster


def _host(shared: dict[str, Any], given: dict[str, Any], number: int) -> HostSpec:
    where = f"in host {number}"
    _check_keys(given, [each.name for each in fields(HostSpec)], where)
    for key in ("address", "ip"):
        if key not in given:
            raise UserError(f"{where} {key} is missing")
    for place, table in (("at the top", shared), (where, given)):
        _check_environment(table.get("environment", {}), place)
    merged = {**shared, **given, "environment": {**shared.get("environment", {}), **given.get("environment", {})}}
    values = {key: _typed(f"{key} {where}", value, _kind(HostSpec, key)) for key, value in merged.items()}
    host = HostSpec(**values)
    if not host.address or host.address.startswith("-") or set(host.address) & set(" \t\n"):
        raise UserError(f"{where} the address is '{host.address}'; give it as `ssh` takes it, such as me@spark-1")
    try:
        ipaddress.IPv4Address(host.ip)
    except ValueError:
        raise UserError(f"{where} the ip is '{host.ip}'; give the IPv4 address on the fast network") from None
    return HostSpec(**{**values, "folder": host.folder.removeprefix("~/")})


def _check_environment(given: Any, where: str) -> None:
    if not isinstance(given, dict):
        raise UserError(f"environment {where} must be a table of variables, and is {given!r}")
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise UserError(f"{name} of the environment {where} must be a text or a number, and is {value!r}")


def _check_keys(data: Mapping[str, Any], known: list[str], where: str) -> None:
    for key in data:
        if key not in known:
            question = did_you_mean(key, known)
            raise UserError(f"{where} '{key}' is not known" + (f": {question}" if question else ""))


def _kind(record: type, name: str) -> type:
    """The type of a field's value, by its default."""
    each = next(each for each in fields(record) if each.name == name)
    if name == "gid_index":
        return int
    if each.default_factory is not MISSING:
        return dict
    return str if each.default is MISSING else type(each.default)


def _typed(what: str, value: Any, kind: type) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind is tuple and isinstance(value, list) and all(isinstance(each, str) for each in value):
        return tuple(value)
    if kind is dict:
        return {name: str(each) for name, each in value.items()}
    if kind is tuple or not isinstance(value, kind) or isinstance(value, bool):
        names = {tuple: "a list of names", str: "a text", int: "a whole number"}
        raise UserError(f"{what} must be {names.get(kind, 'a number')}, and is {value!r}")
    if isinstance(value, int | float) and value < 0:
        raise UserError(f"{what} is {value}; it must be 0 or more")
    return value
