"""`sparkdraft check`: asks probes with known answers, of a model on this machine or of any OpenAI-compatible server.

The probes are those of sparkdraft/canary; this file loads what is asked and prints what was found. The exit status is 1
if a probe failed.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from sparkdraft.cli.console import note
from sparkdraft.cli.options import add_engine_flags, engine_options
from sparkdraft.config import ENGINE_FIELDS, EngineConfig
from sparkdraft.util.progress import errors, progress

if TYPE_CHECKING:
    from sparkdraft.operate.canary.findings import Finding

HELP = "test a model, or any OpenAI-compatible server, with questions whose answers are known"
EXAMPLES = """examples:
  sparkdraft check                                            the embedded model on this machine
  sparkdraft check --model Qwen/Qwen3-8B --kv turboquant
  sparkdraft check --url http://127.0.0.1:8000 --json         this server, vLLM, llama.cpp or a hosted one
The exit status is 1 if a probe failed.
"""


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--url", help="test this server over HTTP; --model then names the model to request")
    parser.add_argument("--api-key", default="", metavar="KEY", help="the server's key")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="seconds to wait for the next byte (default 60)"
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument(
        "--model", help=f"{ENGINE_FIELDS['model'].metadata['help']} (default smollm2); with --url, a name"
    )
    add_engine_flags(parser, without=("model", "count_ids"))


def run(args: Namespace) -> int:
    from sparkdraft.operate.canary.findings import failures, table

    found = _ask_server(args) if args.url else _ask_model(args)
    failed = failures(found)
    print(table(found))
    passed = sum(finding.status == "passed" for finding in found)
    print(f"{passed} passed, {len(failed)} failed, {len(found) - passed - len(failed)} skipped")
    if args.json:
        asked = {"url": args.url} if args.url else {"model": args.model}
        print(json.dumps(asked | {"ok": not failed, "findings": [finding.as_dict() for finding in found]}))
    return 1 if failed else 0


def _ask_server(args: Namespace) -> list[Finding]:
    from sparkdraft.operate.canary.remote import Server, check_url

    with progress(f"asking {args.url}", "probes") as meter:
        return check_url(Server(args.url, args.api_key, args.model or "", args.timeout), meter)


def _ask_model(args: Namespace) -> list[Finding]:
    args.model = args.model or EngineConfig().model
    options = engine_options(args)
    EngineConfig(**options)  # refuse a bad flag before torch is imported
    with progress(f"opening {args.model}") as meter:
        from sparkdraft.engine.backend import load_backend
        from sparkdraft.operate.canary.run import run_probes

        backend = load_backend(options, lambda stage, done, total: meter.stage(f"{stage} of {args.model}", done, total))
        for fallback in () if args.verbose else backend.info.fallbacks:  # the plan has them too
            note(f"{fallback['name']}: {fallback['reason']}")
        if args.verbose:
            facts = [
                f"{fact['name']}: {fact['value']} {fact['reason'] and '(' + fact['reason'] + ')'}".rstrip()
                for fact in backend.info.facts
            ]
            errors.print("\n".join([backend.info.plan, *facts]), markup=False)
        return run_probes(backend, report=lambda done, total: meter.stage("asking", done, total))
