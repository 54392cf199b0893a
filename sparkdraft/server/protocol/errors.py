"""Errors as OpenAI's clients read them: {"error": {message, type, param, code}} and a status.

Whatever goes wrong while a request is handled becomes an `ApiError`, so one place turns errors into bodies.
validation.py finds wrong fields in a body. stream.py decides whether an error can still be a status, or must be an
event of a stream that has begun.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_MESSAGE = 500  # characters: what a client sent is not sent back whole
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable"}


class ApiError(Exception):
    """One sentence for the client, and its status."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        message = self.message if len(self.message) <= MAX_MESSAGE else self.message[:MAX_MESSAGE] + " ..."
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


def as_sentence(text: str) -> str:
    """The text with a capital letter, unless it begins with the name of a field, and a full stop."""
    first = text.split(" ", 1)[0]
    return (text if "_" in first else text[:1].upper() + text[1:]).rstrip(".") + "."


def unavailable(message: str, code: str, retry_after: int) -> ApiError:
    return ApiError(503, message, code=code, headers={"Retry-After": str(retry_after)})
