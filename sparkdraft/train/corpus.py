"""A corpus on disk: documents of token ids laid end to end in shards, each with a small table that describes them.

    corpus.json            version, target, vocab_size, kinds (names of the classes)
    00000.tokens           raw little-endian ids: uint16 where the vocabulary allows it, else uint32
    00000.turns.npy        [turns, 2]: where each answer begins and ends in its document, document by document
    00000.documents.npy    one record per document: length, num_prompt, turns, kind, finish, temperature

A document is a prompt and its answer, or a whole conversation with several answers. Tokens are memory-mapped and never
all in memory. The files of the last shard grow as documents come: tokens are appended, then the turns and at last the
table are replaced as a whole. What the table does not name does not count. So whatever ends a writer, every document of
the last table is there. One process writes to a folder at a time.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdraft.core import UserError
from sparkdraft.train.process import alone_in, write_whole

VERSION = 2
INFO = "corpus.json"
TOKENS, TURNS, DOCUMENTS = ".tokens", ".turns.npy", ".documents.npy"
SHARD_TOKENS = 16_000_000
FLUSH_TOKENS, FLUSH_SECONDS = 1_000_000, 30.0  # what a kill costs at most
MOST_KINDS = 256
Ids = npt.NDArray[Any]  # unsigned integers, read-only if they come from a file
RECORD = np.dtype(
    [
        ("length", "<u4"),
        ("num_prompt", "<u4"),
        ("turns", "<u4"),
        ("kind", "u1"),
        ("finish", "u1"),
        ("temperature", "<f4"),
    ]
)
Span = tuple[int, int]  # of an answer: its first id, and the first after it


class Finish(IntEnum):
    """Why a document, or its last answer, ends where it does."""

    END = 0  # the model ended it
    LENGTH = 1
    LOOP = 2  # it repeated itself, and was cut two periods after the loop began


@dataclass(frozen=True, slots=True)
class CorpusInfo:
    target: str  # the model that wrote the responses, as the user named it
    vocab_size: int
    kinds: tuple[str, ...]  # class names; a document's kind is an index into them

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    @staticmethod
    def read(folder: Path) -> CorpusInfo:
        path = folder / INFO
        if not path.is_file():
            raise UserError(f"{folder} holds no corpus (no {INFO}): make one with `sparkdraft train data`, or name it.")
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            version = int(stored["version"])
            info = CorpusInfo(str(stored["target"]), int(stored["vocab_size"]), tuple(stored["kinds"]))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"{path} cannot be read ({error}): make the corpus again.") from error
        if version != VERSION:
            raise UserError(f"{path} is of version {version}, this program reads {VERSION}: make the corpus again.")
        return info

    def as_json(self) -> bytes:
        stored = {"version": VERSION, "target": self.target, "vocab_size": self.vocab_size}
        return (json.dumps(stored | {"kinds": list(self.kinds)}, indent=1) + "\n").encode()


class Corpus:
    """All complete shards of a folder, as one list of documents."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise UserError(f"There is no corpus folder {self.folder}: make one with `sparkdraft train data`.")
        self.info = CorpusInfo.read(self.folder)
        names = _shards(self.folder)
        if not names:
            raise UserError(f"The corpus {self.folder} has no complete shard: make it with `sparkdraft train data`.")
        tables = [_read_table(self.folder / (name + DOCUMENTS)) for name in names]
        spans = [_read_turns(self.folder / (name + TURNS), table) for name, table in zip(names, tables, strict=True)]
        self._tokens = [
            _map(self.folder / (name + TOKENS), table, self.info) for name, table in zip(names, tables, strict=True)
        ]
        self._first = np.cumsum([0] + [len(t) for t in tables])  # per shard: its first document, among all documents
        starts = [np.cumsum(t["length"], dtype=np.int64) - t["length"] for t in tables]
        self._start = np.concatenate(starts)  # per document: its start within its shard
        columns = {field: np.concatenate([t[field] for t in tables]) for field in RECORD.names or ()}
        self.length, self.num_prompt = columns["length"], columns["num_prompt"]
        self.kind, self.finish, self.temperature = columns["kind"], columns["finish"], columns["temperature"]
        self.spans = np.concatenate(spans).astype(np.int64)  # [answers of all documents, 2]
        self.first_span = np.concatenate(
            ([0], np.cumsum(columns["turns"], dtype=np.int64))
        )  # per document, and the end
        self.fingerprint = self._fingerprint(names)

    def __len__(self) -> int:
        return len(self.length)

    def ids(self, index: int) -> Ids:
        """One document, prompt and response: a view of the file."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        shard = int(np.searchsorted(self._first, index, side="right")) - 1
        start = int(self._start[index])
        return self._tokens[shard][start : start + int(self.length[index])]

    def answers(self, index: int) -> Ids:
        """[answers, 2]: where the answers of one document begin and end."""
        return self.spans[self.first_span[index] : self.first_span[index + 1]]

    def most_frequent(self, number: int) -> Ids:
        """The most frequent ids of the documents, as many as asked for, in ascending order."""
        if not 0 < number < self.info.vocab_size:
            raise UserError(
                f"--vocab is {number}; it must be from 1 to {self.info.vocab_size - 1}, or left out for all"
            )
        counts = sum(np.bincount(tokens, minlength=self.info.vocab_size) for tokens in self._tokens)
        return np.sort(np.argsort(-np.asarray(counts), kind="stable")[:number])

    def _fingerprint(self, names: Sequence[str]) -> str:
        """A cheap fingerprint of the data: it uses names and sizes instead of the tokens."""
        digest = hashlib.sha256((self.folder / INFO).read_bytes())
        for name, tokens in zip(names, self._tokens, strict=True):
            digest.update(f"{name} {tokens.nbytes}\n".encode())
        return digest.hexdigest()[:12]


class CorpusWriter:
    """Appends documents in its own shards, and writes them to disk from time to time. Use it in a `with` block."""

    def __init__(self, folder: str | Path, info: CorpusInfo, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder, self.shard_tokens = Path(folder), shard_tokens
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"The folder {self.folder} cannot be made ({error.strerror}): name another.") from error
        self._table, self._tokens = np.empty(0, RECORD), 0  # this and the next: of the current shard, as it is on disk
        self._turns = np.empty((0, 2), "<u4")
        self._ids: list[Ids] = []  # this and the next two: not written yet
        self._spans: list[Span] = []
        self._records: list[tuple[int, int, int, int, int, float]] = []
        self._num_waiting, self._flushed = 0, time.monotonic()
        self._broken = False
        with ExitStack() as until_close:
            until_close.enter_context(alone_in(self.folder, "the corpus"))
            known = _shards(self.folder)
            tables = [_read_table(self.folder / (name + DOCUMENTS)) for name in known]
            self.num_documents = sum(map(len, tables))  # on the disk
            self._next = max(map(int, known), default=-1) + 1
            self.info = self._join(info)
            self._until_close = until_close.pop_all()

    def add(
        self,
        ids: Sequence[int] | Ids,
        num_prompt: int,
        kind: str,
        finish: Finish,
        temperature: float,
        answers: Sequence[Span] = (),  # none: all that follows the prompt is one answer
    ) -> None:
        assert 0 < num_prompt <= len(ids) and kind in self.info.kinds, (num_prompt, len(ids), kind)
        whole, spans = np.asarray(ids), list(answers) or [(num_prompt, len(ids))]
        bounds = [place for span in spans for place in span]
        assert bounds == sorted(bounds) and num_prompt == bounds[0] and bounds[-1] <= len(ids), (spans, len(ids))
        assert int(whole.min()) >= 0 and int(whole.max()) < self.info.vocab_size, (whole.min(), whole.max())
        self._ids.append(whole.astype(self.info.dtype))
        index = self.info.kinds.index(kind)
        self._spans += spans
        self._records.append((len(whole), num_prompt, len(spans), index, int(finish), temperature))
        self._num_waiting += len(whole)
        full = self._tokens + self._num_waiting >= self.shard_tokens
        if full or self._num_waiting >= FLUSH_TOKENS or time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self._flush()

    def close(self) -> None:
        with self._until_close:
            if self._records and not self._broken:
                self._flush()

    def __enter__(self) -> CorpusWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()  # after an error too: every document that was added is complete

    def _join(self, info: CorpusInfo) -> CorpusInfo:
        """The folder's own info with the new kinds appended, so that indexes in use stay right."""
        if (self.folder / INFO).exists():
            old = CorpusInfo.read(self.folder)
            if (old.target, old.vocab_size) != (info.target, info.vocab_size):
                raise UserError(
                    f"The corpus {self.folder} was written by {old.target} (vocabulary {old.vocab_size}), this is "
                    f"{info.target} ({info.vocab_size}): name another folder."
                )
            more = tuple(k for k in info.kinds if k not in old.kinds)
            info = replace(old, kinds=old.kinds + more)
            if info == old:
                return old
        if len(info.kinds) > MOST_KINDS:
            raise UserError(f"The prompts are of {len(info.kinds)} classes, {MOST_KINDS} are the limit: join some.")
        self._write(INFO, info.as_json())
        return info

    def _flush(self) -> None:
        name, ids, records = f"{self._next:05}", np.concatenate(self._ids), np.array(self._records, dtype=RECORD)
        table, turns = np.concatenate((self._table, records)), np.concatenate((self._turns, self._spans)).astype("<u4")
        self._append(name + TOKENS, ids.tobytes(), self._tokens * self.info.dtype.itemsize)
        self._write(name + TURNS, _npy(turns))
        self._write(name + DOCUMENTS, _npy(table))  # last: from here on the documents count
        self._table, self._turns, self._tokens = table, turns, self._tokens + len(ids)
        self._ids, self._spans, self._records = [], [], []
        self._num_waiting, self._flushed = 0, time.monotonic()
        self.num_documents += len(records)
        if self._tokens >= self.shard_tokens:
            self._table, self._turns = np.empty(0, RECORD), np.empty((0, 2), "<u4")
            self._tokens, self._next = 0, self._next + 1

    def _append(self, name: str, data: bytes, begin: int) -> None:
        """Append data from byte 'begin' on, where the documents of the table end."""
        with self._failing(name), (self.folder / name).open("r+b" if begin else "wb") as file:
            file.seek(begin)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def _write(self, name: str, data: bytes) -> None:
        """Write the whole file under its name, or nothing."""
        with self._failing(name):
            write_whole(self.folder / name, data, ".partial")

    @contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        """Turn errors of the disk into a sentence."""
        try:
            yield
        except OSError as error:
            self._broken = True
            kept = f"{self.num_documents} document{'s' if self.num_documents != 1 else ''} of {self.folder} are kept"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise UserError(
                    f"The disk is full: {kept}; make room, and run the same command again to continue."
                ) from error
            raise UserError(f"{self.folder / name} cannot be written ({error.strerror}): {kept}.") from error


def _shards(folder: Path) -> list[str]:
    """Numbers of the complete shards, in order."""
    names = (path.name.removesuffix(DOCUMENTS) for path in folder.glob("*" + DOCUMENTS))
    return sorted((name for name in names if name.isdecimal()), key=int)


def _load(path: Path) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} cannot be read ({error}): delete this shard, or make the corpus again.") from error
    return array


def _read_table(path: Path) -> npt.NDArray[Any]:
    table = _load(path)
    if table.dtype != RECORD or table.ndim != 1:
        raise UserError(f"{path} is not a table of documents: delete this shard, or make the corpus again.")
    return table


def _read_turns(path: Path, table: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The answers that the table names: there may be more, of documents that were cut off while writing."""
    count, turns = int(table["turns"].sum(dtype=np.int64)), _load(path)
    if turns.ndim != 2 or turns.shape[1] != 2 or len(turns) < count:
        raise UserError(f"{path} has {len(turns)} answers, its documents {count}: delete this shard, or copy it again.")
    return turns[:count]


def _npy(array: npt.NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def _map(path: Path, table: npt.NDArray[Any], info: CorpusInfo) -> Ids:
    """The tokens that the table names; what follows them was cut off while writing."""
    count = int(table["length"].sum(dtype=np.int64))
    expected, size = count * info.dtype.itemsize, path.stat().st_size if path.is_file() else 0
    if size < expected or not expected:
        raise UserError(f"{path} has {size} bytes, its documents need {expected}: delete this shard, or copy it again.")
    return np.memmap(path, dtype=info.dtype, mode="r", shape=(count,)).view(np.ndarray)
