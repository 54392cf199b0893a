"""Engines of tiny models with recurrent layers, and a drafter that is wrong where a test wants it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sparkdraft import LLM, SamplingParams
from sparkdraft.cache.layered import LayeredKV
from sparkdraft.cache.states import RecurrentStates, StateSlots
from sparkdraft.core import Request, Work
from sparkdraft.engine.drafting import Drafting
from sparkdraft.engine.proposer import Drafts
from sparkdraft.llm import Completion
from tests.fakes.steps import on_host

Texts = list[list[int]]


def load(folder: Path, **options: Any) -> LLM:
    defaults = {"device": "cpu", "spec": "off", "kv_tokens": 2048, "ngram": False, "threads": 1, "max_seqs": 4}
    return LLM(str(folder), **(defaults | options))


def states_of(llm: LLM) -> RecurrentStates:
    kv = llm.engine.runner.kv
    assert isinstance(kv, LayeredKV) and kv.states
    return kv.states


def slots_of(llm: LLM) -> StateSlots:
    (found,) = (part for part in llm.engine.scheduler.groups.parts if isinstance(part, StateSlots))
    return found


def all_is_free(llm: LLM) -> bool:
    return llm.engine.pool.num_free == llm.plan.num_blocks and slots_of(llm).num_free == llm.plan.max_seqs


def complete(llm: LLM, prompts: Texts, params: list[SamplingParams] | SamplingParams) -> list[Completion]:
    return [completion for result in llm.generate(prompts, params) for completion in result.completions]


def texts(llm: LLM, prompts: Texts, params: list[SamplingParams] | SamplingParams) -> Texts:
    return [completion.ids for completion in complete(llm, prompts, params)]


class Scripted:
    """Drafts a text that is known, with one id wrong: the one that 'wrong' names for the step's number."""

    may_pass_over, chain, device = False, False, torch.device("cpu")
    unrecorded: tuple[str, ...] = ()

    def __init__(self, known: dict[tuple[int, ...], list[int]], depth: int, wrong: Callable[[int], int]) -> None:
        self.known, self.max_depth, self.wrong = known, depth, wrong
        self.drafter = SimpleNamespace(caps=SimpleNamespace(name="scripted"))
        self.num_steps = 0

    def propose(self, works: list[Work]) -> list[Drafts]:
        return [Drafts(self._draft(work), []) for work in works]

    def _draft(self, work: Work) -> list[int]:
        request = work.request
        text, self.num_steps = self.known[tuple(request.prompt_ids)], self.num_steps + 1
        drafts = text[len(request.output_ids) :][: work.most_drafts]
        place = self.wrong(self.num_steps)
        if place < len(drafts):
            drafts[place] = (drafts[place] + 1) % 256
        return drafts

    def is_ready(self, request: Request) -> bool:
        return True

    def observe(self, work: Work, *rows: object) -> None: ...

    def release(self, request: Request) -> None: ...


def scripted(llm: LLM, prompts: Texts, written: Texts, depth: int, wrong: Callable[[int], int]) -> Scripted:
    """Let an engine draft what is known to be written, up to 'depth' ids per step."""
    known = {tuple(prompt): text for prompt, text in zip(prompts, written, strict=True)}
    source, engine = Scripted(known, depth, wrong), llm.engine
    engine.drafting = Drafting(llm.plan.max_model_len, source, False, depth)  # type: ignore[arg-type]
    on_host(llm)
    engine.scheduler.lookahead = depth
    return source
