"""Keeps all ranks up: started together, watched together, restarted together.

A rank that ends, a machine that is not heard of, and a server that makes no token for too long have one answer: the
others wait in an all-reduce for ever, so all are ended and started again. A start that fails before it was ever ready
is not repeated: what is wrong then is wrong the next time too.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence

from sparkdraft.bridges.cluster.host import Host
from sparkdraft.bridges.cluster.hosts_file import Cluster
from sparkdraft.bridges.cluster.ranks import Job, Rank, end_ranks, start_ranks
from sparkdraft.bridges.cluster.runs import DOWN, ENDING, READY, RESTARTING, STARTING, Run
from sparkdraft.core import UserError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # that end it
BEAT = 0.5  # seconds
WRITE = 2.0  # seconds between two writings of the state
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 60.0  # before a restart: a Spark's memory is freed up to a minute after a process
ANSWER_SECONDS = 15.0  # for a machine to answer before a restart,
RETURN_SECONDS = 900.0  # and for one that does not to come back
WINDOW = 3600.0  # seconds in which restarts are counted


class Supervisor:
    def __init__(
        self,
        cluster: Cluster,
        hosts: Sequence[Host],
        jobs: Sequence[Job],
        run: Run,
        say: Callable[[str], None],
        first_pause: float = FIRST_PAUSE,
    ) -> None:
        self.cluster, self.hosts, self.jobs, self.run, self.say = cluster, hosts, jobs, run, say
        self.first_pause = first_pause
        self._told = threading.Event()  # by a signal, to end
        self._failures: list[float] = []
        self._was_ready = False

    def serve(self) -> None:
        """Until a signal. Raises UserError where it cannot start, or fails too often."""
        previous = {each: signal.signal(each, self._note) for each in SIGNALS}
        try:
            while (failure := self._serve_once()) and not self._told.is_set():
                self._count(failure)
            self.run.enter(DOWN)
        finally:
            for each, handler in previous.items():
                signal.signal(each, handler)

    def _note(self, number: int, frame: object) -> None:
        self._told.set()

    def _serve_once(self) -> str:
        """Start all ranks and watch them. Returns why they had to end; "" if a signal came."""
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
                written = time.monotonic()
                self._write(ranks)
            self._told.wait(BEAT)
        return ""

    def _failure(self, ranks: Sequence[Rank], begin: float) -> str:
        """What is wrong, in one sentence; the machine that was first to end is the one that is named."""
        cluster, head, now = self.cluster, ranks[0], time.monotonic()
        over = [each for each in ranks if each.is_over]
        if over:
            time.sleep(BEAT)  # the others may have ended too: a rank that was killed is the cause, not its victim
            over = [each for each in ranks if each.is_over]
            first = min(over, key=_blame)
            return f"rank {first.host.rank} on {first.host.label} ended: {first.why()}"
        for each in ranks:
            if each.silent_seconds > cluster.silence_seconds:
                silence = f"{cluster.silence_seconds:g} s"
                return f"{each.host.label} has not been heard of for {silence}: it hangs, or its network"
        if not head.ready and now - begin > cluster.ready_seconds:
            return f"the server was not ready after {cluster.ready_seconds:g} s (ready_seconds in the hosts file)"
        if head.ready and not head.blind and now - head.token > cluster.hang_seconds:
            return f"the server has made no token for {cluster.hang_seconds:g} s though it was asked for one: it hangs"
        return ""

    def _count(self, failure: str) -> None:
        """Wait before a restart, or give up."""
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
        pause = min(self.first_pause * 2 ** (len(self._failures) - 1), LONGEST_PAUSE)
        self.say(f"{failure}; all ranks are restarted together in {pause:g} s")
        self._told.wait(pause)
        for host in self.hosts:
            self._await(host)
        self.run.enter(STARTING)

    def _await(self, host: Host) -> None:
        """A machine that restarts is waited for. Raises UserError when that takes too long."""
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

    def _write(self, ranks: Sequence[Rank]) -> None:
        now = time.time()
        self.run.state.heard = [round(now - each.silent_seconds, 1) for each in ranks]
        self.run.state.pids = [each.pid for each in ranks]
        self.run.write()


def _blame(rank: Rank) -> int:
    """A rank whose machine said nothing at its end comes first, then one that was killed, then one that failed."""
    if rank.ended is None:
        return 0
    return 1 if rank.ended["status"] < 0 else 2
