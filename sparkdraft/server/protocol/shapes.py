"""The parts that answers of both endpoints are made of: usage, log-probabilities, and how drafting went."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sparkdraft.core import StepOutput, TokenLogprob
from sparkdraft.server.protocol.validation import ApiError
from sparkdraft.text.tokenizer import Vocabulary

Json = dict[str, Any]
Chunk = Json | bytes  # of a stream; bytes: already as they go out
MARK = "\0text\0"  # stands for a text; JSON writes these signs in no other way
LOWEST = -9999.0  # as OpenAI writes the log-probability of what cannot happen


def dumps(value: Any) -> bytes:
    """JSON as it goes out. Lone surrogates are replaced, and Unicode's line ends are escaped, at which some clients
    (httpx) would cut an event in two."""
    text = _encoder.encode(value)
    return (text if text.isascii() else text.translate(LINE_ENDS)).encode("utf-8", "replace")


_encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}  # the others JSON escapes itself


def sse(chunks: Sequence[Chunk]) -> bytes:
    """The chunks as server-sent events."""
    return b"".join([chunk if isinstance(chunk, bytes) else b"data: " + dumps(chunk) + b"\n\n" for chunk in chunks])


def stop_reason(reason: str | None) -> Json:
    """vLLM's field of a choice, where there is something to say."""
    return {"stop_reason": reason} if reason else {}


# ---- counts


@dataclass(slots=True)
class Tally:
    """The cost of one request, over all its sequences."""

    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0
    speculation: list[Json] = field(default_factory=list)  # one a finished sequence

    def usage(self) -> Json:
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_output,
            "total_tokens": self.num_prompt + self.num_output,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }


@dataclass(slots=True, kw_only=True)
class Answer(ABC):
    """The answer to one request: a stream sends the chunks that `push` returns and `last_chunks`; otherwise they are
    dropped, and `whole` is sent at the end."""

    chunk_kind: ClassVar[str]  # OpenAI's "object" of a chunk
    done: ClassVar[bytes] = b"data: [DONE]\n\n"  # the end of every stream
    media_type: ClassVar[bytes] = b"text/event-stream; charset=utf-8"  # of a stream

    id: str
    created: int = field(default_factory=lambda: int(time.time()))
    model: str
    n: int  # texts per prompt
    tokenizer: Vocabulary
    prompt_logprobs: int | None = None  # alternatives per token of the prompt, in a list of their own
    include_usage: bool = False  # in chunks, as are the next two
    usage_in_each: bool = False
    return_speculation: bool = False
    return_token_ids: bool = False
    tally: Tally = field(default_factory=Tally)
    _frames: dict[tuple[int, str], tuple[bytes, bytes]] = field(default_factory=dict)  # by index and name of the field

    def opening(self, num_prompt: int) -> list[Chunk]:
        """The chunks before the prompt is read; none: a stream begins with the first token, and what is refused until
        then gets a status."""
        return []

    def ping(self, said: str) -> bytes:
        """What keeps a stream open while nothing is written: a comment, which clients skip."""
        return f": {said}\n\n".encode()

    def failure(self, error: ApiError) -> list[Chunk]:
        """The last chunks of a stream that fails after it has begun."""
        return [error.body()]

    @abstractmethod
    def push(self, event: StepOutput, prompt_index: int = 0) -> list[Chunk]:
        """The chunks for this event; the last one of a text has its finish reason."""

    @abstractmethod
    def whole(self) -> Json: ...

    @abstractmethod
    def all_ended(self) -> bool: ...

    def frame(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def chunk(self, choice: Json, drafted: Json, is_last: bool) -> Json:
        """drafted: the numbers of tokens and characters that were drafted. is_last: of its text."""
        chunk = self.frame(self.chunk_kind, [choice])
        if self.include_usage:
            chunk["usage"] = self.tally.usage() if self.usage_in_each else None
        if self.return_speculation:
            chunk |= drafted
        return chunk | (self.metrics() if is_last and not self.include_usage and self.all_ended() else {})

    @property
    def text_is_all(self) -> bool:
        """True if chunks of a text differ in nothing but that text, as long as it goes on and without logprobs."""
        in_each = self.include_usage and self.usage_in_each
        return not (self.return_speculation or self.return_token_ids or in_each)

    @abstractmethod
    def text_choice(self, index: int, name: str, text: str) -> Json:
        """The choice of a chunk that has only a text, in the field of that name."""

    def text_chunk(self, index: int, name: str, text: str) -> bytes:
        """The chunk of `text_choice` as it goes out. What stands around the text is encoded once per answer: nearly all
        chunks are such, and to encode each whole takes 14 µs instead of 0.6."""
        frame = self._frames.get((index, name))
        if frame is None:
            whole = sse([self.chunk(self.text_choice(index, name, MARK), {}, is_last=False)])
            before, _, after = whole.rpartition(dumps(MARK))
            frame = self._frames[index, name] = before, after
        return frame[0] + dumps(text) + frame[1]

    def last_chunks(self) -> list[Chunk]:
        """The chunks after all texts."""
        return [*self.usage_chunks()]

    def usage_chunks(self) -> list[Json]:
        """The usage, if it was asked for."""
        last = self.frame(self.chunk_kind, []) | {"usage": self.tally.usage()}
        return [last | self.metrics()] if self.include_usage else []

    def metrics(self) -> Json:
        """vLLM's `metrics` of an answer, if they were asked for; null where nothing drafts."""
        if not self.return_speculation:
            return {}
        return {"metrics": {"speculative_decoding": merged_speculation(self.tally.speculation)}}


def accepted_chars(event: StepOutput, tokenizer: Vocabulary) -> int:
    """Characters at the front of its text that accepted drafts wrote: all but those of the target's own ids."""
    if not event.num_accepted:
        return 0
    own = b"".join(tokenizer.token_bytes(token) for token in event.ids[event.num_accepted :])
    return max(0, len(event.text) - len(own.decode("utf-8", "ignore")))


SUMS = ("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens", "draft_ms", "verify_ms")
LISTS = ("acceptance_histogram", "per_position_drafted", "per_position_accepted")


def merged_speculation(records: Sequence[Json]) -> Json | None:
    """One record of several sequences: counts add up, and the rates follow from them."""
    if len(records) < 2:
        return records[0] if records else None
    total: Json = dict(records[0])
    total |= {name: sum(r[name] for r in records if name in r) for name in SUMS if name in total}
    total |= {name: _summed([r[name] for r in records if name in r]) for name in LISTS if name in total}
    steps, drafted = total["num_spec_steps"], total["num_draft_tokens"]
    accepted = total["num_accepted_draft_tokens"]
    total["mean_acceptance_length"] = 1 + accepted / steps if steps else None
    total["draft_acceptance_rate"] = accepted / drafted if drafted else None
    depths = {r["num_spec_tokens"] for r in records if r["num_spec_steps"]}
    total["num_spec_tokens"] = depths.pop() if len(depths) == 1 else None
    sources: dict[str, list[int]] = {}
    for record in records:
        for name, counts in record.get("sources", {}).items():
            sources[name] = _summed([sources.get(name, []), counts])
    return total | {"sources": sources}


def _summed(lists: Sequence[Sequence[int]]) -> list[int]:
    return [sum(values[i] for values in lists if i < len(values)) for i in range(max(len(values) for values in lists))]


# ---- log-probabilities


def chat_logprobs(rows: Sequence[TokenLogprob], tokenizer: Vocabulary) -> list[Json]:
    return [
        _chat_token(row.id, row.logprob, tokenizer)
        | {"top_logprobs": [_chat_token(token, value, tokenizer) for token, value in row.top]}
        for row in rows
    ]


def _chat_token(token: int, logprob: float, tokenizer: Vocabulary) -> Json:
    data = tokenizer.token_bytes(token, skip_special=False)
    return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}


def completion_logprobs(
    rows: Sequence[tuple[int, TokenLogprob | None]], offsets: Sequence[int], tokenizer: Vocabulary
) -> Json:
    """rows: (id, its log-probability; None for a prompt's first). offsets: of these tokens in the text."""
    shape: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": list(offsets)}
    for token, row in rows:
        shape["tokens"].append(token_name(token, tokenizer))
        shape["token_logprobs"].append(None if row is None else finite(row.logprob))
        shape["top_logprobs"].append(None if row is None else _top(row, tokenizer))
    return shape


def prompt_logprobs(rows: Sequence[TokenLogprob | None], num_top: int, tokenizer: Vocabulary) -> list[Json | None]:
    """vLLM's form: for each token of the prompt its id and the likeliest ids; null for the first. A token that is not
    among the likeliest has the rank null."""
    return [None if row is None else _ranked(row, num_top, tokenizer) for row in rows]


def _ranked(row: TokenLogprob, num_top: int, tokenizer: Vocabulary) -> Json:
    ranks = {token: rank for rank, (token, _) in enumerate(row.top, 1)}
    pairs = {row.id: row.logprob} | dict(row.top[:num_top])
    return {
        str(token): {
            "logprob": finite(value),
            "rank": ranks.get(token),
            "decoded_token": tokenizer.token_bytes(token, skip_special=False).decode("utf-8", "replace"),
        }
        for token, value in pairs.items()
    }


def _top(row: TokenLogprob, tokenizer: Vocabulary) -> Mapping[str, float]:
    """The likeliest tokens, and the one that was taken."""
    pairs = [*row.top, (row.id, row.logprob)]
    return {token_name(token, tokenizer): finite(value) for token, value in pairs}


def token_name(token: int, tokenizer: Vocabulary) -> str:
    """A token's text, or OpenAI's 'bytes:...' where it is half a character."""
    data = tokenizer.token_bytes(token, skip_special=False)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float) -> float:
    """OpenAI's lowest value for infinities and NaN, which JSON does not have."""
    return min(logprob, 0.0) if logprob > LOWEST else LOWEST
