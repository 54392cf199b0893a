"""Looks at all machines at once and judges what was found, as findings with a sentence that says what to do.

BROKEN: the ranks cannot run together. CHANGE: they can, but slower or less safely than possible.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from pathlib import PurePosixPath
from typing import Any

from sparkdraft.bridges.cluster.hosts import LOCAL, Cluster, Host
from sparkdraft.bridges.cluster.ranks import rank_environment
from sparkdraft.core import UserError
from sparkdraft.operate.doctor.finding import Finding, Status
from sparkdraft.util.names import alike

LOOK_SECONDS = 160.0
GAP = 2.0  # seconds between two readings of a cable's error counters
GIB = 1 << 30
SAME_PACKAGES = {  # packages whose versions must agree, and how bad it is if they do not
    "vllm": ("vLLM", Status.BROKEN, "ranks of two versions do not understand each other"),
    "torch": ("torch", Status.BROKEN, "ranks of two versions do not understand each other"),
    "nvidia-nccl-cu13": ("NCCL", Status.CHANGE, "ranks of two versions may hang"),
    "nvidia-nccl-cu12": ("NCCL", Status.CHANGE, "ranks of two versions may hang"),
    "sparkdraft": ("sparkdraft", Status.CHANGE, "its vLLM plugin runs in every rank"),
}
JUMBO = 9000
LEAST_SPEED = 100_000  # Mbit/s of each of a port's twins
ROCE_V2 = "RoCE v2"
# Variables that people set on a Spark. A similar name that is not among them is a typo.
NAMES = """
    NCCL_IB_DISABLE NCCL_IB_HCA NCCL_IB_GID_INDEX NCCL_IB_MERGE_NICS NCCL_IB_TIMEOUT NCCL_IB_RETRY_CNT NCCL_IB_TC
    NCCL_IB_SL NCCL_IB_QPS_PER_CONNECTION NCCL_IB_ADDR_FAMILY NCCL_IB_ADDR_RANGE NCCL_IB_ROCE_VERSION_NUM
    NCCL_IB_PCI_RELAXED_ORDERING NCCL_IB_CUDA_SUPPORT NCCL_SOCKET_IFNAME NCCL_SOCKET_FAMILY NCCL_SOCKET_NTHREADS
    NCCL_NSOCKS_PERTHREAD NCCL_DEBUG NCCL_DEBUG_SUBSYS NCCL_DEBUG_FILE NCCL_ALGO NCCL_PROTO NCCL_NET NCCL_NET_PLUGIN
    NCCL_NET_GDR_LEVEL NCCL_NET_GDR_READ NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_SHM_DISABLE NCCL_BUFFSIZE
    NCCL_NTHREADS NCCL_MIN_NCHANNELS NCCL_MAX_NCHANNELS NCCL_MIN_CTAS NCCL_MAX_CTAS NCCL_CROSS_NIC
    NCCL_COLLNET_ENABLE NCCL_NVLS_ENABLE NCCL_CUMEM_ENABLE NCCL_DMABUF_ENABLE NCCL_LAUNCH_MODE NCCL_COMM_BLOCKING
    NCCL_CONF_FILE NCCL_COMM_ID NCCL_HOSTID NCCL_IGNORE_CPU_AFFINITY NCCL_TOPO_FILE NCCL_GRAPH_FILE
    NCCL_TUNER_PLUGIN NCCL_VERSION NCCL_RAS_ENABLE NCCL_BLOCKING_WAIT GLOO_SOCKET_IFNAME GLOO_SOCKET_FAMILY
    VLLM_HOST_IP
"""
KNOWN = NAMES.split()
SAME_VARIABLES = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NET", "NCCL_IB_DISABLE", "NCCL_IB_MERGE_NICS", "NCCL_BUFFSIZE")
PREFIXES = ("NCCL_", "GLOO_")


@dataclass(frozen=True)
class Seen:
    """The facts found on a machine, or why there are none."""

    host: Host
    facts: dict[str, Any] = field(default_factory=dict)
    problem: str = ""  # a sentence

    def finding(self, name: str, value: str, status: Status = Status.FINE, advice: str = "") -> Finding:
        return Finding(self.host.label, name, value, status, advice)


def hosts_of(cluster: Cluster) -> list[Host]:
    labels = cluster.labels()
    return [Host(spec, labels[i], i, cluster.name) for i, spec in enumerate(cluster.hosts)]


def survey(cluster: Cluster, ports: Sequence[int] = (), paths: Sequence[str] = (), gap: float = GAP) -> list[Seen]:
    """ports: must be free on the first machine. paths: must exist on each machine."""

    def one(host: Host) -> Seen:
        spec = {
            "run": host.run_folder,
            "vllm": host.spec.vllm,
            "ip": host.spec.ip,
            "interfaces": host.spec.interfaces,
            "rdma": host.spec.rdma,
            "head": [cluster.hosts[0].ip, cluster.port] if host.rank else None,
            "ports": [] if host.rank else ports,
            "paths": paths,
            "gap": gap,
        }
        try:
            return look_at(host, spec)
        except UserError as error:
            return Seen(host, problem=str(error))

    hosts = hosts_of(cluster)
    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(one, hosts))


def look_at(host: Host, spec: dict[str, Any]) -> Seen:
    host.install()
    done = host.run(host.node_script("look"), LOOK_SECONDS, json.dumps(spec).encode())
    try:
        return Seen(host, json.loads(done.out))
    except ValueError:
        raise UserError(
            f"{host.label}: `{host.spec.python}` cannot look at the machine ({done.last_line}): name a Python 3.10 or "
            "later as `python` in the hosts file"
        ) from None


def judge(seen: Sequence[Seen], memory_fraction: float = 0.0) -> list[Finding]:
    """Returns all findings, machine by machine. memory_fraction: the configured one; 0: unknown."""
    found: list[Finding] = []
    head = next((each for each in seen if each.facts), None)
    for each in seen:
        if each.problem:
            found.append(each.finding("machine", each.problem, Status.BROKEN))
            continue
        assert head
        found += [*judge_versions(each, head), *judge_gpus(each, head)]
        found += [*judge_start(each), *judge_memory(each, memory_fraction)]
        found += [*judge_interfaces(each), *judge_rdma(each), *judge_errors(each), *judge_variables(each, head)]
    return found


def judge_versions(seen: Seen, head: Seen) -> Iterator[Finding]:
    """vLLM and its libraries must be the same everywhere."""
    own, first = seen.facts["vllm"], head.facts["vllm"]
    if problem := own.get("problem"):
        advice = "install vLLM there, or name its path as `vllm` in the hosts file"
        yield seen.finding("vLLM", problem, Status.BROKEN, advice)
        return
    shown = ", ".join(f"{name} {own[name]}" for name in SAME_PACKAGES if name in own)
    yield seen.finding("versions", shown)
    for name, (title, status, why) in SAME_PACKAGES.items():
        a, b = own.get(name), first.get(name)
        if a != b and "problem" not in first:
            value = f"{title} is {a or 'not installed'} on {seen.host.label} and {b or 'not installed'} on "
            install = f"install {name}=={b} on {seen.host.label}" if b else f"install {name}=={a} on {head.host.label}"
            yield seen.finding(title, f"{value}{head.host.label}: {why}", status, install)


def judge_gpus(seen: Seen, head: Seen) -> Iterator[Finding]:
    own, first = (each.facts["gpus"] for each in (seen, head))
    if not own and not first:
        yield seen.finding("GPU", "nvidia-smi finds none: ranks run on the CPU", Status.NOTE)
    elif bool(own) != bool(first):
        without = seen if not own else head
        value, advice = f"nvidia-smi finds none on {without.host.label}", "mend its driver: `nvidia-smi` must list it"
        yield seen.finding("GPU", value, Status.BROKEN, advice)
    else:
        yield seen.finding("GPU", f"{own[0]['name']}, driver {own[0]['driver']}")
        if own[0]["driver"] != first[0]["driver"]:
            value = f"{own[0]['driver']} on {seen.host.label} and {first[0]['driver']} on {head.host.label}"
            yield seen.finding("driver", value, Status.CHANGE, "update the older one: mixed drivers may hang")


def judge_start(seen: Seen) -> Iterator[Finding]:
    """Ports, the way to the first machine, and files."""
    for port, problem in seen.facts["ports"].items():
        if problem:
            advice = f"`ss -ltnp | grep {port}` says by whom; end it, or choose another port"
            yield seen.finding(f"port {port}", problem, Status.BROKEN, advice)
    if why := seen.facts["reach"]:
        value = f"{seen.host.label} does not reach the first machine on the fast network ({why})"
        yield seen.finding("network", value, Status.BROKEN, "check cable, addresses (`ip addr`) and firewalls")
    for path in seen.facts["missing"]:
        plain = PurePosixPath(path)  # rsync copies only the contents of a folder with a slash at its end
        advice = f"copy it: rsync -a {plain} {seen.host.spec.address}:{plain.parent}/"
        yield seen.finding("files", f"{path} is not there, and every rank reads it", Status.BROKEN, advice)


def judge_memory(seen: Seen, fraction: float) -> Iterator[Finding]:
    """On a GB10 the GPU takes its share from the system's memory."""
    total, free = (seen.facts["memory"][name] for name in ("total", "available"))
    shares = any("GB10" in each["name"] for each in seen.facts["gpus"])
    if shares and fraction * total > free:
        value = f"{free / GIB:.0f} of {total / GIB:.0f} GiB are available, and --memory-fraction {fraction:g} takes "
        advice = "end other programs (echo 1 > /proc/sys/vm/drop_caches frees the rest), or lower --memory-fraction"
        yield seen.finding("memory", f"{value}{fraction * total / GIB:.0f}", Status.CHANGE, advice)
    else:
        yield seen.finding("memory", f"{free / GIB:.0f} of {total / GIB:.0f} GiB are available")


def judge_interfaces(seen: Seen) -> Iterator[Finding]:
    spec = seen.host.spec
    if not seen.facts["has_ip"]:
        value = f"{seen.host.label} does not have {spec.ip}"
        yield seen.finding("address", value, Status.BROKEN, "correct `ip` in the hosts file, or its netplan")
    if not spec.interfaces:
        if spec.address != LOCAL:
            advice = "name them as `interfaces` in the hosts file: gloo and NCCL may choose the slow network"
            yield seen.finding("interfaces", "none are named", Status.CHANGE, advice)
        return
    for name in spec.interfaces:
        yield from _interface(seen, name, seen.facts["interfaces"][name])


def _interface(seen: Seen, name: str, facts: dict[str, int]) -> Iterator[Finding]:
    label, title = seen.host.label, f"interface {name}"
    if not facts:
        there = f"it has {_listed(seen.facts['all_interfaces'])}"
        value = f"{label} has no interface {name}; {there}"
        yield seen.finding(title, value, Status.BROKEN, "correct `interfaces` of this host in the hosts file")
    elif not facts["up"]:
        value, advice = "it is down", f"plug the cable in, then: sudo ip link set {name} up"
        yield seen.finding(title, value, Status.BROKEN, advice)
    elif facts["mtu"] < JUMBO:
        advice = f"sudo ip link set {name} mtu {JUMBO}, on every machine: frames of 1500 bytes halve the rate"
        yield seen.finding(title, f"frames of {facts['mtu']} bytes", Status.CHANGE, advice)
    elif 0 < facts["speed"] < LEAST_SPEED:
        value = f"{facts['speed'] / 1000:g} Gbit/s, and a Spark's port has {LEAST_SPEED / 1000:g} by each of its twins"
        yield seen.finding(title, value, Status.CHANGE, "check that this is the QSFP port, and its cable")
    else:
        speed = f"{facts['speed'] / 1000:g} Gbit/s, " if facts["speed"] else ""
        yield seen.finding(title, f"{speed}frames of {facts['mtu']} bytes")


def judge_rdma(seen: Seen) -> Iterator[Finding]:
    spec, label, known = seen.host.spec, seen.host.label, seen.facts["rdma"]
    active = [name for name, each in known.items() if each["state"] == "ACTIVE"]
    if not spec.rdma:
        if active:
            value = f"none is named, and {_listed(active)} is active: ranks use TCP, ten times as slow"
            yield seen.finding("RoCE", value, Status.CHANGE, "name the devices as `rdma` in the hosts file")
        return
    for name in spec.rdma:
        if name not in known:
            value = f"{label} has no RoCE device {name}; it has {_listed(known)}"
            yield seen.finding("RoCE", value, Status.BROKEN, "correct `rdma` of this host (`ibv_devices` lists them)")
        elif known[name]["state"] != "ACTIVE":
            value = f"{name} is {known[name]['state'] or 'not told'}"
            yield seen.finding("RoCE", value, Status.BROKEN, "plug the cable in; both ends must be up")
        else:
            yield seen.finding("RoCE", f"{name} is active, {known[name]['rate']}")
            yield from _gid(seen, name, known[name]["gids"])
    for name in spec.rdma:
        twin = _twin(name)
        if twin in active and twin not in spec.rdma:
            value = f"{name} is named and its twin {twin} is not: a port is two devices of half its rate each"
            yield seen.finding("RoCE", value, Status.CHANGE, f"add {twin} to `rdma` of this host")


def _gid(seen: Seen, name: str, gids: dict[str, list[str]]) -> Iterator[Finding]:
    """NCCL must use a RoCE v2 entry with an IPv4 address; a wrong one fails only after a minute."""
    index = seen.host.spec.gid_index
    fit = [int(i) for i, (gid, kind) in gids.items() if kind == ROCE_V2 and _ipv4(gid)]
    if index is not None and index not in fit:
        value = f"GID {index} of {name} is {_listed(gids.get(str(index), ['empty']))}, and not RoCE v2 with an IPv4"
        advice = f"set gid_index = {fit[0]} for this host" if fit else f"give the interface of {name} an IPv4 address"
        yield seen.finding("GID", value, Status.BROKEN, advice)
    elif not fit:
        value = f"{name} has no RoCE v2 entry with an IPv4 address"
        yield seen.finding("GID", value, Status.BROKEN, f"give the interface of {name} an IPv4 address")


def judge_errors(seen: Seen) -> Iterator[Finding]:
    """Errors that grow while nothing runs come from the cable."""
    before, after = seen.facts["errors"]
    grown = [f"{name} {before.get(name, 0)} -> {n}" for name, n in after.items() if n > before.get(name, 0)]
    if grown:
        advice = "swap the cable (DAC), or seat it again: ranks wait for repeated packets, and time out"
        yield seen.finding("cable", f"errors grow: {'; '.join(grown)}", Status.BROKEN, advice)
    elif seen.host.spec.interfaces or seen.host.spec.rdma:
        yield seen.finding("cable", "no errors are added")


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


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(filter(None, names))) or "none"


def environment_of(seen: Seen) -> dict[str, str]:
    """The variables of a rank on this machine."""
    return {**seen.facts["environ"], **rank_environment(seen.host.spec, 0)}


def judge_variables(seen: Seen, head: Seen) -> Iterator[Finding]:
    own, label = environment_of(seen), seen.host.label
    yield from _misspelt(seen, own)
    names = seen.facts["all_interfaces"]
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if missing := _unmatched(own.get(variable, ""), names, exact=variable.startswith("GLOO")):
            value = f"it is {own[variable]}, and {label} has no interface {missing}, only {', '.join(names)}"
            if missing not in seen.host.spec.interfaces:  # judge_interfaces reports those
                yield seen.finding(variable, value, Status.BROKEN, f"correct {variable}, or leave it to `interfaces`")
    if own.get("NCCL_IB_DISABLE", "0") in ("", "0"):
        devices = seen.facts["rdma"]
        if missing := _unmatched(own.get("NCCL_IB_HCA", ""), devices):
            there = ", ".join(devices) or "none"
            value = f"it is {own['NCCL_IB_HCA']}, and {label} has no RoCE device {missing}, only {there}"
            if missing not in seen.host.spec.rdma:  # judge_rdma reports those
                yield seen.finding("NCCL_IB_HCA", value, Status.BROKEN, "correct it, or leave it to `rdma`")
    elif seen.host.spec.rdma:
        value = f"it is {own['NCCL_IB_DISABLE']}, so ranks use TCP though RoCE is named: ten times as slow"
        yield seen.finding("NCCL_IB_DISABLE", value, Status.CHANGE, "remove it from the hosts file")
    if own["VLLM_HOST_IP"] != seen.host.spec.ip:
        value = f"it is {own['VLLM_HOST_IP']}, and this host's ip is {seen.host.spec.ip}"
        yield seen.finding("VLLM_HOST_IP", value, Status.BROKEN, "remove it: every machine has its own")
    yield from _different(seen, own, head)


def _misspelt(seen: Seen, own: dict[str, str]) -> Iterator[Finding]:
    for name in own:
        near = alike(name, KNOWN, near=0.9) if name.startswith(PREFIXES) and name not in KNOWN else ""
        if near:
            value = f"{name}={own[name]} is read by nobody: did you mean {near}?"
            yield seen.finding(name, value, Status.CHANGE, f"rename it to {near}, or remove it")


def _different(seen: Seen, own: dict[str, str], head: Seen) -> Iterator[Finding]:
    first = environment_of(head)
    for name in SAME_VARIABLES:
        if own.get(name) != first.get(name):
            a, b = own.get(name, "not set"), first.get(name, "not set")
            value = f"it is {a} on {seen.host.label} and {b} on {head.host.label}: ranks that differ in it wait forever"
            advice = "set it once, under [environment] at the top of the hosts file"
            yield seen.finding(name, value, Status.BROKEN, advice)


def _unmatched(value: str, names: Iterable[str], exact: bool = False) -> str:
    """Returns the first name in a variable that matches no device. NCCL's names are prefixes unless "=" leads them; "^"
    excludes names; a port may follow a colon."""
    if not value or value.startswith("^"):
        return ""
    exact = exact or value.startswith("=")
    for each in value.removeprefix("=").split(","):
        wanted = each.strip().partition(":")[0]
        if not any(name == wanted or (not exact and name.startswith(wanted)) for name in names):
            return wanted
    return ""
