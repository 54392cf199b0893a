"""Lines for a CPU: the embedded model with and without its drafter, in this process and in fresh ones.

The engines of a comparison exist side by side and run in turn. The prefix cache is off, so that the same prompts are
computed each time.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from sparkdraft.cache.formats import EXACT, smallest_format
from sparkdraft.config import NO_PROFILE
from sparkdraft.core import SamplingParams, UserError
from sparkdraft.llm import LLM
from sparkdraft.operate.bench.check_speed.check import Group, Names, for_streams
from sparkdraft.operate.bench.check_speed.served import COMMAND, last_lines, serving
from sparkdraft.operate.bench.check_speed.sides import PENALISED, SAMPLED, UNKNOWN, warm, whole_requests
from sparkdraft.operate.bench.long_prompt import Beside, LongPrompt
from sparkdraft.operate.bench.offline import Bench, Load, throughput
from sparkdraft.operate.bench.prompts import chat_prompts, read_prompts
from sparkdraft.operate.bench.ratios import Metrics, Progress, Sample, Side, against, in_turn, joined, part
from sparkdraft.operate.bench.serve import Client, Messages, keep_busy

MODEL = "smollm2"
PLAIN_STEPS, WARM_STEPS = 96, 8  # for the paused drafter's line: steps per run, and how many of them do not count
FRESH_ENGINES, PAUSED_ROUNDS = 2, 3  # pairs of engines made for it, and rounds per pair
LOAD_ROUNDS = 3
CODED_CONTEXTS, CODED_LEN, CODED_ROUNDS = (1000, 4000), 48, 2
SAMPLING_STREAMS = 4
SAMPLINGS = {  # line -> parameters of its requests
    for_streams("sampled", SAMPLING_STREAMS): SAMPLED,
    for_streams("penalised", SAMPLING_STREAMS): PENALISED,
}
OUTPUT_LEN = 64  # tokens per request at most; a request may end earlier


def load(spec: str, **options: Any) -> LLM:
    return LLM(MODEL, device="cpu", spec=spec, prefix_cache=False, profile=NO_PROFILE, **options)


def paused_drafter(wanted: Names, progress: Progress, make: Callable[[str], LLM] = load) -> dict[str, Sample]:
    """Compare plain steps of an engine that has a drafter with those of one without, in fresh engines each time."""
    found = []
    for pair in range(FRESH_ENGINES):
        plain, paused = (partial(_plain_steps, make(spec)) for spec in ("off", "auto"))
        done = pair * PAUSED_ROUNDS
        found.append(in_turn(plain, paused, PAUSED_ROUNDS, part(progress, done, FRESH_ENGINES * PAUSED_ROUNDS)))
    return {"paused-drafter": joined(each["steps_s"] for each in found)}


def _plain_steps(llm: LLM) -> Metrics:
    """Measure the steps per second of one stream without drafts."""
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
    """Compare whole requests, default against --spec off. names: line -> metric of _run_load."""
    params = SamplingParams(OUTPUT_LEN, temperature=temperature)
    sides = [partial(whole_requests, load(spec), streams, requests, params) for spec in ("off", "auto")]
    for side in sides:
        side()  # new shapes are compiled and timed here
    found = in_turn(sides[0], sides[1], LOAD_ROUNDS, progress)
    return {name: found[metric] for name, metric in names.items()}


def sampling(wanted: Names, progress: Progress, make: Callable[[str], LLM] = load) -> dict[str, Sample]:
    """Compare requests that sample and penalise with greedy ones of the same lengths, all without drafts."""
    llm, samples = make("off"), dict[str, Sample]()

    def side(params: SamplingParams) -> Side:
        asked = replace(params, max_tokens=OUTPUT_LEN, ignore_eos=True)
        return partial(whole_requests, llm, SAMPLING_STREAMS, 2 * SAMPLING_STREAMS, asked)

    side(SamplingParams())()  # new shapes are compiled here
    for name, params in SAMPLINGS.items():
        if name in wanted:
            side(params)()
            inner = part(progress, LOAD_ROUNDS * len(samples), LOAD_ROUNDS * len(wanted))
            samples[name] = in_turn(side(SamplingParams()), side(params), LOAD_ROUNDS, inner)["tok_s"]
    return samples


# ---- the smallest cache


def smallest_cache(
    wanted: Names, progress: Progress, make: Callable[..., LLM] | None = None, contexts: Iterable[int] = CODED_CONTEXTS
) -> dict[str, Sample]:
    """Compare steps over a TurboQuant cache with those over an exact one, at several contexts of one stream."""
    samples = dict[str, Sample]()
    llms = ((make or load)("off", kv=kv) for kv in (EXACT, smallest_format().name))
    exact, coded = (Bench(llm.engine, llm.model_config, UNKNOWN) for llm in llms)
    for context in contexts:
        name, step = f"{smallest_format().name}-{context}-tokens", Load(1, context, CODED_LEN)
        if name in wanted:
            inner = part(progress, CODED_ROUNDS * len(samples), CODED_ROUNDS * len(wanted))
            samples[name] = in_turn(warm(exact, step), warm(coded, step), CODED_ROUNDS, inner)["tok_s"]
    return samples


# ---- a long prompt beside streams


def long_prompt(wanted: Names, progress: Progress) -> dict[str, Sample]:
    """Run one round: alone, beside the streams, beside them again, alone."""
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


# ---- fresh processes: `generate` as a user types it, and the server

PROMPT_CLASSES = {"code": "code", "json": "json", "questions": "qa", "prose": "prose"}  # line -> class of prompts.jsonl
FRESH_LEN = 128
NUM_PROMPTS = {"code": 3, "json": 3, "questions": 6, "prose": 3}  # questions differ most: 0.95 to 1.15 of plain steps
SERVER_ROUNDS, SERVER_REQUESTS, SERVER_LEN = 2, 8, 64


def drafted(name: str, wanted: Names, progress: Progress) -> dict[str, Sample]:
    """Run each prompt of a class in four fresh processes: off, default, default, off."""
    found = []
    count = NUM_PROMPTS[name]
    for done, prompt in enumerate(read_prompts(count)[PROMPT_CLASSES[name]]):
        plain, auto = (partial(_fresh, prompt, spec) for spec in ("off", "auto"))
        found.append(in_turn(plain, auto, 1, part(progress, done, count)))
    metrics = {f"drafted-{name}": "tok_s", "start-with-drafter": "start_ms", "start-in-steps": "steps_ms"}
    return {
        line: joined((each[metric] for each in found), differ=metric == "tok_s")
        for line, metric in metrics.items()
        if line in wanted
    }


def _fresh(prompt: str, spec: str) -> Metrics:
    """Return tok_s; start_ms, from the command to the first token; and steps_ms, which compares the time of 1000 plain
    steps with the default's start."""
    report = _generate(prompt, spec)
    steps = 1000 * 1e3 / report["tok_s"] if spec == "off" else report["start_ms"]
    return {"tok_s": report["tok_s"], "start_ms": report["start_ms"], "steps_ms": steps}


def _generate(prompt: str, spec: str) -> dict[str, Any]:
    """Run `sparkdraft generate --chat --json` for one prompt, greedy, and return its report. Compiled Python modules
    are kept, as for a user: compiling them anew takes half a second of every start."""
    flags = (
        "--device",
        "cpu",
        "--prompt",
        prompt,
        "--spec",
        spec,
        "--max-tokens",
        str(FRESH_LEN),
        "--temperature",
        "0",
    )
    command = [*COMMAND, "generate", "--chat", "--json", "--no-profile", *flags]
    keeping = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, text=True, env=keeping)
    if done.returncode:
        raise UserError(f"`sparkdraft generate` failed with status {done.returncode}: {last_lines(done.stderr)}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


# ---- the server


def server(wanted: Names, progress: Progress) -> dict[str, Sample]:
    """Send the same requests through HTTP and to an engine of this process, both with the defaults."""
    llm = LLM("smollm2", device="cpu", profile=NO_PROFILE)
    texts = [prompt for name in PROMPT_CLASSES.values() for prompt in read_prompts(SERVER_REQUESTS // 4)[name]]
    messages: list[Messages] = [[{"role": "user", "content": text}] for text in texts]
    counts = [streams for streams in (1, 4) if for_streams("server", streams) in wanted]
    samples = {}
    with serving("--device", "cpu") as url:
        for done, streams in enumerate(counts):
            offline, online = partial(_offline, llm, texts, streams), partial(_online, url, messages, streams)
            offline(), online()  # afterwards both have the prompts in their prefix cache
            inner = part(progress, done * SERVER_ROUNDS, len(counts) * SERVER_ROUNDS)
            found = in_turn(offline, online, SERVER_ROUNDS, inner)
            samples[for_streams("server", streams)] = found["tok_s"]
    return samples


def _offline(llm: LLM, texts: list[str], streams: int) -> Metrics:
    params = SamplingParams(SERVER_LEN)
    requests = [(ids, params) for ids in chat_prompts(llm, texts)]
    return {"tok_s": throughput(llm.engine, requests, streams).tok_s}


def _online(url: str, messages: list[Messages], streams: int) -> Metrics:
    async def measure() -> Metrics:
        async with Client(url, streams=streams) as client:
            await client.open()
            load = await keep_busy(client, messages, streams, SERVER_LEN)
            if failed := [sample.error for sample in load.samples if sample.error]:
                raise UserError(f"the server did not answer a request: {failed[0]}")
            return {"tok_s": sum(sample.tokens for sample in load.samples) / load.seconds}

    return asyncio.run(measure())


# ---- all of them


def _load_group(streams: int, requests: int, temperature: float, **names: str) -> Group:
    lines = {name.replace("_", "-"): metric for name, metric in names.items()}
    return Group(tuple(lines), partial(loads, streams, requests, temperature, lines))


GROUPS = (
    Group(("paused-drafter",), paused_drafter),
    Group(("drafted-code", "start-in-steps", "start-with-drafter"), partial(drafted, "code")),
    *(Group((f"drafted-{name}",), partial(drafted, name)) for name in ("json", "questions", "prose")),
    _load_group(1, 6, 0.7, auto_sampled="tok_s"),
    _load_group(4, 12, 0.0, auto_4_streams="tok_s"),
    _load_group(16, 16, 0.0, auto_16_streams="tok_s", first_token_16_streams="first_s"),
    Group(tuple(SAMPLINGS), sampling),
    Group(tuple(f"{smallest_format().name}-{context}-tokens" for context in CODED_CONTEXTS), smallest_cache),
    Group(("server-1-stream", "server-4-streams"), server),
    Group(("long-prompt-largest-gap", "long-prompt-median-gap", "long-prompt-first-token"), long_prompt),
)
