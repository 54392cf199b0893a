"""Stored responses: kept in memory, so that a later request can retrieve one, or continue it by its id.

The store has a limit on the number of responses and one on their size; the response that was not used for the longest
time goes first. A restart empties it. It is used from the event loop only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from sparkdraft.server.protocol.shapes import Json, dumps

MAX_RESPONSES = 1000
MAX_BYTES = 64 << 20
VALUE = 64  # bytes that a value takes beside its text, about
Key = tuple[str, str]  # the owner and an id


@dataclass(frozen=True, slots=True)
class Stored:
    response: Json
    input: list[Json]  # the whole conversation before the response, with the responses that it continues
    num_own: int  # items at the end of `input` that its own request had
    num_bytes: int

    @property
    def items(self) -> list[Json]:
        """What a response that continues this one begins with."""
        return [*self.input, *self.response["output"]]

    @property
    def own_items(self) -> list[Json]:
        return [*self.input[len(self.input) - self.num_own :], *self.response["output"]]


def memory_of(value: object) -> int:
    """About how many bytes a value takes: small ones take far more than their JSON."""
    text = dumps(value)
    return len(text) + VALUE * sum(map(text.count, (b",", b"[", b"{")))


class ResponseStore:
    """Owners see only their own responses. A stored response has its conversation with it, so that it stays complete
    when the ones before it are gone; each is counted with all that it needs."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self.max_responses, self.max_bytes = max_responses, max_bytes
        self.num_bytes = 0
        self._stored: OrderedDict[Key, Stored] = OrderedDict()  # the most recently used is last
        self._items: dict[Key, Json] = {}

    def __len__(self) -> int:
        return len(self._stored)

    def keep(self, owner: str, response: Json, added: Sequence[Json], before: Stored | None = None) -> bool:
        """Store a response. added: the items of its request. Returns False if it alone exceeds the limit of bytes."""
        size = memory_of(added) + memory_of(response) + (before.num_bytes if before else 0)
        if size > self.max_bytes:
            return False
        stored = Stored(response, [*(before.items if before else ()), *added], len(added), size)
        self.delete(owner, response["id"])
        self._stored[owner, response["id"]] = stored
        self.num_bytes += size
        for item in stored.own_items:
            self._items[owner, item["id"]] = item
        while len(self._stored) > self.max_responses or self.num_bytes > self.max_bytes:
            self.delete(*next(iter(self._stored)))
        return True

    def find(self, owner: str, name: str) -> Stored | None:
        if (owner, name) in self._stored:
            self._stored.move_to_end((owner, name))
        return self._stored.get((owner, name))

    def item(self, owner: str, name: str) -> Json | None:
        """The item with this id, of any stored response."""
        return self._items.get((owner, name))

    def delete(self, owner: str, name: str) -> bool:
        stored = self._stored.pop((owner, name), None)
        if stored is None:
            return False
        self.num_bytes -= stored.num_bytes
        for item in stored.own_items:
            if self._items.get((owner, item["id"])) is item:
                del self._items[owner, item["id"]]
        return True
