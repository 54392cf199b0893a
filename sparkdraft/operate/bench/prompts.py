"""Prompts of the benches, of tuning and of training: the package's own, and files of the user's.

prompts.jsonl was written for this project, and drafters are judged by it, so it is never trained on. Reading a file
needs no model, so a bad file is refused before one is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdraft.core import UserError

if TYPE_CHECKING:
    from sparkdraft.llm import LLM

PROMPTS = Path(__file__).with_name("prompts.jsonl")
HELDOUT = Path(__file__).with_name("heldout.txt")  # ordinary text
GIVEN = "given"  # the class of prompts whose file names none


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation that waits for an answer."""

    messages: list[dict[str, Any]]
    kind: str  # class

    @property
    def text(self) -> str:
        """The last user message."""
        return str(self.messages[-1]["content"])


def read_prompts(per_class: int, path: Path = PROMPTS) -> dict[str, list[str]]:
    """Return the first prompts of each class; all of them for 0."""
    classes: dict[str, list[str]] = {}
    for question in read_questions(path):
        classes.setdefault(question.kind, []).append(question.text)
    return {name: prompts[: per_class or None] for name, prompts in classes.items()}


def chat_prompts(llm: LLM, prompts: Sequence[str], context: int = 0) -> list[list[int]]:
    """Apply the chat template to each prompt, after about 'context' tokens of ordinary text."""
    before = ""
    if context:
        ids = llm.tokenizer.encode(HELDOUT.read_text(encoding="utf-8"), add_special=False)
        before = llm.tokenizer.decode((ids * (context // len(ids) + 1))[:context]) + "\n\n"
    return [llm.chat_ids([{"role": "user", "content": before + prompt}]) for prompt in prompts]


def read_questions(path: Path) -> list[Question]:
    """Read a .jsonl of {"prompt", "class"?} or {"messages", "class"?}, or else one prompt per line; blank lines are
    skipped."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # a line may hold other separators, such as U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The prompts {path} cannot be read ({error}): check the path, and that it is UTF-8.") from None
    read = _parse if path.suffix in (".jsonl", ".json") else lambda line, _: user_question(line.strip())
    questions = [read(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise UserError(f"The file {path} holds no prompts: put one on each line.")
    return questions


def user_question(text: str, kind: str = GIVEN, system: str | None = None) -> Question:
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
    return user_question(entry["prompt"], kind)


def _check_messages(messages: Any, where: str) -> list[dict[str, Any]]:
    right = isinstance(messages, list) and messages and all(isinstance(m, Mapping) for m in messages)
    if not right or not all(isinstance(m.get(key), str) for m in messages for key in ("role", "content")):
        raise UserError(f'{where}: "messages" must be a list of objects with "role" and "content", both text.')
    if messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise UserError(f"{where}: the last message must be a user's and not empty: it is answered.")
    return list(messages)
