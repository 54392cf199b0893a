"""Times an all-reduce between the machines with the network settings that the ranks will have."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sparkdraft.bridges.cluster.command import rank_environment
from sparkdraft.bridges.cluster.expect import Latency, shown_time
from sparkdraft.bridges.cluster.hosts_file import Cluster
from sparkdraft.bridges.cluster.node.allreduce import NO_TORCH
from sparkdraft.bridges.cluster.ranks import Job, Rank, end_ranks, start_ranks
from sparkdraft.bridges.cluster.survey import Seen
from sparkdraft.core import UserError

SECONDS = 120.0  # for all of it: importing torch, connecting, measuring
REPEATS = 20
LARGE = 64  # rows of the second size, from which the time per byte is known
POLL = 0.2


def measure(
    cluster: Cluster, seen: Sequence[Seen], row: int, folder: Path, say: Callable[[str], None], seconds: float = SECONDS
) -> Latency | None:
    """row: bytes of one row that is added up. None where no torch is installed on the machines; UserError where the
    machines cannot reduce together, because vLLM could not either."""
    hosts = [each.host for each in seen]
    jobs = []
    for each in seen:
        spec = {"rank": each.host.rank, "ranks": len(seen), "ip": cluster.hosts[0].ip, "port": cluster.port}
        spec |= {"sizes": [row, LARGE * row], "repeats": REPEATS, "seconds": seconds}
        python = each.facts["vllm"].get("python") or each.host.spec.python.removeprefix("~/")
        words = [python, each.host.code_folder, "allreduce", json.dumps(spec)]
        jobs.append(Job(words, rank_environment(each.host.spec, seconds), drain=2.0))
    ranks = start_ranks(hosts, jobs, cluster.silence_seconds, folder, say)
    try:
        _wait(ranks, seconds, cluster.silence_seconds)
        if all(each.ended and each.ended["status"] == NO_TORCH for each in ranks):
            return None
        if failed := next((each for each in ranks if each.is_over and each.process.returncode), None):
            raise UserError(f"{failed.host.label}: the all-reduce was not measured: {failed.why()}")
        return _latency(ranks[0], row, len(seen))
    finally:
        end_ranks(ranks, drain=False)


def _wait(ranks: Sequence[Rank], seconds: float, silence: float) -> None:
    """Until all are over, or one has failed."""
    deadline = time.monotonic() + seconds
    while not all(each.is_over for each in ranks):
        for each in ranks:
            each.beat()
            if each.is_over and each.process.returncode not in (0, NO_TORCH):
                return
            if not each.is_over and each.silent_seconds > silence:
                raise UserError(f"{each.host.label} has not been heard of for {silence:g} s during the measurement")
        if time.monotonic() > deadline:
            raise UserError(
                f"the machines could not add up one row in {seconds:g} s: check the addresses, firewalls and NCCL's "
                "variables (NCCL_DEBUG=INFO under [environment] says more in the logs)"
            )
        time.sleep(POLL)
    for each in ranks:
        each.why()  # all of its lines have come


def _latency(rank: Rank, row: int, machines: int) -> Latency:
    try:
        told = json.loads(next(line for line in reversed(rank.lines) if line.startswith('{"backend"')))
    except (StopIteration, ValueError):
        raise UserError(f"{rank.host.label}: the measurement of the all-reduce ended without a number") from None
    small, large = (told["seconds"][str(size)]["median"] for size in (row, LARGE * row))
    per_byte = max(large - small, 0.0) / ((LARGE - 1) * row)
    worst = told["seconds"][str(row)]["worst"]
    shown = f"{shown_time(small)} (worst {shown_time(worst)}) for {row / 1024:.0f} KB"
    origin = f"measured now between {machines} ranks: {shown}, {told['backend']}"
    return Latency(small - per_byte * row, per_byte, machines, origin)
