"""Which drafter vLLM is told to use, and how deep: the user's, or the best one that is known for the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparkdraft.bridges.vllm.targets import Target
from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.drafters.assistant_config import AssistantConfig
from sparkdraft.drafters.draft_configs import read_draft_config
from sparkdraft.drafters.mtp_config import HEADS, MTP, is_target
from sparkdraft.drafters.packaged import EMBEDDED
from sparkdraft.drafters.pairs import KnownDrafter
from sparkdraft.weights.checkpoint import read_config_json
from sparkdraft.weights.hub import portable_name

METHODS = ("auto", "dflash", "mtp", "ngram")
ORDER = ("dflash", "mtp", "dflash2", "dspark")  # what auto prefers: what has run longest first
NGRAM_DEPTH = 7
# Of an MTP head that is not in drafters/pairs.json, as of most that are; and of Gemma 4's assistants, which draft
# one token after another: on a DGX Spark 4 drafts were fastest (80 tok/s; 67 with 2, 72 with 6).
HEAD_DEPTH = 4
SCHEDULER = "--scheduler-cls sparkdraft.bridges.vllm.plugin.scheduler.DepthScheduler, where this package is beside vLLM"
NAMES = {"dflash2": "dflash", "assistant": "mtp"}  # kinds that vLLM runs under another's name


@dataclass(frozen=True, slots=True)
class Speculation:
    kind: str  # dflash, dflash2, dspark, mtp or ngram
    model: str  # of the drafter; empty: it needs none, or is in the target's own file
    depth: int

    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = {"method": NAMES.get(self.kind, self.kind)}
        found |= {"model": self.model} if self.model else {}
        found |= {"prompt_lookup_max": 4} if self.kind == "ngram" else {}
        return found | {"num_speculative_tokens": self.depth}


def speculate(target: Target, engine: EngineConfig, method: str, notes: list[str]) -> Speculation | None:
    """None: plain decoding. method: one of METHODS."""
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
        notes.append(f"spec: the depth is fixed at {depth} drafts there; our choice of depth is {SCHEDULER}")
    if engine.ngram:
        notes.append("ngram: vLLM runs one drafter, so nothing is drafted from the request's own text")
    return Speculation(kind, model, depth)


def _chosen(target: Target, engine: EngineConfig, method: str, notes: list[str]) -> tuple[str, str, int] | None:
    """Kind, drafter and drafts per step: the most that it makes, or of an MTP head what is usual."""
    if engine.drafter == "none":
        return None
    known = target.known.drafters if target.known else ()
    if engine.drafter != "auto":
        if engine.drafter == MTP:
            return _own_head(target)
        drafter = next((each for each in known if each.repo == engine.drafter), None)
        return _of(drafter) if drafter else _opened(engine.drafter)
    kinds = ORDER if method == "auto" else (method,)
    fitting = [each for each in known if _kind(each) in kinds]
    if fitting:
        return _of(min(fitting, key=lambda each: (kinds.index(_kind(each)), -each.mean_tokens)))
    if method != "auto":
        raise UserError(
            f"no {method} drafter is known for {target.name}: name one with --drafter, or leave --method out"
        )
    own = " (the one in this package is for this engine)" if engine.model in EMBEDDED else ""
    notes.append(f"drafter: none is known for {target.name}{own}, so vLLM decodes plainly")
    return None


def _kind(drafter: KnownDrafter) -> str:
    return "mtp" if drafter.kind == "assistant" else drafter.kind


def _of(drafter: KnownDrafter) -> tuple[str, str, int]:
    return _kind(drafter), drafter.repo, HEAD_DEPTH if drafter.kind == "assistant" else drafter.block - 1


def _own_head(target: Target) -> tuple[str, str, int]:
    """The MTP head in the target's own file."""
    heads = [each for each in (target.known.drafters if target.known else ()) if each.kind == MTP]
    if heads:
        return _of(heads[0])
    if target.family not in HEADS:
        raise UserError(
            f"{target.name} has no MTP head that is known: of model types, {', '.join(HEADS)} have one; leave "
            "--drafter out, or name a drafter"
        )
    return MTP, "", HEAD_DEPTH


def _opened(name: str) -> tuple[str, str, int]:
    """A drafter that is not in the table: its config.json says what it is."""
    config = read_config_json(name)
    if is_target(config):  # another file of the target, with a head
        return MTP, portable_name(name), HEAD_DEPTH
    draft = read_draft_config(config)
    if isinstance(draft, AssistantConfig):
        return MTP, portable_name(name), HEAD_DEPTH
    return "dflash", portable_name(name), draft.block_size - 1
