"""`sparkdraft bench check-speed` and `bench long-prompt`: ratios compared with expected ones, and a long prompt beside
streams.

bench/check_speed and operate/bench/long_prompt.py measure; flags, tables and JSON are here.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sparkdraft.cli.options import add_engine_flags, check_least, load_llm
from sparkdraft.core import UserError
from sparkdraft.operate.bench.check_speed.check import DEVICES, HEADER, check, conclusion, read_lines, select, status
from sparkdraft.util.progress import SELDOM, Meter, errors, progress

if TYPE_CHECKING:
    from sparkdraft.operate.bench.check_speed.check import Group


def configure_check(parser: ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", choices=DEVICES, help="whose lines to measure (default cpu)")
    parser.add_argument("--only", default="", metavar="LINE", help="comma-separated names of lines (default: all)")
    parser.add_argument("--list", action="store_true", help="print what each line compares, without measuring")


def run_check(args: Namespace) -> int:
    """Status 0 if every line holds, 1 if one fell, 2 if none fell and the machine was too noisy for some."""
    lines = read_lines(args.device)
    wanted = select(lines, args.only)
    if args.list:
        for line in lines.values():
            print(f"{line.name:<26} {line.what} (expected {line.expected:g}: {line.source})")
        return 0
    groups, begin, judged = _groups(args.device), time.monotonic(), []
    print(HEADER, flush=True)
    for each in check(groups, lines, wanted, _bar):
        print(each.row(), flush=True)
        judged.append(each)
    seconds = time.monotonic() - begin
    print(f"{conclusion(judged)} ({seconds:.0f} s)")
    found = {"bench": "check-speed", "device": args.device, "seconds": round(seconds, 1), "status": status(judged)}
    print(json.dumps(found | {"lines": [each.as_dict() for each in judged]}))
    return status(judged)


def _groups(device: str) -> tuple[Group, ...]:
    if device == "cpu":
        from sparkdraft.operate.bench.check_speed import cpu

        return cpu.GROUPS
    import torch

    from sparkdraft.operate.bench.check_speed import cuda

    if not torch.cuda.is_available():
        raise UserError("--device is cuda and torch finds no CUDA GPU here; leave it out to check the CPU's lines")
    return cuda.groups(cuda.Setup())


@contextmanager
def _bar(label: str) -> Iterator[Meter]:
    """A bar on a terminal; elsewhere a line when a measurement begins."""
    if not errors.is_terminal:
        print(f"measuring {label} ...", file=sys.stderr, flush=True)
    with progress(f"measuring {label}", redraw=SELDOM) as report:
        yield report


# ---- a long prompt beside streams


def configure_long_prompt(parser: ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=8, help="requests that decode meanwhile (default 8)")
    parser.add_argument("--prompt-len", type=int, default=3800, help="tokens of the prompt, about (default 3800)")
    parser.add_argument("--rounds", type=int, default=1, help="each is: alone, beside, beside, alone (default 1)")
    add_engine_flags(parser, without=("prefix_cache",))


def run_long_prompt(args: Namespace) -> int:
    check_least(args, streams=1, prompt_len=1, rounds=1)
    if args.max_seqs and args.streams >= args.max_seqs:
        raise UserError(
            f"--streams is {args.streams}; --max-seqs lets {args.max_seqs} requests run at once, the prompt among them"
            ": raise it or leave it out"
        )
    args.max_seqs = args.max_seqs or args.streams + 1
    from sparkdraft.operate.bench.long_prompt import LongPrompt, summary

    llm = load_llm(args, prefix_cache=False)
    test, alone, beside = LongPrompt(llm, args.streams, args.prompt_len), list[float](), []
    with _bar(f"a prompt of {len(test.prompt)} tokens beside {args.streams} streams") as report:
        for done in range(args.rounds):
            alone.append(test.alone())
            report(4 * done + 1, 4 * args.rounds)
            beside += [test.beside(), test.beside()]
            report(4 * done + 3, 4 * args.rounds)
            alone.append(test.alone())
    found = summary(alone, beside, llm.plan.max_step_ms / 1e3, len(test.prompt))
    print(_long_prompt_text(found, llm.plan.device, args.streams))
    print(json.dumps({"bench": "long-prompt", "model": args.model, "streams": args.streams} | found))
    return 0


def _long_prompt_text(found: dict[str, Any], device: str, streams: int) -> str:
    alone, beside, times = (found[f"first_token_{name}"] for name in ("alone_s", "beside_s", "ratio"))
    before, during = (
        f"median {gaps['median_ms']:.0f} ms, largest {gaps['largest_ms']:.0f} ms"
        for gaps in (found["gaps_before"], found["gaps_during"])
    )
    return (
        f"a prompt of {found['prompt_tokens']} tokens on {device}: first token after {alone:.2f} s alone, "
        f"{beside:.2f} s beside {streams} streams ({times:.2f} times)\n"
        f"gaps of the streams before it: {before}\n"
        f"gaps while it is read:         {during}; a step's target is {found['step_target_ms']:.0f} ms"
    )
