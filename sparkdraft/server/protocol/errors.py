"""Errors as OpenAI's clients read them: {"error": {message, type, param, code}} and a status.

Whatever goes wrong while a request is handled becomes an `ApiError`, so that there is one place where a mistake turns
into a body. Which mistakes there are is for those who find them; when an error may still become a status, and when it
must be an event of a stream that has begun, is stream.py's matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MAX_MESSAGE = 500  # characters: what a client sent does not come back whole
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable"}


class ApiError(Exception):
    """One sentence for the client, and the status that goes with it."""

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
    """With a capital, unless it begins with the name of a field, and a full stop."""
    first = text.split(" ", 1)[0]
    return (text if "_" in first else text[:1].upper() + text[1:]).rstrip(".") + "."


def unavailable(message: str, code: str, retry_after: int = 2) -> ApiError:
    return ApiError(503, message, code=code, headers={"Retry-After": str(retry_after)})


def from_validation(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """One sentence of what pydantic found. Of a union it reports every branch: the one that got furthest was meant."""
    if errors[0]["type"] == "json_invalid":
        position = errors[0]["loc"][-1]
        return ApiError(400, f"The body is not valid JSON (at character {position}).", code="invalid_json")
    field = errors[0]["loc"][:2]
    found = [(_path(error["loc"], body), error["msg"]) for error in errors[:16] if error["loc"][:2] == field]
    path = max((path for path, _ in found), key=lambda path: path.count(".") + path.count("["))
    reasons = list(dict.fromkeys(reason[0].lower() + reason[1:] for where, reason in found if where == path))
    if not path:
        return ApiError(400, f"The body must be a JSON object with content type application/json: {reasons[0]}.")
    return ApiError(400, f"{path}: {' or '.join(reasons)}.", param=path)


def _path(loc: Sequence[Any], body: Any) -> str:
    """'messages[0].role': the part of an error's place that is in the body; what follows names branches of a union."""
    path = ""
    for i, part in enumerate(loc[1:]):
        last_is_missing = i == len(loc) - 2 and isinstance(body, dict) and isinstance(part, str)
        if isinstance(body, dict) and (part in body or last_is_missing):
            path += f".{part}" if path else str(part)
            body = body.get(part)
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            path += f"[{part}]"
            body = body[part]
        # else: the name of a union's branch
    return path
