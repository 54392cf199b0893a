"""The folder of a cluster's run on the machine of its supervisor: its state and every rank's log. `status` and `down`
read it; only the supervisor writes it."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sparkdraft.bridges.cluster.node.processes import identity, runs
from sparkdraft.core import UserError
from sparkdraft.weights.hub import cache_dir

STARTING, READY, RESTARTING, ENDING, DOWN, FAILED = "starting", "ready", "restarting", "ending", "down", "failed"


@dataclass
class State:
    name: str
    phase: str = STARTING
    supervisor: list[int] = field(default_factory=list)  # its number and time of start
    url: str = ""
    model: str = ""
    parallel: str = ""
    since: float = 0.0  # when the phase began
    heard: list[float] = field(default_factory=list)  # of each rank, as a time of day
    pids: list[int] = field(default_factory=list)  # of each rank, on its machine
    restarts: list[str] = field(default_factory=list)  # why
    error: str = ""  # why it failed
    only: str = ""  # the one machine that reaches the URL, where it is not this one

    @property
    def address(self) -> str:
        """Of the API, for people."""
        return f"{self.url}/v1{f' (on {self.only} only)' if self.only else ''}"

    @property
    def is_supervised(self) -> bool:
        return runs(self.supervisor)


def run_folder(name: str) -> Path:
    return cache_dir() / "cluster" / name


def read_state(name: str) -> State | None:
    """None if there has been no run."""
    path = run_folder(name) / "state.json"
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return State(**data)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}): delete it if no cluster of this name runs") from None


class Run:
    """The writer's side."""

    def __init__(self, name: str, model: str = "", parallel: str = "", url: str = "", only: str = "") -> None:
        """Raises UserError if such a cluster is up already."""
        self.check_free(name)
        self.folder = run_folder(name)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.folder} cannot be made: {error.strerror}; set SPARKDRAFT_CACHE") from None
        self.state = State(name, STARTING, identity(os.getpid()), url, model, parallel, time.time(), only=only)
        self.write()

    @staticmethod
    def check_free(name: str) -> None:
        old = read_state(name)
        if old and old.is_supervised:
            raise UserError(
                f"cluster {name} is up already ({old.phase}, process {old.supervisor[0]}): `sparkdraft cluster status` "
                "shows it and `sparkdraft cluster down` ends it"
            )

    def enter(self, phase: str, **changes: Any) -> None:
        self.state.phase, self.state.since = phase, time.time()
        for name, value in changes.items():
            setattr(self.state, name, value)
        self.write()

    def write(self) -> None:
        new = self.folder / "state.new"
        with suppress(OSError):  # a full disk does not end a server
            new.write_text(json.dumps(asdict(self.state), indent=1), encoding="utf-8")
            os.replace(new, self.folder / "state.json")
