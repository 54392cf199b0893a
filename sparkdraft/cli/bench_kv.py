"""`sparkdraft bench kv`: compares KV formats by memory, perplexity, KL divergence and decode speed.

It reads flags and prints tables, a plot and one line of JSON; operate/bench/formats.py measures. An engine is made for
each format,
used for reading and timing, and released before the next. Random weights (--shape) have no perplexity, so only memory
and speed are reported for them.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdraft.cache.formats import EXACT, only_for
from sparkdraft.cli.bench_offline import make_engine, numbers, streams_of
from sparkdraft.cli.bench_texts import (
    ceilings_of,
    check_plot,
    check_tokens,
    comparison_of,
    nearness_panels,
    text_header,
    text_legend,
    text_line,
)
from sparkdraft.cli.options import add_engine_flags, engine_options, load_llm
from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.util.progress import SELDOM, progress

if TYPE_CHECKING:
    from sparkdraft.engine.engine import Engine
    from sparkdraft.llm import LLM
    from sparkdraft.models.common.config import ModelConfig
    from sparkdraft.operate.bench.formats import Comparison, Format, KvFound
    from sparkdraft.operate.bench.offline import Ceilings, Load
    from sparkdraft.plan.resolve import Plan
    from sparkdraft.util.plot import Panel
    from sparkdraft.weights.checkpoint import Checkpoint

FORMATS = "exact,fp8,k4v3,k5v4,k4v3-full"
UNCENTRED = "k4v3-uncentred,k4v3-full-uncentred"  # to show what centring brings
CONTEXTS = {"cpu": "256", "cuda": "4000,16000,32000"}  # as far as the model's context allows
STEPS = {"cpu": 8, "cuda": 64}  # timed decode steps
FORMAT_LEGEND = (
    "kNvM: TurboQuant, N bits per number of a key and M of a value; first and last tokens uncoded, except -full; each "
    "layer's mean key subtracted first, except -uncentred"
)


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--shape", default="", help="random weights of a named shape instead of a model: no perplexity")
    parser.add_argument("--formats", default="", help=f"a list (default {FORMATS},{UNCENTRED})")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per text, read as one context (default 2048)")
    parser.add_argument(
        "--context", help=f"tokens of context to time, a list (default {CONTEXTS['cuda']}; on a CPU {CONTEXTS['cpu']})"
    )
    parser.add_argument("--no-speed", dest="context", action="store_const", const="", help="the same as --context ''")
    parser.add_argument("--concurrency", default="1", help="streams at once, a list (default 1)")
    parser.add_argument(
        "--plot", default="", metavar="FILE", help="draw rise and divergence by position, speed by context, as SVG"
    )
    add_engine_flags(parser, without=("prefix_cache", "tq_centre", "count_ids"), spec="off")


def run(args: Namespace) -> int:
    formats, streams = _check(args), streams_of(args)
    from sparkdraft.models.registry import read_config
    from sparkdraft.operate.bench.formats import KvFound, memories
    from sparkdraft.operate.bench.offline import release
    from sparkdraft.operate.bench.random_model import shape
    from sparkdraft.weights.checkpoint import open_checkpoint

    checkpoint = None if args.shape else open_checkpoint(args.model)
    model = read_config(checkpoint.config) if checkpoint else shape(args.shape)
    plans = _plans(args, formats, model, checkpoint)
    plan = plans[EXACT]
    loads, comparison = (
        _loads(args, plan, streams),
        comparison_of(args.tokens, plan, checkpoint) if checkpoint else None,
    )
    found = {name: KvFound(memory) for name, memory in memories(plans, model, args.memory_fraction).items()}
    args.max_seqs = args.max_seqs or max(streams)
    ceilings = ceilings_of(plan) if loads else None
    label = f"{args.shape}, random weights" if args.shape else args.model
    sizes = _memory_table(found, plan, args.memory_fraction)
    print(f"{label} on {plan.device}, {plan.weights}\n\n{sizes}\n{FORMAT_LEGEND}\n", flush=True)
    if comparison:
        print(text_header(comparison), flush=True)
    for fmt in formats:
        _measure(args, fmt, model, found, comparison, loads, ceilings)
        release(plan.device)  # the next engine then finds the same free memory
    if comparison:
        print(f"{text_legend('the exact cache')}\n")
    if loads:
        print(f"{_speed_table(found, plan)}\n")
    if args.plot:
        from sparkdraft.util.plot import svg

        Path(args.plot).write_text(svg(_panels(found)), encoding="utf-8")
    summary: dict[str, Any] = {"bench": "kv", "model": label, "random_weights": bool(args.shape)}
    summary |= {"device": plan.device, "dtype": plan.weights, "kernels": plan.kernels}
    summary["bandwidth_gb_s"] = round(ceilings.bandwidth / 1e9, 1) if ceilings else None
    rows = [{"format": name} | each.as_dict(found[EXACT]) for name, each in found.items()]
    print(json.dumps(summary | {"formats": rows}))
    return 0


# ---- checks before any weight is read


def _check(args: Namespace) -> list[Format]:
    for name in ("kv", "tq_mode", "tq_key_bits", "tq_value_bits"):
        if getattr(args, name) != getattr(EngineConfig(), name):
            raise UserError(f"--{name.replace('_', '-')} is given; here --formats says how keys and values are kept")
    if args.spec != "off":
        raise UserError(f"--spec is {args.spec}; formats are compared without drafts: leave it off")
    check_tokens(args.tokens)
    check_plot(args.plot)
    if args.context:
        numbers("--context", args.context)
    from sparkdraft.operate.bench.formats import parse_kv_formats

    formats = parse_kv_formats(args.formats or (FORMATS if args.shape else f"{FORMATS},{UNCENTRED}"))
    uncentred = next((fmt.name for fmt in formats if not fmt.is_centred), None)
    if args.shape and uncentred:
        raise UserError(f"--formats names {uncentred}; random weights are never centred: leave it out")
    return formats


def _plans(
    args: Namespace, formats: Sequence[Format], model: ModelConfig, checkpoint: Checkpoint | None
) -> dict[str, Plan]:
    """The plan of each format. Fills in the dtype if it was left open on a CPU, whose packed kernels keep only an exact
    cache. checkpoint: None for a shape."""
    from sparkdraft.engine.load import stored_of
    from sparkdraft.engine.machine import detect, plan_here
    from sparkdraft.operate.bench.random_model import random_checkpoint

    if args.dtype == "auto" and detect(EngineConfig(device=args.device)).device == "cpu":
        args.dtype = "float32"
    named = {"model": args.shape or args.model}
    configs = {fmt.name: EngineConfig(**engine_options(_flags_of(args, fmt)) | named) for fmt in formats}
    source = checkpoint or random_checkpoint(args.shape, "cpu")
    return {name: plan_here(each, model, stored=stored_of(each, source, model)) for name, each in configs.items()}


def _flags_of(args: Namespace, fmt: Format) -> Namespace:
    """The flags for one format's engine, without those that only other formats read."""
    return Namespace(**only_for(fmt.options["kv"], vars(args)) | fmt.options)


def _loads(args: Namespace, plan: Plan, streams: Sequence[int]) -> list[Load]:
    from sparkdraft.operate.bench.offline import Load

    steps, most = STEPS[plan.device], plan.max_model_len
    if args.context is None:
        contexts = [n for n in numbers("--context", CONTEXTS[plan.device]) if n + 2 * steps <= most]
    else:
        contexts = numbers("--context", args.context) if args.context else []
    if max(contexts, default=0) + steps >= most:
        raise UserError(f"--context is {args.context}; with {steps} tokens of output {most} is the most: ask for less")
    return [Load(n, context, steps) for n, context in product(streams, contexts)]


# ---- measuring


def _measure(
    args: Namespace,
    fmt: Format,
    model: ModelConfig,
    found: Mapping[str, KvFound],
    comparison: Comparison | None,
    loads: Sequence[Load],
    ceilings: Ceilings | None,
) -> None:
    """Measure one format, from the making of its engine to its end, and print its line of the texts' table."""
    from sparkdraft.operate.bench.offline import DecodeBench

    own = _flags_of(args, fmt)
    llm: LLM | None = None
    engine: Engine
    if args.shape:
        engine, _, _ = make_engine(own, None)
    else:
        llm = load_llm(own, prefix_cache=False)
        engine = llm.engine
    bench = DecodeBench(engine, model, ceilings) if ceilings else None
    if bench:
        for load in loads:
            bench.check(load)
    if comparison and llm:
        with progress(f"{fmt.name}: reading the texts") as report:
            found[fmt.name].readings = comparison.read(llm, report)
        print(text_line(fmt.name, found[fmt.name], found[EXACT]), flush=True)
    if bench:
        for load in loads:
            label = f"{fmt.name}: {load.streams} streams, {load.prompt_len} tokens of context"
            with progress(label, redraw=SELDOM) as report:
                found[fmt.name].speeds.append(bench.decode(load, report))


# ---- printing


def _memory_table(found: Mapping[str, KvFound], plan: Plan, fraction: float) -> str:
    lines = [f"{'format':<20} bytes/token    bits/value    tokens/GiB  tokens that fit  of exact"]
    for name, each in found.items():
        memory = each.memory
        sizes = f"{memory.bytes_per_token:13}  {memory.bits_per_value:12.2f}  {memory.tokens_per_gib:12}"
        lines.append(f"{name:<20} {sizes}  {memory.tokens_that_fit:15}  {memory.of_exact:8.2f}")
    share, value = round(100 * fraction), found[EXACT].memory.bits_per_value / 8
    lines.append(
        f"tokens that fit: in {share} % of the {plan.memory.free / 2**30:.1f} free GiB, less weights, "
        f"states, a step's scratch, recordings and pages. exact keeps {value:g} bytes per value here"
        f"{', twice what it does on a GPU' if value == 4 else ''}"
    )
    return "\n".join(lines)


def _speed_table(found: Mapping[str, KvFound], plan: Plan) -> str:
    exact = found[EXACT].speeds
    lines = ["decode tok/s".ljust(20) + "".join(f"{f'{s.streams} x {s.context}':>18}" for s in exact)]
    for name, each in found.items():
        pairs = zip(each.speeds, exact, strict=True)
        cells = [f"{f'{own.decode_tok_s:.1f} ({own.decode_tok_s / base.decode_tok_s:.2f})':>18}" for own, base in pairs]
        lines.append(f"{name:<20}{''.join(cells)}")
    lines.append("streams x tokens of context; tokens per second of all streams together (ratio to exact)")
    if plan.kernels == "reference":
        lines.append("these are the reference kernels, which are not made for speed: judge a format's speed on a GPU")
    return "\n".join(lines)


def _panels(found: Mapping[str, KvFound]) -> list[Panel]:
    """The exact cache comes last, and only where it is not the zero line, so that each format keeps its colour."""
    from sparkdraft.util.plot import Line, Panel

    exact = found[EXACT]
    others = {_short(name): each for name, each in found.items() if name != EXACT}
    panels = nearness_panels(others, exact, EXACT)
    for streams in dict.fromkeys(speed.streams for speed in exact.speeds):
        lines = [
            Line(name, [(s.context, s.decode_tok_s) for s in each.speeds if s.streams == streams], name == EXACT)
            for name, each in (others | {EXACT: exact}).items()
        ]
        if len(lines[-1].points) > 1:  # a single point is not a line
            panels.append(Panel(f"decode speed, {streams} at once", lines, "tokens of context", "tokens per second"))
    return panels


def _short(name: str) -> str:
    """A name that fits into the plot."""
    return name.replace("uncentred", "unc.")
