"""`sparkdraft bench`: measures what this machine reaches, against what it could reach."""

from __future__ import annotations

import asyncio
import json
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdraft.cli import bench_depth, bench_formats, bench_offline, bench_speed, bench_traffic
from sparkdraft.cli.bench_offline import numbers
from sparkdraft.cli.options import (
    add_engine_flags,
    add_sampling_group,
    check_least,
    engine_options,
    given_sampling,
    load_llm,
    temperature_list,
)
from sparkdraft.config import EngineConfig
from sparkdraft.core import SamplingParams, UserError
from sparkdraft.util.progress import progress

if TYPE_CHECKING:
    from sparkdraft.llm import LLM
    from sparkdraft.operate.bench.serve import Settings

STREAMS = [1, 4, 8, 16]
MOST_STREAMS = 1024
HELP = "measure speed"
EXAMPLES = """examples:
  sparkdraft bench offline
  sparkdraft bench offline --concurrency 1,4,8 --prompt-len 128,512
  sparkdraft bench offline --shape qwen3-8b --concurrency 1,16 --prompt-len 256                      (random weights)
  sparkdraft bench offline --temperature 0.7 --top-p 0.8 --presence-penalty 1.5 --concurrency 1,16
  sparkdraft bench offline --shape qwen3-8b --drafter-shape dflash-5x --synthetic-acceptance 6.5     (and drafts)
  sparkdraft bench offline --shape gpt-oss-20b --drafter-shape gpt-oss-20b-dflash --synthetic-acceptance 4.3
  sparkdraft bench accept --per-class 2 --temperature 0,1 --context 0,1024
  sparkdraft bench depth --per-class 4 --concurrency 1,4                      (fixed depths against the chosen one)
  sparkdraft bench depth --shape qwen3-8b --drafter-shape dflash-5x --synthetic-acceptance 6.5 --concurrency 1,16
  sparkdraft bench kv --formats fp8,k4v3,k5v4                                  (what smaller KV caches cost and hold)
  sparkdraft bench weights --formats fp8,int4                                 (what quantised weights cost)
  sparkdraft bench serve --url http://127.0.0.1:8000 --concurrency 1,4 --classes code,prose --out results
  sparkdraft bench serve --prompt-len 64:512 --output-len 100:300 --concurrency 1,16,64 --temperature 0.6 --top-p 0.95
  sparkdraft bench serve --prompt-len 64:512 --output-len 100:300 --request-rate 20 --goodput ttft:150 tpot:20
  sparkdraft bench offline --prompt-len 64:512 --output-len 100:300 --concurrency 1,16,64     (the same without HTTP)
  sparkdraft bench long-prompt                                                 (gaps of 8 streams while it is read)
  sparkdraft bench check-speed --only paused-drafter,drafted-code              (ratios against what is expected)
"""


def configure(parser: ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, (text, configure_kind, _) in KINDS.items():
        configure_kind(kinds.add_parser(name, help=text, epilog=EXAMPLES))


def run(args: Namespace) -> int:
    return KINDS[args.kind][2](args)


def _configure_accept(accept: ArgumentParser) -> None:
    accept.add_argument("--per-class", type=int, default=4, help="prompts of each class (default 4; 0: all)")
    accept.add_argument("--output-len", type=int, default=128, help="most tokens of output (default 128)")
    accept.add_argument("--depth", default="", help="drafts per step: auto or a number (default: the drafter's most)")
    accept.add_argument("--temperature", default="0", help="a list (default 0)")
    accept.add_argument("--context", default="0", help="tokens of other text before each prompt, a list (default 0)")
    add_engine_flags(accept, ngram=False)


def _configure_serve(serve: ArgumentParser) -> None:
    serve.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default http://127.0.0.1:8000)")
    serve.add_argument("--api-key", default="", help="its key, if it wants one (default: SPARKDRAFT_API_KEY)")
    serve.add_argument("--model", default="", help="a model that it serves (default: the first)")
    serve.add_argument("--concurrency", default="", help="streams at once, a list (default 1,4,8,16)")
    serve.add_argument("--classes", default="", help="classes of prompts, a list (default: all)")
    serve.add_argument(
        "--prompt-len", default="", metavar="RANGE", help="instead of classes, prompts of random ids: 64:512, or 256"
    )
    serve.add_argument("--output-len", default="256", help="most tokens per answer; with --prompt-len also a range")
    serve.add_argument(
        "--requests",
        type=int,
        default=0,
        help="requests per class (default: 8, or as many as streams); with --prompt-len in all (default: 8 per stream)",
    )
    serve.add_argument("--ignore-eos", action="store_true", help="write up to --output-len, past the model's own end")
    serve.add_argument("--out", default="", metavar="FOLDER", help="write serve.json and serve.md there")
    add_sampling_group(serve, SamplingParams(), bench_traffic.SAMPLED)
    bench_traffic.add_traffic_flags(serve)


def _serve(args: Namespace) -> int:
    from sparkdraft.operate.bench import serve

    _check_sampling(args)
    report, table, status = (_over_traffic if args.prompt_len else _over_classes)(args)
    print(table + "\n")
    for path in serve.write(report, table, Path(args.out)) if args.out else ():
        print(f"wrote {path}")
    print(json.dumps(report))
    return status


def _over_traffic(args: Namespace) -> tuple[dict[str, Any], str, int]:
    if args.classes:
        raise UserError("--classes names prompts and --prompt-len draws them: give one of the two")
    traffic = bench_traffic.read_traffic(args)
    streams = bench_traffic.streams_at_once(traffic, _serve_streams(args), STREAMS)
    url, key = _server(args)
    _make_folder(args.out)
    return bench_traffic.over_http(url, key, args.model, streams, traffic)


def _over_classes(args: Namespace) -> tuple[dict[str, Any], str, int]:
    from sparkdraft.operate.bench import serve

    bench_traffic.check_unused(args)
    settings = _serve_settings(args)
    result, status = serve.Result(settings), 0
    try:
        with progress(f"asking {settings.url}") as meter:
            asyncio.run(serve.measure(settings, result, meter.stage))
    except KeyboardInterrupt:
        if not result.cells:
            raise
        status = 130  # what was measured so far is still worth having
    found = serve.summary(result)
    return found, serve.markdown(found), status


def _serve_settings(args: Namespace) -> Settings:
    """Refuse what cannot be measured, before anything is sent."""
    from sparkdraft.operate.bench.serve import Settings, read_prompts

    args.output_len = bench_offline.one_length(args.output_len)
    check_least(args, output_len=8, requests=0)
    classes = tuple(dict.fromkeys(name.strip() for name in args.classes.split(",") if name.strip()))
    streams, (url, key) = tuple(_serve_streams(args) or STREAMS), _server(args)
    read_prompts(classes)
    _make_folder(args.out)
    sampling = given_sampling(args)
    return Settings(url, key, args.model, streams, classes, args.output_len, args.requests, sampling, args.ignore_eos)


def _server(args: Namespace) -> tuple[str, str]:
    from sparkdraft.operate.bench.serve import server_root

    return server_root(args.url), args.api_key or os.environ.get("SPARKDRAFT_API_KEY", "")


def _serve_streams(args: Namespace) -> list[int]:
    """Read --concurrency; empty if it is not given."""
    streams = list(dict.fromkeys(numbers("--concurrency", args.concurrency))) if args.concurrency else []
    if max(streams, default=0) > MOST_STREAMS:
        raise UserError(f"--concurrency is '{args.concurrency}'; at most {MOST_STREAMS} streams run at once")
    if 0 < args.requests < max(streams, default=0):
        raise UserError(
            f"--requests is {args.requests}, too few for {max(streams)} streams at once: ask for as many or more, or "
            "give fewer streams (--concurrency)"
        )
    return streams


def _check_sampling(args: Namespace) -> None:
    if args.temperature is not None and not 0 <= args.temperature <= 2:
        raise UserError(f"--temperature is {args.temperature:g}; it must be from 0 to 2")
    SamplingParams(**given_sampling(args))


def _make_folder(out: str) -> None:
    if not out:
        return
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        (Path(out) / "serve.md").touch()
    except OSError as error:
        raise UserError(f"--out is {out}, which cannot be written to: {error.strerror}") from None


def _accept(args: Namespace) -> int:
    contexts, temperatures = numbers("--context", args.context, 0), temperature_list(args.temperature)
    _check_accept(args, max(contexts))
    llm = load_llm(args)
    depth = None if args.depth == "auto" else int(args.depth or llm.engine.drafting.max_depth)
    shown = "depth chosen every step" if depth is None else f"{depth} drafts per step"
    print(f"{args.model} on {llm.plan.device}, {llm.plan.weights}; {shown}{', n-grams too' if args.ngram else ''}")
    _check_prompts(args, llm, max(contexts))
    llm.engine.drafting.ngram = args.ngram
    groups = accepted(llm, args.per_class, args.output_len, depth, temperatures, contexts)
    summary = {"bench": "accept", "model": args.model, "device": llm.plan.device, "dtype": llm.plan.weights}
    summary |= {"depth": depth, "ngram": args.ngram, "output_len": args.output_len, "groups": groups}
    print(json.dumps(summary))
    return 0


def accepted(
    llm: LLM,
    per_class: int,
    output_len: int,
    depth: int | None,
    temperatures: Sequence[float],
    contexts: Sequence[int] = (0,),
) -> list[dict[str, Any]]:
    """Measure and print how many drafts are accepted at each context and temperature, and return it for JSON."""
    from sparkdraft.operate.bench import accept
    from sparkdraft.operate.bench.prompts import chat_prompts, read_prompts

    groups, texts = [], read_prompts(per_class)
    for context, temperature in product(contexts, temperatures):
        params = SamplingParams(output_len, temperature=temperature, seed=0, num_draft=depth)
        prompts = {name: chat_prompts(llm, each, context) for name, each in texts.items()}
        with progress("measuring acceptance", "answers", shows_left=True) as report:
            rows = accept.over_classes(partial(accept.measure, llm, params), prompts, report)
        title = f"temperature {temperature:g}" + (f", {context} tokens of added context" if context else "")
        print(f"\n{title}\n{accept.table(rows)}")
        classes = {name: row.as_dict() for name, row in rows.items()}
        everything = classes.pop(accept.ALL)
        groups.append({"temperature": temperature, "context": context, "classes": classes, "all": everything})
    return groups


def _check_prompts(args: Namespace, llm: LLM, context: int) -> None:
    """Refuse answers that the context would cut off, before anything is measured."""
    from sparkdraft.operate.bench.prompts import chat_prompts, read_prompts

    texts = [text for each in read_prompts(args.per_class).values() for text in each]
    _check_room(args, max(map(len, chat_prompts(llm, texts, context))), llm.plan.max_model_len)


def _check_room(args: Namespace, prompt: int, most: int) -> None:
    if prompt + args.output_len > most:
        raise UserError(
            f"--context is {args.context}: a prompt of {prompt} tokens and {args.output_len} of output do not fit into "
            f"the {most} that a request may have; ask for less"
        )


def _check_accept(args: Namespace, context: int) -> None:
    """Refuse what cannot be measured, before any weight is read."""
    check_least(args, per_class=0, output_len=8)
    if args.depth not in ("", "auto") and not (args.depth.isdecimal() and int(args.depth)):
        raise UserError(f"--depth is '{args.depth}'; give auto or a positive number of drafts")
    from sparkdraft.engine.load import open_model, stored_of
    from sparkdraft.engine.machine import plan_here

    found = open_model(EngineConfig(**engine_options(args)))
    if found.caps is None:
        raise UserError(f"{args.model} has no drafter to measure; name one with --drafter, and leave --spec on auto")
    if args.depth.isdecimal() and int(args.depth) > found.caps.max_depth:
        raise UserError(
            f"--depth is {args.depth}; this drafter drafts at most {found.caps.max_depth} per step: ask for fewer"
        )
    stored = stored_of(found.config, found.checkpoint, found.model_config, found.caps)
    _check_room(args, context, plan_here(found.config, found.model_config, found.caps, stored).max_model_len)


# Each kind: its help, and what adds its flags and runs it
KINDS: dict[str, tuple[str, Callable[[ArgumentParser], None], Callable[[Namespace], int]]] = {
    "offline": ("decode and prefill speed against the memory bandwidth", bench_offline.configure, bench_offline.run),
    "accept": ("how many drafts are accepted, by class of prompt", _configure_accept, _accept),
    "depth": (
        "fixed depths of drafting against the chosen one, by class and streams",
        bench_depth.configure,
        bench_depth.run,
    ),
    "kv": (
        "KV formats: memory, perplexity and divergence beside the exact cache",
        bench_formats.configure_kv,
        bench_formats.run_kv,
    ),
    "weights": (
        "weight formats: bytes, perplexity and divergence beside floats",
        bench_formats.configure_weights,
        bench_formats.run_weights,
    ),
    "serve": ("an OpenAI-compatible server: speed and latency, by class and streams", _configure_serve, _serve),
    "long-prompt": (
        "a long prompt that arrives while others decode",
        bench_speed.configure_long_prompt,
        bench_speed.run_long_prompt,
    ),
    "check-speed": (
        "ratios of speeds against a file of expected ones",
        bench_speed.configure_check,
        bench_speed.run_check,
    ),
}
