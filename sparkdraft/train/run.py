"""A training run's folder: its settings, how far it came, and what it measured on the way.

    run.json            settings, the drafter's config, which data
    state.safetensors   weights, optimizer, cursor and drafted ids at the last checkpoint; replaced whole, or not at all
    log.jsonl           one line per report

State is plain named tensors: no pickle, and no hidden states. fit.py does the training.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.train.batches import Cursor
from sparkdraft.train.process import alone_in, sync, write_whole
from sparkdraft.train.settings import FitSettings

VERSION = 1
IDS = "draft_ids"  # the name of State.ids in the file


@dataclass(frozen=True, slots=True)
class RunInfo:
    settings: FitSettings
    draft: dict[str, Any]  # config.json of the drafter
    corpus: str  # fingerprint of the data


@dataclass(frozen=True, slots=True)
class State:
    step: int  # the next step
    cursor: Cursor
    seconds: float  # of training so far
    tensors: dict[str, Tensor]  # model.*, muon.*, adam.*
    ids: Tensor | None = None  # that it drafts among, int64, ascending; None: all

    def model(self) -> dict[str, Tensor]:
        return {n.removeprefix("model."): t for n, t in self.tensors.items() if n.startswith("model.")}


class Run:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.info_file, self.state_file = folder / "run.json", folder / "state.safetensors"
        self.log_file = folder / "log.jsonl"

    def open(self) -> RunInfo:
        """The settings of a folder's run. Raises UserError if there is none."""
        try:
            stored = json.loads(self.info_file.read_text(encoding="utf-8"))
            if stored["version"] != VERSION:
                raise UserError(f"{self.folder} was written by another version of the trainer: begin a new run")
            return RunInfo(FitSettings.read(stored["settings"]), stored["draft"], stored["corpus"])
        except FileNotFoundError:
            raise UserError(f"{self.folder} holds no training run: `sparkdraft train fit` makes one") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.info_file} cannot be read ({error}): the run is damaged, begin a new one") from None

    def as_before(self, settings: FitSettings, names: Collection[str]) -> FitSettings:
        """The settings with some of them as the folder's run has them, if there is one."""
        if not self.info_file.exists():
            return settings
        held = self.open().settings
        return replace(settings, **{name: getattr(held, name) for name in names})

    def check(self, settings: FitSettings, corpus: str) -> None:
        """Refuse a folder that cannot be this run's: another run's, or not a run's at all. corpus: the data's
        fingerprint."""
        place = self.folder.absolute()
        nearest = next(path for path in (place, *place.parents) if path.exists())
        if not nearest.is_dir():
            raise UserError(f"{nearest} is a file: choose another folder for the run")
        if self.info_file.exists():
            held = self.open()
            if different := settings.difference(held.settings):
                raise self._another(different)
            if corpus != held.corpus:
                raise self._another("the data has changed since")
            if (step := self._last_step()) > settings.steps:
                raise UserError(f"{self.folder} has run {step} steps already: --steps cannot be less")
        # .new: left by a kill at the start
        elif nearest == place and any(path.suffix != ".new" for path in place.iterdir()):
            raise UserError(f"{self.folder} is not empty and holds no training run: choose a new folder")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within it the folder exists, and no other process trains in it. One that stayed empty is removed."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"The folder {self.folder} cannot be made ({error.strerror}): choose another") from error
        with alone_in(self.folder, "the training run"):
            try:
                yield
            finally:
                with suppress(OSError):  # it is not empty
                    self.folder.rmdir()

    def begin(self, info: RunInfo) -> State | None:
        """Begin a new run, or find the last checkpoint of one with the same settings; otherwise refuse."""
        self.check(info.settings, info.corpus)
        state = self.load() if self.info_file.exists() else None
        stored = {"version": VERSION, "settings": info.settings.as_dict(), "draft": info.draft, "corpus": info.corpus}
        self._write(self.info_file, json.dumps(stored, indent=1).encode())
        return state

    def _another(self, different: str) -> UserError:
        return UserError(f"{self.folder} holds another run ({different}): choose a new folder, or its settings")

    def save(self, state: State) -> None:
        """Replace the last checkpoint. A full disk, or a kill at any instant, leaves the last one whole."""
        fresh = self.state_file.with_suffix(".new")
        facts = {"step": state.step, "epoch": state.cursor.epoch, "document": state.cursor.document}
        metadata = {k: str(v) for k, v in facts.items()} | {"seconds": repr(state.seconds)}
        own = {} if state.ids is None else {IDS: state.ids}
        tensors = {n: t.detach().cpu().contiguous() for n, t in (state.tensors | own).items()}
        try:
            save_file(tensors, fresh, metadata)
            sync(fresh)
            os.replace(fresh, self.state_file)
        except (OSError, SafetensorError) as error:
            fresh.unlink(missing_ok=True)
            raise _disk(error, f"the checkpoint of step {state.step}", self.folder) from error

    def load(self) -> State | None:
        """The last checkpoint, or None before the first."""
        if not self.state_file.exists():
            return None
        with self._state() as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            facts: Mapping[str, str] = file.metadata()
            cursor = Cursor(int(facts["epoch"]), int(facts["document"]))
            ids = tensors.pop(IDS, None)
            return State(int(facts["step"]), cursor, float(facts["seconds"]), tensors, ids)

    def _last_step(self) -> int:
        """The step of the last checkpoint, whose tensors are not read; 0 before the first."""
        if not self.state_file.exists():
            return 0
        with self._state() as file:
            return int(file.metadata()["step"])

    @contextmanager
    def _state(self) -> Iterator[Any]:
        try:
            with safe_open(self.state_file, framework="pt") as file:
                yield file
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{self.state_file} cannot be read ({error}): the checkpoint is damaged") from None

    # ---- what was measured

    def log(self) -> list[dict[str, float]]:
        entries: list[dict[str, float]] = []
        for line in self.log_file.read_text(encoding="utf-8").splitlines() if self.log_file.exists() else []:
            try:
                entries.append(json.loads(line))
            except ValueError:  # cut off by a kill or a full disk: what follows is measured again
                break
        return entries

    def rewind_log(self, step: int) -> None:
        """Forget what was measured after the checkpoint from which the run resumes."""
        kept = [entry for entry in self.log() if entry["step"] <= step]
        self._write(self.log_file, "".join(json.dumps(e) + "\n" for e in kept).encode())

    def add_log(self, entry: dict[str, float]) -> None:
        try:
            with self.log_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            raise _disk(error, "the log", self.folder) from error

    def _write(self, path: Path, content: bytes) -> None:
        try:
            write_whole(path, content, ".new")
        except OSError as error:
            raise _disk(error, path.name, self.folder) from error


def _disk(error: Exception, what: str, folder: Path) -> UserError:
    number = getattr(error, "errno", None)
    full = number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)  # safetensors gives no error number
    reason = "the disk is full: make room and run the same command again" if full else str(error)
    return UserError(f"{what} could not be written to {folder}; the one before is whole ({reason})")
