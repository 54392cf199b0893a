"""Names and paths as users type them: one rule for the spelling of names, and "did you mean"."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

NEAR = 0.75  # likeness from which one name is taken for another: 1 is the same, a letter too much in eight is 0.94
MOST = 4  # names that are offered at once


def spelled(given: str, known: Iterable[str]) -> str | None:
    """Return the known name that has the same letters and digits: case, hyphens, dots and underscores do not count."""
    names = list(known)
    return given if given in names else next((name for name in names if _key(name) == _key(given)), None)


def alike(given: str, known: Iterable[str], near: float = NEAR, family: str = "") -> str:
    """Return the most similar name, or "" if none is similar. family: a prefix of all names, which is ignored."""
    names = {_key(name.removeprefix(family)): name for name in known}
    found = difflib.get_close_matches(_key(given.removeprefix(family)), names, n=1, cutoff=near)
    return names[found[0]] if found else ""


def did_you_mean(given: str, known: Iterable[str], family: str = "") -> str:
    """Return "did you mean ...?" with the names that begin like this one, or else the most similar one; "" if there is
    none."""
    names = list(known)
    begins = [name for name in names if _key(name).startswith(_key(given))] if _key(given) else []
    *others, last = begins[:MOST] or [alike(given, names, family=family)]
    return f"did you mean {', '.join(others)}{' or ' if others else ''}{last}?" if last else ""


def _key(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def user_path(text: str) -> Path:
    """Replace ~ and ~user. An unknown user stays as written, as a file that does not exist; `Path.expanduser` would
    raise RuntimeError."""
    return Path(os.path.expanduser(text))
