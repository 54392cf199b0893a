"""`sparkdraft launch PROGRAM`: starts a coding agent that talks to a Sparkdraft server.

It finds the server that runs, or starts one for as long as the program runs, asks it for the model's name and context,
and sets what the program needs: addresses, a key, and the size of the context window. Nothing is written to the
program's own configuration.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shlex import join, quote
from tempfile import NamedTemporaryFile
from typing import NamedTuple

import httpx

from sparkdraft.cli.console import say
from sparkdraft.core import UserError

HELP = "start a coding agent (Claude Code, Codex, opencode, Copilot, qwen-code) with the model of a server"
EXAMPLES = """examples:
  sparkdraft launch claude                                   (a server on port 8000, or a new one)
  sparkdraft launch codex --model Qwen/Qwen3-Coder-30B-A3B   (starts this model if no server runs)
  sparkdraft launch opencode --url http://spark.local:8000
  sparkdraft launch claude -- -p "Explain this repository"   (words after -- go to the program)
  sparkdraft launch claude --print                           (prints the command and its variables, and starts nothing)
The key of a server that asks for one is read from SPARKDRAFT_API_KEY.
"""
DEFAULT_URL = "http://127.0.0.1:8000"
USUAL_CONTEXT = 32_768  # tokens that the first prompt of an agent (7,000 to 18,000) leaves room to work in
READY_SECONDS = 1800.0  # loading a large model for the first time takes minutes
POLL = 0.5
END_SECONDS = 40.0


class Server(NamedTuple):
    """A server that answers, as a program needs to know it."""

    url: str
    key: str  # "local" where the server asks for none: programs refuse an empty one
    model: str
    context: int  # tokens of prompt and answer together


@dataclass(frozen=True, slots=True)
class Start:
    """What starts a program: words after its name, and environment variables."""

    words: list[str] = field(default_factory=list)
    variables: Mapping[str, str] = field(default_factory=dict)


class Program(NamedTuple):
    title: str
    install: str
    start: Callable[[Server], Start]


def claude(server: Server) -> Start:
    model, answer = server.model, str(min(server.context // 4, 32_000))
    models = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
    defaults = tuple(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("HAIKU", "SONNET", "OPUS"))
    return Start(
        ["--model", model],
        {
            "ANTHROPIC_BASE_URL": server.url,
            "ANTHROPIC_AUTH_TOKEN": server.key,
            **dict.fromkeys((*models, *defaults), model),
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.context),  # it assumes a million for unknown models
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": answer,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "API_TIMEOUT_MS": "3000000",  # a long prompt takes minutes on a small machine
        },
    )


def codex(server: Server) -> Start:
    provider = {
        "name": "Sparkdraft",
        "base_url": f"{server.url}/v1",
        "wire_api": "responses",
        "env_key": "LOCAL_MODEL_KEY",
        "stream_idle_timeout_ms": 3_000_000,
    }
    settings = {
        "model_provider": "sparkdraft",
        **{f"model_providers.sparkdraft.{name}": value for name, value in provider.items()},
        "model_context_window": server.context,
        "model_auto_compact_token_limit": server.context * 4 // 5,
    }
    words = [word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    return Start([*words, "--model", server.model], {"LOCAL_MODEL_KEY": server.key})


def opencode(server: Server) -> Start:
    limit = {"context": server.context, "output": server.context // 4}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Sparkdraft",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": server.key},
        "models": {server.model: {"name": server.model, "limit": limit, "tool_call": True}},
    }
    name = f"sparkdraft/{server.model}"
    config = {"provider": {"sparkdraft": provider}, "model": name, "small_model": name}
    return Start([], {"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def qwen(server: Server) -> Start:
    variables = {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": server.key, "OPENAI_MODEL": server.model}
    return Start(["--auth-type", "openai", "--model", server.model], variables)


def copilot(server: Server) -> Start:
    return Start(
        ["--model", server.model],
        {
            "COPILOT_OFFLINE": "true",
            "COPILOT_PROVIDER_BASE_URL": f"{server.url}/v1",
            "COPILOT_PROVIDER_TYPE": "openai",
            "COPILOT_PROVIDER_API_KEY": server.key,
        },
    )


PROGRAMS = {
    "claude": Program("Claude Code", "npm install -g @anthropic-ai/claude-code", claude),
    "codex": Program("Codex", "npm install -g @openai/codex", codex),
    "opencode": Program("opencode", "npm install -g opencode-ai", opencode),
    "copilot": Program("GitHub Copilot CLI", "npm install -g @github/copilot", copilot),
    "qwen": Program("qwen-code (Node 22 or newer)", "npm install -g @qwen-code/qwen-code", qwen),
}


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("program", choices=PROGRAMS, metavar="PROGRAM", help=", ".join(PROGRAMS))
    parser.add_argument(
        "--url", default="", help=f"the server's address (default {DEFAULT_URL}, or a server of its own)"
    )
    parser.add_argument("--model", default="", help="model of the server that is started if none runs")
    parser.add_argument(
        "--max-model-len",
        type=int,
        default=0,
        metavar="N",
        help="context of that server in tokens (default: as much as fits, up to the model's own)",
    )
    parser.add_argument("--print", action="store_true", help="print the command and its variables, and start nothing")
    parser.add_argument("words", nargs=REMAINDER, metavar="-- WORDS", help="words for the program")
    parser.set_defaults(parser=parser)


def run(args: Namespace) -> int:
    program = PROGRAMS[args.program]
    end = args.words.index("--") if "--" in args.words else len(args.words)
    own, words = args.words[:end], args.words[end + 1 :]
    if own and not own[0].startswith("-"):
        raise UserError(f"'{own[0]}' is no flag of launch; write words for {program.title} after --")
    if own:  # our flags may stand behind the program's name too
        args = args.parser.parse_args([*own, args.program], args)
    path = shutil.which(args.program)
    if path is None and not args.print:
        raise UserError(f"{program.title} is not installed: run `{program.install}`, then this command again")
    with server_for(args) as server:
        if server.context < USUAL_CONTEXT:
            say(
                f"note: {server.model} is served with a context of {server.context:,} tokens; the first prompt of a "
                f"coding agent has 7,000 to 18,000. Serve a model with {USUAL_CONTEXT:,} or more (--max-model-len)."
            )
        start = program.start(server)
        command = [path or args.program, *start.words, *words]
        if args.print:
            print(as_shell(command, start.variables))
            return 0
        say(f"{program.title} with {server.model} at {server.url}, {server.context:,} tokens of context")
        return subprocess.run(command, env=os.environ | dict(start.variables)).returncode


def as_shell(command: list[str], variables: Mapping[str, str]) -> str:
    """The command as a line for a shell."""
    return " ".join([*(f"{name}={quote(value)}" for name, value in variables.items()), join(command)])


# ---- the server


@contextmanager
def server_for(args: Namespace) -> Iterator[Server]:
    """The server that was named or that runs; else one that is started, and ended with the program."""
    key = os.environ.get("SPARKDRAFT_API_KEY", "")
    url = (args.url or DEFAULT_URL).rstrip("/").removesuffix("/v1")
    if args.url or is_up(url):
        if args.model or args.max_model_len:
            say(f"note: {url} runs already; --model and --max-model-len are for a server that this command starts.")
        yield ask(url, key)
        return
    with started(args.model, args.max_model_len, key) as url:
        yield ask(url, key)


def is_up(url: str) -> bool:
    try:
        httpx.get(f"{url}/health", timeout=5.0, trust_env=False)
    except httpx.HTTPError:
        return False
    return True


def ask(url: str, key: str) -> Server:
    """Asks a server for its model. Raises UserError if it is not there, not ready, or asks for another key."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=10.0, trust_env=False)
        if answer.status_code == 401:
            raise UserError(f"{url} asks for a key: set SPARKDRAFT_API_KEY to the one that it was started with")
        card = answer.raise_for_status().json()["data"][0]
        return Server(url, key or "local", str(card["id"]), int(card["max_model_len"]))
    except httpx.HTTPError as error:
        raise UserError(f"no Sparkdraft server answers at {url} ({error}); start one with `sparkdraft serve`") from None
    except (KeyError, IndexError, TypeError, ValueError):
        raise UserError(f"{url} is no Sparkdraft server, or its model is not loaded yet; ask {url}/health") from None


@contextmanager
def started(model: str, context: int, key: str) -> Iterator[str]:
    """A server of our own on the default port, which ends with the block. What it says goes to a file."""
    command = [sys.executable, "-m", "sparkdraft.cli.main", "serve", "--host", "127.0.0.1", "--port", "8000"]
    command += ["--model", model] if model else []
    command += ["--max-model-len", str(context)] if context else []
    with NamedTemporaryFile(prefix="sparkdraft-launch-", suffix=".log", delete=False) as file:
        log = Path(file.name)
    say(f"no server runs at {DEFAULT_URL}: starting `{' '.join(['sparkdraft', *command[3:]])}` (its log: {log})")
    with log.open("wb") as out:
        # In a session of its own, so that Ctrl-C in the program does not end it.
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        wait_until_ready(process, log)
        yield DEFAULT_URL
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    """Says each stage of loading once. Raises UserError if the server ends before it is ready."""
    deadline, stage = time.monotonic() + READY_SECONDS, ""
    while time.monotonic() < deadline:
        if process.poll() is not None:
            last = " / ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
            raise UserError(f"the server ended before it was ready: {last or 'it said nothing'}")
        try:
            answer = httpx.get(f"{DEFAULT_URL}/health", timeout=5.0, trust_env=False)
            if answer.status_code == 200:
                return
            found = str(answer.json().get("stage") or "")
        except (httpx.HTTPError, ValueError):
            found = ""
        if found and found != stage:
            say(f"loading: {found}")
            stage = found
        time.sleep(POLL)
    raise UserError(f"the server was not ready after {READY_SECONDS / 60:.0f} minutes; its log is {log}")
