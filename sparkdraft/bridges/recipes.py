"""Recipes: a model, its drafter and settings under one name, for `serve --config` and for the launchers of DGX Sparks.

There is one for every pair of drafters/pairs.json, and one for each that users have reported settings for
(recipes.json).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from sparkdraft.bridges.recipe_formats import EUGR, SPARKRUN, VLLM_IMAGE, check, needs_no_entrypoint
from sparkdraft.bridges.vllm.command import Choices, VllmCommand, vllm_command
from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.drafters import pairs
from sparkdraft.drafters.mtp_config import MTP
from sparkdraft.server.config import ServerConfig
from sparkdraft.util.names import did_you_mean, spelled

TABLE = Path(__file__).with_name("recipes.json")
PORT = 8000
# parameters that launchers let their users change, by the flag that they fill in
PARAMETERS = {
    "host": "host",
    "port": "port",
    "gpu-memory-utilization": "gpu_memory_utilization",
    "max-model-len": "max_model_len",
    "max-num-seqs": "max_num_seqs",
    "max-num-batched-tokens": "max_num_batched_tokens",
}


@dataclass(frozen=True, slots=True)
class Recipe:
    name: str
    target: pairs.KnownTarget
    checkpoint: str  # what is loaded: the target itself, or a quantised one
    drafter: pairs.KnownDrafter
    settings: dict[str, Any] = field(default_factory=dict)  # fields of EngineConfig
    source: str = ""  # who reported the settings, and what they gave

    def describe(self) -> str:
        drafter = self.drafter.repo or "its own MTP head"
        return f"{self.checkpoint} with {drafter}"

    def options(self) -> dict[str, Any]:
        """Fields for this engine. A drafter that it does not read is replaced by the best one that it does."""
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

    def for_vllm(self, version: str) -> VllmCommand:
        """The same pair as a command of vLLM that a launcher puts into a container."""
        kind = "mtp" if self.drafter.kind in ("mtp", "assistant") else "auto"
        engine = EngineConfig(model=self.checkpoint, drafter=self.drafter.repo or MTP, **self.settings)
        server = ServerConfig(engine, host="0.0.0.0", port=PORT, allow_public=True)
        return vllm_command(server, Choices(method=kind, version=version))

    def launcher(self, form: str, version: str, container: str = "") -> str:
        """As a recipe of sparkrun or of spark-vllm-docker."""
        command = self.for_vllm(version)
        defaults = {name: command.flags[flag] for flag, name in PARAMETERS.items() if flag in command.flags}
        text = _template(command, doubled=form == EUGR)
        shared = {"model": command.model, "defaults": {**defaults, "tensor_parallel": 1}, "env": {}, "command": text}
        found: dict[str, Any]
        if form == EUGR:
            about = {"name": self.name, "description": self.describe()}
            found = {"recipe_version": "1", **about, "container": container or "vllm-node", "mods": [], **shared}
        elif form == SPARKRUN:
            image = container or f"{VLLM_IMAGE}:v{version}"
            about = {"description": self.describe(), "category": "chat"}
            found = {
                "recipe_version": "2",
                "runtime": "vllm-distributed",
                "container": image,
                "min_nodes": 1,
                "max_nodes": 1,
            }
            found |= {"executor_config": {"entrypoint": ""}} if needs_no_entrypoint(image) else {}
            found |= {**shared, "metadata": about}
        else:
            raise UserError(f"--form is '{form}'; it must be toml, {SPARKRUN} or {EUGR}")
        check(form, found)
        return _yaml(found)


def _template(command: VllmCommand, doubled: bool) -> str:
    """The command with the launcher's parameters in it. doubled: braces of JSON are written twice."""
    lines = [shlex.join(["vllm", "serve", command.model])]
    for word in command.words()[3:]:
        if word.startswith("--"):
            lines.append(word)
        else:
            text = shlex.quote(word)
            text = text.replace("{", "{{").replace("}", "}}") if doubled else text
            name = PARAMETERS.get(lines[-1].removeprefix("--"))
            lines[-1] += f" {{{name}}}" if name else f" {text}"
    lines.append("--tensor-parallel-size {tensor_parallel}")
    return " \\\n    ".join(lines) + "\n"


class _Blocks(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


def _block(dumper: yaml.SafeDumper, text: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Blocks.add_representer(str, _block)


def _yaml(found: Mapping[str, Any]) -> str:
    return str(yaml.dump(dict(found), Dumper=_Blocks, sort_keys=False, width=200, allow_unicode=True))


@cache
def recipes() -> dict[str, Recipe]:
    """All recipes by name: first those with reported settings, then the pairs of the table."""
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
