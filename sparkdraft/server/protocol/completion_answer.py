"""A completion's answer as it comes, over several prompts with n texts each, numbered consecutively.

It has the interface of chat_answer.py and is used in the same way: `push` gives chunks, `whole` the answer. Text is
passed on unchanged; with `echo` the prompt precedes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkdraft.core import TokenLogprob
from sparkdraft.server.messages import TokenEvent
from sparkdraft.server.protocol.chat_answer import shown
from sparkdraft.server.protocol.shapes import Json, Tally, TokenBytes, accepted_chars, completion_logprobs


@dataclass(slots=True)
class Text:
    """One text so far, and the log-probabilities of its tokens."""

    text: str = ""
    rows: list[tuple[int, TokenLogprob | None]] = field(default_factory=list)
    num_chars: int = 0  # characters of the tokens so far, for their offsets
    finish: str | None = None


@dataclass(slots=True)
class CompletionAnswer:
    id: str
    created: int
    model: str
    n: int
    prompts: list[tuple[str, list[int]]]  # text and ids; the text is used only with echo
    tokenizer: TokenBytes
    eos_ids: frozenset[int]
    echo: bool = False
    wants_logprobs: bool = False
    include_usage: bool = False
    return_speculation: bool = False
    tally: Tally = field(default_factory=Tally)
    texts: dict[int, Text] = field(default_factory=dict)

    def push(self, event: TokenEvent, prompt_index: int = 0) -> list[Json]:
        index = prompt_index * self.n + event.index
        text, rows = event.text, []
        if index not in self.texts:
            self.texts[index] = Text()
            if self.echo:
                prompt, ids = self.prompts[prompt_index]
                text = prompt + text
                rows = list(zip(ids, event.prompt_logprobs or [None] * len(ids), strict=False))
        choice = self.texts[index]
        choice.text += text
        rows += [(row.id, row) for row in shown(event.logprobs or [], event, self.eos_ids)]
        choice.finish = event.finish.value if event.finish else None
        if not (text or rows or event.finish or self.return_speculation):
            return []
        return [self._chunk(index, event, text, self._logprobs(choice, rows))]

    def _logprobs(self, choice: Text, rows: list[tuple[int, TokenLogprob | None]]) -> Json | None:
        if not self.wants_logprobs:
            return None
        shape = completion_logprobs(rows, self.tokenizer, choice.num_chars)
        names = (self.tokenizer.token_bytes(token, skip_special=False).decode("utf-8", "replace") for token, _ in rows)
        choice.num_chars += sum(map(len, names))
        choice.rows += rows
        return shape

    def _chunk(self, index: int, event: TokenEvent, text: str, logprobs: Json | None) -> Json:
        finish = self.texts[index].finish
        body = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        chunk = self._frame() | {"choices": [body]}
        if self.include_usage:
            chunk["usage"] = None
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
            logprobs = completion_logprobs(choice.rows, self.tokenizer) if self.wants_logprobs else None
            choices.append({"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish})
        answer = self._frame() | {"choices": choices, "usage": self.tally.usage()}
        return answer | ({"metrics": self.tally.metrics()} if self.return_speculation else {})

    def _frame(self) -> Json:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}
