"""The scheduler and a coded cache: every row finds what it reads uncoded, with shared blocks, drafts and preemption."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from sparkdraft.cache.blocks import BlockPool
from sparkdraft.cache.formats.turboquant import CodedPlan
from sparkdraft.cache.pages import PagePool, RecentRows, pages_of_a_request
from sparkdraft.cache.prefix import PrefixCache
from sparkdraft.core import Request, SamplingParams
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.scheduler import Scheduler
from sparkdraft.plan.resolve import MOST_AHEAD
from tests.fakes import FakeBlock, fake_engine

SIZE, SEQS = 4, 4


def coded_engine(spare: int, recent: int, first: int = 3, chance: float = 0.6, **changes: object) -> Engine:
    """spare: pages beyond the plan's minimum; a few less are still enough, because no request looks so far ahead
    here."""
    pages = SEQS * pages_of_a_request(SIZE, first, recent, MOST_AHEAD) + spare
    coded = CodedPlan((4,), 3, first, recent, pages, 0)
    options = {"block_size": SIZE, "max_seqs": SEQS, "max_step_tokens": 48, "num_blocks": 120} | changes
    return fake_engine(FakeBlock(chance), ngram=True, spec=None, kv="turboquant", coded=coded, **options)


def texts(
    engine: Engine, jobs: dict[str, tuple[list[int], SamplingParams]], rng: random.Random
) -> dict[str, list[int]]:
    """All jobs, joining at random steps."""
    waiting, out = list(jobs), {name: [] for name in jobs}
    while waiting or engine.has_work:
        for _ in range(min(len(waiting), rng.randrange(3))):
            name = waiting.pop(0)
            engine.add(*jobs[name], name)
        for piece in engine.step():
            out[piece.request_id] += piece.ids
    return out


@pytest.mark.parametrize("recent, spare", [(5, -50), (6, -50), (16, 0), (30, 40)])
def test_every_row_finds_its_uncoded_keys(recent: int, spare: int) -> None:
    rng = random.Random(recent)
    shared = [rng.randrange(256) for _ in range(70)]
    jobs = {
        f"r{i}": (
            shared[: rng.choice([0, 20, 70])] + [rng.randrange(256) for _ in range(rng.randint(1, 60))],
            SamplingParams(max_tokens=rng.randint(1, 50), temperature=rng.choice([0.0, 0.9]), seed=i),
        )
        for i in range(24)
    }
    plain = texts(
        fake_engine(block_size=SIZE, num_blocks=400, max_seqs=SEQS, max_step_tokens=64), jobs, random.Random(1)
    )
    engine = coded_engine(spare, recent)
    assert texts(engine, jobs, random.Random(1)) == plain
    assert texts(engine, jobs, random.Random(2)) == plain  # and with prefixes found
    assert engine.scheduler.groups.num_free == (engine.plan.coded.pages,) and engine.pool.num_free == 120


@pytest.mark.parametrize("first, recent", [(0, 1), (3, 5), (4, 16), (9, 7)])
def test_pages_are_held_as_long_as_a_row_to_come_reads_them(first: int, recent: int) -> None:
    rows = RecentRows(PagePool(30), SIZE, first, recent, 0, tell=print)
    it = Request("it", 0, [0] * 80, SamplingParams(), 0, 1)
    it.blocks.extend(range(100, 120))
    rows.grow(it, 20)
    for it.num_computed in range(80):
        computed = it.num_computed
        rows.advance(it)
        read = {j // SIZE for j in range(80) if j < first or computed - j < recent}
        assert 30 - rows.num_free == len(read), computed
    rows.drop(it)
    assert rows.num_free == 30


def test_a_step_looks_only_at_the_pages_that_it_gives_back() -> None:
    """However many pages a window holds."""

    class Counted(dict[int, int]):
        looks = 0

        def __contains__(self, index: object) -> bool:
            Counted.looks += 1
            return super().__contains__(index)

        def __iter__(self) -> Iterator[int]:
            raise AssertionError("no step goes over all pages")

    rows = RecentRows(PagePool(400), SIZE, 5, 1000, 0, tell=print)
    it = Request("it", 0, [0] * 1600, SamplingParams(), 0, 1)
    it.blocks.extend(range(400))
    rows.grow(it, 400)
    rows._held[it] = Counted(dict.items(rows._held[it]))
    for it.num_computed in range(1600):
        rows.advance(it)
    assert rows.num_free > 140 and Counted.looks <= 1600 + rows.num_free, "one look a step, and one per page"


def test_requests_that_give_way_and_come_back() -> None:
    jobs = {f"r{i}": ([i] * 40, SamplingParams(max_tokens=60, ignore_eos=True)) for i in range(6)}
    plain = texts(
        fake_engine(block_size=SIZE, num_blocks=400, max_seqs=SEQS, max_step_tokens=64), jobs, random.Random(1)
    )
    engine = coded_engine(0, 16, num_blocks=60)  # two of them hardly fit
    schedule, given_way = engine.scheduler.schedule, []
    engine.scheduler.schedule = lambda depths: given_way.append(batch := schedule(depths)) or batch  # type: ignore
    assert texts(engine, jobs, random.Random(1)) == plain
    assert sum(len(batch.preempted) for batch in given_way) > 0


def test_a_long_prompt_is_cut_to_the_pages_that_are_free() -> None:
    engine = coded_engine(4, 8, max_step_tokens=400, num_blocks=400)
    engine.add([7] * 600, SamplingParams(max_tokens=3, ignore_eos=True))
    while engine.has_work:
        engine.step()
    rows = engine.runner.rows_run
    assert max(rows) <= engine.plan.coded.pages * SIZE < 600 and sum(rows) >= 600


@pytest.mark.parametrize(
    ("pages", "seqs", "prompt", "output"),
    [(386, 64, 1500, 150), (214, 8, 4000, 300), (150, 32, 16, 500), (214, 16, 600, 300), (386, 64, 100, 700)],
)
def test_requests_wait_for_pages_instead_of_taking_turns(pages: int, seqs: int, prompt: int, output: int) -> None:
    """More requests than there are pages for: none is let in to run row by row and be preempted."""
    pool, window, size = BlockPool(100_000), 1024, 16
    group = RecentRows(PagePool(pages), size, 0, window, 64, lambda changes: None)
    scheduler = Scheduler(pool, PrefixCache(pool, size, True), seqs, 2048, 0, [group])
    for i in range(seqs):
        ids = [*range(i * 100_000, i * 100_000 + prompt)]
        scheduler.add(Request(f"r{i}", 0, ids, SamplingParams(output), 0, output))
    rows = 0
    while scheduler.has_work:
        for work in scheduler.schedule().work:
            rows += work.num_scheduled
            if work.samples:
                work.request.output_ids.append(7)
            scheduler.commit(work.request, work.num_known)
            if len(work.request.output_ids) >= output:
                scheduler.finish(work.request)
    assert rows < 1.1 * seqs * (prompt + output - 1)
    assert not scheduler.num_preempted or prompt > window


def test_short_requests_wait_for_no_window_that_they_never_fill() -> None:
    """Each needs 10 blocks at most, and there are pages for all of them together, but for 2 windows only."""
    pages, window, ahead = 60, 100, 4
    rows = RecentRows(PagePool(pages), SIZE, 0, window, ahead, tell=print)
    requests = [Request(f"r{i}", 0, [0] * 26, SamplingParams(), 0, 10) for i in range(6)]
    assert rows.need * 3 > pages
    for number, request in enumerate(requests):
        running = requests[:number]
        assert rows.admits(request, 26, running) and rows.cut(request, 26, running) == 26, number
        rows.adopt(request, 0)
        request.blocks.extend(range(10 * number, 10 * number + 7))
        rows.grow(request, 7)
    seventh = Request("seventh", 0, [0] * 26, SamplingParams(), 0, 10)
    assert not rows.admits(seventh, 26, requests)  # what is free the others will write to
    for number, request in enumerate(requests):  # and they can
        request.blocks.extend(range(10 * number + 7, 10 * number + 10))
        assert rows.can_grow(request, 3)
        rows.grow(request, 3)


def test_a_refused_request_is_asked_again_when_another_ends() -> None:
    """While requests grow, pages become fewer and so does what they are owed: when one ends, there may be room although
    fewer pages are free than when the next was refused."""
    pool, size = BlockPool(1000), 16
    group = RecentRows(PagePool(18), size, 0, 64, 64, lambda changes: None)
    scheduler = Scheduler(pool, PrefixCache(pool, size, False), 4, 2048, 0, [group])
    outputs = {"long": 250, "short": 70, "next": 70, "last": 2}
    begun: dict[str, int] = {}
    ended: dict[str, int] = {}
    for i, (name, output) in enumerate(outputs.items()):
        scheduler.add(Request(name, 0, [i] * 10, SamplingParams(output), 0, output))
    for step in range(1000):
        if not scheduler.has_work:
            break
        for work in scheduler.schedule().work:
            begun.setdefault(work.request.id, step)
            work.request.output_ids.append(7)
            scheduler.commit(work.request, work.num_known)
            if len(work.request.output_ids) >= outputs[work.request.id]:
                ended[work.request.id] = step
                scheduler.finish(work.request)
    assert begun["next"] > 0 and begun["next"] <= ended["short"] + 1 < ended["long"]
    assert not scheduler.num_preempted
