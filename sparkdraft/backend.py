"""The interface between the server and an inference backend: the `Backend` protocol, and the records that it returns.

The server's engine process (server/engine_process.py) runs one backend and knows it only by this protocol. The
project's own engine is the first implementation (engine/backend.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from sparkdraft.core import GrammarSpec, SamplingParams, StepOutput

# Parts that a backend can be told to do without (Backend.switch).
DRAFTING, PREFIX_CACHE, GROWTH = "drafting", "prefix cache", "growth of the KV cache"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that is served, for the API."""

    model: str  # as the user named it
    model_type: str
    max_model_len: int
    vocab_size: int
    tokenizer: str  # the text of tokenizer.json
    special: dict[str, Any]  # bos_token and so on as text, for the chat template
    eos_ids: list[int]
    chat_template: str | None
    sampling: dict[str, float]  # the model's own values for what a request leaves out (config.py)
    plan: str  # in words
    plan_facts: dict[str, Any]  # device, dtype, kernels, max_seqs, kv_tokens, ...
    fallbacks: list[dict[str, str]]  # name and reason of each
    drafter: dict[str, Any] | None  # name and max_depth
    created: int  # seconds since 1970
    facts: list[dict[str, str]] = field(default_factory=list)  # how it runs: name, value and reason of each
    canary: list[dict[str, Any]] = field(default_factory=list)  # the findings of sparkdraft/canary; empty if it is off


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """Live numbers of a backend, as /v1/status and /metrics show them."""

    running: int  # sequences
    waiting: int  # sequences
    kv_blocks_free: int
    kv_blocks_total: int
    block_size: int  # tokens
    preemptions: int  # since the last reset_counts
    drafting: dict[str, Any]  # SpecStats.as_dict (speculation/stats.py), since the last reset_counts
    kv_errors: dict[str, Any] | None = None  # of a coded KV cache in the mode capture_only
    step_drift: float | None = None  # recent decode steps' time over what such steps took before; None: not known yet
    steps_compared: int | None = 0  # steps that step_drift is made of so far; None: they cannot be compared here
    # share of the caches' bytes that requests hold, 0 to 1; None: there is nothing beside the blocks
    kv_usage: float | None = None


@dataclass(frozen=True, slots=True)
class CodingError:
    """The error of keys or values that a coded KV cache gives back, and its limit."""

    what: str  # "keys" or "values", and the layer
    error: float  # relative
    limit: float


class Backend(Protocol):
    """A loaded model that runs requests. One thread calls it; only compile_grammar may be called from any thread."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def has_work(self) -> bool:
        """True if step() has something to do or to return."""

    def compile_grammar(self, spec: GrammarSpec) -> Any:
        """Do the slow part of a grammar in advance; add() gets the result. Raises UserError for a bad grammar."""

    def add(self, request_id: str, prompt_ids: list[int], params: SamplingParams, grammar: Any = None) -> None:
        """Queue a request; it runs from the next step on. grammar: the result of compile_grammar for params.grammar, if
        it has one. Raises UserError for a request that cannot run."""

    def abort(self, request_id: str) -> None:
        """End a request: a later step returns its end with FinishReason.ABORT. An ended request is no error."""

    def step(self) -> list[StepOutput]:
        """Run one step of everything that is scheduled, and return its outputs. Each of a request's n texts ends with
        one output that has a finish reason."""

    def fail_batch(self, error: Exception) -> list[str]:
        """After step() or abort() raised: drop the requests that may be damaged, and return their ids. No output of
        them follows; all others continue. Raises if the backend cannot continue; then its process must end."""

    def status(self) -> BackendStatus: ...

    def reset_counts(self) -> None:
        """Start counting anew: the requests so far were not a user's."""

    def switch(self, part: str, on: bool) -> None:
        """Do without DRAFTING, PREFIX_CACHE or further GROWTH, for all requests, from the next step on; or take it up
        again. A part that this backend does not have is no error."""

    def coding_errors(self) -> list[CodingError]:
        """The errors of a coded KV cache, measured on a fixed text while no request runs: the worst layer's first.
        Empty if keys and values are not coded."""


Report = Callable[[str, int, int], None]  # stage ("weights", "warm-up"), done, total (0: not known)
LoadBackend = Callable[[dict[str, Any], Report], Backend]  # options: the fields of EngineConfig. Raises UserError.
