"""A finding is what the doctor looked at, how it knows, and what to do about it; a report is all of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from sparkdraft import __version__
from sparkdraft.util.names import user_path
from sparkdraft.weights.hub import cache_dir


class Status(IntEnum):
    FINE = 0
    NOTE = 1  # worth knowing; nothing to do, or nothing that must be done
    CHANGE = 2  # slower or less than this machine could be
    BROKEN = 3  # the engine cannot run

    @property
    def word(self) -> str:
        return {0: "ok", 1: "note", 2: "change", 3: "broken"}[self.value]


@dataclass(frozen=True, slots=True)
class Finding:
    part: str  # the heading it stands under
    name: str
    value: str  # what was found
    status: Status = Status.FINE
    advice: str = ""  # what to do
    proof: str = ""  # what ran, and showed it


# ---- the report; it shows no path of the user's except the cache folder

EXIT = {Status.FINE: 0, Status.NOTE: 0, Status.CHANGE: 1, Status.BROKEN: 2}
# From the home folder, or from the root: not within a word, and "//" begins no path but in "file:///".
PATH = re.compile(r"(?:~/|(?<![\w.~/])/(?!/)|(?<=file://)/)(?:[^\s/'\"(),:]+/)*[^\s/'\"(),:]+")
SYSTEM = ("/usr", "/proc", "/sys", "/dev", "/lib", "/bin", "/opt", "/v1")  # these say nothing of a user


@dataclass(frozen=True)
class Report:
    model: str  # as the user named it
    findings: Sequence[Finding]
    seconds: float

    @property
    def status(self) -> Status:
        return max((each.status for each in self.findings), default=Status.FINE)

    @property
    def exit_status(self) -> int:
        return EXIT[self.status]

    def verdict(self) -> str:
        broken, changes = (self._count(status) for status in (Status.BROKEN, Status.CHANGE))
        if broken:
            return f"broken: {_things(broken)} must be mended before {self._model} can run here"
        if changes:
            return f"it runs, and {_things(changes)} should be changed"
        return "fine: nothing to change"

    def todo(self) -> list[str]:
        """List what to change, the worst first, each once."""
        worst = sorted((f for f in self.findings if f.status >= Status.CHANGE), key=lambda f: -f.status)
        return list(dict.fromkeys(self._clean(f"{f.name}: {f.advice or f.value}") for f in worst))

    def text(self) -> str:
        lines = [f"sparkdraft {__version__} doctor, {self._model}"]
        part = ""
        for each in self.findings:
            if each.part != part:
                part = each.part
                lines += ["", part]
            lines.append(self._clean(f"  {each.status.word:<8}{each.name}: {each.value}"))
            lines += [self._clean(f"          proof: {each.proof}")] * bool(each.proof)
            lines += [self._clean(f"          -> {each.advice}")] * bool(each.advice)
        lines += ["", f"verdict ({self.seconds:.0f} s): {self.verdict()}"]
        return "\n".join(lines + [f"  {i}. {text}" for i, text in enumerate(self.todo(), 1)])

    def as_dict(self) -> dict[str, Any]:
        return {
            "doctor": __version__,
            "model": self._model,
            "verdict": self.verdict(),
            "status": self.status.word,
            "to_change": self.todo(),
            "seconds": round(self.seconds, 1),
            "findings": [self._finding(each) for each in self.findings],
        }

    @property
    def _model(self) -> str:
        return shown_model(self.model)

    def _finding(self, each: Finding) -> dict[str, str]:
        found = asdict(each) | {"status": each.status.word}
        return {name: self._clean(value) for name, value in found.items()}

    def _clean(self, text: str) -> str:
        return without_paths(text, self.model)

    def _count(self, status: Status) -> int:
        return sum(each.status == status for each in self.findings)


def without_paths(text: str, model: str = "") -> str:
    """Drop the folders of paths outside the cache folder, and write the cache's own from the home folder. model: as the
    user named it. Its folder and the home folder are searched for literally, because names may have spaces."""
    cache = _from_home(str(cache_dir()))
    if _is_path(model):
        path = user_path(model)
        text = text.replace(model, f".../{path.name}")
        for folder in {str(each.parent) for each in (path.absolute(), path.resolve())}:
            if folder != "/" and not f"{cache_dir()}/".startswith(f"{folder}/"):
                text = text.replace(f"{folder}/", ".../")

    def shorter(found: re.Match[str]) -> str:
        path = found[0]
        kept = f"{path}/".startswith((f"{cache}/", *(f"{each}/" for each in SYSTEM)))
        return path if kept else f".../{path.rsplit('/', 1)[1]}"

    return PATH.sub(shorter, _from_home(text))


def shown_model(model: str) -> str:
    """Return the last part of a model's path; the rest is the user's own."""
    return Path(model).name if _is_path(model) else model


def _is_path(model: str) -> bool:
    return bool(model) and (model.startswith(("/", ".", "~")) or Path(model).exists())


def _from_home(text: str) -> str:
    home = str(Path.home())
    return re.sub(re.escape(home) + r"(?![\w.-])", "~", text) if len(home) > 1 else text


def _things(count: int) -> str:
    return "one thing" if count == 1 else f"{count} things"
