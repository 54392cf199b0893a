"""`sparkdraft models`: known short names, targets with published drafters, and which of them are on this machine."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from sparkdraft.weights import hub

HELP = "list known models and their drafters, or fetch one"
EXAMPLES = """examples:
  sparkdraft models
  sparkdraft models --fetch smollm2
  sparkdraft models --clear-quantised                    (removes what --weights has quantised)
  sparkdraft pull Qwen/Qwen3-8B --with-drafter
Any folder in Hugging Face layout, any .gguf file and any hub id works as --model too.
"""


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--fetch", metavar="NAME", help="fetch a known model into the cache and print its path")
    parser.add_argument(
        "--clear-quantised", action="store_true", help="remove the cache of matrices that --weights has quantised"
    )


def run(args: Namespace) -> int:
    if args.clear_quantised:
        from sparkdraft.weights import quantised_cache

        print(f"removed {quantised_cache.clear() / 1e6:.0f} MB from {quantised_cache.folder()}")
        return 0
    if args.fetch:
        print(hub.fetch(args.fetch))
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
    """What --weights has quantised, and where it lies."""
    from sparkdraft.weights import quantised_cache

    found = quantised_cache.entries()
    if not found:
        return [f"\nMatrices that --weights quantises are kept in {quantised_cache.folder()}: none yet."]
    lines = [f"\nQuantised by --weights (`sparkdraft models --clear-quantised` removes them): {found[0].path.parent}"]
    return lines + [f"  {each.checkpoint} as {each.format}, {each.size / 1e6:.0f} MB" for each in found]


def pair_lines() -> list[str]:
    """Targets, and under each its drafters, with what is known of them."""
    from sparkdraft.drafters import pairs
    from sparkdraft.weights.hub import cached_snapshot

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
