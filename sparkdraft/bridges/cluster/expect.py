"""Predicts what fits on several machines that share each matrix (tensor parallel), and how fast it is.

The sums are those of operate/forecast/forecast.py: a group is one machine with as many times the memory, bandwidth and
arithmetic, which waits for two all-reduces per layer and two per step (the embedding and the logits).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import log2

from sparkdraft.core import UserError
from sparkdraft.operate.forecast.forecast import NOTHING, Drafted, Forecast, Question, Range
from sparkdraft.operate.forecast.machine import Machine
from sparkdraft.operate.forecast.roofline import Rates

ENGINE = "vllm"
PER_LAYER, PER_STEP = 2, 2  # all-reduces
NO_GAIN = 1.1  # speed-up below which more machines are not worth it
ITEMSIZE = 2  # bytes per added number


@dataclass(frozen=True, slots=True)
class Link:
    """A network between machines, by the time of an all-reduce between two of them."""

    fixed: float  # seconds of the smallest
    per_byte: float  # further seconds per byte
    origin: str  # how this is known, in words

    def all_reduce(self, machines: int, size: float) -> float:
        """Seconds between so many machines: the fixed part grows as a tree's depth, the rest as a ring's bytes."""
        if machines == 1:
            return 0.0
        return self.fixed * (1 + log2(machines)) / 2 + self.per_byte * 2 * (machines - 1) / machines * size


LINKS = {
    "roce": Link(57e-6, 1 / 20e9, "usual over RoCE on two Sparks: 54 to 64 us for 48 KB (b12x#295)"),
    "tcp": Link(0.6e-3, 1 / 4e9, "over TCP, inferred from posted speeds of two and four Sparks: 0.6 and 0.9 ms"),
}


@dataclass(frozen=True)
class Case:
    """The prediction for one number of machines."""

    machines: int
    refusal: str = ""
    streams: int = 0  # how many of the requested streams run at once
    plain: Range = NOTHING
    drafted: Drafted | None = None
    tokens: int = 0  # of context that fit, in total
    reduces: int = 0  # all-reduces of a plain step
    reduce: float = 0.0  # seconds of one all-reduce
    step: float = 0.0  # seconds of a plain step

    @property
    def share(self) -> float:
        """Fraction of a plain step spent in all-reduces."""
        return self.reduces * self.reduce / self.step if self.step else 0.0

    @property
    def best(self) -> float:
        return max(self.plain.expected, self.drafted.speed.expected if self.drafted else 0.0)


def cases(question: Question, counts: Sequence[int], link: Link) -> list[Case]:
    """One machine, then each count. Raises UserError for a machine without vLLM's losses."""
    question.machine.losses(ENGINE)
    return [case(replace(question, engine=ENGINE), count, link) for count in (1, *counts)]


def case(question: Question, machines: int, link: Link) -> Case:
    try:
        check_divides(question, machines)
        token = question.model.hidden_size * ITEMSIZE
        reduce = link.all_reduce(machines, question.streams * token)
        plain = on_group(replace(question, drafter=None, chances=None), machines, reduce)
        tokens = fitting_tokens(plain, machines)
        running = min(plain.running(), tokens // question.context)
        if not running:
            raise UserError(f"{tokens:,} tokens of context fit, and a stream has {question.context:,}")
        if running < question.streams:  # the others wait
            return case(replace(question, streams=running), machines, link)
        drafted = None
        if question.drafter:
            verified = question.streams * question.drafter.block_size
            group = on_group(question, machines, link.all_reduce(machines, verified * token))
            drafted = group.middle if group.running() else None
        reduces = PER_LAYER * question.model.num_layers + PER_STEP if machines > 1 else 0
        step = plain.seconds().total
        return Case(machines, "", running, plain.plain, drafted, tokens, reduces, reduce, step)
    except UserError as error:
        return Case(machines, str(error))


def check_divides(question: Question, machines: int) -> None:
    """Raises UserError if vLLM would refuse to share the model so."""
    for spec in question.model.attention:
        kv = spec.num_kv_heads
        if spec.num_heads % machines or (kv % machines and machines % kv):
            heads = f"{spec.num_heads} heads over {kv} of keys"
            raise UserError(f"{heads} cannot be divided between {machines} machines")


def on_group(question: Question, machines: int, reduce: float) -> Forecast:
    """Raises UserError if it does not fit. Every machine has its own scratch and CUDA graphs."""
    whole = grouped(question.machine, machines, reduce)
    first = Forecast(replace(question, machine=whole))
    more = (machines - 1) * (first.plan.memory.scratch + first.plan.memory.graphs)
    if not more:
        return first
    hardware = replace(whole.hardware, free_bytes=whole.hardware.free_bytes - more)
    return Forecast(replace(question, machine=replace(whole, hardware=hardware)))


def grouped(machine: Machine, machines: int, reduce: float) -> Machine:
    """Several machines as one."""
    arithmetic = {name: machines * rate for name, rate in machine.rates.arithmetic.items()}
    engine = machine.losses(ENGINE)
    expected, low, high = (
        replace(each, layer=each.layer + PER_LAYER * reduce, step=each.step + PER_STEP * reduce)
        for each in (engine.expected, engine.low, engine.high)
    )
    return replace(
        machine,
        title=f"{machines} x {machine.title}" if machines > 1 else machine.title,
        hardware=replace(machine.hardware, free_bytes=machines * machine.hardware.free_bytes),
        rates=Rates(machines * machine.rates.bandwidth, arithmetic),
        engines={ENGINE: replace(engine, expected=expected, low=low, high=high)},
    )


def fitting_tokens(forecast: Forecast, machines: int) -> int:
    """Tokens that fit. With fewer KV heads than machines, each head is stored several times."""
    heads = min((spec.num_kv_heads for spec in forecast.question.model.attention), default=machines)
    return int(forecast.max_tokens / max(1.0, machines / heads))


def explain(found: Sequence[Case], link: Link) -> list[str]:
    """Says what all-reduces cost and whether more machines help."""
    fitting = [each for each in found if not each.refusal]
    lines = [
        f"{each.machines} machines: {each.reduces} all-reduces per step of {shown_time(each.reduce)} are "
        f"{each.reduces * each.reduce * 1e3:.0f} of {each.step * 1e3:.0f} ms, {each.share:.0%} of a token's time "
        "without drafts"
        for each in fitting
        if each.reduces
    ]
    lines += [_compared(fewer, more) for fewer, more in pairwise(fitting)]
    if fitting and fitting[-1].machines > 1:
        lines.append(f"an all-reduce: {link.origin}")
    if not fitting:
        lines.append("it fits on none of these: choose smaller weights, a shorter context or more machines")
    return lines


def _compared(fewer: Case, more: Case) -> str:
    times = more.best / fewer.best
    names = f"{more.machines} machines", f"{fewer.machines} machine" + "s" * (fewer.machines > 1)
    if times >= NO_GAIN:
        return f"{names[0]} are {times:.2f} times as fast as {names[1]}"
    verdict = "no faster than" if times > 1 / NO_GAIN else "slower than"
    reason = f"all-reduces take {more.share:.0%} of a step" if more.share > 0.3 else "what is not shared stays"
    return f"{names[0]} are {verdict} {names[1]} ({times:.2f} times): {reason}; they buy memory, not speed"


def shown_time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
