"""`sparkdraft cluster plan|up|status|down`: several machines as one server, on vLLM's multiprocess executor.

It reads flags and prints; sparkdraft/cluster does the work. No torch.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from sparkdraft.bridges.cluster.ranks import PIPELINE, TENSOR
from sparkdraft.cli.export import add_serve_flags, add_vllm_flags
from sparkdraft.core import UserError

if TYPE_CHECKING:
    from sparkdraft.bridges.cluster.hosts import Cluster
    from sparkdraft.bridges.cluster.supervisor import State

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
WAYS = (TENSOR, PIPELINE)


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
    up.add_argument("--parallel", default=TENSOR, choices=WAYS, help="tensor or pipeline (default tensor)")
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
    from sparkdraft.cli import cluster_plan, cluster_up

    if args.what == "plan":
        return cluster_plan.run(args)
    if args.what == "up":
        return cluster_up.run(args)
    from sparkdraft.bridges.cluster.hosts import read_cluster

    cluster = read_cluster(args.file)
    return _down(cluster) if args.what == "down" else _status(cluster, args.json)


def _status(cluster: Cluster, as_json: bool) -> int:
    from sparkdraft.bridges.cluster.supervisor import DOWN, READY, State, read_state, run_folder

    state = read_state(cluster.name) or State(cluster.name, DOWN)
    serves = state.phase == READY and state.is_supervised
    if as_json:
        from dataclasses import asdict

        print(json.dumps({**asdict(state), "serves": serves, "folder": str(run_folder(cluster.name))}))
        return 0 if serves else 1
    for line in _status_lines(cluster, state):
        print(line)
    return 0 if serves else 1


def _status_lines(cluster: Cluster, state: State) -> list[str]:
    from sparkdraft.bridges.cluster.supervisor import DOWN, FAILED, run_folder

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


def _down(cluster: Cluster) -> int:
    from sparkdraft.bridges.cluster.supervisor import end_run

    lost = end_run(cluster, lambda line: print(line, file=sys.stderr, flush=True))
    if lost:
        raise UserError(
            f"{lost[0]}; what runs there ends by itself after {cluster.silence_seconds:g} s without its supervisor"
        )
    print(f"cluster {cluster.name} is down")
    return 0
