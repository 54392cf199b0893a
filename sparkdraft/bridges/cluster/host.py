"""Runs commands on a machine of the cluster: over ssh, or here, with one interface.

Commands are lines for a POSIX shell and begin in the home folder. ssh never asks for anything (BatchMode), gives up a
connection that is not made in time, and notices one that is dead.
"""

from __future__ import annotations

import io
import os
import shlex
import signal
import subprocess
import tarfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from sparkdraft.bridges.cluster.hosts_file import LOCAL, HostSpec
from sparkdraft.core import UserError

CONNECT_SECONDS = 10
OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": CONNECT_SECONDS,
    "ServerAliveInterval": 5,
    "ServerAliveCountMax": 3,
    "LogLevel": "ERROR",
}
NO_CONNECTION = 255  # ssh's own exit status
COPY_SECONDS = 30.0
NODE = Path(__file__).parent / "node"
MAIN = b"import sys\n\nfrom node.__main__ import main\n\nsys.exit(main())\n"
# What a refusal of ssh asks for, by a part of its text.
ADVICE = {
    "Permission denied": "give this user's key to it once: ssh-copy-id {0}",
    "Host key verification failed": "accept its key once: ssh {0}",
    "Could not resolve hostname": "correct the address in the hosts file",
    "REMOTE HOST IDENTIFICATION HAS CHANGED": "remove the old key if the machine is a new one: ssh-keygen -R {0}",
}


class Done(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        return (self.err.strip() or self.out.strip() or "it said nothing").splitlines()[-1]


@dataclass(frozen=True)
class Host:
    spec: HostSpec
    label: str
    rank: int
    run_name: str  # of the cluster

    @property
    def run_folder(self) -> str:
        return f"{self.spec.folder}/{self.run_name}/rank{self.rank}"

    def run(self, script: str, seconds: float, data: bytes = b"") -> Done:
        """Run a shell's line to its end. Raises UserError where the machine is not reached or the time is over."""
        process = self.start(script, stderr=subprocess.PIPE)
        try:
            out, err = process.communicate(data, timeout=seconds)
        except subprocess.TimeoutExpired:
            kill_group(process)
            process.communicate()
            raise UserError(f"{self.label} has not answered in {seconds:g} s: is it up, or overloaded?") from None
        done = Done(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))
        if done.status == NO_CONNECTION and self.spec.address != LOCAL:
            raise UserError(f"{self.label} cannot be reached over ssh ({done.last_line}): {self._advice(done.err)}")
        return done

    def start(self, script: str, stderr: int = subprocess.STDOUT) -> subprocess.Popen[bytes]:
        """The process of ssh, or of the command itself, with pipes. It leads a session, so that ctrl-c in a terminal
        does not reach it."""
        words = ["sh", "-c", script] if self.spec.address == LOCAL else [*ssh_words(), "--", self.spec.address, script]
        pipe = subprocess.PIPE
        try:
            return subprocess.Popen(
                words, stdin=pipe, stdout=pipe, stderr=stderr, cwd=Path.home(), start_new_session=True
            )
        except FileNotFoundError:
            raise UserError(f"`{words[0]}` is not installed here, and {self.label} is reached by it") from None

    def node_script(self, *words: str) -> str:
        """The line that runs a verb of node/ there; `install` must have copied it."""
        return f"exec {shlex.join([self.spec.python.removeprefix('~/'), self.code_folder, *words])}"

    def install(self) -> None:
        """Copy node/ to the machine, into a folder of its version. Raises UserError."""
        code = shlex.quote(self.code_folder)
        done = self.run(f"mkdir -p {code} && tar -xf - -C {code}", COPY_SECONDS, _archive())
        if done.status:
            raise UserError(
                f"{self.label}: the folder {self.spec.folder} cannot be written ({done.last_line}): free some space, "
                "or name another folder in the hosts file"
            )

    @property
    def code_folder(self) -> str:
        """From the home folder; Python runs it as a program. Each rank has its own, because two that unpack into one
        folder at once fail."""
        return f"{self.run_folder}/code-{sha256(_archive()).hexdigest()[:12]}"

    def _advice(self, errors: str) -> str:
        found = next((text for part, text in ADVICE.items() if part in errors), "is it up, and does `ssh {0}` work?")
        return found.format(self.spec.address)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def ssh_words() -> Sequence[str]:
    return ["ssh", "-T", *(f"-o{name}={value}" for name, value in OPTIONS.items())]


@cache
def _archive() -> bytes:
    """node/ as a tar file; the same bytes for the same files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        files = {f"node/{path.name}": path.read_bytes() for path in sorted(NODE.glob("*.py"))}
        for name, data in {"__main__.py": MAIN, **files}.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o644
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()
