"""The fields that both endpoints share, and how they become the engine's SamplingParams.

Null is the same as not sent. Unknown fields are ignored unless they would change the answer (validation.py). Ranges
that the engine also checks are checked by SamplingParams itself, so that there is one sentence for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from sparkdraft.core import (
    AUTO,
    MAX_COUNT,
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOPS,
    Repetition,
    SamplingParams,
    UserError,
)
from sparkdraft.server.protocol.validation import ApiError, check_refused

Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
MaxTokens = Annotated[int, Field(le=MAX_COUNT)]
INT64 = 2**63
ALL = -1  # as a number of tokens: as many as fit in the context


class Fields(BaseModel):
    """A part of a request: unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class StreamOptions(Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: the usage so far in every chunk


class RepetitionDetection(Fields):
    """vLLM's: a pattern of so many tokens, so often in a row, ends the text."""

    max_pattern_size: Count | None = None
    min_pattern_size: Count | None = None
    min_count: Count | None = None

    def rule(self) -> Repetition:
        """As in vLLM: without a largest size nothing is looked for, and patterns begin at one token."""
        try:
            return Repetition(self.max_pattern_size or 0, self.min_pattern_size or 1, self.min_count or 0)
        except UserError as error:
            raise ApiError(400, f"repetition_detection.{error}.", "repetition_detection") from None


class SamplingFields(Fields):
    refused: ClassVar[Mapping[str, str]] = {}  # further fields that are an error, and what to use instead
    # the engine's names of fields
    names: ClassVar[Mapping[str, str]] = {"num_draft": "speculation", "stop_ids": "stop_token_ids"}

    model: str | None = Field(None, description="a name from /v1/models; left out: the model that is served")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    max_tokens: MaxTokens | None = Field(None, description="-1: up to the end of the context")
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[TokenId, float], Field(max_length=MAX_LOGIT_BIAS)] | None = None

    # vLLM's extras
    top_k: int | None = Field(None, description="0 and -1: off")
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS)] | None = None
    skip_special_tokens: bool | None = Field(None, description="false: special tokens are part of the text")
    prompt_logprobs: int | None = Field(None, description="how many alternatives are reported beside prompt tokens")
    truncate_prompt_tokens: Annotated[int, Field(le=MAX_COUNT)] | None = Field(
        None, description="keep only the last tokens of the prompt; -1: as many as fit"
    )
    repetition_detection: RepetitionDetection | None = None
    return_token_ids: bool | None = Field(None, description="the ids of the prompt and of every text")

    # ours
    repetition_limit: Count | None = Field(None, description="tokens of repetition that end a text; 0: none does")
    speculation: Literal["auto", "off"] | Annotated[int, Field(ge=0, le=1024)] | None = Field(
        None, description="drafts per step: auto chooses every step, off never drafts, a number is fixed"
    )
    return_speculation: bool | None = Field(None, description="adds metrics.speculative_decoding to the answer")

    @model_validator(mode="before")
    @classmethod
    def _check_refused(cls, body: Any) -> Any:
        check_refused(body, cls.refused)
        return body

    @property
    def answer_fields(self) -> dict[str, Any]:
        """Fields of shapes.Answer, by name."""
        stream, usage = (
            self.stream_options or StreamOptions(),
            bool(self.stream_options and self.stream_options.include_usage),
        )
        return {
            "prompt_logprobs": self.prompt_logprobs,
            "include_usage": usage,
            "usage_in_each": usage and bool(stream.continuous_usage_stats),
            "return_speculation": bool(self.return_speculation),
            "return_token_ids": bool(self.return_token_ids),
        }

    @property
    def num_draft(self) -> int | None:
        if isinstance(self.speculation, int):
            return self.speculation
        return {"off": 0, "auto": AUTO}.get(self.speculation or "")

    def check_sampling(self, **more: Any) -> None:
        """Refuse what SamplingParams refuses, before the request is counted and its prompt is tokenised."""
        asked = {self.tokens_field: self.wanted_tokens, "truncate_prompt_tokens": self.truncate_prompt_tokens}
        for name, value in asked.items():
            if value is not None and value < 1 and value != ALL:
                limit = f"it must be at least 1, or {ALL} for as many as fit in the context"
                raise ApiError(400, f"{name} is {value}; {limit}.", name)
        if self.prompt_logprobs is not None and self.stream:
            sentence = "prompt_logprobs cannot be streamed; set stream to false, or leave it out."
            raise ApiError(400, sentence, "prompt_logprobs")
        self.sampling({}, MAX_COUNT, **more)

    @property
    def wanted_tokens(self) -> int | None:
        """The limit on an answer, under the name that the endpoint prefers."""
        return self.max_tokens

    @property
    def tokens_field(self) -> str:
        return "max_tokens"

    def sampling(
        self, defaults: Mapping[str, float], max_tokens: int, repetition_limit: int = 0, **more: Any
    ) -> SamplingParams:
        """defaults, max_tokens: used where the request names nothing; repetition_limit only if it sets no limit of
        tokens either. more: what the endpoint adds."""
        wanted = self.wanted_tokens
        is_open = wanted in (None, ALL) and not self.ignore_eos and self.repetition_limit is None
        given = {name: getattr(self, name) for name in SAME_NAME} | {
            "max_tokens": max_tokens if wanted is None else MAX_COUNT if wanted == ALL else wanted,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop,
            "stop_ids": self.stop_token_ids,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "num_draft": self.num_draft,
            "keep_special": self.skip_special_tokens is False,
            "repetition_limit": repetition_limit if is_open else self.repetition_limit,
            "repetition_detection": self.repetition_detection and self.repetition_detection.rule(),
        }
        said = {name: value for name, value in (given | more).items() if value is not None}
        try:
            return SamplingParams(**(dict(defaults) | said))
        except UserError as error:
            raise self._refusal(str(error), said) from None

    def _refusal(self, sentence: str, said: Mapping[str, Any]) -> ApiError:
        """Replace the engine's name of a field, with which its sentence begins, by the API's."""
        name, _, rest = sentence.partition(" ")
        field = self.names.get(name, name)
        return ApiError(400, f"{field} {rest}.", param=field if name in said else None)


SAME_NAME = SamplingFields.model_fields.keys() & set(SamplingParams.__slots__)
