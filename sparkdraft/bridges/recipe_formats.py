"""The recipe formats of two launchers for DGX Sparks, as far as they are documented: fields, types, what is required.

"sparkrun" is version 2 of spark-arena/sparkrun (RECIPES.md), "eugr" version 1 of eugr/spark-vllm-docker
(recipes/README.md). sparkrun reads both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparkdraft.core import UserError

SPARKRUN, EUGR = "sparkrun", "eugr"
VLLM_IMAGE = "vllm/vllm-openai"
PLACEHOLDER = re.compile(r"(?<!\{)\{(\w+)\}(?!\})")


@dataclass(frozen=True, slots=True)
class Format:
    version: str
    required: tuple[str, ...]
    fields: Mapping[str, type | tuple[type, ...]]
    doubled: bool  # braces of JSON in the command are written twice
    given: tuple[str, ...] = ()  # parameters that the launcher fills in itself


COMMON: dict[str, type | tuple[type, ...]] = {
    "recipe_version": str,
    "container": str,
    "command": str,
    "model": str,
    "defaults": dict,
    "env": dict,
}
FORMATS = {
    EUGR: Format(
        "1",
        ("name", "recipe_version", "container", "command"),
        COMMON
        | {"name": str, "description": str, "cluster_only": bool, "solo_only": bool, "build_args": list, "mods": list},
        doubled=True,
    ),
    SPARKRUN: Format(
        "2",
        ("model",),
        COMMON
        | {"model_revision": str, "runtime": str, "runtime_version": str, "min_nodes": int, "max_nodes": int}
        | {"containers": list, "runtime_config": dict, "runtime_cache": (bool, dict), "stop_after_post": bool}
        | {"executor": str, "builder": str, "builder_config": dict}
        | {"metadata": dict, "benchmark": dict, "executor_config": dict, "readiness": dict}
        | {"pre_exec": list, "post_exec": list, "post_commands": list},
        doubled=False,
        given=("model",),
    ),
}
RUNTIMES = (
    "vllm",
    "vllm-distributed",
    "vllm-ray",
    "sglang",
    "llama-cpp",
    "trtllm",
    "atlas",
    "eugr-vllm",
    "modular-max",
)


def check(form: str, recipe: Mapping[str, Any]) -> None:
    """Raises UserError, with the field, for a recipe that the launcher would refuse or misread."""
    rules = FORMATS[form]
    if missing := [name for name in rules.required if not recipe.get(name)]:
        raise UserError(f"the {form} recipe has no {missing[0]}")
    for name, value in recipe.items():
        if name not in rules.fields:
            raise UserError(f"the {form} recipe has '{name}', which is no field of version {rules.version}")
        if not isinstance(value, rules.fields[name]):
            raise UserError(f"{name} of the {form} recipe is {value!r}, which is not what the launcher reads")
    if recipe.get("recipe_version", rules.version) != rules.version:
        raise UserError(f"the {form} recipe says version {recipe['recipe_version']}, not {rules.version}")
    if recipe.get("runtime", RUNTIMES[0]) not in RUNTIMES:
        raise UserError(f"the runtime {recipe['runtime']} is none of {', '.join(RUNTIMES)}")
    if not all(isinstance(value, str) for value in recipe.get("env", {}).values()):
        raise UserError(f"env of the {form} recipe has a value that is no text")
    unknown = set(PLACEHOLDER.findall(recipe.get("command", ""))) - {*recipe.get("defaults", {}), *rules.given}
    if unknown:
        raise UserError(f"the command of the {form} recipe has {{{unknown.pop()}}}, which is no key of defaults")
    keeps_entrypoint = recipe.get("executor_config", {}).get("entrypoint") != ""
    if form == SPARKRUN and keeps_entrypoint and needs_no_entrypoint(recipe.get("container", "")):
        raise UserError(
            f"the image {recipe['container']} starts vLLM itself and would read the launcher's shell as its flags; "
            'set entrypoint to "" in executor_config'
        )
    if "command" in recipe:
        rendered(form, recipe)


def needs_no_entrypoint(image: str) -> bool:
    """Whether the image's own entrypoint is a server, as that of vLLM's images: sparkrun then needs it cleared."""
    return image.split(":")[0].removeprefix("docker.io/") == VLLM_IMAGE


def rendered(form: str, recipe: Mapping[str, Any]) -> str:
    """The command as the launcher would run it: by Python's str.format for eugr's, and with only {name} replaced for
    sparkrun's. Raises UserError."""
    values = {**{name: recipe[name] for name in FORMATS[form].given}, **recipe.get("defaults", {})}
    if not FORMATS[form].doubled:
        return PLACEHOLDER.sub(lambda found: str(values[found[1]]), recipe["command"])
    try:
        return str(recipe["command"].format(**values))
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(
            f"the command of the {form} recipe cannot be filled in ({error}); write braces of JSON twice"
        ) from None
