"""The API's half of the warm-up: real requests through the whole path of a user's, before /health says ready.

The engine has run all shapes by then (engine/warm_up.py). Only the whole path pays for the template's compilation, the
first use of routes, checks and parsers, and the rows of the template's own opening, which are the same for every user
and stay in the prefix cache. These requests go to a second application beside the users', so that its counters are
separate. Its answers are dropped, errors included: the next user's request gets the same error as an answer.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import httpx
from starlette.types import ASGIApp

BUDGET = 10.0  # seconds; if they are not enough, the first user waits for the rest
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 12}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT | {"stream": True}),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}}),
    ("/v1/completions", {"prompt": "Hello", "max_tokens": 12, "stream": True}),
]


async def send_warm_up_requests(app: ASGIApp, api_key: str | None) -> None:
    """app: must be ready for requests."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        with suppress(TimeoutError):
            async with asyncio.timeout(BUDGET):
                for path, body in REQUESTS:
                    await client.post(path, json=body)
