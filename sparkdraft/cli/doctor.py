"""`sparkdraft doctor`: what is wrong with this machine, what the engine really runs on it, and what to change.

It reads flags and prints; operate/doctor/examine.py looks. The exit status is 0 if all is fine, 1 if something
should be changed, and 2 if the model cannot run.
"""

from __future__ import annotations

import json
from argparse import SUPPRESS, ArgumentParser, Namespace

from sparkdraft.cli.options import add_field, engine_options
from sparkdraft.config import ENGINE_FIELDS, EngineConfig
from sparkdraft.util.progress import progress

HELP = "find what is wrong with this machine, and show what really runs on it"
EXAMPLES = """examples:
  sparkdraft doctor                              this machine, with the embedded model
  sparkdraft doctor --model Qwen/Qwen3-8B        the kernels, tiles and fallbacks of a model of yours
  sparkdraft doctor --json > report.json         for an issue: no keys, and no paths but the cache folder's
exit status: 0 all is fine, 1 something should be changed, 2 the model cannot run
"""
FLAGS = (
    "model",
    "device",
    "dtype",
    "weights",
    "kv",
    "drafter",
    "drafter_weights",
    "draft_vocab",
    "spec",
    "graphs",
    "threads",
    "profile",
)


def configure(parser: ArgumentParser) -> None:
    parser.set_defaults(uses_profile=True)  # as `serve` does: what really runs is asked
    group = parser.add_argument_group("engine")
    for name in FLAGS:
        add_field(group, ENGINE_FIELDS[name], ENGINE_FIELDS[name].default, SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead, for bug reports")


def run(args: Namespace) -> int:
    config = EngineConfig.of(**engine_options(args))
    with progress("looking at the machine") as meter:
        from sparkdraft.operate.doctor.examine import examine

        report = examine(config, meter)
    print(json.dumps(report.as_dict(), indent=1) if args.json else report.text())
    return report.exit_status
