"""Targets and the drafters that are published for them: the table pairs.json, and which entry fits a model.

Figures are those that others report, with their source; "tokens" are tokens per step. A model is found in the table by
its name and shape. A fine-tune or a quantised re-upload has another name and is found by its shape, and the user is
told, because a drafter made for other weights may be accepted less.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sparkdraft.core import UserError
from sparkdraft.drafters.base import kinds
from sparkdraft.models.common.config import ModelConfig

TABLE = Path(__file__).with_name("pairs.json")
KINDS = {  # of published drafters, the one that is preferred first
    "dflash": "DFlash",
    "dflash2": "DFlash2",
    "dspark": "DSpark",
    "mtp": "an MTP head in the model's own file",
    "assistant": "a Gemma 4 assistant",
}
ORDER = list(KINDS)
THINKING = {"on": "trained with thinking", "off": "trained without thinking", "any": ""}
ENDINGS = ("-instruct", "-it")  # of names, which re-uploads leave out


@dataclass(frozen=True, slots=True)
class KnownDrafter:
    repo: str  # empty: it is in the target's own file
    kind: str  # one of KINDS
    dialect: str
    block: int  # the anchor included
    layers: int | None
    aux_layers: tuple[int, ...]  # target layers that it reads, from 0; empty: not known, or the final norm's result
    window: int  # of most of its layers; 0: none
    gib: float | None
    thinking: str  # one of THINKING
    context: int | None  # tokens that it was trained on, at most
    tokens: tuple[float, ...]  # reported tokens per step, in the order that 'source' names; empty: no figure
    source: str

    @property
    def is_read(self) -> bool:
        return self.kind in kinds()

    @property
    def mean_tokens(self) -> float:
        return sum(self.tokens) / len(self.tokens) if self.tokens else 0.0

    @property
    def promise(self) -> str:
        """Its reported tokens per step, in words."""
        if not self.tokens:
            return "no acceptance is reported"
        return f"{' / '.join(f'{t:g}' for t in self.tokens)} tokens per step ({self.source})"

    def describe(self) -> str:
        size = [f"{self.gib:g} GiB"] if self.gib else []
        trained = [THINKING[self.thinking]] if THINKING[self.thinking] else []
        trained += [f"on up to {self.context:,} tokens"] if self.context else []
        return ", ".join([*size, self.promise, *trained])


@dataclass(frozen=True, slots=True)
class KnownTarget:
    name: str
    model_type: str
    layers: int
    hidden: int
    vocab: int
    drafters: tuple[KnownDrafter, ...]

    @property
    def short(self) -> str:
        """The part of its name that re-uploads keep, in lower case."""
        name = self.name.split("/")[-1].lower()
        return next((name.removesuffix(ending) for ending in ENDINGS if name.endswith(ending)), name)

    def has_shape(self, config: ModelConfig) -> bool:
        ends = (config.num_layers, config.hidden_size, config.vocab_size)
        return ends == (self.layers, self.hidden, self.vocab) and _family(config.model_type) == self.model_type

    @property
    def readable(self) -> list[KnownDrafter]:
        """The drafters that can be run, the preferred kind first, and of one kind the one with the best figures."""
        return sorted((d for d in self.drafters if d.is_read), key=lambda d: (ORDER.index(d.kind), -d.mean_tokens))

    @property
    def published(self) -> list[KnownDrafter]:
        """The drafters with a repository of their own."""
        return [drafter for drafter in self.readable if drafter.repo]


class Match(NamedTuple):
    target: KnownTarget
    doubt: str  # why the drafter may not fit as well as for the target itself; empty for the target itself


@cache
def targets() -> tuple[KnownTarget, ...]:
    found = []
    for entry in json.loads(TABLE.read_text(encoding="utf-8")):
        drafters = [
            KnownDrafter(**{**d, "aux_layers": tuple(d["aux_layers"]), "tokens": tuple(d["tokens"] or ())})
            for d in entry.pop("drafters")
        ]
        found.append(KnownTarget(entry.pop("target"), **entry, drafters=tuple(drafters)))
    return tuple(found)


def match(name: str, config: ModelConfig) -> Match | None:
    """The target of the table that this model is, or is made from. name: as a user gave it, or a file's."""
    alike = [target for target in targets() if target.has_shape(config)]
    if exact := next((target for target in alike if target.name == name), None):
        return Match(exact, "")
    simple = name.lower().replace("_", "-")
    named = sorted((t for t in alike if t.short in simple), key=lambda t: -len(t.short))
    if named:
        return Match(named[0], f"{name} has the shape and the name of {named[0].name}; other weights may accept less")
    if len(alike) == 1:
        return Match(alike[0], f"{name} has the shape of {alike[0].name}; other weights may accept less")
    return None


def alike(config: ModelConfig) -> list[KnownTarget]:
    """All targets of this shape. If there are several and the name says nothing, the user must choose."""
    return [target for target in targets() if target.has_shape(config)]


def check_pair(repo: str, config: ModelConfig) -> None:
    """Refuse a drafter of the table that cannot run with this model, before anything is fetched. Raises UserError."""
    made_for = [(t, d) for t in targets() for d in t.drafters if d.repo == repo]
    if not made_for:
        return
    target, drafter = made_for[0]
    if not drafter.is_read:
        raise UserError(f"{repo} is {KINDS[drafter.kind]}, which is not read yet: use {_instead(target)}.")
    if not any(each.has_shape(config) for each, _ in made_for):
        shape = f"{target.layers} layers of {target.hidden} and {target.vocab} ids"
        here = f"{config.num_layers} of {config.hidden_size} and {config.vocab_size}"
        raise UserError(
            f"{repo} drafts for {target.name}, a {target.model_type} model with {shape}; this is a {config.model_type} "
            f"model with {here}: leave --drafter out, or name one that was made for it."
        )


def _instead(target: KnownTarget) -> str:
    """A repository to use instead, or a name such as mtp for a drafter without one."""
    return target.readable[0].repo or f"--drafter {target.readable[0].kind}" if target.readable else "--drafter none"


def _family(model_type: str) -> str:
    """A text model has the same layers alone as inside a multimodal model."""
    return model_type.removesuffix("_text")
