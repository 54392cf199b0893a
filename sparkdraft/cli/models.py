"""`sparkdraft models`: the known short names, and which of them are on this machine."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from rich.console import Console
from rich.table import Table

from sparkdraft.weights import hub

HELP = "list known models, or fetch one"
EXAMPLES = """examples:
  sparkdraft models
  sparkdraft models --fetch smollm2
Any folder in Hugging Face layout, any .gguf file and any hub id works as --model too.
"""


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--fetch", metavar="NAME", help="fetch a known model into the cache and print its path")


def run(args: Namespace) -> int:
    if args.fetch:
        print(hub.fetch(args.fetch))
        return 0
    table = Table("name", "what", "licence", "size", "cached at")
    for model in hub.known():
        path = hub.cached_path(model.name)
        size = f"{model.size / 1e6:.0f} MB"
        table.add_row(model.name, model.description, model.licence, size, str(path) if path else "not yet")
    Console().print(table)
    return 0
