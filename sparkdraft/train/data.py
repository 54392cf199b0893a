"""`train data`: makes a corpus of the target's answers to prompts.

Half of the answers are greedy and the others sampled, because a drafter meets both. Prompts of the evaluation set are
never asked, whatever their source, because drafters are judged by them. Documents that the folder already holds count,
so the same command continues where the last one ended, whatever ended it. prompts.py reads and makes prompts,
generate.py writes the answers, and corpus.py keeps them.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sparkdraft import bench
from sparkdraft.core import UserError
from sparkdraft.progress import progress
from sparkdraft.train.corpus import Corpus, CorpusInfo, CorpusWriter, Finish
from sparkdraft.train.generate import BulkGenerator, Prompt
from sparkdraft.train.prompts import (
    SELF,
    PromptFile,
    Question,
    Sieve,
    message_prompts,
    normalised,
    read_prompts,
    stop_ids,
)
from sparkdraft.train.stop import Stop, stop_signals
from sparkdraft.train.target import Target
from sparkdraft.weights.loader import Progress

LEAST_ROOM = 16  # tokens that a prompt must leave for its answer
LEAST_ROUND = 16  # prompts that a target writes at a time; the last few may all be bad
LEAST_KEPT = 0.1  # if a smaller share of them is worth asking, no more are written
OWN_PROMPTS = "prompts.jsonl"  # in the corpus's folder: the prompts that the target wrote
Temperatures = Sequence[tuple[float, float]]  # (temperature, weight)
SAMPLED: Temperatures = ((0.7, 2.0), (1.0, 1.0))


def evaluation_prompts() -> list[str]:
    """The prompts on which acceptance is measured."""
    return [question.text for question in read_prompts(Path(bench.__path__[0]) / "prompts.jsonl")]


def check_sources(
    prompts_file: str | None, synthesise: int, max_new: int, greedy_share: float = 0.5, seats: int = 0
) -> list[Question]:
    """The file's prompts. Refuses what can be refused without a model: call it before one is loaded."""
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
    tokens: int = 0  # tokens of kept answers
    prompt_tokens: int = 0
    held: int = 0  # prompts that had been answered before
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
            "held": self.held,
            "excluded": self.excluded,
            "too_long": self.too_long,
            "kinds": dict(self.kinds),
            "finishes": {finish.name.lower(): self.finishes[finish] for finish in Finish},
        }


def make_corpus(
    target: Target,
    folder: str | Path,
    prompts_file: str | None = None,
    synthesise: int = 0,  # self-written prompts that the corpus has in the end
    max_new: int = 384,
    greedy_share: float = 0.5,
    temperatures: Temperatures = SAMPLED,
    seed: int = 0,
    seats: int = 0,
    report: Progress | None = None,  # (documents written, documents in all)
    exclude: Iterable[str] | None = None,  # None: the evaluation prompts
) -> dict[str, Any]:
    """Ask every prompt that the corpus has no answer to yet, and append the answers; returns a summary.

    A signal ends it early and loses no finished answer: "stopped" says so, and "left" how many prompts wait.
    """
    questions = check_sources(prompts_file, synthesise, max_new, greedy_share, seats)
    target.config.uniform()  # what `train fit` needs: refused here, before hours of writing
    if not target.chat_template:
        raise UserError(f"{target.name} has no chat template, so it cannot be asked anything: take a chat model")
    kinds = tuple(dict.fromkeys([question.kind for question in questions] + [SELF] * bool(synthesise)))
    info = CorpusInfo(target.name, target.config.vocab_size, kinds)
    leave_out = {normalised(text) for text in (evaluation_prompts() if exclude is None else exclude)}
    # a folder that cannot be used is refused at once
    with stop_signals() as stopped, CorpusWriter(folder, info) as writer:
        summary: dict[str, Any] = {}
        held = Counter(_prompts_of(Corpus(folder))) if writer.num_documents else Counter[_Key]()
        desk = _Desk(target, leave_out, max_new, held)
        asked = desk.take(questions)
        if synthesise:
            more, summary["self_written"] = _own_prompts(desk, Path(folder), synthesise, seed, seats, stopped)
            asked += more
        if not asked and not desk.counts.held and not stopped():
            raise UserError(desk.nothing_left())
        position = _position(seed, writer.num_documents)
        prompts = list(_with_temperatures(asked, greedy_share, temperatures, position))
        summary |= _answer(target, writer, prompts, seats, position, desk.counts, stopped, report)
        left = len(asked) - desk.counts.documents
        unwritten = summary.get("self_written", {}).get("missing", 0)
        summary |= {"left": left, "stopped": stopped() and left + unwritten > 0}
    fingerprint = Corpus(folder).fingerprint if writer.num_documents else None
    return summary | {"folder": str(folder), "all_documents": writer.num_documents, "fingerprint": fingerprint}


_Key = tuple[str, bytes]  # kind and ids of a prompt


def _prompts_of(corpus: Corpus) -> Iterator[_Key]:
    for i in range(len(corpus)):
        yield corpus.info.kinds[corpus.kind[i]], corpus.ids(i)[: corpus.num_prompt[i]].astype(np.uint32).tobytes()


def _position(seed: int, done: int) -> int:
    """A seed that depends on how much is done: the same draws again would give the same texts."""
    return random.Random(f"{seed} {done}").getrandbits(31)


@dataclass(slots=True)
class _Desk:
    """Decides what is asked: each question as often as it comes, less the answers that exist."""

    target: Target
    leave_out: set[str]
    max_new: int
    held: Counter[_Key]  # answers for which no question has come yet
    counts: _Counts = field(default_factory=_Counts)

    def take(self, questions: Iterable[Question]) -> list[Prompt]:
        return [prompt for prompt in map(self._prompt, questions) if prompt]

    def num_held(self, kind: str) -> int:
        return sum(count for (own, _), count in self.held.items() if own == kind)

    def nothing_left(self) -> str:
        return (
            f"no prompt is left to ask: {self.counts.excluded} are evaluation prompts and {self.counts.too_long} leave "
            f"no room for an answer in {self.target.context} tokens; give others"
        )

    def _prompt(self, question: Question) -> Prompt | None:
        if any(normalised(str(m["content"])) in self.leave_out for m in question.messages):
            self.counts.excluded += 1
            return None
        ids = self.target.chat_ids(question.messages)
        if len(ids) + min(LEAST_ROOM, self.max_new) > self.target.context:
            self.counts.too_long += 1
            return None
        key = question.kind, np.asarray(ids, np.uint32).tobytes()
        if self.held[key]:
            self.held[key] -= 1
            self.counts.held += 1
            return None
        return Prompt(ids, question.kind, 0.0, self.max_new)


def _own_prompts(
    desk: _Desk, folder: Path, count: int, seed: int, seats: int, stopped: Stop
) -> tuple[list[Prompt], dict[str, Any]]:
    """Self-written prompts that are missing to 'count' answered ones: those that wait in the folder, then new ones."""
    file, answered = PromptFile(folder / OWN_PROMPTS), desk.num_held(SELF)
    prompts = desk.take(file.questions)
    sieve = Sieve(desk.target, stop_ids(desk.target), seen={normalised(q.text) for q in file.questions})
    asked, generated, before, begin = 0, 0, len(file.questions), time.perf_counter()
    wanted = max(count - answered, 0)
    while len(prompts) < wanted and not stopped():
        first, number = len(file.questions), max(wanted - len(prompts), LEAST_ROUND)
        generated += _write_prompts(sieve, file, number, _position(seed, answered + first), seats, stopped)
        asked += number
        more = desk.take(file.questions[first:])
        prompts += more
        if len(more) < LEAST_KEPT * number:
            break
    desk.counts.held += desk.num_held(SELF)  # those without a line in the file
    seconds = time.perf_counter() - begin
    return prompts[:wanted], {
        "asked": asked,
        "kept": len(file.questions) - before,
        "missing": max(wanted - len(prompts), 0),
        "dropped": dict(sieve.dropped),
        "seconds": round(seconds, 3),
        "tokens_per_second": generated / max(seconds, 1e-9),
    }


def _write_prompts(sieve: Sieve, file: PromptFile, count: int, seed: int, seats: int, stopped: Stop) -> int:
    """Let the target write messages as the user, and keep those worth asking; returns the number of ids it took."""
    prompts = list(message_prompts(sieve.target, count, seed))
    longest = min(max(len(p.ids) + p.max_new for p in prompts), sieve.target.context)
    generator = BulkGenerator(sieve.target, longest, seats, len(prompts), sieve.ends, seed)
    with progress("writing prompts") as report:
        for done, written in enumerate(generator.run(prompts, stopped), 1):
            if question := sieve.take(written):
                file.add(question)
            report(done, count)
    return generator.num_generated


def _with_temperatures(
    prompts: Sequence[Prompt], greedy_share: float, temperatures: Temperatures, seed: int
) -> Iterator[Prompt]:
    """Prompts with temperatures, in random order, so that a corpus that is cut off or read in order has some of
    everything."""
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
    stopped: Stop,
    report: Progress | None,
) -> dict[str, Any]:
    if not prompts or stopped():
        return counts.as_dict(0.0, 0)
    max_len = min(max(len(p.ids) + p.max_new for p in prompts), target.context)
    generator = BulkGenerator(target, max_len, seats, len(prompts), seed=seed)
    begin = time.perf_counter()
    for written in generator.run(prompts, stopped):
        prompt = written.prompt
        ids = [*prompt.ids, *written.ids.tolist()]
        writer.add(ids, len(prompt.ids), prompt.kind, written.finish, prompt.temperature)
        counts.documents += 1
        counts.tokens += len(written.ids)
        counts.prompt_tokens += len(prompt.ids)
        counts.kinds[prompt.kind] += 1
        counts.finishes[written.finish] += 1
        if report:
            report(counts.documents, len(prompts))
    return counts.as_dict(time.perf_counter() - begin, generator.num_generated)
