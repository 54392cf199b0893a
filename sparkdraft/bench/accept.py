"""How many drafts the target accepts, by class of prompt, temperature and context, and what that is worth in speed.

Every class runs as one batch, and rows are the engine's own counts of its steps: 'all' is their sum, never a mean of
means. Position k is scored where every draft before it was accepted; what was drafted after a rejected id says nothing.
prompts.jsonl was written for this project and is never trained on. Loading and printing belong to cli/bench.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

from sparkdraft.bench.perplexity import HELDOUT
from sparkdraft.core import SamplingParams
from sparkdraft.llm import LLM
from sparkdraft.spec.stats import SpecStats

PROMPTS = Path(__file__).with_name("prompts.jsonl")
ALL = "all"
EIGHTHS = " ▏▎▍▌▋▊▉█"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f3c8d")
FEW = 5  # steps: a share of fewer is chance, and not drawn


@dataclass(slots=True)
class Row:
    """What one class counted, or all of them together."""

    prompts: int = 0
    prompt_tokens: int = 0
    tokens: int = 0  # written
    stats: SpecStats = field(default_factory=SpecStats)

    def add(self, other: Row) -> None:
        self.prompts += other.prompts
        self.prompt_tokens += other.prompt_tokens
        self.tokens += other.tokens
        self.stats.merge(other.stats)

    def as_dict(self) -> dict[str, object]:
        """Times are left out: in a batch each request is charged with the whole step."""
        counts = {key: value for key, value in self.stats.as_dict().items() if not key.endswith("_ms")}
        ours = {"prompts": self.prompts, "prompt_tokens": self.prompt_tokens, "tokens": self.tokens}
        reached = {"per_position_reached": self.stats.per_position_reached, "per_position": self.stats.per_position()}
        return ours | {"num_plain_steps": self.stats.num_plain_steps} | counts | reached


@dataclass(slots=True)
class Pace:
    """Plain and drafted decoding of the same prompts, one stream: tokens and seconds of each, after the first token."""

    prompts: int = 0
    same: int = 0  # prompts whose two texts are one
    tokens: list[int] = field(default_factory=lambda: [0, 0])  # plain, auto
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add(self, other: Pace) -> None:
        self.prompts += other.prompts
        self.same += other.same
        self.tokens = [a + b for a, b in zip(self.tokens, other.tokens, strict=True)]
        self.seconds = [a + b for a, b in zip(self.seconds, other.seconds, strict=True)]

    def as_dict(self) -> dict[str, float]:
        plain, auto = (t / s if s else 0.0 for t, s in zip(self.tokens, self.seconds, strict=True))
        counts: dict[str, float] = {"prompts": self.prompts, "same_text": self.same, "tokens": sum(self.tokens)}
        return counts | {"plain_tok_s": plain, "auto_tok_s": auto, "ratio": auto / plain if plain else 0.0}


# ---- measuring


def read_prompts(per_class: int) -> dict[str, list[str]]:
    """Class -> its first prompts, 0 for all of them."""
    classes: dict[str, list[str]] = {}
    for line in PROMPTS.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        classes.setdefault(entry["class"], []).append(entry["prompt"])
    return {name: prompts[: per_class or None] for name, prompts in classes.items()}


def chat_prompts(llm: LLM, prompts: Sequence[str], context: int = 0) -> list[list[int]]:
    """Ids of each prompt in the chat template, after about 'context' tokens of ordinary text."""
    before = ""
    if context:
        ids = llm.tokenizer.encode(HELDOUT.read_text(encoding="utf-8"), add_special=False)
        cut = (ids * (context // len(ids) + 1))[:context]
        before = b"".join(map(llm.tokenizer.token_bytes, cut)).decode("utf-8", "ignore") + "\n\n"
    return [llm.chat_ids([{"role": "user", "content": before + prompt}]) for prompt in prompts]


def measure(llm: LLM, prompts: list[list[int]], params: SamplingParams, done: Callable[[], None]) -> Row:
    """All prompts in one batch; done() is called after each. Counts are what the engine's own totals grew by."""
    engine, before = llm.engine, SpecStats()
    before.merge(engine.drafting.total)
    row = Row(len(prompts), sum(map(len, prompts)))
    for ids in prompts:
        engine.add(ids, params)
    while engine.has_work:
        for piece in engine.step():
            row.tokens += len(piece.ids)
            if piece.finish:
                done()
    total = engine.drafting.total
    row.stats = SpecStats(total.num_plain_steps - before.num_plain_steps, total.steps - before.steps)
    return row


def pace(
    llm: LLM, prompts: list[list[int]], plain: SamplingParams, auto: SamplingParams, done: Callable[[], None]
) -> Pace:
    """Each prompt plainly, then with drafts, so that a machine that slows down slows both."""
    result = Pace(len(prompts))
    for ids in prompts:
        texts = []
        for i, params in enumerate((plain, auto)):
            text, seconds = decode(llm, ids, params)
            result.tokens[i] += len(text) - 1
            result.seconds[i] += seconds
            texts.append(text)
        result.same += texts[0] == texts[1]
        done()
    return result


def decode(llm: LLM, ids: list[int], params: SamplingParams) -> tuple[list[int], float]:
    """What one stream wrote, and the seconds from its first token to its last."""
    text: list[int] = []
    first = last = 0.0
    for piece in llm.stream(ids, params):
        last = time.perf_counter()
        first = first or last
        text += piece.ids
    return text, last - first


# ---- showing


def table(rows: dict[str, Row]) -> str:
    lines = ["class     prompts  tokens  steps  length   rate    1st    2nd    3rd"]
    for name, row in rows.items():
        stats = row.stats
        rates = [stats.draft_acceptance_rate, *(stats.per_position() + [None] * 3)[:3]]
        length = f"{stats.mean_acceptance_length:6.2f}" if stats.mean_acceptance_length else "     -"
        shares = "  ".join("    -" if rate is None else f"{rate:5.1%}" for rate in rates)
        lines.append(f"{name:<9} {row.prompts:7}  {row.tokens:6}  {stats.num_spec_steps:5}  {length}  {shares}")
    return "\n".join(lines)


def speed_table(paces: dict[str, Pace]) -> str:
    lines = ["class     prompts  plain tok/s  auto tok/s  ratio  same text"]
    for name, p in paces.items():
        d = p.as_dict()
        speeds = f"{d['plain_tok_s']:11.1f}  {d['auto_tok_s']:10.1f}  {d['ratio']:5.2f}"
        lines.append(f"{name:<9} {p.prompts:7}  {speeds}  {p.same:3} of {p.prompts}")
    return "\n".join(lines)


def bars(stats: SpecStats, width: int = 40) -> str:
    """Acceptance by position as bars of text, each with the steps that reached it."""
    lines = ["position  accepted where reached"]
    for i, (rate, reached) in enumerate(zip(stats.per_position(), stats.per_position_reached, strict=True)):
        full, part = divmod(round((rate or 0.0) * width * 8), 8)
        bar = ("█" * full + EIGHTHS[part]).rstrip()
        share = "    -" if rate is None else f"{rate:6.1%}"
        lines.append(f"{i + 1:8}  {share} {bar:<{width}} {reached:6} steps")
    return "\n".join(lines)


def svg(panels: dict[str, dict[str, Row]]) -> str:
    """One panel a title, below each other: acceptance by position, one line a class."""
    width, height = 760, 340
    body = "".join(_panel(title, rows, i * height) for i, (title, rows) in enumerate(panels.items()))
    size = f'width="{width}" height="{height * len(panels)}" viewBox="0 0 {width} {height * len(panels)}"'
    style = 'font-family="sans-serif" font-size="12" fill="#222"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}><rect width="100%" height="100%" fill="#fff"/>{body}</svg>\n'


def _panel(title: str, rows: dict[str, Row], top: int) -> str:
    left, right, floor, tall = 60, 610, top + 290, 240
    deepest = max([len(row.stats.per_position()) for row in rows.values()] + [2])
    x = [left + (right - left) * k / (deepest - 1) for k in range(deepest)]
    parts = [f'<text x="{left}" y="{top + 28}" font-size="14" font-weight="bold">{escape(title)}</text>']
    for tenth in range(0, 11, 2):
        y = floor - tall * tenth / 10
        parts.append(f'<path d="M{left} {y}H{right}" stroke="{"#222" if tenth == 0 else "#ddd"}"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{tenth * 10} %</text>')
    parts += [f'<text x="{at:.1f}" y="{floor + 18}" text-anchor="middle">{k + 1}</text>' for k, at in enumerate(x)]
    note = f"position of the draft (share accepted where reached; points of fewer than {FEW} steps left out)"
    parts.append(f'<text x="{(left + right) / 2}" y="{floor + 38}" text-anchor="middle">{note}</text>')
    for i, (name, row) in enumerate(rows.items()):
        shares = zip(x, row.stats.per_position(), row.stats.per_position_reached, strict=False)
        points = [(at, floor - tall * share) for at, share, steps in shares if share is not None and steps >= FEW]
        look = (
            'stroke="#000" stroke-width="3"'
            if name == ALL
            else f'stroke="{COLOURS[i % len(COLOURS)]}" stroke-width="1.5"'
        )
        line = " ".join(f"{at:.1f},{y:.1f}" for at, y in points)
        parts.append(f'<polyline points="{line}" fill="none" {look}/>')
        y = top + 62 + 20 * i
        parts.append(f'<path d="M{right + 20} {y}h24" {look}/><text x="{right + 52}" y="{y + 4}">{escape(name)}</text>')
    return "".join(parts)
