"""The prompts that the target is asked: those that a user gives, and those that the target writes itself.

A chat model that is given its own template up to where the user's message begins writes a user's message. System
prompts and first words, drawn at random, make the messages differ. Messages that are empty, broken or repeated are
dropped, and the others are appended to a file line by line, so that none is written twice. Reading a file needs no
model, so a bad file is refused before a model is loaded. data.py has the prompts answered.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkdraft.core import UserError
from sparkdraft.train.corpus import Finish
from sparkdraft.train.generate import Prompt, Written
from sparkdraft.train.target import ChatModel

GIVEN, SELF = "given", "self"  # kinds: of a file's prompts that name no class, and of self-written ones
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


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation that waits for an answer."""

    messages: list[dict[str, Any]]
    kind: str

    @property
    def text(self) -> str:
        """The last user message."""
        return str(self.messages[-1]["content"])


def normalised(text: str) -> str:
    """Equal for texts that differ only in case and white space."""
    return " ".join(text.split()).casefold()


# ---- from a file


def read_prompts(path: str | Path) -> list[Question]:
    """Read a .jsonl of {"prompt", "class"?} or {"messages", "class"?}, or a .txt with one prompt per line; blank lines
    are skipped."""
    file = Path(path)
    if file.suffix not in (".jsonl", ".txt"):
        raise UserError(f"Prompts are read from .jsonl and .txt files, and {file} is neither: convert or rename it.")
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"The prompts {file} cannot be read ({error}): check the path, and that it is UTF-8."
        ) from error
    questions = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{file}, line {number}"
            questions.append(_parse(line, where) if file.suffix == ".jsonl" else _ask(line.strip(), GIVEN))
    if not questions:
        raise UserError(f"The file {file} holds no prompts: put one on each line.")
    return questions


class PromptFile:
    """Prompts that a target wrote, kept as they come: lines of a .jsonl, the last of which may have been cut off."""

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
            self.questions = read_prompts(path)

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


def _ask(text: str, kind: str, system: str | None = None) -> Question:
    before = [{"role": "system", "content": system}] if system else []
    return Question([*before, {"role": "user", "content": text}], kind)


def _parse(line: str, where: str) -> Question:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error}): write one object per line.") from None
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise UserError(f'{where} must be an object with either "prompt" or "messages".')
    kind = entry.get("class", GIVEN)
    if not isinstance(kind, str) or not kind:
        raise UserError(f'{where}: "class" must be a name in quotes; leave it out if there is none.')
    if "messages" in entry:
        return Question(_check_messages(entry["messages"], where), kind)
    if not isinstance(entry["prompt"], str) or not entry["prompt"].strip():
        raise UserError(f'{where}: "prompt" must be a text that is not empty.')
    return _ask(entry["prompt"], kind)


def _check_messages(messages: Any, where: str) -> list[dict[str, Any]]:
    right = isinstance(messages, list) and messages and all(isinstance(m, Mapping) for m in messages)
    if not right or not all(isinstance(m.get(key), str) for m in messages for key in ("role", "content")):
        raise UserError(f'{where}: "messages" must be a list of objects with "role" and "content", both text.')
    if messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise UserError(f"{where}: the last message must be a user's and not empty: it is answered.")
    return list(messages)


# ---- from the target itself


@dataclass(frozen=True, slots=True)
class Turn:
    """The place in the template where a user's message is written."""

    before: str
    end_id: int | None  # the first special id after the message, unless plain text follows


def user_turn(target: ChatModel, system: str | None = None) -> Turn:
    text = target.chat_text(_ask(MARKER, SELF, system).messages, add_generation_prompt=False)
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
    """Ids that end a message which the target writes as the user: the end of its turn, or of the text."""
    end = user_turn(target).end_id
    return set(target.tokenizer.eos_ids) | ({end} if end is not None else set())


def message_prompts(target: ChatModel, count: int, seed: int) -> Iterator[Prompt]:
    """Prompts that a user's message follows. The tag is (system prompt, first words)."""
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
    """Whether the template takes a system prompt: some refuse it, or write it as part of the user's message."""
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
        ids = written.ids.tolist()
        if ids and ids[-1] in self.ends:
            ids.pop()
        text = (opening + self.target.tokenizer.decode(ids)).rstrip("\ufffd").strip()  # a character may be cut in half
        reason = self._reason(written.finish, ids, text)
        if reason:
            self.dropped[reason] += 1
            return None
        self.seen.add(normalised(text))
        return _ask(text, SELF, system)

    def _reason(self, finish: Finish, ids: list[int], text: str) -> str | None:
        if not text:
            return "empty"
        if len(ids) < LEAST_TOKENS:
            return "short"
        if not self.target.tokenizer.special_ids.isdisjoint(ids):
            return "special ids"
        if finish is Finish.LOOP:
            return "loop"
        return "repeated" if normalised(text) in self.seen else None
