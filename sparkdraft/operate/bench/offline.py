"""Decode and prefill speed of the real engine, as a share of what the memory's bandwidth allows.

A decode step reads every weight and the K/V of every sequence once, and the drafter's if it drafts. Those bytes over
the measured bandwidth are a lower bound (the floor) for the time of a step. For a mixture of experts the floor counts
the experts that independently routed tokens would reach. Prompts are random ids, so the prefix cache finds nothing.
Drafts of random weights are accepted as synthetic.py says.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

import torch

from sparkdraft.core import SamplingParams, UserError
from sparkdraft.engine.engine import Engine
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.layers import ExpertsSpec
from sparkdraft.models.common.sizes import model_sizes
from sparkdraft.operate.bench.synthetic import Acceptance, impose
from sparkdraft.operate.forecast.rates import matmul_rate, memory_bandwidth, wait
from sparkdraft.plan.memory import MemoryPlan

WARM_STEPS = 8  # plain decode steps: they compile kernels and record the one shape
ROUNDS = 2  # requests per stream in the pass over whole requests
Report = Callable[[int, int], None]  # (steps done, steps in all); never called while speed is measured
GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True)
class Load:
    streams: int
    prompt_len: int
    output_len: int


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The measured limits of this machine."""

    bandwidth: float  # bytes of memory read per second
    matmul: float | None  # operations per second, of a GPU

    @staticmethod
    def measure(device: str, threads: int) -> Ceilings:
        matmul = matmul_rate() if device == "cuda" else None
        return Ceilings(memory_bandwidth(device, threads), matmul)


@dataclass(slots=True)
class Pass:
    """A run of equal requests. Only steps in which all of them decode count."""

    prefill: float = 0.0  # seconds until each had its first id
    steps: list[float] = field(default_factory=list)  # seconds
    tokens: int = 0  # committed in those steps
    drafted: float = 0.0  # share of the streams' steps in which the drafter drafted
    drafts: float = 0.0  # ids that a stream drafted per step, on average
    depth: float = 0.0  # ids that the drafter drafted where it did, on average

    @property
    def step(self) -> float:
        """Seconds per step: the median of plain steps, which are alike, and the mean of drafted ones, which are not."""
        return statistics.fmean(self.steps) if self.drafts else statistics.median(self.steps)

    @property
    def tok_s(self) -> float:
        return self.tokens / len(self.steps) / self.step


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a batch size at a prompt length."""

    streams: int
    prompt_len: int
    prefill_tok_s: float
    prefill_share: float | None  # share of a matmul's rate, on a GPU: operations of layers and attention
    decode_tok_s: float  # committed ids, all streams together
    step_ms: float  # Pass.step
    floor_ms: float  # bytes read over measured bandwidth
    share: float  # floor over measured
    length: float  # ids that a stream committed a step
    rows: float  # that the target ran per step: one of each stream, and its drafts
    steps: int
    floor_gb: dict[str, float]  # bytes of the floor, by what they are
    overall_tok_s: float | None  # whole requests, including prompts; None with a synthetic acceptance

    def as_dict(self) -> dict[str, Any]:
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Memory:
    plan: MemoryPlan
    used: int  # most bytes in tensors
    taken: int  # bytes taken from the device for them, including what was idle in between

    def as_dict(self) -> dict[str, Any]:
        planned = {f"planned_{name}": getattr(self.plan, name) for name in ("weights", "kv", "scratch", "total")}
        return planned | {"peak_used": self.used, "peak_taken": self.taken}

    def text(self) -> str:
        used, taken = (f"{size / 2**30:.2f} GiB ({size / self.plan.total:.1%})" for size in (self.used, self.taken))
        return f"memory: planned {self.plan.total / 2**30:.2f} GiB; in use at most {used}, taken from the GPU {taken}"


class Bench:
    """Measures an engine under one load after the other."""

    def __init__(
        self,
        engine: Engine,
        model: ModelConfig,
        ceilings: Ceilings,
        acceptance: Acceptance | None = None,
        params: SamplingParams = GREEDY,
    ) -> None:
        """acceptance: imposed on drafts in place of the target's own decisions. params: how ids are sampled."""
        self.params = params
        self.engine, self.model, self.ceilings, self.acceptance = engine, model, ceilings, acceptance
        engine.scheduler.pace = None  # all streams begin together, and none waits for a token while prompts run
        self._synthetic = impose(engine, acceptance) if acceptance else None
        chooses = engine.drafting.budget is not None and engine.drafting.default is None
        if chooses and (acceptance or not engine.is_warm):
            # the budget of drafts needs the costs of steps; graphs keep the acceptance that they were made with
            engine.warm_up()

    def measure(self, load: Load, report: Report) -> Row:
        """Warm up, measure, and run whole requests.

        The number of tokens that a drafted step observes varies, and each number is a shape to capture. The warm-up is
        the same run, to the last accepted draft, so the measured pass finds every shape captured.
        """
        steps = self.num_steps(load)
        warm = steps if self.engine.drafting.max_depth else min(steps, WARM_STEPS)
        done = 0

        def count() -> None:
            nonlocal done
            done += 1
            report(done, warm + steps)

        report(0, warm + steps)
        self._run(load, warm, count)
        measured = self._run(load, steps)  # nothing is reported while speed is measured
        report(warm + steps, warm + steps)
        overall = None if self.acceptance else throughput(self.engine, self._requests(load), load.streams).tok_s
        return self._row(load, measured, overall)

    def run(self, load: Load) -> Pass:
        """Run one pass and nothing else. The first pass of a load is its warm-up."""
        return self._run(load, self.num_steps(load))

    def memory(self) -> Memory | None:
        """Return the planned memory of a GPU and the memory used so far; None on a CPU."""
        if self.engine.plan.device != "cuda":
            return None
        return Memory(self.engine.plan.memory, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())

    def num_steps(self, load: Load) -> int:
        """The number of decode steps; with a synthetic acceptance, those that write output_len ids on average."""
        return self.acceptance.steps(load.output_len) if self.acceptance else load.output_len

    @property
    def counts_experts(self) -> bool:
        """The floor depends on how many experts the tokens reach."""
        return any(isinstance(layer.mlp, ExpertsSpec) for layer in self.model.layers)

    def check(self, load: Load) -> None:
        """Raise UserError for a load that this engine has no room for."""
        plan, context = self.engine.plan, load.prompt_len + self._max_tokens(load)
        asked = f"{load.streams} streams of {load.prompt_len} tokens and {load.output_len} of output"
        if context > plan.max_model_len:
            raise UserError(
                f"{asked} need a context of {context} tokens; {plan.max_model_len} is the most: ask for less"
            )
        if load.streams > plan.max_seqs:
            raise UserError(f"{asked} do not run at once; {plan.max_seqs} do: raise --max-seqs")
        room = plan.num_blocks * plan.block_size
        if load.streams * context > room:
            need = f"need a KV cache of {load.streams * context} tokens; this one holds {room}"
            raise UserError(f"{asked} {need}: raise --kv-tokens")

    # ---- a pass

    def _run(self, load: Load, steps: int, count: Callable[[], None] | None = None) -> Pass:
        """Run all streams from empty until 'steps' decode steps are done."""
        result, names = Pass(), self._add(load)
        result.prefill = self._prompts(set(names))
        self.engine.step()  # its drafter observes what was written while the last prompts ran
        self.engine.drain()
        self._decode(load, steps, result, count)
        for name in names:
            self.engine.abort(name)
        self.engine.step()  # returns their ends
        return result

    def _add(self, load: Load) -> list[str]:
        params = replace(self.params, max_tokens=self._max_tokens(load), ignore_eos=True)
        return [self.engine.add(ids, params) for ids in self._prompt_ids(load, load.streams)]

    def _requests(self, load: Load) -> list[tuple[list[int], SamplingParams]]:
        params = replace(self.params, max_tokens=load.output_len, ignore_eos=True)
        return [(ids, params) for ids in self._prompt_ids(load, ROUNDS * load.streams)]

    def _prompt_ids(self, load: Load, count: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(load.prompt_len * 1000 + load.streams)
        ids: list[list[int]] = torch.randint(
            0, self.model.vocab_size, (count, load.prompt_len), generator=generator
        ).tolist()
        return ids

    def _max_tokens(self, load: Load) -> int:
        """The output length to ask for: more than is measured, because drafts are dropped near the end of an output."""
        # that the first stream may write while the last one's prompt still runs
        head_start = 1 + load.streams * load.prompt_len // max(self.engine.plan.max_step_tokens - load.streams, 1)
        return load.output_len + head_start + 4 * (self.engine.drafting.max_depth + 1)

    def _prompts(self, waiting: set[str]) -> float:
        """Return the seconds until each stream has its first id. No stream drafts meanwhile, because prompts are
        timed."""
        drafting, begin = self.engine.drafting, time.perf_counter()
        depth, drafting.default = drafting.default, 0
        while waiting:
            waiting -= {output.request_id for output in self.engine.step()}
        drafting.default = depth
        return time.perf_counter() - begin

    def _decode(self, load: Load, steps: int, result: Pass, count: Callable[[], None] | None) -> None:
        written: Counter[str] = Counter()
        # with a synthetic acceptance the number of steps is given
        enough = sys.maxsize if self.acceptance else load.output_len
        if self._synthetic and self.acceptance:
            self._synthetic.start(self.acceptance.outcomes(self.num_steps(load), load.streams))
        before = self._num_drafted()
        wait(self.engine.plan.device)
        last = time.perf_counter()
        while len(result.steps) < steps and max(written.values(), default=0) < enough:
            outputs = self.engine.step()
            now = time.perf_counter()
            for output in outputs:
                written[output.request_id] += len(output.ids)
            if outputs:  # a device's first step is read by the second call
                result.steps.append(now - last)
            last = now
            if count:
                count()
                last = time.perf_counter()
        assert len(written) == load.streams, f"{len(written)} of {load.streams} streams decoded"
        result.tokens = written.total()
        counts = (now - then for now, then in zip(self._num_drafted(), before, strict=True))
        result.drafts, result.drafted, own = (count / (len(result.steps) * load.streams) for count in counts)
        result.depth = own / result.drafted if result.drafted else 0.0
        if self._synthetic:
            applied = self._synthetic.num_applied  # one more may be launched and unread
            assert 0 <= applied - len(result.steps) <= 1, f"{len(result.steps)} steps, {applied} accepted as given"
            self._synthetic.stop()

    def _num_drafted(self) -> tuple[int, int, int]:
        """Return the counts so far, over all streams: drafted ids, steps in which the drafter drafted, and its own
        ids."""
        stats = self.engine.drafting.so_far()
        return stats.num_draft_tokens, *stats.by_drafter

    # ---- results

    def _row(self, load: Load, measured: Pass, overall: float | None) -> Row:
        step = measured.step
        read, matmul = self.floor_bytes(load, measured.drafted, measured.drafts, measured.depth), self.ceilings.matmul
        floor = sum(read.values()) / self.ceilings.bandwidth
        return Row(
            load.streams,
            load.prompt_len,
            prefill_tok_s=load.streams * load.prompt_len / measured.prefill,
            prefill_share=self.prompt_operations(load) / measured.prefill / matmul if matmul else None,
            decode_tok_s=measured.tok_s,
            step_ms=step * 1e3,
            floor_ms=floor * 1e3,
            share=floor / step,
            length=measured.tokens / len(measured.steps) / load.streams,
            rows=load.streams * (1 + measured.drafts),
            steps=len(measured.steps),
            floor_gb={name: round(count / 1e9, 4) for name, count in read.items()},
            overall_tok_s=overall,
        )

    def prompt_operations(self, load: Load) -> float:
        """Operations of all prompts: every token times the layers' weights, and attention over the keys before it."""
        model, rows = self.model, load.streams * load.prompt_len
        return rows * model_sizes(model).operations(keys=load.prompt_len / 2)  # keys: their average number

    def floor_bytes(
        self, load: Load, drafted: float = 0.0, drafts: float = 0.0, depth: float = 1.0
    ) -> dict[str, float]:
        """Return the bytes that a step must read, by kind. The head counts for target and drafter, which read it one
        after the other. drafted: share of steps in which the drafter drafts. drafts: ids that a stream verifies per
        step. depth: ids that the drafter drafts where it does; a chain makes one pass per id."""
        runner, drafting = self.engine.runner, self.engine.drafting
        context = load.prompt_len + load.output_len // 2
        read = {"target": runner.model.nbytes(load.streams * (1 + drafts))}
        read["target_kv"] = load.streams * runner.kv.bytes_read(context)
        if drafting.proposer and drafted:
            reads = drafting.proposer.drafter.reads(1)
            passes = drafted * (depth if drafting.proposer.chain else 1)
            read["drafter"] = passes * reads.propose
            read["drafter_observes"] = drafted * reads.observe
            read["drafter_kv"] = passes * load.streams * context * reads.kv_per_token
        return read


# ---- whole requests
#
# A fixed number of requests runs at once, the next begins when one ends, and prompts count in the time. A server is
# loaded in this way, and `vllm bench throughput` counts so too.


@dataclass(frozen=True, slots=True)
class Throughput:
    requests: int
    tokens: int  # tokens written
    seconds: float
    first: list[float]  # seconds from each request's beginning to its first token

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds


def throughput(engine: Engine, requests: Iterable[tuple[list[int], SamplingParams]], streams: int) -> Throughput:
    """Run the requests, 'streams' at once, in an otherwise idle engine. The iterable is read as requests begin."""
    coming, running, tokens = iter(requests), set[str](), 0
    began, first = dict[str, float](), dict[str, float]()
    begin = time.perf_counter()
    while True:
        for prompt, params in islice(coming, streams - len(running)):
            name = engine.add(prompt, params)
            running.add(name)
            began[name] = time.perf_counter()
        if not running:
            seconds = [first[name] - began[name] for name in began]
            return Throughput(len(began), tokens, time.perf_counter() - begin, seconds)
        for output in engine.step():
            tokens += len(output.ids)
            first.setdefault(output.request_id, time.perf_counter())
            if output.finish:
                running.discard(output.request_id)


def release(device: str) -> None:
    """Free the memory of an unused engine, so that the next one plans with all free memory."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
