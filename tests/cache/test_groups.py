"""Several groups at once: each has what its rows read, none keeps what is not its own, and no text changes.

Beside TurboQuant's pages there are two more, small but real: the state of recurrent layers (a slot for each request,
and pages of the state at block borders), and blocks of layers with a sliding window. Both have a device of Python lists
that does what `send` says and insists on finding the request's own ids.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdraft.cache.blocks import BlockPool
from sparkdraft.cache.formats.turboquant import CodedPlan
from sparkdraft.cache.groups import CacheGroup, CacheGroups
from sparkdraft.cache.pages import pages_of_a_request
from sparkdraft.cache.prefix import Hit
from sparkdraft.core import Request, SamplingParams, Work
from sparkdraft.engine.engine import Engine
from sparkdraft.plan.resolve import MOST_AHEAD
from tests.fakes import FakeBlock, fake_engine

SIZE = 4


class Base:
    """A group that does nothing."""

    def usable(self, hit: Hit) -> int:
        return len(hit.blocks)

    def adopt(self, request: Request, found: int) -> None: ...

    def admits(self, request: Request, rows: int, running: Iterable[Request]) -> bool:
        return True

    def cut(self, request: Request, rows: int, running: Iterable[Request]) -> int:
        return rows

    def shrink(self, request: Request, num_blocks: int) -> None: ...

    def remember(self, request: Request, index: int) -> None: ...

    def advance(self, request: Request) -> None: ...

    def prefers(self, block: int, other: int) -> bool:
        return False

    def send(self) -> None: ...


class KeyedPool:
    """Pages that are found by a prefix's key until they are handed out again."""

    def __init__(self, num_pages: int) -> None:
        self.pool = BlockPool(num_pages)
        self.pool.on_reuse = self._forget
        self.page_of: dict[int, int] = {}
        self._key_of: dict[int, int] = {}

    def name(self, key: int, page: int) -> None:
        if key not in self.page_of:
            self.page_of[key], self._key_of[page] = page, key

    def _forget(self, page: int) -> None:
        self.page_of.pop(self._key_of.pop(page, -1), None)


class RecurrentState(Base):
    """A slot for each request that runs. The state after a row replaces the one before it, so a prefix can be used only
    where a page of its state was saved: at the end of a step that ends at a block's border."""

    def __init__(self, num_slots: int, num_pages: int) -> None:
        self.saved = KeyedPool(num_pages)
        self.num_saved = self.num_loaded = 0
        self._free = list(range(num_slots))
        self._slot_of: dict[Request, int] = {}
        self._begins_with: dict[Request, int] = {}  # the page that its slot is to be filled from
        self._copies: list[tuple[int | None, int | None, int]] = []  # (from a page, to a page, slot)
        self.slots: list[list[int]] = [[-1]] * num_slots  # the device's: a state is the ids that made it
        self.pages: list[list[int]] = [[-1]] * num_pages
        self._ids: dict[Request, list[int]] = {}  # of the step that runs

    @property
    def num_free(self) -> int:
        return len(self._free)

    def usable(self, hit: Hit) -> int:
        return max((i for i, key in enumerate(hit.keys, 1) if key in self.saved.page_of), default=0)

    def adopt(self, request: Request, found: int) -> None:
        if request.chain:
            page = self._begins_with[request] = self.saved.page_of[request.chain[-1]]
            self.saved.pool.retain(page)

    def admits(self, request: Request, rows: int, running: Iterable[Request]) -> bool:
        return True

    def cut(self, request: Request, rows: int, running: Iterable[Request]) -> int:
        border = (request.num_computed + rows) // SIZE * SIZE
        return border - request.num_computed if border > request.num_computed else rows

    def can_grow(self, request: Request, num_blocks: int) -> bool:
        return request in self._slot_of or bool(self._free)

    def grow(self, request: Request, num_blocks: int) -> None:
        if request not in self._slot_of:
            slot = self._slot_of[request] = self._free.pop()
            page = self._begins_with.pop(request, None)
            self._copies.append((page, None, slot))
            if page is not None:
                self.saved.pool.release([page])  # whatever is written there is written after this copy
                self.num_loaded += 1

    def remember(self, request: Request, index: int) -> None:
        key, pool = request.chain[index], self.saved.pool
        if (index + 1) * SIZE == request.num_computed and key not in self.saved.page_of and pool.num_free:
            page = pool.allocate()
            self.saved.name(key, page)
            self._copies.append((None, page, self._slot_of[request]))
            pool.release([page])
            self.num_saved += 1

    def drop(self, request: Request) -> None:
        if request in self._slot_of:
            self._free.append(self._slot_of.pop(request))
        if request in self._begins_with:
            self.saved.pool.release([self._begins_with.pop(request)])

    def send(self) -> None:
        for page, to_page, slot in self._copies:
            if to_page is not None:
                self.pages[to_page] = self.slots[slot]
            else:
                self.slots[slot] = [] if page is None else self.pages[page]
        self._copies.clear()

    # ---- the device

    def run(self, work: Work, ids: list[int]) -> None:
        assert self.slots[self._slot_of[work.request]] == ids[: work.start], "the state of another text"
        self._ids[work.request] = ids

    def commit(self, work: Work, count: int) -> None:
        self.slots[self._slot_of[work.request]] = self._ids.pop(work.request)[: work.start + count]


class WindowBlocks(Base):
    """Blocks of layers whose rows read the last 'window' positions, including themselves: with their own pool and
    tables."""

    def __init__(self, num_blocks: int, window: int) -> None:
        self.window, self.shared = window, KeyedPool(num_blocks)
        self._table: dict[Request, dict[int, int]] = {}  # index among a request's blocks -> block of this pool
        self.cache = [[-1] * SIZE for _ in range(num_blocks)]  # the device's

    @property
    def num_free(self) -> int:
        return self.shared.pool.num_free

    def _is_read(self, index: int, computed: int) -> bool:
        return (index + 1) * SIZE > computed - self.window + 1

    def usable(self, hit: Hit) -> int:
        def reads_all(count: int) -> bool:
            return all(hit.keys[i] in self.shared.page_of for i in range(count) if self._is_read(i, count * SIZE))

        return max(filter(reads_all, range(len(hit.keys) + 1)))

    def adopt(self, request: Request, found: int) -> None:
        read = [i for i in range(len(request.chain)) if self._is_read(i, request.num_computed)]
        table = self._table[request] = {i: self.shared.page_of[request.chain[i]] for i in read}
        for block in table.values():
            self.shared.pool.retain(block)

    def admits(self, request: Request, rows: int, running: Iterable[Request]) -> bool:
        return True

    def cut(self, request: Request, rows: int, running: Iterable[Request]) -> int:
        return max(min(rows, (len(request.blocks) + self.num_free) * SIZE - request.num_computed), 1)

    def can_grow(self, request: Request, num_blocks: int) -> bool:
        return num_blocks <= self.num_free

    def grow(self, request: Request, num_blocks: int) -> None:
        for index in range(len(request.blocks) - num_blocks, len(request.blocks)):
            self._table[request][index] = self.shared.pool.allocate()

    def shrink(self, request: Request, num_blocks: int) -> None:
        for index in range(len(request.blocks) - num_blocks, len(request.blocks)):
            self.shared.pool.release([self._table[request].pop(index)])

    def remember(self, request: Request, index: int) -> None:
        self.shared.name(request.chain[index], self._table[request][index])

    def advance(self, request: Request) -> None:
        table = self._table[request]
        for index in [i for i in table if not self._is_read(i, request.num_computed)]:
            self.shared.pool.release([table.pop(index)])

    def drop(self, request: Request) -> None:
        self.shared.pool.release(reversed(self._table.pop(request, {}).values()))

    # ---- the device

    def run(self, work: Work, ids: list[int]) -> None:
        table = self._table[work.request]
        for position in range(work.start, work.stop):
            self.cache[table[position // SIZE]][position % SIZE] = ids[position]
        for position in range(work.start, work.stop):
            for j in range(max(position - self.window + 1, 0), position + 1):
                assert self.cache[table[j // SIZE]][j % SIZE] == ids[j], f"row {position}, key {j}: another text"

    def commit(self, work: Work, count: int) -> None: ...


@dataclass
class Sizes:
    blocks: int = 120
    slots: int = 4
    state_pages: int = 40
    window_blocks: int = 60
    window: int = 9
    recent: int = 8
    fewer_pages: int = 20  # than a plan gives four requests at least


def engine_with(sizes: Sizes, chance: float = 0.6) -> tuple[Engine, RecurrentState, WindowBlocks]:
    """Pages of a coded cache, state and window blocks; at most 4 requests at once."""
    states, windows = RecurrentState(sizes.slots, sizes.state_pages), WindowBlocks(sizes.window_blocks, sizes.window)
    pages = 4 * pages_of_a_request(SIZE, 3, sizes.recent, MOST_AHEAD) - sizes.fewer_pages
    engine = fake_engine(
        FakeBlock(chance),
        ngram=True,
        more_groups=(states, windows),
        coded=CodedPlan((4,), 3, 3, sizes.recent, pages, 0),
        kv="turboquant",
        num_blocks=sizes.blocks,
        block_size=SIZE,
        max_seqs=4,
        max_step_tokens=48,
    )
    engine.runner.checks += [states, windows]  # type: ignore[attr-defined]
    assert len(engine.scheduler.groups.parts) == 3
    return engine, states, windows


@dataclass
class Done:
    ids: dict[str, list[int]] = field(default_factory=dict)
    num_cached: int = 0


def run(
    engine: Engine, jobs: dict[str, tuple[list[int], int]], rng: random.Random, aborted: Iterable[str] = ()
) -> Done:
    """All jobs (prompt, output length), joining at random steps; some are aborted at random ones."""
    waiting, done, abort = list(jobs), Done({name: [] for name in jobs}), set(aborted)
    while waiting or engine.has_work:
        for _ in range(min(len(waiting), rng.randrange(3))):
            name = waiting.pop(0)
            prompt, length = jobs[name]
            engine.add(prompt, SamplingParams(max_tokens=length, temperature=0.9, seed=7, ignore_eos=True), name)
        for name in [n for n in abort if n not in waiting and rng.random() < 0.2]:
            engine.abort(name)
        for piece in engine.step():
            done.ids[piece.request_id] += piece.ids
            done.num_cached += piece.num_cached if piece.finish else 0
    return done


def jobs_of(rng: random.Random, count: int) -> dict[str, tuple[list[int], int]]:
    shared = [rng.randrange(256) for _ in range(70)]
    beginnings = [0, 20, 37, 70]
    return {
        f"r{i}": (
            shared[: rng.choice(beginnings)] + [rng.randrange(256) for _ in range(rng.randint(1, 40))],
            rng.randint(1, 30),
        )
        for i in range(count)
    }


def plain_text(jobs: dict[str, tuple[list[int], int]]) -> dict[str, list[int]]:
    return run(fake_engine(block_size=SIZE, num_blocks=400, max_seqs=4, max_step_tokens=64), jobs, random.Random(0)).ids


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(),
        Sizes(blocks=44),  # blocks run out first
        Sizes(slots=2),  # state slots do
        Sizes(window_blocks=12, window=17),  # window blocks do
        Sizes(state_pages=1),  # few prefixes can be used
        Sizes(window=1, recent=30, fewer_pages=0),
    ],
    ids=str,
)
def test_no_text_changes_whatever_runs_out(sizes: Sizes) -> None:
    rng = random.Random(3)
    jobs = jobs_of(rng, 20)
    plain = plain_text(jobs)
    engine, states, _ = engine_with(sizes)
    free = engine.scheduler.groups.num_free
    first, again = (run(engine, jobs, random.Random(seed)) for seed in (1, 2))
    assert first.ids == plain and again.ids == plain
    assert states.num_saved > 0 and (again.num_cached > 0 or sizes.state_pages == 1)
    assert (engine.pool.num_free, engine.scheduler.groups.num_free) == (sizes.blocks, free)
    assert sum(states.saved.pool.readers(page) for page in range(sizes.state_pages)) == 0
    if sizes.blocks == 44 or sizes.window_blocks == 12:
        assert engine.scheduler.num_preempted > 0


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    blocks=st.integers(40, 100),
    slots=st.integers(1, 4),
    state_pages=st.integers(1, 12),
    window_blocks=st.integers(12, 40),
    window=st.integers(1, 17),
    recent=st.integers(1, 20),
)
def test_nothing_leaks_in_any_traffic(seed: int, **sizes: int) -> None:
    rng = random.Random(seed)
    jobs = jobs_of(rng, 8)
    aborted = [name for name in jobs if rng.random() < 0.3]
    plain = plain_text(jobs)
    engine, states, _ = engine_with(Sizes(**sizes), chance=rng.choice([0.0, 0.6, 1.0]))
    free = engine.scheduler.groups.num_free
    for _ in range(2):
        done = run(engine, jobs, rng, aborted)
        for name, ids in done.ids.items():
            assert ids == plain[name] if name not in aborted else ids == plain[name][: len(ids)]
        assert (engine.pool.num_free, engine.scheduler.groups.num_free) == (sizes["blocks"], free)
        assert states.saved.pool.num_free == sizes["state_pages"]


def test_a_hit_is_cut_to_a_border_that_has_a_state() -> None:
    """A prompt of one chunk saves its state only at its last border. A prompt that shares less of it finds blocks
    without a saved state, and computes them."""
    engine, states, _ = engine_with(Sizes())
    prompt = list(range(39))
    first = run(engine, {"first": (prompt, 1)}, random.Random(0))
    assert first.num_cached == 0 and states.num_saved == 1
    assert run(engine, {"same": (prompt, 1)}, random.Random(0)).num_cached == 36
    assert run(engine, {"shorter": (prompt[:30], 1)}, random.Random(0)).num_cached == 0
    assert run(engine, {"shorter again": (prompt[:30], 1)}, random.Random(0)).num_cached == 28
    assert run(engine, {"longer": ([*prompt, 77], 1)}, random.Random(0)).num_cached == 36


class Possible(Base):
    """Allows only some lengths of a hit, and of a chunk."""

    def __init__(self, lengths: set[int]) -> None:
        self.lengths, self.num_free = lengths, 0

    def usable(self, hit: Hit) -> int:
        return max(n for n in self.lengths if n <= len(hit.blocks))

    def admits(self, request: Request, rows: int, running: Iterable[Request]) -> bool:
        return True

    def cut(self, request: Request, rows: int, running: Iterable[Request]) -> int:
        return max(n for n in self.lengths if n <= rows)

    def can_grow(self, request: Request, num_blocks: int) -> bool:
        return True

    def grow(self, request: Request, num_blocks: int) -> None: ...

    def drop(self, request: Request) -> None: ...


@given(st.integers(0, 20), st.lists(st.sets(st.integers(0, 20)), max_size=4))
def test_groups_agree_on_the_largest_that_is_possible_for_all(length: int, lengths: list[set[int]]) -> None:
    hit = Hit(list(range(length)), list(range(length)))
    parts: list[CacheGroup] = [Possible(possible | {0}) for possible in lengths]
    best = max(n for n in range(length + 1) if n == 0 or all(n in possible for possible in lengths))
    assert CacheGroups(parts).usable(hit) == best
    request = Request("r", 0, [1], SamplingParams(), 0, 1)
    parts = [Possible(possible | {1}) for possible in lengths]
    best = max(n for n in range(length + 1) if n <= 1 or all(n in possible for possible in lengths))
    assert CacheGroups(parts).cut(request, length, []) == best


@pytest.mark.parametrize("ours, theirs, wanted", [(1, 0, True), (0, 1, False), (0, 0, False), (1, 1, False)])
def test_of_twins_the_second_is_found_only_if_none_prefers_the_first(ours: int, theirs: int, wanted: bool) -> None:
    class Prefers(Possible):
        def __init__(self, best: int) -> None:
            super().__init__({0})
            self.best = best

        def prefers(self, block: int, other: int) -> bool:
            return block == self.best

    parts = [Prefers(8)] * ours + [Prefers(9)] * theirs
    assert CacheGroups(parts).prefers(8, 9) is wanted
