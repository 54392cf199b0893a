"""The Python API: `LLM("smollm2").generate(prompts, SamplingParams(...))`, and `stream` for text as it is written.

    from sparkdraft import LLM, SamplingParams
    llm = LLM("smollm2")
    for piece in llm.stream("Once upon a time", SamplingParams(max_tokens=64)):
        print(piece.text, end="", flush=True)

Several streams may be open in one thread, and `generate` and `chat` may be called meanwhile: the caller that steps the
engine puts the pieces of other callers into their inboxes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sparkdraft.config import OPENAI_SAMPLING, EngineConfig, usable_defaults
from sparkdraft.core import Fact, Fallback, FinishReason, SamplingParams, StepOutput, TokenLogprob, UserError, whole
from sparkdraft.engine.facts import facts
from sparkdraft.engine.load import load
from sparkdraft.text import chat
from sparkdraft.text.events import Content, Reasoning
from sparkdraft.text.style import chat_style
from sparkdraft.weights.checkpoint import Checkpoint
from sparkdraft.weights.loader import Progress

Prompt = str | Sequence[int]
Message = dict[str, Any]
OPENING = 32  # ids at a prompt's end that show whether it has begun the thoughts, or ended them


@dataclass(slots=True)
class Completion:
    """One finished text."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_reason: str | None = None  # what ended it, where `finish` does not say it: "repetition_detected"
    num_prompt: int = 0
    num_cached: int = 0
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    speculation: dict[str, Any] | None = None  # how drafting went
    reasoning: str | None = None  # what the model thought before its answer, where `LLM.chat` was asked

    def add(self, piece: StepOutput) -> None:
        self.text += piece.text
        self.ids += piece.ids
        self.finish, self.num_prompt, self.num_cached = piece.finish, piece.num_prompt, piece.num_cached
        self.speculation, self.stop_reason = piece.speculation, piece.stop_reason
        if piece.logprobs is not None:
            self.logprobs = (self.logprobs or []) + piece.logprobs
        if piece.prompt_logprobs is not None:
            self.prompt_logprobs = piece.prompt_logprobs


@dataclass(frozen=True, slots=True)
class Result:
    """The completions of one prompt: n of them, in order."""

    completions: list[Completion]

    @property
    def text(self) -> str:
        return self.completions[0].text


@dataclass(slots=True)
class Inbox:
    """The requests of one caller, and their pieces that the caller has not read yet."""

    num_running: int = 0  # completions whose last piece the caller has not read
    names: list[str] = field(default_factory=list)
    pieces: deque[StepOutput] = field(default_factory=deque)
    failure: str = ""  # why no more pieces will come


class LLM:
    def __init__(
        self,
        model: str = "smollm2",
        progress: Progress | None = None,
        checkpoint: Checkpoint | None = None,
        **options: Any,
    ) -> None:
        """checkpoint: read in place of the one that 'model' names. options: the fields of EngineConfig; a profile of
        `sparkdraft tune` may set those that are left out."""
        loaded = load(EngineConfig.of(model=model, **options), progress, checkpoint)
        self.checkpoint, self.model_config, self.tokenizer = loaded.checkpoint, loaded.model_config, loaded.tokenizer
        self.engine, self.plan = loaded.engine, loaded.engine.plan
        self.style = chat_style(self.model_config.model_type, self.checkpoint.chat_template)
        self._inboxes: dict[str, Inbox] = {}  # by request id
        self._stepping = False
        self._to_abort: list[str] = []  # requests that were left while a step ran

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Result]:
        """Run all prompts in one batch; returns one result per prompt, in order."""
        requests = _as_list(prompts)
        each = [_continuing(p, own) for p, own in zip(requests, _params_for(requests, params), strict=True)]
        inbox = self._add([self.encode(p) for p in requests], each)
        done = {name: [Completion() for _ in range(p.n)] for name, p in zip(inbox.names, each, strict=True)}
        for piece in self._pieces(inbox):
            done[piece.request_id][piece.index].add(piece)
        return [Result(done[name]) for name in inbox.names]

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion:
        """The answer to a conversation. Thoughts before it are in `reasoning`, not in `text`."""
        ids, thoughts, params = self.chat_ids(messages), self.style.reasoning, params or SamplingParams()
        if thoughts and thoughts.keep_special:
            params = replace(params, keep_special=True)
        answer = self.generate([ids], params)[0].completions[0]
        if thoughts:
            parser = thoughts(self.opening(ids))
            events = [*parser.feed(answer.text), *parser.finish()]
            answer.text = "".join(event.text for event in events if isinstance(event, Content))
            answer.reasoning = "".join(event.text for event in events if isinstance(event, Reasoning)) or None
        return answer

    def opening(self, ids: Sequence[int]) -> str:
        """The end of a prompt, with its marks: an answer may begin within thoughts that the prompt has opened."""
        return self.tokenizer.decode(ids[-OPENING:], skip_special=False)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[StepOutput]:
        """The pieces of one request as they come; leaving the loop early aborts the request. stopped: asked before each
        step, also while the prompt is read; True ends the stream."""
        inbox = self._add([self.encode(prompt)], [_continuing(prompt, params or SamplingParams())])
        yield from self._pieces(inbox, stopped)

    def default_params(self, **changes: Any) -> SamplingParams:
        """The sampling parameters that the model's authors recommend (generation_config.json), with the given changes.
        SamplingParams() itself is greedy."""
        return SamplingParams(**(OPENAI_SAMPLING | usable_defaults(self.checkpoint.generation)[0] | changes))

    def kv_errors(self) -> dict[str, Any] | None:
        """In tq_mode capture_only: the relative errors of keys, values and attention's results through coding."""
        return self.engine.kv_errors()

    def fallbacks(self) -> list[Fallback]:
        """The parts that run differently from what was asked, and why."""
        return self.engine.fallbacks

    def facts(self) -> list[Fact]:
        """The way it runs on this machine, with reasons where it could run better."""
        return [*facts(self.engine), *self.style.facts]

    def encode(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else [whole("a token id", i) for i in prompt]

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """A conversation as the model's own template writes it, up to the assistant's turn."""
        model, tokenizer, usual = self.checkpoint, self.tokenizer, self.style.thinking.variables(None)
        text = chat.prompt_text(tokenizer.control, model.chat_template, messages, model.special, variables=usual)
        return tokenizer.encode_chat(text)

    # ---- the pieces of each caller

    def _add(self, prompts: list[list[int]], params: list[SamplingParams]) -> Inbox:
        """Queue all prompts, or none if one is refused."""
        inbox = Inbox()
        try:
            for ids, each in zip(prompts, params, strict=True):
                name = self.engine.add(ids, each)
                self._inboxes[name] = inbox
                inbox.names.append(name)
                inbox.num_running += each.n
        except BaseException:
            self._leave(inbox)
            raise
        return inbox

    def _pieces(self, inbox: Inbox, stopped: Callable[[], bool] = lambda: False) -> Iterator[StepOutput]:
        """The pieces of one caller's requests; the engine is stepped only when none is waiting."""
        try:
            while inbox.num_running:
                while not inbox.pieces:
                    if inbox.failure:
                        raise RuntimeError(inbox.failure)
                    if stopped():
                        return
                    self._step()
                piece = inbox.pieces.popleft()
                inbox.num_running -= piece.finish is not None
                yield piece
        finally:
            self._leave(inbox)

    def _step(self) -> None:
        """Run one step of the engine. Each piece goes to its caller's inbox; pieces of callers who left are dropped."""
        assert self.engine.has_work, "a caller waits for pieces, but the engine has no work: was it stepped elsewhere?"
        self._stepping = True
        try:
            pieces = self.engine.step()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._stepping = False
            while self._to_abort:
                self.engine.abort(self._to_abort.pop())
        for piece in pieces:
            if inbox := self._inboxes.get(piece.request_id):
                inbox.pieces.append(piece)

    def _fail(self, error: BaseException) -> None:
        """A step was interrupted, by a bug or by Ctrl-C: tell the callers that wait."""
        for name in self.engine.fail_batch():
            if inbox := self._inboxes.get(name):
                inbox.failure = f"the engine was interrupted within a step ({error!r}); send the request again"

    def _leave(self, inbox: Inbox) -> None:
        """Abort what still runs, after the step if the garbage collector closes a stream in the middle of one."""
        for name in inbox.names:
            del self._inboxes[name]
            if self._stepping:
                self._to_abort.append(name)
            else:
                self.engine.abort(name)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Prompts, of which a single one may be given by itself. Ids may be integers of any kind, numpy's too."""
    first = prompts[0] if len(prompts) else ""
    if isinstance(prompts, str) or (hasattr(first, "__index__") and not getattr(first, "ndim", 0)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _continuing(prompt: Prompt, params: SamplingParams) -> SamplingParams:
    """A text is continued where it ends; ids may be a conversation's, whose answer begins anew."""
    return replace(params, continues=True) if isinstance(prompt, str) else params


def _params_for(
    prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise UserError(f"{len(params)} sampling parameters for {len(prompts)} prompts; give one, or one each")
    return list(params)
