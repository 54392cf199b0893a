"""The data that travels through the engine: sampling parameters, requests, the work of a step, and its outputs.

Data only: every part imports this file, and it imports none of them. A field that is not set at construction says which
part fills it. Lengths have the same names everywhere:

    0 ........ num_prompt ........ num_tokens                 ids that are known: the prompt, then the committed output
    0 ... num_computed | num_known | num_draft |              tokens in the cache | this step's: known ids, then drafts
                       |<---- num_scheduled -->|
                                   | num_accepted |           drafts that turned out right become known and computed
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from numbers import Real
from typing import Any, cast

MAX_LOGPROBS = 20
AUTO = -1  # a depth that is chosen every step
MAX_N = 64
MAX_COUNT = 2**31 - 1  # limit of token counts and ids: what a 32-bit number holds
MAX_TEMPERATURE = 100.0
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_PATTERN = 2048  # tokens of a repeated pattern
REPETITION = "repetition_detected"  # a stop reason, in vLLM's word
GRAMMARS = ("json_object", "json_schema", "regex", "lark")
RANGES: dict[str, tuple[float, float, str]] = {  # of sampling parameters, and the rule in words
    "max_tokens": (1, MAX_COUNT, f"at least 1 and at most {MAX_COUNT}"),
    "temperature": (0, MAX_TEMPERATURE, f"0 (greedy) or a positive number up to {MAX_TEMPERATURE:g}"),
    "top_k": (0, MAX_COUNT, f"0 (off) or a positive number up to {MAX_COUNT}"),
    "min_p": (0, 1, "between 0 and 1"),
    "repetition_penalty": (0.01, 100, "between 0.01 and 100 (1 is off)"),  # logits stay finite
    "presence_penalty": (-2, 2, "between -2 and 2"),
    "frequency_penalty": (-2, 2, "between -2 and 2"),
    "logprobs": (0, MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
    "prompt_logprobs": (0, MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
    "num_draft": (AUTO, MAX_COUNT, f"{AUTO} (chosen every step), 0 (off) or a positive number up to {MAX_COUNT}"),
    "repetition_limit": (0, MAX_COUNT, f"0 (off) or a positive number up to {MAX_COUNT}"),
    "n": (1, MAX_N, f"between 1 and {MAX_N}"),
}


class UserError(Exception):
    """An error that the user can fix. The message is one sentence: what is wrong, the limit, what to change."""


class TryLater(UserError):
    """Nothing has to change: the same request may work in 'retry_after' seconds."""

    def __init__(self, sentence: str, retry_after: int) -> None:
        super().__init__(sentence)
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact about the engine on this machine. (A fallback means that a user got less than was asked for.)"""

    name: str
    value: str
    reason: str = ""  # why, if it could be better


@dataclass(frozen=True, slots=True)
class Fallback:
    """Less than was asked for or than a file has, or a choice made for the user, and why."""

    name: str
    reason: str
    is_choice: bool = False  # it says what was chosen for the user: there is nothing to mend

    def as_dict(self) -> dict[str, str]:
        return {"name": self.name, "reason": self.reason}


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-text id, a stop id, a stop string or a repetition
    LENGTH = "length"  # max_tokens, the end of the context, or a repetition where the grammar is not complete
    ABORT = "abort"


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise UserError(message)


def whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise UserError(f"{name} is {value!r}; it must be a whole number") from None


def number(name: str, value: Any) -> float:
    _require(isinstance(value, Real), f"{name} is {value!r}; it must be a number")
    return cast(float, value)


def _ids(name: str, values: Any) -> list[int]:
    values = () if values is None else values
    _require(isinstance(values, Iterable), f"{name} is {values!r}; it must be a list of token ids")
    return [whole(f"a token id of {name}", value) for value in values]


def _texts(stop: Any) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else [] if stop is None else stop
    _require(isinstance(texts, Iterable), f"stop is {stop!r}; it must be a text or a list of texts")
    found = tuple(texts)
    for text in found:
        _require(isinstance(text, str), f"stop holds {text!r}; it must be a text")
    return found


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """The grammar of an output. text/grammar.py compiles it and reports what is wrong with it."""

    kind: str  # one of GRAMMARS
    text: str = ""  # the schema as JSON, the regex, or the grammar in llguidance's Lark; empty for "json_object"

    def __post_init__(self) -> None:
        _require(self.kind in GRAMMARS, f"grammar kind is '{self.kind}'; it must be one of {', '.join(GRAMMARS)}")


@dataclass(frozen=True, slots=True)
class Repetition:
    """The rule by which a text that repeats itself is ended (text/repetition.py). vLLM's names, and one of ours."""

    max_pattern_size: int = 256  # tokens of a pattern; 0: nothing is looked for
    min_pattern_size: int = 1
    min_count: int = 4  # how often the pattern is there, in a row
    min_tokens: int = 0  # tokens that only repeat

    def __post_init__(self) -> None:
        for each in fields(self):
            value = whole(each.name, getattr(self, each.name))
            _require(0 <= value <= MAX_COUNT, f"{each.name} is {value}; it must be between 0 and {MAX_COUNT}")
        if self.max_pattern_size:
            most = MAX_PATTERN
            _require(
                self.min_pattern_size <= self.max_pattern_size <= most,
                f"max_pattern_size is {self.max_pattern_size}; it must be at least min_pattern_size "
                f"({self.min_pattern_size}) and at most {most}, or 0 (off)",
            )
            _require(self.min_count >= 2, f"min_count is {self.min_count}; it must be at least 2")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling of one request. All values are checked here; every comparison is written so that NaN fails it. A
    seed may have any size: the engine keeps its lowest 64 bits."""

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output, as in Hugging Face
    presence_penalty: float = 0.0  # over output, as in OpenAI
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives reported beside each sampled token
    prompt_logprobs: int | None = None
    n: int = 1
    num_draft: int | None = None  # drafts per step: AUTO chooses every step, 0 is off, None is the engine's default
    grammar: GrammarSpec | None = None
    repetition_limit: int = 0  # a text of which this many tokens only repeat what is before is ended; 0 is off
    repetition_detection: Repetition | None = None  # the same in detail, in place of repetition_limit
    keep_special: bool = False  # special tokens appear in the text, except the one that ends it
    continues: bool = False  # the text goes on where the prompt ends: the blank before its first word is part of it

    def __post_init__(self) -> None:
        self._check_types()
        for name, (low, high, rule) in RANGES.items():
            value = getattr(self, name)
            _require(value is None or low <= value <= high, f"{name} is {value}; it must be {rule}")
        _require(0 < self.top_p <= 1, f"top_p is {self.top_p}; it must be above 0 and at most 1")
        _require(
            0 <= self.min_tokens <= self.max_tokens,
            f"min_tokens is {self.min_tokens}; it must be between 0 and max_tokens ({self.max_tokens})",
        )
        self._check_lists()

    def _check_types(self) -> None:
        """Numbers may be numpy's; a list that is None is as if left out."""
        known: dict[str, Any] = {"stop": _texts(self.stop), "stop_ids": _ids("stop_ids", self.stop_ids)}
        biases = {} if self.logit_bias is None else self.logit_bias
        _require(isinstance(biases, Mapping), f"logit_bias is {biases!r}; it must map token ids to numbers")
        for value in biases.values():
            number("logit_bias", value)
        known["logit_bias"] = dict(zip(_ids("logit_bias", biases), biases.values(), strict=True))
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type == "float":
                number(each.name, value)
            elif each.type == "int" or (each.type == "int | None" and value is not None):
                known[each.name] = whole(each.name, value)
        for name, value in known.items():
            object.__setattr__(self, name, value)

    def _check_lists(self) -> None:
        _require(all(self.stop), "a stop string is empty; remove it")
        longest = max(map(len, self.stop), default=0)
        for name, size, most in (
            ("stop", len(self.stop), MAX_STOPS),
            ("stop_ids", len(self.stop_ids), MAX_STOP_IDS),
            ("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS),
        ):
            _require(size <= most, f"{name} has {size} entries and {most} is the limit; remove some")
        _require(
            longest <= MAX_STOP_CHARS,
            f"stop has a string of {longest} characters and {MAX_STOP_CHARS} is the limit; shorten it",
        )
        _require(
            all(-100 <= bias <= 100 for bias in self.logit_bias.values()),
            "logit_bias has a value outside -100 to 100; bring every bias into that range",
        )

    @property
    def repetition(self) -> Repetition | None:
        """The rule by which the text is ended; None: none."""
        rule = self.repetition_detection
        if rule is None and self.repetition_limit:
            rule = Repetition(min_tokens=self.repetition_limit)
        return rule if rule and rule.max_pattern_size else None

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(eq=False, slots=True)
class Request:
    """One sequence in the engine. A user's request with n > 1 is n of these, which share their id."""

    id: str
    index: int  # its number among the n
    prompt_ids: list[int]
    params: SamplingParams
    seed: int  # never None: the engine draws one if the user gave none
    max_output: int  # max_tokens, or less if the context ends first
    output_ids: list[int] = field(default_factory=list)  # appended by engine/output
    num_computed: int = 0  # advanced by the scheduler, back to 0 when preempted
    # Ids of launched steps that have not been read: at least and at most so many. Kept by the engine.
    least_unread: int = 0
    most_unread: int = 0
    num_cached: int | None = None  # prompt tokens from the prefix cache, set by the scheduler at first admission
    blocks: array[int] = field(default_factory=lambda: array("i"))  # owned by the scheduler
    sent_blocks: int = 0  # so many of them the device has been told; fewer when the scheduler has taken some back
    chain: list[int] = field(default_factory=list)  # the prefix cache's keys of the full blocks
    finish: FinishReason | None = None  # set by engine/output or by abort
    stop_reason: str | None = None  # what ended the text, where the finish reason does not say it (REPETITION)
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + len(self.output_ids)

    @property
    def decodes(self) -> bool:
        """True if all of its tokens but the last are computed, or in steps that were launched."""
        return self.num_prompt + len(self.output_ids) - self.num_computed <= 1

    @property
    def next_start(self) -> int:
        """An upper bound on the position of the first token of its next step."""
        known = self.num_prompt + len(self.output_ids)
        return known - 1 + self.most_unread if known - self.num_computed <= 1 else self.num_computed

    def ids(self, start: int, stop: int) -> list[int]:
        """Known ids at positions [start, stop), which may span prompt and output."""
        border = self.num_prompt
        if stop <= border:
            return self.prompt_ids[start:stop]
        return self.prompt_ids[start:border] + self.output_ids[max(start - border, 0) : stop - border]


@dataclass(slots=True)
class Work:
    """One request's part of a step: tokens [start, start + num_scheduled) of its sequence."""

    request: Request
    start: int  # num_computed when the step was scheduled
    num_known: int  # tokens with known ids; the rest are drafts
    samples: bool  # whether the last known id is among them: it and the drafts predict new ids
    most_drafts: int = 0  # most drafts that fit
    drafts: list[int] = field(default_factory=list)  # filled by engine/drafting
    source: str = ""  # the source of the drafts, filled with them
    num_refused: int = 0  # drafts that a grammar refused before they ran, filled by the engine
    decodes: bool = field(init=False)  # whether it is one known token, perhaps with drafts, and not a prompt

    def __post_init__(self) -> None:
        self.decodes = self.samples and self.num_known == 1

    @property
    def num_draft(self) -> int:
        return len(self.drafts)

    @property
    def num_scheduled(self) -> int:
        return self.num_known + len(self.drafts)

    @property
    def num_sampled(self) -> int:
        return 1 + len(self.drafts) if self.samples else 0

    @property
    def stop(self) -> int:
        return self.start + self.num_scheduled


@dataclass(frozen=True, slots=True)
class Batch:
    """The work of one step, which the runner lays out as one ragged batch."""

    work: list[Work]
    preempted: list[Request] = field(default_factory=list)
    num_prompt_rows: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_prompt_rows", sum([w.num_known for w in self.work if not w.decodes]))

    @property
    def num_rows(self) -> int:
        return sum(w.num_scheduled for w in self.work)

    @property
    def decodes(self) -> bool:
        return not self.num_prompt_rows


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    id: int
    logprob: float
    top: list[tuple[int, float]]  # the most likely ids at this position, best first


@dataclass(slots=True)
class StepOutput:
    """The addition of one step to one request. The last one of a request carries its finish reason."""

    request_id: str
    index: int
    ids: list[int]
    text: str  # complete characters only, never part of a stop string
    finish: FinishReason | None
    logprobs: list[TokenLogprob] | None = None  # one per id, if requested
    prompt_logprobs: list[TokenLogprob | None] | None = None  # once, with the first output
    num_prompt: int = 0
    num_cached: int = 0
    num_accepted: int = 0  # how many of its ids, from the front, were accepted drafts
    speculation: dict[str, Any] | None = None  # with the finish reason: how drafting went (speculation/stats.py)
    stop_reason: str | None = None  # Request.stop_reason
