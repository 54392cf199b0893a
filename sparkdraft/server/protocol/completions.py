"""/v1/completions: its request body and its answer; and the bodies of /tokenize and /detokenize.

A prompt is a text, a list of texts, a list of ids or a list of those. An answer has n texts for each prompt, numbered
consecutively.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, Tag, model_validator

from sparkdraft.core import StepOutput, TokenLogprob
from sparkdraft.server.protocol.chat import ChatFields, Messages, Tools
from sparkdraft.server.protocol.constraints import ConstrainedFields
from sparkdraft.server.protocol.sampling import Fields, TokenId
from sparkdraft.server.protocol.shapes import (
    Answer,
    Chunk,
    Json,
    accepted_chars,
    completion_logprobs,
    prompt_logprobs,
    stop_reason,
)
from sparkdraft.server.protocol.validation import CHAT_ONLY, ApiError, check_refused
from sparkdraft.text.detokenize import Detokenizer

MAX_PROMPTS = 256  # per request
Prompts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
IdLists = Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


def _form(prompt: Any) -> str:
    """The form that is meant, by the first element, so that a mistake is reported once and not four times."""
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else ""
    return "texts" if isinstance(first, str) else "id_lists" if isinstance(first, list) else "ids"


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Prompts, Tag("texts")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[IdLists, Tag("id_lists")],
    Discriminator(_form),
]


class CompletionRequest(ConstrainedFields):
    refused: ClassVar[Mapping[str, str]] = CHAT_ONLY

    prompt: Prompt
    logprobs: int | None = Field(None, description="how many alternatives are reported beside each token")
    echo: bool | None = Field(None, description="put the prompt before the text")
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = Field(None, description="false: no special token is put before the prompt")

    @property
    def scores(self) -> bool:
        """True if the prompt is scored and nothing is written."""
        return self.max_tokens == 0

    @property
    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if is_one else list(prompt)

    @property
    def wanted_tokens(self) -> int | None:
        """Scoring asks for one token, which the step that scores the prompt samples anyway, and drops it."""
        return 1 if self.scores else self.max_tokens

    def check(self) -> None:
        if self.scores and not self.echo:
            sentence = "max_tokens is 0, which scores the prompt and needs echo; set echo to true, or ask for more."
            raise ApiError(400, sentence, "max_tokens")
        self.check_sampling(logprobs=self.logprobs)
        self.check_constraint()
        count = (self.n or 1) * len(self.prompts)
        if count > MAX_PROMPTS:
            raise ApiError(400, f"n times the prompts is {count} and {MAX_PROMPTS} is the limit; ask for fewer.", "n")
        if self.suffix:
            raise ApiError(400, "suffix is not supported here; write the text around the gap into prompt.", "suffix")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError(400, "best_of is not supported beyond n; ask for n and choose yourself.", "best_of")


class TokenizeRequest(ChatFields):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_refused(cls, body: Any) -> Any:
        if isinstance(body, Mapping):
            check_refused({"chat_template": body.get("chat_template")})
        return body


class DetokenizeRequest(Fields):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


@dataclass(slots=True)
class Text:
    """One text so far, and the log-probabilities of its tokens."""

    decoder: Detokenizer  # of the tokens with log-probabilities
    text: str = ""
    rows: list[tuple[int, TokenLogprob | None]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # where each of these tokens begins in the text
    num_chars: int = 0  # of these tokens
    ids: list[int] = field(default_factory=list)  # for return_token_ids
    finish: str | None = None
    stop_reason: str | None = None


@dataclass(slots=True, kw_only=True)
class CompletionAnswer(Answer):
    chunk_kind = "text_completion"

    prompts: list[tuple[str, list[int]]]  # text and ids; the text is used only with echo
    echo: bool = False
    logprobs: int | None = None  # alternatives per token
    texts: dict[int, Text] = field(default_factory=dict)
    prompt_rows: dict[int, list[TokenLogprob | None]] = field(default_factory=dict)  # by the prompt's number

    def push(self, event: StepOutput, prompt_index: int = 0) -> list[Chunk]:
        index = prompt_index * self.n + event.index
        text, rows, is_first = event.text, [], index not in self.texts
        if event.prompt_logprobs:
            self.prompt_rows[prompt_index] = event.prompt_logprobs
        if is_first:
            self.texts[index] = Text(Detokenizer(self.tokenizer, continues=not self.echo))
            if self.echo:
                prompt, ids = self.prompts[prompt_index]
                text = prompt + text
                told = [row and replace(row, top=row.top[: self.logprobs]) for row in event.prompt_logprobs or []]
                rows = list(zip(ids, told or [None] * len(ids), strict=False))
        choice = self.texts[index]
        choice.text += text
        choice.ids += event.ids if self.return_token_ids else []
        rows += [(row.id, row) for row in event.logprobs or []]  # clients count on one per token, the end included
        choice.finish, choice.stop_reason = event.finish.value if event.finish else None, event.stop_reason
        if not (text or rows or event.finish or self.return_speculation or self.return_token_ids):
            return []
        if self.text_is_all and self.logprobs is None and not event.finish:
            return [self.text_chunk(index, "text", text)]
        token_ids = self._token_ids(event.ids, prompt_index if is_first else None)
        return [self._chunk(index, event, text, self._logprobs(choice, rows), token_ids)]

    def _token_ids(self, ids: list[int], prompt_index: int | None) -> Json:
        """vLLM's fields of a choice, if they were asked for: its ids, and at first those of its prompt."""
        if not self.return_token_ids:
            return {}
        prompt = {} if prompt_index is None else {"prompt_token_ids": self.prompts[prompt_index][1]}
        return {"token_ids": ids} | prompt

    def text_choice(self, index: int, name: str, text: str) -> Json:
        return {"index": index, name: text, "logprobs": None, "finish_reason": None}

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
        """The text of a special token, if it stands here: a prompt may spell one."""
        if not self.tokenizer.is_special(token):
            return ""
        mark = self.tokenizer.token_bytes(token, skip_special=False).decode("utf-8", "replace")
        return mark if choice.text.startswith(mark, choice.num_chars) else ""

    def _chunk(self, index: int, event: StepOutput, text: str, logprobs: Json | None, token_ids: Json) -> Json:
        choice = self.texts[index]
        body = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish} | token_ids
        drafted = {"tokens": len(event.ids), "accepted": event.num_accepted}
        if self.return_speculation:
            drafted["accepted_chars"] = accepted_chars(event, self.tokenizer)
        return self.chunk(body | stop_reason(choice.stop_reason), drafted, is_last=choice.finish is not None)

    def all_ended(self) -> bool:
        return sum(text.finish is not None for text in self.texts.values()) == self.n * len(self.prompts)

    def whole(self) -> Json:
        choices = []
        for index, choice in sorted(self.texts.items()):
            told = self.logprobs is not None
            logprobs = completion_logprobs(choice.rows, choice.offsets, self.tokenizer) if told else None
            body = {"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish}
            if self.prompt_logprobs is not None:
                rows = self.prompt_rows.get(index // self.n, [])
                body["prompt_logprobs"] = prompt_logprobs(rows, self.prompt_logprobs, self.tokenizer)
            body |= self._token_ids(choice.ids, index // self.n)
            choices.append(body | stop_reason(choice.stop_reason))
        return self.frame("text_completion", choices) | {"usage": self.tally.usage()} | self.metrics()
