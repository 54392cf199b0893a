"""`sparkdraft bench report`: measures this machine and this model in a given time, and writes pages to post.

It writes report.html (which needs no other file), report.md with report.svg, and report.json.
operate/bench/report.py says what
is measured, in this order: start-up, speed at the first context, KV formats, speed at the other contexts.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdraft.cli.bench_kv import CONTEXTS, STEPS
from sparkdraft.cli.bench_offline import numbers, streams_of
from sparkdraft.cli.bench_texts import ceilings_of
from sparkdraft.cli.options import add_engine_flags, engine_options, load_llm
from sparkdraft.config import ENGINE_FIELDS, EngineConfig
from sparkdraft.core import UserError
from sparkdraft.util.progress import SELDOM, progress
from sparkdraft.util.this_machine import OtherPrograms

if TYPE_CHECKING:
    from sparkdraft.llm import LLM
    from sparkdraft.models.common.config import ModelConfig
    from sparkdraft.operate.bench.formats import Format, Memory
    from sparkdraft.operate.bench.offline import Ceilings
    from sparkdraft.operate.bench.report import Budget, KvRow, Report, Start
    from sparkdraft.plan.resolve import Plan
    from sparkdraft.weights.plane_layout import StoredBytes

FORMATS = "exact,fp8,k4v3"
DECIDED = ("prefix_cache", "spec", "kv", *(name for name in ENGINE_FIELDS if name.startswith("tq_")))


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--out", default="report", metavar="FOLDER", help="where the pages go (default report)")
    parser.add_argument("--minutes", type=float, default=10.0, help="time to spend, about (default 10)")
    parser.add_argument("--no-start", action="store_true", help="do not start a process of its own to time its start")
    parser.add_argument("--classes", default="", help="classes of prompts, a list (default: all)")
    parser.add_argument("--per-class", type=int, default=1, help="prompts of each class (default 1)")
    parser.add_argument("--concurrency", default="1,4", help="streams at once, a list (default 1,4)")
    parser.add_argument("--context", default="0,1024", help="tokens before each prompt, a list (default 0,1024)")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of output (default 64)")
    parser.add_argument("--kv-formats", default=FORMATS, help=f"KV formats, a list (default {FORMATS})")
    add_engine_flags(parser, without=DECIDED)


def run(args: Namespace) -> int:
    streams, contexts, classes = _check(args)
    from sparkdraft.engine.machine import detect
    from sparkdraft.operate.bench.formats import parse_kv_formats
    from sparkdraft.operate.bench.report import Budget, Report, environment
    from sparkdraft.operate.doctor.finding import shown_model, without_paths

    formats = parse_kv_formats(args.kv_formats)
    args.max_seqs = args.max_seqs or max(streams)
    hardware = detect(EngineConfig(**engine_options(args)))
    command = without_paths(" ".join(["sparkdraft", *sys.argv[1:]]), args.model)  # pages are for others to read
    budget, found = Budget(60 * args.minutes), Report(environment(hardware, command))
    found.environment = {"model": shown_model(args.model), **found.environment}
    try:
        _measure(args, found, budget, formats, streams, contexts, classes)
    except BaseException as error:  # what was measured before it is not lost, not even by Ctrl-C
        reason = without_paths(str(error) or type(error).__name__, args.model)
        found.left_out.append(f"whatever came after this: {reason}")
        if found.start or found.speeds or found.kv:
            _write(args, found, budget)
        raise
    _write(args, found, budget)
    print(json.dumps(found.as_dict()))
    return 0


def _write(args: Namespace, found: Report, budget: Budget) -> None:
    from sparkdraft.operate.bench import report
    from sparkdraft.util.plot import svg

    found.left_out += budget.left_out
    charts = report.panels(found)
    pages = {"report.html": report.html(found), "report.json": json.dumps(found.as_dict(), indent=1) + "\n"}
    pages["report.md"] = report.markdown(found, "report.svg" if charts else "")
    pages |= {"report.svg": svg(charts)} if charts else {}
    for name, text in pages.items():
        (Path(args.out) / name).write_text(text, encoding="utf-8")
    print(report.markdown(found))
    print("\n".join(f"wrote {Path(args.out) / name}" for name in pages))


def _check(args: Namespace) -> tuple[list[int], list[int], list[str]]:
    """Refuse what cannot be measured, before any weight is read."""
    streams, contexts = streams_of(args), numbers("--context", args.context, 0)
    if args.minutes <= 0:
        raise UserError(f"--minutes is {args.minutes:g}; give a positive number")
    if args.output_len < 8:
        raise UserError(f"--output-len is {args.output_len}; it must be at least 8")
    if args.per_class < 1:
        raise UserError(f"--per-class is {args.per_class}; give 1 or more")
    from sparkdraft.operate.bench.accept import read_prompts
    from sparkdraft.operate.bench.formats import parse_kv_formats

    known = list(read_prompts(1))
    classes = list(dict.fromkeys(name.strip() for name in args.classes.split(",") if name.strip())) or known
    if unknown := [name for name in classes if name not in known]:
        raise UserError(f"--classes names '{unknown[0]}'; classes are {', '.join(known)}")
    parse_kv_formats(args.kv_formats)
    try:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        (Path(args.out) / "report.md").touch()
    except OSError as error:
        raise UserError(f"--out is {args.out}, which cannot be written to: {error.strerror}") from None
    return streams, contexts, classes


# ---- measuring


def _measure(
    args: Namespace,
    found: Report,
    budget: Budget,
    formats: Sequence[Format],
    streams: Sequence[int],
    contexts: Sequence[int],
    classes: Sequence[str],
) -> None:
    from sparkdraft.engine.facts import CUT
    from sparkdraft.engine.load import stored_of
    from sparkdraft.operate.bench.offline import release

    others = OtherPrograms()
    started = None if args.no_start or not budget.allows("start", "start-up") else _started(args)
    llm: LLM | None = load_llm(args, prefix_cache=False)
    assert llm
    plan, model, ceilings = llm.plan, llm.model_config, ceilings_of(llm.plan)
    stored = stored_of(EngineConfig(**engine_options(args)), llm.checkpoint, model)
    found.environment["memory bandwidth"] = f"{ceilings.bandwidth / 1e9:.1f} GB/s, measured"
    found.environment["engine"] = f"{plan.device}, {plan.weights} weights, {plan.kernels} kernels"
    found.notes += [f"{each.name}: {each.reason}" for each in llm.fallbacks()]
    found.start = _start(started, llm, ceilings) if started else None
    _speeds(args, found, budget, llm, ceilings, [(contexts[0], n, kind) for n, kind in product(streams, classes)])
    shown = [fact for fact in llm.facts() if fact.name == CUT]
    found.environment |= {f.name: f.value + (f" ({f.reason})" if f.reason else "") for f in shown}
    llm = None
    release(plan.device)
    _kv_formats(args, found, budget, formats, model, stored, plan, ceilings)
    rest = list(product(contexts[1:], streams, classes))
    if rest and budget.allows("load", f"{len(rest)} cells of longer contexts"):
        _speeds(args, found, budget, load_llm(args, prefix_cache=False), ceilings, rest)
    if busy := others.disturbance(plan.device, plan.threads):
        found.notes.append(f"the machine was busy, {busy}: figures are too low")


def _started(args: Namespace) -> dict[str, float]:
    """What `generate` reports of a process of its own, with the same flags."""
    from sparkdraft.operate.bench.check_speed.cpu import generate

    defaults = EngineConfig()
    flags: list[str] = []
    for name, value in engine_options(args).items():
        if value != getattr(defaults, name):
            flag = name.replace("_", "-")
            flags += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    with progress("starting once, to its first token"):
        return generate("Why is the sky blue?", "auto", 2, flags)


def _start(started: Mapping[str, float], llm: LLM, ceilings: Ceilings) -> Start:
    from sparkdraft.models.common.sizes import model_sizes
    from sparkdraft.operate.bench.report import Start

    every_row = max(model_sizes(llm.model_config).hidden, 1) * 1024  # enough to reach all experts
    floor = llm.engine.runner.model.nbytes(every_row) / ceilings.bandwidth
    return Start(started["start_ms"] / 1e3, int(started["peak_rss_mb"]), floor)


def _speeds(
    args: Namespace,
    found: Report,
    budget: Budget,
    llm: LLM,
    ceilings: Ceilings,
    cells: Sequence[tuple[int, int, str]],
) -> None:
    """cells: context, streams and class of each."""
    from sparkdraft.operate.bench.accept import chat_prompts, read_prompts
    from sparkdraft.operate.bench.depth import DepthBench
    from sparkdraft.operate.bench.offline import Bench
    from sparkdraft.operate.bench.report import speed_row

    bench, depths = Bench(llm.engine, llm.model_config, ceilings), DepthBench(llm.engine, args.output_len, 0.0, None)
    texts = read_prompts(args.per_class)
    for done, (context, streams, kind) in enumerate(cells):
        ids, what = chat_prompts(llm, texts[kind], context), f"{kind}, {context} tokens before, {streams} streams"
        try:
            depths.check(ids, streams)
        except UserError as error:
            found.left_out.append(f"{what}: {error}")
            continue
        if budget.allows(f"speed at {context}", what):
            label = f"{what} (cell {done + 1} of {len(cells)})"
            with progress(label, redraw=SELDOM), budget.spent_on(f"speed at {context}"):
                found.speeds.append(speed_row(bench, depths, kind, ids, context, streams))


def _kv_formats(
    args: Namespace,
    found: Report,
    budget: Budget,
    formats: Sequence[Format],
    model: ModelConfig,
    stored: StoredBytes,
    plan: Plan,
    ceilings: Ceilings,
) -> None:
    from sparkdraft.engine.machine import plan_here
    from sparkdraft.operate.bench.formats import EXACT, memories
    from sparkdraft.operate.bench.report import KvRow

    plans: dict[str, Plan] = {}
    problems: dict[str, str] = {}
    for fmt in formats:
        try:
            plans[fmt.name] = plan_here(EngineConfig(**engine_options(args) | _options(fmt)), model, stored=stored)
        except UserError as error:
            problems[fmt.name] = str(error)
    # Sizes are compared with the exact cache's, and need its plan; speeds do not.
    sizes = memories(plans, model, args.memory_fraction) if EXACT in plans else {}
    for fmt in formats:
        if fmt.name in problems:
            found.kv.append(KvRow(fmt.name, problem=problems[fmt.name]))
        elif budget.allows("kv", f"KV format {fmt.name}"):
            with budget.spent_on("kv"):
                found.kv.append(_kv_row(args, fmt, model, sizes.get(fmt.name), plan, ceilings))


def _options(fmt: Format) -> dict[str, Any]:
    return fmt.options | {"spec": "off", "prefix_cache": False}


def _kv_row(
    args: Namespace, fmt: Format, model: ModelConfig, memory: Memory | None, plan: Plan, ceilings: Ceilings
) -> KvRow:
    from sparkdraft.operate.bench.offline import DecodeBench, Load, release
    from sparkdraft.operate.bench.report import KvRow

    llm: LLM | None = load_llm(args, **_options(fmt))
    assert llm
    bench, steps, speeds = DecodeBench(llm.engine, model, ceilings), STEPS[plan.device], []
    for context in numbers("--context", CONTEXTS[plan.device]):
        if context + 2 * steps <= llm.plan.max_model_len:
            with progress(f"{fmt.name}: {context} tokens of context", redraw=SELDOM) as report:
                speeds.append(bench.decode(Load(1, context, steps), report))
    del bench
    llm = None
    release(plan.device)
    return KvRow(fmt.name, memory, speeds)
