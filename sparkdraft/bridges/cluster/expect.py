"""What fits on several machines and how fast it will be: operate/forecast/forecast.py's sums, with the time of
all-reduces.

Tensor parallel: every machine reads its share of each matrix, and the machines add their results up twice per layer.
So a group is one machine with as many times the memory, bandwidth and arithmetic, that loses two all-reduces more per
layer, and two per step (the embedding, and the logits). Pipeline: every machine has a part of the layers; a step of one
stream passes them one after another, and several streams can be under way at once. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, log2

from sparkdraft.bridges.cluster.command import PIPELINE, TENSOR
from sparkdraft.core import UserError
from sparkdraft.operate.forecast.forecast import NOTHING, Drafted, Forecast, Question, Range
from sparkdraft.operate.forecast.machine import EngineLosses, Machine
from sparkdraft.operate.forecast.roofline import Rates

ENGINE = "vllm"
PER_LAYER, PER_STEP = 2, 2  # all-reduces
NO_GAIN = 1.1  # times the speed, below which more machines are not worth it
ITEMSIZE = 2  # of the numbers that are added up


@dataclass(frozen=True, slots=True)
class Latency:
    """Of an all-reduce: what it takes however small it is, and per byte, between so many machines."""

    fixed: float  # seconds
    per_byte: float
    machines: int
    origin: str  # in words

    def at(self, machines: int, size: float) -> float:
        """Between another number of machines: steps of a tree beside what two machines need, and a ring's bytes."""
        steps, sent = (each(machines) / each(self.machines) for each in (_steps, _sent))
        return self.fixed * steps + self.per_byte * sent * size


def _steps(machines: int) -> float:
    return (1 + log2(machines)) / 2


def _sent(machines: int) -> float:
    return 2 * (machines - 1) / machines


LINKS = {
    "roce": Latency(57e-6, 1 / 20e9, 2, "usual over RoCE on two Sparks: 54 to 64 us for 48 KB (b12x#295)"),
    "tcp": Latency(0.6e-3, 1 / 4e9, 2, "over TCP, inferred from posted speeds of two and four Sparks: 0.6 and 0.9 ms"),
}


@dataclass(frozen=True)
class Case:
    """One number of machines, one way to share the model."""

    machines: int
    parallel: str
    streams: int = 0  # of those that are asked for, the ones that run at once
    forecast: Forecast | None = None
    refusal: str = ""
    plain: Range = NOTHING
    drafted: Drafted | None = None
    tokens: int = 0  # of context that fit, over all streams
    reduces: int = 0  # all-reduces of a plain step
    reduce: float = 0.0  # seconds of one of them
    step: float = 0.0  # seconds of a plain step

    @property
    def share(self) -> float:
        """Of a plain step, what all-reduces take."""
        return self.reduces * self.reduce / self.step if self.step else 0.0

    @property
    def best(self) -> float:
        return max(self.plain.expected, self.drafted.speed.expected if self.drafted else 0.0)


def cases(question: Question, counts: list[int], latency: Latency) -> list[Case]:
    """One machine, then every number of them in both ways. Raises UserError for a machine without vLLM's losses."""
    question.machine.losses(ENGINE)
    ways = [(1, TENSOR), *((count, way) for count in counts for way in (TENSOR, PIPELINE))]
    return [case(replace(question, engine=ENGINE), count, way, latency) for count, way in ways]


def case(question: Question, machines: int, parallel: str, latency: Latency) -> Case:
    try:
        check_divides(question, machines, parallel)
        row = question.model.hidden_size * ITEMSIZE
        reduce = latency.at(machines, question.streams * row) if machines > 1 else 0.0
        plain = on_group(replace(question, drafter=None, chances=None), machines, parallel, reduce)
        tokens = fitting_tokens(plain, machines, parallel)
        running = min(plain.running(), tokens // question.context)
        if not running:
            raise UserError(f"{tokens:,} tokens of context fit, and a stream has {question.context:,}")
        if running < question.streams:  # the others wait: speeds are those of the streams that run at once
            return case(replace(question, streams=running), machines, parallel, latency)
        if parallel == PIPELINE:
            batch = ceil(question.streams / min(question.streams, machines))  # streams that pass together
            speed = plain.speed(streams=batch).times(question.streams / batch)
            step = plain.seconds(streams=batch).total
            return Case(machines, parallel, running, plain, "", speed, None, tokens, step=step)
        drafted = None
        if question.drafter:
            rows = question.streams * question.drafter.block_size
            reduce_rows = latency.at(machines, rows * row) if machines > 1 else 0.0
            group = on_group(question, machines, parallel, reduce_rows)
            drafted = group.middle if group.running() else None
        reduces = PER_LAYER * question.model.num_layers + PER_STEP if machines > 1 else 0
        step = plain.seconds().total
        return Case(machines, parallel, running, plain, "", plain.plain, drafted, tokens, reduces, reduce, step)
    except UserError as error:
        return Case(machines, parallel, refusal=str(error))


def check_divides(question: Question, machines: int, parallel: str) -> None:
    """Raises UserError where vLLM would refuse."""
    if parallel == PIPELINE:
        if question.model.num_layers < machines:
            raise UserError(f"{question.model.num_layers} layers cannot be divided between {machines} machines")
        return
    for spec in question.model.attention:
        kv = spec.num_kv_heads
        if spec.num_heads % machines or (kv % machines and machines % kv):
            heads = f"{spec.num_heads} heads over {kv} of keys"
            raise UserError(f"{heads} cannot be divided between {machines} machines; pipeline can")


def on_group(question: Question, machines: int, parallel: str, reduce: float) -> Forecast:
    """Raises UserError where it does not fit. A step's scratch and recordings are on every machine."""
    whole = grouped(question.machine, machines, parallel, reduce)
    first = Forecast(replace(question, machine=whole))
    more = (machines - 1) * (first.plan.memory.scratch + first.plan.memory.recordings)
    if not more:
        return first
    hardware = replace(whole.hardware, free_bytes=whole.hardware.free_bytes - more)
    return Forecast(replace(question, machine=replace(whole, hardware=hardware)))


def grouped(machine: Machine, machines: int, parallel: str, reduce: float) -> Machine:
    """Several of them as one."""
    engine, factor = machine.losses(ENGINE), machines if parallel == TENSOR else 1
    rates = Rates(
        factor * machine.rates.bandwidth, {name: factor * rate for name, rate in machine.rates.arithmetic.items()}
    )
    if parallel == TENSOR:
        layer, step = PER_LAYER * reduce, PER_STEP * reduce
    else:
        layer, step = 0.0, machines * reduce / 2  # a message from one to the next is half an all-reduce of two
    hardware = replace(machine.hardware, free_bytes=machines * machine.hardware.free_bytes)
    title = f"{machines} x {machine.title}" if machines > 1 else machine.title
    engines = {ENGINE: _later(engine, layer, step)}
    return replace(machine, title=title, hardware=hardware, rates=rates, engines=engines)


def _later(engine: EngineLosses, layer: float, step: float) -> EngineLosses:
    expected, low, high = (
        replace(each, layer=each.layer + layer, step=each.step + step)
        for each in (engine.expected, engine.low, engine.high)
    )
    return replace(engine, expected=expected, low=low, high=high)


def fitting_tokens(forecast: Forecast, machines: int, parallel: str) -> int:
    """Keys and values of a head are kept twice where there are fewer heads than machines."""
    heads = min((spec.num_kv_heads for spec in forecast.question.model.attention), default=machines)
    copies = max(1.0, machines / heads) if parallel == TENSOR else 1.0
    return int(forecast.max_tokens / copies)


# ---- in words


def explain(found: list[Case], latency: Latency) -> list[str]:
    """What all-reduces cost, and whether more machines help."""
    tensor = [each for each in found if each.parallel == TENSOR and each.forecast]
    lines = []
    for each in tensor:
        if each.reduces:
            lines.append(
                f"{each.machines} machines, tensor parallel: {each.reduces} all-reduces per step of "
                f"{shown_time(each.reduce)} are {each.reduces * each.reduce * 1e3:.0f} of {each.step * 1e3:.0f} ms, "
                f"{each.share:.0%} of a token's time without drafts"
            )
    for fewer, more in pairwise(tensor):
        lines.append(_compared(fewer, more))
    if tensor and tensor[-1].machines > 1:
        lines.append(f"an all-reduce: {latency.origin}")
    if not any(each.forecast for each in found):
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
