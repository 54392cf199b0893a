"""Whether a server still makes tokens: its counters move, or it answers a request for one token.

`/health` is no proof: it stays well while a rank hangs in an all-reduce.
"""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

COUNTERS = re.compile(rb"^vllm:(?:generation_tokens|prompt_tokens)_total(?:\{[^}]*\})? ([0-9.e+]+)$", re.M)
READY_POLL = 0.5
BUSY = (408, 429)  # no token came in time, or too many wait: as where there is no answer
NO_ANSWER = (OSError, ValueError, http.client.HTTPException)
# Without a proxy: the server is on this machine.
OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


def watch(spec: dict[str, Any], say: Callable[..., None], running: Callable[[], bool]) -> None:
    """Says `ready` once, then `token` at every sign of work; `blind` where a request for a token is refused, until the
    next one."""
    start = time.monotonic()
    while running() and not _is_healthy(spec["url"]):
        time.sleep(READY_POLL)
    if not running():
        return
    say("ready", seconds=round(time.monotonic() - start, 1))
    last = -1.0
    while running():
        count = tokens_made(spec["url"], spec["patience"])
        if count is not None and count > last >= 0:
            say("token")
        else:
            status = ask_token(spec)
            if status == 200:
                say("token")
                count = tokens_made(spec["url"], spec["patience"])
            elif 400 <= status < 500 and status not in BUSY:
                say("blind", why=f"a request for one token got status {status}")
        last = last if count is None else count
        time.sleep(spec["every"])


def tokens_made(url: str, patience: float) -> float | None:
    """Tokens read and written since the start, over all requests; None: not told."""
    try:
        with OPEN(f"{url}/metrics", timeout=patience) as answer:
            found = COUNTERS.findall(answer.read())
    except NO_ANSWER:
        return None
    return sum(map(float, found)) if found else None


def ask_token(spec: dict[str, Any]) -> int:
    """The status of a request for one token; 0: no answer in time."""
    body = json.dumps({"model": spec["model"], "prompt": "1", "max_tokens": 1, "temperature": 0}).encode()
    headers = {"Content-Type": "application/json"}
    if spec.get("key"):
        headers["Authorization"] = f"Bearer {spec['key']}"
    request = urllib.request.Request(f"{spec['url']}/v1/completions", body, headers)
    try:
        with OPEN(request, timeout=spec["patience"]) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return int(error.code)
    except NO_ANSWER:
        return 0


def _is_healthy(url: str) -> bool:
    try:
        with OPEN(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except NO_ANSWER:
        return False
