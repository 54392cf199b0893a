"""Lines of an event stream, for clients.

Lines end at a line feed, as the standard says. httpx's own lines also end at Unicode's other line ends, which the text
of an event may contain.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx


class Cutter:
    def __init__(self) -> None:
        self._rest = ""

    def take(self, piece: str) -> list[str]:
        """Return the lines that end in this piece, and keep the rest for the next."""
        *lines, self._rest = (self._rest + piece).split("\n")
        return [line.removesuffix("\r") for line in lines]


def lines_of(response: httpx.Response) -> Iterator[str]:
    cutter = Cutter()
    for piece in response.iter_text():
        yield from cutter.take(piece)


async def async_lines_of(response: httpx.Response) -> AsyncIterator[str]:
    cutter = Cutter()
    async for piece in response.aiter_text():
        for line in cutter.take(piece):
            yield line
