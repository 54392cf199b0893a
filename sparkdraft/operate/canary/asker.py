"""Asks a backend one thing at a time, and compares answers.

Two answers are the same if their ids are, or if they part where the model itself is undecided: where sums are made in
another order (a GPU's larger batches, torch's own products), the last bit of a logit may differ, and a near tie may
fall the other way.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from sparkdraft.backend import Backend
from sparkdraft.core import FinishReason, SamplingParams, TokenLogprob, UserError
from sparkdraft.operate.canary.findings import Failed, Skipped
from sparkdraft.text.tokenizer import Tokenizer

NEAR = 0.25  # nats: two tokens nearer than this are a near tie, and two log-probabilities of one token the same
LONGEST = 300.0  # seconds of one request, after which something hangs


@dataclass(slots=True)
class Answer:
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    num_cached: int = 0
    drafting: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class Asker:
    def __init__(self, backend: Backend) -> None:
        self.backend, self.info = backend, backend.info
        self._count = 0

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(RawTokenizer.from_str(self.info.tokenizer), self.info.special)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    @property
    def room(self) -> int:
        """Tokens that a prompt may have if a short answer follows."""
        return self.info.max_model_len - 80

    def ask(self, ids: list[int], params: SamplingParams) -> Answer:
        """The answer to one request, which runs alone."""
        if len(ids) + params.max_tokens > self.info.max_model_len:
            raise Skipped(f"the context has {self.info.max_model_len} tokens, which is too short to ask")
        self._count += 1
        name, answer, begin = f"canary-{self._count}", Answer(), time.monotonic()
        try:
            grammar = self.backend.compile_grammar(params.grammar) if params.grammar else None
            self.backend.add(name, ids, params, grammar)
        except UserError as error:
            raise Skipped(f"the model does not take the request: {error}") from None
        while answer.finish is None:
            if not self.backend.has_work or time.monotonic() - begin > LONGEST:
                self.backend.abort(name)
                raise Failed(f"a request did not end within {LONGEST:.0f} s")
            for piece in self.backend.step():
                if piece.request_id == name:
                    answer.ids += piece.ids
                    answer.text += piece.text
                    answer.logprobs += piece.logprobs or []
                    answer.prompt_logprobs = piece.prompt_logprobs or answer.prompt_logprobs
                    answer.finish, answer.num_cached = piece.finish, piece.num_cached
                    answer.drafting = piece.speculation or {}
        answer.seconds = time.monotonic() - begin
        return answer

    def same(self, one: Answer, other: Answer, names: tuple[str, str]) -> str:
        """Where two answers part, in words, if that is a near tie, and else that they are equal. Raises Failed if they
        differ otherwise. one: has the log-probabilities of two tokens or more at each place."""
        length = min(len(one.ids), len(other.ids))
        place = next((i for i in range(length) if one.ids[i] != other.ids[i]), length)
        if place == len(one.ids) == len(other.ids):
            return f"{place} tokens are equal"
        if place < length and nearness(one.logprobs[place], other.ids[place]) <= NEAR:
            return f"{place} tokens are equal, and then a near tie"
        said = [self.tokenizer.decode(answer.ids[place : place + 3]) for answer in (one, other)]
        raise Failed(f"after {place} equal tokens, {names[0]} says {said[0]!r} and {names[1]} says {said[1]!r}")


def nearness(row: TokenLogprob, token: int) -> float:
    """How many nats likelier the likeliest token was than this one."""
    known = dict(row.top) | {row.id: row.logprob}
    return max(known.values()) - known.get(token, -float("inf"))
