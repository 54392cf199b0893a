"""Finds the drafter that a user means: by name, or the best one for the model if none is named.

If none is named, the first of these that fits is taken: the one in this package, the best published one in the hub's
cache (drafters/pairs.py), the one in the target's file, such as an MTP head. Nothing is fetched; the user is told what
was chosen and why, or which drafter is missing and how to fetch it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from sparkdraft.core import Fallback, UserError
from sparkdraft.drafters import pairs
from sparkdraft.drafters.base import DraftBuild, DraftConfig, DrafterCaps, DrafterKind, InTarget, kinds
from sparkdraft.drafters.vocabulary import read_ids
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.weights.checkpoint import Checkpoint, open_checkpoint
from sparkdraft.weights.hub import cached_snapshot

if TYPE_CHECKING:
    from sparkdraft.cache.formats.dense import DenseKV
    from sparkdraft.drafters.base import Drafter
    from sparkdraft.kernels.ops import Ops
    from sparkdraft.models.common.blocks import Decoder
    from sparkdraft.weights.loader import Loader, WeightSource

ASSETS = Path(__file__).parent.parent / "assets"
EMBEDDED = {"smollm2": "smollm2-dflash"}  # model, as a user names it -> folder in ASSETS
WITHOUT = "--drafter none goes without"
Found = TypeVar("Found")


def default_drafter(model_name: str) -> str | None:
    """The folder of this package's drafter for the model, or None."""
    folder = EMBEDDED.get(model_name)
    if folder is None or not (ASSETS / folder / "config.json").is_file():
        return None
    return str(ASSETS / folder)


# ---- by name


def read_draft_config(config: Mapping[str, Any], names: Collection[str] = (), path: Path = Path()) -> DraftConfig:
    """Read a config.json. names: of the tensors beside it, () if they are not known. Raises UserError."""
    return kind_of(config).read(config, names, path)


def kind_of(config: Mapping[str, Any]) -> DrafterKind:
    """The kind that reads this config.json; the last one refuses what is not known."""
    return next(kind for kind in kinds().values() if kind.recognises(config))


def in_target(name: str) -> InTarget | None:
    """The drafter of this name, such as mtp, if targets have it in their own file."""
    kind = kinds().get(name)
    return kind.in_target if kind else None


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A drafter to be loaded: its config, and where its weights are."""

    config: DraftConfig
    source: WeightSource
    ids: tuple[int, ...] | None = None  # the only ones to be drafted, ascending; None: as the file says
    weights: str = "auto"  # how its floats are quantised at load (EngineConfig.drafter_weights)

    @property
    def caps(self) -> DrafterCaps:
        return self.config.caps(self.source.names())

    def asked(self, weights: str, vocabulary: str, target: ModelConfig) -> DraftSource:
        """The same drafter with what the user asks for. vocabulary: a file of ids, or "". Raises UserError."""
        source = replace(self, weights=weights)
        if not vocabulary:
            return source
        ids = read_ids(vocabulary, target.vocab_size)
        config = self.config.among(len(ids), self.source.names())
        return replace(source, config=config, ids=ids if len(ids) < target.vocab_size else None)

    def build(self, load: Loader, ops: Ops, target: Decoder, kv: DenseKV, context: int, max_seqs: int) -> Drafter:
        import torch

        ids = None if self.ids is None else torch.tensor(self.ids, dtype=torch.int64, device=load.device)
        return self.config.build(DraftBuild(load, ops, target, kv, context, max_seqs, ids))


def find_drafter(name: str, target: ModelConfig) -> DraftSource:
    """Open a folder or a hub id, and check that the drafter fits. Raises UserError."""
    checkpoint = open_drafter(name)
    draft = read_draft_config(checkpoint.config, checkpoint.names(), checkpoint.path)
    draft.check_fits(target)
    return DraftSource(draft, checkpoint)


def find_in_target(held: InTarget, checkpoint: Checkpoint, target: ModelConfig) -> DraftSource:
    """The drafter in the target's own checkpoint. Raises UserError."""
    draft = held.read(target, checkpoint.names(), checkpoint.path)
    draft.check_fits(target)
    return DraftSource(draft, checkpoint)


def open_drafter(name: str) -> Checkpoint:
    """Open a folder, a hub id, or the name of a drafter inside the package. Raises UserError."""
    if name in EMBEDDED.values() and not Path(name).is_dir():
        return open_checkpoint(str(ASSETS / name))
    if name.endswith(".gguf"):
        raise UserError(f"The drafter {name} is a GGUF file, which is not supported: pass a folder with safetensors.")
    return open_checkpoint(name)


# ---- by itself


class Choice(NamedTuple, Generic[Found]):
    drafter: Found | None
    fallbacks: list[Fallback]
    name: str = ""  # of the drafter


def choose(model: str, config: ModelConfig, checkpoint: Checkpoint | None = None) -> Choice[DraftSource]:
    """The drafter that runs when the user names none. model: as the user named it. checkpoint: may hold a drafter."""

    def held(found: InTarget) -> DraftSource:
        assert checkpoint is not None, "the drafter was found in it"
        return find_in_target(found, checkpoint, config)

    names = checkpoint.names() if checkpoint else ()
    return pick(model, config, names, lambda folder: find_drafter(folder, config), held)


def pick(
    model: str,
    config: ModelConfig,
    names: Collection[str],
    find: Callable[[str], Found],
    find_held: Callable[[InTarget], Found],
) -> Choice[Found]:
    """names: of the tensors in the model's file. find, find_held: open the drafter of a folder and the one in the
    model's file (`sparkdraft plan` only their configs); both raise UserError for one that does not fit."""
    if own := default_drafter(model):
        return Choice(find(own), [], EMBEDDED[model])
    found = pairs.match(model, config)
    own_kinds = [(kind, kind.in_target) for kind in kinds().values() if kind.in_target]
    held = next(((kind, place) for kind, place in own_kinds if place.holds(names)), None)
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
        other = f"; --drafter {held[0].name} takes the {held[1].label} in the model's own file" if held else ""
        reason = f"it is in the hub's cache: {known.describe()}{doubt}{other}; {WITHOUT}"
        return Choice(drafter, [*fallbacks, Fallback(f"drafting with {known.repo}", reason, True)], known.repo)
    missing = _missing(found.target, doubt) if found else _undecided(pairs.alike(config))
    if held:
        kind, place = held
        try:
            return Choice(find_held(place), [*fallbacks, _drafting_with_own(kind, place, found, missing)], kind.name)
        except UserError as error:
            fallbacks.append(Fallback(f"the {place.label} in the model's file is passed over", str(error)))
    return Choice(None, [*fallbacks, *(Fallback("no drafter", text) for text in missing)])


def _drafting_with_own(kind: DrafterKind, place: InTarget, found: pairs.Match | None, missing: list[str]) -> Fallback:
    known = [d for d in found.target.drafters if d.kind == kind.name and d.tokens] if found else []
    promise = f", {known[0].promise}" if known else ""
    instead = f"; no other drafter is in the hub's cache: {missing[0]}" if missing else ""
    return Fallback(
        f"drafting with the {place.label} in the model's own file", f"it is there{promise}{instead}; {WITHOUT}", True
    )


def _missing(target: pairs.KnownTarget, doubt: str) -> list[str]:
    """The drafter that the user could fetch; empty if there is none."""
    if not target.published:
        return []
    best = target.published[0]
    return [f"`sparkdraft pull {best.repo}` fetches the one for {target.name}: {best.describe()}{doubt}"]


def _undecided(alike: list[pairs.KnownTarget]) -> list[str]:
    """The message for a model whose shape is that of several targets and whose name is none of theirs."""
    named = [f"{t.published[0].repo} for {t.name}" for t in alike if t.published]
    if not named:
        return []
    return [f"the model's shape is that of several; name one with --drafter: {', '.join(named)}"]
