"""Toys that let engine tests run in milliseconds: a tokenizer of bytes, and a runner whose 'model' is a hash.

FakeRunner keeps, for every slot of the cache, the id written there. Each step it reads a request's whole past back
through its block table and insists that it is the request's own: any mix-up of blocks, prefixes or lengths fails here.
Where the plan's cache is coded, it does the same with the pages of what a row would read uncoded.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Protocol

import torch

from sparkdraft.cache.groups import CacheGroup
from sparkdraft.cache.pages import PagePool, RecentRows
from sparkdraft.core import Batch, Request, Work
from sparkdraft.engine.drafting import Drafting
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.proposer import Drafts
from sparkdraft.engine.sampler import Sampler
from sparkdraft.plan.memory import MemoryPlan
from sparkdraft.plan.resolve import MOST_AHEAD, Plan

VOCAB = 257
EOS = 256


class ByteTokenizer:
    vocab_size = VOCAB
    eos_ids = frozenset({EOS})

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        return bytes(i for i in ids if i != EOS).decode(errors="replace")

    def token_bytes(self, token: int, skip_special: bool = True) -> bytes:
        return b"" if token == EOS else bytes([token])

    first_bytes = token_bytes

    def is_special(self, token: int) -> bool:
        return token == EOS


class FakePages:
    """Uncoded rows beside a coded cache: for each page, the ids that were written while a block had it."""

    def __init__(self, plan: Plan) -> None:
        assert plan.coded
        self.coded, self.block_size = plan.coded, plan.block_size
        self.page_of: dict[int, int] = {}
        self.pages = [[-1] * plan.block_size for _ in range(plan.coded.pages)]

    def send(self, changes: list[tuple[int, int]]) -> None:
        self.page_of |= changes
        held = [page for page in self.page_of.values() if page >= 0]
        assert len(held) == len(set(held)), "two blocks have one page"

    def write(self, slot: int, token: int) -> None:
        page = self.page_of.get(slot // self.block_size, -1)
        if page >= 0:
            self.pages[page][slot % self.block_size] = token

    def check(self, position: int, slots: list[int], truth: list[int]) -> None:
        """What a row at this position reads uncoded is there, and is the text's."""
        for j in range(position + 1):
            if j < self.coded.first or position - j < self.coded.recent:
                page = self.page_of.get(slots[j] // self.block_size, -1)
                assert page >= 0, f"row {position} finds no page for key {j}"
                assert self.pages[page][slots[j] % self.block_size] == truth[j], (
                    f"row {position}, key {j}: another text"
                )


class Check(Protocol):
    """What a group's device side does in a step, and that it finds what is the request's own."""

    def run(self, work: Work, ids: list[int]) -> None: ...  # ids: all of the request's, up to the work's last row

    def commit(self, work: Work, count: int) -> None: ...


class FakeRunner:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.kv = SimpleNamespace(meter=None)
        self.pages = FakePages(plan) if plan.coded else None
        self.cache = [-1] * (plan.num_blocks * plan.block_size)
        self.inputs = SimpleNamespace(positions=(), slots=())
        self.aux_hidden = ()
        self.rows_run: list[int] = []  # rows of each step
        self.steps: list[list[tuple[str, int]]] = []  # (request, rows) of each step
        self.checks: list[Check] = []  # what other groups' device side checks
        self._work: list[Work] = []  # of the last one

    def record_rows(self, most: int) -> None:
        """Nothing is recorded here."""

    def run(self, batch: Batch) -> torch.Tensor:
        rows, self._work = [], batch.work
        assert 0 < batch.num_rows <= self.plan.max_step_tokens
        assert len({id(w.request) for w in batch.work}) == len(batch.work) <= self.plan.max_seqs
        self.rows_run.append(batch.num_rows)
        self.steps.append([(w.request.id, w.num_scheduled) for w in batch.work])
        for work in batch.work:  # all writes before any read, as in the real thing
            for p, token in enumerate(_ids(work), work.start):
                self.cache[self._slot(work.request, p)] = token
                if self.pages:
                    self.pages.write(self._slot(work.request, p), token)
        for work in batch.work:
            past = [self.cache[self._slot(work.request, p)] for p in range(work.stop)]
            truth = work.request.ids(0, work.start) + _ids(work)
            assert past == truth, f"{work.request.id}: the cache holds another text"
            if self.pages:
                slots = [self._slot(work.request, p) for p in range(work.stop)]
                for position in range(work.start, work.stop):
                    self.pages.check(position, slots, truth)
            for check in self.checks:
                check.run(work, truth)
            rows += [hash_logits(past[: len(past) - back]) for back in reversed(range(work.num_sampled))]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def commit(self, request: Request, num_rows: int) -> None:
        """A request of the last step stands where its rows that were committed end."""
        (work,) = (each for each in self._work if each.request is request)
        assert work.start + num_rows == request.num_computed and num_rows <= work.num_scheduled
        for check in self.checks:
            check.commit(work, num_rows)

    def _slot(self, request: Request, position: int) -> int:
        size = self.plan.block_size
        return request.blocks[position // size] * size + position % size


def _ids(work: Work) -> list[int]:
    return work.request.ids(work.start, work.start + work.num_known) + work.drafts


class FakeBlock:
    """Stands for a block drafter over the fake model: right with a given chance at each position, else wrong.

    gaps: by whether a draft is right, how sure the drafter says it is, on average; without them it says nothing.
    """

    may_pass_over, chain, device = False, False, torch.device("cpu")

    def __init__(
        self, chance: float, block_size: int = 8, seed: int = 0, gaps: tuple[float, float] | None = None
    ) -> None:
        self.chance, self.max_depth, self.gaps = chance, block_size - 1, gaps
        self.drafter = SimpleNamespace(caps=SimpleNamespace(name="fake"), propose=None)  # this one drafts itself
        self._random = random.Random(seed)
        self.observed: dict[Request, int] = {}

    def propose(self, works: list[Work]) -> list[Drafts]:
        return [self._draft(w) for w in works]

    def _draft(self, work: Work) -> Drafts:
        ids, drafts, sure = work.request.ids(0, work.request.num_tokens), [], []
        for _ in range(work.most_drafts):
            best = int(hash_logits(ids + drafts).argmax())
            right = self._random.random() < self.chance
            drafts.append(best if right else (best + 1) % 256)
            sure += [self.gaps[right] * self._random.uniform(0.5, 1.5)] if self.gaps else []
        return Drafts(drafts, sure)

    def is_ready(self, request: Request) -> bool:
        return True

    def observe(self, work: Work, *rows: object) -> None:
        seen = self.observed.get(work.request, 0)
        assert work.start <= seen or seen == 0, "a gap: rows were committed that the drafter did not see"
        self.observed[work.request] = work.request.num_computed

    def release(self, request: Request) -> None:
        self.observed.pop(request, None)


def hash_logits(ids: list[int]) -> torch.Tensor:
    """Logits that depend on every id before them, and on nothing else."""
    return _hashed(tuple(ids))


@lru_cache(maxsize=4096)
def _hashed(ids: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(str(ids).encode()))
    return torch.randn(VOCAB, generator=generator)


def fake_plan(
    num_blocks: int = 64, block_size: int = 4, max_seqs: int = 8, max_step_tokens: int = 32, **changes: object
) -> Plan:
    values: dict[str, object] = {
        "device": "cpu",
        "dtype": "float32",
        "weights": "float32",
        "kernels": "reference",
        "threads": 1,
        "max_model_len": num_blocks * block_size,
        "max_seqs": max_seqs,
        "max_step_tokens": max_step_tokens,
        "max_step_ms": 1000,
        "kv": "exact",
        "block_size": block_size,
        "num_blocks": num_blocks,
        "prefix_cache": True,
        "graphs": False,
        "memory": MemoryPlan(0, 0, 0, 0),
    }
    return Plan(**{**values, **changes})  # type: ignore[arg-type]


def fake_engine(
    block: FakeBlock | None = None,
    ngram: bool = False,
    spec: int | None = None,
    more_groups: Sequence[CacheGroup] = (),
    depths: Sequence[int] | None = None,
    **changes: object,
) -> Engine:
    plan = fake_plan(**changes)  # type: ignore[arg-type]
    tokenizer = ByteTokenizer()
    sampler = Sampler(VOCAB, tokenizer.eos_ids, torch.device("cpu"), max_seqs=plan.max_seqs)
    drafting = Drafting(plan.max_model_len, block, ngram, spec, depths=depths)  # type: ignore[arg-type]
    runner, groups = FakeRunner(plan), list(more_groups)
    if (coded := plan.coded) and runner.pages:
        rows = (coded.first, coded.recent, MOST_AHEAD)
        groups.append(RecentRows(PagePool(coded.pages), plan.block_size, *rows, runner.pages.send))
    engine = Engine(plan, runner, sampler, tokenizer, drafting, groups=groups)  # type: ignore[arg-type]
    advance = engine.scheduler.commit

    def commit(request: Request, num_rows: int) -> None:
        advance(request, num_rows)
        runner.commit(request, num_rows)

    engine.scheduler.commit = commit  # type: ignore[method-assign]
    return engine
