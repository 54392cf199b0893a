"""Decides what each step runs: which requests, how many rows of each, in which blocks.

Every request is the same thing at a different distance from its end: it has num_tokens known ids of which num_computed
are in the cache, and wants the rest run. A long prompt wants many rows and gets them in chunks; a decoding request
wants one, and may carry drafts after it. When blocks run out, the youngest request gives its own back and starts over
later (its finished blocks may still be found in the prefix cache). While some requests decode, the prompt rows of a
step are limited, so that no stream waits long for its next token (engine/pace.py). What a request holds beside its
blocks is told of everything that happens to it, and may refuse blocks, cut a chunk or shorten a prefix hit
(cache/holdings.py). Integers only, no tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparkdraft.cache.blocks import BlockPool
from sparkdraft.cache.holdings import Holding, Holdings
from sparkdraft.cache.prefix import ROOT, Hit, PrefixCache
from sparkdraft.core import Batch, Request, Work
from sparkdraft.engine.pace import PromptPace

Room = tuple[int, ...]  # free blocks, and what is free of each holding


@dataclass(slots=True)
class RowsLeft:
    """What a step can still run. A request that misses more than one row is a prompt, or starts over like one."""

    rows: int
    prompt_rows: int  # of these, those that prompts may have

    def most(self, missing: int, keep: int) -> int:
        """Rows for a request that misses this many, if 'keep' rows must be left for others."""
        room = self.rows - keep
        return max(min(missing, room if missing == 1 else min(room, self.prompt_rows)), 0)

    def take(self, rows: int, missing: int) -> None:
        self.rows -= rows
        self.prompt_rows -= rows if missing > 1 else 0


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        prefix: PrefixCache,
        max_seqs: int,
        max_rows: int,
        lookahead: int = 0,
        holdings: Sequence[Holding] = (),
        pace: PromptPace | None = None,
    ) -> None:
        """lookahead: positions after its known ids that a drafting request needs slots for.

        holdings: what requests hold beside their blocks. pace: limits prompt rows while others decode; without it a
        chunk takes all rows of a step.
        """
        assert max_rows >= max_seqs, f"max_rows {max_rows} below max_seqs {max_seqs}: decode rows would starve"
        self.pool = pool
        self.prefix = prefix
        self.block_size = prefix.block_size
        self.max_seqs = max_seqs
        self.max_rows = max_rows
        self.lookahead = lookahead
        self.holdings = Holdings(holdings)
        self.pace = pace
        self.num_preempted = 0  # since the start, or since Engine.reset_counts
        prefix.prefers = self.holdings.prefers
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first: the order in which blocks are kept
        self._refused: tuple[Request, Room] | None = None  # the head of the queue that found too few free blocks

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def decoding(self) -> list[Request]:
        """Running requests that want one row: those that may draft."""
        return [r for r in self.running if r.num_tokens - r.num_computed == 1]

    def schedule(self, depths: Mapping[Request, int] | None = None) -> Batch:
        """Rows for everything running, oldest first; then for as many newcomers as fit; then drafts.

        depths: drafts wanted after a decoding request's row. They get only what nobody needs: spare rows, free blocks.
        """
        depths = depths or {}
        left = self._rows_of_a_step()
        work, preempted = self._continue(left)
        if not preempted:
            # Drafts give their rows up where a newcomer would otherwise get none.
            wanted = sum(depths.values())
            self._admit(work, left, keep=wanted if wanted < left.rows else 0)
        self._add_drafts(work, depths, left.rows)
        assert work or not self.has_work, "a request is waiting and nothing can run: the pool is too small for one"
        return Batch(work, preempted)

    def commit(self, request: Request, num_rows: int) -> None:
        """'num_rows' more of its rows are in the cache for good: advance, and remember blocks that became full."""
        request.num_computed += num_rows
        self._remember_full_blocks(request)
        self.holdings.advance(request)

    @property
    def only_decoding(self) -> bool:
        """All that runs wants one row, and nobody waits who could come in."""
        return bool(self.running) and not self._may_admit and len(self.decoding()) == len(self.running)

    def reserve(self, rows: int) -> bool:
        """Blocks for this many rows of everything that runs, where nobody must give any back for it."""
        return all(self._grow(request, rows) for request in self.running)

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it stands, and give its blocks back; the caller has set its finish reason."""
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        self._release(request)

    # ---- the parts

    def _rows_of_a_step(self) -> RowsLeft:
        num_decoding = len(self.decoding())
        if self.pace is None or not num_decoding or not (self.waiting or num_decoding < len(self.running)):
            return RowsLeft(self.max_rows, self.max_rows)
        return RowsLeft(self.max_rows, self.pace.most_rows(num_decoding))

    def _continue(self, left: RowsLeft) -> tuple[list[Work], list[Request]]:
        """Rows for what runs: (work, requests that had to give their blocks back). Prompts share their limit."""
        work: list[Work] = []
        preempted: list[Request] = []
        position = 0
        while position < len(self.running):
            request = self.running[position]
            later = len(self.running) - position - 1  # each is sure of one row, whatever this chunk wants
            missing = request.num_tokens - request.num_computed
            want = self.holdings.cut(request, left.most(missing, keep=later), self.running)
            if not want:  # the prompts before it have used up the limit
                position += 1
                continue
            while not self._grow(request, want):
                if self._give_back_look_ahead():
                    continue
                preempted.append(self._preempt_youngest())
                if preempted[-1] is request:
                    break
            else:
                work.append(_work(request, want))
                left.take(want, missing)
                position += 1
        return work, preempted

    def _add_drafts(self, work: list[Work], depths: Mapping[Request, int], rows_left: int) -> None:
        """Last of all, from what is left: drafts never cost another request its blocks."""
        for part in work:
            depth = min(depths.get(part.request, 0), rows_left)
            if depth and self._grow(part.request, part.num_known + self.lookahead):
                part.most_drafts = depth
                rows_left -= depth

    def _give_back_look_ahead(self) -> bool:
        """Take the blocks back that drafts were given and nobody's next rows need. Whether there were any."""
        found = False
        for request in self.running:
            needed = -(-request.num_tokens // self.block_size)
            if spare := request.blocks[needed:]:
                found = True
                self.holdings.shrink(request, len(spare))
                del request.blocks[needed:]
                self.pool.release(reversed(spare))
        return found

    @property
    def _may_admit(self) -> bool:
        """Whether the first that waits might come in. One that was refused, or had to give its blocks back, waits until
        more is free than there was then, of blocks or of anything else that requests hold."""
        if not self.waiting or len(self.running) == self.max_seqs:
            return False
        if not self.running or self._refused is None or self._refused[0] is not self.waiting[0]:
            return True
        return any(now > then for now, then in zip(self._room(), self._refused[1], strict=True))

    def _room(self) -> Room:
        return self.pool.num_free, *self.holdings.num_free

    def _admit(self, work: list[Work], left: RowsLeft, keep: int) -> None:
        """Newcomers, in the order they came; 'keep' rows are left for drafts."""
        while self._may_admit and left.rows > keep:
            request = self.waiting[0]
            self._adopt(request, self._usable_prefix(request))
            missing = request.num_tokens - request.num_computed
            want = self.holdings.cut(request, left.most(missing, keep), self.running)
            if not want:  # the prompts before it have used up the limit
                self._release(request)
                return
            if not self._grow(request, want):
                self._release(request)
                self._refused = request, self._room()
                return
            if not request.output_ids:
                request.num_cached = request.num_computed
            self.waiting.popleft()
            self.running.append(request)
            work.append(_work(request, want))
            left.take(want, missing)

    def _usable_prefix(self, request: Request) -> Hit:
        """What is known of its beginning, as far as all holdings can go on from there."""
        if request.params.prompt_logprobs is not None:  # these need every prompt row to run
            return Hit([], [])
        hit = self.prefix.lookup(request.ids(0, request.num_tokens))
        return hit.first(self.holdings.usable(hit))

    def _adopt(self, request: Request, hit: Hit) -> None:
        for block in hit.blocks:
            self.pool.retain(block)
        request.blocks.extend(hit.blocks)
        request.chain.extend(hit.keys)
        request.num_computed = len(hit.blocks) * self.block_size
        self.holdings.adopt(request)

    def _grow(self, request: Request, rows: int) -> bool:
        """Give the request the blocks its next rows need, and what goes with them; all of it or nothing."""
        needed = -(-(request.num_computed + rows) // self.block_size) - len(request.blocks)
        if needed <= 0:
            return True
        if needed > self.pool.num_free or not self.holdings.can_grow(request, needed):
            return False
        request.blocks.extend(self.pool.allocate() for _ in range(needed))
        self.holdings.grow(request, needed)
        return True

    def _preempt_youngest(self) -> Request:
        victim = self.running.pop()
        self.num_preempted += 1
        self._release(victim)
        self._refused = victim, self._room()
        self.waiting.appendleft(victim)
        return victim

    def _release(self, request: Request) -> None:
        self.holdings.drop(request)
        self.pool.release(reversed(request.blocks))
        del request.blocks[:]
        request.chain.clear()
        request.num_computed = 0

    def _remember_full_blocks(self, request: Request) -> None:
        size = self.block_size
        for i in range(len(request.chain), request.num_computed // size):
            parent = request.chain[-1] if request.chain else ROOT
            ids = request.ids(i * size, (i + 1) * size)
            request.chain.append(self.prefix.insert(parent, ids, request.blocks[i]))
            if self.prefix.enabled:
                self.holdings.remember(request, i)


def _work(request: Request, rows: int) -> Work:
    start = request.num_computed
    return Work(request, start, rows, start + rows == request.num_tokens)
