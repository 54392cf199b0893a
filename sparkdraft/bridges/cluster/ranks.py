"""One `vllm serve` per machine with the same flags: its command and environment, and its process under node/keep.py.

Secrets travel on standard input, not on a command line. Closing that input, or being killed, ends the ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkdraft.bridges.cluster.hosts import Cluster, Host, HostSpec, kill_group
from sparkdraft.bridges.cluster.node.keep import EVENT
from sparkdraft.bridges.vllm.command import VllmCommand
from sparkdraft.core import UserError

MOST_BYTES = 64 << 20  # of a log, which is then renamed to .1, replacing an older one
LAST_LINES = 30
SILENT_SECONDS = 5.0  # a machine that was silent for so long is not waited for
END_SECONDS = 10.0  # after the drain until ssh is killed; the machine's own timer then ends the rank


def rank_words(command: VllmCommand, cluster: Cluster, rank: int) -> list[str]:
    """Adds the flags of a rank to the command for one machine."""
    count = len(cluster.hosts)
    flags: dict[str, Any] = {
        "tensor-parallel-size": count,
        "distributed-executor-backend": "mp",
        "nnodes": count,
        "node-rank": rank,
        "master-addr": cluster.hosts[0].ip,
        "master-port": cluster.port,
    }
    taken = {*flags, "headless", "pipeline-parallel-size"}
    if given := [each.name for each in command.extra if each.name.removeprefix("--") in taken]:
        raise UserError(f"{given[0]} is set by the cluster: leave it out")
    words = command.words()
    for name, value in flags.items():
        words += [f"--{name}", str(value)]
    return [*words, "--headless"] if rank else words


def rank_environment(host: HostSpec, ready_seconds: float) -> dict[str, str]:
    """The variables of a rank's network, derived from the hosts file, whose own variables override them."""
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


@dataclass(frozen=True)
class Job:
    words: Sequence[str]
    environ: dict[str, str] = field(repr=False)
    drain: float = 5.0  # seconds it has to end
    watch: dict[str, Any] | None = field(default=None, repr=False)  # spec of node/keep.py's `watch`, for a server

    def spec(self, silence: float) -> bytes:
        told = {"words": self.words, "environ": self.environ, "drain": self.drain, "silence": silence}
        return json.dumps({**told, "watch": self.watch}).encode() + b"\n"


class Log:
    """A log that is cut when it grows. A full disk ends the log but not the server."""

    def __init__(self, path: Path, most: int = MOST_BYTES) -> None:
        self.path, self.most, self.problem = path, most, ""

    def write(self, line: bytes) -> str:
        """Returns a sentence once, when the log can no longer be written."""
        if self.problem:
            return ""
        try:
            with open(self.path, "ab") as file:
                file.write(line)
                size = file.tell()
            if size > self.most:
                os.replace(self.path, f"{self.path}.1")
        except OSError as error:
            self.problem = f"the log {self.path} is no longer written: {error.strerror}"
        return self.problem


class Rank:
    """One rank. `heard` and `token` are monotonic times."""

    def __init__(self, host: Host, job: Job, silence: float, log: Log, say: Callable[[str], None]) -> None:
        self.host, self.job, self.log = host, job, log
        self.pid = 0
        self.ready = self.token = 0.0
        self.ended: dict[str, Any] | None = None  # its event: status and reason
        self.lines: deque[str] = deque(maxlen=LAST_LINES)
        self.heard = time.monotonic()
        self._say = say
        self.process = host.start(host.node_script("keep", host.run_folder))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._send(job.spec(silence))

    def beat(self) -> None:
        self._send(b".")

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    @property
    def silent_seconds(self) -> float:
        return time.monotonic() - self.heard

    def tell_to_end(self) -> None:
        if self.process.stdin:
            with suppress(OSError):
                self.process.stdin.close()

    def wait(self, seconds: float) -> bool:
        """Returns whether it ended in time. If not, ssh is killed; the machine's own timer ends the rank there."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            kill_group(self.process)
            self.process.wait()
            return False
        finally:
            self._reader.join(2.0)
        return True

    def why(self) -> str:
        """Describes how the rank ended."""
        self._reader.join(2.0)
        if self.ended is None:
            return f"the connection to it ended (status {self.process.returncode})" + self._last()
        if self.ended["why"]:
            return str(self.ended["why"])
        status = self.ended["status"]
        ended = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"its process {ended}" + self._last()

    def _last(self) -> str:
        return f"; its last line was: {self.lines[-1]}" if self.lines else ""

    def _send(self, data: bytes) -> None:
        if self.process.stdin and not self.process.stdin.closed:
            with suppress(OSError):
                self.process.stdin.write(data)
                self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.heard = time.monotonic()
            if line.startswith(EVENT):
                with suppress(ValueError):
                    self._note(json.loads(line[1:]))
            else:
                if problem := self.log.write(line):
                    self._say(f"note: {self.host.label}: {problem}")
                if text := line.decode(errors="replace").strip():
                    self.lines.append(text)

    def _note(self, event: dict[str, Any]) -> None:
        name, now = event["event"], time.monotonic()
        if name == "started":
            self.pid = event["pid"]
        elif name == "ready":
            self.ready = self.token = now
        elif name == "token":
            self.token = now
        elif name == "ended":
            self.ended = event


def start_ranks(
    hosts: Sequence[Host], jobs: Sequence[Job], silence: float, folder: Path, say: Callable[[str], None]
) -> list[Rank]:
    """Starts all ranks; if one cannot start, the others are ended."""
    ranks: list[Rank] = []
    try:
        for host, job in zip(hosts, jobs, strict=True):
            ranks.append(Rank(host, job, silence, Log(folder / f"rank{host.rank}.log"), say))
    except BaseException:
        end_ranks(ranks, drain=False)
        raise
    return ranks


def end_ranks(ranks: Sequence[Rank], drain: bool) -> list[str]:
    """Ends all ranks; returns the labels of machines that did not answer. drain: the head ends first, because it
    needs the others to finish its requests."""
    first, rest = (ranks[:1], ranks[1:]) if drain else ((), ranks)
    lost = []
    for group in (first, rest):
        for each in group:
            each.tell_to_end()
        for each in group:
            is_lost = each.silent_seconds > SILENT_SECONDS
            deadline = time.monotonic() + (SILENT_SECONDS if is_lost else each.job.drain + END_SECONDS)
            while not each.is_over and time.monotonic() < deadline:
                for other in rest if group is first else ():
                    other.beat()
                time.sleep(0.05)
            if not each.wait(0.1):
                lost.append(each.host.label)
    return lost
