"""`sparkdraft cluster up`: checks, a measurement, then one supervised rank per machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sparkdraft.cli.cluster_findings import refuse_broken, say, show_findings
from sparkdraft.cli.export import read_choices, read_config
from sparkdraft.core import UserError

if TYPE_CHECKING:
    from sparkdraft.bridges.cluster.checks import Seen
    from sparkdraft.bridges.cluster.hosts import Cluster
    from sparkdraft.bridges.cluster.ranks import Job
    from sparkdraft.bridges.vllm.command import VllmCommand
    from sparkdraft.server.config import ServerConfig

WATCH_EVERY, TOKEN_SECONDS = 10.0, 30.0  # between two looks at the server, and for one token
USUAL_CONTEXT = 4096
EVERYWHERE = ("", "0.0.0.0", "::")  # addresses to listen on


def run(args: Namespace) -> int:
    from sparkdraft.bridges.cluster.checks import hosts_of, judge, survey
    from sparkdraft.bridges.cluster.hosts import LOCAL, read_cluster
    from sparkdraft.bridges.cluster.supervisor import FAILED, Run, Supervisor, sweep_all

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
        unswept = sweep_all(hosts_of(cluster), say, "clear")  # first: what is left takes memory and ports
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
    """Where the server is asked from here: it listens on the first machine."""
    from sparkdraft.bridges.cluster.hosts import LOCAL
    from sparkdraft.bridges.vllm.child import url_of

    head = cluster.hosts[0].address
    if head == LOCAL or config.host not in EVERYWHERE:
        return url_of(config.host, config.port)
    name = urlsplit(head).hostname if head.startswith("ssh://") else head.rpartition("@")[2]
    return url_of(name or head, config.port)


def paths_of(config: ServerConfig, chat_template: str) -> list[str]:
    """That every machine must have: folders of the model and of the drafter, and the template's file, as they are sent
    to vLLM. Raises UserError for one that would mean another place there."""
    from sparkdraft.weights.hub import portable_name

    folders = {"model": config.engine.model, "drafter": config.engine.drafter}
    given = {name: each for name, each in folders.items() if each.startswith(("/", ".", "~")) or Path(each).exists()}
    if chat_template and not set("{}\n") & set(chat_template):  # else it is the template itself
        given["chat-template"] = chat_template
    for name, value in given.items():
        if not value.startswith("/"):
            raise UserError(f"--{name} is '{value}'; every machine reads it: give its absolute path, the same on all")
    return [portable_name(value) if name in folders else value for name, value in given.items()]


def _command(args: Namespace, config: ServerConfig, seen: list[Seen]) -> VllmCommand:
    from sparkdraft.bridges.vllm.command import vllm_command

    version = seen[0].facts["vllm"]["vllm"]
    command = vllm_command(config, read_choices(args, version))
    for text in command.notes:
        say(f"note: {text}")
    return command


def jobs_of(cluster: Cluster, seen: list[Seen], command: VllmCommand, config: ServerConfig, parallel: str) -> list[Job]:
    """What each rank runs. The key and the watch are the head's alone."""
    from sparkdraft.bridges.cluster.ranks import Job, rank_environment, rank_words
    from sparkdraft.bridges.vllm.child import url_of

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
    """Time an all-reduce, and say what to expect of it."""
    from sparkdraft.bridges.cluster.expect import ITEMSIZE, cases, explain, measure
    from sparkdraft.cli.cluster_plan import question_of

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
    """Start this command again in the background; returns when it is ready, or has failed."""
    from sparkdraft.bridges.cluster.supervisor import READY, Run, read_state, run_folder

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
        child.send_signal(signal.SIGINT)  # a session of its own: ctrl-c has not reached it
        try:
            child.wait()
        except KeyboardInterrupt:
            child.kill()  # ranks end by themselves
        raise
    last = (folder / "supervisor.log").read_text(errors="replace").strip().splitlines()
    raise UserError((last or ["it ended without a message"])[-1].removeprefix("sparkdraft: "))
