"""Drafting among some of the target's ids: the file that lists them (`--draft-vocab`), the rows of the target's head
for them, and the counts that such a file is made from (`--count-ids`).

    15 8211         an id per line, and how often it was written, the most frequent first
    28 7923         --draft-vocab ignores the count, so the first lines of a file of counts are a file of ids

A file of ids may also be a JSON list. Ids that are not listed are never drafted; the target writes them as always.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from threading import Timer
from typing import TYPE_CHECKING

import numpy as np

from sparkdraft.core import UserError
from sparkdraft.util.names import user_path

if TYPE_CHECKING:
    from torch import Tensor

    from sparkdraft.models.common.blocks import Decoder
    from sparkdraft.weights.linear import Linear
    from sparkdraft.weights.loader import Loader

WRITE_AFTER = 30.0  # seconds from the first id that is counted and not written


def read_ids(path: str, vocab_size: int) -> tuple[int, ...]:
    """Ascending, each once. vocab_size: of the target. Raises UserError."""
    found = [number for number, _ in _read(path, "draft_vocab")]
    if not found:
        raise UserError(f"draft_vocab is {path}, which holds no ids: write one per line, or a JSON list")
    _check(path, "draft_vocab", found, vocab_size)
    return tuple(sorted(set(found)))


class IdCounts:
    """Counts the ids that requests wrote, added to the counts that the file held before.

    A thread writes the file some seconds after something was counted, because a server's process may be killed.
    """

    def __init__(self, path: str, vocab_size: int) -> None:
        """Raises UserError where the file is something else, or cannot be written."""
        self.path = user_path(path)
        counts = dict(_read(path, "count_ids")) if self.path.exists() else {}
        _check(path, "count_ids", list(counts), vocab_size)
        self._before, self._counts = (np.zeros(vocab_size, dtype=np.int64) for _ in range(2))
        self._before[list(counts)] = list(counts.values())
        self._timer: Timer | None = None  # runs while something is counted and not written
        try:
            self._write()
        except OSError as error:
            raise UserError(f"count_ids is {path}, which cannot be written: {error.strerror}") from None
        atexit.register(self.flush)

    def add(self, ids: Sequence[int]) -> None:
        np.add.at(self._counts, np.asarray(ids, dtype=np.int64), 1)
        if self._timer is None and len(ids):
            self._timer = Timer(WRITE_AFTER, self.flush)
            self._timer.daemon = True
            self._timer.start()

    def forget(self) -> None:
        """Drop what was counted and not written: the requests so far were not a user's."""
        self._counts[:] = 0

    def flush(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            with suppress(OSError):  # a disk that is full does not end a server, and the next time may succeed
                self._write()

    def _write(self) -> None:
        total = self._before + self._counts
        order = np.argsort(-total, kind="stable")[: int(np.count_nonzero(total))]
        lines = (f"{each} {number}\n" for each, number in zip(order.tolist(), total[order].tolist(), strict=True))
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        beside.write_text("".join(lines), encoding="utf-8")
        beside.replace(self.path)


def _read(path: str, option: str) -> list[tuple[int, int]]:
    """(id, count) of each line; the count is 1 where there is none."""
    try:
        text = user_path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UserError(f"{option} is {path}, which cannot be read: {reason}") from None
    try:
        if text.lstrip().startswith("["):
            listed = json.loads(text)
            if not all(type(each) is int for each in listed):
                raise ValueError
            return [(each, 1) for each in listed]
        lines = [line.split() for line in text.splitlines() if line.strip()]
        return [(int(words[0]), int(words[1]) if words[1:] else 1) for words in lines]
    except ValueError:
        raise UserError(
            f"{option} is {path}, which is no file of ids: write one per line, with a count behind it or without, or a "
            "JSON list"
        ) from None


def _check(path: str, option: str, ids: Sequence[int], vocab_size: int) -> None:
    wrong = next((each for each in ids if not 0 <= each < vocab_size), None)
    if wrong is not None:
        raise UserError(
            f"{option} is {path}, which holds the id {wrong}; the model's go from 0 to {vocab_size - 1}: was it made "
            "for another model?"
        )


def rows_of_head(load: Loader, target: Decoder, ids: Tensor, head: Linear | None = None) -> Linear:
    """A head over these ids (int64, ascending). head: the drafter's own whole one; None: the target's."""
    from sparkdraft.weights.quant.stored import take_rows

    rows = (head or target.head).rows(ids)
    if rows is None and head is None and target.config.tie_embeddings:
        rows = take_rows(target.embedding, ids)
    if rows is None:
        raise UserError(
            f"{load.source.path} shall draft among {len(ids)} ids, and rows of the model's head cannot be taken out of "
            "its format: leave draft_vocab out, or choose another drafter"
        )
    return load.head_of(rows)
