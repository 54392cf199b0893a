"""`sparkdraft bench`: what this machine reaches, against what it could."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from typing import TYPE_CHECKING

from sparkdraft.cli.options import add_engine_flags, engine_options, load_llm, read_text
from sparkdraft.core import UserError

if TYPE_CHECKING:
    from sparkdraft.engine.engine import Engine
    from sparkdraft.models.config import ModelConfig

HELP = "measure speed"
EXAMPLES = """examples:
  sparkdraft bench offline
  sparkdraft bench offline --batch 1,4,8 --prompt-len 128,512
  sparkdraft bench offline --shape qwen3-8b --batch 1,16 --prompt-len 256   (random weights)
  sparkdraft bench perplexity --dtype quantised,float32
"""


def configure(parser: ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    offline = kinds.add_parser("offline", help="decode and prefill speed against the memory bandwidth")
    offline.add_argument("--shape", default="", help="random weights of a named shape instead of a model")
    offline.add_argument("--batch", default="1,4", help="streams at once, a list (default 1,4)")
    offline.add_argument("--prompt-len", default="128", help="tokens of prompt, a list (default 128)")
    offline.set_defaults(spec="off")
    offline.add_argument("--output-len", type=int, default=64, help="tokens of output (default 64)")
    add_engine_flags(offline)
    perplexity = kinds.add_parser("perplexity", help="how well the weights predict unseen text, by dtype")
    perplexity.add_argument("--text", default="", metavar="FILE", help="the text (default: one made for this project)")
    add_engine_flags(perplexity)
    perplexity.set_defaults(dtype="quantised,float32")
    for kind in (offline, perplexity):
        kind.epilog, kind.formatter_class = EXAMPLES, RawDescriptionHelpFormatter


def run(args: Namespace) -> int:
    return _perplexity(args) if args.kind == "perplexity" else _offline(args)


def _perplexity(args: Namespace) -> int:
    from sparkdraft.bench.perplexity import HELDOUT, perplexity

    text = read_text(args.text or str(HELDOUT))
    results = []
    for dtype in args.dtype.split(","):
        value, count = perplexity(load_llm(args, dtype=dtype), text)
        results.append({"dtype": dtype, "perplexity": round(value, 4), "tokens": count})
        change = f"{value / results[0]['perplexity'] - 1:+.2%} of {results[0]['dtype']}" if results[1:] else ""
        print(f"{dtype:<12} perplexity {value:8.3f} over {count} tokens  {change}")
    print(json.dumps({"bench": "perplexity", "model": args.model, "results": results}))
    return 0


def _offline(args: Namespace) -> int:
    batches, prompts = _numbers("--batch", args.batch), _numbers("--prompt-len", args.prompt_len)
    if args.output_len < 8:
        raise UserError(f"--output-len is {args.output_len}; fewer than 8 tokens measure nothing")
    args.max_seqs = args.max_seqs or max(batches)
    room = max(prompts) + args.output_len + 256  # the first streams write on while the last prompts run
    args.kv_tokens = args.kv_tokens or max(batches) * room
    engine, model, label = _engine(args)
    from sparkdraft.bench import offline
    from sparkdraft.bench.bandwidth import memory_bandwidth

    bandwidth = memory_bandwidth(engine.plan.device, engine.plan.threads)
    print(f"{label} on {engine.plan.device}, {engine.plan.dtype}; memory {bandwidth / 1e9:.1f} GB/s measured")
    print("streams  prompt  prefill tok/s  decode tok/s  step ms  floor ms  of the floor")
    rows = []
    for prompt_len in prompts:
        for streams in batches:
            offline.measure(engine, model, bandwidth, streams, prompt_len, 8)  # warm-up, not reported
            row = offline.measure(engine, model, bandwidth, streams, prompt_len, args.output_len)
            rows.append(row.as_dict())
            print(
                f"{row.streams:7}  {row.prompt_len:6}  {row.prefill_tok_s:13.0f}  {row.decode_tok_s:12.1f}"
                f"  {row.step_ms:7.2f}  {row.floor_ms:8.2f}  {row.share:11.0%}"
            )
    summary = {"bench": "offline", "model": label, "device": engine.plan.device, "dtype": engine.plan.dtype}
    print(json.dumps(summary | {"bandwidth_gb_s": round(bandwidth / 1e9, 1), "rows": rows}))
    return 0


def _engine(args: Namespace) -> tuple[Engine, ModelConfig, str]:
    """The engine to measure, its dimensions and what to call it. The prefix cache is off: every prompt is computed."""
    if not args.shape:
        llm = load_llm(args, prefix_cache=False)
        return llm.engine, llm.model_config, args.model
    from sparkdraft.bench.shapes import RandomCheckpoint, SilentTokenizer, shape
    from sparkdraft.config import EngineConfig
    from sparkdraft.engine.build import build_engine, make_plan

    model = shape(args.shape)
    config = EngineConfig(model=args.shape, prefix_cache=False, **engine_options(args))
    plan = make_plan(config, model)
    source = RandomCheckpoint(model, plan.device)
    engine = build_engine(plan, config, model, source, SilentTokenizer())
    return engine, model, f"{args.shape}, random weights"


def _numbers(flag: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UserError(f"{flag} is '{text}'; give positive numbers with commas between them, such as 1,4,8")
    return numbers
