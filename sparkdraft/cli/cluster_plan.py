"""`sparkdraft cluster plan`: what fits on several machines, how fast it is, and whether more of them help."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from sparkdraft.cli.cluster_findings import refuse_broken, say, show_findings
from sparkdraft.cli.plan import read_drafter, read_formats, read_model
from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError

if TYPE_CHECKING:
    from sparkdraft.bridges.cluster.expect import Case, Latency
    from sparkdraft.bridges.cluster.hosts import Cluster
    from sparkdraft.operate.forecast.forecast import Question

USUAL = "2,4"  # machines


def run(args: Namespace) -> int:
    from sparkdraft.bridges.cluster.expect import cases, explain
    from sparkdraft.bridges.cluster.hosts import read_cluster

    cluster = read_cluster(args.file) if args.file else None
    counts = _counts(args.machines or (str(len(cluster.hosts)) if cluster else USUAL))
    question = question_of(args)
    latency = _latency(args, cluster, question.model.hidden_size)
    found = cases(question, counts, latency)
    print("\n".join([_title(args, question), *_table(found, bool(question.drafter)), "", *explain(found, latency)]))
    if args.json:
        print(json.dumps({"plan": args.model, "cases": [_as_dict(each) for each in found]}))
    return 0


def question_of(args: Namespace) -> Question:
    """Of the flags of `plan`; `up` asks the same of its configuration."""
    from sparkdraft.operate.forecast.forecast import Question
    from sparkdraft.operate.forecast.machine import find_machine

    model, raw = read_model(args.model)
    if args.concurrency < 1 or not 1 <= args.context <= model.max_position:
        raise UserError(
            f"--concurrency is {args.concurrency} and --context {args.context}; ask for 1 stream or more of 1 to "
            f"{model.max_position:,} tokens"
        )
    machine = find_machine(args.machine)
    formats, _ = read_formats(args.model, args.weights, raw, model, machine)
    config = EngineConfig(model=args.model, kv=args.kv)
    drafter, names = read_drafter(args.drafter, args.model, model)
    return Question(model, machine, config, formats, drafter, args.concurrency, args.context, names=names)


def _latency(args: Namespace, cluster: Cluster | None, hidden: int) -> Latency:
    from sparkdraft.bridges.cluster.expect import ITEMSIZE, LINKS, Latency

    if args.measure:
        if cluster is None:
            raise UserError("--measure needs the hosts file: sparkdraft cluster plan FILE --measure")
        return _measured(cluster, hidden * ITEMSIZE)
    if args.link not in LINKS:
        raise UserError(f"--link is '{args.link}'; it must be one of {', '.join(LINKS)}")
    if args.latency is None:
        return LINKS[args.link]
    if args.latency <= 0:
        raise UserError(f"--latency is {args.latency:g}; give the microseconds of an all-reduce, above 0")
    return Latency(args.latency * 1e-6, LINKS[args.link].per_byte, 2, f"{args.latency:g} us, as given")


def _measured(cluster: Cluster, row: int) -> Latency:
    from sparkdraft.bridges.cluster.checks import judge, survey
    from sparkdraft.bridges.cluster.expect import measure
    from sparkdraft.bridges.cluster.supervisor import Run, run_folder

    seen = survey(cluster, [cluster.port])
    findings = judge(seen)
    show_findings(findings)
    refuse_broken(findings)
    Run.check_free(cluster.name)
    folder = run_folder(cluster.name)
    folder.mkdir(parents=True, exist_ok=True)
    found = measure(cluster, seen, row, folder, say)
    if found is None:
        raise UserError("no torch is installed where vLLM is, on any machine: nothing was measured")
    return found


def _counts(text: str) -> list[int]:
    try:
        counts = sorted({int(each) for each in text.split(",")})
    except ValueError:
        counts = []
    if not counts or counts[0] < 2 or counts[-1] > 16:
        raise UserError(f"--machines is '{text}'; give numbers from 2 to 16, such as 2,4")
    return counts


def _title(args: Namespace, question: Question) -> str:
    streams = f"{question.streams} stream{'s' * (question.streams > 1)} of {question.context:,} tokens"
    drafter = f"drafter {args.drafter}" if question.drafter else "no drafter"
    return f"{args.model} with vLLM on several {question.machine.title}: {streams}, {drafter}"


def _table(found: list[Case], drafts: bool) -> list[str]:
    drafted = f"{'drafted':>10}" if drafts else ""
    rates = f"{'tok/s':>9}{'low':>8}{'high':>8}"
    lines = [f"  {'machines':<10}{'shared by':<11}{'tokens that fit':>16}{'streams':>9}{rates}{drafted}"]
    for each in found:
        start = f"  {each.machines:<10}{each.parallel if each.machines > 1 else '-':<11}"
        if not each.forecast:
            lines.append(f"{start}{'-':>16}  {each.refusal}")
            continue
        rates = f"{each.plain.expected:9.1f}{each.plain.low:8.1f}{each.plain.high:8.1f}"
        more = f"{each.drafted.speed.expected:10.1f}" if each.drafted else f"{'-':>10}" if drafts else ""
        lines.append(f"{start}{each.tokens:16,}{each.streams:9,}{rates}{more}")
    return lines


def _as_dict(each: Case) -> dict[str, Any]:
    known: dict[str, Any] = {"machines": each.machines, "parallel": each.parallel}
    if not each.forecast:
        return known | {"refused": each.refusal}
    return known | {
        "max_tokens": each.tokens,
        "streams": each.streams,
        "plain_tok_s": round(each.plain.expected, 2),
        "low": round(each.plain.low, 2),
        "high": round(each.plain.high, 2),
        "drafted_tok_s": round(each.drafted.speed.expected, 2) if each.drafted else None,
        "all_reduces": each.reduces,
        "all_reduce_us": round(each.reduce * 1e6, 1),
        "step_ms": round(each.step * 1e3, 2),
        "share": round(each.share, 3),
    }
