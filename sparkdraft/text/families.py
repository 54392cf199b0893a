"""Chat behaviour of model families that their files and templates do not tell, by the `model_type` of config.json."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sparkdraft.core import whole
from sparkdraft.util.fields import mapping

AUTO, NONE = "auto", "none"
REASONING_PARSERS = ("think", "gemma4", "harmony")  # text/reasoning
TOOL_PARSERS = ("hermes", "qwen3_xml", "gemma4", "harmony", "generic")  # text/tools


@dataclass(frozen=True, slots=True)
class Family:
    reasoning: str = AUTO  # one of REASONING_PARSERS; auto: the template's marks decide
    tools: str = AUTO  # one of TOOL_PARSERS
    thinks: bool | None = None  # the default of models with a switch; None: the template's
    efforts: tuple[str, ...] = ()  # the values of reasoning_effort; (): there is only a switch
    stops: tuple[str, ...] = ()  # tokens that end an answer, even if the files do not name them
    parts: tuple[str, ...] = ()  # tokens that end only a part of an answer, even if the files name them


QWEN = Family(stops=("<|im_end|>",))
GEMMA4 = Family("gemma4", "gemma4", thinks=False, stops=("<turn|>", "<|tool_response>"))
HARMONY = Family(
    "harmony",
    "harmony",
    efforts=("low", "medium", "high"),
    stops=("<|return|>", "<|call|>"),  # a call waits for its result
    parts=("<|end|>",),  # of a message: the answer follows the thoughts
)
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_text"), QWEN),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), QWEN),
    **dict.fromkeys(("gemma4", "gemma4_text"), GEMMA4),
    "gpt_oss": HARMONY,
}
OTHERS = Family()


def family_of(model_type: str) -> Family:
    return FAMILIES.get(model_type, OTHERS)


def stop_ids(
    generation: Mapping[str, Any], config: Mapping[str, Any], eos: str | None, id_of: Callable[[str], int | None]
) -> frozenset[int]:
    """The tokens that end a text: those of the first of generation_config.json, config.json and its text_config that
    names some, the tokenizer's end of text (eos), and the family's. id_of: None for a token without an id."""
    family = family_of(config.get("model_type") or "")
    named = (_ids(source.get("eos_token_id")) for source in (generation, config, mapping(config, "text_config")))
    found = {*next(filter(None, named), []), *_known(id_of, [eos] if eos else []), *_known(id_of, family.stops)}
    return frozenset(found - _known(id_of, family.parts))


def _known(id_of: Callable[[str], int | None], tokens: Iterable[str]) -> set[int]:
    return {index for index in map(id_of, tokens) if index is not None}


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list | tuple) else [] if value is None else [value]
    return [whole("eos_token_id in the model's generation_config.json or config.json", each) for each in values]
