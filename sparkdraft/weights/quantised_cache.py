"""Keeps what `--weights` quantised in the user's cache, so that the next load need not read and round floats again.

    quantised/NAME-FORMAT-DEVICE-PLACE-KEY/matrices   the numbers of all matrices, one after the other
    quantised/NAME-FORMAT-DEVICE-PLACE-KEY/index.json what lies where, with a checksum per matrix; written last

PLACE is a hash of the checkpoint's path, and KEY one of the state of its files, the format, the device, and the code
that rounds: if any of them changes, a new folder replaces the old one. A folder gets its name when it is complete. A
matrix that does not match its checksum is quantised again, and the folder is removed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import re
import shutil
import tempfile
import time
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from sparkdraft.weights.hub import cache_dir
from sparkdraft.weights.quant import base, quantise, stored
from sparkdraft.weights.quant.stored import Coded

DATA, INDEX, WRITING = "matrices", "index.json", "writing-"
PARTS = ("codes", "scale", "offset", "row_scale")  # of a Coded
ALIGNED = 64  # bytes: tensors begin at multiples of it
ABANDONED = 3600.0  # seconds without a write after which a half-written folder counts as left by a killed process
DAMAGED = "the cache of quantised weights is damaged"
NOT_WRITTEN = "quantised weights are not kept for the next load"
MOST_SHARE = 0.5  # of the checkpoint's bytes, at most: floats have at least 16 bits
STAYS_FREE = 1 << 30  # bytes of the disk that are left free


def folder() -> Path:
    return cache_dir() / "quantised"


@dataclass(frozen=True, slots=True)
class Entry:
    """The complete cache of one checkpoint."""

    path: Path
    checkpoint: str
    format: str
    size: int  # bytes


def entries() -> list[Entry]:
    found = []
    for path in sorted(folder().glob("*")):
        index = _read_index(path)
        if index is not None:
            found.append(Entry(path, index["checkpoint"], index["format"], index["size"]))
    return found


def clear() -> int:
    """Remove all entries, half-written ones too. Returns the bytes that were freed."""
    size = sum(file.stat().st_size for file in folder().glob("*/*") if file.is_file())
    shutil.rmtree(folder(), ignore_errors=True)
    return size


def open_cache(checkpoint: Path, form: str, device: str, part: str = "") -> QuantisedCache | None:
    """Open the cache of a checkpoint in a format; None if there is nothing to quantise or to compare. part: names a
    part with its own reader, such as the drafter in its target's file."""
    files = [checkpoint] if checkpoint.is_file() else sorted(checkpoint.glob("*.safetensors"))
    if form == "auto" or not files:
        return None
    states = [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    place = _digest(str(checkpoint.resolve()))
    key = _digest(json.dumps([states, form, device, _code_version()]))
    name = re.sub(r"[^\w.]+", "-", checkpoint.name)[:40] + (f"-{part}" if part else "")
    path, size = folder() / f"{name}-{form}-{device}-{place[:8]}-{key[:12]}", sum(state[1] for state in states)
    return QuantisedCache(path, checkpoint, form, size)


class QuantisedCache:
    """Reads what an earlier load has written, or writes what this one quantises."""

    def __init__(self, path: Path, checkpoint: Path, form: str, size: int) -> None:
        """size: bytes of the checkpoint."""
        self.path, self._checkpoint, self._form, self._size = path, checkpoint.resolve(), form, size
        self.problem: tuple[str, str] | None = None  # a note for the user: what, and why
        self._counts: Counter[str] = Counter()
        self._matrices: dict[str, Any] = {}
        self._work: Path | None = None  # the folder that is being written
        self._data: IO[bytes] | None = None
        self._map: mmap.mmap | None = None
        index = _read_index(path)
        if index is not None:
            self._matrices = index["matrices"]
            with (path / DATA).open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        else:
            self._begin()

    def key(self, name: str) -> str:
        """A unique key, also for experts that share a name: a model always asks for them in the same order."""
        self._counts[name] += 1
        return f"{name}#{self._counts[name]}"

    def read(self, key: str, shape: tuple[int, int]) -> Coded | None:
        """A matrix, mapped from the file; None if it has to be quantised."""
        if self._map is None:
            return None
        entry = self._matrices.get(key)
        if entry is None or entry["shape"] != list(shape):
            self._damaged(f"it has no {key} of shape {shape}")
            return None
        begin, end = entry["begin"], entry["end"]
        with memoryview(self._map) as view, view[begin:end] as raw:
            if len(raw) != end - begin or zlib.crc32(raw) != entry["crc"]:
                self._damaged(f"the numbers of {key} do not agree with their checksum")
                return None
        parts = {name: self._tensor(*place) for name, place in entry["tensors"].items()}
        return Coded(entry["levels"], parts["codes"], entry["group"], *map(parts.get, PARTS[1:]))

    def write(self, key: str, matrix: Coded) -> None:
        """Does nothing while an earlier load's cache is read, or after a disk was found full."""
        if self._data is None:
            return
        try:
            self._matrices[key] = self._append(matrix)
        except OSError as error:
            self._give_up(error)

    def finish(self) -> None:
        """All matrices have been asked for."""
        if self._map is not None and self.problem:
            shutil.rmtree(self.path, ignore_errors=True)  # mapped tensors stay valid; the next load writes it again
        if self._data is None or self._work is None:
            return
        try:
            size = self._data.tell()
            self._data.close()
            index = {"checkpoint": str(self._checkpoint), "format": self._form, "size": size}
            (self._work / INDEX).write_text(json.dumps(index | {"matrices": self._matrices}), encoding="utf-8")
            if not self.path.exists():  # another process may have been faster
                os.rename(self._work, self.path)
        except OSError as error:
            self._give_up(error)
            return
        shutil.rmtree(self._work, ignore_errors=True)  # where it was not renamed
        stem = self.path.name.rsplit("-", 1)[0]
        gone = [each.path for each in entries() if _is_gone(Path(each.checkpoint))]
        for old in (*self.path.parent.glob(f"{stem}-*"), *gone):
            if old != self.path:
                shutil.rmtree(old, ignore_errors=True)
        self._data = self._work = None

    def __enter__(self) -> QuantisedCache:
        return self

    def __exit__(self, *error: object) -> None:
        """Drop what is not finished: the load has failed."""
        self._abandon()

    def _abandon(self) -> None:
        if self._data is not None:
            self._data.close()
        if self._work is not None:
            shutil.rmtree(self._work, ignore_errors=True)
        self._data = self._work = None

    def _begin(self) -> None:
        try:
            if self.path.exists():  # it has a name and is not whole: a disk's fault
                shutil.rmtree(self.path)
                self.problem = (DAMAGED, "its index or the size of its data is wrong; it is written again")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            for stale in self.path.parent.glob(f"{WRITING}*"):
                if time.time() - max(file.stat().st_mtime for file in (stale, *stale.glob("*"))) > ABANDONED:
                    shutil.rmtree(stale, ignore_errors=True)
            need, free = int(MOST_SHARE * self._size) + STAYS_FREE, shutil.disk_usage(self.path.parent).free
            if free < need:
                raise OSError(errno.ENOSPC, f"{free / 1e9:.1f} GB are free, and {need / 1e9:.1f} GB are needed")
            self._work = Path(tempfile.mkdtemp(prefix=WRITING, dir=self.path.parent))
            self._data = (self._work / DATA).open("wb")
        except OSError as error:
            self._give_up(error)

    def _append(self, matrix: Coded) -> dict[str, Any]:
        assert self._data is not None
        begin, crc, tensors = self._data.tell(), 0, {}
        for name in PARTS:
            tensor: Tensor | None = getattr(matrix, name)
            if tensor is None:
                continue
            raw = tensor.detach().cpu().contiguous().view(torch.uint8).reshape(-1).numpy().data
            tensors[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), self._data.tell()]
            filling = bytes(-len(raw) % ALIGNED)
            crc = zlib.crc32(filling, zlib.crc32(raw, crc))
            self._data.write(raw)
            self._data.write(filling)
        end = self._data.tell()
        entry = {"levels": matrix.levels, "group": matrix.group, "shape": list(matrix.shape), "tensors": tensors}
        return entry | {"begin": begin, "end": end, "crc": crc}

    def _tensor(self, kind: str, shape: list[int], start: int) -> Tensor:
        dtype = getattr(torch, kind)
        count = torch.Size(shape).numel() * dtype.itemsize
        return torch.frombuffer(self._map, dtype=torch.uint8, count=count, offset=start).view(dtype).view(shape)

    def _damaged(self, reason: str) -> None:
        self.problem = (DAMAGED, f"{reason}: quantised again, and the cache at {self.path} is removed")

    def _give_up(self, error: OSError) -> None:
        self._abandon()
        where = f"{self.path.parent} is not written to ({error.strerror or error})"
        self.problem = (NOT_WRITTEN, f"{where}; free some space, or set SPARKDRAFT_CACHE to another folder")


def _read_index(path: Path) -> dict[str, Any] | None:
    """Read the index; None if there is none, or the folder is incomplete."""
    if path.name.startswith(WRITING):
        return None
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        whole = index["size"] == (path / DATA).stat().st_size and index["size"] > 0 and index["matrices"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return index if whole else None


def _is_gone(checkpoint: Path) -> bool:
    """True if a checkpoint was deleted. If its parent is missing too, its disk may just not be mounted."""
    return checkpoint.parent.exists() and not checkpoint.exists()


def _code_version() -> str:
    """The code that decides which numbers are written, and in which order, as a hash."""
    modules = (quantise.__file__, stored.__file__, base.__file__, __file__)
    return _digest("".join(Path(file).read_text(encoding="utf-8") for file in modules))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
