"""A small Hugging Face hub: repositories of files in memory, behind the few endpoints that fetching asks for.

Files of 1,000 bytes or more are "large": known by their SHA-256, as the hub keeps weights; others by git's SHA-1. The
hub can break a connection after a number of bytes, or send other bytes than it names.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

LARGE = 1000
COMMIT = "c0ffee" + "0" * 34


@dataclass
class FakeHub:
    repos: dict[str, dict[str, bytes]]
    break_after: int = 0  # bytes of a large file after which a connection breaks; 0: never
    corrupt: bool = False  # large files come with other bytes than they should have
    asked: Counter[str] = field(default_factory=Counter)  # GETs by file
    ranges: list[str] = field(default_factory=list)  # the ranges that were asked for
    sent: int = 0  # bytes of large files

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/api/models/{org}/{name}", self.info),
                Route("/api/models/{org}/{name}/revision/{revision}", self.info),
                Route("/api/models/{org}/{name}/tree/{revision}", self.tree),
                Route("/{org}/{name}/resolve/{revision}/{file:path}", self.resolve, methods=["GET", "HEAD"]),
            ]
        )

    def _files(self, request: Request) -> dict[str, bytes] | None:
        return self.repos.get("{org}/{name}".format(**request.path_params))

    async def info(self, request: Request) -> Response:
        files = self._files(request)
        if files is None:
            return _refused(401, "RepoNotFound")
        siblings = [{"rfilename": name} | describe(content) for name, content in files.items()]
        name = "{org}/{name}".format(**request.path_params)
        return JSONResponse({"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": []})

    async def tree(self, request: Request) -> Response:
        files = self._files(request) or {}
        entries = [
            {"type": "file", "path": name, "oid": git_hash(content)} | describe(content, "oid")
            for name, content in files.items()
        ]
        return JSONResponse(entries)

    async def resolve(self, request: Request) -> Response:
        files, name = self._files(request), request.path_params["file"]
        if files is None:
            return _refused(401, "RepoNotFound")
        if name not in files:
            return _refused(404, "EntryNotFound")
        content = files[name]
        large = len(content) >= LARGE
        etag = hashlib.sha256(content).hexdigest() if large else git_hash(content)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if request.method == "HEAD":
            return Response(headers=headers | {"Content-Length": str(len(content))})
        self.asked[name] += 1
        wanted, status = request.headers.get("range", ""), 200
        body = b"?" * len(content) if large and self.corrupt else content
        if wanted:
            self.ranges.append(wanted)
            first = int(wanted.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
            body, status = body[first:], 206
        headers["Content-Length"] = str(len(body))
        return StreamingResponse(self._send(body, large), status, headers)

    async def _send(self, body: bytes, large: bool) -> AsyncIterator[bytes]:
        end = min(len(body), self.break_after) if large and self.break_after else len(body)
        self.sent += end if large else 0
        yield body[:end]
        if end < len(body):
            raise ConnectionResetError("the test breaks the connection")


def describe(content: bytes, key: str = "sha256") -> dict[str, Any]:
    found: dict[str, Any] = {"size": len(content)}
    if len(content) >= LARGE:
        found["lfs"] = {key: hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return found


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _refused(status: int, code: str) -> Response:
    return Response(status_code=status, headers={"X-Error-Code": code, "X-Error-Message": code})
