"""Recipes: a model, its drafter and settings under one name, for `serve --config` and `recipe run`.

Every pair in drafters/pairs.json has one, and so has every set of settings that users have reported (recipes.json).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from sparkdraft.core import UserError
from sparkdraft.drafters import pairs
from sparkdraft.drafters.mtp import MTP
from sparkdraft.util.names import did_you_mean, spelled

TABLE = Path(__file__).with_name("recipes.json")


@dataclass(frozen=True, slots=True)
class Recipe:
    name: str
    target: pairs.KnownTarget
    checkpoint: str  # what is loaded: the target, or a quantised version
    drafter: pairs.KnownDrafter
    settings: dict[str, Any] = field(default_factory=dict)  # fields of EngineConfig
    source: str = ""  # who reported the settings, and the speed

    def describe(self) -> str:
        drafter = self.drafter.repo or "its own MTP head"
        return f"{self.checkpoint} with {drafter}"

    def options(self) -> dict[str, Any]:
        """Fields of EngineConfig. A drafter that we do not read is replaced by the best one that we do."""
        drafter = self.drafter if self.drafter.is_read else next(iter(self.target.readable), None)
        name = (drafter.repo or MTP) if drafter else "none"
        return {"model": self.checkpoint, "drafter": name, **self.settings}

    def toml(self) -> str:
        """A file for `serve --config`."""
        options = self.options()
        notes = [self.describe(), *([self.source] if self.source else []), self.drafter.describe()]
        if not self.drafter.is_read:
            notes.append(f"{pairs.KINDS[self.drafter.kind]} is not read here: {options['drafter']} instead")
        lines = [f"# {note}" for note in notes] + [f"{name} = {json.dumps(value)}" for name, value in options.items()]
        return "\n".join(lines) + "\n"


@cache
def recipes() -> dict[str, Recipe]:
    """All recipes by name: those with reported settings first, then one for each pair."""
    found: dict[str, Recipe] = {}
    targets = {target.name: target for target in pairs.targets()}
    for entry in json.loads(TABLE.read_text(encoding="utf-8")):
        target = targets[entry.pop("target")]
        drafter = next(each for each in target.drafters if each.repo == entry["drafter"])
        found[entry["name"]] = Recipe(**{**entry, "target": target, "drafter": drafter})
    for target in targets.values():
        for drafter in target.drafters:
            name = f"{target.short}-{drafter.kind}"
            if name in found:
                name = f"{target.short}-{drafter.repo.split('/')[0].lower()}-{drafter.kind}"
            assert name not in found, name
            found[name] = Recipe(name, target, target.name, drafter)
    return found


def find_recipe(name: str) -> Recipe:
    known = recipes()
    if (found := spelled(name, known)) is None:
        question = did_you_mean(name, known)
        raise UserError(f"there is no recipe '{name}'; {question and question + ' '}`sparkdraft recipe list` names all")
    return known[found]
