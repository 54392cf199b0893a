"""Ends a run from outside: its supervisor by a signal, and what it may have left on the machines."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from sparkdraft.cluster.host import Host
from sparkdraft.cluster.hosts_file import Cluster
from sparkdraft.cluster.runs import DOWN, Run, read_state
from sparkdraft.cluster.survey import hosts_of
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
    lost = []
    for host in hosts_of(cluster):
        try:
            if left := sweep(host):
                say(f"note: {host.label}: {len(left)} processes had been left behind and were ended")
        except UserError as error:
            lost.append(str(error))
    if not lost:
        run = Run(cluster.name)
        run.state = replace(state, supervisor=[], phase=DOWN, since=time.time())
        run.write()
    return lost


def sweep(host: Host) -> list[int]:
    """End what earlier runs have left on a machine; returns the numbers of processes. Where nothing was ever started
    there is nothing to end."""
    done = host.run(host.node_script("end", host.run_folder), SWEEP_SECONDS)
    try:
        return list(json.loads(done.out)) if not done.status else []
    except ValueError:
        return []
