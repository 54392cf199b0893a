"""The id of each request, which every answer carries, and one line in the log when the request ends.

The guards, the routes and `stream.Reply` note what they know in the request's `Record`; nothing is written before the
end. A line has no prompt and no answer unless --log-prompts asks for them, and no error message, which may quote them.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sparkdraft.server.protocol.validation import ApiError

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)

RECORD = "sparkdraft.record"  # where a request's scope holds its Record
OFF, JSON = "off", "json"  # values of request_log; else text
NOT_LOGGED = ("/", "/health", "/metrics")
CLIENT_GONE = 499  # nginx's status for a client that went away before its answer
LONGEST = 100  # characters of a path, or of a field's name, in a line
CLIENTS_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
PLAIN = re.compile(r"[A-Za-z0-9_.:,/@+\[\]-]+")  # a value that text has without quotes


@dataclass(slots=True)
class Record:
    """What is known of one request."""

    id: str = ""
    key: str = ""  # the name of its key
    status: int = 0
    error: ApiError | None = None
    aborted: bool = False  # its client went away
    facts: Callable[[], dict[str, Any]] | None = None  # counts and times of what was written; called at the end


def record_of(scope: Scope) -> Record:
    """The request's record; a new one where no RequestLog stands before the routes."""
    record = scope.setdefault(RECORD, Record())
    assert isinstance(record, Record)
    return record


class RequestLog:
    """Middleware: gives each request its id, and writes its line. form: off, text or json."""

    def __init__(self, app: ASGIApp, form: str) -> None:
        self.app, self.form = app, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        record, begin = Record(request_id(scope)), time.monotonic()
        scope[RECORD] = record
        name = record.id.encode()

        async def identified(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                # the second one is Anthropic's
                headers = [*message.get("headers", ()), (b"x-request-id", name), (b"request-id", name)]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self.app(scope, receive, identified)
        finally:
            if self.form != OFF and _is_logged(scope):
                self._write(fields_of(record, scope, time.monotonic() - begin))

    def _write(self, fields: dict[str, Any]) -> None:
        if self.form != JSON:
            log.info("request %s", as_text(fields))
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        with suppress(OSError, ValueError):  # a log that cannot be written ends no request
            sys.stderr.write(json.dumps({"time": now, "event": "request"} | fields) + "\n")
            sys.stderr.flush()


def request_id(scope: Scope) -> str:
    """The id that the client sent, if it has the right form, else a new one."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if CLIENTS_ID.fullmatch(given) else f"req_{uuid4().hex}"


def fields_of(record: Record, scope: Scope, seconds: float) -> dict[str, Any]:
    """The fields of a line, without those that are not known."""
    facts = record.facts() if record.facts else {}
    error = record.error
    if record.aborted or error:
        facts["finish"] = "abort" if record.aborted else "error"
    fields = {
        "id": record.id,
        "method": scope["method"],
        "route": scope["path"][:LONGEST],
        "key": record.key,
        "status": record.status or CLIENT_GONE,
        "seconds": round(seconds, 3),
        **facts,
        "error": error and (error.code or error.body()["error"]["type"]),
        "param": error and error.param and error.param[:LONGEST],
    }
    return {name: value for name, value in fields.items() if value not in ("", None)}


def as_text(fields: dict[str, Any]) -> str:
    """'id=req_1 status=200 ...': values with other characters than PLAIN has are quoted as in JSON."""
    return " ".join(f"{name}={_text(value)}" for name, value in fields.items())


def _text(value: Any) -> str:
    text = str(value)
    return text if PLAIN.fullmatch(text) else json.dumps(text)


def _is_logged(scope: Scope) -> bool:
    is_preflight = scope["method"] == "OPTIONS" and "access-control-request-method" in Headers(scope=scope)
    return scope["path"] not in NOT_LOGGED and not is_preflight
