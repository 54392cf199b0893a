"""Writes texts with the engine: on a CPU its quantised weights and native kernels are many times faster than floats.

Every text, and every turn of a conversation, is a request; the prefix cache holds the turns before. The engine says
what comes next, and this file decides when a text has ended: at one of the given ids, at its length, or in a loop. On a
GPU generate.py does the same for thousands of texts at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparkdraft.core import FinishReason, SamplingParams
from sparkdraft.llm import LLM
from sparkdraft.models.registry import read_config
from sparkdraft.text.repetition import find_loops
from sparkdraft.train.corpus import Finish
from sparkdraft.train.generate import CHECK, LOOP, Follow, Prompt, Written, cut_loop
from sparkdraft.train.stop import Stop
from sparkdraft.train.target import ChatModel
from sparkdraft.weights.checkpoint import open_checkpoint
from sparkdraft.weights.loader import Progress

SEATS = 8  # requests at once: the native kernels gain little from more rows
RECENT = LOOP.max_period + LOOP.min_repeated


@dataclass(frozen=True)
class EngineModel(ChatModel):
    """A model that the engine runs."""

    llm: LLM


def open_engine(
    name: str, context: int, seats: int = 0, progress: Progress | None = None, **options: Any
) -> EngineModel:
    """context: the longest document, at most what the model was made for."""
    longest = min(context, read_config(open_checkpoint(name).config).max_position)
    llm = LLM(name, progress, max_seqs=seats or SEATS, max_model_len=longest, **options)
    source = llm.checkpoint
    about = (name, llm.model_config, llm.tokenizer, source.chat_template, source.special, llm.plan.max_model_len)
    return EngineModel(*about, llm)


@dataclass(slots=True)
class _Text:
    prompt: Prompt
    ids: list[int] = field(default_factory=list)
    checked: int = 0  # ids that were searched for loops


class EngineWriter:
    def __init__(self, model: EngineModel, max_len: int, stop_ids: Iterable[int] | None = None, seed: int = 0) -> None:
        """max_len: the longest prompt and response together. stop_ids: none: the model's own."""
        self.engine, self.max_len, self.num_generated = model.llm.engine, max_len, 0
        self.seats = model.llm.plan.max_seqs
        self.stop_ids = tuple(sorted(model.tokenizer.eos_ids if stop_ids is None else stop_ids))
        self._seeds = np.random.default_rng(seed)
        self._texts: dict[str, _Text] = {}

    def run(
        self, prompts: Iterable[Prompt], stopped: Stop = lambda: False, follow: Follow | None = None
    ) -> Iterator[Written]:
        source = iter(prompts)
        try:
            while not stopped():
                while len(self._texts) < self.seats and (prompt := next(source, None)):
                    self._add(prompt)
                if not self._texts:
                    return
                for written in self._step():
                    if follow and (prompt := follow(written)):
                        self._add(prompt)
                    else:
                        yield written
        finally:
            for name in self._texts:
                self.engine.abort(name)
            self._texts.clear()

    def _add(self, prompt: Prompt) -> None:
        room = min(prompt.max_new, self.max_len - len(prompt.ids))
        assert room > 0 and prompt.ids, (len(prompt.ids), prompt.max_new)
        seed = int(self._seeds.integers(1 << 62))
        params = SamplingParams(
            room, temperature=prompt.temperature, seed=seed, stop_ids=self.stop_ids, ignore_eos=True
        )
        self._texts[self.engine.add(list(prompt.ids), params)] = _Text(prompt)

    def _step(self) -> list[Written]:
        """Run one step; returns the texts that have ended."""
        ended = []
        for piece in self.engine.step():
            if (text := self._texts.get(piece.request_id)) is None:  # the end of one that was aborted
                continue
            text.ids += piece.ids
            finish = _finish(text, piece.finish)
            if finish is None:
                continue
            if piece.finish is None:
                self.engine.abort(piece.request_id)
            del self._texts[piece.request_id]
            self.num_generated += len(text.ids)
            ids = np.array(text.ids, np.int32)
            ended.append(Written(text.prompt, cut_loop(ids) if finish is Finish.LOOP else ids, finish))
        return ended


def _finish(text: _Text, said: FinishReason | None) -> Finish | None:
    """None: the text goes on. As in generate.py, a loop is looked for from time to time, and a text that ended by
    itself is none."""
    if said is FinishReason.STOP:
        return Finish.END
    if said is not None or len(text.ids) >= text.checked + CHECK:
        text.checked = len(text.ids)
        if next(find_loops(text.ids[-RECENT:], LOOP), None):
            return Finish.LOOP
    return None if said is None else Finish.LENGTH
