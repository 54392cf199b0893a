"""Conversations of several turns, in which the target writes the user's messages as well as its own answers.

A conversation is one growing text. After an answer come the ids with which the template leads to the user's next
message, perhaps with first words of ours, and the target writes the message; then come the ids that lead to the answer.
A message that is empty, broken, repeated or one of the evaluation's is written again, with other first words. An answer
that loops is cut, and the conversation goes on. So a document of n answers is run once, not n times: only the new ids
of a turn are, after what the generator holds of the turns before (generate.py, engine_writer.py).

    | system, first message, to_answer | answer | to_user, first words | message | to_answer | answer | ...
      the prompt                         span 0                                                span 1
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from sparkdraft.train.corpus import Finish, Span
from sparkdraft.train.generate import Prompt, Written
from sparkdraft.train.prompts import (
    LEAST_TOKENS,
    MARKER,
    MESSAGE_TOKENS,
    OPENINGS,
    PLAIN_OPENING,
    WARMTH,
    normalised,
    stop_ids,
)
from sparkdraft.train.target import ChatModel

ANSWER_MARKER = "The_answer_of_the_assistant_stands_here"
MOST_TRIES = 4  # times that one message is written; then the conversation ends
LEAST_ANSWER = 16  # tokens that a turn must leave for its answer
FOLLOW_UPS = (
    "Can you", "Could you", "Now", "And", "But", "What about", "What if", "Thank you", "Thanks!", "I see.", "Why",
    "How", "Give me an example of", "Explain the", "Rewrite", "Make it", "Please add", "Is there", "Which",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Glue:
    """What a template writes between the turns."""

    to_user: str  # from the end of an answer to the beginning of the user's next message
    end_id: int  # its first id, which should end the answer
    to_answer: list[int]  # ids from the end of a message to the beginning of its answer
    ends: frozenset[int]  # ids that end a turn

    @staticmethod
    def of(model: ChatModel) -> Glue | None:
        """None if the template writes earlier turns differently once more turns follow: then a conversation is not one
        growing text."""
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
        """Take what was written, and say how the conversation goes on; None: it has ended."""
        ids = written.ids.tolist()
        if ids and ids[-1] in self.glue.ends:
            ids.pop()
        if self.opening is None:
            self._take_answer(written, ids)
            return self._next_message()
        text = (self.opening + self.model.tokenizer.decode(ids)).rstrip("\ufffd").strip()
        if reason := self._reason(written.finish, ids, text):
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
        if end < begin + len(written.ids):  # the id that ended it is a label too, and the template's own
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

    def _reason(self, finish: Finish, ids: list[int], text: str) -> str | None:
        if not text:
            return "empty"
        if len(ids) < LEAST_TOKENS:
            return "short"
        if not self.model.tokenizer.special_ids.isdisjoint(ids):
            return "special ids"
        if finish is Finish.LOOP:
            return "loop"
        if normalised(text) in self.leave_out:
            return "excluded"
        return "repeated" if normalised(text) in self.said else None
