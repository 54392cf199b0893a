"""Which drafter runs with a model when the user names none: the package's own, or the best one in the hub's cache.

Nothing is fetched here: where a published drafter is missing, the user is told which one, what it is reported to bring
and how to fetch it. A drafter that turns out not to fit is passed over, with the reason.
"""

from __future__ import annotations

from typing import NamedTuple

from sparkdraft.core import UserError
from sparkdraft.models.config import ModelConfig
from sparkdraft.spec import pairs
from sparkdraft.spec.registry import DraftSource, default_drafter, find_drafter
from sparkdraft.weights.hub_repo import cached_snapshot
from sparkdraft.weights.loader import Note


class Choice(NamedTuple):
    drafter: DraftSource | None
    notes: list[Note]


def choose(model: str, config: ModelConfig) -> Choice:
    """model: as the user named it."""
    if own := default_drafter(model):
        return Choice(find_drafter(own, config), [])
    found = pairs.match(model, config)
    if found is None:
        return Choice(None, _undecided(pairs.alike(config)))
    notes, doubt = [], f" ({found.doubt})" if found.doubt else ""
    for known in found.target.readable:
        folder = cached_snapshot(known.repo)
        if folder is None:
            continue
        try:
            drafter = find_drafter(str(folder), config)
        except UserError as error:
            notes.append(Note(f"the drafter {known.repo} is passed over", str(error)))
            continue
        reason = f"it is in the hub's cache: {known.describe()}{doubt}; --drafter none goes without"
        return Choice(drafter, [*notes, Note(f"drafting with {known.repo}", reason)])
    return Choice(None, [*notes, *_missing(model, found.target, doubt)])


def _missing(model: str, target: pairs.KnownTarget, doubt: str) -> list[Note]:
    if not target.readable:
        return []
    best = target.readable[0]
    command = f"`sparkdraft pull {best.repo}`"
    return [Note("no drafter", f"{command} fetches the one for {target.name}: {best.describe()}{doubt}")]


def _undecided(alike: list[pairs.KnownTarget]) -> list[Note]:
    """The shape is that of several targets and the name is none of theirs: a wrong guess would only cost time."""
    named = [f"{t.readable[0].repo} for {t.name}" for t in alike if t.readable]
    if not named:
        return []
    return [Note("no drafter", f"the model's shape is that of several; name one with --drafter: {', '.join(named)}")]
