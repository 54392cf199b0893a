"""The group of recurrent states: nobody runs from a state that is not its own, and nothing leaks.

The device is one of Python lists that does what kernels/reference/recurrent.py says: a state is the ids that made it, a
record is one id, and every replay insists on finding the request's own.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdraft.cache import states
from sparkdraft.cache.prefix import Hit
from sparkdraft.cache.states import Copy, StateSlots
from sparkdraft.core import Request, SamplingParams, Work
from sparkdraft.engine.engine import Engine
from sparkdraft.kernels.ops import FOLD, input_ring, record_ring
from tests.fakes import FakeBlock, fake_engine

MOST_ROWS, WIDTH = 16, 4


@dataclass
class Slot:
    base: int = -1  # as if somebody else had been here
    state: list[int] = field(default_factory=lambda: [-1] * 500)
    records: list[int] = field(default_factory=lambda: [-1] * record_ring(MOST_ROWS))
    inputs: list[int] = field(default_factory=lambda: [-1] * input_ring(MOST_ROWS, WIDTH))


class Lists:
    """The device, and what a runner checks: tests.fakes.Check."""

    def __init__(self, num_slots: int, num_pages: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots = [Slot() for _ in range(num_slots)]
        self.pages: list[tuple[list[int], list[int]]] = [([-2], [-2] * (WIDTH - 1)) for _ in range(num_pages)]
        self.slot_of: dict[int, int] = {}
        self.num_loaded = self.num_saved = 0

    def base_of(self, slot: int) -> int:
        return self.slots[slot].base

    def send(self, blocks: list[tuple[int, int]]) -> None:
        self.slot_of |= blocks

    def copy(self, what: Copy) -> None:
        slot = self.slots[what.slot]
        places = [p % len(slot.inputs) for p in range(what.border - WIDTH + 1, what.border)]
        if what.saves:
            self.num_saved += 1
            self.pages[what.page] = slot.state, [slot.inputs[p] for p in places]
        else:
            self.num_loaded += 1
            slot.state, inputs = self.pages[what.page]
            slot.base = what.border
            for p, value in zip(places, inputs, strict=True):
                slot.inputs[p] = value

    def run(self, work: Work, ids: list[int]) -> None:
        slot, first = self.slots[self.slot_of[work.request.blocks[work.start // self.block_size]]], work.start
        if first == 0:
            slot.base, slot.state = 0, []
        before = range(max(first - WIDTH + 1, 0), first)
        assert [slot.inputs[p % len(slot.inputs)] for p in before] == [ids[p] for p in before], "another's inputs"
        replayed = [slot.records[p % len(slot.records)] for p in range(slot.base, first)]
        assert slot.state + replayed == ids[:first], f"{work.request.id}: the state of another text at {first}"
        slot.base = max(slot.base, first // FOLD * FOLD)
        for p in range(first, work.stop):
            slot.inputs[p % len(slot.inputs)] = ids[p]
            if work.num_scheduled <= MOST_ROWS:
                slot.records[p % len(slot.records)] = ids[p]
        slot.base = slot.base if work.num_scheduled <= MOST_ROWS else work.stop
        slot.state = ids[: slot.base]

    def commit(self, work: Work, count: int) -> None: ...


def engine_of(
    num_slots: int = 4, num_pages: int = 12, block_size: int = 4, blocks: int = 150, chance: float = 0.6
) -> tuple[Engine, StateSlots, Lists]:
    device = Lists(num_slots, num_pages, block_size)
    group = StateSlots(num_slots, num_pages, block_size, MOST_ROWS, device)
    engine = fake_engine(
        FakeBlock(chance, block_size=16),
        ngram=True,
        more_groups=(group,),
        num_blocks=blocks,
        block_size=block_size,
        max_seqs=num_slots,
        max_step_tokens=64,
    )
    engine.runner.checks.append(device)  # type: ignore[attr-defined]
    return engine, group, device


def drained(engine: Engine) -> dict[str, int]:
    """Run everything to its end: the rows that each request found in the prefix cache."""
    found = {}
    while engine.has_work:
        found |= {out.request_id: out.num_cached for out in engine.step() if out.finish}
    return found


def add(engine: Engine, name: str, prompt: list[int], length: int = 1, **params: int) -> None:
    engine.add(prompt, SamplingParams(max_tokens=length, temperature=0.9, seed=7, ignore_eos=True, **params), name)


def cached(engine: Engine, prompt: list[int], length: int = 1, **params: int) -> int:
    add(engine, "one", prompt, length, **params)
    return drained(engine)["one"]


@dataclass
class Traffic:
    """Requests that come, run, are aborted and end, at random."""

    engine: Engine
    rng: random.Random
    shared: list[int]
    number: int = 0

    def operation(self) -> None:
        choice, names = self.rng.random(), list(self.engine._by_id)
        if choice < 0.25 and len(names) < 8:
            self.number += 1
            begin = self.shared[: self.rng.choice([0, 16, 33, 48, 70, 100])]
            prompt = begin + [self.rng.randrange(256) for _ in range(self.rng.randint(1, 50))]
            add(self.engine, f"r{self.number}", prompt, self.rng.randint(1, 40))
        elif choice < 0.3 and names:
            self.engine.abort(self.rng.choice(names))
        else:
            self.engine.step()


def check(engine: Engine, group: StateSlots, device: Lists, blocks: int) -> None:
    held = {request: each.slot for request, each in group._held.items()}
    assert set(held) == set(engine.scheduler.running), "only who runs has a slot"
    assert sorted([*held.values(), *group._free]) == list(range(len(device.slots))), "a slot is lost or shared"
    pages = [*group._page_of.values(), *group._free_pages]
    assert sorted(pages) == list(range(len(device.pages))), "a page is lost or shared"


NUM_OPERATIONS = 64 * max(int(os.environ.get("FUZZ_CASES", "1")) // 5, 1)  # 10,240 in the long run


@pytest.mark.fuzz
@settings(max_examples=5, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_slots=st.integers(1, 4),
    num_pages=st.integers(0, 12),
    block_size=st.sampled_from([4, 16, 32]),
    tokens=st.integers(200, 600),
)
def test_random_operations_leak_nothing(
    seed: int, num_slots: int, num_pages: int, block_size: int, tokens: int
) -> None:
    rng, blocks = random.Random(seed), tokens // block_size + 1
    engine, group, device = engine_of(num_slots, num_pages, block_size, blocks, rng.choice([0.0, 0.6, 1.0]))
    traffic = Traffic(engine, rng, [rng.randrange(256) for _ in range(100)])
    for _ in range(NUM_OPERATIONS):
        traffic.operation()
        check(engine, group, device, blocks)
    for name in list(engine._by_id):
        engine.abort(name)
    drained(engine)
    check(engine, group, device, blocks)
    assert engine.pool.num_free == blocks and group.num_free == num_slots


@pytest.mark.parametrize("length", [17, 30, 33, 100])
def test_a_prompt_leaves_a_page_at_its_last_border(length: int) -> None:
    engine, group, _ = engine_of()
    prompt = list(range(length))
    border = (length - 1) // FOLD * FOLD
    assert cached(engine, prompt, length=3) == 0 and group.num_saved == 1
    assert cached(engine, prompt, length=3) == border
    assert cached(engine, [*prompt[:border], 200, 201]) == border


def test_a_prompt_of_one_block_leaves_none() -> None:
    engine, group, _ = engine_of()
    assert cached(engine, list(range(16)), num_draft=0) == 0 and group.num_saved == 0


def test_the_next_turn_continues_where_the_answer_ended() -> None:
    engine, _, _ = engine_of()
    add(engine, "first", list(range(40)), 50)
    ids: list[int] = list(range(40))
    while engine.has_work:
        for out in engine.step():
            ids += out.ids
    assert cached(engine, [*ids, 7, 8, 9]) >= (len(ids) - 16) // FOLD * FOLD - FOLD > 40


def test_where_two_prompts_part_a_state_is_saved_for_the_third() -> None:
    engine, _, _ = engine_of()
    shared = list(range(70))
    found = [cached(engine, [*shared, *range(k, k + 40)]) for k in (100, 150, 200)]
    assert found == [0, 0, 64]


def test_a_short_chunk_up_to_a_border_is_followed_by_another() -> None:
    """The state moves to the border with the step after it, which must not be so long that it moves on."""
    engine, _, _ = engine_of()
    shared = list(range(70))
    cached(engine, shared[:17])  # a page at 16
    cached(engine, shared)  # and at 64, with keys and values of all blocks
    assert cached(engine, [*shared[:40], *range(100, 180)]) == 16  # 16 rows up to 32, where the state was missing
    assert cached(engine, [*shared[:40], 200, 201]) == 32


@pytest.mark.parametrize("length", [17, 30, 100])
def test_a_prompts_page_is_there_while_the_answer_is_written(length: int) -> None:
    engine, group, _ = engine_of()
    add(engine, "first", list(range(length)), 60, num_draft=0)
    for _ in range(6):
        engine.step()
    assert engine.scheduler.running and group.num_saved == 1
    add(engine, "second", list(range(length)), 2)
    assert drained(engine)["second"] == (length - 1) // FOLD * FOLD


def test_long_prompts_are_saved_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "SAVE_EVERY", 64)
    engine, _, _ = engine_of()
    prompt = [i % 256 for i in range(300)]
    assert cached(engine, prompt) == 0
    assert cached(engine, [*prompt[:150], 255]) == 128  # 64 rows per step: chunks end at 64, 128, ...


def test_the_oldest_page_makes_room() -> None:
    engine, group, _ = engine_of(num_pages=2)
    prompts = [[k, *range(40)] for k in range(100, 104)]
    for prompt in prompts:
        cached(engine, prompt)
    assert group.num_saved == 2
    assert [cached(engine, prompt) for prompt in reversed(prompts)] == [32, 32, 0, 0]


def test_a_page_that_was_used_stays_longer() -> None:
    engine, _, _ = engine_of(num_pages=2)
    first, second, third = ([k, *range(40)] for k in (100, 101, 102))
    for prompt in (first, second, first, third):
        cached(engine, prompt)
    assert [cached(engine, prompt) for prompt in (first, second)] == [32, 0]


def test_chunks_of_a_prompt_end_at_borders() -> None:
    """Wherever they end, the state is one that may be saved."""
    group, request = StateSlots(2, 4, 16, MOST_ROWS, Lists(2, 4, 16)), a_request(300)
    group.adopt(request, 0)
    assert [group.cut(request, rows, []) for rows in (300, 299, 63, 17, 15)] == [288, 288, 48, 16, 15]
    request.num_computed = 295
    assert group.cut(request, 5, []) == 5


def test_without_prefixes_nothing_is_cut_and_nothing_saved() -> None:
    engine, _, device = engine_of(num_pages=0)
    assert cached(engine, list(range(60)), 5) == 0
    assert engine.runner.rows_run[0] == 60 and device.num_saved == 0  # type: ignore[attr-defined]


def a_request(ids: int = 100) -> Request:
    return Request("r", 0, list(range(ids)), SamplingParams(), 0, 10)


def admitted(group: StateSlots, request: Request, keys: list[int]) -> None:
    group.adopt(request, 0)
    request.blocks.extend(range(len(keys)))
    group.grow(request, len(keys))
    group.send()
    request.chain.extend(keys)


@pytest.mark.parametrize("device_base", [16, 32, 48])
def test_a_state_that_went_further_than_the_host_knows_is_not_saved(device_base: int) -> None:
    """As in steps that were launched ahead: the host believes that the state stands at 32."""
    device = Lists(2, 4, 16)
    group, request = StateSlots(2, 4, 16, MOST_ROWS, device), a_request(34)
    admitted(group, request, [1, 2, 3])
    request.num_computed = 32  # the prompt up to its last border, in a long step
    device.slots[group._held[request].slot].base = device_base
    group.advance(request)
    assert group.usable(Hit([0, 1], [1, 2])) == (2 if device_base == 32 else 0)


@pytest.mark.parametrize(("device_base", "usable"), [(0, 0), (16, 1), (32, 2), (48, 0), (40, 0)])
def test_at_its_end_a_request_leaves_the_state_that_the_device_has(device_base: int, usable: int) -> None:
    """Past the committed rows a launched step may have run on; that state belongs to no text."""
    device = Lists(2, 4, 16)
    group, request = StateSlots(2, 4, 16, MOST_ROWS, device), a_request(5)
    admitted(group, request, [1, 2])
    request.num_computed = 44
    device.slots[group._held[request].slot].base = device_base
    group.drop(request)
    assert group.usable(Hit([0, 1, 2], [1, 2, 3])) == usable
    assert group.num_free == 2


def test_an_interrupt_at_the_end_of_a_request_costs_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Lists(2, 4, 16)
    group, request = StateSlots(2, 4, 16, MOST_ROWS, device), a_request(5)
    admitted(group, request, [1, 2])
    request.num_computed = 32
    monkeypatch.setattr(device, "base_of", lambda slot: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        group.drop(request)
    assert group.num_free == 2
    group.drop(request)
    assert group.num_free == 2


def test_a_refused_request_loads_nothing() -> None:
    """It was admitted for a moment: its slot goes to the next one, and so must not be written to any more."""
    engine, group, device = engine_of()
    prompt = list(range(40))
    cached(engine, prompt)
    request = a_request(50)
    engine.scheduler._adopt(request, engine.scheduler._cached_prefix(request))
    assert request.num_computed == 32 and group._copies
    engine.scheduler._release(request)
    assert not group._copies and not device.num_loaded and group.num_free == 4


def test_what_was_not_copied_when_a_call_raised_is_copied_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Lists(2, 4, 16)
    group, request = StateSlots(2, 4, 16, MOST_ROWS, device), a_request(34)
    admitted(group, request, [1, 2, 3])
    request.num_computed, device.slots[group._held[request].slot].base = 32, 32
    group.advance(request)
    done = device.copy
    monkeypatch.setattr(device, "copy", lambda what: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        group.send()
    monkeypatch.setattr(device, "copy", done)
    group.send()
    group.send()
    assert device.num_saved == 1
