"""The lines of a CPU: the embedded model, with and without its drafter, in engines of this process.

Both engines of a comparison exist side by side and run in turn. The prefix cache is off, so that the same prompts are
computed each time. Lines that need their own processes are in processes.py.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

from sparkdraft.config import NO_PROFILE
from sparkdraft.core import SamplingParams
from sparkdraft.llm import LLM
from sparkdraft.operate.bench.accept import chat_prompts, read_prompts
from sparkdraft.operate.bench.long_prompt import Beside, LongPrompt
from sparkdraft.operate.bench.offline_throughput import throughput
from sparkdraft.operate.bench.speed import processes
from sparkdraft.operate.bench.speed.check import Group, Names
from sparkdraft.operate.bench.speed.ratios import Metrics, Progress, Sample, against, in_turn, joined, part

MODEL = "smollm2"
PLAIN_STEPS, WARM_STEPS = 96, 8  # for the parked drafter's line: steps per run, and how many of them do not count
FRESH_ENGINES, PARKED_ROUNDS = 2, 3  # pairs of engines made for it, and rounds per pair
LOAD_ROUNDS = 3
OUTPUT_LEN = 64  # tokens per request at most; a request may end earlier
CLASSES = ("code", "qa", "json", "prose")


def load(spec: str, model: str = MODEL) -> LLM:
    return LLM(model, device="cpu", spec=spec, prefix_cache=False, profile=NO_PROFILE)


def parked_drafter(wanted: Names, progress: Progress, make: Callable[[str], LLM] = load) -> dict[str, Sample]:
    """Plain steps of an engine with a drafter against those of one without, in fresh engines each time."""
    found = []
    for pair in range(FRESH_ENGINES):
        plain, parked = (partial(_plain_steps, make(spec)) for spec in ("off", "auto"))
        done = pair * PARKED_ROUNDS
        found.append(in_turn(plain, parked, PARKED_ROUNDS, part(progress, done, FRESH_ENGINES * PARKED_ROUNDS)))
    return {"parked-drafter": joined(each["steps_s"] for each in found)}


def _plain_steps(llm: LLM) -> Metrics:
    """Steps per second of one stream that drafts nothing."""
    ids = chat_prompts(llm, read_prompts(1)["prose"])[0]
    llm.engine.add(ids, SamplingParams(max_tokens=PLAIN_STEPS, num_draft=0, ignore_eos=True))
    times = [time.perf_counter()]
    while llm.engine.has_work:
        llm.engine.step()
        times.append(time.perf_counter())
    steps = [end - begin for begin, end in pairwise(times)]
    return {"steps_s": 1 / statistics.median(steps[WARM_STEPS:])}


# ---- several streams, and sampled text


def loads(
    streams: int, requests: int, temperature: float, names: dict[str, str], wanted: Names, progress: Progress
) -> dict[str, Sample]:
    """Whole requests, default against --spec off. names: line -> metric of _run_load."""
    sides = [partial(_run_load, load(spec), streams, requests, temperature) for spec in ("off", "auto")]
    for side in sides:
        side()  # new shapes are recorded, compiled and timed here
    found = in_turn(sides[0], sides[1], LOAD_ROUNDS, progress)
    return {name: found[metric] for name, metric in names.items()}


def _run_load(llm: LLM, streams: int, requests: int, temperature: float) -> Metrics:
    """Run the same requests each time, one class after the other. With a seed sampled text is the same, drafted or
    not."""
    per_class = -(-requests // len(CLASSES))
    texts = read_prompts(per_class)
    prompts = chat_prompts(llm, [texts[name][i] for i in range(per_class) for name in CLASSES][:requests])
    params = [SamplingParams(OUTPUT_LEN, temperature=temperature, seed=i) for i in range(requests)]
    result = throughput(llm.engine, zip(prompts, params, strict=True), streams)
    return {"tok_s": result.tok_s, "first_s": statistics.median(result.first)}


# ---- a long prompt beside streams


def long_prompt(wanted: Names, progress: Progress) -> dict[str, Sample]:
    """One round: alone, beside the streams, beside them again, alone."""
    test, seen = LongPrompt(load("auto")), list[Beside]()

    def alone() -> Metrics:
        return {"first_s": test.alone()}

    def beside() -> Metrics:
        seen.append(test.beside())
        return {"first_s": seen[-1].first}

    first = in_turn(alone, beside, 1, progress)["first_s"]
    target = test.engine.plan.max_step_ms / 1e3
    return {
        "long-prompt-first-token": first,
        "long-prompt-largest-gap": against(target, [each.during.largest for each in seen]),
        "long-prompt-median-gap": against(target, [each.during.median for each in seen]),
    }


def _load_group(streams: int, requests: int, temperature: float, **names: str) -> Group:
    lines = {name.replace("_", "-"): metric for name, metric in names.items()}
    return Group(tuple(lines), partial(loads, streams, requests, temperature, lines))


GROUPS = (
    Group(("parked-drafter",), parked_drafter),
    Group(("drafted-code", "start-in-steps", "start-with-drafter"), partial(processes.drafted, "code")),
    *(Group((f"drafted-{name}",), partial(processes.drafted, name)) for name in ("json", "questions", "prose")),
    _load_group(1, 6, 0.7, auto_sampled="tok_s"),
    _load_group(4, 12, 0.0, auto_4_streams="tok_s"),
    _load_group(16, 16, 0.0, auto_16_streams="tok_s", first_token_16_streams="first_s"),
    Group(("server-1-stream", "server-4-streams"), processes.server),
    Group(("long-prompt-largest-gap", "long-prompt-median-gap", "long-prompt-first-token"), long_prompt),
)
