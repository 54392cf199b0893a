"""Keeps all ranks of a cluster up, writes their state to a folder on this machine, and ends a run from outside.

A rank that ends, a machine without heartbeats and a server that makes no token for too long get one answer: all ranks
are ended and restarted, because the others would wait in an all-reduce for ever. A start that fails before the server
was ever ready is not repeated. `status` and `down` read the state; only the supervisor writes it.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sparkdraft.bridges.cluster.hosts import Cluster, Host
from sparkdraft.bridges.cluster.node.processes import identity, runs
from sparkdraft.bridges.cluster.ranks import Job, Rank, end_ranks, start_ranks
from sparkdraft.core import UserError
from sparkdraft.util.files import write_whole
from sparkdraft.weights.hub import cache_dir

STARTING, READY, RESTARTING, ENDING, DOWN, FAILED = "starting", "ready", "restarting", "ending", "down", "failed"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # signals that end the supervisor
BEAT = 0.5  # seconds between heartbeats
WRITE = 2.0  # seconds between updates of the state file
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 60.0  # before a restart: a Spark frees memory up to a minute after a process ended
ANSWER_SECONDS = 15.0  # for a machine to answer before a restart
RETURN_SECONDS = 900.0  # for a machine that does not answer to come back
WINDOW = 3600.0  # seconds in which restarts are counted
PATIENCE = 180.0  # seconds for requests to finish and all ranks to end


@dataclass
class State:
    name: str
    phase: str = STARTING
    supervisor: list[int] = field(default_factory=list)  # process id and start time
    model: str = ""
    address: str = ""  # of the API, to print
    since: float = 0.0  # when the phase began
    heard: list[float] = field(default_factory=list)  # of each rank, as Unix time
    pids: list[int] = field(default_factory=list)  # of each rank, on its machine
    restarts: list[str] = field(default_factory=list)  # why
    error: str = ""  # why it failed

    @property
    def is_supervised(self) -> bool:
        return runs(self.supervisor)


def run_folder(name: str) -> Path:
    return cache_dir() / "cluster" / name


def read_state(name: str) -> State | None:
    """Returns None if there was no run."""
    path = run_folder(name) / "state.json"
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return State(**data)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}): delete it if no cluster of this name runs") from None


class Run:
    """The state as the supervisor writes it."""

    def __init__(self, name: str, model: str = "", address: str = "") -> None:
        """Raises UserError if such a cluster is up already."""
        old = read_state(name)
        if old and old.is_supervised:
            raise UserError(
                f"cluster {name} is up already ({old.phase}, process {old.supervisor[0]}): `sparkdraft cluster status` "
                "shows it and `sparkdraft cluster down` ends it"
            )
        self.folder = run_folder(name)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.folder} cannot be made: {error.strerror}; set SPARKDRAFT_CACHE") from None
        self.state = State(name, STARTING, identity(os.getpid()), model, address, time.time())
        self.write()

    def enter(self, phase: str, error: str = "") -> None:
        self.state.phase, self.state.since, self.state.error = phase, time.time(), error
        self.write()

    def write(self) -> None:
        with suppress(OSError):  # a full disk must not end a server
            write_whole(self.folder / "state.json", json.dumps(asdict(self.state), indent=1))


class Supervisor:
    def __init__(
        self, cluster: Cluster, hosts: Sequence[Host], jobs: Sequence[Job], run: Run, say: Callable[[str], None]
    ) -> None:
        self.cluster, self.hosts, self.jobs, self.run, self.say = cluster, hosts, jobs, run, say
        self._told = threading.Event()  # set by a signal
        self._failures: list[float] = []
        self._was_ready = False

    def serve(self) -> None:
        """Serves until a signal. Raises UserError if it cannot start or fails too often."""
        previous = {each: signal.signal(each, lambda number, frame: self._told.set()) for each in SIGNALS}
        try:
            while (failure := self._serve_once()) and not self._told.is_set():
                self._count(failure)
            self.run.enter(DOWN)
        finally:
            for each, handler in previous.items():
                signal.signal(each, handler)

    def _serve_once(self) -> str:
        """Starts all ranks and watches them. Returns why they had to end, or "" after a signal."""
        ranks: list[Rank] = []
        failure = ""
        try:
            ranks = start_ranks(self.hosts, self.jobs, self.cluster.silence_seconds, self.run.folder, self.say)
            failure = self._watch(ranks)
        finally:
            if not failure:
                self.run.enter(ENDING)
            lost = end_ranks(ranks, drain=not failure)
            for label in lost:
                self.say(
                    f"note: {label} does not answer; the rank there ends by itself within "
                    f"{self.cluster.silence_seconds:g} s of silence"
                )
        return failure

    def _watch(self, ranks: Sequence[Rank]) -> str:
        begin = written = time.monotonic()
        is_ready, head = False, ranks[0]
        while not self._told.is_set():
            for each in ranks:
                each.beat()
            if failure := self._failure(ranks, begin):
                return failure
            if head.ready and not is_ready:
                is_ready = self._was_ready = True
                self.run.enter(READY)
                self.say(f"ready after {head.ready - begin:.1f} s: {self.run.state.address}, {len(ranks)} machines")
            if time.monotonic() - written > WRITE:
                written, now = time.monotonic(), time.time()
                self.run.state.heard = [round(now - each.silent_seconds, 1) for each in ranks]
                self.run.state.pids = [each.pid for each in ranks]
                self.run.write()
            self._told.wait(BEAT)
        return ""

    def _failure(self, ranks: Sequence[Rank], begin: float) -> str:
        """Returns what is wrong, or "". Names the rank that caused it if several have ended."""
        cluster, head, now = self.cluster, ranks[0], time.monotonic()
        over = [each for each in ranks if each.is_over]
        if over:
            time.sleep(BEAT)  # others may have ended too, and the cause must be told from its victims
            over = [each for each in ranks if each.is_over]
            first = min(over, key=_blame)
            return f"rank {first.host.rank} on {first.host.label} ended: {first.why()}"
        for each in ranks:
            if each.silent_seconds > cluster.silence_seconds:
                silence = f"{cluster.silence_seconds:g} s"
                return f"{each.host.label} has not been heard of for {silence}: it hangs, or its network"
        if not head.ready and now - begin > cluster.ready_seconds:
            return f"the server was not ready after {cluster.ready_seconds:g} s (ready_seconds in the hosts file)"
        if head.ready and now - head.token > cluster.hang_seconds:
            return f"the server has made no token for {cluster.hang_seconds:g} s though it was asked for one: it hangs"
        return ""

    def _count(self, failure: str) -> None:
        """Waits before a restart, or gives up."""
        state = self.run.state
        if not self._was_ready:
            raise UserError(f"the cluster did not start: {failure} (logs: {self.run.folder})")
        now = time.monotonic()
        self._failures = [each for each in self._failures if now - each < WINDOW] + [now]
        if len(self._failures) > self.cluster.restarts:
            raise UserError(
                f"all ranks were restarted {self.cluster.restarts} times within an hour, and failed again: {failure} "
                f"(logs: {self.run.folder})"
            )
        state.restarts.append(failure)
        self.run.enter(RESTARTING)
        pause = min(FIRST_PAUSE * 2 ** (len(self._failures) - 1), LONGEST_PAUSE)
        self.say(f"{failure}; all ranks are restarted together in {pause:g} s")
        self._told.wait(pause)
        for host in self.hosts:
            self._await(host)
        self.run.enter(STARTING)

    def _await(self, host: Host) -> None:
        """Waits for a machine that reboots. Raises UserError if that takes too long."""
        begin, is_said = time.monotonic(), False
        while not self._told.is_set():
            try:
                host.run("true", ANSWER_SECONDS)
                return
            except UserError as error:
                if time.monotonic() - begin > RETURN_SECONDS:
                    raise UserError(f"{error} (waited for {RETURN_SECONDS / 60:.0f} minutes)") from None
                if not is_said:
                    self.say(f"waits for {host.label}: {error}")
                is_said = True
                self._told.wait(FIRST_PAUSE)


def _blame(rank: Rank) -> int:
    """Sort key of the likely cause: a lost connection first, then a killed rank, then a failed one."""
    if rank.ended is None:
        return 0
    return 1 if rank.ended["status"] < 0 else 2


def end_run(cluster: Cluster, say: Callable[[str], None]) -> None:
    """Ends a run if there is one. Ranks whose supervisor is gone end by themselves."""
    state = read_state(cluster.name)
    if state is None or (state.phase == DOWN and not state.is_supervised):
        return
    is_orphaned = not state.is_supervised and state.phase != FAILED
    if state.is_supervised:
        os.kill(state.supervisor[0], signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE
        while state.is_supervised and time.monotonic() < deadline:
            time.sleep(0.1)
    if state.is_supervised:
        say(f"note: the supervisor did not end in {PATIENCE:g} s and is killed")
        is_orphaned = True
        with suppress(ProcessLookupError):
            os.kill(state.supervisor[0], signal.SIGKILL)
        while state.is_supervised:
            time.sleep(0.05)
    if is_orphaned:
        say(f"note: ranks end by themselves after {cluster.silence_seconds:g} s without their supervisor")
    run = Run(cluster.name)
    run.state.supervisor = []  # it is not this process
    run.enter(DOWN)
