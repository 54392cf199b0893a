"""Checks of the variables that NCCL and gloo read: those of the machine, with those of the hosts file over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sparkdraft.bridges.cluster.command import rank_environment
from sparkdraft.bridges.cluster.survey import Seen
from sparkdraft.operate.doctor.finding import Finding, Status
from sparkdraft.util.names import alike

# Those that people set on a Spark; a name that is near one of them and none of NCCL's is a slip.
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
SAME = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NET", "NCCL_IB_DISABLE", "NCCL_IB_MERGE_NICS", "NCCL_BUFFSIZE")
PREFIXES = ("NCCL_", "GLOO_")


def environment_of(seen: Seen) -> dict[str, str]:
    """What a rank on this machine will have."""
    return {**seen.facts["environ"], **rank_environment(seen.host.spec, 0)}


def judge_variables(seen: Seen, others: Sequence[Seen]) -> Iterator[Finding]:
    own, label = environment_of(seen), seen.host.label
    yield from _misspelt(label, own)
    names = seen.facts["all_interfaces"]
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if missing := _unmatched(own.get(variable, ""), names, exact=variable.startswith("GLOO")):
            value = f"it is {own[variable]}, and {label} has no interface {missing}, only {', '.join(names)}"
            if missing not in seen.host.spec.interfaces:  # else judge_interfaces has said so
                yield Finding(label, variable, value, Status.BROKEN, f"correct {variable}, or leave it to `interfaces`")
    if own.get("NCCL_IB_DISABLE", "0") in ("", "0"):
        devices = seen.facts["rdma"]
        if missing := _unmatched(own.get("NCCL_IB_HCA", ""), devices):
            there = ", ".join(devices) or "none"
            value = f"it is {own['NCCL_IB_HCA']}, and {label} has no RoCE device {missing}, only {there}"
            if missing not in seen.host.spec.rdma:  # else judge_rdma has said so
                yield Finding(label, "NCCL_IB_HCA", value, Status.BROKEN, "correct it, or leave it to `rdma`")
    elif seen.host.spec.rdma:
        value = f"it is {own['NCCL_IB_DISABLE']}, so ranks use TCP though RoCE is named: ten times as slow"
        yield Finding(label, "NCCL_IB_DISABLE", value, Status.CHANGE, "remove it from the hosts file")
    if own["VLLM_HOST_IP"] != seen.host.spec.ip:
        value = f"it is {own['VLLM_HOST_IP']}, and this host's ip is {seen.host.spec.ip}"
        yield Finding(label, "VLLM_HOST_IP", value, Status.BROKEN, "remove it: every machine has its own")
    yield from _different(seen, own, others)


def _misspelt(label: str, own: dict[str, str]) -> Iterator[Finding]:
    for name in own:
        if name.startswith(PREFIXES) and name not in KNOWN:
            near = alike(name, KNOWN, near=0.9)
            if near:
                value = f"{name}={own[name]} is read by nobody: did you mean {near}?"
                yield Finding(label, name, value, Status.CHANGE, f"rename it to {near}, or remove it")


def _different(seen: Seen, own: dict[str, str], others: Sequence[Seen]) -> Iterator[Finding]:
    head = next(each for each in others if each.facts)
    first = environment_of(head)
    for name in SAME:
        if own.get(name) != first.get(name):
            a, b = own.get(name, "not set"), first.get(name, "not set")
            value = f"it is {a} on {seen.host.label} and {b} on {head.host.label}: ranks that differ in it wait forever"
            advice = "set it once, under [environment] at the top of the hosts file"
            yield Finding(seen.host.label, name, value, Status.BROKEN, advice)


def _unmatched(value: str, names: Iterable[str], exact: bool = False) -> str:
    """The first name that a variable asks for and that matches none. NCCL's names are prefixes, unless "=" leads them;
    "^" leads those that it leaves out; a port may follow after a colon."""
    if not value or value.startswith("^"):
        return ""
    exact = exact or value.startswith("=")
    for each in value.removeprefix("=").split(","):
        wanted = each.strip().partition(":")[0]
        if not any(name == wanted or (not exact and name.startswith(wanted)) for name in names):
            return wanted
    return ""
