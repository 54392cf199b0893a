"""The states of recurrent layers: a slot per request, and pages of states from which prefixes continue.

A slot has the state of every recurrent layer, and the rings of records and convolution inputs that let a step be taken
back (kernels/reference/recurrent.py). A page is a copy of a slot without its records. Neither grows with the context: a
state of Qwen3.5-27B takes as much as the keys and values of 2,300 tokens.

A state cannot be cut back, so a prefix is used only as far as a page of its state exists. A page describes the end of a
block and is found by the key of that prefix; pages are handed out again by last use.

    blocks of a prefix     | 0 | 1 | 2 | 3 | 4 | 5 |        a hit of 6 blocks is used up to block 3, and 4 and 5 are
    pages of states                  |   |                  computed again
                                     3   4
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import TYPE_CHECKING, NamedTuple, Protocol

from sparkdraft.cache.groups import CacheGroup, send_map
from sparkdraft.cache.prefix import Hit
from sparkdraft.core import Request, UserError
from sparkdraft.kernels.ops import FOLD, Ops, RecurrentState, input_ring, record_ring
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.layers import RecurrentSpec
from sparkdraft.models.common.sizes import input_count, record_count, state_count

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from sparkdraft.kernels.ops import AttentionView

SAVE_EVERY = 2048  # tokens of a long prompt between two pages
STATE_ITEMSIZE = 4  # states and records are float32, whatever the activations are
PAGE_SHARE = 8  # pages take at most one part in this many of the room for all caches
MOST_PAGES = 4  # per request that may run
LEAST_PAGES = 2  # without any, no prefix could be continued
SLOT_SHARE = 2  # if the user names no number of requests, their slots take at most one part in this many


@dataclass(frozen=True, slots=True)
class StatePlan:
    slots: int
    pages: int
    most_rows: int  # tokens of one sequence in a step whose drafts may be rejected
    slot_bytes: int
    page_bytes: int

    @property
    def nbytes(self) -> int:
        return self.slots * self.slot_bytes + self.pages * self.page_bytes

    def describe(self) -> str:
        each = f"{self.slot_bytes / 2**20:.1f} MiB"
        return f"recurrent states of {self.slots} requests, {each} each, and {self.pages} of prefixes"


def recurrent_layers(model: ModelConfig) -> list[RecurrentSpec]:
    return [layer.mixer for layer in model.layers if isinstance(layer.mixer, RecurrentSpec)]


def state_bytes(layers: list[RecurrentSpec], most_rows: int, itemsize: int) -> tuple[int, int]:
    """Bytes of a slot and of a page. itemsize: of the convolution's inputs."""
    states = sum(map(state_count, layers)) * STATE_ITEMSIZE
    records = sum(record_count(spec, most_rows) for spec in layers) * STATE_ITEMSIZE
    inputs = sum(input_count(spec, most_rows) for spec in layers) * itemsize
    before = sum((spec.conv_width - 1) * spec.conv_channels for spec in layers) * itemsize
    return states + records + inputs, states + before


def plan_states(
    model: ModelConfig,
    max_seqs: int,
    deepest: int,  # drafts of one request per step, at most
    itemsize: int,
    room: int,  # bytes for all caches
    has_prefixes: bool,
) -> StatePlan | None:
    """None for a model without recurrent layers. Raises UserError if more slots are asked for than fit; if not one
    fits, plan/resolve.py refuses."""
    layers = recurrent_layers(model)
    if not layers:
        return None
    most_rows = max(1 + deepest, FOLD)
    slot, page = state_bytes(layers, most_rows, itemsize)
    fit = max(room - 1, 0) // slot
    if fit and max_seqs > fit:
        raise UserError(
            f"the recurrent states of {max_seqs} requests take {max_seqs * slot / 2**30:.1f} GiB, and "
            f"{room / 2**30:.1f} GiB are left for all caches: ask for max_seqs {fit} or fewer"
        )
    pages = max(min(room // PAGE_SHARE // page, MOST_PAGES * max_seqs), LEAST_PAGES) if has_prefixes else 0
    return StatePlan(max_seqs, pages, most_rows, slot, page)


def fewer_requests(model: ModelConfig, max_seqs: int, deepest: int, itemsize: int, room: int, each: int) -> int:
    """Return how many requests run at once if the user names no number, so that they leave room for keys and values.
    each: what a request takes beside its state."""
    layers = recurrent_layers(model)
    if not layers:
        return max_seqs
    slot, _ = state_bytes(layers, max(1 + deepest, FOLD), itemsize)
    return max(min(max_seqs, room // SLOT_SHARE // (slot + each)), 1)


# ---- the bookkeeping


class Copy(NamedTuple):
    """A copy between a slot whose state stands at a border and a page."""

    slot: int
    page: int
    border: int
    saves: bool  # from the slot to the page; else the other way


class Device(Protocol):  # `RecurrentStates`, for the bookkeeping
    def base_of(self, slot: int) -> int | None: ...

    def send(self, blocks: Sequence[tuple[int, int]]) -> None: ...

    def copy(self, what: Copy) -> None: ...


@dataclass(slots=True)
class Held:
    slot: int
    start: int  # where it was admitted
    computed: int  # committed tokens
    base: int  # where its state stands, by the committed tokens
    wanted: list[int] = field(default_factory=list)  # borders ahead that are to have a page, in order
    last_page: int = 0  # the last border of its text that has one


class StateSlots(CacheGroup):
    """The cache group of recurrent layers: which slot each request has, and which prefixes have a page. Integers only.

    Pages are saved where a later request is likely to continue: at the last border of a prompt, at the end of a hit
    that had to be cut because its state was missing, every SAVE_EVERY tokens of a long prompt, and where the state of a
    request stands when it ends or is preempted. `cut` lets a prompt's chunks end at these borders.

    The host computes where the state of a slot should stand (`base`) from the committed tokens, but launched steps may
    have moved it on, and a request that ended within a step may have run further than its text. So before a page is
    made, the device's own `base` is read, after everything that was launched, and the page is made only if `base` is
    that border. No step is launched between this read and the copy, which the next `send` makes before its step.
    """

    def __init__(self, num_slots: int, num_pages: int, block_size: int, most_rows: int, device: Device) -> None:
        """most_rows: tokens of one sequence in a step whose drafts may be rejected; a longer step leaves its state at
        its end. num_pages: 0 where no prefix is kept."""
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
        """A chunk ends at the next border that is wanted, or at any border where the prompt goes on after it. One that
        begins at a wanted border whose state is not folded yet must leave it there: it is a short one."""
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

    def grow(self, request: Request, num_blocks: int) -> None:
        slot = self._held[request].slot
        self._slot_of |= dict.fromkeys(request.blocks[len(request.blocks) - num_blocks :], slot)

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

    def send(self) -> None:
        self._device.send(list(self._slot_of.items()))
        self._slot_of.clear()
        while self._copies:
            self._device.copy(self._copies[0])
            self._copies.popleft()

    def _save(self, request: Request, held: Held, border: int | None) -> None:
        """Makes a page of the request's state, if it stands at this border of the committed text."""
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


# ---- the tensors


@dataclass(frozen=True, slots=True)
class StateSizes:
    slots: int  # requests at once
    pages: int
    most_rows: int  # tokens of one sequence in a step whose drafts may be rejected
    blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class StateLayer:
    states: RecurrentStates
    memory: RecurrentState

    @property
    def slots(self) -> Tensor:
        return self.states.slots


class RecurrentStates:
    """The states of all recurrent layers.

    A step looks up the slots of its sequences once, in a map of blocks on the device: only one request writes into a
    block, so the block of a sequence's first token names its slot. The slots are at a fixed address, where captured
    steps find them.
    """

    def __init__(
        self,
        specs: Sequence[RecurrentSpec],  # of the recurrent layers, which are all alike
        sizes: StateSizes,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
    ) -> None:
        import torch

        spec, layers, slots = specs[0], len(specs), sizes.slots
        assert all(each == spec for each in specs), "recurrent layers of one model are alike"
        self.ops, self.block_size, self.conv_width = ops, sizes.block_size, spec.conv_width
        keys, values = (spec.num_key_heads, spec.key_dim), (spec.num_value_heads, spec.value_dim)
        matrix = (spec.num_value_heads, spec.key_dim, spec.value_dim)
        records, inputs = record_ring(sizes.most_rows), input_ring(sizes.most_rows, spec.conv_width)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(layers, *shape, dtype=dtype, device=device)

        # All layers together, so that one call copies a page. Nothing is cleared: at position 0 a state begins anew.
        self.state, self.base = empty(slots, *matrix), empty(slots, spec.num_value_heads, dtype=torch.int32)
        self.keys, self.updates = empty(slots, records, *keys), empty(slots, records, *values)
        self.decays = empty(slots, records, spec.num_value_heads)
        self.inputs = empty(slots, inputs, spec.conv_channels, dtype=dtype)
        self.saved_state = empty(sizes.pages, *matrix)
        self.saved_inputs = empty(sizes.pages, spec.conv_width - 1, spec.conv_channels, dtype=dtype)
        parts = (self.state, self.base, self.keys, self.updates, self.decays, self.inputs)
        self.layers: list[StateLayer] = []
        for state, base, key, update, decay, kept in zip(*parts, strict=True):
            memory = RecurrentState(state, base, key, update, decay, kept, sizes.most_rows)
            self.layers.append(StateLayer(self, memory))
        self.slot_of = torch.full((sizes.blocks,), -1, dtype=torch.int32, device=device)  # by block
        # Of the sequences of a step: prompts and, beside them, all slots of decoding requests.
        self._slots = torch.full((2 * slots,), -1, dtype=torch.int32, device=device)
        self.slots = self._slots

    @property
    def bytes_per_step(self) -> float:
        """What a plain step of one request moves on average: it reads the state and the records since `base`, writes
        its own record, and the state once in FOLD steps."""
        state, inputs = self.state[:, 0].nbytes, self.inputs[:, 0, 0].nbytes
        record = sum(part[:, 0, 0].nbytes for part in (self.keys, self.updates, self.decays))
        return state * (1 + 1 / FOLD) + record * (1 + (FOLD - 1) / 2) + inputs * self.conv_width

    def begin(self, view: AttentionView) -> None:
        self.slots = self._slots[: view.context_len.shape[0]]
        self.ops.find_states(self.slot_of, view, self.block_size, self.slots)

    def base_of(self, slot: int) -> int | None:
        """Where the state of a slot stands after all launched steps, which this waits for; None if layers differ, which
        no finished step leaves."""
        found = self.base[:, slot].unique().tolist()
        return int(found[0]) if len(found) == 1 else None

    def send(self, blocks: Sequence[tuple[int, int]]) -> None:
        """(block, slot of the request that will write into it), before the next step."""
        send_map(self.slot_of, blocks)

    def copy(self, what: Copy) -> None:
        """Copies a slot's state, which stands at the border, to a page, or a page to a slot."""
        slot, page, border = what.slot, what.page, what.border
        if what.saves:
            self.saved_state[:, page] = self.state[:, slot]
        else:
            self.state[:, slot] = self.saved_state[:, page]
            self.base[:, slot] = border
        for i, position in enumerate(range(border - self.conv_width + 1, border)):
            place = position % self.inputs.shape[2]
            if what.saves:
                self.saved_inputs[:, page, i] = self.inputs[:, slot, place]
            else:
                self.inputs[:, slot, place] = self.saved_inputs[:, page, i]
