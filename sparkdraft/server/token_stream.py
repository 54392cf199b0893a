"""The events of one request on their way from the engine's client to the route that reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sparkdraft.server.engine_errors import EngineError
from sparkdraft.server.messages import TokenEvent

if TYPE_CHECKING:
    from sparkdraft.server.engine_client import EngineClient


@dataclass(eq=False, slots=True)
class Mailbox:
    """The events of one request that wait for their reader. The client knows the mailbox and not the reader, so that a
    reader that is dropped can be noticed."""

    left: int  # those of its n texts whose end has not come from the engine
    queue: asyncio.Queue[TokenEvent | EngineError] = field(default_factory=asyncio.Queue)


class TokenStream(AsyncIterator[TokenEvent]):
    """The events of one request, to its end. A reader that stops earlier (by aclose, by cancellation while it waits, or
    by dropping this) aborts the request."""

    def __init__(self, client: EngineClient, id: str, mailbox: Mailbox) -> None:
        self.id = id
        self._client, self._mailbox, self._left = client, mailbox, mailbox.left

    async def __anext__(self) -> TokenEvent:
        if not self._left:
            raise StopAsyncIteration
        try:
            item = await self._mailbox.queue.get()
        except asyncio.CancelledError:
            self.close()
            raise
        if isinstance(item, EngineError):
            self._left = 0
            raise item
        self._left -= item.finish is not None
        return item

    def close(self) -> None:
        if self._left:
            self._left = 0
            self._client.leave(self.id, self._mailbox)

    async def aclose(self) -> None:
        self.close()

    def __del__(self) -> None:
        if self._left:
            self._client.leave_later(self.id, self._mailbox)
