"""`sparkdraft bench offline`: decode and prefill speed of a model, or of a shape with random weights and a drafter.

It reads flags and prints one table and one line of JSON; operate/bench/offline.py measures. A figure that depends
on a given acceptance says so wherever it is printed.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from itertools import product
from typing import TYPE_CHECKING, Any

from sparkdraft.cli import bench_traffic
from sparkdraft.cli.console import show_fallbacks
from sparkdraft.cli.options import (
    add_engine_flags,
    add_sampling_group,
    check_least,
    engine_options,
    given_sampling,
    load_llm,
)
from sparkdraft.config import EngineConfig
from sparkdraft.core import SamplingParams, UserError
from sparkdraft.util.progress import SELDOM, progress
from sparkdraft.util.this_machine import OtherPrograms

if TYPE_CHECKING:
    from sparkdraft.drafters.find import DraftConfig
    from sparkdraft.engine.engine import Engine
    from sparkdraft.models.common.config import ModelConfig
    from sparkdraft.operate.bench.offline import Bench, Load, Row
    from sparkdraft.operate.bench.synthetic import Acceptance

HEADER = (
    "streams  prompt  prefill tok/s  of matmul  decode tok/s  step ms  floor ms  of the floor"
    "    ids/step  overall tok/s"
)
LEGEND = "overall: tokens of whole requests over all their time, prompts included, a new request starting when one ends"
FORMS = ("mxfp4", "int4", "nvfp4", "fp8")  # of operate/bench/random_model.py
EXPERTS = (
    "floor: of each layer's experts those are counted that rows reach which choose independently of each other, "
    "E (1 - (1 - k / E)^rows) of E, k per row; rows of one text agree more often and read less"
)


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--shape", default="", help="random weights of a named shape instead of a model")
    parser.add_argument(
        "--shape-weights",
        default="",
        choices=["", *FORMS],
        help="with --shape, the format of the layers' matrices; without it, that of the published file",
    )
    parser.add_argument(
        "--drafter-shape",
        default="",
        help="with --shape, a drafter with random weights: dflash-5x, mtp, gemma4-31b-assistant, ...",
    )
    parser.add_argument(
        "--synthetic-acceptance",
        type=float,
        metavar="LENGTH",
        help="ids per step that drafting is assumed to commit on average, including the target's own",
    )
    parser.add_argument("--concurrency", "--batch", default="", help="streams at once, a list (default 1,4)")
    parser.add_argument(
        "--prompt-len",
        default="128",
        help="tokens of prompt, a list (default 128); a range such as 64:512 runs whole requests of drawn lengths, the "
        "same as `bench serve` with these flags",
    )
    parser.add_argument("--output-len", default="64", help="tokens of output (default 64); a range with drawn lengths")
    parser.add_argument("--requests", type=int, default=0, help="requests of drawn lengths (default: 8 per stream)")
    add_sampling_group(parser, SamplingParams(), bench_traffic.SAMPLED)
    bench_traffic.add_traffic_flags(parser)
    # spec: off, or with --drafter-shape the whole block
    add_engine_flags(parser, without=("prefix_cache", "ngram", "count_ids"), spec="")


def run(args: Namespace) -> int:
    if ":" in args.prompt_len:
        return _run_traffic(args)
    bench_traffic.check_unused(args)
    if args.requests:
        raise UserError("--requests is for requests of drawn lengths: give their range, such as --prompt-len 64:512")
    args.concurrency = args.concurrency or "1,4"
    args.output_len = one_length(args.output_len)
    streams, prompts = streams_of(args), numbers("--prompt-len", args.prompt_len)
    acceptance, draft = _check(args)
    args.max_seqs = args.max_seqs or max(streams)
    block = draft.block_size if draft else 16
    room = max(prompts) + args.output_len + 256 + 4 * block  # the first streams write on while the last prompts run
    args.kv_tokens = args.kv_tokens or max(streams) * room
    from sparkdraft.engine.machine import detect
    from sparkdraft.operate.bench.offline import Bench, Ceilings, Load
    from sparkdraft.operate.bench.traffic import how_sampled

    params = SamplingParams(**given_sampling(args))
    others, found = OtherPrograms(), detect(EngineConfig(**engine_options(args)))
    with progress("measuring this machine", redraw=SELDOM):
        ceilings = Ceilings.measure(found.device, args.threads or found.cores)
    engine, model, label = make_engine(args, draft)
    plan, bench = engine.plan, Bench(engine, model, ceilings, acceptance, params)
    loads = [Load(n, prompt_len, args.output_len) for prompt_len, n in product(prompts, streams)]
    for load in loads:
        bench.check(load)
    matmul = f", matmul {ceilings.matmul / 1e12:.0f} TFLOP/s" if ceilings.matmul else ""
    print(f"{label} on {plan.device}, {plan.weights}; memory {ceilings.bandwidth / 1e9:.1f} GB/s{matmul} measured")
    if given := given_sampling(args):
        print(how_sampled(given))
    if acceptance:
        print(f"SYNTHETIC ACCEPTANCE: {acceptance.describe()}")
    rows = _measure_all(bench, loads)
    busy = others.disturbance(plan.device, plan.threads)
    if busy:
        print(f"the machine was busy, {busy}: these figures are too low")
    memory = bench.memory()
    if memory:
        print(memory.text())
    summary: dict[str, Any] = {"bench": "offline", "model": label, "device": plan.device, "dtype": plan.weights}
    summary |= {"bandwidth_gb_s": round(ceilings.bandwidth / 1e9, 1), "output_len": args.output_len}
    summary["matmul_tflop_s"] = round(ceilings.matmul / 1e12, 1) if ceilings.matmul else None
    summary |= {"memory": memory.as_dict() if memory else None, "spec": args.spec, "cut": engine.drafting.cuts}
    summary |= {"drafter": args.drafter_shape if draft else None, "synthetic": bool(acceptance)}
    summary |= {"drafter_weights": args.drafter_weights, "draft_ids": drafted_ids(engine)}
    summary |= {"busy": busy or None, "sampling": given_sampling(args)}
    if acceptance:
        summary["acceptance"] = {"length": acceptance.length, "depth": acceptance.depth, "p": round(acceptance.p, 6)}
        summary["acceptance"]["process"] = acceptance.describe()
    if bench.counts_experts:
        summary["floor"] = EXPERTS
    print(json.dumps(summary | {"rows": [row.as_dict() for row in rows]}))
    return 0


def _run_traffic(args: Namespace) -> int:
    """Run whole requests of drawn lengths. The engine has the server's room, except for what flags say."""
    if args.synthetic_acceptance is not None:
        raise UserError("--synthetic-acceptance is for requests of one length: give --prompt-len no range")
    traffic, (_, draft) = bench_traffic.read_traffic(args), _check(args)
    given = numbers("--concurrency", args.concurrency) if args.concurrency else []
    streams = bench_traffic.streams_at_once(traffic, given, [1, 4])
    engine, _, label = make_engine(args, draft)
    bench_traffic.in_process(engine, label, streams, traffic)
    return 0


def one_length(text: str) -> int:
    if not text.isdecimal():
        raise UserError(f"--output-len is '{text}'; give one number, or a range together with one of --prompt-len")
    return int(text)


def numbers(flag: str, text: str, least: int = 1) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < least:
        example = "1,4,8" if least else "0,1024"
        raise UserError(f"{flag} is '{text}'; give numbers from {least} with commas between them, such as {example}")
    return found


def streams_of(args: Namespace) -> list[int]:
    """Read --concurrency, which must not exceed --max-seqs."""
    streams = numbers("--concurrency", args.concurrency)
    if args.max_seqs and max(streams) > args.max_seqs:
        raise UserError(
            f"--concurrency has {max(streams)}; --max-seqs lets {args.max_seqs} run at once: raise --max-seqs"
        )
    return streams


# ---- the parts


def drafted_ids(engine: Engine) -> int | None:
    """Size of the drafter's vocabulary; None without a drafter."""
    proposer = engine.drafting.proposer
    return (proposer.drafter.caps.num_ids or engine.sampler.vocab_size) if proposer else None


def _check(args: Namespace) -> tuple[Acceptance | None, DraftConfig | None]:
    """Refuse what cannot be measured, before any weight is made; fills in the depth that --spec left open."""
    if isinstance(args.output_len, int):
        check_least(args, output_len=8)
    if args.synthetic_acceptance is not None and not args.drafter_shape:
        raise UserError("--synthetic-acceptance needs drafts to accept: name a drafter with --drafter-shape dflash-5x")
    if args.drafter_shape and not args.shape:
        raise UserError(
            "--drafter-shape goes with a --shape: a model with real weights drafts with --spec and --drafter"
        )
    if args.shape_weights and not args.shape:
        raise UserError("--shape-weights goes with a --shape: a model's own file says how its weights are stored")
    if not args.drafter_shape:
        args.spec = args.spec or "off"
        return None, None
    from sparkdraft.operate.bench.random_model import drafter_shape, shape
    from sparkdraft.operate.bench.synthetic import Acceptance

    draft = drafter_shape(args.drafter_shape, shape(args.shape))
    most = draft.block_size - 1
    args.spec = args.spec or str(most)
    depth = EngineConfig(spec=args.spec).num_draft
    if args.spec == "off":
        return None, None  # measure the same target without its drafter
    if depth == 0:
        return None, draft  # paused: the drafter observes what is written, and drafts nothing
    if depth is not None and depth > most:
        raise UserError(f"--spec is {depth}; {args.drafter_shape} drafts at most {most} per step: ask for fewer")
    length = args.synthetic_acceptance
    return None if length is None else Acceptance(length, depth or most), draft


def make_engine(args: Namespace, draft: DraftConfig | None) -> tuple[Engine, ModelConfig, str]:
    """The engine to measure, its dimensions and its label. The prefix cache is off: every prompt is computed."""
    if not args.shape:
        llm = load_llm(args, prefix_cache=False)
        return llm.engine, llm.model_config, args.model
    from sparkdraft.operate.bench.random_model import random_engine, shape

    form = getattr(args, "shape_weights", "")  # a flag of this command alone
    config = EngineConfig(**engine_options(args) | {"model": args.shape, "prefix_cache": False, "ngram": False})
    with progress(f"making {args.shape}") as report:
        engine = random_engine(config, draft, report, form)
    show_fallbacks(engine.fallbacks)
    kind = f"random {form} weights" if form else "random weights"
    return engine, shape(args.shape), f"{args.shape}{f' with {args.drafter_shape}' if draft else ''}, {kind}"


def _measure_all(bench: Bench, loads: list[Load]) -> list[Row]:
    rows = []
    print(f"{HEADER}{'  (synthetic)' if bench.acceptance else ''}", flush=True)
    for load in loads:
        with progress(f"{load.streams} streams, {load.prompt_len} tokens of prompt", redraw=SELDOM) as report:
            rows.append(bench.measure(load, report))
        print(_line(rows[-1]), flush=True)
    print(LEGEND)
    if bench.counts_experts:
        print(EXPERTS)
    return rows


def _line(row: Row) -> str:
    matmul = "-" if row.prefill_share is None else f"{row.prefill_share:.0%}"
    overall = "-" if row.overall_tok_s is None else f"{row.overall_tok_s:.1f}"
    return (
        f"{row.streams:7}  {row.prompt_len:6}  {row.prefill_tok_s:13.0f}  {matmul:>9}  {row.decode_tok_s:12.1f}"
        f"  {row.step_ms:7.2f}  {row.floor_ms:8.2f}  {row.share:12.0%}  {row.length:10.2f}  {overall:>13}"
    )
