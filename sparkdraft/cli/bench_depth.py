"""`sparkdraft bench depth`: fixed depths of drafting against the engine's own choice, as a table and JSON."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdraft.cli.bench_offline import make_engine, numbers, streams_of
from sparkdraft.cli.options import add_engine_flags, check_least, load_llm
from sparkdraft.core import AUTO, UserError
from sparkdraft.util.progress import SELDOM, progress

if TYPE_CHECKING:
    from sparkdraft.engine.engine import Engine
    from sparkdraft.operate.bench.depth import Cell, Prompts

RANDOM_PROMPT = 128  # ids of a prompt, where a shape with random weights has none


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--prompts", default="", metavar="FILE", help='lines of text, or .jsonl with "class", "prompt"')
    parser.add_argument("--per-class", type=int, default=2, help="prompts of each class (default 2; 0: all)")
    parser.add_argument("--concurrency", default="1", help="streams at once, a list (default 1)")
    parser.add_argument("--depths", default="", help="fixed depths, a list (default: those the engine chooses from)")
    parser.add_argument("--output-len", type=int, default=96, help="tokens of output (default 96)")
    parser.add_argument("--temperature", type=float, default=0.0, help="default 0")
    parser.add_argument("--shape", default="", help="random weights of a named shape instead of a model")
    parser.add_argument(
        "--drafter-shape", default="", help="with --shape, a drafter with random weights: dflash-5x, mtp"
    )
    parser.add_argument(
        "--synthetic-acceptance", type=float, metavar="LENGTH", help="tokens per step that the deepest draft commits"
    )
    add_engine_flags(parser, without=("prefix_cache", "ngram", "spec"))


def run(args: Namespace) -> int:
    streams = streams_of(args)
    _check(args)
    args.max_seqs = args.max_seqs or max(streams)
    args.kv_tokens = args.kv_tokens or (max(streams) * (2 * args.output_len + 1024) if args.shape else 0)
    from sparkdraft.operate.bench.depth import DepthBench, table
    from sparkdraft.operate.bench.synthetic import Acceptance

    engine, prompts, label = _engine(args)
    most = engine.drafting.max_depth
    if not engine.drafting.proposer:
        raise UserError(f"{label} has no drafter to measure; name one with --drafter, or --drafter-shape with --shape")
    depths = _depths(args.depths, engine.drafting.choices, most)
    acceptance = None if args.synthetic_acceptance is None else Acceptance(args.synthetic_acceptance, most)
    if acceptance:
        print(f"SYNTHETIC ACCEPTANCE: {acceptance.describe()}")
    bench = DepthBench(engine, args.output_len, args.temperature, acceptance)
    for ids in prompts.values():
        bench.check(ids, max(streams))
    with progress("measuring depths", redraw=SELDOM) as report:
        cells = bench.sweep(prompts, streams, depths, report)
    print(table(cells) + ("  (synthetic)" if acceptance else ""))
    if not acceptance:
        print(_texts(cells))
    plan, summary = engine.plan, dict[str, Any](bench="depth", model=label)
    summary |= {
        "device": plan.device,
        "dtype": plan.weights,
        "output_len": args.output_len,
        "temperature": args.temperature,
        "max_depth": most,
        "cut": engine.drafting.cuts,
    }
    process = {"length": acceptance.length, "process": acceptance.describe()} if acceptance else None
    print(json.dumps(summary | {"synthetic": process, "cells": [cell.as_dict() for cell in cells]}))
    return 0


# ---- the parts


def _check(args: Namespace) -> None:
    """Refuse what cannot be measured, before any weight is read or made."""
    check_least(args, output_len=8, per_class=0)
    if bool(args.shape) != bool(args.drafter_shape):
        raise UserError("--shape and --drafter-shape go together: random weights need a drafter of random weights")
    if args.shape and args.synthetic_acceptance is None:
        raise UserError("random weights accept no drafts: give --synthetic-acceptance with --shape")
    if args.prompts and not Path(args.prompts).is_file():
        raise UserError(f"--prompts is {args.prompts}, which is not a file: check the path")


def _depths(text: str, choices: list[int], most: int) -> list[int]:
    """Plain first, then the fixed depths, then the engine's own choice."""
    asked = numbers("--depths", text, least=0) if text else choices
    if max(asked) > most:
        raise UserError(f"--depths has {max(asked)}; this drafter drafts at most {most}: ask for fewer")
    return [0, *sorted(set(asked) - {0}), AUTO]


def _engine(args: Namespace) -> tuple[Engine, Prompts, str]:
    """The engine, the prompts by class, and a label."""
    from sparkdraft.operate.bench.prompts import PROMPTS, chat_prompts, read_prompts

    if args.shape:
        from sparkdraft.operate.bench.random_model import drafter_shape, shape

        args.spec = "auto"
        engine, model, label = make_engine(args, drafter_shape(args.drafter_shape, shape(args.shape)))
        ids = [[(7 * i + 31 * n) % model.vocab_size for i in range(RANDOM_PROMPT)] for n in range(engine.plan.max_seqs)]
        return engine, {"random": ids}, label
    classes = read_prompts(args.per_class, Path(args.prompts or PROMPTS))
    llm = load_llm(args, prefix_cache=False, ngram=False)
    return llm.engine, {name: chat_prompts(llm, texts) for name, texts in classes.items()}, args.model


def _texts(cells: list[Cell]) -> str:
    drafted = [cell for cell in cells if cell.kind == "all" and cell.depth]
    same, total = sum(c.same_text for c in drafted), sum(c.prompts for c in drafted)
    return f"drafted text that begins as the plain one: {same} of {total}"
