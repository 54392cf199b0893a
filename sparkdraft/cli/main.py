"""The `sparkdraft` command: one module per verb, each with HELP, EXAMPLES, configure(parser) and run(args) -> status.

A UserError becomes one sentence and status 1; any other exception is our bug and keeps its traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from sparkdraft import __version__
from sparkdraft.cli import (
    bench,
    chat,
    check,
    cluster,
    demo,
    doctor,
    export,
    generate,
    import_,
    models,
    plan,
    pull,
    recipe,
    serve,
    train,
    tune,
)
from sparkdraft.cli.console import fail
from sparkdraft.cli.parser import Parser
from sparkdraft.core import UserError

VERBS = {
    "serve": serve,
    "demo": demo,
    "generate": generate,
    "chat": chat,
    "models": models,
    "pull": pull,
    "plan": plan,
    "doctor": doctor,
    "check": check,
    "tune": tune,
    "bench": bench,
    "train": train,
    "export": export,
    "import": import_,
    "recipe": recipe,
    "cluster": cluster,
}


def parser() -> Parser:
    about = "Large language models on one machine, fast and lossless."
    first = "to begin: `sparkdraft chat`; `sparkdraft VERB --help` has examples"
    top = Parser(prog="sparkdraft", description=about, epilog=first)
    top.add_argument("--version", action="version", version=f"sparkdraft {__version__}")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, module in VERBS.items():
        module.configure(verbs.add_parser(name, help=module.HELP, description=module.HELP, epilog=module.EXAMPLES))
    return top


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return int(VERBS[args.verb].run(args))
    except UserError as error:
        return fail(str(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
