"""`sparkdraft bench weights`: compares weight formats by bytes, perplexity, KL divergence and decode speed.

It reads flags and prints tables, a plot and one line of JSON; operate/bench/formats.py measures. Each format is the
model's
floats, quantised as `--weights` does it. On a CPU texts are read in float32, so that they show the format alone, and
speed is measured in another engine, with the CPU's own kernels, which keep some formats in 8 bits. On a GPU one engine
does both.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdraft.cli.bench_offline import numbers
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
    from sparkdraft.llm import LLM
    from sparkdraft.models.common.config import ModelConfig
    from sparkdraft.operate.bench.formats import Comparison, WeightsFound
    from sparkdraft.operate.bench.offline import Ceilings, Load
    from sparkdraft.plan.resolve import Plan
    from sparkdraft.util.plot import Panel
    from sparkdraft.weights.checkpoint import Checkpoint

FORMATS = "fp8,int4,nvfp4"
ROWS = "1,4,16"
STEPS = {"cpu": 16, "cuda": 64}  # timed decode steps
BYTES_LEGEND = (
    "bytes/weight: of the layers' matrices with their scales, as the format has them, and as they are kept where speed "
    "was measured; the head, the embedding, routers and norms stay as they are"
)
SPEED_LEGEND = (
    "decode tok/s of all rows together, a row per stream (ratio to floats, share of the floor: bytes that a step must "
    "read over the measured memory bandwidth)"
)


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--formats", default=FORMATS, help=f"a list (default {FORMATS}); floats are always measured")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per text, read as one context (default 2048)")
    parser.add_argument("--rows", default=ROWS, help=f"rows per decode step to time, a list (default {ROWS})")
    parser.add_argument("--no-speed", dest="rows", action="store_const", const="", help="the same as --rows ''")
    parser.add_argument("--context", type=int, default=128, help="tokens before the timed steps (default 128)")
    parser.add_argument("--plot", default="", metavar="FILE", help="draw rise, divergence and speed, as SVG")
    add_engine_flags(parser, without=("weights", "weights_cache", "prefix_cache", "count_ids"), spec="off")


def run(args: Namespace) -> int:
    formats, rows = _check(args)
    from sparkdraft.models.registry import read_config
    from sparkdraft.operate.bench.formats import FLOATS, FloatCheckpoint, WeightsFound, format_bytes
    from sparkdraft.weights.checkpoint import open_checkpoint

    checkpoint = FloatCheckpoint(open_checkpoint(args.model))
    model = read_config(checkpoint.config)
    args.max_seqs = args.max_seqs or max(rows, default=1)
    reading, timing = (_plan(args, model, checkpoint, each) for each in _dtypes(args))
    loads, comparison = _loads(args, timing, rows), comparison_of(args.tokens, reading, checkpoint)
    size = 4 if reading.dtype == "float32" else 2
    found = {name: WeightsFound(format_bytes(name, model.hidden_size, size)) for name in formats}
    ceilings = ceilings_of(timing) if loads else None
    print(
        f"{args.model} on {timing.device}; texts are read in {reading.weights}\n\n{text_header(comparison)}", flush=True
    )
    for name in formats:
        _measure(args, name, checkpoint, model, found, comparison, loads, ceilings)
    print(f"{text_legend('floats')}\n\n{_size_table(found, timing)}\n")
    if args.plot:
        from sparkdraft.util.plot import svg

        Path(args.plot).write_text(svg(_panels(found)), encoding="utf-8")
    summary: dict[str, Any] = {"bench": "weights", "model": args.model, "device": timing.device}
    summary |= {"read_in": reading.weights, "timed_in": timing.weights if loads else None, "kernels": timing.kernels}
    summary["bandwidth_gb_s"] = round(ceilings.bandwidth / 1e9, 1) if ceilings else None
    formatted = [{"format": name} | each.as_dict(found[FLOATS]) for name, each in found.items()]
    print(json.dumps(summary | {"formats": formatted}))
    return 0


# ---- checks before any weight is read


def _check(args: Namespace) -> tuple[list[str], list[int]]:
    if args.spec != "off":
        raise UserError(f"--spec is {args.spec}; formats are compared without drafts: leave it off")
    if args.context < 1:
        raise UserError(f"--context is {args.context}; give a positive number of tokens")
    check_tokens(args.tokens)
    check_plot(args.plot)
    rows = numbers("--rows", args.rows) if args.rows else []
    from sparkdraft.operate.bench.formats import parse_weight_formats

    return parse_weight_formats(args.formats), rows


def _dtypes(args: Namespace) -> tuple[str, str]:
    """In which texts are read, and in which speed is measured."""
    from sparkdraft.engine.machine import detect

    on_cpu = detect(EngineConfig(device=args.device)).device == "cpu"
    return ("float32", "auto") if args.dtype == "auto" and on_cpu else (args.dtype, args.dtype)


def _plan(args: Namespace, model: ModelConfig, checkpoint: Checkpoint, dtype: str) -> Plan:
    """Of the floats, which take the most."""
    from sparkdraft.engine.load import stored_of
    from sparkdraft.engine.machine import plan_here

    config = EngineConfig(**engine_options(args) | {"dtype": dtype})
    return plan_here(config, model, stored=stored_of(config, checkpoint, model))


def _loads(args: Namespace, plan: Plan, rows: Sequence[int]) -> list[Load]:
    from sparkdraft.operate.bench.offline import Load, check_load

    loads = [Load(n, args.context, STEPS[plan.device]) for n in rows]
    for load in loads:
        check_load(plan, load)
    return loads


# ---- measuring


def _measure(
    args: Namespace,
    name: str,
    checkpoint: Checkpoint,
    model: ModelConfig,
    found: Mapping[str, WeightsFound],
    comparison: Comparison,
    loads: Sequence[Load],
    ceilings: Ceilings | None,
) -> None:
    """Measure one format, and print its line of the texts' table."""
    from sparkdraft.operate.bench.formats import FLOATS
    from sparkdraft.operate.bench.offline import release

    own = found[name]
    reading, timing = _dtypes(args)
    llm: LLM | None = load_llm(args, checkpoint, **_engine(name), dtype=reading)
    assert llm
    device = llm.plan.device
    with progress(f"{name}: reading the texts") as report:
        own.readings = comparison.read(llm, report)
    print(text_line(name, own, found[FLOATS]), flush=True)
    if ceilings:
        if timing != reading:
            llm = None
            release(device)  # the next engine then finds the same free memory
            llm = load_llm(args, checkpoint, **_engine(name), dtype=timing)
        _time(name, llm, model, own, loads, ceilings)
    llm = None
    release(device)


def _engine(name: str) -> dict[str, Any]:
    """Options of a format's engine. The cache of quantised matrices is that of the file's own floats."""
    from sparkdraft.operate.bench.formats import FLOATS

    return {"weights": "auto" if name == FLOATS else name, "weights_cache": False, "prefix_cache": False}


def _time(
    name: str, llm: LLM, model: ModelConfig, own: WeightsFound, loads: Sequence[Load], ceilings: Ceilings
) -> None:
    from sparkdraft.operate.bench.formats import kept_bytes
    from sparkdraft.operate.bench.offline import DecodeBench

    bench = DecodeBench(llm.engine, model, ceilings)
    own.kept_bytes_per_weight = kept_bytes(llm.engine.runner.model, model)
    for load in loads:
        with progress(f"{name}: {load.streams} rows", redraw=SELDOM) as report:
            own.speeds.append(bench.decode(load, report))


# ---- printing


def _size_table(found: Mapping[str, WeightsFound], plan: Plan) -> str:
    from sparkdraft.operate.bench.formats import FLOATS

    base = found[FLOATS].speeds
    columns = "".join(f"{f'{speed.streams} rows':>24}" for speed in base)
    lines = [f"{'format':<10} bytes/weight      kept{columns}"]
    for name, each in found.items():
        kept = each.kept_bytes_per_weight
        cells = [
            f"{f'{s.decode_tok_s:.1f} ({s.decode_tok_s / b.decode_tok_s:.2f}, {s.share:.0%})':>24}"
            for s, b in zip(each.speeds, base, strict=True)
        ]
        sizes = f"{each.bytes_per_weight:12.4f}  {'-' if kept is None else f'{kept:.4f}':>8}"
        lines.append(f"{name:<10} {sizes}{''.join(cells)}")
    legends = [BYTES_LEGEND, *([SPEED_LEGEND] if base else [])]
    if base and plan.kernels == "reference":
        legends.append("these are the reference kernels, which are not made for speed: judge it with --dtype auto")
    return "\n".join([*lines, *legends])


def _panels(found: Mapping[str, WeightsFound]) -> list[Panel]:
    from sparkdraft.operate.bench.formats import FLOATS
    from sparkdraft.util.plot import Line, Panel

    others = {name: each for name, each in found.items() if name != FLOATS}
    panels = nearness_panels(others, found[FLOATS], FLOATS)
    lines = [
        Line(name, [(s.streams, s.decode_tok_s) for s in each.speeds], name == FLOATS)
        for name, each in (others | {FLOATS: found[FLOATS]}).items()
    ]
    if len(lines[-1].points) > 1:  # a single point is not a line
        panels.append(Panel("decode speed", lines, "rows per step", "tokens per second", x_doubling=True))
    return panels
