"""What each rank runs: one `vllm serve` with the same flags on every machine, and the variables of its network."""

from __future__ import annotations

from typing import Any

from sparkdraft.bridges.cluster.hosts_file import Cluster, HostSpec
from sparkdraft.bridges.vllm.command import VllmCommand
from sparkdraft.core import UserError

TENSOR, PIPELINE = "tensor", "pipeline"
SIZES = {TENSOR: "tensor-parallel-size", PIPELINE: "pipeline-parallel-size"}


def rank_words(command: VllmCommand, cluster: Cluster, rank: int, parallel: str) -> list[str]:
    """command: of one machine."""
    count = len(cluster.hosts)
    flags: dict[str, Any] = {
        SIZES[parallel]: count,
        "distributed-executor-backend": "mp",
        "nnodes": count,
        "node-rank": rank,
        "master-addr": cluster.hosts[0].ip,
        "master-port": cluster.port,
    }
    taken = {*flags, "headless"} | set(SIZES.values())
    if given := [each.name for each in command.extra if each.name.removeprefix("--") in taken]:
        raise UserError(f"{given[0]} is set by the cluster: leave it out")
    words = command.words()
    for name, value in flags.items():
        words += [f"--{name}", str(value)]
    return [*words, "--headless"] if rank else words


def rank_environment(host: HostSpec, ready_seconds: float) -> dict[str, str]:
    """Derived from the hosts file; its own variables beat them."""
    found = {"VLLM_HOST_IP": host.ip, "VLLM_ENGINE_READY_TIMEOUT_S": f"{ready_seconds:.0f}"}
    if host.interfaces:
        found |= dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), host.interfaces[0])
    if host.rdma:
        found |= {"NCCL_IB_DISABLE": "0", "NCCL_IB_HCA": ",".join(host.rdma), "NCCL_IB_MERGE_NICS": "1"}
    else:
        found["NCCL_IB_DISABLE"] = "1"
    if host.gid_index is not None:
        found["NCCL_IB_GID_INDEX"] = str(host.gid_index)
    return found | dict(host.environment)
