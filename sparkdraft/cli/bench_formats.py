"""`sparkdraft bench kv` and `bench weights`: what formats take, and what they cost in perplexity and KL divergence.

The same texts are read with one format after the other and compared with a base: the exact cache, or the weights as
floats. operate/bench/formats.py measures them; speed is measured by `bench offline --kv` and `--weights`.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparkdraft.cache.formats import EXACT, only_for
from sparkdraft.cli.options import add_engine_flags, check_least, engine_options, load_llm
from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.util.progress import progress

if TYPE_CHECKING:
    from sparkdraft.models.common.config import ModelConfig
    from sparkdraft.operate.bench.formats import Comparison, Format, Readings
    from sparkdraft.plan.resolve import Plan
    from sparkdraft.weights.checkpoint import Checkpoint

KV_FORMATS = "exact,fp8,k4v3,k5v4,k4v3-full,k4v3-uncentred,k4v3-full-uncentred"
WEIGHT_FORMATS = "fp8,int4,nvfp4"
LEAST_TOKENS = 16
KV_LEGEND = (
    "kNvM: TurboQuant, N bits per number of a key and M of a value; first and last tokens uncoded, except -full; each "
    "layer's mean key subtracted first, except -uncentred"
)
BYTES_LEGEND = (
    "bytes/weight: of the layers' matrices with their scales; the head, the embedding, routers and norms stay as they "
    "are"
)


def configure_kv(parser: ArgumentParser) -> None:
    _configure(parser, KV_FORMATS)
    add_engine_flags(parser, without=("prefix_cache", "tq_centre", "count_ids"), spec="off")


def configure_weights(parser: ArgumentParser) -> None:
    _configure(parser, WEIGHT_FORMATS)
    add_engine_flags(parser, without=("weights", "weights_cache", "prefix_cache", "count_ids"), spec="off")


def _configure(parser: ArgumentParser, formats: str) -> None:
    parser.add_argument("--formats", default=formats, help=f"a list (default {formats})")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per text, read as one context (default 2048)")


def run_kv(args: Namespace) -> int:
    for name in ("kv", "tq_mode", "tq_key_bits", "tq_value_bits"):
        if getattr(args, name) != getattr(EngineConfig(), name):
            raise UserError(f"--{name.replace('_', '-')} is given; here --formats says how keys and values are kept")
    _check(args)
    from sparkdraft.engine.machine import detect
    from sparkdraft.models.registry import read_config
    from sparkdraft.operate.bench.formats import parse_kv_formats, reading_fields
    from sparkdraft.weights.checkpoint import open_checkpoint

    formats, checkpoint = parse_kv_formats(args.formats), open_checkpoint(args.model)
    model = read_config(checkpoint.config)
    if args.dtype == "auto" and detect(EngineConfig(device=args.device)).device == "cpu":
        args.dtype = "float32"  # packed kernels keep only an exact cache
    args.max_seqs = args.max_seqs or 1
    plans = _kv_plans(args, formats, model, checkpoint)
    plan = plans[EXACT]
    comparison = _comparison(args, plan, checkpoint)
    sizes = {name: each.memory.kv // (each.num_blocks * each.block_size) for name, each in plans.items()}
    table = [f"{'format':<20} bytes/token", *(f"{name:<20} {size:11}" for name, size in sizes.items())]
    print("\n".join([f"{args.model} on {plan.device}, {plan.weights}", "", *table]))
    print(f"{KV_LEGEND}\n\n{_header(comparison)}", flush=True)
    found: dict[str, Readings] = {}
    for fmt in formats:
        _read(_flags_of(args, fmt), fmt.name, comparison, found)
    print(f"{_legend('the exact cache')}\n")
    rows = [
        {"format": name, "bytes_per_token": sizes[name]} | reading_fields(own, found[EXACT])
        for name, own in found.items()
    ]
    summary = {"bench": "kv", "model": args.model, "device": plan.device, "dtype": plan.weights}
    print(json.dumps(summary | {"kernels": plan.kernels, "formats": rows}))
    return 0


def run_weights(args: Namespace) -> int:
    _check(args)
    from sparkdraft.engine.load import stored_of
    from sparkdraft.engine.machine import detect, plan_here
    from sparkdraft.models.registry import read_config
    from sparkdraft.operate.bench.formats import (
        FLOATS,
        FloatCheckpoint,
        format_bytes,
        parse_weight_formats,
        reading_fields,
    )
    from sparkdraft.weights.checkpoint import open_checkpoint

    formats, checkpoint = parse_weight_formats(args.formats), FloatCheckpoint(open_checkpoint(args.model))
    model = read_config(checkpoint.config)
    if args.dtype == "auto" and detect(EngineConfig(device=args.device)).device == "cpu":
        args.dtype = "float32"  # the CPU's own kernels keep some formats in 8 bits
    args.max_seqs = args.max_seqs or 1
    config = EngineConfig(**engine_options(args))
    plan = plan_here(config, model, stored=stored_of(config, checkpoint, model))  # floats take the most
    comparison, itemsize = _comparison(args, plan, checkpoint), 4 if plan.dtype == "float32" else 2
    print(f"{args.model} on {plan.device}; texts are read in {plan.weights}\n\n{_header(comparison)}", flush=True)
    found: dict[str, Readings] = {}
    for name in formats:
        args.weights, args.weights_cache = "auto" if name == FLOATS else name, False
        _read(args, name, comparison, found, checkpoint)
    sizes = {name: format_bytes(name, model.hidden_size, itemsize) for name in formats}
    table = [f"{'format':<10} bytes/weight", *(f"{name:<10} {size:12.4f}" for name, size in sizes.items())]
    print("\n".join([_legend("floats"), "", *table, f"{BYTES_LEGEND}\n"]))
    rows = [
        {"format": name, "bytes_per_weight": round(sizes[name], 4)} | reading_fields(own, found[FLOATS])
        for name, own in found.items()
    ]
    summary = {"bench": "weights", "model": args.model, "device": plan.device, "read_in": plan.weights}
    print(json.dumps(summary | {"formats": rows}))
    return 0


# ---- the parts


def _check(args: Namespace) -> None:
    """Refuse what cannot be measured, before any weight is read."""
    if args.spec != "off":
        raise UserError(f"--spec is {args.spec}; formats are compared without drafts: leave it off")
    check_least(args, tokens=LEAST_TOKENS)


def _kv_plans(
    args: Namespace, formats: Sequence[Format], model: ModelConfig, checkpoint: Checkpoint
) -> dict[str, Plan]:
    from sparkdraft.engine.load import stored_of
    from sparkdraft.engine.machine import plan_here

    configs = {fmt.name: EngineConfig(**engine_options(_flags_of(args, fmt))) for fmt in formats}
    return {name: plan_here(each, model, stored=stored_of(each, checkpoint, model)) for name, each in configs.items()}


def _flags_of(args: Namespace, fmt: Format) -> Namespace:
    """Return the flags for one format's engine, without those that only other formats read."""
    return Namespace(**only_for(fmt.options["kv"], vars(args)) | fmt.options)


def _comparison(args: Namespace, plan: Plan, checkpoint: Checkpoint) -> Comparison:
    from sparkdraft.operate.bench.formats import Comparison, read_texts
    from sparkdraft.text.tokenizer import Tokenizer

    if args.tokens >= plan.max_model_len:
        raise UserError(
            f"--tokens is {args.tokens}; the context holds {plan.max_model_len} with one of output: ask for fewer"
        )
    return Comparison(read_texts(Tokenizer.of(checkpoint), args.tokens))


def _read(
    args: Namespace, name: str, comparison: Comparison, found: dict[str, Readings], checkpoint: Checkpoint | None = None
) -> None:
    """Read the texts with one format's engine, print its line of the table, and free the engine."""
    from sparkdraft.operate.bench.offline import release

    llm = load_llm(args, checkpoint, prefix_cache=False)
    device = llm.plan.device
    with progress(f"{name}: reading the texts") as report:
        found[name] = comparison.read(llm, report)
    print(_line(name, found[name], next(iter(found.values()))), flush=True)
    del llm
    release(device)  # the next engine then finds the same free memory


def _header(comparison: Comparison) -> str:
    kinds = [f"{f'{kind}, {len(ids)} tokens':<28}" for kind, ids in comparison.texts.items()]
    columns = [f"{'perplexity':>10} {'rise':>8} {'KL':>8}"] * len(kinds)
    return "\n".join(
        ["  ".join([f"{'':19}", *kinds, "all"]), "  ".join([f"{'format':<19}", *columns, f"{'rise':>8} {'KL':>8}"])]
    )


def _line(name: str, own: Readings, base: Readings) -> str:
    from sparkdraft.operate.bench.formats import kl_of_all, rise_of_all

    cells = [
        f"{reading.perplexity:10.3f} {_percent(reading.rise(base[kind]))} {reading.mean_kl:8.5f}"
        for kind, reading in own.items()
    ]
    return "  ".join([f"{name:<19}", *cells, f"{_percent(rise_of_all(own, base))} {kl_of_all(own):8.5f}"])


def _legend(base: str) -> str:
    return (
        f"rise: increase of the perplexity over {base}; all: geometric mean over the texts. KL: divergence of the next "
        f"token's distribution from that of {base}, in nats, mean over positions"
    )


def _percent(share: float) -> str:
    return f"{round(share, 3) + 0.0:+.1%}".replace("%", " %").rjust(8)  # never -0.0
