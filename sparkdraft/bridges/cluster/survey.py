"""Looks at all machines at once: copies node/ there, runs its `look`, and compares the clocks."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from sparkdraft.bridges.cluster.host import Host
from sparkdraft.bridges.cluster.hosts_file import Cluster
from sparkdraft.core import UserError

LOOK_SECONDS = 160.0
GAP = 2.0  # seconds between two counts of a cable's errors


@dataclass(frozen=True)
class Seen:
    """What was found on a machine, or why nothing was."""

    host: Host
    facts: dict[str, Any] = field(default_factory=dict)
    problem: str = ""  # a sentence
    skew: float = 0.0  # seconds that its clock is ahead of this machine's
    skew_error: float = 0.0  # half of the time in which it may have been read


def hosts_of(cluster: Cluster) -> list[Host]:
    labels = cluster.labels()
    return [Host(spec, labels[i], i, cluster.name) for i, spec in enumerate(cluster.hosts)]


def survey(cluster: Cluster, ports: Sequence[int] = (), paths: Sequence[str] = (), gap: float = GAP) -> list[Seen]:
    """ports: that must be free on the first machine. paths: that must exist on each."""

    def one(host: Host) -> Seen:
        spec = {
            "vllm": host.spec.vllm,
            "ip": host.spec.ip,
            "interfaces": host.spec.interfaces,
            "rdma": host.spec.rdma,
            "run": host.run_folder,
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
    begin = time.time()
    done = host.run(host.node_script("look"), LOOK_SECONDS, json.dumps(spec).encode())
    end = time.time()
    try:
        facts = json.loads(done.out)
    except ValueError:
        raise UserError(
            f"{host.label}: `{host.spec.python}` cannot look at the machine ({done.last_line}): name a Python 3.10 or "
            "later as `python` in the hosts file"
        ) from None
    latest = end - facts["seconds"]  # it began between `begin` and this
    return Seen(host, facts, "", facts["time"] - (begin + latest) / 2, abs(latest - begin) / 2)
