"""Requests of drawn lengths, as they come from many clients: over HTTP for `bench serve --prompt-len 64:512`, and in
this process for `bench offline --prompt-len 64:512`.

Equal flags draw equal lengths and arrivals, so the second's tokens per second are what the first could reach.
"""

from __future__ import annotations

import asyncio
import json
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sparkdraft.cli.options import given_sampling
from sparkdraft.core import SamplingParams, UserError
from sparkdraft.util.progress import SELDOM, Meter, progress

if TYPE_CHECKING:
    from sparkdraft.engine.engine import Engine
    from sparkdraft.operate.bench.traffic import Record, Traffic

SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def add_traffic_flags(parser: ArgumentParser) -> None:
    """Flags that go with a range of --prompt-len."""
    group = parser.add_argument_group("requests of drawn lengths")
    group.add_argument(
        "--request-rate",
        type=float,
        default=math.inf,
        metavar="N",
        help="requests a second, arriving as a Poisson process; without --concurrency no limit holds them back "
        "(default inf: the next request begins when one ends)",
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="LIMIT",
        help="count requests within limits in ms: ttft:150 (first token), tpot:20 (per later token), e2el:5000 (all)",
    )
    # not args.seed, which is a sampling parameter
    group.add_argument(
        "--seed", dest="traffic_seed", type=int, default=0, metavar="N", help="of lengths and arrivals (default 0)"
    )


def check_unused(args: Namespace) -> None:
    """Refuse flags that only requests of drawn lengths have."""
    for flag, changed in (
        ("--request-rate", not math.isinf(args.request_rate)),
        ("--goodput", args.goodput),
        ("--seed", args.traffic_seed),
    ):
        if changed:
            raise UserError(f"{flag} is for requests of drawn lengths: give their range, such as --prompt-len 64:512")


def read_traffic(args: Namespace) -> Traffic:
    from sparkdraft.operate.bench.traffic import Lengths, Traffic, read_limits

    if not args.request_rate > 0:
        raise UserError(f"--request-rate is {args.request_rate:g}; it must be above 0 requests a second")
    if args.requests < 0 or args.traffic_seed < 0:
        raise UserError("--requests and --seed must be at least 0")
    prompt_len = Lengths.read("--prompt-len", args.prompt_len)
    output_len = Lengths.read("--output-len", str(args.output_len), least=2)
    limits, sampling = read_limits(args.goodput), given_sampling(args)
    SamplingParams(**sampling)  # refuse a bad value before a model is loaded
    return Traffic(prompt_len, output_len, args.requests, args.request_rate, args.traffic_seed, sampling, limits)


def streams_at_once(traffic: Traffic, streams: list[int], default: list[int]) -> list[int]:
    """The streams of each row. Arrivals at a rate are held back only by a --concurrency that was given."""
    if streams:
        return streams
    return default if math.isinf(traffic.rate) else [traffic.count(default[-1])]


# ---- over HTTP


def over_http(url: str, key: str, model: str, streams: list[int], traffic: Traffic) -> tuple[dict[str, Any], str, int]:
    """Measure a server; return the report, the table, and the exit status. model: empty for the first that is
    served."""
    from sparkdraft.operate.bench import serve, streaming
    from sparkdraft.operate.bench.traffic import markdown

    report: dict[str, Any] = {"bench": "serve", "url": url} | _head(traffic)
    rows, status = report["rows"], 0

    async def measure(meter: Meter) -> None:
        async with serve.Client(url, key, model) as client:
            report["model"] = await client.find_model()
        target = streaming.Target(url, key, report["model"], traffic.sampling)
        for each in streams:
            for warm in (True, False):
                planned = traffic.plan(each, warm=warm)
                answered = _counting(meter, each, len(planned), warm)
                _keep(rows, *await streaming.run(target, planned, each, answered), each, traffic, warm)
        target.close()

    try:
        with progress(f"asking {url}", redraw=SELDOM) as meter:
            asyncio.run(measure(meter))
    except KeyboardInterrupt:
        if not rows:
            raise
        status = 130  # what was measured so far is still worth having
    return report, markdown(f"**{report['model']}** at {url}, {report['date'][:10]}", traffic, rows), status


# ---- in this process


def in_process(engine: Engine, label: str, streams: list[int], traffic: Traffic) -> None:
    """Measure an engine, and print the table and the line of JSON."""
    from sparkdraft.operate.bench import in_process as loop
    from sparkdraft.operate.bench.traffic import markdown

    most, rows = engine.plan.max_seqs, list[dict[str, Any]]()
    if not engine.is_warm:  # random weights have just been drawn; a server warms up before its first request
        engine.warm_up()
    if math.isinf(traffic.rate) and max(streams) > most:
        raise UserError(f"--concurrency has {max(streams)}; {most} requests run at once: raise --max-seqs")
    for each in streams:
        for warm in (True, False):
            planned = traffic.plan(each, engine.sampler.vocab_size, warm)
            with progress("measuring", redraw=SELDOM) as meter:
                answered = _counting(meter, each, len(planned), warm)
                records, seconds = loop.run(engine, planned, each, traffic.sampling, answered)
            _keep(rows, records, seconds, each, traffic, warm)
    plan = engine.plan
    print(markdown(f"{label} on {plan.device}, {plan.weights}, in this process", traffic, rows) + "\n")
    found = {"bench": "offline", "model": label, "device": plan.device, "dtype": plan.weights, **_head(traffic)}
    print(json.dumps(found | {"rows": rows}))


# ---- both


def _head(traffic: Traffic) -> dict[str, Any]:
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"date": date, "traffic": traffic.as_dict(), "rows": []}


def _counting(meter: Meter, streams: int, total: int, warm: bool) -> Callable[[], None]:
    label, done = f"{'warming up, ' if warm else ''}{streams} {'stream' if streams == 1 else 'streams'}", 0
    meter.stage(label, 0, total)

    def answered() -> None:
        nonlocal done
        done += 1
        meter.stage(label, done, total)

    return answered


def _keep(
    rows: list[dict[str, Any]], records: list[Record], seconds: float, streams: int, traffic: Traffic, warm: bool
) -> None:
    """Keep what was measured. If no request of the warm-up was answered, no other will be."""
    from sparkdraft.operate.bench.traffic import figures

    if warm and all(record.error for record in records):
        raise UserError(f"no request of the warm-up was answered; the first said: {records[0].error}")
    if not warm:
        rows.append(figures(records, seconds, streams, traffic.limits))
