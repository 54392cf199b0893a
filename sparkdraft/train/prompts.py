"""Prompts that the target writes itself, alone or in conversations.

A chat model that is given its own template up to where the user's message begins writes a user's message. System
prompts and first words, drawn at random, make the messages differ. Messages that are empty, broken or repeated are
dropped; the others are appended to a file line by line. data.py has the prompts answered.

A conversation is one growing text. After an answer come the ids with which the template leads to the user's next
message, perhaps with first words of ours, and the target writes the message; then come the ids that lead to the answer.
An answer that loops is cut, and the conversation continues. So a document of n answers is run once, not n times: each
turn runs only its new ids after what the generator holds (generate.py).

    | system, first message, to_answer | answer | to_user, first words | message | to_answer | answer | ...
      the prompt                         span 0                                                span 1
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sparkdraft.core import UserError
from sparkdraft.operate.bench.prompts import Question, read_questions, user_question
from sparkdraft.train.corpus import Finish, Span
from sparkdraft.train.generate import Prompt, Written
from sparkdraft.train.target import ChatModel

SELF = "self"  # the kind of self-written prompts
MARKER = "The_message_of_the_user_stands_here"
MESSAGE_TOKENS, LEAST_TOKENS = 160, 3
WARMTH = (1.0, 0.85)
PLAIN_SYSTEM, PLAIN_OPENING = 0.6, 0.4  # shares of messages without a system prompt of ours, and without first words

SYSTEMS = (
    "You are a careful programmer. Users bring you code to write, to explain or to repair.",
    "You teach mathematics. Users ask you to solve problems step by step.",
    "You turn information into JSON, YAML or tables, and users send you what to convert.",
    "You answer questions about nature, history and geography in a few sentences.",
    "You write short stories, poems and letters to order.",
    "You edit texts: users paste a paragraph and ask you to shorten, correct or rephrase it.",
    "You help with daily life: cooking, travel, repairs, health and money.",
    "You are a friendly companion who likes to chat about anything.",
    "You support customers of a small software company by e-mail.",
    "You explain difficult ideas to children of ten years.",
    "You translate and explain words and sentences of many languages.",
    "You advise scientists and engineers on data, experiments and methods.",
)
OPENINGS = (
    "Write a", "Write a Python function that", "How do I", "How can I", "What is the difference between", "What is",
    "What are", "Why do", "Why is", "Explain", "Can you explain how", "Give me", "Give me a list of",
    "Create a JSON object", "Convert the following", "Summarize the following text:", "Rewrite this sentence:",
    "Translate", "Solve", "Calculate", "If a train", "Tell me about", "Tell me a story", "I am trying to",
    "I have a", "Imagine", "Compare", "Help me", "Describe", "Fix the error in this code:\n\n```python\n",
    "```python\n", "Who was", "When did", "Is it true that", "Please",
)  # fmt: skip

ANSWER_MARKER = "The_answer_of_the_assistant_stands_here"
MOST_TRIES = 4  # times that one message is written; then the conversation ends
LEAST_ANSWER = 16  # tokens that a turn must leave for its answer
FOLLOW_UPS = (
    "Can you", "Could you", "Now", "And", "But", "What about", "What if", "Thank you", "Thanks!", "I see.", "Why",
    "How", "Give me an example of", "Explain the", "Rewrite", "Make it", "Please add", "Is there", "Which",
)  # fmt: skip


def normalised(text: str) -> str:
    """Fold case and white space, so that texts that differ only in these compare equal."""
    return " ".join(text.split()).casefold()


class PromptFile:
    """Prompts that a target wrote, as lines of a .jsonl file. A last line that was cut off is removed."""

    def __init__(self, path: Path) -> None:
        self.path, self.questions = path, list[Question]()
        try:
            held = path.read_bytes() if path.exists() else b""
            whole = held[: held.rfind(b"\n") + 1]
            if whole != held:
                os.truncate(path, len(whole))
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}): check its rights.") from error
        if whole:
            self.questions = read_questions(path)

    def add(self, question: Question) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"messages": question.messages, "class": question.kind}) + "\n")
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written ({error.strerror}): {len(self.questions)} prompts are kept; make room, "
                "and run the same command again to continue."
            ) from error
        self.questions.append(question)


# ---- from the target itself


@dataclass(frozen=True, slots=True)
class Turn:
    """The text before a user's message in the template, and the id that ends the message."""

    before: str
    end_id: int | None  # the first special id after the message, unless plain text follows


def user_turn(target: ChatModel, system: str | None = None) -> Turn:
    text = target.chat_text(user_question(MARKER, SELF, system).messages, add_generation_prompt=False)
    before, found, after = text.partition(MARKER)
    if not found:
        raise UserError(
            f"The chat template of {target.name} does not write the user's message as it is, so the model cannot "
            "write its own prompts: give it a file of prompts."
        )
    special = target.tokenizer.special_ids
    following = target.tokenizer.encode(after, add_special=False)
    return Turn(before, next((token for token in following if token in special), None))


def stop_ids(target: ChatModel) -> set[int]:
    """Return the ids that end a message which the target writes as the user: end of turn or end of text."""
    end = user_turn(target).end_id
    return set(target.tokenizer.eos_ids) | ({end} if end is not None else set())


def message_prompts(target: ChatModel, count: int, seed: int) -> Iterator[Prompt]:
    """Yield prompts that a user's message follows. Their tag is (system prompt, first words)."""
    rng = random.Random(seed)
    systems = [system for system in SYSTEMS if _takes(target, system)]
    known: dict[tuple[str | None, str], list[int]] = {}
    for _ in range(count):
        plain = not systems or rng.random() < PLAIN_SYSTEM
        system = None if plain else rng.choice(systems)
        opening = "" if rng.random() < PLAIN_OPENING else rng.choice(OPENINGS)
        if (system, opening) not in known:
            text = user_turn(target, system).before + opening
            known[system, opening] = target.tokenizer.encode(text, add_special=False)
        ids = known[system, opening]
        if not ids:
            raise UserError(
                f"The chat template of {target.name} begins with the user's message: nothing can lead to it."
            )
        yield Prompt(ids, SELF, rng.choice(WARMTH), MESSAGE_TOKENS, (system, opening))


def _takes(target: ChatModel, system: str) -> bool:
    """Tell whether the template has a system prompt: some refuse it or write it into the user's message."""
    try:
        return system in user_turn(target, system).before
    except UserError:
        return False


@dataclass(slots=True)
class Sieve:
    """Keeps the messages that can be asked, each once."""

    target: ChatModel
    ends: set[int]
    dropped: Counter[str] = field(default_factory=Counter)
    seen: set[str] = field(default_factory=set)  # in normalised form

    def take(self, written: Written) -> Question | None:
        system, opening = written.prompt.tag
        text, reason = message_text(self.target, opening, without_end(written, self.ends), written.finish, self.seen)
        if reason:
            self.dropped[reason] += 1
            return None
        self.seen.add(normalised(text))
        return user_question(text, SELF, system)


def without_end(written: Written, ends: Container[int]) -> list[int]:
    ids: list[int] = written.ids.tolist()
    return ids[:-1] if ids and ids[-1] in ends else ids


def message_text(
    model: ChatModel, opening: str, ids: list[int], finish: Finish, seen: Container[str], leave_out: Container[str] = ()
) -> tuple[str, str]:
    """Decode a message that the target wrote after 'opening'. Returns it with the reason to drop it, or "".

    seen, leave_out: messages that must not be asked again, or at all, normalised.
    """
    text = (opening + model.tokenizer.decode(ids)).rstrip("\ufffd").strip()  # a character may be cut in half
    reasons = {
        "empty": not text,
        "short": len(ids) < LEAST_TOKENS,
        "special ids": not model.tokenizer.special_ids.isdisjoint(ids),
        "loop": finish is Finish.LOOP,
        "excluded": normalised(text) in leave_out,
        "repeated": normalised(text) in seen,
    }
    return text, next((reason for reason, holds in reasons.items() if holds), "")


# ---- conversations


@dataclass(frozen=True, slots=True)
class Glue:
    """The ids that a template writes between the turns."""

    to_user: str  # from the end of an answer to the beginning of the user's next message
    end_id: int  # its first id, which should end the answer
    to_answer: list[int]  # ids from the end of a message to the beginning of its answer
    ends: frozenset[int]  # ids that end a turn

    @staticmethod
    def of(model: ChatModel) -> Glue | None:
        """Return None if the template writes earlier turns differently once more turns follow: then a conversation is
        not one growing text."""
        said = {"role": "user", "content": MARKER}, {"role": "assistant", "content": ANSWER_MARKER}
        first, whole = model.chat_text(said[:1]), model.chat_text((*said, said[0]))
        to_answer = first.partition(MARKER)[2]
        begin = first + ANSWER_MARKER
        if not whole.startswith(begin) or not whole.endswith(MARKER + to_answer):
            return None
        to_user = whole[len(begin) : -len(MARKER + to_answer)]
        user_ids, answer_ids = (model.tokenizer.encode(text, add_special=False) for text in (to_user, to_answer))
        return Glue(to_user, user_ids[0], answer_ids, frozenset(stop_ids(model))) if user_ids and answer_ids else None


@dataclass(slots=True)
class Talk:
    """One conversation while it is written."""

    model: ChatModel
    glue: Glue
    first: Prompt  # its temperature and max_new are those of every answer
    goal: int  # tokens after which no more turns are begun
    leave_out: set[str]  # messages that must not be asked, normalised
    rng: random.Random
    ids: list[int] = field(default_factory=list)  # up to the end of the last answer
    answers: list[Span] = field(default_factory=list)
    finish: Finish = Finish.END  # of the last answer
    dropped: Counter[str] = field(default_factory=Counter)  # messages, by reason
    opening: str | None = None  # the first words of the message that is being written; None: an answer is
    tries: int = 0
    said: set[str] = field(default_factory=set)

    def begin(self) -> Prompt:
        ids, room = list(self.first.ids), max(self.goal - len(self.first.ids), 1)
        return Prompt(ids, self.first.kind, self.first.temperature, min(self.first.max_new, room), self)

    def follow(self, written: Written) -> Prompt | None:
        """Take what was written and return the next prompt of the conversation, or None at its end."""
        ids = without_end(written, self.glue.ends)
        if self.opening is None:
            self._take_answer(written, ids)
            return self._next_message()
        text, reason = message_text(self.model, self.opening, ids, written.finish, self.said, self.leave_out)
        if reason:
            self.dropped[reason] += 1
            return self._next_message()
        self.said.add(normalised(text))
        self.tries, so_far = 0, [*written.prompt.ids, *ids]
        return self._ask(so_far + self.glue.to_answer, len(so_far))

    # ---- the parts

    def _ask(self, ids: list[int], held: int) -> Prompt | None:
        self.opening = None
        room = self.goal - len(ids)
        if room < min(LEAST_ANSWER, self.first.max_new):
            return None
        return Prompt(ids, self.first.kind, self.first.temperature, min(self.first.max_new, room), self, held)

    def _take_answer(self, written: Written, ids: list[int]) -> None:
        begin = len(written.prompt.ids)
        self.ids, self.finish = [*written.prompt.ids, *ids], written.finish
        end = len(self.ids)
        if end < begin + len(written.ids):  # the end of the answer is a label too, and is the template's own id
            self.ids.append(self.glue.end_id)
            end += int(written.ids[-1]) == self.glue.end_id
        self.answers.append((begin, end))

    def _next_message(self) -> Prompt | None:
        self.tries += 1
        held = len(self.ids) - (self.ids[-1] == self.glue.end_id)
        if self.tries > MOST_TRIES or held + MESSAGE_TOKENS + LEAST_ANSWER > self.goal:
            return None
        openings = OPENINGS if self.rng.random() < 0.5 else FOLLOW_UPS
        self.opening = "" if self.rng.random() < PLAIN_OPENING else self.rng.choice(openings)
        ids = self.ids[:held] + self.model.tokenizer.encode(self.glue.to_user + self.opening, add_special=False)
        return Prompt(ids, self.first.kind, self.rng.choice(WARMTH), MESSAGE_TOKENS, self, held)
