"""Repositories of the Hugging Face hub: what of them is in the local cache, and fetching them whole.

The cache's layout is the hub library's own, so that other programs' downloads count: blobs/ holds each file under its
hash (SHA-256 of large files, git's SHA-1 of small ones), snapshots/COMMIT/ links to them. So a fetched file is verified
by its own name. The library forgets a file that was interrupted, which may be 5 GB. So large files are fetched here,
into blobs/HASH.incomplete, from which the next attempt continues. The library then adds the small ones and the links.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdraft.core import UserError
from sparkdraft.util.progress import Meter, progress
from sparkdraft.weights import hub

if TYPE_CHECKING:
    import httpx

# Only what we read: no pickles, no tensors of other frameworks, nothing from subfolders (onnx/, original/).
ALLOW = ["*.json", "*.safetensors", "*.jinja"]
IGNORE = ["*/*", "consolidated*"]
POLL_S = 0.5
AT_ONCE = 4  # large files that are fetched together
ATTEMPTS = 5  # at a connection that brings nothing
CHUNK = 1 << 20
PARTIAL = 206  # the status of an answer that begins where it was asked to
SHA256, SHA1 = 64, 40  # letters of a hash


def cached_snapshot(repo: str) -> Path | None:
    """The folder of a repository whose config and weights are all in the local cache. Asks no network."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repo, "config.json")
    folder = Path(config).parent if isinstance(config, str) else None
    return folder if folder and not missing(folder) else None


def missing(folder: Path) -> list[str]:
    """The weight files that a snapshot should hold and does not."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            return [index.name]
        return [name for name in files if not (folder / name).is_file()]
    return [] if any(folder.glob("*.safetensors")) else ["model.safetensors"]


def fetch_config(repo: str, beside: Sequence[str] = ()) -> Path:
    """config.json, and those of the files beside it that the repository has: a few kilobytes. Returns their folder,
    from the local cache when the hub cannot be reached. Raises UserError."""
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
    """Fetch what we read of a repository, continue what was interrupted, and verify it. Returns its folder.

    file: of a repository of GGUF files, the one that is wanted; its path is returned.
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
        _check_room(repo, total - _size_of(blobs), Path(HF_HUB_CACHE))
        blobs.mkdir(parents=True, exist_ok=True)
        with progress(f"fetching {repo}", unit="MB") as meter, _watching(meter, blobs, total):
            large = [(hf_hub_url(repo, f.rfilename, revision=info.sha), f.lfs) for f in files if f.lfs]
            _fetch_all([(url, blobs / each.sha256, each.size) for url, each in large])
            disable_progress_bars()  # one bar, for all files, is drawn already
            allow, ignore = ([file], []) if file else (ALLOW, IGNORE)
            folder = Path(snapshot_download(repo, allow_patterns=allow, ignore_patterns=ignore))
    if damaged := verify(folder):
        for path in damaged:
            path.resolve().unlink()
        raise UserError(f"{', '.join(p.name for p in damaged)} of {repo} is damaged and was removed: run this again.")
    if file:
        return folder / file
    if lacking := missing(folder):
        raise UserError(f"{repo} has no {', '.join(lacking)}: only safetensors are read; pull a repository with them.")
    return folder


def _fetch_all(files: list[tuple[str, Path, int]]) -> None:
    """Several at once. If the user stops the command, all end at once; what came of them is kept. If one fails, the
    others are fetched first."""
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
    """Fetch one file into the cache, from where an earlier attempt ended. blob: named by the SHA-256 of its content.
    stop: once it is set, nothing more is read."""
    from httpx import TransportError
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    part, failed = blob.with_name(f"{blob.name}.incomplete"), 0
    with hub.lock(blob.with_name(f"{blob.name}.lock")):
        while not blob.exists() and not (stop and stop.is_set()):
            done = part.stat().st_size if part.exists() else 0
            if done < size:
                headers = build_hf_headers() | ({"Range": f"bytes={done}-"} if done else {})
                try:
                    with get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
                        hf_raise_for_status(response)
                        _write(response, part, "ab" if response.status_code == PARTIAL else "wb", stop)
                except TransportError:
                    # A connection that breaks is taken up again as long as each attempt brings something.
                    failed = 0 if part.exists() and part.stat().st_size > done else failed + 1
                    if failed == ATTEMPTS:
                        raise
                continue
            if hub.sha256_of(part) != blob.name:
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


def verify(folder: Path) -> list[Path]:
    """The files of a snapshot whose content does not have the hash that it was fetched under."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    with progress(f"verifying {folder.parent.parent.name.removeprefix('models--').replace('--', '/')}") as report:
        damaged = []
        for done, path in enumerate(files, 1):
            if not _is_whole(path):
                damaged.append(path)
            report(done, len(files))
    return damaged


@contextmanager
def explained(repo: str) -> Iterator[None]:
    """The hub library's errors as one sentence each."""
    from httpx import HTTPError
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        raise UserError(
            f"The hub model {repo} asks for a licence: accept it on its page, then `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"The hub has no model {repo} that you may read, and there is no such folder here: check the name."
        ) from error
    except LocalEntryNotFoundError as error:
        raise UserError(
            f"{repo} is neither a folder here nor in the local hub cache, and the hub cannot be reached: connect to a "
            f"network, or pass a folder, a .gguf file or a known name ({', '.join(sorted(hub.KNOWN))})."
        ) from error
    except (HfHubHTTPError, OSError, HTTPError) as error:
        if getattr(error, "errno", None) in hub.FULL:
            raise UserError(
                f"The disk of the hub's cache is full, so {repo} cannot be fetched into {HF_HUB_CACHE}: free some "
                "space there, or set HF_HOME to a folder on another disk."
            ) from error
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"Fetching {repo} from the hub failed ({first[0]}): try again, or pass a local folder."
        ) from error


# ---- the parts


def _wanted(name: str) -> bool:
    return any(fnmatch(name, each) for each in ALLOW) and not any(fnmatch(name, each) for each in IGNORE)


def _check_room(repo: str, need: int, cache: Path) -> None:
    there = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if need > free:
        raise UserError(
            f"{repo} needs {need / hub.MB:.0f} MB more in {cache} and {free // hub.MB} MB are free: free some, or set "
            "HF_HOME to a folder on another disk."
        )


def _size_of(blobs: Path) -> int:
    return sum(path.stat().st_size for path in blobs.glob("*")) if blobs.is_dir() else 0


@contextmanager
def _watching(meter: Meter, blobs: Path, total: int) -> Iterator[None]:
    """Tell the meter how much has come."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(POLL_S):
            try:
                meter(min(_size_of(blobs), total) // hub.MB, total // hub.MB)
            except OSError:
                continue  # a blob was renamed while we looked

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _is_whole(path: Path) -> bool:
    """Whether a file's content has the hash that its blob is named by; a file that is no link into blobs has none."""
    blob = path.resolve()
    name = blob.name
    if blob.parent.name != "blobs" or len(name) not in (SHA1, SHA256):
        return True
    if len(name) == SHA256:
        return hub.sha256_of(blob) == name
    content = blob.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest() == name
