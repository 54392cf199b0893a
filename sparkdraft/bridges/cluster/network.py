"""Checks of interfaces, RoCE devices and cables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import IPv4Address

from sparkdraft.bridges.cluster.hosts_file import LOCAL
from sparkdraft.bridges.cluster.survey import Seen
from sparkdraft.operate.doctor.finding import Finding, Status

JUMBO = 9000
LEAST_SPEED = 100_000  # Mbit/s of one of a port's twins
ROCE_V2 = "RoCE v2"


def judge_interfaces(seen: Seen) -> Iterator[Finding]:
    spec, label, known = seen.host.spec, seen.host.label, seen.facts["interfaces"]
    if not seen.facts["has_ip"]:
        there = _listed(f"{name} has {each['address']}" for name, each in known.items() if each.get("address"))
        value = f"{label} does not have {spec.ip}" + (f"; {there}" if known else "")
        yield Finding(label, "address", value, Status.BROKEN, "correct `ip` in the hosts file, or its netplan")
    if not spec.interfaces:
        if spec.address != LOCAL:
            advice = "name them as `interfaces` in the hosts file: gloo and NCCL may choose the slow network"
            yield Finding(label, "interfaces", "none are named", Status.CHANGE, advice)
        return
    for name in spec.interfaces:
        yield from _interface(seen, name, known[name])


def _interface(seen: Seen, name: str, facts: dict[str, int]) -> Iterator[Finding]:
    label, title = seen.host.label, f"interface {name}"
    if not facts:
        there = f"it has {_listed(seen.facts['all_interfaces'])}"
        value = f"{label} has no interface {name}; {there}"
        yield Finding(label, title, value, Status.BROKEN, "correct `interfaces` of this host in the hosts file")
    elif not facts["up"]:
        value, advice = "it is down", f"plug the cable in, then: sudo ip link set {name} up"
        yield Finding(label, title, value, Status.BROKEN, advice)
    elif facts["mtu"] < JUMBO:
        advice = f"sudo ip link set {name} mtu {JUMBO}, on every machine: frames of 1500 bytes halve the rate"
        yield Finding(label, title, f"frames of {facts['mtu']} bytes", Status.CHANGE, advice)
    elif 0 < facts["speed"] < LEAST_SPEED:
        value = f"{facts['speed'] / 1000:g} Gbit/s, and a Spark's port has {LEAST_SPEED / 1000:g} by each of its twins"
        yield Finding(label, title, value, Status.CHANGE, "check that this is the QSFP port, and its cable")
    else:
        speed = f"{facts['speed'] / 1000:g} Gbit/s, " if facts["speed"] else ""
        yield Finding(label, title, f"{speed}frames of {facts['mtu']} bytes")


def judge_rdma(seen: Seen) -> Iterator[Finding]:
    spec, label, known = seen.host.spec, seen.host.label, seen.facts["rdma"]
    active = [name for name, each in known.items() if each["state"] == "ACTIVE"]
    if not spec.rdma:
        if active:
            value = f"none is named, and {_listed(active)} is active: ranks use TCP, ten times as slow"
            yield Finding(label, "RoCE", value, Status.CHANGE, "name the devices as `rdma` in the hosts file")
        return
    for name in spec.rdma:
        if name not in known:
            value = f"{label} has no RoCE device {name}; it has {_listed(known)}"
            yield Finding(label, "RoCE", value, Status.BROKEN, "correct `rdma` of this host (`ibv_devices` lists them)")
        elif known[name]["state"] != "ACTIVE":
            value = f"{name} is {known[name]['state'] or 'not told'}"
            yield Finding(label, "RoCE", value, Status.BROKEN, "plug the cable in; both ends must be up")
        else:
            yield Finding(label, "RoCE", f"{name} is active, {known[name]['rate']}")
            yield from _gid(seen, name, known[name]["gids"])
    for name in spec.rdma:
        twin = _twin(name)
        if twin in active and twin not in spec.rdma:
            value = f"{name} is named and its twin {twin} is not: a port is two devices of half its rate each"
            yield Finding(label, "RoCE", value, Status.CHANGE, f"add {twin} to `rdma` of this host")


def _gid(seen: Seen, name: str, gids: dict[str, list[str]]) -> Iterator[Finding]:
    """The entry that NCCL shall use must be RoCE v2's, of an IPv4 address; a wrong one fails after a minute."""
    index, label = seen.host.spec.gid_index, seen.host.label
    fit = [int(i) for i, (gid, kind) in gids.items() if kind == ROCE_V2 and _ipv4(gid)]
    if index is not None and index not in fit:
        value = f"GID {index} of {name} is {_listed(gids.get(str(index), ['empty']))}, and not RoCE v2 with an IPv4"
        advice = f"set gid_index = {fit[0]} for this host" if fit else f"give the interface of {name} an IPv4 address"
        yield Finding(label, "GID", value, Status.BROKEN, advice)
    elif not fit:
        value = f"{name} has no RoCE v2 entry with an IPv4 address"
        yield Finding(label, "GID", value, Status.BROKEN, f"give the interface of {name} an IPv4 address")


def judge_errors(seen: Seen) -> Iterator[Finding]:
    """Errors that grow while nothing runs are a cable's."""
    before, after = seen.facts["errors"]
    label, seconds = seen.host.label, seen.facts["seconds"]
    grown = {name: (before.get(name, 0), value) for name, value in after.items() if value > before.get(name, 0)}
    if grown:
        shown = "; ".join(f"{name} {a} -> {b}" for name, (a, b) in grown.items())
        advice = "swap the cable (DAC), or seat it again: ranks wait for what is sent twice, and time out"
        yield Finding(label, "cable", f"errors grow: {shown} in {seconds:.0f} s", Status.BROKEN, advice)
    elif after:
        shown = "; ".join(f"{name} {value}" for name, value in sorted(after.items(), key=lambda each: -each[1])[:3])
        yield Finding(label, "cable", f"errors since its start, none in {seconds:.0f} s: {shown}", Status.NOTE)
    elif before is not None and (seen.host.spec.interfaces or seen.host.spec.rdma):
        yield Finding(label, "cable", f"no errors since its start, nor in {seconds:.0f} s")


def _ipv4(gid: str) -> str:
    """The IPv4 address of a GID such as 0000:...:ffff:c0a8:b10b; "" if it has none."""
    parts = gid.split(":")
    if len(parts) != 8 or parts[5] != "ffff" or any(set(each) != {"0"} for each in parts[:5]):
        return ""
    return str(IPv4Address(int(parts[6] + parts[7], 16)))


def _twin(name: str) -> str:
    """The other half of a Spark's port: rocep1s0f1 and roceP2p1s0f1."""
    if found := re.fullmatch(r"rocep1s0(f\d)", name):
        return f"roceP2p1s0{found[1]}"
    found = re.fullmatch(r"roceP2p1s0(f\d)", name)
    return f"rocep1s0{found[1]}" if found else ""


def _listed(names: object) -> str:
    assert hasattr(names, "__iter__")
    return ", ".join(sorted(str(each) for each in names if each)) or "none"
