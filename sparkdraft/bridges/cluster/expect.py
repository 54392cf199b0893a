"""Predicts what fits on several machines and how fast it is, with an all-reduce measured between them.

The sums are those of operate/forecast/forecast.py. Tensor parallel: a group is one machine with as many times the
memory, bandwidth and arithmetic that loses two all-reduces per layer and two per step (the embedding and the logits).
Pipeline: each machine has a part of the layers, which a step of one stream passes one after another; several streams
can be under way at once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, log2
from pathlib import Path

from sparkdraft.bridges.cluster.checks import Seen
from sparkdraft.bridges.cluster.hosts import Cluster
from sparkdraft.bridges.cluster.node.allreduce import NO_TORCH
from sparkdraft.bridges.cluster.ranks import PIPELINE, TENSOR, Job, Rank, end_ranks, rank_environment, start_ranks
from sparkdraft.core import UserError
from sparkdraft.operate.forecast.forecast import NOTHING, Drafted, Forecast, Question, Range
from sparkdraft.operate.forecast.machine import EngineLosses, Machine
from sparkdraft.operate.forecast.roofline import Rates

ENGINE = "vllm"
PER_LAYER, PER_STEP = 2, 2  # all-reduces
NO_GAIN = 1.1  # speed-up below which more machines are not worth it
ITEMSIZE = 2  # bytes per added number
SECONDS = 120.0  # for all of it: importing torch, connecting, measuring
REPEATS = 20
LARGE = 64  # tokens of the larger size, which gives the time per byte
POLL = 0.2


@dataclass(frozen=True, slots=True)
class Latency:
    """Time of an all-reduce between this many machines."""

    fixed: float  # seconds of the smallest
    per_byte: float  # further seconds per byte
    machines: int
    origin: str  # how this is known, in words

    def at(self, machines: int, size: float) -> float:
        """Seconds between another number of machines: the fixed part grows as a tree's depth, the rest as a ring's
        bytes."""
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
    """The prediction for one number of machines and one way to share the model."""

    machines: int
    parallel: str
    streams: int = 0  # how many of the requested streams run at once
    forecast: Forecast | None = None
    refusal: str = ""
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


def cases(question: Question, counts: list[int], latency: Latency) -> list[Case]:
    """One machine, then each count both ways. Raises UserError for a machine without vLLM's losses."""
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
        if running < question.streams:  # the others wait
            return case(replace(question, streams=running), machines, parallel, latency)
        if parallel == PIPELINE:
            batch = ceil(question.streams / min(question.streams, machines))  # streams per micro-batch
            speed = plain.speed(streams=batch).times(question.streams / batch)
            step = plain.seconds(streams=batch).total
            return Case(machines, parallel, running, plain, "", speed, None, tokens, step=step)
        drafted = None
        if question.drafter:
            tokens_verified = question.streams * question.drafter.block_size
            block_reduce = latency.at(machines, tokens_verified * row) if machines > 1 else 0.0
            group = on_group(question, machines, parallel, block_reduce)
            drafted = group.middle if group.running() else None
        reduces = PER_LAYER * question.model.num_layers + PER_STEP if machines > 1 else 0
        step = plain.seconds().total
        return Case(machines, parallel, running, plain, "", plain.plain, drafted, tokens, reduces, reduce, step)
    except UserError as error:
        return Case(machines, parallel, refusal=str(error))


def check_divides(question: Question, machines: int, parallel: str) -> None:
    """Raises UserError if vLLM would refuse to share the model so."""
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
    """Raises UserError if it does not fit. Every machine has its own scratch and CUDA graphs."""
    whole = grouped(question.machine, machines, parallel, reduce)
    first = Forecast(replace(question, machine=whole))
    more = (machines - 1) * (first.plan.memory.scratch + first.plan.memory.recordings)
    if not more:
        return first
    hardware = replace(whole.hardware, free_bytes=whole.hardware.free_bytes - more)
    return Forecast(replace(question, machine=replace(whole, hardware=hardware)))


def grouped(machine: Machine, machines: int, parallel: str, reduce: float) -> Machine:
    """Several machines as one."""
    engine, factor = machine.losses(ENGINE), machines if parallel == TENSOR else 1
    rates = Rates(
        factor * machine.rates.bandwidth, {name: factor * rate for name, rate in machine.rates.arithmetic.items()}
    )
    if parallel == TENSOR:
        layer, step = PER_LAYER * reduce, PER_STEP * reduce
    else:
        layer, step = 0.0, machines * reduce / 2  # passing a message on costs half an all-reduce of two
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
    """Tokens that fit. With fewer KV heads than machines, each head is stored several times."""
    heads = min((spec.num_kv_heads for spec in forecast.question.model.attention), default=machines)
    copies = max(1.0, machines / heads) if parallel == TENSOR else 1.0
    return int(forecast.max_tokens / copies)


def explain(found: list[Case], latency: Latency) -> list[str]:
    """Says what all-reduces cost and whether more machines help."""
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


def measure(
    cluster: Cluster, seen: Sequence[Seen], row: int, folder: Path, say: Callable[[str], None], seconds: float = SECONDS
) -> Latency | None:
    """Times all-reduces with the network settings of the ranks. row: bytes per token. Returns None if the machines have
    no torch. Raises UserError if they cannot reduce together, because vLLM could not either."""
    hosts = [each.host for each in seen]
    jobs = []
    for each in seen:
        spec = {"rank": each.host.rank, "ranks": len(seen), "ip": cluster.hosts[0].ip, "port": cluster.port}
        spec |= {"sizes": [row, LARGE * row], "repeats": REPEATS, "seconds": seconds}
        python = each.facts["vllm"].get("python") or each.host.spec.python.removeprefix("~/")
        words = [python, each.host.code_folder, "allreduce", json.dumps(spec)]
        jobs.append(Job(words, rank_environment(each.host.spec, seconds), drain=2.0))
    ranks = start_ranks(hosts, jobs, cluster.silence_seconds, folder, say)
    try:
        _wait(ranks, seconds, cluster.silence_seconds)
        if all(each.ended and each.ended["status"] == NO_TORCH for each in ranks):
            return None
        if failed := next((each for each in ranks if each.is_over and each.process.returncode), None):
            raise UserError(f"{failed.host.label}: the all-reduce was not measured: {failed.why()}")
        return _latency(ranks[0], row, len(seen))
    finally:
        end_ranks(ranks, drain=False)


def _wait(ranks: Sequence[Rank], seconds: float, silence: float) -> None:
    """Waits until all ranks are over or one has failed."""
    deadline = time.monotonic() + seconds
    while not all(each.is_over for each in ranks):
        for each in ranks:
            each.beat()
            if each.is_over and each.process.returncode not in (0, NO_TORCH):
                return
            if not each.is_over and each.silent_seconds > silence:
                raise UserError(f"{each.host.label} has not been heard of for {silence:g} s during the measurement")
        if time.monotonic() > deadline:
            raise UserError(
                f"the machines could not add up one row in {seconds:g} s: check the addresses, firewalls and NCCL's "
                "variables (NCCL_DEBUG=INFO under [environment] says more in the logs)"
            )
        time.sleep(POLL)
    for each in ranks:
        each.why()  # reads its last lines


def _latency(rank: Rank, row: int, machines: int) -> Latency:
    try:
        told = json.loads(next(line for line in reversed(rank.lines) if line.startswith('{"backend"')))
    except (StopIteration, ValueError):
        raise UserError(f"{rank.host.label}: the measurement of the all-reduce ended without a number") from None
    small, large = (told["seconds"][str(size)]["median"] for size in (row, LARGE * row))
    per_byte = max(large - small, 0.0) / ((LARGE - 1) * row)
    worst = told["seconds"][str(row)]["worst"]
    shown = f"{shown_time(small)} (worst {shown_time(worst)}) for {row / 1024:.0f} KB"
    origin = f"measured now between {machines} ranks: {shown}, {told['backend']}"
    return Latency(small - per_byte * row, per_byte, machines, origin)
