"""The `sparkdraft` command: finds the verb, which has HELP, EXAMPLES, configure(parser) and run(args) -> exit status.

A UserError becomes one sentence and status 1; any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from sparkdraft import __version__
from sparkdraft.cli.console import fail
from sparkdraft.cli.parser import Parser
from sparkdraft.core import UserError

VERBS = {
    "serve": "serve",
    "demo": "demo",
    "generate": "generate",
    "chat": "chat",
    "models": "models",
    "pull": "models",
    "plan": "plan",
    "doctor": "doctor",
    "check": "check",
    "tune": "tune",
    "bench": "bench",
    "train": "train",
    "export": "exchange",
    "import": "exchange",
    "recipe": "exchange",
    "cluster": "cluster",
    "launch": "launch",
}  # verb -> module; a module of several verbs has an object for each


def verb(name: str) -> Any:
    """Import the module of a verb. Only the verb that runs is imported, so that commands start quickly."""
    module = import_module(f"sparkdraft.cli.{VERBS[name]}")
    return getattr(module, name.upper(), module)


def parser(only: str = "") -> Parser:
    """The command's parser. only: the one verb that is needed, if it is known; else all verbs."""
    about = "Large language models on one machine, fast and lossless."
    first = "to begin: `sparkdraft chat`; `sparkdraft VERB --help` has examples"
    top = Parser(prog="sparkdraft", description=about, epilog=first)
    top.add_argument("--version", action="version", version=f"sparkdraft {__version__}")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name in [only] if only in VERBS else VERBS:
        each = verb(name)
        each.configure(verbs.add_parser(name, help=each.HELP, description=each.HELP, epilog=each.EXAMPLES))
    return top


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser(words[0] if words else "").parse_args(words)
    try:
        return int(verb(args.verb).run(args))
    except UserError as error:
        return fail(str(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
