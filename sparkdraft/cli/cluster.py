"""`sparkdraft cluster plan|up|status|down`: serve one model on several machines with vLLM's multiprocess executor.

This file reads flags and prints; bridges/cluster does the work. No torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sparkdraft.bridges.cluster.checks import Seen, hosts_of, judge, survey
from sparkdraft.bridges.cluster.expect import ITEMSIZE, LINKS, Case, Latency, cases, explain, measure
from sparkdraft.bridges.cluster.hosts import LOCAL, Cluster, read_cluster
from sparkdraft.bridges.cluster.ranks import PIPELINE, TENSOR, Job, rank_environment, rank_words
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
    sweep_all,
)
from sparkdraft.bridges.vllm.child import url_of
from sparkdraft.bridges.vllm.command import VllmCommand, vllm_command
from sparkdraft.cli.plan import read_drafter, read_formats, read_model
from sparkdraft.cli.serve_options import add_serve_flags, add_vllm_flags, read_choices, read_config
from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.operate.doctor.finding import Finding, Status
from sparkdraft.operate.forecast.forecast import Question
from sparkdraft.operate.forecast.machine import find_machine
from sparkdraft.server.config import ServerConfig
from sparkdraft.weights.hub import portable_name

HELP = "serve one model on two or four machines, with vLLM over ssh"
EXAMPLES = """examples:
  sparkdraft cluster plan --model gpt-oss-120b                   what 1, 2 and 4 Sparks hold, and how fast they are
  sparkdraft cluster up sparks.toml --model Qwen/Qwen3.5-122B    checks, measures, starts and supervises all ranks
  sparkdraft cluster status sparks.toml
  sparkdraft cluster down sparks.toml
docs/cluster.md has an example of the hosts file.
"""
PLAN_EXAMPLES = """examples:
  sparkdraft cluster plan --model gemma4-31b --weights fp8 --drafter gemma4-31b-dflash
  sparkdraft cluster plan --model gemma4-31b --weights fp8 --link tcp       as seen without RoCE: 4 are no faster than 2
  sparkdraft cluster plan --model gpt-oss-120b --machines 2 --concurrency 16 --context 32768
  sparkdraft cluster plan sparks.toml --model gpt-oss-120b --measure        with the all-reduce of your machines
"""
UP_EXAMPLES = """examples:
  sparkdraft cluster up sparks.toml --model Qwen/Qwen3.5-122B --max-model-len 32768 --host 0.0.0.0 --api-key "$KEY"
  sparkdraft cluster up sparks.toml --model openai/gpt-oss-120b --check     only the checks and the measurement
  sparkdraft cluster up sparks.toml --model openai/gpt-oss-120b --detach    in the background, once it is ready
  sparkdraft cluster up sparks.toml --model openai/gpt-oss-120b --parallel pipeline
It runs until ctrl-c or `sparkdraft cluster down`. Logs of all ranks are in the cache folder, under cluster/NAME.
"""
STATUS_EXAMPLES = """examples:
  sparkdraft cluster status sparks.toml
  sparkdraft cluster status sparks.toml --json
exit status: 0 it serves, 1 it does not
"""
DOWN_EXAMPLES = """examples:
  sparkdraft cluster down sparks.toml
"""
USUAL_MACHINES, USUAL_CONTEXT = "2,4", 4096
WATCH_EVERY, TOKEN_SECONDS = 10.0, 30.0  # seconds between two probes of the server, and allowed for one token
EVERYWHERE = ("", "0.0.0.0", "::")  # addresses that listen on all interfaces


def configure(parser: ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", required=True, metavar="VERB")
    plan = verbs.add_parser(
        "plan", help="what fits and how fast it will be", description="say what fits", epilog=PLAN_EXAMPLES
    )
    plan.add_argument(
        "file", nargs="?", default="", help="the hosts file, for the number of machines and for --measure"
    )
    _configure_plan(plan)
    up = verbs.add_parser("up", help="check, start and supervise", description=HELP, epilog=UP_EXAMPLES)
    up.add_argument("file", help="the hosts file")
    up.add_argument(
        "--parallel", default=TENSOR, choices=(TENSOR, PIPELINE), help="tensor or pipeline (default tensor)"
    )
    up.add_argument("--check", action="store_true", help="check and measure, and start nothing")
    up.add_argument("--no-measure", action="store_true", help="do not time an all-reduce first")
    up.add_argument("--detach", action="store_true", help="return when it is ready, and keep it in the background")
    add_vllm_flags(up)
    add_serve_flags(up)
    status = verbs.add_parser(
        "status", help="whether it serves", description="say whether it serves", epilog=STATUS_EXAMPLES
    )
    status.add_argument("file", help="the hosts file")
    status.add_argument("--json", action="store_true", help="print one JSON object instead")
    down = verbs.add_parser("down", help="end all ranks", description="end all ranks", epilog=DOWN_EXAMPLES)
    down.add_argument("file", help="the hosts file")


def _configure_plan(plan: ArgumentParser) -> None:
    plan.add_argument("--model", default="gpt-oss-120b", help="as for `plan` (default gpt-oss-120b)")
    plan.add_argument("--machine", default="gb10", help="the kind of machine (default gb10, a DGX Spark)")
    plan.add_argument("--machines", default="", metavar="N,N", help="how many (default: those of the file, or 2,4)")
    plan.add_argument("--drafter", default="none", help="as for `plan` (default none)")
    plan.add_argument("--weights", default="auto", metavar="FORMAT", help="as for `plan` (default auto)")
    plan.add_argument("--kv", default="exact", help="as for `plan` (default exact)")
    plan.add_argument("--concurrency", type=int, default=1, metavar="N", help="streams at once (default 1)")
    plan.add_argument("--context", type=int, default=4096, metavar="N", help="tokens of each stream (default 4096)")
    plan.add_argument("--link", default="roce", help="roce or tcp: the network that an all-reduce uses (default roce)")
    plan.add_argument("--latency", type=float, metavar="US", help="microseconds of an all-reduce between two machines")
    plan.add_argument("--measure", action="store_true", help="time it on the machines of the hosts file")
    plan.add_argument("--json", action="store_true", help="end with one JSON object")


def run(args: Namespace) -> int:
    return {"plan": _plan, "up": _up, "status": _status, "down": _down}[args.what](args)


# ---- plan


def _plan(args: Namespace) -> int:
    cluster = read_cluster(args.file) if args.file else None
    counts = _counts(args.machines or (str(len(cluster.hosts)) if cluster else USUAL_MACHINES))
    question = question_of(args)
    latency = _latency(args, cluster, question.model.hidden_size)
    found = cases(question, counts, latency)
    print("\n".join([_title(args, question), *_table(found, bool(question.drafter)), "", *explain(found, latency)]))
    if args.json:
        print(json.dumps({"plan": args.model, "cases": [_as_dict(each) for each in found]}))
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


def _latency(args: Namespace, cluster: Cluster | None, hidden: int) -> Latency:
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


# ---- up


def _up(args: Namespace) -> int:
    cluster, config = read_cluster(args.file), read_config(args)
    choices = read_choices(args)
    if args.tensor_parallel is not None or choices.tensor_parallel > 1:
        raise UserError(
            "--tensor-parallel is set by the cluster, to the number of hosts: leave it out here and in EXTRA_ARGS, and "
            "choose with --parallel"
        )
    paths = paths_of(config, choices.chat_template)
    if args.detach:
        return _detached(cluster)
    only = cluster.hosts[0].address if config.is_local and cluster.hosts[0].address != LOCAL else ""
    run = Run(cluster.name, config.names[0], args.parallel, shown_url(cluster, config), only)
    try:
        unswept = sweep_all(hosts_of(cluster), say, "clear")  # first, because leftovers take memory and ports
        seen = survey(cluster, [cluster.port, config.port], paths)
        findings = judge(seen, config.engine.memory_fraction)
        show_findings(findings)
        refuse_broken(findings)
        if unswept:
            raise UserError(unswept[0])
        command = _command(args, config, seen)
        jobs = jobs_of(cluster, seen, command, config, args.parallel)
        if not args.no_measure:
            _measure(args, cluster, seen, config, run.folder)
        if args.check:
            run.enter("down")
            return 0
        if only:
            say(
                f"note: --host is {config.host}, so only {only} itself can reach the server; to let others reach it, "
                "add --host 0.0.0.0 and --api-key"
            )
        say(
            f"starting vLLM on {len(seen)} machines, {args.parallel} parallel; logs: {run.folder}; press ctrl-c to stop"
        )
        Supervisor(cluster, [each.host for each in seen], jobs, run, say).serve()
    except BaseException as error:
        run.enter(FAILED, error=str(error) or type(error).__name__)
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


def _command(args: Namespace, config: ServerConfig, seen: list[Seen]) -> VllmCommand:
    version = seen[0].facts["vllm"]["vllm"]
    command = vllm_command(config, read_choices(args, version))
    for text in command.notes:
        say(f"note: {text}")
    return command


def jobs_of(cluster: Cluster, seen: list[Seen], command: VllmCommand, config: ServerConfig, parallel: str) -> list[Job]:
    """Build the command of each rank. Only rank 0 gets the API key and probes the server."""
    watch: dict[str, Any] = {"url": url_of(config.host, config.port), "model": config.names[0], "key": config.api_key}
    watch |= {"every": min(WATCH_EVERY, cluster.hang_seconds / 4), "patience": TOKEN_SECONDS}
    jobs = []
    for each in seen:
        words = rank_words(command, cluster, each.host.rank, parallel)
        environ = rank_environment(each.host.spec, cluster.ready_seconds)
        is_head = not each.host.rank
        environ |= command.secrets if is_head else {}
        program = each.facts["vllm"]["program"]
        jobs.append(Job([program, *words[1:]], environ, config.drain_seconds, watch if is_head else None))
    return jobs


def _measure(args: Namespace, cluster: Cluster, seen: list[Seen], config: ServerConfig, folder: Path) -> None:
    """Time an all-reduce and print the speed to expect."""
    question, why = None, ""
    asked = Namespace(model=config.engine.model, machine="gb10", weights="auto", kv="exact", drafter="none")
    asked.concurrency, asked.context = 1, config.engine.max_model_len or USUAL_CONTEXT
    try:
        question = question_of(asked)
    except UserError as error:
        why = str(error)
    hidden = question.model.hidden_size if question else 4096
    latency = measure(cluster, seen, hidden * ITEMSIZE, folder, say)
    if latency is None:
        say("note: the all-reduce was not measured: no torch is installed where vLLM is")
    elif question is None:
        say(f"an all-reduce: {latency.origin}; its share of a token's time is unknown: {why}")
    else:
        for line in explain(cases(question, [len(seen), 2 * len(seen)], latency), latency):
            say(line if "all-reduce" in line else f"on Sparks, {line}")


def _detached(cluster: Cluster) -> int:
    """Run this command again in the background; return when it is ready, raise UserError if it failed."""
    Run.check_free(cluster.name)
    folder = run_folder(cluster.name)
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "sparkdraft.cli.main", *(each for each in sys.argv[1:] if each != "--detach")]
    with open(folder / "supervisor.log", "wb") as log:
        child = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=dict(os.environ)
        )
    try:
        while child.poll() is None:
            state = read_state(cluster.name)
            if state and state.phase == READY and state.supervisor[:1] == [child.pid]:
                say(f"cluster {cluster.name} is ready: {state.address}; log: {folder / 'supervisor.log'}")
                return 0
            time.sleep(0.3)
    except KeyboardInterrupt:
        say("interrupted before it was ready; it has been stopped")
        child.send_signal(signal.SIGINT)  # ctrl-c does not reach its session
        try:
            child.wait()
        except KeyboardInterrupt:
            child.kill()  # ranks end by themselves
        raise
    last = (folder / "supervisor.log").read_text(errors="replace").strip().splitlines()
    raise UserError((last or ["it ended without a message"])[-1].removeprefix("sparkdraft: "))


# ---- status and down


def _status(args: Namespace) -> int:
    cluster = read_cluster(args.file)
    state = read_state(cluster.name) or State(cluster.name, DOWN)
    serves = state.phase == READY and state.is_supervised
    if args.json:
        print(json.dumps({**asdict(state), "serves": serves, "folder": str(run_folder(cluster.name))}))
        return 0 if serves else 1
    for line in _status_lines(cluster, state):
        print(line)
    return 0 if serves else 1


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
    lines = [f"cluster {name} is {state.phase} ({lasts}): {state.model}, {state.parallel} parallel, {state.address}"]
    for rank, label in enumerate(cluster.labels()):
        if rank < len(state.pids):
            heard = f"process {state.pids[rank]}, last heard from {max(now - state.heard[rank], 0):.0f} s ago"
            lines.append(f"  rank {rank}  {label:<20} {heard}")
    lines += [f"  restarted: {reason}" for reason in state.restarts]
    return [*lines, f"  logs: {folder}"]


def _down(args: Namespace) -> int:
    cluster = read_cluster(args.file)
    lost = end_run(cluster, say)
    if lost:
        raise UserError(
            f"{lost[0]}; what runs there ends by itself after {cluster.silence_seconds:g} s without its supervisor"
        )
    print(f"cluster {cluster.name} is down")
    return 0


# ---- findings about the machines


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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
