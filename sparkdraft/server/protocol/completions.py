"""The request bodies of /v1/completions, /tokenize and /detokenize.

A prompt is a text, a list of texts, a list of ids or a list of those; `prompts` turns it into one list. prompts.py
checks whether ids are in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, Tag, model_validator

from sparkdraft.server.limits import MAX_PROMPTS
from sparkdraft.server.protocol.chat import ChatFields, Messages, Tools
from sparkdraft.server.protocol.errors import ApiError
from sparkdraft.server.protocol.refused import CHAT_ONLY, check_refused
from sparkdraft.server.protocol.sampling import Fields, SamplingFields, TokenId

Prompts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
IdLists = Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


def _form(prompt: Any) -> str:
    """Which of the four forms is meant, judged by the first element, so that a mistake is reported once and not four
    times."""
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


class CompletionRequest(SamplingFields):
    refused: ClassVar[Mapping[str, str]] = CHAT_ONLY

    prompt: Prompt
    logprobs: int | None = Field(None, description="how many alternatives are reported beside each token")
    echo: bool | None = Field(None, description="put the prompt before the text")
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = Field(None, description="false: no special token is put before the prompt")

    @property
    def scores(self) -> bool:
        """Whether the prompt is scored and nothing is written."""
        return self.max_tokens == 0

    @property
    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if is_one else list(prompt)

    @property
    def wanted_tokens(self) -> int | None:
        """Scoring asks for one token: the step that scores the prompt samples it anyway, and it is dropped."""
        return 1 if self.scores else self.max_tokens

    def check(self) -> None:
        if self.scores and not self.echo:
            sentence = (
                "max_tokens is 0, which scores the prompt and needs echo; set echo to true, or ask for more tokens."
            )
            raise ApiError(400, sentence, "max_tokens")
        self.check_sampling(logprobs=self.logprobs)
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
