"""Names as users type them: one rule for their spelling, and what "did you mean" offers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

NEAR = 0.75  # likeness from which one name is taken for another: 1 is the same, a letter too much in eight is 0.94
MOST = 4  # names that are offered at once


def spelled(given: str, known: Iterable[str]) -> str | None:
    """Return the known name that has the same letters and digits: case, hyphens, dots and underscores do not count."""
    names = list(known)
    return given if given in names else next((name for name in names if _key(name) == _key(given)), None)


def alike(given: str, known: Iterable[str], near: float = NEAR, family: str = "") -> str:
    """Return the name that is most like this one, or an empty text if none is. family: a prefix of all names, which
    makes no two of them alike."""
    names = {_key(name.removeprefix(family)): name for name in known}
    found = difflib.get_close_matches(_key(given.removeprefix(family)), names, n=1, cutoff=near)
    return names[found[0]] if found else ""


def did_you_mean(given: str, known: Iterable[str], family: str = "") -> str:
    """Return the question, with the names that begin like this one or else the one that is most like it. It is an
    empty text if no name is near."""
    names = list(known)
    begins = [name for name in names if _key(name).startswith(_key(given))] if _key(given) else []
    *others, last = begins[:MOST] or [alike(given, names, family=family)]
    return f"did you mean {', '.join(others)}{' or ' if others else ''}{last}?" if last else ""


def _key(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
