"""`sparkdraft models` and `sparkdraft pull`: models and drafters that are known, on this machine, or to be fetched."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from sparkdraft.cli.console import note
from sparkdraft.cli.parser import Verb
from sparkdraft.core import UserError
from sparkdraft.drafters import pairs
from sparkdraft.models.registry import read_config
from sparkdraft.weights import hub
from sparkdraft.weights.checkpoint import HUB_ID, read_config_json
from sparkdraft.weights.hub import cached_snapshot, pull

MODELS_HELP = "list known models and their drafters"
MODELS_EXAMPLES = """examples:
  sparkdraft models
  sparkdraft models --clear-quantised                    (removes what --weights has quantised)
  sparkdraft pull Qwen/Qwen3-8B --with-drafter
Any folder in Hugging Face layout, any .gguf file and any hub id works as --model too.
"""
PULL_HELP = "fetch a model, and its drafter, from the hub"
PULL_EXAMPLES = """examples:
  sparkdraft pull Qwen/Qwen3-8B --with-drafter
  sparkdraft pull z-lab/Qwen3-8B-DFlash-b16
  sparkdraft pull Qwen/Qwen3-8B-GGUF:Qwen3-8B-Q4_K_M.gguf
What was interrupted is continued, and every file is checked against its hash. Later commands need no network:
`sparkdraft serve --model Qwen/Qwen3-8B` finds the drafter by itself.
"""


def _configure_models(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--clear-quantised", action="store_true", help="remove the cache of matrices that --weights has quantised"
    )


def _run_models(args: Namespace) -> int:
    if args.clear_quantised:
        from sparkdraft.weights import quantised_cache

        print(f"removed {quantised_cache.clear() / 1e6:.0f} MB from {quantised_cache.folder()}")
        return 0
    print("Known names:")
    for model in hub.known():
        path = hub.cached_path(model.name)
        where = f"cached at {path}" if path else "not cached yet"
        print(f"{model.name}: {model.description}\n  {model.licence}, {model.size / 1e6:.0f} MB, {where}")
    print("\nPublished drafters (figures of their authors; `sparkdraft pull MODEL --with-drafter` fetches both):")
    print("\n".join(pair_lines()))
    print("Any model: drafts from the request's own text where it repeats itself; nothing to fetch.")
    print("\n".join(quantised_lines()))
    return 0


def quantised_lines() -> list[str]:
    """List what --weights has quantised, and where it is."""
    from sparkdraft.weights import quantised_cache

    found = quantised_cache.entries()
    if not found:
        return [f"\nMatrices that --weights quantises are kept in {quantised_cache.folder()}: none yet."]
    lines = [f"\nQuantised by --weights (`sparkdraft models --clear-quantised` removes them): {found[0].path.parent}"]
    return lines + [f"  {each.checkpoint} as {each.format}, {each.size / 1e6:.0f} MB" for each in found]


def pair_lines() -> list[str]:
    """List the targets with the drafters that are published for them."""

    def here(repo: str) -> str:
        return " (cached)" if repo and cached_snapshot(repo) else ""

    lines = []
    for target in pairs.targets():
        lines.append(f"{target.name}{here(target.name)}")
        for drafter in target.drafters:
            name = f"{drafter.repo}{here(drafter.repo)}: " if drafter.repo else ""
            kind = pairs.KINDS[drafter.kind] + ("" if drafter.is_read else ", not read yet")
            lines.append(f"  {name}{kind}, block {drafter.block}, {drafter.describe()}")
    return lines


def _configure_pull(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a hub id such as org/name, or a known name")
    parser.add_argument("--with-drafter", action="store_true", help="and the best drafter that is published for it")


def _run_pull(args: Namespace) -> int:
    if args.model in hub.KNOWN:
        print(hub.fetch(args.model))  # its drafter is in the package
        return 0
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
    """Find the best drafter for a model from its config.json, so that what cannot run is refused before it is fetched.
    Returns "" if the drafter is in the model's own file."""
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


MODELS = Verb(MODELS_HELP, MODELS_EXAMPLES, _configure_models, _run_models)
PULL = Verb(PULL_HELP, PULL_EXAMPLES, _configure_pull, _run_pull)
