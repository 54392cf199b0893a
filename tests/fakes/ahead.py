"""A device that is one step ahead of the host, over the fake model: a step is done when it is launched, and the host
reads of it one step later.

Like `FakeRunner` it keeps the id that was written to every slot of the cache, and insists that a request reads back its
own text, whoever had its blocks before, and that no row lies past the blocks that the request holds.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace

import torch

from sparkdraft.core import Batch, Request, Work
from sparkdraft.engine.drafting import Drafting
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.sampler import Sampler
from sparkdraft.engine.steps import StepRead, StepResult
from sparkdraft.text.grammar import GrammarState
from tests.fakes import VOCAB, ByteTokenizer, FakeBlock, fake_plan, hash_logits


class AheadSteps:
    ahead = 1

    def __init__(self, num_slots: int, block_size: int, max_seqs: int, chance: float, seed: int) -> None:
        self.grammars: dict[Request, GrammarState] = {}
        self.cache = [-1] * num_slots
        self.most_running = self.num_mixed = 0
        self._size, self._max_seqs, self._chance = block_size, max_seqs, chance
        self._ids: dict[Request, list[int]] = {}  # of requests that decode: what the device knows
        self._unread: deque[StepRead] = deque()
        self._random = random.Random(seed)

    @property
    def num_unread(self) -> int:
        return len(self._unread)

    def reach(self, depth: int) -> int:
        return 1 + depth

    def may_draft(self, batch: Batch) -> bool:
        return True

    def capture(self) -> None:
        pass

    def complete(self) -> None:
        pass

    def launch(self, batch: Batch) -> None:
        assert len(self._unread) <= self.ahead
        decoding = [work for work in batch.work if work.decodes]
        assert {work.request for work in decoding} >= set(self._ids), "every slot runs in every step"
        self.most_running = max(self.most_running, len(batch.work))
        self.num_mixed += 0 < len(decoding) < len(batch.work)
        assert len(batch.work) <= self._max_seqs
        results = [self._decode(work) if work.decodes else self._read_prompt(work) for work in batch.work]
        self._unread.append(StepRead(batch, results, seconds=1e-3))

    def read(self) -> StepRead:
        return self._unread.popleft()

    def learn(self, read: StepRead, num_accepted: Sequence[int]) -> None:
        assert len(read.results) == len(num_accepted)

    def forget(self, request: Request) -> None:
        self._ids.pop(request, None)

    def abandon(self) -> None:
        self._unread.clear()

    def _read_prompt(self, work: Work) -> StepResult:
        request, end = work.request, work.start + work.num_known
        assert request not in self._ids and work.start == request.num_computed
        ids = request.ids(0, end)
        self._run(request, ids, work.start)
        if not work.samples:
            return StepResult(work)
        sample = int(hash_logits(ids).argmax())
        self._ids[request] = [*ids, sample]
        return StepResult(work, [sample])

    def _decode(self, work: Work) -> StepResult:
        request = work.request
        ids = self._ids.setdefault(request, request.ids(0, request.num_tokens))
        drafts = self._drafts(ids, work.most_drafts)
        self._run(request, ids + drafts, len(ids) - 1)
        samples: list[int] = []
        for k in range(len(drafts) + 1):
            samples.append(int(hash_logits(ids + drafts[:k]).argmax()))
            if k == len(drafts) or samples[-1] != drafts[k]:
                break
        self._ids[request] = ids + samples
        return StepResult(work, samples, len(drafts), len(drafts), "fake" if drafts else "")

    def _drafts(self, ids: list[int], depth: int) -> list[int]:
        drafts: list[int] = []
        for _ in range(depth):
            best = int(hash_logits(ids + drafts).argmax())
            drafts.append(best if self._random.random() < self._chance else (best + 1) % 256)
        return drafts

    def _run(self, request: Request, ids: list[int], start: int) -> None:
        """Writes the tokens from 'start' on, and reads all of the request back."""
        slots = [request.blocks[p // self._size] * self._size + p % self._size for p in range(len(ids))]
        for position in range(start, len(ids)):
            self.cache[slots[position]] = ids[position]
        assert [self.cache[slot] for slot in slots] == ids, f"{request.id}: the cache holds another text"


def ahead_engine(
    chance: float = 0.6, seed: int = 0, spec: int | None = 3, **changes: object
) -> tuple[Engine, AheadSteps]:
    plan, tokenizer = fake_plan(**changes), ByteTokenizer()  # type: ignore[arg-type]
    sampler = Sampler(VOCAB, tokenizer.eos_ids, torch.device("cpu"), max_seqs=plan.max_seqs)
    drafting = Drafting(plan.max_model_len, FakeBlock(chance), False, spec)  # type: ignore[arg-type]
    steps = AheadSteps(plan.num_blocks * plan.block_size, plan.block_size, plan.max_seqs, chance, seed)
    runner = SimpleNamespace(kv=SimpleNamespace(meter=None), plan=plan)
    return Engine(plan, runner, sampler, tokenizer, drafting, steps), steps  # type: ignore[arg-type]
