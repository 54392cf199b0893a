"""What families of models do in a chat beyond what their files say, by the `model_type` of config.json. One table.

A chat template shows most of it: the marks of thoughts and calls in it are those that the model was taught, and
text/style.py looks for them. A family's line here says the rest, and what holds whatever template a file brings: which
parsers its text needs, whether it thinks unasked, and which tokens end an answer. No torch.
"""

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
    reasoning: str = AUTO  # one of REASONING_PARSERS; auto: the template's marks decide, as they do for Qwen's Coders
    tools: str = AUTO  # one of TOOL_PARSERS
    thinks: bool | None = None  # where nobody asks, in models that have a switch; None: as the template has it
    efforts: tuple[str, ...] = ()  # how much it can think; none are named where there is no more than a switch
    stops: tuple[str, ...] = ()  # tokens that end an answer, also where the files do not name them
    parts: tuple[str, ...] = ()  # tokens that end a part of an answer, and never all of it, whatever the files name


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
    "qwen3": QWEN,
    "qwen3_moe": QWEN,
    "qwen3_next": QWEN,
    "qwen3_5": QWEN,
    "qwen3_5_text": QWEN,
    "qwen3_5_moe": QWEN,
    "qwen3_5_moe_text": QWEN,
    "gemma4": GEMMA4,
    "gemma4_text": GEMMA4,
    "gpt_oss": HARMONY,
}
OTHERS = Family()


def family_of(model_type: str) -> Family:
    return FAMILIES.get(model_type, OTHERS)


def stop_ids(
    generation: Mapping[str, Any], config: Mapping[str, Any], eos: str | None, id_of: Callable[[str], int | None]
) -> frozenset[int]:
    """The tokens that end a text: those of the first file that names some (generation_config.json, config.json, the
    text_config within it), the tokenizer's end of text, and what the family demands.

    eos: the tokenizer's end of text, if it has one. id_of: None for a token that the vocabulary does not have.
    """
    family = family_of(config.get("model_type") or "")
    named = (_ids(source.get("eos_token_id")) for source in (generation, config, mapping(config, "text_config")))
    found = {*next(filter(None, named), []), *_known(id_of, [eos] if eos else []), *_known(id_of, family.stops)}
    return frozenset(found - _known(id_of, family.parts))


def _known(id_of: Callable[[str], int | None], tokens: Iterable[str]) -> set[int]:
    return {index for index in map(id_of, tokens) if index is not None}


def _ids(value: Any) -> list[int]:
    """The value of a file, which may be wrong."""
    values = value if isinstance(value, list | tuple) else [] if value is None else [value]
    return [whole("eos_token_id in the model's generation_config.json or config.json", each) for each in values]
