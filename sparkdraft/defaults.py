"""How a request is sampled where it names nothing: the model's own values, or what the user sets instead.

Hugging Face models have a `generation_config.json`, and weights/gguf.py gives GGUF files the same keys. The
server uses these values for every field that a request leaves out; `LLM.default_params` gives them to Python programs.
No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sparkdraft.core import SamplingParams, UserError

KINDS: dict[str, Callable[[Any], float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
}
OPENAI: dict[str, float] = {"temperature": 1.0}
BASES = ("model", "openai")


def model_defaults(generation: Mapping[str, Any]) -> dict[str, float]:
    """The values of generation_config.json; empty if it names none. As in Hugging Face, do_sample = false is greedy
    decoding, whatever the temperature."""
    named = {name: generation[name] for name in KINDS if generation.get(name) is not None}
    if named.get("top_k") == -1:
        named["top_k"] = 0
    if generation.get("do_sample") is False:
        named = {"temperature": 0.0} | {k: v for k, v in named.items() if k == "repetition_penalty"}
    return _checked(named, "the model's generation_config.json")


def usable_defaults(generation: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """The values that can be used, and for each of the others, by name, what is wrong with it."""
    problems: dict[str, str] = {}
    for name in KINDS:
        try:
            model_defaults({key: generation.get(key) for key in ("do_sample", name)})
        except UserError as error:
            problems[name] = str(error)
    return model_defaults({key: value for key, value in generation.items() if key not in problems}), problems


def resolve(setting: str, model: Mapping[str, float]) -> dict[str, float]:
    """The values in effect. setting: "model" or "openai", or single values over the model's:
    "temperature=0.7,top_p=0.9"."""
    base, values = parse(setting)
    return OPENAI | (dict(model) if base == "model" else {}) | values


def parse(setting: str) -> tuple[str, dict[str, float]]:
    base, values = "model", {}
    for i, part in enumerate(piece.strip() for piece in setting.split(",")):
        name, equals, value = (text.strip() for text in part.partition("="))
        if i == 0 and name in BASES and not equals:
            base = name
        elif name in KINDS and equals:
            values[name] = value
        else:
            raise UserError(
                f"sampling_defaults has '{part}'; it must be model, openai, or values of {', '.join(KINDS)} "
                "such as temperature=0.7,top_p=0.9"
            )
    return base, _checked(values, "sampling_defaults")


def describe(values: Mapping[str, float]) -> str:
    """For people: 'temperature 0.2, top_p 0.9'."""
    if values["temperature"] == 0:
        values = {name: value for name, value in values.items() if name == "repetition_penalty"}
        return ", ".join(["greedy", *(f"{name} {value:g}" for name, value in values.items())])
    return ", ".join(f"{name} {value:g}" for name, value in values.items())


def _checked(named: Mapping[str, Any], source: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in named.items():
        try:
            found[name] = KINDS[name](value)
            SamplingParams(**{name: found[name]})  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            raise UserError(f"{source} has {name} '{value}'; it must be a number") from None
        except UserError as error:
            raise UserError(f"{source} is wrong: {error}") from None
    return found
