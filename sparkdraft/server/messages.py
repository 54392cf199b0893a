"""The messages between the API process and the engine process: a few dataclasses, one JSON line each.

A line is an array: the message's name, then its fields in order. Nested records (events, the model's facts) are arrays
of fields too. Both ends are the same version of this package, so there is nothing to negotiate.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from operator import attrgetter
from typing import Any, get_args

from sparkdraft.backend import ModelInfo
from sparkdraft.core import FinishReason, GrammarSpec, Repetition, SamplingParams, StepOutput, TokenLogprob, UserError

# ---- to the engine


@dataclass(frozen=True, slots=True)
class Submit:
    id: str  # no running request has the same
    prompt_ids: list[int]
    params: dict[str, Any]  # from pack_params


@dataclass(frozen=True, slots=True)
class Abort:
    id: str


@dataclass(frozen=True, slots=True)
class AskStatus:
    id: str


@dataclass(frozen=True, slots=True)
class CountAnew:
    """The requests so far were not a user's: the numbers of the status start again at 0."""


@dataclass(frozen=True, slots=True)
class Switch:
    """Do without a part, or take it up again (Backend.switch)."""

    part: str
    on: bool


@dataclass(frozen=True, slots=True)
class Ping:
    """Show that the process runs."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Exit now, whatever is running."""


ToEngine = Submit | Abort | AskStatus | CountAnew | Switch | Ping | Shutdown

# ---- from the engine


@dataclass(frozen=True, slots=True)
class Loading:
    stage: str  # "opening", "weights", "warm-up"
    done: int = 0
    total: int = 0  # 0: not known


@dataclass(frozen=True, slots=True)
class Ready:
    info: ModelInfo


@dataclass(frozen=True, slots=True)
class Tokens:
    events: list[StepOutput] = field(default_factory=list)  # of one step


@dataclass(frozen=True, slots=True)
class Refused:
    id: str
    sentence: str  # what is wrong, the limit, what to change
    is_bug: bool = False  # a bug of ours: the client has nothing to change
    retry_after: int = 0  # seconds after which the same request may work; 0: the request must change


@dataclass(frozen=True, slots=True)
class Status:
    id: str  # that of the AskStatus
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to a Ping, at once and whatever runs."""

    turn: int  # of the engine's loop
    idle: bool  # it waits for work


@dataclass(frozen=True, slots=True)
class Dying:
    """The last message of an engine that can still send one."""

    sentence: str
    final: bool = False  # it would die in the same way again, because the configuration cannot run


Message = ToEngine | Loading | Ready | Tokens | Refused | Status | Pong | Dying
KINDS: dict[str, Callable[..., Message]] = {kind.__name__: kind for kind in get_args(Message)}
# An output is sent as an array of its fields. Nearly all outputs only add text, and are sent without the other fields.
ADDED = ("request_id", "index", "ids", "text", "num_prompt", "num_cached", "num_accepted")
OTHERS = tuple(f.name for f in fields(StepOutput) if f.name not in ADDED)
_added, _others = attrgetter(*ADDED), attrgetter(*OTHERS)
_NOTHING = (None,) * len(OTHERS)


# ---- the codec


def encode(message: Message) -> bytes:
    values = [list(map(_output, message.events))] if isinstance(message, Tokens) else _values(message)
    return _encoder.encode([type(message).__name__, *values]).encode("ascii") + b"\n"


def decode(line: bytes) -> Message:
    name, *values = json.loads(line)
    if name == "Tokens":
        return Tokens([_step_output(*row) for row in values[0]])
    if name == "Ready":
        return Ready(ModelInfo(*values[0]))
    return KINDS[name](*values)


class Lines:
    """Splits a stream of bytes into messages as it arrives."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # of a line whose end has not arrived

    def feed(self, data: bytes) -> list[Message]:
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = b"".join([*self._parts, lines[0]])
            self._parts = []
        if rest:
            self._parts.append(rest)
        return [decode(line) for line in lines]


def pack_params(params: SamplingParams) -> dict[str, Any]:
    """The fields that differ from their defaults, in types that JSON has."""
    values = {name: getattr(params, name) for name in SamplingParams.__slots__}
    said = {name: value for name, value in values.items() if value != getattr(_DEFAULTS, name)}
    return {name: asdict(value) if is_dataclass(value) else value for name, value in said.items()}  # type: ignore[arg-type]


def unpack_params(values: Mapping[str, Any]) -> SamplingParams:
    """The inverse of pack_params. JSON keys are strings, so numbers are restored."""
    known = dict(values)
    try:
        if "logit_bias" in known:
            known["logit_bias"] = {int(token): bias for token, bias in known["logit_bias"].items()}
        if "grammar" in known:
            known["grammar"] = GrammarSpec(**known["grammar"])
        if "repetition_detection" in known:
            known["repetition_detection"] = Repetition(**known["repetition_detection"])
        return SamplingParams(**known)
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"the sampling parameters cannot be read ({error}); check their names and types") from None


# ---- the parts


def _values(item: Any) -> list[Any]:
    """A dataclass as an array; any mapping as a plain dict."""
    if isinstance(item, Mapping):
        return dict(item)  # type: ignore[return-value]
    return [getattr(item, name) for name in item.__slots__]


def _output(output: StepOutput) -> tuple[Any, ...]:
    others = _others(output)
    return _added(output) if others == _NOTHING else _added(output) + others


def _step_output(
    id: str, index: int, ids: list[int], text: str, num_prompt: int, num_cached: int, num_accepted: int, *others: Any
) -> StepOutput:
    output = StepOutput(id, index, ids, text, None, None, None, num_prompt, num_cached, num_accepted)
    for name, value in zip(OTHERS, others, strict=False):
        setattr(output, name, _RESTORED[name](value) if value is not None and name in _RESTORED else value)
    return output


def _logprobs(rows: list[Any]) -> list[Any]:
    return [None if row is None else TokenLogprob(row[0], row[1], [(i, p) for i, p in row[2]]) for row in rows]


_encoder = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=_values)
_DEFAULTS = SamplingParams()
_RESTORED: dict[str, Callable[[Any], Any]] = {
    "finish": FinishReason,
    "logprobs": _logprobs,
    "prompt_logprobs": _logprobs,
}
