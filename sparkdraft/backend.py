"""What the server asks of an inference backend: the `Backend` protocol, and the plain records that it returns.

The server's engine process (server/engine_process.py) runs one backend and knows it by this protocol alone. The
project's own engine is the first implementation (engine/backend.py). Another one has to provide what is written here
and nothing else. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from sparkdraft.core import GrammarSpec, SamplingParams, StepOutput


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """All that the API has to know of the model it serves."""

    model: str  # as it was asked for
    model_type: str
    max_model_len: int
    vocab_size: int
    tokenizer: str  # the text of tokenizer.json
    special: dict[str, Any]  # bos_token and so on as text, for the chat template
    eos_ids: list[int]
    chat_template: str | None
    sampling: dict[str, float]  # what the model asks for where a request names nothing (defaults.py)
    plan: str  # in words
    plan_facts: dict[str, Any]  # device, dtype, kernels, max_seqs, kv_tokens, ...
    fallbacks: list[dict[str, str]]  # name and reason of each
    drafter: dict[str, Any] | None  # name and max_depth
    created: int  # seconds since 1970
    facts: list[dict[str, str]] = field(default_factory=list)  # how it runs: name, value and reason of each


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """Live numbers of a backend, as /v1/status and /metrics show them."""

    running: int  # sequences
    waiting: int  # sequences
    kv_blocks_free: int
    kv_blocks_total: int
    block_size: int  # tokens
    preemptions: int  # since the last reset_counts
    drafting: dict[str, Any]  # SpecStats.as_dict (spec/stats.py), since the last reset_counts
    kv_errors: dict[str, Any] | None = None  # of a coded KV cache that is only measured


class Backend(Protocol):
    """A loaded model that runs requests. One thread calls it; compile_grammar alone is called from any thread."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def has_work(self) -> bool:
        """Whether step() has something to do or to return."""

    def compile_grammar(self, spec: GrammarSpec) -> Any:
        """Do ahead what takes long about a grammar; add() gets the result. Raises UserError for a bad grammar."""

    def add(self, request_id: str, prompt_ids: list[int], params: SamplingParams, grammar: Any = None) -> None:
        """Queue a request; it runs from the next step on. grammar: what compile_grammar made of params.grammar, if
        there is one. Raises UserError for a request that cannot run."""

    def abort(self, request_id: str) -> None:
        """End a request: a later step returns its end with FinishReason.ABORT. An ended request is no error."""

    def step(self) -> list[StepOutput]:
        """Run everything that runs by one step, and return what came of it. Each of a request's n texts ends with one
        output that has a finish reason."""

    def fail_batch(self, error: Exception) -> list[str]:
        """After step() or abort() raised: drop the requests that may be damaged, and return their ids. No output of
        them follows; all others go on. Raises where the backend cannot go on, and its process has to end."""

    def status(self) -> BackendStatus: ...

    def reset_counts(self) -> None:
        """Count anew: what ran so far was nobody's request."""


Report = Callable[[str, int, int], None]  # stage ("weights", "warm-up"), how much is done, of how much (0: not known)
LoadBackend = Callable[[dict[str, Any], Report], Backend]  # options: the fields of EngineConfig. Raises UserError.
