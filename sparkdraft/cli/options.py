"""Flags that several commands share, and how they become an EngineConfig and SamplingParams."""

from __future__ import annotations

import sys
from argparse import SUPPRESS, Action, ArgumentParser, BooleanOptionalAction, Namespace, _ArgumentGroup
from collections.abc import Collection, Iterable, Sequence
from dataclasses import Field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from sparkdraft.cli.console import show_fallbacks, show_plan
from sparkdraft.cli.parser import TYPES, Parser
from sparkdraft.config import ENGINE_FIELDS, NO_PROFILE, EngineConfig
from sparkdraft.core import SamplingParams, UserError
from sparkdraft.util.progress import progress

if TYPE_CHECKING:
    from sparkdraft.llm import LLM
    from sparkdraft.weights.checkpoint import Checkpoint

# What --help shows of the fields of EngineConfig and ServerConfig; --help-all shows the others too
ENGINE_COMMON = ("model", "device", "dtype", "weights", "max_model_len", "max_seqs", "kv", "threads", "spec", "drafter")
COMMON = (*ENGINE_COMMON, "host", "port", "api_key", "served_name")
SAMPLING_FLAGS = {
    "max_tokens": "maximum number of tokens to write",
    "temperature": "0 writes the most likely token, 1 follows the model's own probabilities",
    "top_p": "keep the likeliest tokens that hold this share of the probability",
    "top_k": "keep this many of the likeliest tokens (0: all)",
    "min_p": "keep tokens with at least this share of the likeliest one's probability",
    "repetition_penalty": "above 1 avoids tokens of the prompt and of the text so far",
    "presence_penalty": "above 0 avoids tokens of the text so far",
    "frequency_penalty": "above 0 avoids tokens of the text so far, each time they occur again",
    "repetition_limit": "end a text once this many tokens only repeat what is before (0: never)",
    "seed": "the same seed writes the same text",
}


def add_engine_flags(
    parser: ArgumentParser, without: Sequence[str] = (), profile: bool = False, **defaults: Any
) -> None:
    """Add a flag per field of EngineConfig, except those that the command decides itself. profile: whether a profile
    sets what the user leaves out; of other flags than --model only those that were given are then in the namespace.
    Without it no profile is used. defaults: those that differ here."""
    group, rare = parser.add_argument_group("engine"), list[Action]()
    group.add_argument("--verbose", action="store_true", help="print the plan and how it runs on this machine")
    parser.set_defaults(uses_profile=profile)
    for name, each in ENGINE_FIELDS.items():
        if name not in without and (profile or name != "profile"):
            is_open = profile and name != "model"
            added = add_field(group, each, defaults.get(name, each.default), SUPPRESS if is_open else None)
            rare += [] if name in COMMON else added
    hide(parser, rare)


def hide(parser: ArgumentParser, rare: list[Action]) -> None:
    assert isinstance(parser, Parser)
    parser.hide(rare)


def add_field(group: _ArgumentGroup, each: Field[Any], shown: Any, given: Any = None) -> list[Action]:
    """Add a flag for a config's field, or two. shown: the default in its help. given: the flag's value when it is left
    out, if that is something else."""
    text, flag = each.metadata["help"], _flag(each.name)
    if f"({shown}: " in text:  # the default is explained: one bracket has both
        text = text.replace(f"({shown}: ", f"(default {shown}: ")
    elif shown != "" and "default" not in text:
        text += f" (default {('off', 'on')[shown] if isinstance(shown, bool) else shown})"
    default = shown if given is None else given
    if isinstance(each.default, bool):
        return [group.add_argument(flag, action=BooleanOptionalAction, default=default, help=text)]
    kind: type = type(each.default)
    flags = [flag, each.metadata["also"]] if each.metadata["also"] else [flag]
    added = [group.add_argument(*flags, type=kind, default=default, metavar=TYPES[kind], help=text)]
    if off := each.metadata["off"]:
        switch: dict[str, Any] = {"dest": each.name, "action": "store_const", "const": off, "default": default}
        added.append(group.add_argument(f"--no-{flag[2:]}", **switch, help=f"{flag} {off}"))
    return added


def add_sampling_flags(parser: ArgumentParser, defaults: SamplingParams, from_model: Collection[str] = ()) -> None:
    """Flags that were not given are None, so that a command may take its defaults from the model.

    from_model: the flags whose defaults the model names.
    """
    group = add_sampling_group(parser, defaults, SAMPLING_FLAGS, from_model)
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may repeat")
    group.add_argument("--ignore-eos", action="store_true", help="write up to --max-tokens, past the model's own end")


def add_sampling_group(
    parser: ArgumentParser, defaults: SamplingParams, names: Iterable[str], from_model: Collection[str] = ()
) -> _ArgumentGroup:
    group = parser.add_argument_group("sampling")
    for name in names:
        default = "the model's own" if name in from_model else getattr(defaults, name)
        shown = "" if default is None else f" (default {default})"
        kind = flag_kind(name)
        group.add_argument(_flag(name), type=kind, metavar=TYPES[kind], help=SAMPLING_FLAGS[name] + shown)
    return group


def given_sampling(args: Namespace) -> dict[str, Any]:
    """The sampling parameters that are flags of this command and were given."""
    return {name: value for name in SAMPLING_FLAGS if (value := getattr(args, name, None)) is not None}


def flag_kind(name: str) -> type[int] | type[float]:
    """The type of a sampling flag's value."""
    return float if isinstance(getattr(SamplingParams(), name), float) else int


def sampling_params(args: Namespace, defaults: SamplingParams) -> SamplingParams:
    return replace(defaults, **given_sampling(args), stop=args.stop, ignore_eos=args.ignore_eos)


def engine_options(args: Namespace) -> dict[str, Any]:
    """The fields of EngineConfig that are flags of this command, and no profile where it uses none."""
    found = {name: getattr(args, name) for name in ENGINE_FIELDS if hasattr(args, name)}
    return found if args.uses_profile else found | {"profile": NO_PROFILE}


def load_llm(args: Namespace, checkpoint: Checkpoint | None = None, **more: Any) -> LLM:
    """Load the model with a progress bar, and print what runs differently from what was asked. checkpoint: read in
    place of the one that --model names. more: further engine options."""
    options = engine_options(args) | more
    EngineConfig(**options)  # refuse a bad flag before torch is imported
    with progress(f"opening {args.model}") as meter:
        from sparkdraft.llm import LLM

        def report(done: int, total: int) -> None:
            if done < total:
                meter.stage(f"loading {args.model}", done, total)
            else:
                meter.stage(f"warming up {args.model}")

        llm = LLM(progress=report, checkpoint=checkpoint, **options)
    if args.verbose:
        show_plan(llm.plan, llm.fallbacks(), llm.facts())
    else:
        show_fallbacks(llm.fallbacks())
    return llm


def temperature_list(text: str) -> list[float]:
    try:
        return [SamplingParams(temperature=float(part)).temperature for part in text.split(",")]
    except ValueError:
        raise UserError(f"--temperature is '{text}'; give comma-separated numbers, such as 0,0.7") from None


def check_least(args: Namespace, **least: int) -> None:
    """Refuse values of these flags that are too small."""
    for name, low in least.items():
        if getattr(args, name) < low:
            raise UserError(f"{_flag(name)} is {getattr(args, name)}; it must be at least {low}")


def standard_input() -> TextIO:
    if sys.stdin is None:  # the program was started with it closed
        raise UserError("standard input is closed, and there is nothing to read; leave it open, or give it a file")
    return sys.stdin


def read_text(path: str) -> str:
    """A file's text, or that of standard input if the path is '-'."""
    if path == "-":
        return as_text(standard_input().buffer.read(), "standard input")
    try:
        return as_text(Path(path).read_bytes(), path)
    except OSError as error:
        raise UserError(f"the file {path} cannot be read: {error.strerror}") from None


def as_text(raw: bytes, what: str) -> str:
    """The text without the byte-order mark that some editors write before it."""
    try:
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UserError(f"{what} is not valid UTF-8 at byte {error.start}; save it as UTF-8") from None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
