"""`train data`: makes a corpus of the target's answers to prompts.

Half of the answers are greedy and half are sampled, because a drafter meets both. Prompts of the evaluation set are
never asked, because drafters are judged by them. A share of the documents are conversations of given lengths, because
drafters do badly in contexts longer than those they were trained on. Documents that the folder already holds count, so
the same command continues an interrupted one. prompts.py reads and makes prompts and conversations, generate.py writes
the answers, and corpus.py stores them.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.engine.machine import detect
from sparkdraft.operate.bench.prompts import Question, read_prompts, read_questions
from sparkdraft.train.corpus import Corpus, CorpusInfo, CorpusWriter, Finish, Span
from sparkdraft.train.generate import BulkGenerator, EngineModel, EngineWriter, Prompt, Writer, open_engine
from sparkdraft.train.process import Stop, stop_signals
from sparkdraft.train.prompts import (
    SELF,
    Glue,
    PromptFile,
    Sieve,
    Talk,
    message_prompts,
    normalised,
    stop_ids,
)
from sparkdraft.train.target import ChatModel, Target, load_target
from sparkdraft.util.progress import progress
from sparkdraft.weights.loader import Progress

LEAST_ROOM = 16  # tokens that a prompt must leave for its answer
LEAST_ROUND = 16  # fewest prompts that a target writes at a time
LEAST_KEPT = 0.1  # if a smaller share of them is worth asking, no more are written
OWN_PROMPTS = "prompts.jsonl"  # in the corpus's folder: the prompts that the target wrote
SAMPLED = {0.7: 2.0, 1.0: 1.0}  # temperature -> weight
Lengths = Sequence[tuple[int, float]]  # (tokens of a conversation, share of the documents); the rest have one answer
LENGTHS: Lengths = ((2048, 0.03), (4096, 0.02), (8192, 0.01))  # half of the tokens are in these


def read_lengths(text: str) -> Lengths:
    """Parse '2048:0.03,8192:0.01' as ((2048, 0.03), (8192, 0.01)); an empty text means no conversations."""
    try:
        pairs = [part.split(":") for part in text.split(",") if part.strip()]
        lengths = tuple((int(tokens), float(share)) for tokens, share in pairs)
    except ValueError:
        raise UserError(f"--lengths is '{text}'; give tokens:share, with commas between, as in 2048:0.03") from None
    if any(tokens < 1 or not share >= 0 for tokens, share in lengths) or sum(share for _, share in lengths) > 1:
        raise UserError(
            f"--lengths is '{text}'; lengths must be 1 or more, and shares 0 or more and together at most 1"
        )
    return lengths


def open_model(name: str, device: str, longest: int, seats: int = 0, progress: Progress | None = None) -> ChatModel:
    """Open a model to write with: as floats for BulkGenerator on a GPU, in the engine on a CPU."""
    if detect(EngineConfig(model=name, device=device)).device == "cuda":
        return load_target(name, device, longest, progress)
    return open_engine(name, longest, seats, progress, device="cpu")


def writer_for(
    model: ChatModel, max_len: int, seats: int, most_seats: int, stop_ids: set[int] | None, seed: int
) -> Writer:
    if isinstance(model, Target):
        return BulkGenerator(model, max_len, seats, most_seats, stop_ids, seed)
    assert isinstance(model, EngineModel)
    return EngineWriter(model, max_len, stop_ids, seed)


def evaluation_prompts() -> list[str]:
    """The prompts on which acceptance is measured."""
    return [text for texts in read_prompts(0).values() for text in texts]


def check_sources(
    prompts_file: str | None, synthesise: int, max_new: int, greedy_share: float = 0.5, seats: int = 0
) -> list[Question]:
    """Read the file's prompts, and check the arguments before a model is loaded."""
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
    if prompts_file is None:
        return []
    path = Path(prompts_file)
    if path.suffix not in (".jsonl", ".txt"):
        raise UserError(f"Prompts are read from .jsonl and .txt files, and {path} is neither: convert or rename it.")
    return read_questions(path)


@dataclass(slots=True)
class _Counts:
    documents: int = 0
    tokens: int = 0  # tokens of kept answers
    prompt_tokens: int = 0  # all other tokens
    answers: int = 0
    held: int = 0  # prompts that had been answered before
    excluded: int = 0  # evaluation prompts
    too_long: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    finishes: Counter[Finish] = field(default_factory=Counter)

    def add(self, ids: Sequence[int], kind: str, finish: Finish, answers: Sequence[Span]) -> None:
        tokens = sum(end - begin for begin, end in answers)
        self.documents += 1
        self.answers += len(answers)
        self.tokens += tokens
        self.prompt_tokens += len(ids) - tokens
        self.kinds[kind] += 1
        self.finishes[finish] += 1

    def as_dict(self, seconds: float, generated: int) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)} | {
            "kinds": dict(self.kinds),
            "generated": generated,
            "seconds": round(seconds, 3),
            "tokens_per_second": generated / max(seconds, 1e-9),
            "loops": self.finishes[Finish.LOOP] / max(self.documents, 1),
            "finishes": {finish.name.lower(): self.finishes[finish] for finish in Finish},
        }


def make_corpus(
    target: ChatModel,
    folder: str | Path,
    prompts_file: str | None = None,
    synthesise: int = 0,  # self-written prompts that the corpus has in the end
    max_new: int = 384,
    greedy_share: float = 0.5,
    seed: int = 0,
    seats: int = 0,
    report: Progress | None = None,  # (documents written, documents in all)
    lengths: Lengths = (),
    until: Stop = lambda: False,
) -> dict[str, Any]:
    """Ask every prompt that the corpus has no answer to yet, and append the answers; returns a summary.

    A signal, or 'until', ends it early and loses no finished answer: "stopped" says so, and "left" how many prompts
    wait.
    """
    questions = check_sources(prompts_file, synthesise, max_new, greedy_share, seats)
    target.config.uniform()  # what `train fit` needs: refused here, before hours of writing
    if not target.chat_template:
        raise UserError(f"{target.name} has no chat template, so it cannot be asked anything: take a chat model")
    kinds = tuple(dict.fromkeys([question.kind for question in questions] + [SELF] * bool(synthesise)))
    info = CorpusInfo(target.name, target.config.vocab_size, kinds)
    leave_out = {normalised(text) for text in evaluation_prompts()}
    # a folder that cannot be used is refused at once
    with stop_signals() as asked_to_stop, CorpusWriter(folder, info) as writer:

        def stopped() -> bool:
            return asked_to_stop() or until()

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
        prompts = list(_with_temperatures(asked, greedy_share, position))
        job = _Job(target, writer, seats, position, seed, desk, stopped, report, len(prompts))
        summary |= job.run(prompts, lengths)
        left = len(asked) - desk.counts.documents
        unwritten = summary.get("self_written", {}).get("missing", 0)
        summary |= {"left": left, "stopped": stopped() and left + unwritten + summary["cut"] > 0}
    fingerprint = Corpus(folder).fingerprint if writer.num_documents else None
    return summary | {"folder": str(folder), "all_documents": writer.num_documents, "fingerprint": fingerprint}


_Key = tuple[str, bytes]  # kind and ids of a prompt


def _prompts_of(corpus: Corpus) -> Iterator[_Key]:
    for i in range(len(corpus)):
        yield corpus.info.kinds[corpus.kind[i]], corpus.ids(i)[: corpus.num_prompt[i]].astype(np.uint32).tobytes()


def _position(seed: int, done: int) -> int:
    """Return a seed that depends on how much is done, because the same draws would repeat the same texts."""
    return random.Random(f"{seed} {done}").getrandbits(31)


@dataclass(slots=True)
class _Desk:
    """Chooses what to ask: each question as often as it occurs, less the answers that exist already."""

    target: ChatModel
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
    """Return the self-written prompts missing to 'count' answered ones: first those in the folder, then new ones."""
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
    """Let the target write messages as the user and keep the good ones. Returns the number of ids generated."""
    prompts = list(message_prompts(sieve.target, count, seed))
    longest = min(max(len(p.ids) + p.max_new for p in prompts), sieve.target.context)
    generator = writer_for(sieve.target, longest, seats, len(prompts), sieve.ends, seed)
    with progress("writing prompts") as report:
        for done, written in enumerate(generator.run(prompts, stopped), 1):
            if question := sieve.take(written):
                file.add(question)
            report(done, count)
    return generator.num_generated


def _with_temperatures(prompts: Sequence[Prompt], greedy_share: float, seed: int) -> Iterator[Prompt]:
    """Yield prompts with temperatures in random order, so that a corpus that is cut off has some of everything."""
    rng = random.Random(seed)
    for prompt in rng.sample(prompts, len(prompts)):
        greedy = rng.random() < greedy_share
        temperature = 0.0 if greedy else rng.choices([*SAMPLED], [*SAMPLED.values()])[0]
        yield Prompt(prompt.ids, prompt.kind, temperature, prompt.max_new)


@dataclass(slots=True)
class _Job:
    """Has prompts answered and writes the documents."""

    model: ChatModel
    writer: CorpusWriter
    seats: int
    seed: int  # for sampling; depends on how much is done
    draw: int  # the user's seed, for the lengths of conversations
    desk: _Desk
    stopped: Stop
    report: Progress | None
    total: int
    generated: int = 0
    cut: int = 0  # conversations that would have gone on
    messages_dropped: Counter[str] = field(default_factory=Counter)

    def run(self, prompts: Sequence[Prompt], lengths: Lengths) -> dict[str, Any]:
        """Answer the prompts, some of them as conversations of the given lengths.

        "conversations" is None in the summary if the template does not allow any.
        """
        begin, glue = time.perf_counter(), Glue.of(self.model) if lengths else None
        impossible = bool(lengths) and glue is None
        if impossible:
            lengths = ()
        rng = random.Random(self.seed + 1)
        goals = [0, *(min(goal, self.model.context) for goal, _ in lengths)]
        shares = [1 - sum(share for _, share in lengths), *(share for _, share in lengths)]
        groups: dict[int, list[Prompt]] = {}
        for prompt in prompts:
            groups.setdefault(self._goal(prompt, goals, shares), []).append(prompt)
        for goal, group in sorted(groups.items()):  # seats are as long as the longest text of the group
            if self.stopped():
                break
            if glue and goal:
                self._converse(group, goal, glue, rng)
            else:
                self._answer(group)
        counts = self.desk.counts.as_dict(time.perf_counter() - begin, self.generated)
        talks = None if impossible else sum(len(group) for goal, group in groups.items() if goal)
        return counts | {"conversations": talks, "cut": self.cut, "messages_dropped": dict(self.messages_dropped)}

    def _goal(self, prompt: Prompt, goals: Sequence[int], shares: Sequence[float]) -> int:
        """Draw the length of the prompt's conversation; 0 means a single answer.

        It depends on the seed and the prompt only. Short texts are written first, so draws among what is left would
        leave few conversations for a corpus that is continued. A prompt that is too long takes the next length.
        """
        ids = np.asarray(prompt.ids, np.uint32).tobytes()
        drawn = random.Random(f"{self.draw} ".encode() + ids).choices(goals, shares)[0]
        least = len(prompt.ids) + LEAST_ROOM
        return min((goal for goal in goals if goal >= max(drawn, least)), default=0) if drawn else 0

    def _answer(self, prompts: Sequence[Prompt]) -> None:
        max_len = min(max(len(p.ids) + p.max_new for p in prompts), self.model.context)
        generator = writer_for(self.model, max_len, self.seats, len(prompts), None, self.seed)
        for written in generator.run(prompts, self.stopped):
            first = len(written.prompt.ids)
            ids = [*written.prompt.ids, *written.ids.tolist()]
            self._keep(ids, written.prompt, written.finish, [(first, len(ids))])
        self.generated += generator.num_generated

    def _converse(self, prompts: Sequence[Prompt], goal: int, glue: Glue, rng: random.Random) -> None:
        open_talks: dict[int, Talk] = {}

        def begin() -> Iterator[Prompt]:
            for prompt in prompts:
                seed = random.Random(rng.getrandbits(62))
                talk = Talk(self.model, glue, prompt, goal, self.desk.leave_out, seed)
                open_talks[id(talk)] = talk
                yield talk.begin()

        generator = writer_for(self.model, goal, self.seats, len(prompts), set(glue.ends), self.seed)
        for written in generator.run(begin(), self.stopped, lambda written: written.prompt.tag.follow(written)):
            self._keep_talk(open_talks.pop(id(written.prompt.tag)))
        for talk in open_talks.values():  # stopped early: what was said so far is a document too
            if talk.answers:
                self.cut += 1
                self._keep_talk(talk)
        self.generated += generator.num_generated

    def _keep_talk(self, talk: Talk) -> None:
        self.messages_dropped += talk.dropped
        self._keep(talk.ids, talk.first, talk.finish, talk.answers)

    def _keep(self, ids: Sequence[int], prompt: Prompt, finish: Finish, answers: Sequence[Span]) -> None:
        self.writer.add(ids, len(prompt.ids), prompt.kind, finish, prompt.temperature, answers)
        self.desk.counts.add(ids, prompt.kind, finish, answers)
        if self.report:
            self.report(self.desk.counts.documents, self.total)
