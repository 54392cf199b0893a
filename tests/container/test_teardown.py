"""A container of the image's test ends with the process that started it, however that ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.container.built import NAMESPACES, START, TOOLS, remove
from tests.patience import PATIENT

USED = [name for name in TOOLS if name not in ("buildah", "debootstrap", "nsenter")]
PARENT = """
import subprocess, sys, time
outer = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True)
print(outer.pid, outer.stdout.readline().strip(), flush=True)
time.sleep(600)
"""


def runs(pid: int) -> bool:
    """A zombie counts as gone: only its parent can wait for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.skipif(os.geteuid() != 0 or not all(map(shutil.which, USED)), reason="it takes root and util-linux")
def test_nothing_is_left_behind_by_a_test_that_is_killed() -> None:
    """As `Container` starts the server, with another program in its place and this machine's root."""
    if subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces here")
    server = ("PATH=/usr/bin:/bin", "sh", "-c", "echo up; exec sleep 600")
    command = [sys.executable, "-c", PARENT, *NAMESPACES, "sh", "-c", START.splitlines()[-1], "sh", *server]
    environ = os.environ | {"ROOT": "/", "USERSPEC": "10001:10001"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as parent:
        assert parent.stdout
        outer, said = parent.stdout.readline().split()
        inside = [int(each) for each in Path(f"/proc/{outer}/task/{outer}/children").read_text().split()]
        assert said == "up" and len(inside) == 1 and all(map(runs, [int(outer), *inside]))
        parent.kill()
    deadline = time.monotonic() + PATIENT
    while (left := [pid for pid in (int(outer), *inside) if runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "a process was left behind"


@pytest.mark.skipif(os.geteuid() != 0, reason="it takes root: mounts")
def test_a_build_that_was_broken_off_leaves_no_mount(tmp_path: Path) -> None:
    folder, other = tmp_path / "image", tmp_path / "image-of-another"
    inner = folder / "storage" / "inner"
    inner.mkdir(parents=True)
    other.mkdir()
    (other / "kept").touch()
    if subprocess.run(["mount", "--bind", other, folder / "storage"], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    remove(folder)
    assert not folder.exists() and (other / "kept").exists()
    assert str(folder) not in Path("/proc/mounts").read_text()
