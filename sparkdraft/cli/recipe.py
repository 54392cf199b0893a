"""`sparkdraft recipe`: published pairs of models and drafters under one name, to show, to hand on and to serve."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from sparkdraft.cli import serve
from sparkdraft.cli.console import note
from sparkdraft.core import UserError

HELP = "serve a known pair of model and drafter by its name, or write it for a launcher"
EXAMPLES = """examples:
  sparkdraft recipe list
  sparkdraft recipe show qwen3.5-27b-nvfp4-spark > server.toml
  sparkdraft recipe show gemma-4-31b-spark --form sparkrun > gemma.yaml      (sparkrun run ./gemma.yaml)
  sparkdraft recipe show gemma-4-31b-spark --form eugr > recipes/gemma.yaml  (./run-recipe.sh gemma --solo)
  sparkdraft recipe run qwen3-8b-dflash --port 9000
"""
FORMS = ("toml", "sparkrun", "eugr")


def configure(parser: ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="step", required=True, metavar="STEP")
    verbs.add_parser("list", help="the recipes' names, and what each one serves", epilog=EXAMPLES)
    show = verbs.add_parser(
        "show", help="print a recipe: as TOML for `serve --config`, or for a launcher", epilog=EXAMPLES
    )
    show.add_argument("name", metavar="NAME", help="a recipe's name")
    show.add_argument("--form", default="toml", choices=FORMS, help="toml, sparkrun or eugr (default toml)")
    show.add_argument("--container", default="", metavar="IMAGE", help="the image, for launchers (default: vLLM's own)")
    show.add_argument("--vllm-version", default="0.32.0", metavar="TEXT", help="the version it is for (default 0.32.0)")
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

    recipe = find_recipe(args.name)
    if args.form == "toml":
        if args.container:
            raise UserError(
                "--container names a launcher's image, and our own file has none: add --form sparkrun or eugr"
            )
        print(recipe.toml(), end="")
        return 0
    for text in recipe.for_vllm(args.vllm_version).notes:
        note(text)
    print(recipe.launcher(args.form, args.vllm_version, args.container), end="")
    return 0


def _run(args: Namespace) -> int:
    from sparkdraft.bridges.recipes import find_recipe

    args.base = find_recipe(args.name).options()
    return serve.run(args)
