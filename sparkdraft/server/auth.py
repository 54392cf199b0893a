"""The bearer key: a request without it, or with a wrong one, gets 401.

Digests are compared in constant time, so that neither the key nor its length shows in the timing. The page and /health
may be read without a key, because a browser and a load balancer have none to send; a wrong key is refused there too.
"""

from __future__ import annotations

import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from sparkdraft.server.protocol.errors import ApiError

OPEN_PATHS = ("/", "/health")


class Auth:
    """Middleware: lets a request through if its Authorization header is 'Bearer' and the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app = app
        self._digest = _digest(key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._check(scope)
        await self.app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        header = next((value for name, value in scope["headers"] if name == b"authorization"), None)
        if header is None and scope["path"] in OPEN_PATHS:
            return
        scheme, _, given = (header or b"").partition(b" ")
        right = hmac.compare_digest(_digest(given.strip()), self._digest)
        if scheme.lower() != b"bearer" or not right:
            what = "No API key was sent" if header is None else "The API key is wrong"
            raise ApiError(
                401,
                f"{what}; send the header 'Authorization: Bearer <key>' with the key this server was started with.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()
