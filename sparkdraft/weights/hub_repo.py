"""Repositories of the Hugging Face hub: what of them is in the local cache, and fetching them whole.

The cache's layout is the hub library's own, so that other programs' downloads count: blobs/ holds each file under its
hash (SHA-256 of large files, git's SHA-1 of small ones), snapshots/COMMIT/ links to them. So a fetched file is verified
by its own name. An interrupted fetch leaves a blob named *.incomplete, from which the next one continues.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from sparkdraft.core import UserError
from sparkdraft.progress import Meter, progress
from sparkdraft.weights import hub

# Only what we read: no pickles, no tensors of other frameworks, nothing from subfolders (onnx/, original/).
ALLOW = ["*.json", "*.safetensors", "*.jinja"]
IGNORE = ["*/*", "consolidated*"]
POLL_S = 0.5
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
        except (ValueError, KeyError, AttributeError):
            return [index.name]
        return [name for name in files if not (folder / name).is_file()]
    return [] if any(folder.glob("*.safetensors")) else ["model.safetensors"]


def fetch_config(repo: str) -> dict[str, Any]:
    """config.json alone, a few kilobytes."""
    from huggingface_hub import hf_hub_download

    with explained(repo):
        path = Path(hf_hub_download(repo, "config.json"))
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"The config.json of {repo} is not JSON ({error}): it may be damaged.") from error
    return dict(config)


def pull(repo: str) -> Path:
    """Fetch what we read of a repository, continue what was interrupted, and verify it. Returns its folder."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE

    with explained(repo):
        info = HfApi().model_info(repo, files_metadata=True)
        sizes = {f.rfilename: f.size or 0 for f in info.siblings or () if _wanted(f.rfilename)}
        blobs = Path(HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "blobs"
        total, there = sum(sizes.values()), _size_of(blobs)
        _check_room(repo, total - there, Path(HF_HUB_CACHE))
        with progress(f"fetching {repo}", unit="MB", is_drawn=False) as meter, _watching(meter, blobs, total):
            folder = Path(snapshot_download(repo, allow_patterns=ALLOW, ignore_patterns=IGNORE))
    if damaged := verify(folder):
        names = ", ".join(path.name for path in damaged)
        for path in damaged:
            path.resolve().unlink()
        raise UserError(f"{names} of {repo} came damaged and was removed: run the same command again.")
    if lacking := missing(folder):
        raise UserError(
            f"{repo} has no {', '.join(lacking)}: only safetensors are read, so pull a repository with them."
        )
    return folder


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
    """Tell the meter how much has come, for those who see no bars: the hub library draws its own on a terminal."""
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
