"""`sparkdraft bench`: measures what this machine reaches, against what it could reach."""

from __future__ import annotations

import asyncio
import json
import os
from argparse import ArgumentParser, Namespace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdraft.cli import bench_depth, bench_formats, bench_offline, bench_speed
from sparkdraft.cli.bench_offline import numbers
from sparkdraft.cli.options import add_engine_flags, engine_options, load_llm, read_text, temperature_list
from sparkdraft.config import EngineConfig
from sparkdraft.core import SamplingParams, UserError
from sparkdraft.util.progress import SELDOM, progress

if TYPE_CHECKING:
    from sparkdraft.llm import LLM
    from sparkdraft.operate.bench.serve import Settings

HELP = "measure speed"
EXAMPLES = """examples:
  sparkdraft bench offline
  sparkdraft bench offline --concurrency 1,4,8 --prompt-len 128,512
  sparkdraft bench offline --shape qwen3-8b --concurrency 1,16 --prompt-len 256 --profile            (random weights)
  sparkdraft bench offline --shape qwen3-8b --drafter-shape dflash-5x --synthetic-acceptance 6.5     (and drafts)
  sparkdraft bench offline --shape gpt-oss-20b --drafter-shape gpt-oss-20b-dflash --synthetic-acceptance 4.3
  sparkdraft bench perplexity --dtype quantised,float32
  sparkdraft bench accept --per-class 2 --temperature 0,1 --context 0,1024 --plot accept.svg
  sparkdraft bench accept --per-class 0 --speed                                (plain against drafted, one stream)
  sparkdraft bench depth --per-class 4 --concurrency 1,4 --plot depth.svg      (fixed depths against the chosen one)
  sparkdraft bench depth --shape qwen3-8b --drafter-shape dflash-5x --synthetic-acceptance 6.5 --concurrency 1,16
  sparkdraft bench kv --formats fp8,k4v3,k5v4 --plot kv.svg                    (what smaller KV caches cost and hold)
  sparkdraft bench weights --formats fp8,int4 --plot weights.svg               (what quantised weights cost)
  sparkdraft bench serve --url http://127.0.0.1:8000 --concurrency 1,4 --classes code,prose --out results
  sparkdraft bench long-prompt                                                 (gaps of 8 streams while it is read)
  sparkdraft bench check-speed --only paused-drafter,drafted-code              (ratios against what is expected)
"""


def configure(parser: ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    offline = kinds.add_parser("offline", help="decode and prefill speed against the memory bandwidth")
    bench_offline.configure(offline)
    perplexity = kinds.add_parser("perplexity", help="how well the weights predict unseen text, by dtype")
    perplexity.add_argument("--text", default="", metavar="FILE", help="the text (default: one made for this project)")
    add_engine_flags(perplexity, dtype="quantised,float32")
    accept = kinds.add_parser("accept", help="how many drafts are accepted, by class of prompt")
    accept.add_argument("--per-class", type=int, default=4, help="prompts of each class (default 4; 0: all)")
    accept.add_argument("--output-len", type=int, default=128, help="most tokens of output (default 128)")
    accept.add_argument("--depth", default="", help="drafts per step: auto or a number (default: the drafter's most)")
    accept.add_argument("--temperature", default="0", help="a list (default 0)")
    accept.add_argument("--context", default="0", help="tokens of other text before each prompt, a list (default 0)")
    accept.add_argument("--plot", default="", metavar="FILE", help="draw acceptance by position, as SVG")
    accept.add_argument("--speed", action="store_true", help="also plain against drafted speed, one stream")
    add_engine_flags(accept, ngram=False)
    depth = kinds.add_parser("depth", help="fixed depths of drafting against the chosen one, by class and streams")
    bench_depth.configure(depth)
    kv = kinds.add_parser("kv", help="KV formats: memory, perplexity and divergence beside the exact cache")
    bench_formats.configure_kv(kv)
    weights = kinds.add_parser("weights", help="weight formats: bytes, perplexity and divergence beside floats")
    bench_formats.configure_weights(weights)
    serve = kinds.add_parser("serve", help="an OpenAI-compatible server: speed and latency, by class and streams")
    _configure_serve(serve)
    long_prompt = kinds.add_parser("long-prompt", help="a long prompt that arrives while others decode")
    bench_speed.configure_long_prompt(long_prompt)
    check = kinds.add_parser("check-speed", help="ratios of speeds against a file of expected ones")
    bench_speed.configure_check(check)
    for kind in (offline, perplexity, accept, depth, kv, weights, serve, long_prompt, check):
        kind.epilog = EXAMPLES


def _configure_serve(serve: ArgumentParser) -> None:
    serve.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default http://127.0.0.1:8000)")
    serve.add_argument("--api-key", default="", help="its key, if it wants one (default: SPARKDRAFT_API_KEY)")
    serve.add_argument("--model", default="", help="a model that it serves (default: the first)")
    serve.add_argument("--concurrency", default="1,4,8,16", help="streams at once, a list (default 1,4,8,16)")
    serve.add_argument("--classes", default="", help="classes of prompts, a list (default: all)")
    serve.add_argument("--output-len", type=int, default=256, help="most tokens per answer (default 256)")
    serve.add_argument("--requests", type=int, default=0, help="requests per class (default: 8, or as many as streams)")
    serve.add_argument("--temperature", type=float, default=0.0, help="default 0")
    serve.add_argument("--ignore-eos", action="store_true", help="write up to --output-len, past the model's own end")
    serve.add_argument("--out", default="", metavar="FOLDER", help="write serve.json, serve.md and serve.svg there")


def run(args: Namespace) -> int:
    kinds = {
        "perplexity": _perplexity,
        "offline": bench_offline.run,
        "accept": _accept,
        "depth": bench_depth.run,
        "kv": bench_formats.run_kv,
        "weights": bench_formats.run_weights,
        "serve": _serve,
        "long-prompt": bench_speed.run_long_prompt,
        "check-speed": bench_speed.run_check,
    }
    return kinds[args.kind](args)


def _serve(args: Namespace) -> int:
    from sparkdraft.operate.bench import serve

    settings, folder = _serve_settings(args), Path(args.out) if args.out else None
    result, status = serve.Result(settings), 0
    try:
        with progress(f"asking {settings.url}") as meter:
            asyncio.run(serve.measure(settings, result, meter.stage))
    except KeyboardInterrupt:
        if not result.cells:
            raise
        status = 130  # what was measured so far is still worth having
    found = serve.summary(result)
    print(serve.markdown(found) + "\n")
    for path in serve.write(found, folder) if folder else ():
        print(f"wrote {path}")
    print(json.dumps(found))
    return status


def _serve_settings(args: Namespace) -> Settings:
    """Refuse what cannot be measured, before anything is sent."""
    from sparkdraft.operate.bench.serve import Settings, read_prompts, server_root

    if args.output_len < 8:
        raise UserError(f"--output-len is {args.output_len}; it must be at least 8")
    if args.requests < 0:
        raise UserError(f"--requests is {args.requests}; it must be positive, or 0 for the default")
    if not 0 <= args.temperature <= 2:
        raise UserError(f"--temperature is {args.temperature:g}; it must be from 0 to 2")
    classes = tuple(dict.fromkeys(name.strip() for name in args.classes.split(",") if name.strip()))
    streams = tuple(dict.fromkeys(numbers("--concurrency", args.concurrency)))
    if max(streams) > 1024:
        raise UserError(f"--concurrency is '{args.concurrency}'; at most 1024 streams run at once")
    if 0 < args.requests < max(streams):
        raise UserError(
            f"--requests is {args.requests}, too few for {max(streams)} streams at once: ask for as many or more, or "
            "give fewer streams (--concurrency)"
        )
    url, key = server_root(args.url), args.api_key or os.environ.get("SPARKDRAFT_API_KEY", "")
    read_prompts(classes)
    if args.out:
        try:
            Path(args.out).mkdir(parents=True, exist_ok=True)
            (Path(args.out) / "serve.md").touch()
        except OSError as error:
            raise UserError(f"--out is {args.out}, which cannot be written to: {error.strerror}") from None
    sampling = {"temperature": args.temperature, "ignore_eos": args.ignore_eos}
    return Settings(url, key, args.model, streams, classes, args.output_len, args.requests, **sampling)


def _accept(args: Namespace) -> int:
    contexts, temperatures = numbers("--context", args.context, 0), temperature_list(args.temperature)
    _check_accept(args, max(contexts))
    from sparkdraft.operate.bench import accept
    from sparkdraft.util import plot

    llm = load_llm(args, ngram=args.ngram or args.speed)  # the speed is that of the default engine, so with n-grams
    depth = None if args.depth == "auto" else int(args.depth or llm.engine.drafting.max_depth)
    shown = "depth chosen every step" if depth is None else f"{depth} drafts per step"
    print(f"{args.model} on {llm.plan.device}, {llm.plan.weights}; {shown}{', n-grams too' if args.ngram else ''}")
    groups, panels, texts = [], [], accept.read_prompts(args.per_class)
    _check_prompts(args, llm, max(contexts))
    llm.engine.drafting.ngram = args.ngram
    for context, temperature in product(contexts, temperatures):
        params = SamplingParams(args.output_len, temperature=temperature, seed=0, num_draft=depth)
        prompts = {name: accept.chat_prompts(llm, each, context) for name, each in texts.items()}
        with progress("measuring acceptance") as report:
            rows = accept.over_classes(partial(accept.measure, llm, params), prompts, report)
        title = f"temperature {temperature:g}, {context} tokens of added context"
        print(f"\n{title}\n{accept.table(rows)}\n\n{accept.bars(rows[accept.ALL].stats)}")
        panels.append(accept.panel(title, rows))
        classes = {name: row.as_dict() for name, row in rows.items()}
        everything = classes.pop(accept.ALL)
        groups.append({"temperature": temperature, "context": context, "classes": classes, "all": everything})
    if args.plot:
        Path(args.plot).write_text(plot.svg(panels), encoding="utf-8")
    summary = {"bench": "accept", "model": args.model, "device": llm.plan.device, "dtype": llm.plan.weights}
    summary |= {"depth": depth, "ngram": args.ngram, "output_len": args.output_len, "groups": groups}
    print(json.dumps(summary | ({"speed": _speed(args, llm, temperatures[0])} if args.speed else {})))
    return 0


def _speed(args: Namespace, llm: LLM, temperature: float) -> dict[str, dict[str, float]]:
    """Measure plain against drafted, one stream: drafting must not be slower than plain."""
    from sparkdraft.operate.bench import accept

    llm.engine.drafting.ngram = True
    params = SamplingParams(args.output_len, temperature=temperature, seed=0)
    prompts = {name: accept.chat_prompts(llm, each) for name, each in accept.read_prompts(args.per_class).items()}
    with progress("measuring speed", redraw=SELDOM) as report:
        accept.pace(llm, params, accept.chat_prompts(llm, ["Why is the sky blue?"]), lambda more: None)  # warm-up
        paces = accept.over_classes(partial(accept.pace, llm, params), prompts, report)
    print(f"\none stream, temperature {temperature:g}, depth as the engine chooses\n{accept.speed_table(paces)}\n")
    return {name: each.as_dict() for name, each in paces.items()}


def _check_prompts(args: Namespace, llm: LLM, context: int) -> None:
    """Refuse answers that the context would cut off, before anything is measured."""
    from sparkdraft.operate.bench import accept

    texts = [text for each in accept.read_prompts(args.per_class).values() for text in each]
    _check_room(args, max(map(len, accept.chat_prompts(llm, texts, context))), llm.plan.max_model_len)


def _check_room(args: Namespace, prompt: int, most: int) -> None:
    if prompt + args.output_len > most:
        raise UserError(
            f"--context is {args.context}: a prompt of {prompt} tokens and {args.output_len} of output do not fit into "
            f"the {most} that a request may have; ask for less"
        )


def _check_accept(args: Namespace, context: int) -> None:
    """Refuse what cannot be measured, before any weight is read."""
    if args.per_class < 0:
        raise UserError(f"--per-class is {args.per_class}; it must be 0 (all) or positive")
    if args.output_len < 8:
        raise UserError(f"--output-len is {args.output_len}; it must be at least 8")
    if args.depth not in ("", "auto") and not (args.depth.isdecimal() and int(args.depth)):
        raise UserError(f"--depth is '{args.depth}'; give auto or a positive number of drafts")
    plot = Path(args.plot).absolute()
    if args.plot and (plot.is_dir() or not plot.parent.is_dir()):
        raise UserError(f"--plot is {args.plot}; give a file in a folder that exists")
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


def _perplexity(args: Namespace) -> int:
    from sparkdraft.operate.bench.formats import HELDOUT, perplexity

    text = read_text(args.text or str(HELDOUT))
    results = []
    for dtype in args.dtype.split(","):
        llm = load_llm(args, dtype=dtype)
        with progress(f"reading the text in {dtype}"):
            value, count = perplexity(llm, text)
        results.append({"dtype": dtype, "perplexity": round(value, 4), "tokens": count})
        change = f"{value / results[0]['perplexity'] - 1:+.2%} of {results[0]['dtype']}" if results[1:] else ""
        print(f"{dtype:<12} perplexity {value:8.3f} over {count} tokens  {change}")
    print(json.dumps({"bench": "perplexity", "model": args.model, "results": results}))
    return 0
