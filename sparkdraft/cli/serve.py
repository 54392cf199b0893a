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
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import AsyncIterator
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from sparkdraft import __version__
from sparkdraft.cli.options import add_field
from sparkdraft.config import ENGINE_FIELDS
from sparkdraft.core import UserError
from sparkdraft.defaults import describe
from sparkdraft.server.config import FIELDS, SERVER_FIELDS, ServerConfig, merge

if TYPE_CHECKING:
    from sparkdraft.server.service import Service

HELP = "serve a model over HTTP: OpenAI's API and a chat page"
EXAMPLES = """examples:
  sparkdraft serve
  sparkdraft serve --model Qwen/Qwen3-8B --port 9000 --max-seqs 16
  sparkdraft serve --host 0.0.0.0 --api-key "$KEY"
  sparkdraft serve --config server.toml --spec off
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello!"}]}'
Flags beat the environment (SPARKDRAFT_PORT and so on), which beats the file. Of the names that containers use,
MODEL_PATH, DFLASH_DRAFTER, DFLASH_NUM_SPEC_TOKENS, MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS,
GPU_MEMORY_UTILIZATION, ENABLE_TURBOQUANT, TQ_MODE and its like, SERVED_MODEL_NAME and VLLM_API_KEY work too.
"""
POLL = 0.1
SAY_AGAIN = 5.0  # seconds after which a stage that lasts is printed again


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="a TOML file with any of these names as keys")
    for title, flags in (("server", SERVER_FIELDS), ("engine", ENGINE_FIELDS)):
        group = parser.add_argument_group(title)
        for each in flags.values():
            add_field(group, each, shown=each.default, given=SUPPRESS)


def run(args: Namespace) -> int:
    """Serve until a signal. The file may also be named by SPARKDRAFT_CONFIG."""
    end_at_signals()
    flags = {name: value for name, value in vars(args).items() if name in FIELDS}
    config = merge(flags, args.config or os.environ.get("SPARKDRAFT_CONFIG"), os.environ)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(_serve(config))
    return 0


def end_at_signals() -> None:
    """Exit at a signal, before the server handles signals and after it: nothing has to be drained, and an engine
    process that was started ends with its parent."""

    def end(sig: int, frame: FrameType | None) -> NoReturn:
        os._exit(0)  # an exception would be raised in whatever is being imported

    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, end)


async def _serve(config: ServerConfig) -> None:
    from sparkdraft.server.app import create_app
    from sparkdraft.server.engine_client import EngineClient
    from sparkdraft.server.run import Server, address_of, listen

    listener = listen(config)
    address = address_of(listener)
    say(f"sparkdraft {__version__} serves {config.names[0]}; ctrl-c ends it")
    say(f"  API   {address}/v1" + ("  (with the key)" if config.api_key else ""))
    say(f"  chat  {address}/")
    if not (config.is_local or config.api_key):
        say("  note: other machines can reach this, and there is no key")
    app = create_app(config, EngineClient(config.engine))
    await Server(app, config).run_on(listener, narrate)


async def narrate(service: Service) -> AsyncIterator[None]:
    """Print each stage, again while it lasts, the plan when it is ready, and every restart. A model that cannot be
    served at all ends the server: no client waits for it yet."""
    last, was_ready, said = "", False, 0.0
    while True:
        state = service.state
        now = service.stage if state == "starting" else state
        if state == "failed" and not was_ready:
            raise UserError(str(service.last_error))
        if service.ready and last != "ready":
            _say_ready(service)
            was_ready, last = True, "ready"
        elif not service.ready and (now != last or (state == "starting" and time.monotonic() - said > SAY_AGAIN)):
            error = service.last_error if state in ("restarting", "failed") else None
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
    say(f"  sampling: {describe(service.sampling)}, where a request names nothing else (--sampling-defaults)")
    for fact in service.text.style.facts if service.text else ():
        say(f"  {fact.name}: {fact.value}" + (f" ({fact.reason})" if fact.reason else ""))
    for fallback in info.fallbacks:
        say(f"  note: {fallback['name']}: {fallback['reason']}")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
