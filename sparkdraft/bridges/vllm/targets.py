"""Finds what vLLM must be told about a model: its family, its weights, and the drafter to use with its depth.

The facts come from config.json if that is at hand, else from the model's name. The drafter is the user's, or the best
one that is known for the model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.drafters import pairs
from sparkdraft.drafters.base import InTarget
from sparkdraft.drafters.find import EMBEDDED, in_target, kind_of, read_draft_config
from sparkdraft.drafters.pairs import KnownDrafter
from sparkdraft.models.registry import read_config
from sparkdraft.text.reasoning import by_marks
from sparkdraft.util.fields import read_chat_template
from sparkdraft.util.names import user_path
from sparkdraft.weights.checkpoint import read_config_json
from sparkdraft.weights.hub import portable_name

HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # some layers are recurrent
WINDOWED = ("gemma3", "gemma4", "gpt_oss")  # some layers have a sliding window
FORMATS = (("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"), ("int4|awq|gptq|autoround|w4a16", "int4"), ("fp8", "fp8"))
METHODS = ("auto", "dflash", "mtp", "ngram")
ORDER = ("dflash", "mtp", "dflash2", "dspark")  # preference of auto: the longest established first
NGRAM_DEPTH = 7
# Drafts per step of an MTP head that is not in drafters/pairs.json, and of Gemma 4's assistants, whose best number of
# drafts on a DGX Spark was 4 (80 tok/s; 67 with 2, 72 with 6).
HEAD_DEPTH = 4
SCHEDULER = "--scheduler-cls sparkdraft.bridges.vllm.plugin.scheduler.DepthScheduler, where this package is beside vLLM"
NAMES = {"dflash2": "dflash"}  # vLLM's names where they differ


@dataclass(frozen=True, slots=True)
class Target:
    name: str  # a hub id or a path, as another engine loads it
    family: str  # model_type of its text model
    weights: str  # quantisation of its file; empty: none, or unknown
    known: pairs.KnownTarget | None
    template: str | None = None  # its chat template, if the model is a folder with one
    doubt: str = ""  # why `known` may be wrong, for a note

    @property
    def is_hybrid(self) -> bool:
        return self.family in HYBRID

    @property
    def writes_code(self) -> bool:
        """True for Qwen's Coders, whose tool calls have their own format."""
        return "coder" in self._title

    @property
    def thinks(self) -> bool:
        """False for those of Qwen's models that write no reasoning, by their name or template. vLLM's parser takes all
        text up to an end mark for reasoning, and would leave their answers empty."""
        if not self.family.startswith("qwen"):
            return True
        is_named_so = "coder" in self._title or "instruct" in self._title
        return not is_named_so and (self.template is None or by_marks(self.template)[0] is not None)

    @property
    def _title(self) -> str:
        """The model's own name, without folders; for a snapshot in the hub's cache, the repository's."""
        parts = Path(self.name.lower()).parts
        return parts[-3] if parts[-2:-1] == ("snapshots",) else parts[-1]


def find_target(model: str) -> Target:
    """Downloads config.json only if neither a local file nor the name says enough."""
    name = portable_name(model)
    by_name = None if user_path(name).exists() or _is_cached(name) else _named(name)
    if by_name:
        doubt = "" if by_name.name == name else f"{name} is taken for {by_name.name} by its name"
        return Target(name, by_name.model_type, _weights(name, {}), by_name, doubt=doubt)
    raw = read_config_json(model)
    try:
        match = pairs.match(name, read_config(raw))
    except UserError:  # an architecture that this engine does not have, and others may
        match = None
    family, folder = str(raw.get("model_type") or "").removesuffix("_text"), user_path(name)
    known, doubt = (match.target, match.doubt) if match else (None, "")
    template = read_chat_template(folder) if folder.is_dir() else None
    return Target(name, family, _weights(name, raw), known, template, doubt)


def _named(name: str) -> pairs.KnownTarget | None:
    simple = name.lower().replace("_", "-")
    named = [target for target in pairs.targets() if target.name == name or target.short in simple]
    return max(named, key=lambda target: (target.name == name, len(target.short)), default=None)


def _is_cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return "/" in name and not Path(name).is_absolute() and isinstance(try_to_load_from_cache(name, "config.json"), str)


def _weights(name: str, config: dict[str, Any]) -> str:
    """Returns the format of quantised weights, from config.json or else from the name."""
    quantised = config.get("quantization_config") or {}
    text = f"{quantised.get('quant_method', '')} {quantised.get('quant_algo', '')} {quantised.get('format', '')} {name}"
    text += f" int{quantised.get('bits')}" if quantised.get("bits") else ""
    return next(
        (kind for words, kind in FORMATS if re.search(words, text.lower())), "mxfp4" if "gpt-oss" in name else ""
    )


@dataclass(frozen=True, slots=True)
class Speculation:
    kind: str  # dflash, dflash2, dspark, mtp or ngram
    model: str  # the drafter's; empty if there is none or it is in the target's own file
    depth: int

    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = {"method": NAMES.get(self.kind, self.kind)}
        found |= {"model": self.model} if self.model else {}
        found |= {"prompt_lookup_max": 4} if self.kind == "ngram" else {}
        return found | {"num_speculative_tokens": self.depth}


def speculate(target: Target, engine: EngineConfig, method: str, notes: list[str]) -> Speculation | None:
    """Returns None for plain decoding. method: one of METHODS."""
    if method not in METHODS:
        raise UserError(f"--method is '{method}'; it must be one of {', '.join(METHODS)}")
    if engine.num_draft == 0:
        return None
    if method == "ngram":
        return Speculation("ngram", "", engine.num_draft or NGRAM_DEPTH)
    found = _chosen(target, engine, method, notes)
    if found is None:
        return None
    kind, model, most = found
    depth = engine.num_draft or most
    if kind != "mtp" and depth > most:
        raise UserError(f"spec is {depth}; {model} makes {most} drafts at most")
    if engine.num_draft is None:
        notes.append(f"spec: the depth is fixed at {depth} drafts there; for our choice of depth use {SCHEDULER}")
    if engine.ngram:
        notes.append("ngram: vLLM runs one drafter, so there are no drafts from the request's own text")
    return Speculation(kind, model, depth)


def _chosen(target: Target, engine: EngineConfig, method: str, notes: list[str]) -> tuple[str, str, int] | None:
    """Returns kind, drafter and drafts per step: the drafter's maximum, or the usual depth of an MTP head."""
    if engine.drafter == "none":
        return None
    known = target.known.drafters if target.known else ()
    if engine.drafter != "auto":
        if held := in_target(engine.drafter):
            return _own_head(target, engine.drafter, held)
        drafter = next((each for each in known if each.repo == engine.drafter), None)
        return _of(drafter) if drafter else _opened(engine.drafter)
    kinds = ORDER if method == "auto" else (method,)
    fitting = [each for each in known if _method(each.kind) in kinds]
    if fitting:
        return _of(min(fitting, key=lambda each: (kinds.index(_method(each.kind)), -each.mean_tokens)))
    if method != "auto":
        raise UserError(
            f"no {method} drafter is known for {target.name}: name one with --drafter, or leave --method out"
        )
    own = " (the one in this package is for this engine)" if engine.model in EMBEDDED else ""
    notes.append(f"drafter: none is known for {target.name}{own}, so vLLM decodes plainly")
    return None


def _method(kind: str) -> str:
    """vLLM runs assistants as MTP heads."""
    return "mtp" if kind == "assistant" else kind


def _of(drafter: KnownDrafter) -> tuple[str, str, int]:
    return _method(drafter.kind), drafter.repo, HEAD_DEPTH if drafter.kind == "assistant" else drafter.block - 1


def _own_head(target: Target, name: str, held: InTarget) -> tuple[str, str, int]:
    """Chooses the drafter in the target's own file."""
    heads = [each for each in (target.known.drafters if target.known else ()) if each.kind == name]
    if heads:
        return _of(heads[0])
    if target.family not in held.model_types:
        raise UserError(
            f"no {held.label} is known for {target.name} (only for the model types {', '.join(held.model_types)}): "
            "leave --drafter out, or name a drafter"
        )
    return name, "", HEAD_DEPTH


def _opened(name: str) -> tuple[str, str, int]:
    """Reads what an unlisted drafter is from its config.json."""
    config = read_config_json(name)
    kind = kind_of(config)
    if kind.in_target:  # another file of the target, which has an MTP head
        return _method(kind.name), portable_name(name), HEAD_DEPTH
    caps = read_draft_config(config).caps()
    return _method(kind.name), portable_name(name), HEAD_DEPTH if caps.chain else caps.max_depth
