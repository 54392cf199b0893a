"""`sparkdraft serve`: the OpenAI-compatible server and its chat page.

Every field of ServerConfig is a flag, a SPARKDRAFT_ variable and a key of the TOML file, with the same name. This file
reads the flags and prints what happens. The server itself is sparkdraft/server, and the model runs in its own process,
so nothing here imports torch.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from sparkdraft import __version__
from sparkdraft.bridges.container_env import container_notes
from sparkdraft.cli.console import say
from sparkdraft.cli.serve_options import CHOICES, add_serve_flags, add_vllm_flags, read_choices, read_config
from sparkdraft.config import describe_sampling
from sparkdraft.core import UserError
from sparkdraft.operate.canary.findings import summary
from sparkdraft.server.config import ServerConfig

if TYPE_CHECKING:
    from sparkdraft.server.engine_client import EngineClient, RestartPolicy
    from sparkdraft.server.service import Service

HELP = "serve a model over HTTP: OpenAI's API and a chat page"
EXAMPLES = """examples:
  sparkdraft serve
  sparkdraft serve --model Qwen/Qwen3-8B --port 9000 --max-seqs 16
  sparkdraft serve --host 0.0.0.0 --api-key "$KEY"
  sparkdraft serve --config server.toml --spec off
  sparkdraft serve --shape qwen3-8b                            (random weights, to measure with `bench serve`)
  sparkdraft serve --engine vllm --model Qwen/Qwen3.5-27B      (the same flags, served by an installed vLLM)
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello!"}]}'
Flags override environment variables (SPARKDRAFT_PORT and so on), which override the file. The variables of DFlash
containers work too: MODEL_PATH, DFLASH_DRAFTER, DFLASH_NUM_SPEC_TOKENS, MAX_MODEL_LEN, MAX_NUM_SEQS,
MAX_NUM_BATCHED_TOKENS, GPU_MEMORY_UTILIZATION, ENABLE_TURBOQUANT, TQ_MODE and other TQ_ names, SERVED_MODEL_NAME,
VLLM_API_KEY and EXTRA_ARGS.
"""
ENGINES = ("own", "vllm")
POLL = 0.1
SAY_AGAIN = 5.0  # seconds after which a stage that lasts is printed again


def configure(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--engine", default="own", choices=ENGINES, help="own, or vllm where it is installed (default own)"
    )
    add_serve_flags(parser)
    group = parser.add_argument_group("measuring without a download")
    group.add_argument("--shape", default="", help="serve random weights of a named shape, such as qwen3-8b")
    group.add_argument(
        "--drafter-shape", default="", help="with --shape, a drafter with random weights: dflash-5x, mtp"
    )
    add_vllm_flags(parser)


def run(args: Namespace) -> int:
    """Serve until a signal."""
    end_at_signals()
    if args.shape:
        if args.engine == "vllm":
            raise UserError("--shape is for our own engine; leave it out, or leave out --engine vllm")
        if hasattr(args, "model"):
            raise UserError("--shape and --model are both given: leave one of them out")
        args.model, args.canary = args.shape, False  # all its answers are wrong
        say("note: the weights are random, and so is the text")
    elif args.drafter_shape:
        raise UserError("--drafter-shape goes with --shape: a model with real weights drafts with --drafter")
    config = read_config(args)
    if args.engine == "vllm":
        return _serve_vllm(config, args)
    if given := [name for name in CHOICES if getattr(args, name) is not None]:
        raise UserError(f"--{given[0].replace('_', '-')} is for --engine vllm; leave it out, or choose that engine")
    for text in container_notes(os.environ):
        say(f"note: {text}")
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    client = _random_client(config, args.drafter_shape) if args.shape else _client(config)
    asyncio.run(_serve(config, client))
    return 0


def _serve_vllm(config: ServerConfig, args: Namespace) -> int:
    """Run `vllm serve` with the same configuration, as a child behind our own front, until it or a signal ends it."""
    from sparkdraft.bridges.vllm.child import find_program, free_port, url_of, version_of
    from sparkdraft.bridges.vllm.command import shell, vllm_command
    from sparkdraft.bridges.vllm.serve import FrontServer, Supervised, create_front
    from sparkdraft.server.metrics import Metrics
    from sparkdraft.server.run import address_of, listen

    for text in container_notes(os.environ, to_vllm=True):
        say(f"note: {text}")
    program = find_program("vllm")
    version = version_of(program)
    inner = replace(config, host="127.0.0.1", port=free_port())
    command = vllm_command(inner, read_choices(args, version), behind_front=True)
    for text in command.notes:
        say(f"note: {text}")
    listener = listen(config)
    say(f"sparkdraft {__version__} serves {config.names[0]} with vLLM {version} on {address_of(listener)}:")
    say(shell(command))
    supervised = Supervised(
        [program, *command.words()[1:]],
        {**os.environ, **command.secrets},
        url_of(inner.host, inner.port),
        say,
        version=version,
        shown=shell(command),
        notes=command.notes,
        api_key=config.api_key,
        canary=config.canary,
        drain=config.drain_seconds,
    )
    server = FrontServer(create_front(config, supervised, Metrics()), supervised)
    return asyncio.run(server.run_on(listener))


def end_at_signals() -> None:
    """Exit at a signal, before the server handles signals and after it: nothing has to be drained, and an engine
    process that was started ends with its parent."""

    def end(sig: int, frame: FrameType | None) -> NoReturn:
        os._exit(0)  # an exception would be raised in whatever is being imported

    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, end)


def _client(config: ServerConfig) -> EngineClient:
    from sparkdraft.server.engine_client import EngineClient
    from sparkdraft.weights.checkpoint import check_name

    check_name(config.engine.model)  # before an address is printed at which nothing would ever answer
    canary = config.tool_parser if config.canary else None
    return EngineClient(config.engine, _restart(config), canary=canary)


def _random_client(config: ServerConfig, drafter: str) -> EngineClient:
    """The client of an engine with random weights."""
    from sparkdraft.cli.random_engine import COMMAND, DRAFTER
    from sparkdraft.operate.bench.shapes import drafter_shape, shape
    from sparkdraft.server.engine_client import EngineClient

    for name, value, others in (
        ("drafter", config.engine.drafter, "name one with --drafter-shape"),
        ("profile", config.engine.profile, "leave it out"),
    ):
        if value not in ("auto", "none"):
            raise UserError(f"{name} is '{value}', and a shape with random weights has none: {others}")
    model = shape(config.engine.model)
    if drafter:
        drafter_shape(drafter, model)
    # As `bench offline --shape`: random text repeats itself, so drafts from it would be accepted.
    options = {"ngram": False, "prefix_cache": False} | config.engine.chosen() | {DRAFTER: drafter}
    return EngineClient(options, _restart(config), COMMAND)


def _restart(config: ServerConfig) -> RestartPolicy:
    from sparkdraft.server.engine_client import RestartPolicy

    return RestartPolicy(hang=config.hang_seconds, step=config.step_seconds)


async def _serve(config: ServerConfig, client: EngineClient) -> None:
    from sparkdraft.server.app import create_app
    from sparkdraft.server.run import Server, address_of, listen

    listener = listen(config)
    address = address_of(listener)
    say(f"sparkdraft {__version__} serves {config.names[0]}; press ctrl-c to stop")
    say(f"  API   {address}/v1" + ("  (an API key is required)" if config.needs_key else ""))
    say(f"  chat  {address}/")
    if not (config.is_local or config.needs_key):
        say("  note: other machines can reach this, and there is no key")
    await Server(create_app(config, client), config).run_on(listener, narrate)


async def narrate(service: Service) -> AsyncIterator[None]:
    """Print each stage, again while it lasts, the plan when it is ready, and every restart. A model that cannot be
    served at all ends the server: no client waits for it yet."""
    last, was_ready, said, ready_text = "", False, 0.0, None
    while True:
        state = service.state
        now = service.stage if state == "starting" else state
        if state == "failed" and not was_ready:
            raise UserError(str(service.last_error))
        if service.ready and last != "ready":
            if service.text is ready_text:
                say("the engine answers again")
            else:
                _say_ready(service)
            was_ready, last, ready_text = True, "ready", service.text
        elif not service.ready and (now != last or (state == "starting" and time.monotonic() - said > SAY_AGAIN)):
            error = service.last_error if state in ("restarting", "failed", "unresponsive") else None
            say(f"{now}: {error}" if error else f"{now}{_count(service)} ...")
            last, said = now, time.monotonic()
        yield
        await asyncio.sleep(POLL)


def _count(service: Service) -> str:
    done, total = service.client.progress
    return f", {done} of {total}" if total else ""


def _say_ready(service: Service) -> None:
    info = service.client.info
    assert info is not None
    say(
        f"ready after {service.start_seconds:.1f} s: {info.plan.splitlines()[0]}; context {info.max_model_len:,} tokens"
    )
    drafter = f"{info.drafter['name']}, up to {info.drafter['max_depth']} drafts per step" if info.drafter else "none"
    say(f"  drafter: {drafter}")
    say(f"  sampling: {describe_sampling(service.sampling)}, unless a request sets its own (--sampling-defaults)")
    if info.canary:
        say(f"  canary: {summary(info.canary)}")
    for fact in service.text.style.facts if service.text else ():
        say(f"  {fact.name}: {fact.value}" + (f" ({fact.reason})" if fact.reason else ""))
    for fallback in info.fallbacks:
        say(f"  note: {fallback['name']}: {fallback['reason']}")
