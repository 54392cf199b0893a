"""`sparkdraft pull`: fetch a model, and the drafter that is published for it, into the hub's cache."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from sparkdraft.cli.console import note
from sparkdraft.core import UserError
from sparkdraft.weights import hub

HELP = "fetch a model, and its drafter, from the hub"
EXAMPLES = """examples:
  sparkdraft pull Qwen/Qwen3-8B --with-drafter
  sparkdraft pull z-lab/Qwen3-8B-DFlash-b16
  sparkdraft pull Qwen/Qwen3-8B-GGUF:Qwen3-8B-Q4_K_M.gguf
What was interrupted is continued, and every file is checked against its hash. Later commands need no network:
`sparkdraft serve --model Qwen/Qwen3-8B` finds the drafter by itself.
"""


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a hub id such as org/name, or a known name")
    parser.add_argument("--with-drafter", action="store_true", help="and the best drafter that is published for it")


def run(args: Namespace) -> int:
    if args.model in hub.KNOWN:
        print(hub.fetch(args.model))  # its drafter is in the package
        return 0
    from sparkdraft.weights.checkpoint import HUB_ID
    from sparkdraft.weights.hub import pull

    repo, _, file = args.model.partition(":")
    if not HUB_ID.fullmatch(repo):
        raise UserError(f"{args.model} is not a hub id: give one such as org/name, or {', '.join(sorted(hub.KNOWN))}.")
    if file and args.with_drafter:
        raise UserError("--with-drafter needs a config.json, which a GGUF file lacks: pull the drafter by its name.")
    drafter = find_published(repo) if args.with_drafter else ""
    print(pull(repo, file))
    if drafter:
        print(pull(drafter))
    return 0


def find_published(model: str) -> str:
    """The best drafter for a model, from its config.json alone: what cannot run is refused before it is fetched. Empty
    if it is in the model's own file."""
    from sparkdraft.drafters import pairs
    from sparkdraft.models.registry import read_config
    from sparkdraft.weights.checkpoint import read_config_json

    config = read_config(read_config_json(model))
    found = pairs.match(model, config)
    if found is None:
        several = ", ".join(t.name for t in pairs.alike(config))
        advice = "train one (`sparkdraft train`), or leave --with-drafter out"
        advice = f"its shape is that of {several}; pull one of their drafters by name" if several else advice
        raise UserError(f"No drafter is known for {model}: {advice}.")
    if not found.target.readable:
        kinds = ", ".join(pairs.KINDS[d.kind] for d in found.target.drafters)
        raise UserError(f"The drafters of {found.target.name} ({kinds}) are not read yet: leave --with-drafter out.")
    if not found.target.published:
        note(f"the drafter of {found.target.name} is {pairs.KINDS[found.target.readable[0].kind]}")
        return ""
    best = found.target.published[0]
    note(f"{best.repo}: {best.describe()}" + (f" ({found.doubt})" if found.doubt else ""))
    return best.repo
