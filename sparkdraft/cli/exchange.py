"""`sparkdraft export`, `import` and `recipe`: configurations and models for other engines, and from them.

`export vllm` prints our configuration as a `vllm serve` command; `export safetensors` writes a model as a folder that
other engines load. `import` reads a command of vLLM or llama.cpp, or a compose file. `recipe` shows and serves
published pairs of a model and a drafter.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path

from sparkdraft.bridges import importing
from sparkdraft.bridges.container_env import container_notes
from sparkdraft.bridges.recipes import find_recipe, recipes
from sparkdraft.bridges.vllm.command import shell, vllm_command
from sparkdraft.cli import serve
from sparkdraft.cli.console import note
from sparkdraft.cli.options import read_text
from sparkdraft.cli.parser import Verb
from sparkdraft.cli.serve_options import add_serve_flags, add_vllm_flags, read_choices, read_config
from sparkdraft.core import UserError
from sparkdraft.util.progress import progress

EXPORT_HELP = "write the configuration of `serve`, or a model, for another engine"
EXPORT_EXAMPLES = """examples:
  sparkdraft export vllm --model google/gemma-4-31B-it --weights fp8 --max-model-len 16384
  sparkdraft export vllm --config server.toml
  sparkdraft export vllm --model google/gemma-4-26B-A4B-it --method mtp --vllm-version 0.20.2   (refused, with the fix)
  sparkdraft export safetensors --model smollm2 --out smollm2-hf      (for engines that do not read GGUF files)
The command goes to standard output, and what is different in vLLM to standard error. Nothing is loaded or started.
"""
IMPORT_HELP = "read a command of vLLM or llama.cpp, or a compose file, and print ours"
IMPORT_EXAMPLES = """examples:
  sparkdraft import "vllm serve Qwen/Qwen3-8B --max-num-seqs 16 --gpu-memory-utilization 0.8"
  sparkdraft import "llama-server -m model.gguf -c 32768 -np 4 -ngl 99"
  sparkdraft import compose.yaml
  cat run.sh | sparkdraft import -
Our command goes to standard output; what has no counterpart is named on standard error, flag by flag.
"""
RECIPE_HELP = "serve a known pair of model and drafter by its name, or print it"
RECIPE_EXAMPLES = """examples:
  sparkdraft recipe list
  sparkdraft recipe show qwen3.5-27b-nvfp4-spark > server.toml
  sparkdraft export vllm --config server.toml      (the same pair as a `vllm serve` command)
  sparkdraft recipe run qwen3-8b-dflash --port 9000
"""


def _configure_export(parser: ArgumentParser) -> None:
    engines = parser.add_subparsers(dest="to", required=True, metavar="ENGINE")
    vllm = engines.add_parser("vllm", help="a `vllm serve` command", description=EXPORT_HELP, epilog=EXPORT_EXAMPLES)
    vllm.add_argument("--vllm-version", default="", metavar="TEXT", help="the version it is for (default: 0.32.0)")
    vllm.set_defaults(run=_vllm)
    add_vllm_flags(vllm)
    add_serve_flags(vllm)
    text = "a model as a folder in the Hugging Face layout, its weights as floats"
    folder = engines.add_parser("safetensors", help=text, description=text, epilog=EXPORT_EXAMPLES)
    folder.set_defaults(run=_safetensors)
    folder.add_argument("--model", default="smollm2", help="a known name, a folder, a .gguf file or a hub id")
    folder.add_argument("--out", required=True, metavar="FOLDER", help="where it is written")
    folder.add_argument("--dtype", default="float32", metavar="TEXT", help="float32 or bfloat16 (default float32)")


def _safetensors(args: Namespace) -> int:
    from sparkdraft.weights.checkpoint import open_checkpoint
    from sparkdraft.weights.safetensors import write_checkpoint

    with progress(f"writing {args.model}") as report:
        write_checkpoint(open_checkpoint(args.model), Path(args.out), args.dtype, report)
    size = sum(file.stat().st_size for file in Path(args.out).iterdir())
    print(f"{args.out}: {args.dtype}, {size / 1e6:.1f} MB")
    return 0


def _vllm(args: Namespace) -> int:
    command = vllm_command(read_config(args), read_choices(args, args.vllm_version))
    for text in [*container_notes(os.environ, to_vllm=True), *command.notes]:
        note(text)
    print(shell(command), end="")
    return 0


def _configure_import(parser: ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="COMMAND", help="a command in quotes, a compose file, a script, or - for stdin"
    )
    parser.add_argument(
        "--service", default="", metavar="NAME", help="which service of a compose file that has several"
    )


def _run_import(args: Namespace) -> int:
    text = read_text("-") if args.source == "-" else args.source
    if not text.strip():
        raise UserError('the command is empty; give one such as "vllm serve Qwen/Qwen3-8B"')
    found = importing.read(text, args.service)
    for line in found.notes:
        note(line)
    print(found.command())
    return 0


def _configure_recipe(parser: ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="step", required=True, metavar="STEP")
    names = verbs.add_parser("list", help="the recipes' names, and what each one serves", epilog=RECIPE_EXAMPLES)
    names.set_defaults(run=_list_recipes)
    show = verbs.add_parser("show", help="print a recipe as TOML for `serve --config`", epilog=RECIPE_EXAMPLES)
    show.set_defaults(run=_show_recipe)
    show.add_argument("name", metavar="NAME", help="a recipe's name")
    start = verbs.add_parser(
        "run", help="serve a recipe; flags, environment variables and a config file override it", epilog=RECIPE_EXAMPLES
    )
    start.set_defaults(run=_serve_recipe)
    start.add_argument("name", metavar="NAME", help="a recipe's name")
    serve.configure(start)


def _list_recipes(args: Namespace) -> int:
    width = max(map(len, recipes()))
    for recipe in recipes().values():
        print(f"{recipe.name:{width}}  {recipe.describe()}")
    return 0


def _show_recipe(args: Namespace) -> int:
    print(find_recipe(args.name).toml(), end="")
    return 0


def _serve_recipe(args: Namespace) -> int:
    args.base = find_recipe(args.name).options()
    return serve.run(args)


def _run(args: Namespace) -> int:
    return int(args.run(args))


EXPORT = Verb(EXPORT_HELP, EXPORT_EXAMPLES, _configure_export, _run)
IMPORT = Verb(IMPORT_HELP, IMPORT_EXAMPLES, _configure_import, _run_import)
RECIPE = Verb(RECIPE_HELP, RECIPE_EXAMPLES, _configure_recipe, _run)
