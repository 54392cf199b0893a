"""The state of recurrent layers that each request holds, and the pages of states from which others may continue.

A request has a slot from `adopt` to `drop`. A state cannot be cut back to a prefix, so a prefix is used only as far as
a page of its state exists. A page describes the end of a block and is found by the key of the prefix that ends there.
Pages are handed out anew by last use. This is a `Holding` (cache/holdings.py); the tensors are in cache/states.py.
Integers only.

    blocks of a prefix     | 0 | 1 | 2 | 3 | 4 | 5 |        a hit of 6 blocks is used up to block 3, and 4 and 5 are
    pages of states                  |   |                  computed again
                                     3   4

Pages are saved where somebody is likely to continue: at the last border of a prompt, at the end of a hit that had to be
cut because its state was missing, every SAVE_EVERY tokens of a long prompt, and where the state of a request stands
when it ends or is preempted. `cut` lets a prompt's chunks end at these borders.

What is copied to a page must be the state at its border. The host knows where the state of a slot should stand
(`base`), from the rule in kernels/reference/recurrent.py and the rows that were committed. But launched steps that are
not read yet may have moved it on, and a request that ended within a step may have run further than its text. So before
a page is made, the device's own `base` is read, after everything that was launched, and there is a page only if `base`
is that border. No step is launched between this read and the copy: copies are made in the order in which they were
asked for, by the next `send`, before its step. The text before the border is the key's: the border is not past the
committed rows, and a state moves over committed rows alone.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import NamedTuple, Protocol

from sparkdraft.cache.prefix import Hit
from sparkdraft.core import Request
from sparkdraft.kernels.ops import FOLD

SAVE_EVERY = 2048  # tokens of a long prompt


class Copy(NamedTuple):
    """Between a slot whose state stands at a border and a page."""

    slot: int
    page: int
    border: int
    saves: bool  # from the slot to the page; else the other way


class Device(Protocol):
    """The tensors: cache/states.py."""

    def base_of(self, slot: int) -> int | None: ...

    def send(self, blocks: Sequence[tuple[int, int]]) -> None: ...

    def copy(self, what: Copy) -> None: ...


@dataclass(slots=True)
class Held:
    slot: int
    start: int  # where it was admitted
    computed: int  # committed rows
    base: int  # where its state stands, by the committed rows
    wanted: list[int] = field(default_factory=list)  # borders ahead that shall have a page, in order
    last_page: int = 0  # the last border of its text that has one


class StateSlots:
    def __init__(self, num_slots: int, num_pages: int, block_size: int, most_rows: int, device: Device) -> None:
        """most_rows: of one sequence in a step of which rows may be rejected; a step of more leaves its state at its
        end. num_pages: 0 where no prefix is kept."""
        assert most_rows >= FOLD, "the rest of a prompt after its last border would move the state past that border"
        self.block_size, self.most_rows = block_size, most_rows
        self.unit = lcm(block_size, FOLD)  # states stop at multiples of FOLD, and keys belong to blocks
        self._device = device
        self._free, self._free_pages = list(range(num_slots)), list(range(num_pages))
        self._has_pages = num_pages > 0
        self._page_of: OrderedDict[int, int] = OrderedDict()  # key of a prefix -> page, the last used at the end
        self._held: dict[Request, Held] = {}
        self._slot_of: dict[int, int] = {}  # block -> slot, not sent yet
        self._copies: deque[Copy] = deque()  # not made yet

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_saved(self) -> int:
        return len(self._page_of)

    def usable(self, hit: Hit) -> int:
        return max((count for count, key in enumerate(hit.keys, 1) if key in self._page_of), default=0)

    def adopt(self, request: Request, found: int) -> None:
        start = request.num_computed
        held = self._held[request] = Held(self._free.pop(), start, start, start, last_page=start)
        if request.chain:
            self._page_of.move_to_end(request.chain[-1])
            self._copies.append(Copy(held.slot, self._page_of[request.chain[-1]], start, saves=False))
        if self._has_pages:
            ends = {end // self.unit * self.unit for end in (found * self.block_size, request.num_tokens - 1)}
            held.wanted = sorted(end for end in ends if end > start)

    def cut(self, request: Request, rows: int, running: Iterable[Request]) -> int:
        """A chunk ends at the next border that is wanted, or at any border where the prompt goes on after it.

        A chunk that begins at a wanted border whose state is not folded yet must leave it there: it is a short one.
        """
        held, start = self._held[request], request.num_computed
        if not self._has_pages:
            return rows
        if held.wanted and held.base < held.wanted[0] == start:
            rows = min(rows, self.most_rows)
        ahead = [border for border in held.wanted if border > start]
        end = min([start + rows, *ahead[:1]])
        if end not in (request.num_tokens, *ahead[:1]) and (border := end // self.unit * self.unit) > start:
            end = border
        return end - start

    def admits(self, request: Request, rows: int, running: Iterable[Request]) -> bool:
        return True  # there is a slot for every request that may run

    def can_grow(self, request: Request, num_blocks: int) -> bool:
        return True

    def grow(self, request: Request, num_blocks: int) -> None:
        slot = self._held[request].slot
        self._slot_of |= dict.fromkeys(request.blocks[len(request.blocks) - num_blocks :], slot)

    def shrink(self, request: Request, num_blocks: int) -> None:
        """Does nothing: a block names the slot of the last request that was given it."""

    def remember(self, request: Request, index: int) -> None:
        """Does nothing: `advance`, which follows, knows where the state stands."""

    def advance(self, request: Request) -> None:
        held = self._held[request]
        first, held.computed = held.computed, request.num_computed
        is_long = held.computed - first > self.most_rows
        held.base = held.computed if is_long else max(held.base, first // FOLD * FOLD)
        is_wanted = held.base in held.wanted
        held.wanted = [border for border in held.wanted if border > held.base]
        if is_wanted or (is_long and held.base - held.last_page >= SAVE_EVERY):
            self._save(request, held, held.base)

    def drop(self, request: Request) -> None:
        held = self._held.pop(request, None)
        if held is None:
            return
        try:
            if self._has_pages and request.num_computed > held.start:
                self._save(request, held, self._device.base_of(held.slot))
        finally:  # an interrupt while the device is waited for must not cost the slot
            self._copies = deque(each for each in self._copies if each.saves or each.slot != held.slot)
            self._free.append(held.slot)

    def prefers(self, block: int, other: int) -> bool:
        return False

    def send(self) -> None:
        self._device.send(list(self._slot_of.items()))
        self._slot_of.clear()
        while self._copies:
            self._device.copy(self._copies[0])
            self._copies.popleft()

    def _save(self, request: Request, held: Held, border: int | None) -> None:
        """Make a page of the request's state, if it stands at this border of the committed text."""
        index, rest = divmod(border or 0, self.block_size)
        if not self._has_pages or rest or not 0 < index <= len(request.chain):
            return
        key = request.chain[index - 1]
        if key not in self._page_of:
            if self._device.base_of(held.slot) != border:
                return
            page = self._free_pages.pop() if self._free_pages else self._page_of.popitem(last=False)[1]
            self._page_of[key] = page
            self._copies.append(Copy(held.slot, page, index * self.block_size, saves=True))
        held.last_page = max(held.last_page, index * self.block_size)
