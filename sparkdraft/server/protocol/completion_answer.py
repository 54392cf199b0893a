"""A completion's answer as it comes, over several prompts with n texts each, numbered consecutively.

It has the interface of chat_answer.py and is used in the same way: `push` gives chunks, `whole` the answer. Text is
passed on unchanged; with `echo` the prompt precedes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from sparkdraft.core import TokenLogprob
from sparkdraft.server.messages import TokenEvent
from sparkdraft.server.protocol.shapes import (
    Json,
    Tally,
    accepted_chars,
    completion_logprobs,
    prompt_logprobs,
    stop_reason,
)
from sparkdraft.text.detokenize import Detokenizer
from sparkdraft.text.tokenizer import Vocabulary


@dataclass(slots=True)
class Text:
    """One text so far, and the log-probabilities of its tokens."""

    decoder: Detokenizer  # of the tokens that have rows
    text: str = ""
    rows: list[tuple[int, TokenLogprob | None]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # of each row's token in the text
    num_chars: int = 0  # of the tokens so far
    finish: str | None = None
    stop_reason: str | None = None


@dataclass(slots=True)
class CompletionAnswer:
    id: str
    created: int
    model: str
    n: int
    prompts: list[tuple[str, list[int]]]  # text and ids; the text is used only with echo
    tokenizer: Vocabulary
    echo: bool = False
    logprobs: int | None = None  # how many alternatives beside each token
    prompt_logprobs: int | None = None  # the same for the prompt, in a list of its own
    include_usage: bool = False
    usage_in_each: bool = False
    return_speculation: bool = False
    tally: Tally = field(default_factory=Tally)
    texts: dict[int, Text] = field(default_factory=dict)
    prompt_rows: dict[int, list[TokenLogprob | None]] = field(default_factory=dict)  # by the prompt's number

    def push(self, event: TokenEvent, prompt_index: int = 0) -> list[Json]:
        index = prompt_index * self.n + event.index
        text, rows = event.text, []
        if event.prompt_logprobs:
            self.prompt_rows[prompt_index] = event.prompt_logprobs
        if index not in self.texts:
            self.texts[index] = Text(Detokenizer(self.tokenizer, continues=not self.echo))
            if self.echo:
                prompt, ids = self.prompts[prompt_index]
                text = prompt + text
                told = [row and replace(row, top=row.top[: self.logprobs]) for row in event.prompt_logprobs or []]
                rows = list(zip(ids, told or [None] * len(ids), strict=False))
        choice = self.texts[index]
        choice.text += text
        rows += [(row.id, row) for row in event.logprobs or []]  # clients count on one per token, the end included
        choice.finish, choice.stop_reason = event.finish.value if event.finish else None, event.stop_reason
        if not (text or rows or event.finish or self.return_speculation):
            return []
        return [self._chunk(index, event, text, self._logprobs(choice, rows))]

    def _logprobs(self, choice: Text, rows: list[tuple[int, TokenLogprob | None]]) -> Json | None:
        if self.logprobs is None:
            return None
        offsets = []
        for token, _ in rows:
            offsets.append(choice.num_chars)
            choice.num_chars += len(choice.decoder.push(token) or self._mark(choice, token))
        choice.rows += rows
        choice.offsets += offsets
        return completion_logprobs(rows, offsets, self.tokenizer)

    def _mark(self, choice: Text, token: int) -> str:
        """A special token's text where it stands in the text: a prompt may spell one."""
        if not self.tokenizer.is_special(token):
            return ""
        mark = self.tokenizer.token_bytes(token, skip_special=False).decode("utf-8", "replace")
        return mark if choice.text.startswith(mark, choice.num_chars) else ""

    def _chunk(self, index: int, event: TokenEvent, text: str, logprobs: Json | None) -> Json:
        choice = self.texts[index]
        body = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish}
        body |= stop_reason(choice.stop_reason)
        chunk = self._frame() | {"choices": [body]}
        if self.include_usage:
            chunk["usage"] = self.tally.usage() if self.usage_in_each else None
        if self.return_speculation:
            chunk |= {"tokens": len(event.ids), "accepted": event.num_accepted}
            chunk["accepted_chars"] = accepted_chars(event, self.tokenizer)
            if not self.include_usage and self._all_ended():
                chunk["metrics"] = self.tally.metrics()
        return chunk

    def _all_ended(self) -> bool:
        return sum(text.finish is not None for text in self.texts.values()) == self.n * len(self.prompts)

    def last_chunks(self) -> list[Json]:
        if not self.include_usage:
            return []
        last = self._frame() | {"choices": [], "usage": self.tally.usage()}
        return [last | ({"metrics": self.tally.metrics()} if self.return_speculation else {})]

    def whole(self) -> Json:
        choices = []
        for index, choice in sorted(self.texts.items()):
            told = self.logprobs is not None
            logprobs = completion_logprobs(choice.rows, choice.offsets, self.tokenizer) if told else None
            body = {"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish}
            if self.prompt_logprobs is not None:
                rows = self.prompt_rows.get(index // self.n, [])
                body["prompt_logprobs"] = prompt_logprobs(rows, self.prompt_logprobs, self.tokenizer)
            choices.append(body | stop_reason(choice.stop_reason))
        answer = self._frame() | {"choices": choices, "usage": self.tally.usage()}
        return answer | ({"metrics": self.tally.metrics()} if self.return_speculation else {})

    def _frame(self) -> Json:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}
