"""`sparkdraft tune`: finds faster settings for this machine, model and these prompts, and writes them as a profile."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import date
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdraft.cache.formats import EXACT, kv_names
from sparkdraft.cli.console import note, show_fallbacks
from sparkdraft.cli.options import add_engine_flags, engine_options
from sparkdraft.config import ENGINE_FIELDS, EngineConfig
from sparkdraft.core import UserError
from sparkdraft.engine.profile import OPTIONS, Profile, conditions_of
from sparkdraft.operate.tune.search import LOADS, TILES, Budget, Knob, Outcome, Search, knobs
from sparkdraft.util.progress import SELDOM, Meter, progress
from sparkdraft.util.this_machine import usable_cores

if TYPE_CHECKING:
    from sparkdraft.engine.load import Opened
    from sparkdraft.operate.tune.engines import Engines

HELP = "measure which settings are fastest here, and keep them in a profile"
EXAMPLES = """examples:
  sparkdraft tune
  sparkdraft tune --model Qwen/Qwen3-8B --prompts mine.jsonl --minutes 10
  sparkdraft tune --model Qwen/Qwen3-8B --kv-formats exact,fp8 --out qwen3-8b.toml
The profile is kept in the cache folder, and `serve`, `generate`, `chat` and `LLM` use it by themselves. A flag
overrides it, and --no-profile ignores it. A setting that is given here is not tuned.
"""
PER_CLASS = 2  # of the package's own prompts, if the user brings none


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=5.0, help="time to spend (default 5)")
    parser.add_argument("--prompts", default="", metavar="FILE", help='lines of text, or .jsonl with "prompt"')
    parser.add_argument("--output-len", type=int, default=32, help="tokens per answer (default 32)")
    parser.add_argument(
        "--kv-formats",
        default="",
        metavar="LIST",
        help="on a GPU, formats of the KV cache to choose from; fp8 and turboquant change the text slightly, so "
        "without this flag the format stays as it is",
    )
    parser.add_argument("--out", default="", metavar="FILE", help="write the profile there too, to share it")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    add_engine_flags(parser, without=("max_model_len", "kv_tokens", "prefix_cache", "count_ids"), profile=True)


def run(args: Namespace) -> int:
    budget = Budget(60 * args.minutes)
    texts, formats = _check(args)
    config = EngineConfig.of(**engine_options(args))
    from sparkdraft.engine.load import open_model
    from sparkdraft.operate.tune.engines import Engines

    with progress(f"opening {args.model}", redraw=SELDOM) as meter:
        opened = open_model(config)
        loading = partial(meter.stage, f"loading {args.model}")
        engines = Engines(opened, texts, args.output_len, loading)
        if engines.plan.device == "cpu" and set(formats) - {EXACT}:
            raise UserError(
                f"--kv-formats is {args.kv_formats}; on a CPU other formats save memory, not time: leave it out"
            )
        _introduce(opened, engines, len(texts), args.minutes)
        outcome = _search(config, opened, engines, formats, budget, meter)
    return _finish(args, config, opened, engines, outcome, budget)


# ---- the parts


def _check(args: Namespace) -> tuple[list[str], list[str]]:
    """The prompts, and the formats of the KV cache. Refuses before any weight is read."""
    if not 0 < args.minutes <= 24 * 60:
        raise UserError(f"--minutes is {args.minutes}; it must be above 0 and at most a day")
    if not 8 <= args.output_len <= 4096:
        raise UserError(f"--output-len is {args.output_len}; it must be between 8 and 4096")
    if args.out and (Path(args.out).is_dir() or not Path(args.out).absolute().parent.is_dir()):
        raise UserError(f"--out is {args.out}; give a file in a folder that exists")
    formats = [part.strip() for part in args.kv_formats.split(",") if part.strip()]
    if wrong := [name for name in formats if name not in kv_names()]:
        raise UserError(f"--kv-formats has '{wrong[0]}'; known are {', '.join(kv_names())}")
    from sparkdraft.operate.bench.prompts import PROMPTS, read_prompts

    if args.prompts and not Path(args.prompts).is_file():
        raise UserError(f"--prompts is {args.prompts}, which is not a file: check the path")
    classes = read_prompts(0 if args.prompts else PER_CLASS, Path(args.prompts or PROMPTS)).values()
    mixed = chain.from_iterable(classes) if args.prompts else chain.from_iterable(zip(*classes, strict=True))
    return list(mixed), formats


def _introduce(opened: Opened, engines: Engines, prompts: int, minutes: float) -> None:
    show_fallbacks(opened.fallbacks)
    subject, plan = opened.subject, engines.plan
    print(f"{subject.model} on {subject.machine}, drafter {subject.drafter or 'none'}; {prompts} prompts")
    depths = ",".join(map(str, engines.depths))
    print(
        f"now: threads {plan.threads}, max_step_tokens {plan.max_step_tokens}, max_seqs {plan.max_seqs}, "
        f"spec_depths {depths}, kv {plan.kv}; {minutes:g} minutes"
    )


def _search(
    config: EngineConfig, opened: Opened, engines: Engines, formats: list[str], budget: Budget, meter: Meter
) -> Outcome:
    """config: as the user gave it, without a profile's settings."""

    def stage(text: str) -> None:
        meter.stage(f"tuning: {text}", int(budget.spent), int(budget.seconds))

    def say(text: str) -> None:
        print(f"  {text}", flush=True)

    settings = {name: getattr(opened.config, name) for name in OPTIONS}
    old = {name: value for name, value in settings.items() if value != ENGINE_FIELDS[name].default}
    cores = engines.plan.threads if engines.plan.device != "cpu" else usable_cores()
    search = Search(engines.speed, LOADS, budget, stage, say, engines.uncounted)

    def todo() -> Iterator[Knob]:
        """Asked for when the old settings have run and there is time for more."""
        if engines.plan.device == "cuda":
            from sparkdraft.operate.tune.tiles import SHARE, find_tiles

            stage("tiles of kernels")
            assert engines.model
            end = budget.spent + SHARE * (budget.left - search.reserve())
            if found := find_tiles(engines.model, lambda: budget.spent < end, stage, say):
                engines.tables = found
                yield Knob(TILES, False, (True,), LOADS[:2])
        yield from knobs(config, engines.plan, engines.depths, cores, formats)

    return search.run(todo(), old)


def _finish(
    args: Namespace, config: EngineConfig, opened: Opened, engines: Engines, outcome: Outcome, budget: Budget
) -> int:
    print(outcome.conclusion())
    if outcome.skipped:
        print(f"not tried for lack of time (--minutes): {', '.join(outcome.skipped)}")
    written = list[Path | None]()  # None: it could not be
    settings = {name: value for name, value in outcome.new.items() if name != TILES and config.is_open(name)}
    if outcome.is_kept and settings:
        assert outcome.verdict
        gain = f"{outcome.verdict.ratio - 1:.1%} faster, noise {outcome.verdict.noise:.1%}"
        made = Profile(opened.subject, settings, date.today().isoformat(), gain, conditions_of(config))
        for each in [opened.subject.path, *([Path(args.out)] if args.out else [])]:
            written.append(_written(each, partial(made.write, each)))
    elif args.out:
        note(f"--out: {args.out} is not written, because no new setting that a profile holds was kept")
    path = written[0] if written else None
    if outcome.is_kept and outcome.new.get(TILES):
        written.append(_written(engines.tables.path, engines.tables.save))
    print(f"{budget.spent:.0f} s")
    if args.json:
        print(json.dumps(_summary(outcome, opened, path)))
    return 1 if None in written else 0


def _written(path: Path, write: Callable[[], object]) -> Path | None:
    try:
        write()
    except OSError as error:
        note(f"{path} cannot be written ({error.strerror or error}): free some space, or set SPARKDRAFT_CACHE")
        return None
    print(f"written: {path}")
    return path


def _summary(outcome: Outcome, opened: Opened, path: Path | None) -> dict[str, Any]:
    found: dict[str, Any] = asdict(opened.subject) | {"old": outcome.old, "new": outcome.new, "kept": outcome.is_kept}
    if outcome.verdict:
        found |= {"ratio": round(outcome.verdict.ratio, 4), "noise": round(outcome.verdict.noise, 4)}
        found["loads"] = {name: round(each.ratio, 4) for name, each in outcome.verdict.samples.items()}
    return found | {"tried": dict(outcome.tried), "skipped": outcome.skipped, "profile": str(path) if path else None}
