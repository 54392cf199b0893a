"""Combinations of settings that are known to be broken in vLLM, by version, with sources (the table broken.json)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sparkdraft.core import UserError

TABLE = Path(__file__).with_name("broken.json")
NEWEST = "0.32.0"  # the newest version the table was checked against
REFUSE, NOTE = "refuse", "note"


@dataclass(frozen=True, slots=True)
class Broken:
    name: str
    when: dict[str, list[Any]]  # facts of a command and their values; all must match
    why: str
    instead: str
    sources: tuple[str, ...]
    since: str = ""  # the first broken version; empty: all before `until`
    until: str = ""  # the first fixed version; empty: none is known
    level: str = REFUSE

    def concerns(self, facts: Mapping[str, Any], version: str) -> bool:
        in_time = parsed(self.since or "0") <= parsed(version) and (
            not self.until or parsed(version) < parsed(self.until)
        )
        return in_time and all(facts.get(name) in allowed for name, allowed in self.when.items())

    def sentence(self, version: str) -> str:
        begin = f"it is broken from {self.since} on" if self.since else "it is broken"
        end = f"{self.until} mends it" if self.until else f"no release up to {NEWEST} mends it"
        return f"{self.name} in vLLM {version}: {self.why}; {begin}, {end}. {self.instead} ({', '.join(self.sources)})."


@cache
def entries() -> tuple[Broken, ...]:
    found = json.loads(TABLE.read_text(encoding="utf-8"))
    return tuple(Broken(**{**entry, "sources": tuple(entry["sources"])}) for entry in found)


def check(facts: Mapping[str, Any], version: str) -> list[str]:
    """Returns notes for a command with these facts. Raises UserError for a refused combination: of several, the one
    whose fix came last."""
    concerned = [entry for entry in entries() if entry.concerns(facts, version)]
    refused = [entry for entry in concerned if entry.level == REFUSE]
    if refused:
        raise UserError(max(refused, key=lambda entry: parsed(entry.until or "999")).sentence(version))
    notes = [f"{entry.name}: {entry.why}; {entry.instead} ({', '.join(entry.sources)})" for entry in concerned]
    if parsed(version) > parsed(NEWEST):
        notes.append(f"vLLM {version} is newer than {NEWEST}, the newest whose flags and faults are known here")
    return notes


def parsed(version: str) -> tuple[int, int, int]:
    """Parses a version such as 0.19.2rc1.dev21+g8936118 into its three numbers."""
    found = re.match(r"v?(\d+)(?:\.(\d+))?(?:\.(\d+))?", version)
    if not found:
        raise UserError(f"'{version}' is not a version of vLLM; give one such as {NEWEST}")
    return int(found[1]), int(found[2] or 0), int(found[3] or 0)
