"""Turns committed ids into what the user reads: text, stop strings, finish reasons, log-probabilities.

There is one `Output` per request. It also advances the request's grammar; a complete grammar ends the request, and so
does a text that repeats itself, where the request asks for that.
"""

from __future__ import annotations

from sparkdraft.core import REPETITION, FinishReason, Request, StepOutput, TokenLogprob
from sparkdraft.text.detokenize import Detokenizer, StopFinder
from sparkdraft.text.grammar import GrammarState
from sparkdraft.text.repetition import interval, repeats
from sparkdraft.text.tokenizer import Vocabulary


class Output:
    def __init__(self, request: Request, tokenizer: Vocabulary, grammar: GrammarState | None = None) -> None:
        self.request, self.grammar = request, grammar
        # Under a grammar an end-of-text id is possible only where nothing else is, so it ends the text even with
        # ignore_eos.
        self.eos_ids = frozenset() if request.params.ignore_eos and not grammar else tokenizer.eos_ids
        params = request.params
        self._end_ids = self.eos_ids | frozenset(params.stop_ids)
        # Whether only an id or the length ends the text.
        self._is_free = not (grammar or params.stop or params.repetition)
        self._text = Detokenizer(tokenizer, not params.keep_special, params.continues)
        self._stops = StopFinder(list(request.params.stop))
        self._repetition = params.repetition
        self._interval = interval(self._repetition) if self._repetition else 0
        self._prompt_logprobs: list[TokenLogprob | None] = [None]  # no row predicts the first id

    def push_prompt(self, start: int, logprobs: list[TokenLogprob]) -> None:
        """Stores the log-probabilities of a prompt chunk from position 'start' on. A preempted request runs again, and
        the new values replace the old."""
        self._prompt_logprobs[1 + start :] = logprobs

    def push(self, ids: list[int], logprobs: list[TokenLogprob] | None = None) -> StepOutput:
        """Commits new ids, up to the end of the request if it is among them."""
        request, output_ids, text = self.request, self.request.output_ids, ""
        taken: list[int] = []
        for token in ids:
            output_ids.append(token)
            taken.append(token)
            if token not in self._end_ids and len(output_ids) < request.max_output and self._is_free:
                text += self._text.push(token)
                continue
            request.finish = self._ends_with(token)
            ended_by_id = request.finish is FinishReason.STOP
            piece, stopped = self._until_stop("" if ended_by_id else self._text.push(token))
            text += piece
            if self.grammar:
                request.finish = self._follow(self.grammar, token)
            if stopped:
                request.finish = FinishReason.STOP
            if not request.finish:
                request.finish = self._if_repeating()
            if request.finish:
                text += "" if stopped else self._flush()
                break
        first = len(output_ids) == len(taken)
        return StepOutput(
            request.id,
            request.index,
            taken,
            text,
            request.finish,
            logprobs[: len(taken)] if logprobs else None,
            self._prompt_logprobs if first and request.params.prompt_logprobs is not None else None,
            request.num_prompt,
            request.num_cached or 0,
            stop_reason=request.stop_reason,
        )

    def _ends_with(self, token: int) -> FinishReason | None:
        request = self.request
        enough = len(request.output_ids) >= request.params.min_tokens
        if (token in self.eos_ids and (enough or self.grammar)) or (enough and token in request.params.stop_ids):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(request.output_ids) >= request.max_output else None

    def _follow(self, grammar: GrammarState, token: int) -> FinishReason | None:
        """A complete text needs no end-of-text id; a text cut short by the grammar's limits is not complete."""
        grammar.advance([token])
        if grammar.failed:
            return FinishReason.LENGTH
        return FinishReason.STOP if grammar.finished else self.request.finish

    def _if_repeating(self) -> FinishReason | None:
        """A text that repeats itself has ended; under a grammar it is cut short instead."""
        ids, rule = self.request.output_ids, self._repetition
        if not rule or len(ids) % self._interval or len(ids) < self.request.params.min_tokens or not repeats(ids, rule):
            return None
        self.request.stop_reason = REPETITION
        return FinishReason.LENGTH if self.grammar else FinishReason.STOP

    def _flush(self) -> str:
        """The end of the text that was held back; a stop string may still be completed in it."""
        piece, stopped = self._until_stop(self._text.finish())
        if stopped:
            self.request.finish = FinishReason.STOP
            return piece
        return piece + self._stops.finish()

    def _until_stop(self, text: str) -> tuple[str, bool]:
        """What may be shown of the text so far, and whether a stop string has ended it. The first min_tokens ids are
        not searched."""
        if len(self.request.output_ids) <= self.request.params.min_tokens:
            return text, False
        return self._stops.push(text)
