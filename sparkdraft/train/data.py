"""`train data`: from prompts to a corpus of what the target answers to them.

Half of the answers are greedy and the others sampled, because a drafter meets both. A prompt of the evaluation set is
never asked, whoever wrote it: those texts are what drafters are judged by. Reading and making prompts is prompts.py's
work, writing the answers generate.py's, keeping them corpus.py's.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from sparkdraft import bench
from sparkdraft.core import UserError
from sparkdraft.train.corpus import Corpus, CorpusInfo, CorpusWriter, Finish
from sparkdraft.train.generate import BulkGenerator, Prompt
from sparkdraft.train.prompts import (
    SELF,
    Question,
    Sieve,
    message_prompts,
    normalised,
    read_prompts,
    stop_ids,
)
from sparkdraft.train.target import Target
from sparkdraft.weights.loader import Progress

LEAST_ROOM = 16  # tokens a prompt must leave for its answer
Temperatures = Sequence[tuple[float, float]]  # (temperature, weight)
SAMPLED: Temperatures = ((0.7, 2.0), (1.0, 1.0))


def evaluation_prompts() -> list[str]:
    """The prompts that acceptance is measured on."""
    return [question.text for question in read_prompts(Path(bench.__path__[0]) / "prompts.jsonl")]


def check_sources(
    prompts_file: str | None, synthesise: int, max_new: int, greedy_share: float = 0.5, seats: int = 0
) -> list[Question]:
    """The file's prompts; refuses what can be refused without a model. Call it before one is loaded."""
    if not 0 <= greedy_share <= 1:
        raise UserError(f"the greedy share is {greedy_share}; it must be from 0 to 1")
    if seats < 0:
        raise UserError(f"{seats} seats were asked for; ask for 1 or more, or 0 for as many as fit")
    if synthesise < 0:
        raise UserError(f"{synthesise} self-written prompts were asked for; ask for 0 or more")
    if prompts_file is None and not synthesise:
        raise UserError("there is nothing to ask: name a file of prompts, or a number of self-written ones")
    if max_new < 1:
        raise UserError(f"answers of {max_new} tokens were asked for; ask for 1 or more")
    return read_prompts(prompts_file) if prompts_file is not None else []


@dataclass(slots=True)
class _Counts:
    documents: int = 0
    tokens: int = 0  # of answers, as kept
    prompt_tokens: int = 0
    excluded: int = 0  # evaluation prompts
    too_long: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    finishes: Counter[Finish] = field(default_factory=Counter)

    def as_dict(self, seconds: float, generated: int) -> dict[str, Any]:
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "generated": generated,
            "seconds": round(seconds, 3),
            "tokens_per_second": generated / max(seconds, 1e-9),
            "loops": self.finishes[Finish.LOOP] / max(self.documents, 1),
            "excluded": self.excluded,
            "too_long": self.too_long,
            "kinds": dict(self.kinds),
            "finishes": {finish.name.lower(): self.finishes[finish] for finish in Finish},
        }


def make_corpus(
    target: Target,
    folder: str | Path,
    prompts_file: str | None = None,
    synthesise: int = 0,
    max_new: int = 384,
    greedy_share: float = 0.5,
    temperatures: Temperatures = SAMPLED,
    seed: int = 0,
    seats: int = 0,
    progress: Progress | None = None,  # documents written, documents in all
    exclude: Iterable[str] | None = None,  # None: the evaluation prompts
) -> dict[str, Any]:
    """Ask every prompt once and append what comes to the corpus; returns what there is to say about it."""
    questions = check_sources(prompts_file, synthesise, max_new, greedy_share, seats)
    if not target.chat_template:
        raise UserError(f"{target.name} has no chat template, so it can not be asked anything: take a chat model")
    kinds = tuple(dict.fromkeys([question.kind for question in questions] + [SELF] * bool(synthesise)))
    info = CorpusInfo(target.name, target.config.vocab_size, kinds)
    with CorpusWriter(folder, info) as writer:  # first: a folder that is refused is refused at once
        summary: dict[str, Any] = {}
        own: list[Question] = []
        if synthesise:
            own, summary["self_written"] = write_prompts(target, synthesise, seed, seats)
        counts = _Counts()
        leave_out = {normalised(text) for text in (evaluation_prompts() if exclude is None else exclude)}
        asked = list(_as_prompts(target, chain(questions, own), leave_out, max_new, counts))
        if not asked:
            raise UserError(
                f"no prompt is left to ask: {counts.excluded} are evaluation prompts and {counts.too_long} leave no "
                f"room for an answer in {target.context} tokens; give others"
            )
        prompts = list(_with_temperatures(asked, greedy_share, temperatures, seed))
        summary |= _answer(target, writer, prompts, seats, seed, counts, progress)
    return summary | {"folder": str(folder), "fingerprint": Corpus(folder).fingerprint}


def write_prompts(target: Target, count: int, seed: int, seats: int = 0) -> tuple[list[Question], dict[str, Any]]:
    """Messages that the target writes as the user, those worth asking; and what became of the others."""
    prompts = list(message_prompts(target, count, seed))
    longest = max(len(p.ids) + p.max_new for p in prompts)
    sieve = Sieve(target, stop_ids(target))
    generator = BulkGenerator(target, min(longest, target.context), seats, len(prompts), sieve.ends, seed)
    begin = time.perf_counter()
    kept = [question for question in map(sieve.take, generator.run(prompts)) if question]
    seconds = time.perf_counter() - begin
    return kept, {
        "asked": count,
        "kept": len(kept),
        "dropped": dict(sieve.dropped),
        "seconds": round(seconds, 3),
        "tokens_per_second": generator.num_generated / max(seconds, 1e-9),
    }


def _as_prompts(
    target: Target, questions: Iterable[Question], leave_out: set[str], max_new: int, counts: _Counts
) -> Iterator[Prompt]:
    for question in questions:
        if any(normalised(str(m["content"])) in leave_out for m in question.messages):
            counts.excluded += 1
            continue
        ids = target.chat_ids(question.messages)
        if len(ids) + min(LEAST_ROOM, max_new) > target.context:
            counts.too_long += 1
            continue
        yield Prompt(ids, question.kind, 0.0, max_new)


def _with_temperatures(
    prompts: Sequence[Prompt], greedy_share: float, temperatures: Temperatures, seed: int
) -> Iterator[Prompt]:
    """In random order, so that a corpus that was cut off, or is read in order, has some of everything."""
    assert greedy_share == 1 or temperatures, "what is not greedy needs a temperature"
    rng = random.Random(seed)
    values, weights = [value for value, _ in temperatures], [weight for _, weight in temperatures]
    for prompt in rng.sample(prompts, len(prompts)):
        greedy = rng.random() < greedy_share
        temperature = 0.0 if greedy else rng.choices(values, weights)[0]
        yield Prompt(prompt.ids, prompt.kind, temperature, prompt.max_new)


def _answer(
    target: Target,
    writer: CorpusWriter,
    prompts: Sequence[Prompt],
    seats: int,
    seed: int,
    counts: _Counts,
    progress: Progress | None,
) -> dict[str, Any]:
    max_len = min(max(len(p.ids) + p.max_new for p in prompts), target.context)
    generator = BulkGenerator(target, max_len, seats, len(prompts), seed=seed + 1)
    begin = time.perf_counter()
    for written in generator.run(prompts):
        prompt = written.prompt
        ids = [*prompt.ids, *written.ids.tolist()]
        writer.add(ids, len(prompt.ids), prompt.kind, written.finish, prompt.temperature)
        counts.documents += 1
        counts.tokens += len(written.ids)
        counts.prompt_tokens += len(prompt.ids)
        counts.kinds[prompt.kind] += 1
        counts.finishes[written.finish] += 1
        if progress:
            progress(counts.documents, len(prompts))
    return counts.as_dict(time.perf_counter() - begin, generator.num_generated)
