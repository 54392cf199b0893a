"""Ends a run from outside: its supervisor by a signal, and what it may have left on the machines."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from sparkdraft.bridges.cluster.host import Host
from sparkdraft.bridges.cluster.hosts_file import Cluster
from sparkdraft.bridges.cluster.runs import DOWN, Run, read_state
from sparkdraft.bridges.cluster.survey import hosts_of
from sparkdraft.core import UserError

PATIENCE = 180.0  # seconds for requests to finish and for all ranks to end
SWEEP_SECONDS = 30.0


def end_run(cluster: Cluster, say: Callable[[str], None], patience: float = PATIENCE) -> list[str]:
    """Returns a sentence per machine that could not be asked. Does nothing where nothing runs."""
    state = read_state(cluster.name)
    if state is None or (state.phase == DOWN and not state.is_supervised):
        return []
    if state.is_supervised:
        os.kill(state.supervisor[0], signal.SIGTERM)
        deadline = time.monotonic() + patience
        while state.is_supervised and time.monotonic() < deadline:
            time.sleep(0.1)
        if state.is_supervised:
            say(f"note: the supervisor did not end in {patience:g} s and is killed")
            with suppress(ProcessLookupError):
                os.kill(state.supervisor[0], signal.SIGKILL)
            while state.is_supervised:
                time.sleep(0.05)
    lost = sweep_all(hosts_of(cluster), say)
    if not lost:
        run = Run(cluster.name)
        run.state = replace(state, supervisor=[], phase=DOWN, since=time.time())
        run.write()
    return lost


def sweep_all(hosts: Sequence[Host], say: Callable[[str], None], verb: str = "end") -> list[str]:
    """End what earlier runs have left on all machines; returns a sentence for each where that is not known. verb: end,
    or clear, which leaves what another supervisor may have started."""

    def one(host: Host) -> str:
        try:
            if left := sweep(host, verb):
                say(f"note: {host.label}: {len(left)} processes of an earlier run were ended")
            return ""
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(len(hosts)) as pool:
        return [each for each in pool.map(one, hosts) if each]


def sweep(host: Host, verb: str) -> list[int]:
    """Returns the numbers of the processes that were ended. Raises UserError."""
    script = host.node_script(verb, host.run_folder)
    done = host.run(script, SWEEP_SECONDS)
    if done.status:  # an earlier version was copied there, or nothing yet
        host.install()
        done = host.run(script, SWEEP_SECONDS)
    try:
        return list(json.loads(done.out))
    except ValueError:
        raise UserError(
            f"{host.label}: what an earlier run left there cannot be ended ({done.last_line}): does "
            f"`{host.spec.python}` run there?"
        ) from None
