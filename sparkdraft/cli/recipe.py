"""`sparkdraft recipe`: published pairs of models and drafters under one name, to show and to serve."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace

from sparkdraft.cli import serve
from sparkdraft.core import UserError

HELP = "serve a known pair of model and drafter by its name, or print it"
EXAMPLES = """examples:
  sparkdraft recipe list
  sparkdraft recipe show qwen3.5-27b-nvfp4-spark > server.toml
  sparkdraft export vllm --config server.toml      (the same pair as a `vllm serve` command)
  sparkdraft recipe run qwen3-8b-dflash --port 9000
"""


def configure(parser: ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="step", required=True, metavar="STEP")
    verbs.add_parser("list", help="the recipes' names, and what each one serves", epilog=EXAMPLES)
    show = verbs.add_parser("show", help="print a recipe as TOML for `serve --config`", epilog=EXAMPLES)
    show.add_argument("name", metavar="NAME", help="a recipe's name")
    show.add_argument("--form", default="toml", help=SUPPRESS)
    start = verbs.add_parser(
        "run", help="serve a recipe; flags, environment variables and a config file override it", epilog=EXAMPLES
    )
    start.add_argument("name", metavar="NAME", help="a recipe's name")
    serve.configure(start)


def run(args: Namespace) -> int:
    return {"list": _list, "show": _show, "run": _run}[args.step](args)


def _list(args: Namespace) -> int:
    from sparkdraft.bridges.recipes import recipes

    width = max(map(len, recipes()))
    for recipe in recipes().values():
        print(f"{recipe.name:{width}}  {recipe.describe()}")
    return 0


def _show(args: Namespace) -> int:
    from sparkdraft.bridges.recipes import find_recipe

    if args.form != "toml":
        raise UserError(
            f"--form is '{args.form}', and recipes are written as TOML only: leave it out; for a launcher, put the "
            "command that `sparkdraft export vllm --config FILE` prints into its own recipe"
        )
    print(find_recipe(args.name).toml(), end="")
    return 0


def _run(args: Namespace) -> int:
    from sparkdraft.bridges.recipes import find_recipe

    args.base = find_recipe(args.name).options()
    return serve.run(args)
