"""From committed ids to what the user reads: text, stop strings, finish reasons, log-probabilities.

One `Output` follows one request. It takes ids as they come, one or a burst, and gives them back one by one to the same
three questions: is this the end, which characters are complete, does a stop string begin. It owns no tensors.
"""

from __future__ import annotations

from sparkdraft.core import FinishReason, Request, StepOutput, TokenLogprob
from sparkdraft.text.detokenize import Detokenizer
from sparkdraft.text.stops import StopFinder
from sparkdraft.text.tokenizer import Vocabulary


class Output:
    def __init__(self, request: Request, tokenizer: Vocabulary) -> None:
        self.request = request
        self.eos_ids = frozenset() if request.params.ignore_eos else tokenizer.eos_ids
        self._text = Detokenizer(tokenizer)
        self._stops = StopFinder(list(request.params.stop))
        self._prompt_logprobs: list[TokenLogprob | None] = [None]  # nothing predicts the first id

    def push_prompt(self, logprobs: list[TokenLogprob]) -> None:
        """Log-probabilities of the prompt rows of one chunk, in order."""
        self._prompt_logprobs.extend(logprobs)

    def push(self, ids: list[int], logprobs: list[TokenLogprob] | None = None) -> StepOutput:
        """Commit new ids up to the end of the request, if it is among them."""
        request, taken, text = self.request, [], ""
        for token in ids:
            request.output_ids.append(token)
            taken.append(token)
            request.finish = self._ends_with(token)
            ended_by_id = request.finish is FinishReason.STOP
            piece, stopped = self._stops.push("" if ended_by_id else self._text.push(token))
            text += piece
            if stopped:
                request.finish = FinishReason.STOP
            if request.finish:
                text += "" if stopped else self._flush()
                break
        first = len(request.output_ids) == len(taken)
        return StepOutput(
            request.id,
            request.index,
            taken,
            text,
            request.finish,
            logprobs[: len(taken)] if logprobs else None,
            self._prompt_logprobs if first and request.params.prompt_logprobs is not None else None,
            request.num_prompt,
            request.num_cached,
        )

    def _ends_with(self, token: int) -> FinishReason | None:
        request = self.request
        if len(request.output_ids) > request.params.min_tokens - 1 and (
            token in self.eos_ids or token in request.params.stop_ids
        ):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(request.output_ids) >= request.max_output else None

    def _flush(self) -> str:
        """The held-back end of the text; a stop string may still complete in it."""
        piece, stopped = self._stops.push(self._text.finish())
        if stopped:
            self.request.finish = FinishReason.STOP
            return piece
        return piece + self._stops.finish()
