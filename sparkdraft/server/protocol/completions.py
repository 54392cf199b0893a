"""The request bodies of /v1/completions, /tokenize and /detokenize.

A prompt is a text, a list of texts, a list of ids or a list of those; `prompts` turns it into one list. prompts.py
checks whether ids are in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, Tag

from sparkdraft.server.limits import MAX_PROMPTS
from sparkdraft.server.protocol.chat import Messages, Tools
from sparkdraft.server.protocol.errors import ApiError
from sparkdraft.server.protocol.refused import CHAT_ONLY
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

    @property
    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if is_one else list(prompt)

    def check(self) -> None:
        self.check_sampling(logprobs=self.logprobs)
        count = (self.n or 1) * len(self.prompts)
        if count > MAX_PROMPTS:
            raise ApiError(400, f"n times the prompts is {count} and {MAX_PROMPTS} is the limit; ask for fewer.", "n")
        if self.suffix:
            raise ApiError(400, "suffix is not supported here; write the text around the gap into prompt.", "suffix")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError(400, "best_of is not supported beyond n; ask for n and choose yourself.", "best_of")


class TokenizeRequest(Fields):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Fields):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
