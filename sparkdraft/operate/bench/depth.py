"""Compares fixed draft depths with the depth that the engine chooses, by class of prompt and number of streams.

All depths of a group of prompts run in turn, so that a machine that slows down slows all of them. Each runs a few
tokens first, so that no compiling is timed. Only steps in which all streams decode count. With a synthetic acceptance
(synthetic.py) the same outcomes apply at every depth, so a sweep works for any machine and any model's shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields

from sparkdraft.core import AUTO, SamplingParams, UserError
from sparkdraft.engine.engine import Engine
from sparkdraft.operate.bench.accept import ALL
from sparkdraft.operate.bench.synthetic import TABLE_ROWS, Acceptance, Outcomes, impose

Prompts = dict[str, list[list[int]]]  # class -> ids of its prompts
Report = Callable[[int, int], None]
WARM_UP = 8  # tokens of a run that is not timed


@dataclass(slots=True)
class Cell:
    """The counts of one class at one number of streams and one depth."""

    kind: str  # class of prompts
    streams: int
    depth: int  # AUTO: chosen by the engine every step
    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    drafts: int = 0  # that were verified
    same_text: int = 0  # prompts whose text begins as the plain one does, as far as both were written
    prompts: int = 0
    drafter_steps: int = 0  # of each stream, in which the drafter drafted, not n-grams
    drafter_drafts: int = 0  # that it drafted in them

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def length(self) -> float:
        """Tokens per step and stream."""
        return self.tokens / (self.steps * self.streams) if self.steps else 0.0

    @property
    def rows(self) -> float:
        """Verified tokens per step and stream."""
        return 1 + self.drafts / (self.steps * self.streams) if self.steps else 0.0

    def add(self, other: Cell) -> None:
        for each in fields(self):
            if each.name not in ("kind", "streams", "depth"):
                setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def as_dict(self) -> dict[str, object]:
        named = asdict(self) | {"depth": "auto" if self.depth == AUTO else self.depth}
        return named | {"tok_s": round(self.tok_s, 2), "length": round(self.length, 3), "rows": round(self.rows, 3)}


class DepthBench:
    def __init__(self, engine: Engine, output_len: int, temperature: float, acceptance: Acceptance | None) -> None:
        self.engine, self.output_len, self.temperature = engine, output_len, temperature
        self.acceptance = acceptance
        engine.scheduler.pace = None  # all streams begin together
        self._synthetic = impose(engine, acceptance) if acceptance else None
        if acceptance:
            engine.warm_up()  # graphs keep the acceptance that they were made with

    def check(self, prompts: Sequence[list[int]], streams: int) -> None:
        """Raise UserError if so many streams cannot run at once: some would wait, and speeds would be of fewer."""
        plan, longest = self.engine.plan, max(map(len, prompts))
        need = longest + self._max_tokens(self.output_len)
        asked = f"{streams} streams at once of a prompt of {longest} tokens and --output-len {self.output_len}"
        if need > plan.max_model_len:
            raise UserError(f"{asked} need a context of {need} tokens; {plan.max_model_len} is the most: ask for less")
        if streams > plan.max_seqs:
            raise UserError(f"{asked} are more than the {plan.max_seqs} that run at once: ask for fewer")
        blocks = streams * -(-need // plan.block_size)
        if blocks > plan.num_blocks:
            held = f"need a KV cache of {blocks * plan.block_size} tokens; it holds {plan.num_blocks * plan.block_size}"
            raise UserError(f"{asked} {held}: ask for fewer, or raise --kv-tokens")

    def sweep(self, prompts: Prompts, streams: Sequence[int], depths: Sequence[int], report: Report) -> list[Cell]:
        """Return a cell per class, number of streams and depth, and 'all' for the sum of the classes. depths: the first
        is 0."""
        cells: list[Cell] = []
        groups = [(kind, n, group) for n in streams for kind, ids in prompts.items() for group in _groups(ids, n)]
        warm = set[int]()
        for done, (kind, n, group) in enumerate(groups):
            plain: list[list[int]] = []
            for depth in depths if n not in warm else ():
                self._run(kind, group, depth, WARM_UP)
            warm.add(n)
            for depth in depths:
                cell, texts = self._run(kind, group, depth, self.output_len)
                plain = plain or texts
                cell.same_text = sum(_begins_alike(a, b) for a, b in zip(texts, plain, strict=True))
                for name in (kind, ALL):
                    self._cell(cells, name, n, depth).add(cell)
            report(done + 1, len(groups))
        return sorted(cells, key=lambda cell: (streams.index(cell.streams), cell.kind == ALL))  # stable

    def _run(self, kind: str, group: list[list[int]], depth: int, length: int) -> tuple[Cell, list[list[int]]]:
        """length: tokens that each stream writes at least."""
        engine, cell = self.engine, Cell(kind, len(group), depth, prompts=len(group))
        most = self._max_tokens(length)
        params = SamplingParams(most, temperature=self.temperature, seed=0, num_draft=depth, ignore_eos=True)
        texts: dict[str, list[int]] = {engine.add(ids, params): [] for ids in group}
        while not all(texts.values()):
            for piece in engine.step():
                texts[piece.request_id] += piece.ids
        begun = {name: len(ids) for name, ids in texts.items()}
        self._start(len(group), depth)
        before, begin = engine.drafting.so_far(), time.perf_counter()
        while min(len(ids) - begun[name] for name, ids in texts.items()) < length:
            pieces = engine.step()
            for piece in pieces:
                texts[piece.request_id] += piece.ids
            cell.steps += bool(pieces)
            if any(piece.finish for piece in pieces):
                break
        cell.seconds = time.perf_counter() - begin
        after = engine.drafting.so_far()
        cell.drafts = after.num_draft_tokens - before.num_draft_tokens
        own = (now - then for now, then in zip(after.by_drafter, before.by_drafter, strict=True))
        cell.drafter_steps, cell.drafter_drafts = own
        cell.tokens = sum(len(ids) - begun[name] for name, ids in texts.items())
        if self._synthetic:
            self._synthetic.stop()
        for name in texts:
            engine.abort(name)
        while engine.has_work:
            engine.step()
        return cell, list(texts.values())

    def _max_tokens(self, length: int) -> int:
        """The most tokens of a stream, which may be ahead of the slowest one."""
        return 2 * (length + self.engine.drafting.max_depth + 1)

    def _start(self, streams: int, depth: int) -> None:
        if self._synthetic and self.acceptance and depth:
            # As many steps as the deepest takes have the mean that was asked for; more of the same kind follow.
            steps = self.acceptance.steps(self.output_len)
            seeds = range(-(-2 * self.output_len // steps))
            parts = [self.acceptance.outcomes(steps, streams, seed) for seed in seeds]
            self._synthetic.start(Outcomes.joined(parts, TABLE_ROWS))

    @staticmethod
    def _cell(cells: list[Cell], kind: str, streams: int, depth: int) -> Cell:
        for cell in cells:
            if (cell.kind, cell.streams, cell.depth) == (kind, streams, depth):
                return cell
        cells.append(Cell(kind, streams, depth))
        return cells[-1]


def table(cells: Sequence[Cell]) -> str:
    """Tabulate tokens per second by depth, the best fixed depth, and the engine's own choice as a share of it."""
    depths = list(dict.fromkeys(cell.depth for cell in cells))
    heads = "".join(f"{'auto' if d == AUTO else d:>9}" for d in depths)
    lines = [f"streams  class     {heads}   best  auto / best  auto / plain  auto: rows  tokens"]
    for streams, kind in dict.fromkeys((cell.streams, cell.kind) for cell in cells):
        found = {cell.depth: cell for cell in cells if (cell.streams, cell.kind) == (streams, kind)}
        speeds = "".join(f"{found[d].tok_s:9.1f}" for d in depths)
        best = max((d for d in depths if d != AUTO), key=lambda d: found[d].tok_s)
        auto, plain = found[AUTO], found[0]
        shares = f"{auto.tok_s / found[best].tok_s:11.2f}  {auto.tok_s / plain.tok_s:12.2f}"
        lines.append(f"{streams:7}  {kind:<10}{speeds}  {best:5}  {shares}  {auto.rows:10.2f}  {auto.length:6.2f}")
    return "\n".join(lines)


def _groups(prompts: list[list[int]], size: int) -> list[list[list[int]]]:
    """Split the prompts into groups of this size; the last group is filled up from the first prompts."""
    num = max(-(-len(prompts) // size), 1)
    return [[prompts[(i * size + j) % len(prompts)] for j in range(size)] for i in range(num)]


def _begins_alike(a: Sequence[int], b: Sequence[int]) -> bool:
    both = min(len(a), len(b))
    return list(a[:both]) == list(b[:both])
