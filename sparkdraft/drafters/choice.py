"""Which drafter runs with a model when the user names none: the package's own, the best one in the hub's cache, or the
MTP head in the model's own file.

Nothing is fetched here: where a published drafter is missing, the user is told which one, what it is reported to bring
and how to fetch it. A drafter that turns out not to fit is passed over, with the reason. What was chosen, and why, is
said too. How a drafter is opened, the caller says: the engine reads checkpoints (drafters/auto.py), and `sparkdraft
plan` their configs alone. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Generic, NamedTuple, TypeVar

from sparkdraft.core import Fallback, UserError
from sparkdraft.drafters import pairs
from sparkdraft.drafters.mtp_config import MTP, has_head
from sparkdraft.drafters.packaged import EMBEDDED, default_drafter
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.weights.hub import cached_snapshot

WITHOUT = "--drafter none goes without"
Found = TypeVar("Found")


class Picked(NamedTuple, Generic[Found]):
    drafter: Found | None
    fallbacks: list[Fallback]
    name: str = ""  # of the drafter


def pick(
    model: str,
    config: ModelConfig,
    names: Collection[str],
    find: Callable[[str], Found],
    find_head: Callable[[], Found],
) -> Picked[Found]:
    """model: as the user named it. names: of the tensors in its file, which may hold a head that drafts. find: opens
    the drafter of a folder; find_head: that head. Both raise UserError for one that does not fit."""
    if own := default_drafter(model):
        return Picked(find(own), [], EMBEDDED[model])
    found, holds = pairs.match(model, config), has_head(names)
    fallbacks, doubt = list[Fallback](), f" ({found.doubt})" if found and found.doubt else ""
    for known in found.target.published if found else []:
        folder = cached_snapshot(known.repo)
        if folder is None:
            continue
        try:
            drafter = find(str(folder))
        except UserError as error:
            fallbacks.append(Fallback(f"the drafter {known.repo} is passed over", str(error)))
            continue
        other = "; --drafter mtp takes the head in the model's own file" if holds else ""
        reason = f"it is in the hub's cache: {known.describe()}{doubt}{other}; {WITHOUT}"
        return Picked(drafter, [*fallbacks, Fallback(f"drafting with {known.repo}", reason, True)], known.repo)
    missing = _missing(found.target, doubt) if found else _undecided(pairs.alike(config))
    if holds:
        try:
            return Picked(find_head(), [*fallbacks, _own_head(found, missing)], MTP)
        except UserError as error:
            fallbacks.append(Fallback("the MTP head in the model's file is passed over", str(error)))
    return Picked(None, [*fallbacks, *(Fallback("no drafter", text) for text in missing)])


def _own_head(found: pairs.Match | None, missing: list[str]) -> Fallback:
    known = [d for d in found.target.drafters if d.kind == MTP and d.tokens] if found else []
    promise = f", {known[0].promise}" if known else ""
    instead = f"; no other drafter is in the hub's cache: {missing[0]}" if missing else ""
    reason = f"it is there{promise}{instead}; {WITHOUT}"
    return Fallback("drafting with the MTP head in the model's own file", reason, True)


def _missing(target: pairs.KnownTarget, doubt: str) -> list[str]:
    """What the user could fetch; empty if there is nothing."""
    if not target.published:
        return []
    best = target.published[0]
    return [f"`sparkdraft pull {best.repo}` fetches the one for {target.name}: {best.describe()}{doubt}"]


def _undecided(alike: list[pairs.KnownTarget]) -> list[str]:
    """The shape is that of several targets and the name is none of theirs: a wrong guess would only cost time."""
    named = [f"{t.published[0].repo} for {t.name}" for t in alike if t.published]
    if not named:
        return []
    return [f"the model's shape is that of several; name one with --drafter: {', '.join(named)}"]
