"""The CPU image, built from the Dockerfile by buildah on a base that debootstrap makes, and a container of it: a root
that is read-only, the image's user, its environment and command, and namespaces of its own for mounts and processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.patience import PATIENT

ROOT = Path(__file__).parents[2]
SUITE, PYTHON = "bookworm", "3.11"  # Debian's suite for the base, and the Python in it
MIRROR = "http://deb.debian.org/debian"
SWITCH = "SPARKDRAFT_IMAGE_TEST"  # a variable: the test fetches 400 MB and takes minutes
TOOLS = ("buildah", "debootstrap", "unshare", "nsenter", "chroot", "setpriv")
INSTALL = "apt-get install -y --no-install-recommends buildah debootstrap"
# Namespaces of its own, and killed when the process that starts it ends, however that ends.
NAMESPACES = ("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child")
# As a runtime does it: /proc and /sys, a tmpfs for /tmp, the volume, and then a root that nobody can write to.
START = """set -e
mount --make-rprivate /
mount --bind "$ROOT" "$ROOT"
mount --bind "$CACHE" "$ROOT/cache"
mount -t tmpfs -o nosuid,nodev,noexec,mode=1777 tmpfs "$ROOT/tmp"
mount -t proc proc "$ROOT/proc"
mount -t sysfs -o ro sysfs "$ROOT/sys"
mount --rbind /dev "$ROOT/dev"
mount -o remount,bind,ro "$ROOT"
exec chroot --userspec="$USERSPEC" "$ROOT" setpriv --pdeathsig KILL /usr/bin/env -i "$@"
"""  # setpriv after chroot: a change of user takes the death of `unshare` out of what the server is told


def unavailable() -> str:
    """Why no image is built here, with what to do about it; empty if one is."""
    if os.environ.get(SWITCH) != "1":
        return f"the image is built and run where {SWITCH}=1 is set"
    if missing := [name for name in TOOLS if not shutil.which(name)]:
        return f"{', '.join(missing)} missing: {INSTALL}"
    if os.geteuid():
        return "it takes root: debootstrap and mounts"
    allowed = subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True)
    return f"no namespaces here: {allowed.stderr.strip()}" if allowed.returncode else ""


class Image:
    """Built in `folder`, where its layers stay."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        overlay = "overlay" in Path("/proc/filesystems").read_text()  # vfs, which works everywhere, copies every layer
        self._environ = os.environ | {"BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "overlay" if overlay else "vfs"}
        with ThreadPoolExecutor() as pool:  # one waits for Debian's servers, the other for an index of packages
            fetched = pool.submit(_wheels, folder / "wheels")
            self._base()
            wheels = fetched.result()
        volume, pip = f"{wheels}:/wheels:ro", "PIP_ARGS=--no-index --find-links /wheels"
        arguments = ("--build-arg", "BASE=localhost/base", "--build-arg", pip)
        self.buildah("build", "--format", "docker", *arguments, "--volume", volume, "-t", "localhost/image", str(ROOT))
        self.config: dict[str, Any] = json.loads(self.buildah("inspect", "--type", "image", "localhost/image"))
        self.config = self.config["Docker"]["config"]

    def buildah(self, *words: str) -> str:
        places = ("--root", str(self.folder / "storage"), "--runroot", str(self.folder / "run"))
        return _run("buildah", *places, *words, env=self._environ)

    def _base(self) -> None:
        name = self.buildah("from", "scratch")
        place = self.buildah("mount", name)
        _run("debootstrap", "--variant=minbase", SUITE, place, MIRROR, env=self._environ)
        for path in Path(place, "var/cache/apt/archives").glob("*.deb"):
            path.unlink()
        self.buildah("commit", "--quiet", "--rm", name, "localhost/base")

    def mounted(self) -> Path:
        """The root of a new container."""
        return Path(self.buildah("mount", self.buildah("from", "localhost/image")))


def remove(folder: Path) -> None:
    """What a build, whole or not, leaves in its folder: mounts, and a gigabyte and a half that pytest would keep for
    three runs."""
    places = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for place in sorted((place for place in places if Path(place).is_relative_to(folder)), reverse=True):
        _run("umount", place)
    _run("rm", "-rf", str(folder))


class Container:
    """Runs the image's own command with more variables, as the first process of its namespace."""

    def __init__(self, image: Image, cache: Path, **environ: str) -> None:
        self.root, self.user = image.mounted(), image.config["User"]
        variables = [*image.config["Env"], *(f"{name}={value}" for name, value in environ.items())]
        self._environ = variables
        command = [*image.config["Entrypoint"], *image.config["Cmd"]]
        shell = {"ROOT": str(self.root), "CACHE": str(cache), "USERSPEC": self.user}
        self.log = (image.folder / "log").open("w+")
        self.outer = subprocess.Popen(
            [*NAMESPACES, "sh", "-c", START, "sh", *variables, *command], env=os.environ | shell, stderr=self.log
        )

    @property
    def pid(self) -> int:
        """Of the server, seen from outside: the child of `unshare`, which becomes the server by exec."""
        children = Path(f"/proc/{self.outer.pid}/task/{self.outer.pid}/children")
        for _ in range(100):
            if found := children.read_text().split():
                return int(found[0])
            time.sleep(0.1)
        raise AssertionError(self.said())

    def run(self, *words: str, user: str = "") -> subprocess.CompletedProcess[str]:
        """A second process in it, as `docker exec` has it."""
        inside = ("nsenter", "--target", str(self.pid), "--mount", "--pid")
        change = ("chroot", f"--userspec={user or self.user}", str(self.root), "/usr/bin/env", "-i", *self._environ)
        return subprocess.run([*inside, *change, *words], capture_output=True, text=True, timeout=PATIENT)

    def said(self) -> str:
        return Path(self.log.name).read_text()

    def end(self) -> None:
        self.outer.kill()  # what runs inside ends with it
        self.outer.wait()
        self.log.close()


def torch_pin() -> str:
    found = re.search(r"^ARG TORCH=(\S+)$", (ROOT / "Dockerfile").read_text(), re.M)
    assert found
    return found[1]


def _wheels(folder: Path) -> Path:
    """What the image installs, by this machine's pip, whose index and cache may be its own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [torch_pin(), *project["project"]["dependencies"], *project["build-system"]["requires"]]
    pip = (
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--dest",
        str(folder),
        "-c",
        str(ROOT / "constraints.txt"),
    )
    _run(*pip, "--only-binary=:all:", "--python-version", PYTHON, *wanted)
    return folder


def _run(*command: str, env: dict[str, str] | None = None) -> str:
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result.stdout.strip()
