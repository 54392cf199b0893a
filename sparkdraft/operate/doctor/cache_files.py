"""Files of the cache folder that are damaged, half-written or left over: nothing is changed, only named."""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from pathlib import Path

from sparkdraft.operate.doctor.finding import Finding, Status
from sparkdraft.weights import hub

PART = "cache"
STALE_S = 3600  # a temporary folder that is older was left by a process that was killed
ELF_HEADER = struct.Struct("<4s36xQ10xHHH")  # magic, offset of the section headers, their size, number, and one more
MB = 10**6


def judge_cache(folder: Path) -> list[Finding]:
    """folder: the cache folder; it need not exist."""
    if not folder.is_dir():
        return [Finding(PART, "folder", f"{folder} does not exist yet: the first start makes it")]
    found = [*_models(), *_libraries(folder / "native"), *_tiles(folder), *_left_over(folder)]
    if not found:
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        found.append(Finding(PART, "files", f"{folder} holds {size / MB:.0f} MB, and nothing in it is damaged"))
    return found


def judge_downloads(model: str) -> list[Finding]:
    """Files of a hub's model whose download was interrupted. model: as the user named it."""
    from huggingface_hub.constants import HF_HUB_CACHE

    blobs = Path(HF_HUB_CACHE) / f"models--{model.replace('/', '--')}" / "blobs"
    parts = sorted(blobs.glob("*.incomplete")) if model.count("/") == 1 else []
    if not parts:
        return []
    size = sum(path.stat().st_size for path in parts)
    many = "one file is" if len(parts) == 1 else f"{len(parts)} files are"
    value = f"{many} half-written ({size / MB:.0f} MB so far): a download was interrupted, or still runs"
    return [Finding(PART, "download", value, Status.CHANGE, f"`sparkdraft pull {model}` continues it")]


def _models() -> list[Finding]:
    found = []
    for model in hub.known():
        path = hub.path_of(model.name)
        if not path.is_file() or hub.cached_path(model.name):
            continue
        size = path.stat().st_size
        how = (
            f"half-written: {size:,} of {model.size:,} bytes"
            if size < model.size
            else "damaged: its hash is not the one"
        )
        advice = f"`sparkdraft models --fetch {model.name}` fetches it again"
        found.append(Finding(PART, model.name, f"{path} is {how}", Status.CHANGE, advice))
    return found


def _libraries(folder: Path) -> list[Finding]:
    found = []
    for path in sorted(folder.glob("*.so")):
        if not is_whole_library(path):
            advice = f"delete {path}: it is compiled again, in about ten seconds"
            value = f"{path.name} is half-written ({path.stat().st_size:,} bytes)"
            found.append(Finding(PART, "compiled CPU kernels", value, Status.CHANGE, advice))
    return found


def is_whole_library(path: Path) -> bool:
    """Whether an ELF file reaches to the end of its last table, which the linker writes last. Loading one that was cut
    short may end the process. Other systems have other formats, which are not looked at."""
    if sys.platform != "linux":
        return True
    try:
        with path.open("rb") as file:
            magic, sections, size, count, _ = ELF_HEADER.unpack(file.read(ELF_HEADER.size))
        return magic == b"\x7fELF" and 0 < sections <= path.stat().st_size - size * count
    except (OSError, struct.error):
        return False


def _tiles(folder: Path) -> list[Finding]:
    """Every JSON file: tiles, and whatever else is measured on this machine."""
    found = []
    for path in sorted(folder.rglob("*.json")):
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            value = f"{path} cannot be read as JSON ({error})"
            advice = f"delete {path}, and measure again"
            found.append(Finding(PART, "measured on this machine", value, Status.CHANGE, advice))
    return found


def _left_over(folder: Path) -> list[Finding]:
    """Folders of compilers and downloads that were killed."""
    limit = time.time() - STALE_S
    places = [*(folder / "native").glob("tmp*"), *(folder / "models").glob(f"{hub.FETCH_PREFIX}*")]
    old = [path for path in places if path.is_dir() and path.stat().st_mtime < limit]
    if not old:
        return []
    size = sum(os.stat(file).st_size for path in old for file in path.rglob("*") if file.is_file())
    names = ", ".join(f"{path.parent.name}/{path.name}" for path in old)
    value = f"{names}: left by processes that were killed, {size / MB:.0f} MB, may be deleted"
    return [Finding(PART, "left over", value, Status.NOTE)]
