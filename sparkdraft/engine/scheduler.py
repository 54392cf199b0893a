"""Decides what each step runs: which requests, how many tokens of each, in which blocks.

A request has num_tokens known ids, of which num_computed are in the cache; it wants the rest computed. A long prompt
gets its tokens in chunks. A decoding request wants one token, which drafts may follow. When blocks run out, the
youngest request gives its blocks back and starts over later. While some requests decode, the prompt tokens of a step
are limited (engine/pace.py). Cache groups (cache/groups.py) are told of everything that happens to a request, and may
refuse blocks, shorten a chunk or shorten a prefix hit. No tensors.

Where steps are launched before the last one is read, the length of a decoding request is known up to a bound
(`Request.next_start`), and its blocks cover the bound. A decision that needs the exact length, such as a preemption,
waits until everything launched has been read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from sparkdraft.cache.blocks import BlockPool
from sparkdraft.cache.groups import CacheGroup, CacheGroups
from sparkdraft.cache.prefix import ROOT, Hit, PrefixCache
from sparkdraft.core import MAX_COUNT, Batch, Request, Work
from sparkdraft.engine.pace import PromptPace

Room = tuple[int, ...]  # free blocks, and the free units of each group


@dataclass(slots=True)
class RowsLeft:
    """The tokens that a step can still run. A request that misses more than one counts as a prompt."""

    rows: int
    prompt_rows: int  # rows that prompts may have, a part of 'rows'

    def most(self, missing: int, keep: int, for_prompts: int = 0) -> int:
        """The tokens of a request that misses this many, if 'keep' are left for others, and so many of those that
        prompts may have for other prompts."""
        room = self.rows - keep
        return max(min(missing, room if missing == 1 else min(room, self.prompt_rows - for_prompts)), 0)

    def take(self, rows: int, missing: int) -> None:
        self.rows -= rows
        self.prompt_rows -= rows if missing > 1 else 0


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        prefix: PrefixCache,
        max_seqs: int,
        max_step_tokens: int,
        lookahead: int = 0,
        groups: Sequence[CacheGroup] = (),
        pace: PromptPace | None = None,
        max_context: int = MAX_COUNT,
    ) -> None:
        """lookahead: positions after its known ids for which a drafting request needs slots. groups: what requests hold
        beside their blocks. pace: limits prompt tokens while others decode; without it a chunk takes all tokens of a
        step. max_context: positions of a request at most; none past it needs a block."""
        assert max_step_tokens >= max_seqs, (
            f"max_step_tokens {max_step_tokens} below max_seqs {max_seqs}: decode rows would starve"
        )
        self.pool = pool
        self.prefix = prefix
        self.block_size = prefix.block_size
        self.max_seqs = max_seqs
        self.max_step_tokens = max_step_tokens
        self.lookahead = lookahead
        self.groups = CacheGroups(groups)
        self.pace = pace
        self.max_context = max_context
        self.num_preempted = 0  # since the start, or since Engine.reset_counts
        prefix.prefers = self.groups.prefers
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first: the order in which requests keep their blocks
        self._refused: tuple[Request, Room] | None = None  # the head of the queue that was refused for lack of blocks

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def decoding(self) -> list[Request]:
        """Running requests that want one token. Only these may draft."""
        return [r for r in self.running if r.decodes]

    def schedule(self, depths: Mapping[Request, int] | None = None) -> Batch | None:
        """Schedules everything running, oldest first; then as many waiting requests as fit; then drafts. None: a
        launched step must be read first.

        depths: drafts wanted after a decoding request's token. Drafts get only spare tokens and free blocks.
        """
        if self._must_read:
            return None
        depths = depths or {}
        left = self._rows_of_a_step()
        continued = self._continue(left)
        if continued is None:
            return None
        work, preempted = continued
        if not preempted:
            # Drafts give up their rows if a waiting request would otherwise get none.
            wanted = sum(depths.values())
            self._admit(work, left, keep=wanted if wanted < left.rows else 0)
        self._add_drafts(work, depths, left.rows)
        assert work or not self.has_work, "a request is waiting and nothing can run: the pool is too small for one"
        return Batch(work, preempted)

    def commit(self, request: Request, num_rows: int) -> None:
        """Advances a request by 'num_rows' committed tokens, and adds blocks that became full to the prefix cache."""
        request.num_computed += num_rows
        self._remember_full_blocks(request)
        self.groups.advance(request)

    @property
    def only_decoding(self) -> bool:
        """Return whether every running request wants one token and no waiting request can be admitted."""
        return bool(self.running) and not self._may_admit and len(self.decoding()) == len(self.running)

    @property
    def _must_read(self) -> bool:
        """Whether a request may have reached the end of its context, or all are sure to end in launched steps."""
        all_end = bool(self.running)
        for request in self.running:
            if request.most_unread and request.next_start >= self.max_context:
                return True
            all_end = all_end and len(request.output_ids) + request.least_unread >= request.max_output
        return all_end and not self._may_admit

    def reserve(self, rows: int) -> bool:
        """Reserves blocks for this many tokens of every decoding request, if that preempts nobody. If it cannot, what
        only drafts need is given back."""
        if all(self._grow(request, rows) for request in self.decoding()):
            return True
        self._give_back_look_ahead()
        return False

    def finish(self, request: Request) -> None:
        """Removes a request, whether it runs or waits, and releases its blocks."""
        if request in self.running:
            self._refused = None  # what was kept free for it is free for others, whether or not more is free in all
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        self._release(request)

    def _rows_of_a_step(self) -> RowsLeft:
        num_decoding = len(self.decoding())
        if self.pace is None or not (self.waiting or num_decoding < len(self.running)):
            return RowsLeft(self.max_step_tokens, self.max_step_tokens)
        return RowsLeft(self.max_step_tokens, self.pace.most_rows(num_decoding))

    def _continue(self, left: RowsLeft) -> tuple[list[Work], list[Request]] | None:
        """Tokens for running requests: (work, preempted requests). Prompts share their limit. None: a request would
        have to be preempted, and launched steps that have not been read may write to its blocks."""
        work: list[Work] = []
        preempted: list[Request] = []
        position = 0
        while position < len(self.running):
            request = self.running[position]
            if request.decodes and self._grow(request, 1):
                work.append(Work(request, request.num_computed, 1, True))
                left.rows -= 1
                position += 1
                continue
            later = len(self.running) - position - 1  # each of these is sure of one row, whatever this chunk wants
            missing = max(request.num_tokens - request.num_computed, 1)
            kept = self._kept_for_shorter(position, missing, left.prompt_rows // 2) if missing > 1 else 0
            want = self.groups.cut(request, left.most(missing, later, kept), self.running)
            if not want:  # earlier prompts have used up the limit
                position += 1
                continue
            while not self._grow(request, want):
                if any(r.most_unread for r in self.running):
                    return None
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

    def _kept_for_shorter(self, position: int, missing: int, most: int) -> int:
        """Returns how many prompt tokens of a step are left for shorter prompts behind this one, so that they do not
        wait for a long one: at most 'most', so that it goes on meanwhile."""
        behind = (r.num_tokens - r.num_computed for r in self.running[position + 1 :])
        arriving = (r.num_tokens for r in self.waiting) if self._may_admit else ()
        kept = 0
        for others in (*(n for n in behind if n > 1), *islice(arriving, self.max_seqs - len(self.running))):
            kept += others if others < missing else 0
            if kept >= most:
                return most
        return kept

    def _add_drafts(self, work: list[Work], depths: Mapping[Request, int], rows_left: int) -> None:
        """Adds drafts from what is left: they never cost another request its blocks."""
        for part in work:
            depth = min(depths.get(part.request, 0), rows_left)
            if depth and self._grow(part.request, part.num_known + self.lookahead):
                part.most_drafts = depth
                rows_left -= depth

    def _give_back_look_ahead(self) -> bool:
        """Releases the blocks that only drafts of later steps need. Returns whether there were any."""
        found = False
        for request in self.running:
            written = min(max(request.num_tokens, request.next_start + 1), self.max_context)
            needed = -(-written // self.block_size)
            if spare := request.blocks[needed:]:
                found = True
                self.groups.shrink(request, len(spare))
                del request.blocks[needed:]
                request.sent_blocks = min(request.sent_blocks, needed)
                self.pool.release(reversed(spare))
        return found

    @property
    def _may_admit(self) -> bool:
        """Whether the first waiting request might be admitted. One that was refused or preempted waits until more is
        free than there was then, of blocks or of a group."""
        if not self.waiting or len(self.running) == self.max_seqs:
            return False
        if not self.running or self._refused is None or self._refused[0] is not self.waiting[0]:
            return True
        return any(now > then for now, then in zip(self._room(), self._refused[1], strict=True))

    def _room(self) -> Room:
        return self.pool.num_free, *self.groups.num_free

    def _admit(self, work: list[Work], left: RowsLeft, keep: int) -> None:
        """Admits waiting requests in order of arrival; 'keep' tokens are left for drafts."""
        while self._may_admit and left.rows > keep:
            request = self.waiting[0]
            if not left.most(request.num_tokens, keep):  # earlier prompts have used up the limit
                return
            self._adopt(request, self._cached_prefix(request))
            missing = request.num_tokens - request.num_computed
            most = left.most(missing, keep)
            want = self.groups.cut(request, most, self.running)
            has_room = not self.running or self.groups.admits(request, most, self.running)
            if not has_room or not self._grow(request, want):
                self._release(request)
                self._refused = request, self._room()
                return
            if request.num_cached is None:  # after a preemption, what it finds is its own work
                request.num_cached = request.num_computed
            self.waiting.popleft()
            self.running.append(request)
            work.append(_work(request, want))
            left.take(want, missing)

    def _cached_prefix(self, request: Request) -> Hit:
        if request.params.prompt_logprobs is not None:  # these need every prompt row to run
            return Hit([], [])
        return self.prefix.lookup_waiting(request, request.ids, request.num_tokens)

    def _adopt(self, request: Request, found: Hit) -> None:
        """Gives a request the cached prefix, as far as all groups can continue from it."""
        hit = found.first(self.groups.usable(found))
        for block in hit.blocks:
            self.pool.retain(block)
        request.blocks.extend(hit.blocks)
        request.chain.extend(hit.keys)
        request.num_computed = len(hit.blocks) * self.block_size
        self.groups.adopt(request, len(found.blocks))

    def _grow(self, request: Request, rows: int) -> bool:
        """Gives a request the blocks and groups that its next tokens need: all of them or none."""
        stop = request.next_start + rows
        if stop <= len(request.blocks) * self.block_size:
            return True
        stop = min(stop, self.max_context)
        needed = -(-stop // self.block_size) - len(request.blocks)
        if needed <= 0:
            return True
        if needed > self.pool.num_free or not self.groups.can_grow(request, needed):
            return False
        request.blocks.extend(self.pool.allocate() for _ in range(needed))
        self.groups.grow(request, needed)
        return True

    def _preempt_youngest(self) -> Request:
        victim = self.running[-1]
        self._release(victim)  # if this raises, it is still known
        self.running.pop()
        self.num_preempted += 1
        self._refused = victim, self._room()
        self.waiting.appendleft(victim)
        return victim

    def _release(self, request: Request) -> None:
        self.groups.drop(request)
        self.pool.release(reversed(request.blocks))
        del request.blocks[:]
        request.chain.clear()
        request.num_computed = 0

    def _remember_full_blocks(self, request: Request) -> None:
        size = self.block_size
        if request.num_computed < (len(request.chain) + 1) * size:
            return
        for i in range(len(request.chain), request.num_computed // size):
            parent = request.chain[-1] if request.chain else ROOT
            ids = request.ids(i * size, (i + 1) * size)
            request.chain.append(self.prefix.insert(parent, ids, request.blocks[i]))
            if self.prefix.enabled:
                self.groups.remember(request, i)


def _work(request: Request, rows: int) -> Work:
    start = request.num_computed
    return Work(request, start, rows, request.decodes or start + rows == request.num_tokens)
