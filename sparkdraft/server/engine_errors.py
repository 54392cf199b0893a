"""What can go wrong between the API and the engine: the engine is not there, refuses a request, or fails while running
it."""

from __future__ import annotations


class EngineError(Exception):
    """The engine did not do what was asked; the sentence says why. retryable: the same request may work later, after
    about 'retry_after' seconds."""

    def __init__(self, sentence: str, retryable: bool, retry_after: int = 1) -> None:
        super().__init__(sentence)
        self.sentence, self.retryable, self.retry_after = sentence, retryable, retry_after


class RequestRefused(EngineError):
    """The engine runs and will not take this request: the client must change it."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, retryable=False)


class RequestFailed(EngineError):
    """The engine runs and this request met a bug; the log has the traceback."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, retryable=False)
