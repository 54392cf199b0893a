"""Memory and speed of one configuration: the plan that `serve` would make, with predicted speeds.

Memory comes from plan/resolve.py. Speed comes from roofline.py, with a range: the engine's losses at their best and
worst, and the error of the model itself. Drafted speed depends on the text: it is predicted for three classes, or for
an acceptance that the user has measured. No torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.drafters.base import DraftConfig
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.sizes import model_sizes
from sparkdraft.operate.forecast.machine import Machine
from sparkdraft.operate.forecast.roofline import DraftPass, Load, Losses, Seconds, Target, step
from sparkdraft.plan.memory import MemoryPlan
from sparkdraft.plan.resolve import ITEMSIZE, MAX_SEQS, Plan, resolve
from sparkdraft.plan.weight_formats import (
    AT_LOAD,
    EIGHT_BITS,
    WeightFormats,
    bytes_by_format,
    drafter_at_load,
    stored_bytes,
)
from sparkdraft.speculation.budget import depth_choices
from sparkdraft.speculation.costs import expected_tokens


class Chances(NamedTuple):
    """The chance of each draft, once reached, at which a step of 'depth' drafts commits so many tokens on average."""

    usual: float
    low: float
    high: float


# Reports of users by class of text: the median, and what a tenth of the reports are below or above
# (tests/operate/forecast/figures.json has them). Authors of drafters report more on benchmarks.
CLASSES = {
    "prose": Chances(0.60, 0.49, 0.78),
    "dialogue": Chances(0.73, 0.61, 0.82),
    "code": Chances(0.82, 0.67, 0.90),
}
MIDDLE = "dialogue"
MANY = 8  # streams from which arithmetic and batching make a prediction as uncertain as experts do


@dataclass(frozen=True)
class Question:
    """One configuration on one machine under one load."""

    model: ModelConfig
    machine: Machine
    config: EngineConfig  # as `serve` would get it
    formats: WeightFormats | None = None  # of the model's matrices; None: the one that the engine keeps on this machine
    drafter: DraftConfig | None = None
    streams: int = 1
    context: int = 4096  # tokens of each stream
    chances: Mapping[str, float] | None = None  # as measured, by class of text; None: CLASSES
    engine: str = "sparkdraft"  # whose losses are reckoned with
    names: Collection[str] = ()  # of the tensors in the drafter's file, where that is at hand


class Range(NamedTuple):
    expected: float
    low: float
    high: float


NOTHING = Range(0.0, 0.0, 0.0)


class Drafted(NamedTuple):
    """The prediction for one class of text at its best depth."""

    chance: float
    depth: int  # 0: plain steps are faster
    tokens: float  # per step
    speed: Range  # tokens per second, all streams together


class Forecast:
    """The answer to a question. Raises UserError if it does not fit or cannot run."""

    def __init__(self, question: Question) -> None:
        self.question = question
        model, machine = question.model, question.machine
        asked = question.config.drafter_weights
        self.caps = drafter_at_load(question.drafter.caps(question.names), asked) if question.drafter else None
        on_gpu = machine.hardware.device == "cuda"
        self.held = stored_bytes(model, question.formats) if question.formats and on_gpu else None
        self.plan = self._planned(question.config)
        asked_seqs = replace(question.config, max_seqs=self.plan.max_seqs)
        args = (asked_seqs, model, machine.hardware, machine.native_problem)
        self.without: Plan = resolve(*args, None, self.held) if self.caps else self.plan  # the same, and no drafter
        coded = on_gpu or self.plan.weights == EIGHT_BITS  # not where the CPU kernels do not run
        self.formats = (question.formats if coded else None) or WeightFormats(self.plan.weights)
        itemsize = ITEMSIZE[self.plan.dtype]
        self.target = Target.of(model, self.formats, self.plan.kv, itemsize)
        self.drafter = None
        if caps := self.caps:
            head, kept = model_sizes(model).head, (itemsize, self.plan.weights, self.plan.kv)
            self.drafter = DraftPass.of(caps, head, caps.own_head, *kept, AT_LOAD.get(asked, ""))
        measured = question.chances
        self.chances = CLASSES if measured is None else {name: Chances(c, c, c) for name, c in measured.items()}

    def _planned(self, config: EngineConfig) -> Plan:
        """Plan as `serve` would. For more streams than it runs by default, as with `--max-seqs`, plan for that number,
        or for as many as fit if each keeps a state and a plan for all is refused."""
        question, hardware = self.question, self.question.machine.hardware

        def plan(max_seqs: int) -> Plan:
            given = replace(config, max_seqs=max_seqs)
            return resolve(given, question.model, hardware, question.machine.native_problem, self.caps, self.held)

        if config.max_seqs or question.streams <= MAX_SEQS[hardware.device]:
            return plan(config.max_seqs)
        try:
            return plan(question.streams)
        except UserError:
            best, low, high = plan(0), 0, question.streams
        while high - low > 1:
            middle = (low + high) // 2
            try:
                found = plan(middle)
            except UserError:
                high = middle
                continue
            if tokens_that_fit(found, config.memory_fraction) >= middle * question.context:
                best, low = found, middle
            else:
                high = middle
        return best

    # ---- memory

    @cached_property
    def memory(self) -> dict[str, int]:
        """Bytes by use: the parts of the plan's sum, with the drafter's share taken out of each."""
        plan, bare = self.plan.memory, self.without.memory
        rows = {f"weights, {fmt}": size for fmt, size in self.weights.items()}
        rows["tables of rotations"] = bare.weights - sum(rows.values())
        rows["K/V of the target"] = plan.kv - self._drafter_kv
        if self.caps:
            rows |= {"drafter's weights": plan.weights - bare.weights, "drafter's K/V": self._drafter_kv}
        for each in fields(MemoryPlan):
            if each.name not in ("weights", "kv", "free"):
                rows[LABELS.get(each.name, each.name)] = getattr(plan, each.name)
        return {name: size for name, size in rows.items() if size}

    @property
    def weights(self) -> dict[str, int]:
        """Bytes of the target's weights, by format."""
        if self.held and self.question.formats:
            return bytes_by_format(self.question.model, self.formats)
        return {self.plan.weights: self.without.memory.weights}

    @property
    def head_room(self) -> int:
        """Bytes that stay free: the system's own, where CPU and GPU share one memory."""
        return self.plan.memory.free - self.usable

    @property
    def usable(self) -> int:
        return int(self.plan.memory.free * self.question.config.memory_fraction)

    @property
    def max_tokens(self) -> int:
        """Tokens of context that fit over all streams. A plan itself may ask for fewer: it never holds more than a full
        context for each of max_seqs requests."""
        return tokens_that_fit(self.plan, self.question.config.memory_fraction)

    @property
    def max_streams(self) -> int:
        """Streams that fit. Pages of windows and recurrent states are kept for max_seqs requests at most."""
        fits = self.max_tokens // self.question.context
        return min(fits, self.plan.max_seqs) if self.plan.windows or self.target.state else fits

    def running(self) -> int:
        """The number of asked streams that run at once; the others wait."""
        return min(self.question.streams, self.max_streams)

    @property
    def holds_all(self) -> bool:
        """The asked streams fit at once."""
        return self.max_streams >= self.question.streams

    @property
    def _drafter_kv(self) -> int:
        if not self.caps:
            return 0
        per_block = [plan.memory.kv // max(plan.num_blocks, 1) for plan in (self.plan, self.without)]
        return (per_block[0] - per_block[1]) * self.plan.num_blocks

    # ---- speed

    def seconds(self, depth: int = 0, losses: Losses | None = None) -> Seconds:
        """The predicted seconds of a step of the streams that run at once."""
        question = self.question
        load = Load(max(self.running(), 1), question.context, depth)
        found = losses or question.machine.losses(question.engine).expected
        return step(question.machine.rates, found, self.target, load, self.drafter)

    def speed(self, depth: int = 0, tokens: float = 1.0) -> Range:
        """Tokens per second of all streams if a step commits so many tokens of each; 0 if not one stream fits."""
        engine, count = self.question.machine.losses(self.question.engine), self.running()
        if not count:
            return NOTHING
        error = engine.error.experts if self.target.experts or count >= MANY else engine.error.dense
        expected, low, high = (
            count * tokens / self.seconds(depth, losses).total for losses in (engine.expected, engine.low, engine.high)
        )
        return Range(expected, low * (1 - error), high * (1 + error))

    @cached_property
    def plain(self) -> Range:
        return self.speed()

    @property
    def depths(self) -> list[int]:
        """The depths that the engine chooses from, without 0."""
        fixed = self.question.config.num_draft
        if not self.caps or fixed == 0:
            return []
        return [fixed] if fixed else depth_choices(self.caps.max_depth, chain=self.caps.chain)[1:]

    def drafted(self, chance: float) -> Drafted:
        best = Drafted(chance, 0, 1.0, self.plain)
        tokens = expected_tokens([chance] * max(self.depths, default=0))
        for depth in self.depths:
            speed = self.speed(depth, tokens[depth])
            if speed.expected > best.speed.expected:
                best = Drafted(chance, depth, tokens[depth], speed)
        return best

    @cached_property
    def by_class(self) -> dict[str, Drafted]:
        """Predictions by class of text, each at its best depth, with the range of its chances."""
        found = {}
        for name, chances in self.chances.items() if self.depths else ():
            usual, low, high = map(self.drafted, chances)
            speed = Range(usual.speed.expected, low.speed.low, high.speed.high)
            found[name] = usual._replace(speed=speed)
        return found

    @property
    def middle(self) -> Drafted | None:
        """The prediction for the class that single numbers are given for."""
        found = list(self.by_class.values())
        return self.by_class.get(MIDDLE) or (found[0] if found else None)

    def break_even(self, depth: int) -> float:
        """Tokens per step above which drafting so deep is faster than plain steps."""
        return self.seconds(depth).total / self.seconds().total

    @cached_property
    def least_chance(self) -> float | None:
        """The lowest chance of each draft at which some depth is faster than plain steps; None if there is none."""
        cost = {depth: self.break_even(depth) for depth in self.depths}
        for percent in range(1, 100):
            tokens = expected_tokens([percent / 100] * max(cost, default=0))
            if any(tokens[depth] > value for depth, value in cost.items()):
                return percent / 100
        return None


def tokens_that_fit(plan: Plan, memory_fraction: float) -> int:
    """The tokens of context that fit over all streams, beside everything else in the plan."""
    if not plan.num_blocks or not plan.memory.kv:  # all layers slide: requests are bound by their windows' pages
        return plan.max_seqs * plan.max_model_len
    left = int(plan.memory.free * memory_fraction) - (plan.memory.total - plan.memory.kv)
    return left // (plan.memory.kv // plan.num_blocks) * plan.block_size


LABELS = {
    "pages": "pages of exact rows and windows",
    "states": "recurrent states",
    "scratch": "a step's scratch",
    "graphs": "recorded steps",
}


def chance_of(tokens: float, depth: int) -> float:
    """The chance of each draft, once reached, at which a step of so many drafts commits so many tokens."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens([middle] * depth)[-1] < tokens else (low, middle)
    return middle
