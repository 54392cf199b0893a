"""Event streams are cut at line feeds alone, wherever pieces end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from sparkdraft.util.sse import async_lines_of, lines_of

EVENTS = ['data: {"text": "a\x85b\u2028c\u2029d\x0be"}', "", "data: two", "", "data: [DONE]", ""]


class Pieces(httpx.SyncByteStream, httpx.AsyncByteStream):
    def __init__(self, whole: bytes, size: int) -> None:
        self.parts = [whole[i : i + size] for i in range(0, len(whole), size)]

    def __iter__(self) -> Iterator[bytes]:
        yield from self.parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self.parts:
            yield part


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_lines_end_at_line_feeds_alone(end: str, size: int) -> None:
    whole = "".join(line + end for line in EVENTS).encode()

    async def collected() -> list[str]:
        return [line async for line in async_lines_of(httpx.Response(200, stream=Pieces(whole, size)))]

    assert list(lines_of(httpx.Response(200, stream=Pieces(whole, size)))) == EVENTS
    assert asyncio.run(collected()) == EVENTS
