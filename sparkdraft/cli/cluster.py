"""`sparkdraft cluster plan|up|status|down`: serve one model on several machines with vLLM's multiprocess executor.

This file reads flags and prints; bridges/cluster does the work. No torch.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sparkdraft.bridges.cluster.checks import Seen, judge, survey
from sparkdraft.bridges.cluster.expect import LINKS, Case, cases, explain
from sparkdraft.bridges.cluster.hosts import LOCAL, Cluster, read_cluster
from sparkdraft.bridges.cluster.ranks import Job, rank_environment, rank_words
from sparkdraft.bridges.cluster.supervisor import (
    DOWN,
    FAILED,
    READY,
    Run,
    State,
    Supervisor,
    end_run,
    read_state,
    run_folder,
)
from sparkdraft.bridges.vllm.child import url_of
from sparkdraft.bridges.vllm.command import VllmCommand, vllm_command
from sparkdraft.cli.console import say
from sparkdraft.cli.plan import read_drafter, read_formats, read_model
from sparkdraft.cli.serve_options import add_serve_flags, add_vllm_flags, read_choices, read_config
from sparkdraft.config import ENGINE_FIELDS, EngineConfig
from sparkdraft.core import UserError
from sparkdraft.operate.doctor.finding import Finding, Status
from sparkdraft.operate.forecast.forecast import Question
from sparkdraft.operate.forecast.machine import find_machine
from sparkdraft.server.config import ServerConfig
from sparkdraft.weights.hub import portable_name

HELP = "serve one model on two or four machines, with vLLM over ssh"
EXAMPLES = """examples:
  sparkdraft cluster plan --model gpt-oss-120b                   what 1, 2 and 4 Sparks hold, and how fast they are
  sparkdraft cluster plan --model gemma4-31b --weights fp8 --link tcp       as seen without RoCE: 4 are no faster than 2
  sparkdraft cluster up sparks.toml --model Qwen/Qwen3.5-122B    checks, starts and supervises all ranks
  sparkdraft cluster up sparks.toml --model openai/gpt-oss-120b --check     only the checks
  sparkdraft cluster status sparks.toml                          (exit status 0 if it serves)
  sparkdraft cluster down sparks.toml
`up` runs until ctrl-c or `down`. Logs of all ranks are in the cache folder, under cluster/NAME. docs/cluster.md has an
example of the hosts file.
"""
USUAL_MACHINES = "2,4"
WATCH_EVERY, TOKEN_SECONDS = 10.0, 30.0  # seconds between two probes of the server, and allowed for one token
EVERYWHERE = ("", "0.0.0.0", "::")  # addresses that listen on all interfaces


def configure(parser: ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", required=True, metavar="VERB")
    plan = verbs.add_parser("plan", help="what fits and how fast it will be", epilog=EXAMPLES)
    plan.add_argument("file", nargs="?", default="", help="the hosts file, for the number of machines")
    _configure_plan(plan)
    up = verbs.add_parser("up", help="check, start and supervise", epilog=EXAMPLES)
    up.add_argument("--check", action="store_true", help="check the machines, and start nothing")
    add_vllm_flags(up)
    add_serve_flags(up)
    status = verbs.add_parser("status", help="whether it serves", epilog=EXAMPLES)
    down = verbs.add_parser("down", help="end all ranks", epilog=EXAMPLES)
    for verb in (up, status, down):
        verb.add_argument("file", help="the hosts file")


def _configure_plan(plan: ArgumentParser) -> None:
    plan.add_argument("--model", default="gpt-oss-120b", help="as for `plan` (default gpt-oss-120b)")
    plan.add_argument("--machine", default="gb10", help="the kind of machine (default gb10, a DGX Spark)")
    plan.add_argument("--machines", default="", metavar="N,N", help="how many (default: those of the file, or 2,4)")
    plan.add_argument("--drafter", default="none", help="as for `plan` (default none)")
    plan.add_argument("--weights", default="auto", metavar="FORMAT", help="as for `plan` (default auto)")
    plan.add_argument("--kv", default=ENGINE_FIELDS["kv"].default, help="as for `plan` (default %(default)s)")
    plan.add_argument("--concurrency", type=int, default=1, metavar="N", help="streams at once (default 1)")
    plan.add_argument("--context", type=int, default=4096, metavar="N", help="tokens of each stream (default 4096)")
    plan.add_argument("--link", default="roce", help="roce or tcp: the network that an all-reduce uses (default roce)")


def run(args: Namespace) -> int:
    return {"plan": _plan, "up": _up, "status": _status, "down": _down}[args.what](args)


# ---- plan


def _plan(args: Namespace) -> int:
    machines = args.machines or (str(len(read_cluster(args.file).hosts)) if args.file else USUAL_MACHINES)
    counts, question = _counts(machines), question_of(args)
    if args.link not in LINKS:
        raise UserError(f"--link is '{args.link}'; it must be one of {', '.join(LINKS)}")
    found = cases(question, counts, LINKS[args.link])
    table = _table(found, bool(question.drafter))
    print("\n".join([_title(args, question), *table, "", *explain(found, LINKS[args.link])]))
    return 0


def question_of(args: Namespace) -> Question:
    """Read the flags of `plan` into a question for the forecast."""
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
    lines = [f"  {'machines':<10}{'tokens that fit':>16}{'streams':>9}{rates}{drafted}"]
    for each in found:
        if each.refusal:
            lines.append(f"  {each.machines:<10}{'-':>16}  {each.refusal}")
            continue
        rates = f"{each.plain.expected:9.1f}{each.plain.low:8.1f}{each.plain.high:8.1f}"
        more = f"{each.drafted.speed.expected:10.1f}" if each.drafted else f"{'-':>10}" if drafts else ""
        lines.append(f"  {each.machines:<10}{each.tokens:16,}{each.streams:9,}{rates}{more}")
    return lines


# ---- up


def _up(args: Namespace) -> int:
    cluster, config = read_cluster(args.file), read_config(args)
    choices = read_choices(args)
    if args.tensor_parallel is not None or choices.tensor_parallel > 1:
        raise UserError(
            "--tensor-parallel is set by the cluster, to the number of hosts: leave it out here and in EXTRA_ARGS"
        )
    paths = paths_of(config, choices.chat_template)
    only = cluster.hosts[0].address if config.is_local and cluster.hosts[0].address != LOCAL else ""
    address = f"{shown_url(cluster, config)}/v1{f' (on {only} only)' if only else ''}"
    run = Run(cluster.name, config.names[0], address)
    try:
        seen = survey(cluster, [cluster.port, config.port], paths)
        findings = judge(seen, config.engine.memory_fraction)
        show_findings(findings)
        refuse_broken(findings)
        command = vllm_command(config, read_choices(args, seen[0].facts["vllm"]["vllm"]))
        for text in command.notes:
            say(f"note: {text}")
        jobs = jobs_of(cluster, seen, command, config)
        if args.check:
            run.enter(DOWN)
            return 0
        if only:
            say(
                f"note: --host is {config.host}, so only {only} itself can reach the server; to let others reach it, "
                "add --host 0.0.0.0 and --api-key"
            )
        say(f"starting vLLM on {len(seen)} machines; logs: {run.folder}; press ctrl-c to stop")
        Supervisor(cluster, [each.host for each in seen], jobs, run, say).serve()
    except BaseException as error:
        run.enter(FAILED, str(error) or type(error).__name__)
        raise
    return 0


def shown_url(cluster: Cluster, config: ServerConfig) -> str:
    """Return the address of the server, which listens on the first machine, as seen from here."""
    head = cluster.hosts[0].address
    if head == LOCAL or config.host not in EVERYWHERE:
        return url_of(config.host, config.port)
    name = urlsplit(head).hostname if head.startswith("ssh://") else head.rpartition("@")[2]
    return url_of(name or head, config.port)


def paths_of(config: ServerConfig, chat_template: str) -> list[str]:
    """List the paths that every machine must have: folders of the model and the drafter, and the template's file, as
    they are sent to vLLM. Raises UserError for a relative path, which would mean another place there."""
    folders = {"model": config.engine.model, "drafter": config.engine.drafter}
    given = {name: each for name, each in folders.items() if each.startswith(("/", ".", "~")) or Path(each).exists()}
    if chat_template and not set("{}\n") & set(chat_template):  # else it is the template itself
        given["chat-template"] = chat_template
    for name, value in given.items():
        if not value.startswith("/"):
            raise UserError(f"--{name} is '{value}'; every machine reads it: give its absolute path, the same on all")
    return [portable_name(value) if name in folders else value for name, value in given.items()]


def jobs_of(cluster: Cluster, seen: list[Seen], command: VllmCommand, config: ServerConfig) -> list[Job]:
    """Build the command of each rank. Only rank 0 gets the API key and probes the server."""
    watch: dict[str, Any] = {"url": url_of(config.host, config.port), "model": config.names[0], "key": config.api_key}
    watch |= {"every": min(WATCH_EVERY, cluster.hang_seconds / 4), "patience": TOKEN_SECONDS}
    jobs = []
    for each in seen:
        words = rank_words(command, cluster, each.host.rank)
        environ = rank_environment(each.host.spec, cluster.ready_seconds)
        is_head = not each.host.rank
        environ |= command.secrets if is_head else {}
        program = each.facts["vllm"]["program"]
        jobs.append(Job([program, *words[1:]], environ, config.drain_seconds, watch if is_head else None))
    return jobs


# ---- status and down


def _status(args: Namespace) -> int:
    cluster = read_cluster(args.file)
    state = read_state(cluster.name) or State(cluster.name, DOWN)
    print("\n".join(_status_lines(cluster, state)))
    return 0 if state.phase == READY and state.is_supervised else 1


def _status_lines(cluster: Cluster, state: State) -> list[str]:
    name, folder = cluster.name, run_folder(cluster.name)
    if state.phase == DOWN:
        return [f"cluster {name} is down"]
    if state.phase == FAILED:
        return [f"cluster {name} has failed: {state.error}"]
    if not state.is_supervised:
        return [
            f"cluster {name} was {state.phase}, and its supervisor is gone: ranks end by themselves after "
            f"{cluster.silence_seconds:g} s; `sparkdraft cluster down` makes sure of it"
        ]
    now = time.time()
    lasts = f"{(now - state.since) / 60:.0f} min"
    lines = [f"cluster {name} is {state.phase} ({lasts}): {state.model}, {state.address}"]
    for rank, label in enumerate(cluster.labels()):
        if rank < len(state.pids):
            heard = f"process {state.pids[rank]}, last heard from {max(now - state.heard[rank], 0):.0f} s ago"
            lines.append(f"  rank {rank}  {label:<20} {heard}")
    lines += [f"  restarted: {reason}" for reason in state.restarts]
    return [*lines, f"  logs: {folder}"]


def _down(args: Namespace) -> int:
    cluster = read_cluster(args.file)
    end_run(cluster, say)
    print(f"cluster {cluster.name} is down")
    return 0


# ---- findings about the machines


def show_findings(findings: Sequence[Finding]) -> None:
    part = ""
    for each in findings:
        if each.part != part:
            part = each.part
            say(part)
        say(f"  {each.status.word:<8}{each.name}: {each.value}")
        if each.advice:
            say(f"          -> {each.advice}")


def refuse_broken(findings: Sequence[Finding]) -> None:
    """Raises UserError with the first broken finding."""
    broken = [each for each in findings if each.status == Status.BROKEN]
    if broken:
        first = broken[0]
        where = "" if first.part in first.value else f"{first.part}: {first.name}: "
        more = f" (and {len(broken) - 1} more, above)" if len(broken) > 1 else ""
        advice = f": {first.advice}" if first.advice else ""
        raise UserError(f"{where}{first.value}{advice}{more}")
